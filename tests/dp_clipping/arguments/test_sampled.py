"""How a training samples its data: arguments that do not go together, and what follows of them."""

import pytest

from dp_clipping.arguments.sampled import Sampled
from tests.support import engine


def test_other_arguments_are_left_out():
    loader = engine.arguments()["data_loader"]
    given = {"examples_per_unit": 3, "clipping": "flat", "sample_rate": None}
    sampled = Sampled.of(given, data_loader=loader)
    assert (sampled.rates, sampled.units_of_data) == ((1 / 4, 4), 8)
    assert sampled.expected_units(world_size=2) == 2.0
    with pytest.raises(TypeError, match="data_loader is None"):
        Sampled.of(given, data_loader=None)
