"""Which account covers which arguments, and which have none."""

from dp_clipping import CorrelatedNoise
from dp_clipping.accounting.mechanism import ADD_OR_REMOVE, ZERO_OUT
from dp_clipping.arguments.sampled import accounted
from dp_clipping.sampling.schemes import SAMPLINGS


def of(noise="gaussian", sampling="poisson", **more):
    return accounted(noise, sampling, units=60, **more)


def test_each_combination_has_a_name_of_its_own():
    """What an engine, its ranks and its checkpoints compare."""
    found = [of(sampling=s) for s in ("poisson", "balls_in_bins", "cyclic")]
    found += [
        of(sampling="truncated_poisson", max_batch_size=20),
        of(sampling="truncated_poisson", max_batch_size=21),
        of(CorrelatedNoise(2), "cyclic"),
        of(CorrelatedNoise(3), "cyclic"),
    ]
    assert len({mechanism.name for mechanism in found}) == len(found)
    assert {m.sampler for m in found} == set(SAMPLINGS)


def test_cyclic_batches_are_for_another_relation():
    for noise in ("gaussian", CorrelatedNoise(2)):
        assert of(noise, "cyclic").relation == ZERO_OUT
    assert of(sampling="balls_in_bins").relation == ADD_OR_REMOVE
