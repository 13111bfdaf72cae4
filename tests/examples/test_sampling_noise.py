"""The table of noise multipliers is that of `make_private_with_epsilon`."""

import pytest

from ddp_by_hand.examples import sampling_noise


@pytest.mark.slow
def test_a_row(capsys):
    options = "--samples 200 --batch-size 50 --max-batch-size 90 --epochs 2 --epsilons 4"
    sampling_noise.main([*options.split(), "--delta", "1e-3"])
    head, _, row = capsys.readouterr().out.strip().splitlines()
    assert head.startswith("| epochs | ε | poisson | truncated_poisson | balls_in_bins | cyclic |")
    epochs, epsilon, *found = (float(cell) for cell in row.strip("| ").split(" | "))
    assert (epochs, epsilon) == (2, 4)
    poisson, truncated, bins, cyclic = found
    assert 0.3 < bins < poisson < 1.01 * truncated < 1.05 * poisson
    assert poisson < cyclic < 2
