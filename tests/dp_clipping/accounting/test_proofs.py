"""Each value of each option has a page of docs/proofs that is there, or is said to be unproved."""

import inspect
from pathlib import Path

import pytest

from dp_clipping import MODES, PrivacyEngine
from dp_clipping.accounting.proofs import PAGES, REGISTERED, WHY, covered_by, named
from dp_clipping.arguments.checks import CLIPPINGS
from dp_clipping.clipping.coefficients import CLIPPING_FUNCTIONS
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.sampling.schemes import SAMPLINGS

PROOFS = Path(__file__).parents[3] / "docs/proofs"
PLANNED = [
    named(str(CorrelatedNoise(bands=4))), named(str(CorrelatedNoise(4, epochs=2, batches=100))),
]  # fmt: skip
VALUES = {
    "accountant": ("pld", "prv", "rdp", "gdp"),
    "grad_sample_mode": MODES,
    "clipping": CLIPPINGS,
    "clipping_function": (*CLIPPING_FUNCTIONS, REGISTERED),
    "sampling": SAMPLINGS,
    "noise_mechanism": ("gaussian", *PLANNED, named("own (1a2b)")),
    "poisson_sampling": (True, False),
    "secure_mode": (True, False),
    "adaptive_threshold with sampling": SAMPLINGS,
    "examples_per_unit": ("1", "more"),
    "examples_per_step": ("all", "some"),
    "views": ("any number",),
    "layers": ("built in", REGISTERED),
}
NO_PART_OF_A_PROOF = {
    "module", "optimizer", "criterion", "data_loader",  # objects
    "noise_multiplier", "max_grad_norm", "gamma", "sample_rate", "steps", "max_batch_size",
    "expected_batch_size", "loss_reduction", "unit_ids",  # numbers that all pages are for
    "batch_first", "wrap_model", "rand_on_empty",  # what is released does not depend on these
    "norm_algorithm", "memory_budget", "tile_size", "norm_reduction", "cuda_graph",
    "fused_step",  # how
    "data_parallel_group", "noise_generator",  # "ranks"; a fixed seed warns of itself
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_each_value_has_a_page_or_a_reason(name):
    for value in VALUES[name]:
        page = PAGES[name][value]
        assert (PROOFS / f"{page}.md").is_file() if page else WHY[name], (name, value)


def test_a_registered_name_is_not_ours():
    assert PLANNED == ["correlated", "correlated"]
    assert named("correlated noise of 4 bands (1a2b3c)") == REGISTERED


def test_no_argument_of_make_private_is_left_out():
    arguments = set(inspect.signature(PrivacyEngine.make_private).parameters) - {"self"}
    known = {name.split(" with ")[0] for name in PAGES}
    assert arguments - known == NO_PART_OF_A_PROOF


def test_what_is_not_known_is_unproved():
    assert covered_by([{"sampling": "shuffled"}]) == (
        [], ["sampling='shuffled': no page covers it"]
    )  # fmt: skip
    pages, unproved = covered_by([{"sampling": "poisson"}, {"sampling": "cyclic"}])
    assert (pages, unproved) == (["correlated_noise", "gaussian_poisson"], [])
