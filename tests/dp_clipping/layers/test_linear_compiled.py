"""Private steps of compiled networks on fused kernels, beside one backward per sample in float64.

Without a GPU the kernels run in Triton's interpreter.
"""

import gc
import importlib.util
import shutil
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytest.importorskip("triton")

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.kernels.embedding import token_sums
from dp_clipping.layers.embedding.module import EmbeddingFactors
from dp_clipping.planning import plan
from dp_clipping.planning.cost_model import predict
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.step.sums import fused
from dp_clipping.step.sums.layer_plans import FusedPlans
from tests.dp_clipping.conftest import assert_close, clipped_sums, private
from tests.support import zoo

STYLES = (("flash_bookkeeping", "auto", "flat"), ("flash", "width", "per_layer"))
LIMIT = 0.5

# Float32 Gram products leave room for their rounding, in all that is clipped.
TOLERANCE = {"auto": 4e-5, "input_length": 4e-5, "width": 5e-4}


def compiled(
    network: nn.Module, whole: bool = True, backend: str = "aot_eager",
    mode: str = "flash_bookkeeping", clipping: str = "flat", **policy,
):  # fmt: skip
    """The network, private, compiled as a whole or block by block."""
    torch.compiler.reset()
    counters.clear()
    model = private(network, mode, LIMIT, clipping=clipping, policy={"tile_size": 16} | policy)
    for part in [network] if whole else network.blocks:
        part.compile(backend=backend, fullgraph=True)
    return model


def check(model, network: nn.Module, batch, loss, clipping="flat", tolerance=4e-5) -> None:
    """One step of the model, beside the oracle's of an equal network."""
    sums = clipped_sums(model, batch, loss)
    gradients = oracle.per_sample_gradients(network, batch, loss)
    norms = oracle.norms(gradients)
    torch.testing.assert_close(model.per_sample_gradient_norms.double(), norms, rtol=1e-5, atol=0)
    assert (norms > LIMIT).any()
    assert model.nonfinite_samples == 0
    assert_close(sums, oracle.clipped_sum(gradients, LIMIT, clipping), tolerance)


def transformer(layers: int = 1) -> nn.Module:
    return zoo.seeded(lambda: zoo.transformer(num_layers=layers))


def small() -> nn.Module:
    """What a transformer is made of, but for attention, on which a compiler takes seconds."""
    return zoo.seeded(
        lambda: zoo.Net(
            lambda net, x: net.head(torch.tanh(net.norm(net.hidden(net.word(x))))),
            word=nn.Embedding(zoo.VOCABULARY, 8),
            hidden=nn.Linear(8, 12),
            norm=nn.RMSNorm(12),
            head=nn.Linear(12, zoo.VOCABULARY),
        )
    )


def check_tokens(model, network: nn.Module, batch_size: int, length: int, **options) -> None:
    check(model, network, zoo.tokens(batch_size, length), zoo.cross_entropy, **options)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def algorithms(model) -> set[str]:
    return {choice.algorithm for choice in model.step_context.plans.last.choices}


# The bodies


def norms_and_sums_are_right_and_compiled_once(backend: str = "aot_eager") -> None:
    for mode, algorithm, clipping in STYLES:
        whole = (mode == "flash") == (clipping == "flat")
        options = dict(backend=backend, mode=mode, clipping=clipping, norm_algorithm=algorithm)
        model = compiled(transformer(), whole, **options)
        shared = dict(clipping=clipping, tolerance=TOLERANCE[algorithm])
        check_tokens(model, transformer(), 3, 6, **shared)
        with torch.compiler.set_stance("fail_on_recompile"):
            check_tokens(model, transformer(), 3, 6, **shared)
        assert algorithm == "auto" or algorithms(model) == {algorithm}
        assert model.step_context.plans.last.is_one_pass == (mode != "flash")


def other_sizes_are_compiled_once_more() -> None:
    """A dimension that changes becomes a variable."""
    for algorithm in ("input_length", "width"):
        model = compiled(small(), norm_algorithm=algorithm)
        for batch_size, length in ((4, 6), (4, 9), (3, 7)):
            check_tokens(model, small(), batch_size, length, tolerance=TOLERANCE[algorithm])
        assert graphs() == 3
        with torch.compiler.set_stance("fail_on_recompile"):
            check_tokens(model, small(), 5, 8, tolerance=TOLERANCE[algorithm])
            check_tokens(model, small(), 2, 10, tolerance=TOLERANCE[algorithm])


def a_budget_takes_a_second_backward() -> None:
    model = compiled(transformer(), memory_budget=8000)
    for _ in range(2):
        check_tokens(model, transformer(), 3, 6)
        assert not model.step_context.plans.last.is_one_pass
        assert not all(choice.recomputed for choice in model.step_context.plans.last.choices)


class Dropping(nn.Module):
    """Its layers' factors of nine tokens take fewer bytes than their gradients.

    An eager forward saves more than either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)
        self.rate = 0.25

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(10):
            x = torch.sin(x)
        return self.second(nn.functional.dropout(x, self.rate) if self.rate else x).sum(1)


def a_forward_that_saves_little_is_planned_again() -> None:
    """Once, with the same random numbers; 0 bytes are those of a device that counts none."""
    batch = zoo.numbers(4, 9, 40, out=(40,))
    fast = lambda use, algorithm, rates: replace(  # noqa: E731
        predict(use, algorithm, rates), seconds=float(algorithm != "gradient")
    )
    drawn, found = {}, {}
    for saved in (0, 1 << 30, 1):
        network, plain = zoo.seeded(Dropping), zoo.seeded(Dropping)
        model, drawn[saved], plain.rate = compiled(network), [], 0.0
        held = patch.object(FusedPlans, "_saved", property(lambda self, saved=saved: saved))
        with patch.object(plan, "predict", fast), held:
            for step in range(2):
                torch.manual_seed(step)
                drawn[saved] += [model(batch[0]).detach(), torch.get_rng_state()]
            network.rate = 0.0
            check(model, plain, batch, zoo.product)
        found[saved] = algorithms(model)
    assert found == {n: {"input_length" if n == 1 else "gradient"} for n in found}
    assert all(all(map(torch.equal, other, drawn[0])) for other in drawn.values())


class Changing(nn.Module):
    """How many tokens its second layer sees, and how often, inputs do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.keep, self.times = 3, 1

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))[:, : self.keep]
        for _ in range(self.times):
            x = self.second(x)
        return x.sum(1)


def changing(keep: int = 3) -> Changing:
    network = zoo.seeded(Changing)
    network.keep = keep
    return network


BATCH = zoo.numbers(4, 6, 5, out=(5,))


def another_number_of_tokens_is_refused() -> None:
    """Also where autograd would add up the gradient of a slot of one token."""
    for known, given in ((1, 2), (3, 2)):
        network = changing(known)
        model = compiled(network, norm_algorithm="input_length")
        check(model, changing(known), BATCH, zoo.product)
        network.keep = given
        with pytest.raises(Exception, match="second is given another number of tokens"):
            clipped_sums(model, BATCH, zoo.product)
        model.reset_batch_layouts()
        check(model, changing(given), BATCH, zoo.product)


class Repeating(nn.Module):
    """A block that is called as often as it says: autograd meets its slots that often."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))])
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.blocks[0](x)
        return x.sum(1)


def a_second_use_leaves_all_samples_out() -> None:
    """Its norm would miss the cross terms."""
    for build, algorithm, clipping in (
        (changing, "auto", "flat"), (lambda: zoo.seeded(Repeating), "width", "per_layer"),
    ):  # fmt: skip
        network = build()
        whole = isinstance(network, Changing)
        model = compiled(network, whole, clipping=clipping, norm_algorithm=algorithm)
        options = dict(clipping=clipping, tolerance=TOLERANCE[algorithm])
        check(model, build(), BATCH, zoo.product, **options)
        network.times = 2
        clipped_sums(model, BATCH, zoo.product)
        assert model.nonfinite_samples == 4
        used_twice = network.second if whole else network.blocks[0]
        assert not any(p.grad.any() for p in used_twice.parameters() if p.dim() == 2)
        assert clipping == "per_layer" or not any(p.grad.any() for p in network.parameters())


def transposed_weights_and_autocast() -> None:
    case = zoo.BY_NAME["gpt2_lm"]
    for algorithm in ("auto", "input_length"):
        if importlib.util.find_spec("transformers"):
            network = case.build()
            network.blocks = [block.mlp for block in network.transformer.h]
            model = compiled(network, whole=False, norm_algorithm=algorithm)
            check(model, case.build(), case.batch(4), case.per_sample_loss)
        model = compiled(changing(), norm_algorithm=algorithm)
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                sums = clipped_sums(model, BATCH, zoo.product)
        assert model.step_context.plans.last.uses[0].element_size == 2
        assert graphs() == 1
        gradients = oracle.per_sample_gradients(changing(), BATCH, zoo.product)
        assert_close(sums, oracle.clipped_sum(gradients, LIMIT), 2e-2)


class Looking(nn.Module):
    """Looks words up as often as it says, and positions, which all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(zoo.VOCABULARY, 8, padding_idx=2), nn.Embedding(9, 8)
        self.far, self.head = nn.Linear(1, 8), nn.Linear(8, zoo.VOCABULARY)
        self.times = 1

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])[None]
        x = self.place(places) + self.far(places[..., None].float())
        for _ in range(self.times):
            x = x + self.word(ids)
        return self.head(torch.tanh(x))


def look_ups_leave_ids_and_no_table() -> None:
    """G [B, V, d] is not formed; ids repeat within a sample, and one of them is padding."""
    for length, sizes in ((1, (3,)), (6, (3, 3, 5))):
        model = compiled(zoo.seeded(Looking))
        with patch.object(EmbeddingFactors, "dense", side_effect=AssertionError("G was formed")):
            for batch_size in sizes:
                check_tokens(model, zoo.seeded(Looking), batch_size, length)


def a_second_look_up_leaves_all_samples_out() -> None:
    network = zoo.seeded(Looking)
    model = compiled(network)
    check_tokens(model, zoo.seeded(Looking), 3, 6)
    network.times = 2
    uses: list = []
    noted = lambda several, size: uses.extend(several) or token_sums(several, size)  # noqa: E731
    with patch.object(fused, "token_sums", noted):
        clipped_sums(model, zoo.tokens(3, 6), zoo.cross_entropy)
    assert all(use.ids.max() < use.vocabulary for use in uses)  # else other memory is written
    assert uses
    assert model.nonfinite_samples == 3
    assert not any(p.grad.any() for p in network.parameters())


def steps_are_freed() -> None:
    """Also that of a forward without a backward: at most the last one is left."""
    model = compiled(small())
    context = model.step_context

    def steps() -> int:
        gc.collect()
        return sum(type(x) is PrivateStep and x.context is context for x in gc.get_objects())

    for _ in range(3):
        model(*zoo.tokens(3, 6)[:-1])
        check_tokens(model, small(), 3, 6)
        assert steps() == 0


BODIES = [
    norms_and_sums_are_right_and_compiled_once,
    other_sizes_are_compiled_once_more,
    a_budget_takes_a_second_backward,
    a_forward_that_saves_little_is_planned_again,
    another_number_of_tokens_is_refused,
    a_second_use_leaves_all_samples_out,
    transposed_weights_and_autocast,
    look_ups_leave_ids_and_no_table,
    a_second_look_up_leaves_all_samples_out,
    steps_are_freed,
]


LONG = (
    other_sizes_are_compiled_once_more,
    a_budget_takes_a_second_backward,
    a_forward_that_saves_little_is_planned_again,
    transposed_weights_and_autocast,
    a_second_look_up_leaves_all_samples_out,
    a_second_use_leaves_all_samples_out,
    another_number_of_tokens_is_refused,
)


@pytest.mark.parametrize(
    "body",
    [pytest.param(b, marks=[pytest.mark.slow] if b in LONG else []) for b in BODIES],
    ids=lambda body: body.__name__,
)
def test_in_the_interpreter(interpreter, body):
    interpreter.run(body)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_by_inductor_in_the_interpreter(interpreter):
    interpreter.run(norms_and_sums_are_right_and_compiled_once, "inductor")
