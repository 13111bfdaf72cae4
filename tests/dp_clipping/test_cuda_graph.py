"""A private step as a CUDA graph: beside the eager step it is the same, and what cannot be one is
refused."""

import gc
from contextlib import contextmanager, nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ddp_by_hand.experiments.networks.models import (
    LSTMClassifier,
    TransformerClassifier,
    WideResNet,
)
from dp_clipping import cuda_graph
from dp_clipping.cuda_graph import EAGER, refuse
from dp_clipping.noise.gaussian import NoiseStream
from dp_clipping.noise.kernel import StreamTable, add_noise_kernel_launch
from dp_clipping.sampling.usage import Ticket
from tests.support import engine, zoo
from tests.support.engine import in_parts
from tests.support.registered_layers import Gate

gpu = pytest.mark.gpu
ROWS, BATCH, COUNT = 12, 6, 60


def build(
    network: nn.Module, device: str = "cuda", optimizer=None, data: tuple | None = None, **changes
) -> SimpleNamespace:  # fmt: skip
    torch.manual_seed(0)
    network = network.to(device)
    x = torch.randint(1, 20, (COUNT, 6))
    data = (x, (x * 7 + 3) % 20) if data is None else data
    if optimizer is None:
        optimizer = (
            torch.optim.AdamW(network.parameters(), lr=1e-2, capturable=True)
            if device == "cuda"
            else torch.optim.SGD(network.parameters(), lr=1e-2)  # AdamW there is no capture's
        )
    reduction = changes.get("loss_reduction", "mean")
    options = {"noise_multiplier": 0.8, "cuda_graph": True, "noise_generator": engine.fixed(3)}
    run = engine.build(
        module=network, optimizer=optimizer, criterion=zoo.Criterion(zoo.cross_entropy, reduction),
        dataset=TensorDataset(*data), batch_size=BATCH, **options | changes,
    )  # fmt: skip
    run.device = device
    return run


def transformer(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    width = 32

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(20, width), nn.Linear(width, 20)
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            x = self.tokens(x)
            x = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), dropout, self.training)
            return self.head(x)

    return Blocks()


def train(run: SimpleNamespace, steps: int, graphed: bool, zero_first: bool = False) -> list:
    """So many steps; what each has returned and left, and whether it was a replay."""

    def body(x, y):
        if zero_first:
            run.optimizer.zero_grad()
        loss = run.criterion(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        if not zero_first:
            run.optimizer.zero_grad()
        return loss.detach()

    step = run.optimizer.graphed(body) if graphed else body
    seen = []
    while run.optimizer.steps < steps:
        with in_parts(run, ROWS, pad_batches=True) as pieces:
            for x, y in pieces:
                x, y = x.to(run.device), y.to(run.device)
                replays = graphed and step.is_captured and step._is_alike()
                loss = step(x, y)
                norms = run.model.per_sample_gradient_norms if zero_first else None
                if norms is not None:
                    assert norms.shape == (pieces.real // run.model.views,)
                seen.append((loss, norms, replays))
                if run.optimizer.steps == steps:
                    break
    if run.device == "cuda":
        torch.cuda.synchronize()
    return seen


def hand_over(run: SimpleNamespace, real: int = 4) -> None:
    """Announces a batch, as a loader does before it yields one."""
    run.model.step_state.usage.hand_over(Ticket(real, rows=ROWS))


def weights(run: SimpleNamespace) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in run.model.network.parameters()])


def tokens_and_class() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(1, 20, (COUNT, 6), generator=generator)
    return x, x.sum(1) % 2


def images_and_class() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(COUNT, 3, 8, 8, generator=generator)
    return x, torch.randint(10, (COUNT,), generator=generator)


def embedding_bag() -> nn.Module:
    return nn.Sequential(
        nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)
    )


KINDS = {  # and convolutions, GroupNorm; nn.MultiheadAttention; nn.LSTM; nn.EmbeddingBag
    "transformer": (transformer, lambda: None),
    "wide_resnet": (lambda: WideResNet(10, 1), images_and_class),
    "encoder": (lambda: TransformerClassifier(20, 16, 2), tokens_and_class),
    "lstm": (lambda: LSTMClassifier(20, 16, 1), tokens_and_class),
    "bags": (embedding_bag, tokens_and_class),
}


def build_kind(kind: str, dtype: torch.dtype = torch.float32, **changes) -> SimpleNamespace:
    network, data = KINDS[kind]
    return build(zoo.seeded(network).to(dtype), data=data(), **changes)


@pytest.fixture
def full_float32():
    """cuDNN computes convolutions and recurrent layers in TensorFloat-32 by default, whose rounding
    depends on what algorithm it has picked."""
    backends = torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    yield
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision


VIEWS = {"views": 2, "sample_rate": 1 / 20}
TRUNCATED = {"sampling": "truncated_poisson", "max_batch_size": 7}


@gpu
@pytest.mark.parametrize(
    ("kind", "dtype", "zero_first", "options"),
    [
        *product(["transformer"], [torch.float32, torch.bfloat16], [False, True], [{}]),
        *((kind, torch.float32, False, {}) for kind in KINDS if kind != "transformer"),
        ("transformer", torch.float32, True, VIEWS),
        ("transformer", torch.float32, False, TRUNCATED),
        ("transformer", torch.bfloat16, False, {"fused_step": True}),
        ("transformer", torch.float32, False, {"sampling": "balls_in_bins"}),
        ("transformer", torch.float32, False, {"sampling": "cyclic"}),
    ],
)
def test_twenty_steps_are_those_of_an_eager_run(kind, dtype, zero_first, options, full_float32):
    runs = [build_kind(kind, dtype, **options) for _ in range(3)]
    graphs = [train(run, 20, True, zero_first) for run in runs[:2]]
    eager = train(runs[2], 20, False, zero_first)
    assert sum(replays for *_, replays in graphs[0]) >= 8
    # Bit for bit, but cuBLAS does not repeat itself in cuDNN's recurrent layers.
    rounding = 1e-5 if kind == "lstm" else 0
    torch.testing.assert_close(weights(runs[0]), weights(runs[1]), rtol=0, atol=rounding)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(weights(runs[0]), weights(runs[2]), rtol=0, atol=tolerance)
    for (loss, norms, _), (expected, other, _) in zip(graphs[0], eager, strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-3)
        if zero_first:
            torch.testing.assert_close(norms, other, rtol=2e-2, atol=1e-3)
    assert runs[0].engine.accountant.history == runs[2].engine.accountant.history
    statements = [run.engine.privacy_statement(1e-3) for run in runs]
    assert statements[0] == statements[2]
    assert [run.optimizer.steps for run in runs] == [20] * 3
    assert len({run.loader.position for run in runs}) == 1
    if zero_first:
        assert all(p.grad is not None for p in runs[0].model.network.parameters())


def test_the_body_of_an_eager_step_is_told_of_the_capture():
    real, seen = torch.cuda.is_current_stream_capturing, []

    def body():
        seen.append(torch.cuda.is_current_stream_capturing())
        raise KeyError

    run = build(transformer(), "cpu", cuda_graph=False)
    hand_over(run)
    with pytest.raises(KeyError):
        cuda_graph.GraphedStep(run.optimizer, body)()
    assert seen == [True]
    assert torch.cuda.is_current_stream_capturing is real


@gpu
def test_packed_sequences_are_refused_by_the_line_that_waits():
    """What follows in the program can draw numbers, allocate and be captured."""

    class Packed(LSTMClassifier):
        def forward(self, tokens):
            return super().forward(tokens, (tokens > 0).sum(1).clamp(min=1))

    run = build(Packed(20, 16, 1), data=tokens_and_class())
    with pytest.raises(RuntimeError, match=r"cannot be captured.*lengths\.cpu\(\)"):
        train(run, 12, True)
    assert run.model.step_state.is_idle
    torch.rand(3, device="cuda")  # generators are not left as in a capture
    torch.cuda.empty_cache()
    assert any(seen for *_, seen in train(build_kind("bags"), 20, True))


@gpu
def test_dropout_is_another_in_each_replay():
    run = build(transformer(0.5), noise_multiplier=0.0)
    seen = []

    def body(x, y):
        run.optimizer.zero_grad()
        y_hat = run.model(x)
        run.criterion(y_hat, y).backward()
        run.optimizer.step()
        return y_hat

    run.optimizer.original_optimizer.param_groups[0]["lr"] = 0.0
    run.optimizer.original_optimizer.param_groups[0]["weight_decay"] = 0.0
    step = run.optimizer.graphed(body)
    x, y = torch.arange(ROWS * 6).view(ROWS, 6) % 20, torch.ones(ROWS, 6, dtype=torch.long)
    for _ in range(12):
        hand_over(run)
        seen.append(step(x, y))
    assert step.is_captured
    assert not torch.equal(seen[-1], seen[-2])


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_in_a_capture(collects, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", int)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with cuda_graph.capturing(None):
            assert not gc.isenabled()
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def settings(**changes) -> SimpleNamespace:
    module = nn.Linear(3, 2)
    adam = torch.optim.AdamW(module.parameters(), capturable=True)
    base = dict(module=module, optimizer=adam, grad_sample_mode="flash_bookkeeping",
                memory_budget=None, adaptive_threshold=None, rows_per_unit=1)  # fmt: skip
    return SimpleNamespace(**base | changes)


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 2)

    def gradient_ready(self, parameter):
        raise NotImplementedError


def compiled() -> nn.Module:
    network = nn.Sequential(nn.Linear(3, 2))
    network[0].compile()
    return network


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grad_sample_mode": "bookkeeping"}, "use 'flash_bookkeeping'"),
        ({"grad_sample_mode": "no_dp"}, "use 'flash_bookkeeping'"),
        ({"module": Wrapper()}, "the network itself on one GPU"),
        ({"module": nn.Linear(3, 2).double()}, "dtype without kernels"),
        ({"module": compiled()}, "compiled modules"),
        ({"module": nn.Sequential(Gate(2, 2))}, "layers given to register_layer.*leave it out"),
        ({"memory_budget": 5}, "memory_budget"),
        ({"adaptive_threshold": object()}, "adaptive_threshold"),
        ({"rows_per_unit": 2}, "leave out examples_per_unit, or give examples_per_step=1"),
        ({"optimizer": torch.optim.AdamW(nn.Linear(2, 2).parameters())}, "capturable=True"),
        ({"optimizer": torch.optim.Adagrad(nn.Linear(2, 2).parameters())}, "capturable=True"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(monkeypatch, changes, words):
    monkeypatch.setattr(cuda_graph, "available", lambda device, dtype: dtype != torch.float64)
    ranks = SimpleNamespace(sharding=None, everyone=None, device=torch.device("cuda"))
    refuse(settings(), ranks)
    with pytest.raises(ValueError, match=f"cuda_graph=True cannot capture.*{words}"):
        refuse(settings(**changes), ranks)
    for others in ({"everyone": object()}, {"sharding": object()}):
        with pytest.raises(ValueError, match="several ranks"):
            refuse(settings(), SimpleNamespace(**vars(ranks) | others))


def test_without_a_gpu_it_is_refused():
    with pytest.raises(ValueError, match="parameters on cpu: move the network to a GPU"):
        build(transformer(), "cpu")


def test_nothing_is_graphed_that_was_not_asked_for():
    run = build(transformer(), "cpu", cuda_graph=False)
    with pytest.raises(RuntimeError, match="cuda_graph=True"):
        run.optimizer.graphed(lambda: None)


def eager_on_cpu(run: SimpleNamespace) -> cuda_graph.GraphedStep:
    def body(x, y):
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    return cuda_graph.GraphedStep(run.optimizer, body)


def test_steps_with_checks_and_microbatches_are_eager():
    run = build(transformer(), "cpu", cuda_graph=False)
    step, seen = eager_on_cpu(run), []
    with in_parts(run, 4, pad_batches=True) as pieces:
        for number, (x, y) in enumerate(pieces, 1):
            alike, skips = step._is_alike(), run.model.step_state.skips_next
            if alike:
                break
            seen.append((number, skips))
            step(x, y)
    assert run.optimizer.steps >= EAGER
    assert number & (number - 1), "batches 1, 2, 4, 8 are looked at"
    assert not skips
    assert run.model.step_state.is_idle
    assert any(skips for _, skips in seen)


def test_batches_that_are_not_padded_are_refused():
    run = build(transformer(), "cpu", cuda_graph=False)
    batch = next(iter(run.loader))
    with pytest.raises(ValueError, match="pad_batches=True"):
        eager_on_cpu(run)(*batch)


def test_what_a_loaded_optimizer_has_is_captured_anew():
    run = build(transformer(), "cpu", cuda_graph=False)
    step = eager_on_cpu(run)
    step._captured, step._eager_steps = object(), 9
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert not step.is_captured
    assert step._eager_steps == EAGER - 1


class Graph:
    """A graph that launches nothing."""

    replays = 0

    def replay(self):
        Graph.replays += 1


@contextmanager
def captured_by_nobody(graph, capture_error_mode):
    assert capture_error_mode == "thread_local"
    yield


@pytest.fixture
def captured(monkeypatch):
    """A run whose step is captured, and what makes the coming step of it."""
    monkeypatch.setattr(torch.cuda, "graph", captured_by_nobody)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(Graph, "replays", 0)
    run = build(transformer(), "cpu", cuda_graph=False)
    run.model.step_context.plans.last = SimpleNamespace(is_one_pass=True)
    run.optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)

    def body(x, y):
        run.optimizer.zero_grad()
        loss = run.criterion(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        return loss.detach()

    step = cuda_graph.GraphedStep(run.optimizer, body)
    with in_parts(run, ROWS, pad_batches=True) as pieces:
        yield SimpleNamespace(run=run, step=step, pieces=pieces, graph=Graph)


def test_what_a_replay_keeps_beside_the_graph(captured):
    run, steps = captured.run, 0
    for _ in range(2):
        for x, y in captured.pieces:
            before = captured.graph.replays
            captured.step(x, y)
            steps += not run.model.step_state.keeps_sums
            assert run.optimizer.steps == steps
            real = captured.pieces.real
            assert run.model.per_sample_gradient_norms.shape[0] >= real
            if captured.graph.replays > before:
                assert run.model.per_sample_gradient_norms.shape == (real,)
                assert run.model.norm_statistics().samples == real
                assert run.model.step_state.is_idle
                assert run.model.step_state.batch_number is None
                assert all(p.grad is not None for p in run.model.network.parameters())
    assert captured.graph.replays >= 8
    assert run.loader.position == steps == 20
    assert sum(n for *_, n in run.engine.accountant.history) == 20
    assert len({tuple(p) for *p, _ in run.engine.accountant.history}) == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda run: setattr(run.optimizer, "noise_multiplier", 2.0), "noise_multiplier"),
        (lambda run: setattr(run.optimizer, "max_grad_norm", 2.0), "max_grad_norm"),
        (lambda run: setattr(run.optimizer, "expected_batch_size", 7), "expected_batch_size"),
        (lambda run: run.optimizer.param_groups[0].update(lr=1.0), "optimizer.param_groups"),
        (lambda run: run.optimizer.param_groups[0]["lr"].mul_(2), "optimizer.param_groups"),
        (lambda run: run.optimizer.attach_step_hook(print), "step hooks"),
        (lambda run: run.model.network.norm.eval(), "training, or another attribute"),
        (lambda run: setattr(run.model.network.norm, "eps", 0.5), "another attribute of a module"),
        (lambda run: setattr(run.model.network.norm.weight, "data", torch.ones(32)), "address"),
    ],
)
def test_what_a_replay_would_not_see_is_refused(captured, change, name):
    run, refused = captured.run, False
    for x, y in captured.pieces:
        if not (captured.step.is_captured and captured.step._is_alike()):
            captured.step(x, y)
            continue
        change(run)
        before = run.optimizer.steps
        with pytest.raises(RuntimeError, match=f"{name}.* changed after the step was captured"):
            captured.step(x, y)
        assert run.optimizer.steps == before
        refused = True
        break
    assert refused


def test_each_replay_has_the_streams_of_its_step_and_key(captured, monkeypatch):
    run, written = captured.run, []
    monkeypatch.setattr(StreamTable, "write", lambda self, streams: written.append(streams))
    for n, (x, y) in enumerate(captured.pieces):
        before, number = captured.graph.replays, run.optimizer.steps
        captured.step(x, y)
        if captured.graph.replays > before:
            assert written[-1] == run.optimizer.noise.streams(number)
        if n == 6:
            run.optimizer.noise.key = bytes(range(32))
    assert len(written) == captured.graph.replays >= 3


def test_another_shape_is_refused(captured):
    refused = 0
    for x, y in captured.pieces:
        if captured.step.is_captured and captured.step._is_alike():
            for other in ((x[:, :3], y), (x.int(), y), (x, y, 1)):
                with pytest.raises(ValueError, match="another shape or dtype"):
                    captured.step(*other)
                refused += 1
            break
        captured.step(x, y)
    assert refused == 3


def test_a_body_that_is_no_whole_step_is_refused(captured):
    captured.step._eager_steps = EAGER

    def body(x, y):
        captured.run.optimizer.zero_grad()
        captured.run.criterion(captured.run.model(x), y).backward()

    for number, (x, y) in enumerate(captured.pieces, 1):
        if number & (number - 1) and captured.step._is_alike():
            captured.step.body = body
            with pytest.raises(RuntimeError, match="not one whole step"):
                captured.step(x, y)
            assert captured.run.model.step_state.is_idle
            assert not captured.step.is_captured
            return
        captured.step.body(x, y)
    raise AssertionError


def check_streams() -> None:
    """Launches that read a table add, step after step, what launches of their own add."""
    sizes = (7, 1030, 4)
    table = StreamTable(3, torch.device("cpu"))
    totals = [torch.zeros(n) for n in sizes]

    def streams(step):
        return [
            NoiseStream.derive(bytes(range(32)), step=step, parameter=str(n), share=0)
            for n in sizes
        ]

    def launch(make_table=None, step=0):
        outs = [torch.empty(n) for n in sizes]
        add_noise_kernel_launch(totals, outs, streams(step), None, 2.0, 3.0, make_table)
        return outs

    taken = []

    def take(rows):
        taken.append(table.take([0, 1, 2], rows))
        table.write(streams(0))
        return taken[0]

    first = launch(take)
    assert all(map(torch.equal, first, launch()))
    for step in (1, 2):
        table.write(streams(step))
        rows = taken[0].clone()
        expected = launch(step=step)
        outs = [torch.empty(n) for n in sizes]
        rows[:, 1] = torch.tensor([out.data_ptr() for out in outs])
        add_noise_kernel_launch(totals, outs, streams(0), None, 2.0, 3.0, lambda _, r=rows: r)
        assert all(map(torch.equal, outs, expected))


def test_streams_of_a_table_in_the_interpreter(interpreter):
    interpreter.run(check_streams)
