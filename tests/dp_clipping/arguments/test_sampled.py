"""How a training samples its data: arguments that do not go together, and what follows of them."""

import pytest

from dp_clipping import CorrelatedNoise
from dp_clipping.arguments.sampled import Sampled
from tests.support import engine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling": "shuffled"}, "choose one of poisson, "),
        ({"sampling": None}, "sampling is None"),
        ({"sampling": "cyclic", "sample_rate": 0.1}, "does not go with sample_rate"),
        ({"sampling": "cyclic", "poisson_sampling": False}, "does not go with poisson_sampling"),
        ({"sampling": "cyclic", "noise_mechanism": "mine"}, "does not go with noise_mechanism"),
        ({"sampling": "poisson", "noise_mechanism": CorrelatedNoise(2)}, "sampling=\"cyclic\""),
        ({"sampling": "balls_in_bins", "noise_mechanism": CorrelatedNoise(2)}, "does not go with"),
        ({"sampling": "truncated_poisson"}, "max_batch_size is missing"),
        ({"examples_per_unit": 2, "rand_on_empty": True}, "rand_on_empty=True makes up"),
        ({"unit_ids": [1, 2]}, "examples_per_unit=1 is one example"),
        ({"poisson_sampling": False, "steps": 3}, "are those of Poisson sampling"),
        ({"sampling": "truncated_poisson", "max_batch_size": 0}, "max_batch_size is 0"),
        ({"sampling": "truncated_poisson", "max_batch_size": True}, "max_batch_size is True"),
        ({"sampling": "poisson", "max_batch_size": 8}, "is for sampling=\"truncated_poisson\""),
    ],
)  # fmt: skip
def test_what_no_account_covers_is_refused_by_name(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Sampled(**arguments)


def test_other_arguments_are_left_out():
    loader = engine.arguments()["data_loader"]
    given = {"examples_per_unit": 3, "clipping": "flat", "sample_rate": None}
    sampled = Sampled.of(given, data_loader=loader)
    assert (sampled.rates, sampled.units_of_data) == ((1 / 4, 4), 8)
    assert sampled.expected_units(world_size=2) == 2.0
    with pytest.raises(TypeError, match="data_loader is None"):
        Sampled.of(given, data_loader=None)
