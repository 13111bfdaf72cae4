"""`engine.check`: what is right passes, what is broken fails by name, training never notices."""

import copy
import importlib.util
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_by_hand.experiments.verify_correctness import findings
from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping import MODES, PrivacyEngine
from dp_clipping.guard.guard import LayoutDiscovery
from dp_clipping.step.sums import plain
from dp_clipping.step.sums.plain import Plain
from dp_clipping.trials.tolerances import NORM, SUM, Tolerance
from dp_clipping.verification import check
from dp_clipping.verification.report import Check
from tests.dp_clipping.sampling.test_memory_manager import Bags
from tests.support import replicas, zoo
from tests.support.backwards import with_backward
from tests.support.engine import CLASSES, build, data, on_any_batches, step

PRIVATE = [mode for mode in MODES if mode != "no_dp"]
SIZE = 4
C = 0.5


def private(module: nn.Module, criterion=None, engine=None, **options) -> SimpleNamespace:
    """What `make_private` returns, for batches that do not come from the loader."""
    return on_any_batches(
        module=module, criterion=criterion or zoo.Criterion(zoo.squared_error), engine=engine,
        **{"max_grad_norm": C, **options},
    )  # fmt: skip


def loss_of_zoo(model, criterion, batch):
    return criterion(oracle.forward(model, batch[0]), batch[1])


def check_case(case: zoo.Case, dtype=torch.float32, device="cpu", **options) -> Check:
    run = private(case.build().to(device, dtype), zoo.Criterion(case.per_sample_loss), **options)
    batch = oracle.move(case.batch(SIZE), dtype=dtype)
    return run.engine.check(run.model, batch, loss=loss_of_zoo)


def mlp() -> nn.Module:
    return zoo.seeded(lambda: zoo.mlp(6, 8, 3))


def mlp_batch(size: int = SIZE) -> tuple[Tensor, Tensor]:
    return zoo.numbers(size, 6, out=(3,))


def check_mlp(module: nn.Module | None = None, **options) -> Check:
    run = private(module or mlp(), **options)
    return run.engine.check(run.model, mlp_batch())


@pytest.mark.parametrize(
    "case",
    zoo.parameters(
        "transformer_tied", "half_frozen", "unused", "time_major_flattened", "padding_idx_tied",
        "group_norm", "multihead_attention", "lora_labels",
    ),
)  # fmt: skip
def test_networks(case):
    for clipping, mode in (("flat", "flash_bookkeeping"), ("per_layer", "ghost")):
        report = check_case(case, grad_sample_mode=mode, clipping=clipping)
        assert report.ok, report


class WithTable(nn.Module):
    """Compares outputs with the rows of a table, an argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x, table):
        return self.linear(x) @ table.T


@pytest.mark.parametrize("rows", [3, 9])
def test_an_argument_without_a_row_for_each_sample(rows):
    run, table = private(zoo.seeded(WithTable)), torch.randn(rows, 2)
    batch = zoo.numbers(SIZE, 6, out=(rows,))

    def loss(model, criterion, batch):
        return criterion(model(batch[0], table), batch[1])

    report = run.engine.check(run.model, batch, loss=loss)
    assert report.ok, report


def rounded_by_batch(net: zoo.Net, x: Tensor) -> Tensor:
    """Rounds a batch of one otherwise in float32, as libraries do that choose kernels by shape.

    What is left of it is multiplied by 10,000: a backward of one sample is off by more than 1e-4.
    """
    hidden = net.first(x)
    if len(x) == 1 and x.dtype == torch.float32:
        hidden = hidden * (1 + 2**-20)
    return net.head(torch.sin(1e4 * hidden))


def without_float64(net: zoo.Net, x: Tensor) -> Tensor:
    """A cast forbids float64."""
    return net.head(torch.tanh(net.first(x.float())))


def within_autocast(net: zoo.Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return without_float64(net, x).float()


def rounding(function, scale: float = 1.0) -> nn.Module:
    """`scale`: of the head's weight, before which the gradients of two classes are opposite."""
    torch.manual_seed(0)
    net = zoo.Net(function, first=nn.Linear(6, 32), head=nn.Linear(32, 2))
    with torch.no_grad():
        net.head.weight.mul_(scale)
        net.head.bias.zero_()
    return net


def apart() -> Tensor:
    return torch.randn(8, 6)


def alike() -> Tensor:
    return torch.randn(1, 6).expand(8, 6) + 1e-6 * torch.randn(8, 6)


ROUNDED = {  # network, inputs, the dtype whose tolerance counts, a factor that is a fault
    "a sample's own backward": (lambda: rounding(rounded_by_batch), apart, None, 1.2),
    "a sum that cancels": (lambda: rounding(without_float64, 1e-6), alike, torch.float32, 1.02),
    "what layers compute in": (lambda: rounding(within_autocast), apart, torch.bfloat16, 1.2),
}
BOTH, ONE = torch.tensor([0, 1] * 4), torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_is_no_fault_and_a_wrong_sum_is_one(name, monkeypatch):
    """Nothing of the network changes."""
    make, draw, dtype, factor = ROUNDED[name]
    network, inputs = make(), draw()
    run = private(copy.deepcopy(network), nn.CrossEntropyLoss(), grad_sample_mode="bookkeeping")
    report = run.engine.check(run.model, (inputs, BOTH))
    assert report.ok, report
    if dtype is not None:
        assert report.tolerance.norm == NORM.of(dtype)
        assert report.tolerance.gradient == SUM.of(dtype)
    after = run.network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in network.state_dict().items())
    break_sums(monkeypatch, factor, "head.bias")
    report = run.engine.check(run.model, (inputs, ONE))
    assert not report.ok
    assert report.worst_parameter == "head.bias"
    if name == "a sample's own backward":
        monkeypatch.undo()
        monkeypatch.setattr("dp_clipping.verification.check.in_float64", lambda *_: None)
        assert not run.engine.check(run.model, (inputs, BOTH)).ok, "the case is one"


def test_rounding_of_16_bit_numbers_is_measured_where_it_exceeds_the_tolerance(monkeypatch):
    monkeypatch.setattr(check, "SUM", Tolerance(1e-4, 1e-4, 1e-4))
    run = private(mlp())
    with torch.autocast("cpu", torch.bfloat16):
        report = run.engine.check(run.model, mlp_batch())
        assert report.ok, report
        break_sums(monkeypatch, 1.2, "0.bias")
        assert not run.engine.check(run.model, mlp_batch()).ok


class StochasticDepth(nn.Module):
    """Leaves out its first layer for some samples, in evaluation too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        keeps = (torch.rand(len(x), 1) > 0.3).float()
        return self.head(x + keeps * torch.tanh(self.first(x)))


def test_randomness_is_named():
    report = check_mlp(StochasticDepth())
    assert not report.ok
    (fault,) = report.faults
    assert "differs between two runs of the same sample" in fault
    assert "torch.rand" in fault


@pytest.mark.parametrize("mode", PRIVATE)
def test_modes(mode):
    for clipping in ("flat", "per_layer"):
        for function in ("abadi", "automatic"):
            options = dict(clipping=clipping, clipping_function=function)
            report = check_mlp(grad_sample_mode=mode, **options)
            assert report.ok, report
            assert report.setting == f"{mode}, {clipping}, {SIZE} samples"


def test_the_expected_side_is_the_definition():
    """Norms of the oracle, thresholds as they are now, and those of one layer only clipped."""
    expected = oracle.norms(oracle.per_sample_gradients(mlp(), mlp_batch(), zoo.squared_error))
    middle = float(expected.sort().values[1:3].mean())
    run = private(mlp())
    run.optimizer.max_grad_norm = middle
    report = run.engine.check(run.model, mlp_batch())
    torch.testing.assert_close(report.expected_norms, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(report.norms.double(), expected, rtol=1e-6, atol=0)
    assert report.clipped == report.expected_clipped == 0.5
    clip_norms = [1e9, float(expected.max()) / 10]
    report = check_mlp(clipping="per_layer", max_grad_norm=clip_norms)
    assert report.ok, report
    assert report.clipped == report.expected_clipped > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_numbers(dtype):
    for name in ("transformer", "padding_idx_tied"):
        report = check_case(zoo.BY_NAME[name], dtype)
        assert report.ok, report
        assert report.tolerance.norm == NORM.of(dtype)
        assert report.tolerance.gradient == SUM.of(dtype)


def test_autocast():
    run = private(mlp())
    with torch.autocast("cpu", torch.bfloat16):
        report = run.engine.check(run.model, mlp_batch())
    assert report.ok, report
    assert report.tolerance.norm == NORM.two
    assert report.tolerance.gradient == SUM.two
    assert report.norm_error > 1e-5  # of 16-bit products


def test_tolerances_are_those_of_verify_correctness():
    for dtype, theirs in findings.TOLERANCES.items():
        assert (NORM.of(dtype), SUM.of(dtype)) == (theirs.norm, theirs.gradient)


def test_a_sample_that_is_not_finite_adds_nothing():
    inputs, targets = mlp_batch()
    inputs[1, 0] = torch.nan
    for mode in ("bookkeeping", "ghost"):
        run = private(mlp(), grad_sample_mode=mode)
        report = run.engine.check(run.model, (inputs, targets))
        assert report.ok, report
        assert not report.norms[1].isfinite()
        assert not report.expected_norms[1].isfinite()
        assert report.norm_errors[1] == 0
        assert report.clipped == report.expected_clipped == 1


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_hugging_face():
    """Batches of a tokenizer, alone or with labels beside it, and targets that are flattened."""
    case = zoo.BY_NAME["llama_lm"]
    words, targets = case.batch(SIZE)

    def of_dict(model, criterion, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["mask"]).logits
        return criterion(logits.flatten(0, 1), batch["labels"].flatten(), shape=logits.shape)

    def of_pair(model, criterion, batch):
        logits = model(**batch[0]).logits
        assert model.config.vocab_size == logits.shape[-1]
        return criterion(logits.flatten(0, 1), batch[1].flatten(), shape=logits.shape)

    plain = {"input_ids": words["input_ids"], "mask": words["attention_mask"], "labels": targets}
    run = private(case.build(), nn.CrossEntropyLoss())
    norms = []
    for batch, loss in (
        (plain, of_dict), (UserDict(plain), of_dict), ([UserDict(words), targets], of_pair),
    ):  # fmt: skip
        report = run.engine.check(run.model, batch, loss=loss)
        assert report.ok, report
        norms.append(report.norms)
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[0], norms[2])


def test_batch_first_false():
    """Inputs [T, B, p] of as many tokens as samples; targets [B]."""
    inputs = torch.randn(SIZE, SIZE, 5, generator=torch.Generator().manual_seed(1))
    classes = torch.arange(SIZE) % 3
    run = private(
        zoo.seeded(lambda: zoo.two_linears(lambda net, x: net.b(torch.tanh(net.a(x)).mean(0)))),
        nn.CrossEntropyLoss(), batch_first=False,
    )  # fmt: skip
    report = run.engine.check(run.model, (inputs, classes))
    assert report.ok, report


def check_kernels() -> None:
    """Both `flash` modes on their kernels; Gram norms leave room for their rounding."""
    case = zoo.BY_NAME["tokens"]
    run = private(mlp())
    assert run.engine.check(run.model, mlp_batch()).ok
    assert run.model.step_context.plans.last is None
    assert not run.model.step_context.plans.known
    for mode, options in (
        ("flash_bookkeeping", {}), ("flash_bookkeeping", {"clipping": "per_layer"}),
        ("flash", {"norm_algorithm": "width"}),
    ):  # fmt: skip
        report = check_case(case, grad_sample_mode=mode, **options)
        assert report.ok, report
        width = "norm_algorithm" in options
        room = report.tolerance.gradient - SUM.four
        assert room == (pytest.approx(6 * check.GRAM_ROUNDING) if width else 0)
        assert (report.gradient_error > 1e-5) == width


def test_kernels(interpreter):
    interpreter.run(check_kernels)


def test_compiled_networks():
    """The private step runs compiled, as in training, beside one that does not."""
    lengths = set()

    def backend(graph, inputs):
        lengths.update(len(x) for x in inputs if isinstance(x, Tensor) and x.dim())
        return graph.forward

    network = mlp()
    run = private(network)
    torch.compiler.reset()
    network.compile(backend=backend)
    report = run.engine.check(run.model, mlp_batch())
    assert report.ok, report
    assert SIZE in lengths
    assert 1 not in lengths


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype):
    """Batches come from the loader's CPU; TensorFloat-32 is not used."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for name in ("transformer_tied", "wide", "llama_lm"):
            for clipping in ("flat", "per_layer"):
                report = check_case(zoo.BY_NAME[name], dtype, "cuda", clipping=clipping)
                assert report.ok, report
    finally:
        torch.set_float32_matmul_precision(before)


def break_sums(monkeypatch, factor: float, name: str) -> None:
    """One parameter's sum is too large."""
    right = Plain.sums

    def sums(self, records, values):
        for record, total in zip(records, right(self, records, values), strict=True):
            yield total * factor if record.name == name else total

    monkeypatch.setattr(Plain, "sums", sums)


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost", "per_sample"])
def test_a_sum_that_is_two_percent_too_large(monkeypatch, mode):
    break_sums(monkeypatch, 1.02, "0.bias")
    report = check_mlp(grad_sample_mode=mode)
    assert not report.ok
    assert report.worst_parameter == "0.bias"
    assert report.gradient_error == pytest.approx(0.02, rel=0.02)
    assert report.norm_error < report.tolerance.norm
    (fault,) = report.faults
    assert fault == "the clipped sum of 0.bias is off by 2.0e-02 (at most 2.0e-04)"


def test_a_norm_without_biases(monkeypatch):
    def without_vectors(gradients):
        squares = squared_norms(gradients)
        return squares if gradients.dim() > 2 else torch.zeros_like(squares)

    squared_norms = plain.squared_norms
    monkeypatch.setattr(plain, "squared_norms", without_vectors)
    report = check_mlp(max_grad_norm=1e9)  # nothing is clipped: all sums are right
    assert not report.ok
    assert report.gradient_error < report.tolerance.gradient
    (fault,) = report.faults
    assert fault.startswith("the norm of sample ")
    report = check_mlp()
    assert len(report.faults) == 2


def test_a_norm_of_one_group(monkeypatch):
    """What is a small part of the whole norm may be all of a group's."""
    squared_norms = plain.squared_norms
    monkeypatch.setattr(
        plain, "squared_norms", lambda g: squared_norms(g) * (1.21 if g.shape[1:] == (3,) else 1)
    )

    def network() -> nn.Module:
        net = zoo.seeded(
            lambda: zoo.Net(
                lambda net, x: net.b(100 * net.a(x)), a=nn.Linear(6, 8), b=nn.Linear(8, 3)
            )
        )
        net.b.weight.requires_grad_(False)
        return net

    assert check_mlp(network()).ok
    report = check_mlp(network(), clipping="per_layer")
    assert report.norm_error == pytest.approx(0.1, rel=0.01)
    assert not report.ok


def mixed(gy: Tensor) -> Tensor:
    """Is right for one sample."""
    return gy + 0.05 * (gy.flip(0) - gy)


def test_a_backward_that_mixes_samples(monkeypatch):
    """Forward gives no hint; what lies behind it, seen from the loss, is wrong, the rest right.

    It would be refused before there is a report.
    """
    monkeypatch.setattr(LayoutDiscovery, "_check", lambda self, batch: None)
    network = zoo.seeded(
        lambda: zoo.Net(
            lambda net, x: net.b(torch.tanh(with_backward(net.a(x), mixed))),
            a=nn.Linear(6, 8), b=nn.Linear(8, 3),
        )
    )  # fmt: skip
    report = check_mlp(network, max_grad_norm=1e9)
    assert not report.ok
    assert report.worst_parameter in ("a.weight", "a.bias")
    assert len(report.faults) == 2


def test_a_bad_sample_that_is_let_in(monkeypatch):
    """Its coefficient is 0, and 0 · NaN is NaN."""
    monkeypatch.setattr(
        plain, "finite_samples", lambda bounds: torch.ones_like(bounds[0], dtype=torch.bool)
    )
    inputs, targets = mlp_batch()
    inputs[1, 0] = torch.nan
    run = private(mlp())
    report = run.engine.check(run.model, (inputs, targets))
    assert report.gradient_error == torch.inf
    assert not report.ok


def refused(run, batch=None, message: str = "", kind=ValueError, **options) -> None:
    with pytest.raises(kind, match=message) as caught:
        run.engine.check(run.model, mlp_batch() if batch is None else batch, **options)
    assert "\n" not in str(caught.value)


def test_refusals():
    run = private(mlp())
    inputs, targets = mlp_batch()
    refused(SimpleNamespace(engine=PrivacyEngine(), model=run.model), message="not one that this")
    refused(private(mlp(), grad_sample_mode="no_dp"), message="no_dp clips nothing: choose another")
    refused(run, (inputs[:0], targets[:0]), "no samples.*take another")
    refused(run, {"x": inputs}, "pair of inputs and targets but a dict.*loss=lambda model")
    refused(run, (inputs, targets, targets), "but a tuple.*loss=lambda model")
    refused(run, message="loss returned Tensor.*return what that returns",
            loss=lambda model, criterion, batch: model(batch[0]).sum())  # fmt: skip
    refused(run, message="loss returned NoneType",
            loss=lambda model, criterion, batch: criterion(model(batch[0]), batch[1]).backward(),
    )  # fmt: skip
    whole = {"n": mlp_batch()}
    refused(run, [], "sample 0 alone has losses of shape.*dimension 0",
            loss=lambda model, criterion, _: criterion(model(whole["n"][0]), whole["n"][1]),
    )  # fmt: skip

    def twice(model, criterion, batch):
        loss = criterion(model(batch[0]), batch[1])
        model(batch[0])
        return loss

    refused(run, message="runs the model twice", kind=RuntimeError, loss=twice)
    assert run.engine.check(run.model, mlp_batch()).ok  # none of it has left a trace


def test_refused_in_the_middle_of_a_step():
    run = private(mlp())
    inputs, targets = mlp_batch()
    run.criterion(run.model(inputs), targets).backward()
    refused(run, message="middle of a step.*optimizer.zero_grad", kind=RuntimeError)
    run.optimizer.step()
    assert run.engine.check(run.model, mlp_batch()).ok


def sharded(context: Context) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(context.group, "cpu")
    run = replicas.build(context, shard=lambda module: fully_shard(module, mesh=mesh))
    refused(run, message="sharded.*before it is sharded.*--use-fsdp / --use-tp")


def test_sharded_models_are_refused(cpu_ranks):
    cpu_ranks.run(1, sharded)


def with_dropout() -> nn.Module:
    return zoo.seeded(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    )


def train(run: SimpleNamespace, look=lambda place: None, steps: int = 3) -> dict:
    """Steps on the loader's draws; `look` is called at every place where a check may be."""
    torch.manual_seed(7)
    model, optimizer, criterion = run.model, run.optimizer, run.criterion
    draws, norms = [], []
    look("before the first step")
    for inputs, targets, numbers in run.loader:
        look("of a draw")
        draws.append(numbers.tolist())
        loss = criterion(model(inputs), targets)
        look("between forward and backward")
        loss.backward()
        norms.append(model.per_sample_gradient_norms)
        optimizer.step()
        look("before zero_grad")
        optimizer.zero_grad()
        look("after zero_grad")
        if len(draws) == steps:
            break
    return {
        "draws": draws, "norms": [n.tolist() for n in norms], "steps": optimizer.steps,
        "account": run.engine.accountant.history, "open batch": model.step_state.batch_number,
        "budget": vars(model.step_state.usage) | {}, "random": torch.get_rng_state().tolist(),
        "parameters": replicas.parameters(run).tolist(),
    }  # fmt: skip


def state_of(run: SimpleNamespace) -> dict:
    """What a check might change, between two steps or in the middle of one."""
    model, capture, context = run.model, run.model.capture, run.model.step_context
    return {
        "gradients": [None if p.grad is None else id(p.grad) for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "buffers": [b.clone().tolist() for b in model.buffers()],
        "layouts": [(dict(h.layouts), dict(h.output_layouts)) for h in capture.handles],
        "joints": [one.joint for one in capture.trained],
        "sessions": [h.private_step for h in capture.handles],
        "plans": (dict(context.plans.known), context.plans.last, context.profile),
        "budget": vars(model.step_state.usage) | {}, "random": torch.get_rng_state().tolist(),
        "session": model.step_state.pending, "steps": run.optimizer.steps,
        "criterion": run.criterion.criterion.reduction,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["flash_bookkeeping", "ghost"])
def test_training_does_not_notice(mode):
    other = zoo.classes(5, 6)

    def build() -> SimpleNamespace:
        return replicas.build(shard=lambda _: with_dropout(), grad_sample_mode=mode)

    def drawing(model, criterion, batch):
        torch.rand(1)
        return criterion(model(batch[0]), batch[1])

    def wrong(model, criterion, batch):
        drawing(model, criterion, batch)
        raise KeyError

    def look(place: str) -> None:
        seen.append(place)
        before = state_of(run)
        with torch.no_grad():
            assert run.engine.check(run.model, other, loss=drawing).ok
        assert state_of(run) == before, place
        with pytest.raises(KeyError):
            run.engine.check(run.model, other, loss=wrong)
        assert state_of(run) == before, place

    expected, run, seen = train(build()), build(), []
    assert train(run, look) == expected
    assert len(set(seen)) == 5


def test_a_network_in_evaluation_stays_there():
    run = private(with_dropout())
    run.model.eval()
    assert run.engine.check(run.model, mlp_batch()).ok
    assert not any(module.training for module in run.model.modules())


def on_ranks(context: Context, variant: str) -> None:
    """One rank checks, and no other: what were exchanged would hang. Then both train."""
    expected = replicas.build(context, variant)
    replicas.train(expected, 3)
    run = replicas.build(context, variant)
    case = zoo.BY_NAME["mlp"]
    for steps in (1, 3):
        if context.rank == steps % context.world_size:
            report = run.engine.check(run.model, case.batch(SIZE + context.rank))
            assert report.ok, report
            assert report.norms.shape == (SIZE + context.rank,)
        replicas.train(run, 1 if steps == 1 else 2)
    np.testing.assert_array_equal(replicas.parameters(run), replicas.parameters(expected))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("variant", ["ddp_bucketed", "torch_ddp"])
def test_replicas(cpu_ranks, variant, world_size):
    cpu_ranks.run(world_size, on_ranks, variant)


def bags() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randint(9, (13,)), torch.tensor([0, 3, 3, 9]), torch.randn(4, 3)


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost"])
def test_bags_with_offsets(mode):
    run = private(Bags(), grad_sample_mode=mode)

    def loss(model, criterion, batch):
        return criterion(model(*batch[:2]), batch[2])

    found = run.engine.check(run.model, bags(), loss=loss)
    assert found.ok, found
    assert len(found.norms) == 4


def test_bags_that_the_model_is_not_given_as_they_are():
    run = private(Bags())

    def loss(model, criterion, batch):
        return criterion(model(batch[0].flip(0), batch[1]), batch[2])

    with pytest.raises(ValueError, match=r"engine\.check cannot tell a sample's ids"):
        run.engine.check(run.model, bags(), loss=loss)


class Outputs(nn.Module):
    """A criterion whose gradient at a network's output is 1."""

    reduction = "mean"

    def forward(self, outputs, _targets):
        losses = outputs.flatten()
        return losses if self.reduction == "none" else losses.mean()


@pytest.mark.parametrize("mode", ["per_sample", "ghost", "flash", "bookkeeping"])
def test_a_sum_of_clipped_and_unclipped_samples_that_cancel(mode):
    """Coefficients of clipped samples have a margin, which no other sample's makes up for."""
    direction = torch.tensor([[0.6, 0.0, 0.8]])
    x = torch.cat([3 * direction.expand(16, 3), -0.9999 * direction.expand(16, 3)])
    run = private(nn.Linear(3, 1, bias=False), Outputs(), max_grad_norm=1.0, grad_sample_mode=mode)
    report = run.engine.check(run.model, (x, torch.zeros(32)))
    assert report.ok, report


@pytest.mark.filterwarnings("ignore:the batch of this step did not come from")
def test_a_check_that_fails_leaves_what_steps_know_of_flattened_samples():
    network = zoo.Net(
        lambda net, x: net.layer(x.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1))[::net.stride],
        layer=nn.Linear(4, CLASSES), stride=2,
    )  # fmt: skip
    run = build(module=network)
    step(run)
    network.stride = 0
    with pytest.raises(ValueError, match="step cannot be zero"):
        run.engine.check(run.model, data()[:1])
    network.stride = 2
    step(run)
    assert [handle.kind for handle in run.model.capture.handles] == ["linear"]
