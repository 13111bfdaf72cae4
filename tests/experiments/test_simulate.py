"""The simulation: steps worked out by hand, and traces from which known figures are recovered."""

import json
from dataclasses import asdict, replace

import pytest

from ddp_by_hand.experiments.simulate import calibrate as calibrating
from ddp_by_hand.experiments.simulate.__main__ import main
from ddp_by_hand.experiments.simulate.calibrate import calibrate
from ddp_by_hand.experiments.simulate.step import program_of, run
from ddp_by_hand.lm.exchange import VARIANTS, Contention, Network, plan
from ddp_by_hand.lm.memory import predict_memory
from ddp_by_hand.lm.model import ModelConfig
from ddp_by_hand.lm.shape import Shape
from ddp_by_hand.measure import OK, Results
from ddp_by_hand.measure.curves import COUNTS, last_that_pays
from ddp_by_hand.measure.picture import read_picture

SHAPE = Shape(ModelConfig(num_layers=2, d_model=32, d_ff=64, num_heads=2), 4, "float32", 0.02)
LINKS = Network(latency=0, bandwidth=1, gpus_per_host=8, host_latency=15e-6, host_bandwidth=50e9)
ALPHA, BETA = 20e-6, 2e9  # of the collectives in the traces written here
FORWARD, OPTIMIZER, REST, PIECE, COPY = 3000.0, 700.0, 50.0, 400.0, 200.0  # microseconds


def test_a_step_worked_out_by_hand():
    """Both streams are slower while both work, and have their full speed alone."""
    program = [("compute", 1.0), ("send", 3.0), ("compute", 4.0), ("wait", 1)]
    alone = run(program, Contention(1.0, 1.0, 0.0))
    assert (alone.step, alone.exposed, alone.contention) == (5.0, 0.0, 0.0)
    found = run(program, Contention(computation=2.0, communication=1.5, launch=0.0))
    assert found.step == pytest.approx(1 + 4.5 + (4 - 4.5 / 2))
    assert found.contention == pytest.approx(found.step - 5)
    late = run([("compute", 1.0), ("send", 3.0), ("compute", 1.0), ("wait", 1)],
               Contention(2.0, 2.0, 0.0))  # fmt: skip
    assert late.step == pytest.approx(1 + 2 + 2)  # 1 s of sending is left, alone: 2 s at full speed
    assert late.exposed == pytest.approx(2.0)


def test_collectives_in_a_host_and_over_hosts_and_links_that_are_fitted():
    network = Network(1.0, 100.0, gpus_per_host=4, host_latency=10.0, host_bandwidth=10.0)
    assert network.seconds("all_reduce", 1000.0, 1) == 0
    assert network.seconds("all_reduce", 1000.0, 4) == 2 * (3 * 1.0 + 0.75 * 1000 / 100)
    gather = network.seconds("all_gather", 1000.0, 8)
    assert gather == (6 * 1.0 + 2 * 10.0) + 7 / 8 * 1000 / 40  # four cards of 10
    assert network.seconds("all_reduce", 1000.0, 8) == pytest.approx(
        2 * (3 * 1.0 + 1 * 10.0 + 7 / 8 * 1000 / 40)  # a tree has the lower latency
    )
    fast = replace(network, host_bandwidth=1000.0)
    assert fast.seconds("reduce_scatter", 1000.0, 8) == 26 + 7 / 8 * 1000 / 100
    truth = replace(LINKS, latency=5e-6, bandwidth=3e9)
    samples = [(n, truth.seconds("all_reduce", n, 4)) for n in (1e3, 1e5, 1e6, 5e7)]
    assert LINKS.fitted(samples, 4).latency == pytest.approx(5e-6)
    assert LINKS.fitted(samples, 4).bandwidth == pytest.approx(3e9)
    shrinking = [(1e6, 1e-3), (2e6, 3e-3)]  # a straight line through these starts below zero
    assert LINKS.fitted(shrinking, 2).latency == 0


def test_every_gradient_is_in_one_bucket():
    everything = list(range(len(SHAPE.gradients)))
    for variant in VARIANTS[1:]:
        found = plan(variant, SHAPE)
        assert sorted(i for bucket in found.buckets for i in bucket) == everything
        assert sum(found.nbytes) == SHAPE.gradient_bytes
    *blocks, root = plan("fsdp", SHAPE).buckets
    assert len(blocks) == SHAPE.model.num_layers
    assert [list(SHAPE.gradients)[i].split(".")[0] for i in root] == [
        "head", "final_norm", "token_embedding",
    ]  # fmt: skip
    assert len(plan("ddp_individual", SHAPE).buckets) == len(everything)
    assert plan("none", SHAPE).buckets == []


def events_of(
    variant: str, late: float = 0.0, slow: float = 1.0, other: float = 0.0, shape: Shape = SHAPE
) -> list[dict]:
    """Two steps of a rank whose every duration is known; `late`: it joins collectives later.

    Of `ddp_bucketed` and `fsdp`, computation beside communication takes `slow` times as long.
    Forward and each gradient have `other` microseconds more of work that is no product, and that of
    the embedding has nothing else.
    """
    events, now = [], 0.0
    sizes = [4 * numel for numel in shape.gradients.values()]
    truth = replace(LINKS, latency=ALPHA, bandwidth=BETA)

    def add(name: str, start: float, duration: float, category: str, thread: int = 1) -> None:
        events.append({"ph": "X", "name": name, "ts": start, "dur": duration, "cat": category,
                       "pid": 1, "tid": thread})  # fmt: skip

    def phase(name: str, start: float, end: float) -> None:
        add(name, start, end - start, "user_annotation")

    for _ in range(2):
        add("aten::mm", now, FORWARD, "cpu_op")
        add("aten::mul", now + FORWARD, other, "cpu_op")
        phase("forward_pass", now, now + FORWARD + other)
        start = now = now + FORWARD + other
        for name in shape.gradients:
            slower = slow if variant in ("ddp_bucketed", "fsdp") else 1.0
            length, more = PIECE * slower, other * slower
            is_look_up = name.startswith("token_embedding")
            add("aten::mul" if is_look_up else "aten::mm", now, length, "cpu_op")
            add("aten::mul", now + length, more, "cpu_op")
            now += length + more
            add("torch::autograd::AccumulateGrad", now - 1e-3, 1.0, "cpu_op")
        phase("backward_pass", start, now)
        if variant in ("ddp_bucketed", "fsdp"):
            add("gloo:all_reduce", start, now - start, "cpu_op", 2)
        start = now
        for nbytes in sizes if variant == "ddp" else []:
            length = truth.seconds("all_reduce", nbytes, 2) * 1e6
            add(
                "gloo:all_reduce", now + late, length + 7 - late, "cpu_op", 2
            )  # 7 us until both join
            now += length + 7
        phase("gradient_sync", start, now)
        add("aten::_fused_adamw_", now, OPTIMIZER, "cpu_op")
        phase("optimizer_step", now, now + OPTIMIZER)
        now += OPTIMIZER + REST
    return events


def write(folder, variant: str, ranks: int = 2, shape: Shape = SHAPE, **events) -> None:
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        document = {
            "traceEvents": events_of(variant, late=7.0 * rank, shape=shape, **events),
            "configuration": config(variant, shape, ranks),
            "distributedInfo": {"rank": rank, "world_size": ranks},
            "boot_id": "one",
        }
        (folder / f"{variant}_rank_{rank}_trace.json").write_text(json.dumps(document))


@pytest.fixture
def traces(tmp_path):
    """A folder as the benchmark writes it, of `none`, `ddp` and `ddp_bucketed` on two ranks."""
    for variant in ("none", "ddp", "ddp_bucketed"):
        write(tmp_path / "traces", variant, slow=1.5)
    return tmp_path / "traces"


def config(variant: str, shape: Shape = SHAPE, ranks: int = 2) -> dict:
    return {**asdict(shape), "implementation": variant, "world_size": ranks, "device": "cpu"}


def test_traces_give_back_what_they_were_made_of(traces):
    found = calibrate([traces], LINKS)
    assert found.network.latency == pytest.approx(ALPHA, rel=1e-3)
    assert found.network.bandwidth == pytest.approx(BETA, rel=1e-3)
    times = found.times("none", SHAPE, 1)
    assert sum(times.forward) == pytest.approx(FORWARD * 1e-6)
    assert times.backward == pytest.approx([PIECE * 1e-6] * len(SHAPE.gradients), rel=0.01)
    assert times.optimizer == pytest.approx(OPTIMIZER * 1e-6)
    # All of backward is beside communication and takes 1.5 times as long.
    assert found.contention["ddp_bucketed"].computation == pytest.approx(1.5, rel=0.01)
    # Each collective of ddp begins 7 us after the one before: a rank waits, or does nothing.
    assert found.contention["ddp"] == pytest.approx((1.0, 1.0, 7e-6), rel=0.01)


def test_steps_without_the_profiler_tell_how_much_of_the_costs_counts(traces):
    """A profiled host is late: launches are reduced first, then the slowdown."""
    found = calibrate([traces], LINKS)
    alone = found.simulate("none", SHAPE, 1).step
    traced = found.contention["ddp_bucketed"]._replace(launch=1e-3)
    found = replace(found, contention=found.contention | {"ddp_bucketed": traced})
    step = found.simulate("ddp_bucketed", SHAPE, 2).step
    for part in (0.5, 1.5, 2.5):
        there = replace(found, contention={"ddp_bucketed": traced.at(part)})
        wanted = there.simulate("ddp_bucketed", SHAPE, 2).step
        assert (wanted > step) == (part > 2)
        matched = found.matched({2: {"none": alone, "ddp_bucketed": wanted}})
        assert matched.contention["ddp_bucketed"] == pytest.approx(traced.at(part), rel=0.05)
        assert matched.simulate("ddp_bucketed", SHAPE, 2).step == pytest.approx(wanted, rel=0.01)
    assert traced.at(1) == (*traced[:2], 0.0)
    twice = found.matched({2: {"none": 2 * alone}})
    assert twice.simulate("none", SHAPE, 1).step == pytest.approx(2 * alone)
    assert twice.contention == found.contention


def test_ranks_of_a_host_slow_each_other_as_was_measured(traces, tmp_path):
    """Each further rank adds the same, up to a full host."""
    found = calibrate([traces], LINKS).matched({1: {"none": 1.0}, 2: {"none": 1.1}})
    steps = [found.simulate("none", SHAPE, n).step for n in (1, 2, 4, 8, 16)]
    assert steps == pytest.approx([1.0, 1.1, 1.3, 1.7, 1.7])
    write(tmp_path / "alone", "none", ranks=1)
    both = calibrate([traces, tmp_path / "alone"], LINKS)
    assert both.shared == pytest.approx(0.0, abs=1e-6)  # these are as fast
    assert both.matched({2: {"none": 1.0}}).simulate("none", SHAPE, 2).step == pytest.approx(1.0)


def test_computation_of_one_process_and_collectives_of_two(traces, tmp_path):
    write(tmp_path / "alone", "none", ranks=1)
    for path in traces.glob("none_*"):
        path.unlink()
    with pytest.raises(
        ValueError, match=r"none, for computation, .* ddp_bucketed on 2, ddp on 2\."
    ):
        calibrate([traces], LINKS)
    with pytest.raises(
        ValueError, match=r"ddp on two ranks or more, for collectives.* none on 1\."
    ):
        calibrate([tmp_path / "alone"], LINKS)
    found = calibrate([tmp_path / "alone", traces], LINKS)
    assert sum(found.times("none", SHAPE, 1).forward) == pytest.approx(FORWARD * 1e-6)
    assert found.network.bandwidth == pytest.approx(BETA, rel=1e-3)
    write(tmp_path / "other", "none", ranks=1, shape=replace(SHAPE, batch_size=8))
    with pytest.raises(ValueError, match="of 2 shapes"):
        calibrate([tmp_path / "other", traces], LINKS)


def test_fsdp_computes_as_its_own_trace_shows(tmp_path):
    """In a mixed run it casts no weights, and has 0.6 times the other work here."""
    shape, folder, other, lean = replace(SHAPE, dtype="mixed"), tmp_path / "traces", 200.0, 0.6
    for variant in ("none", "ddp"):
        write(folder, variant, shape=shape, other=other)
    number, per_byte = len(shape.gradients) + 1, OPTIMIZER / 7 / shape.gradient_bytes
    counts = [*shape.forward_counts(), *map(shape.backward_counts, shape.gradients)]
    plain = number * other + PIECE - per_byte * sum(each[4] for each in counts)
    copied = 0.75 * 2 * shape.gradient_bytes * 2 * per_byte  # gradients, and two slices of a half
    own = (lean * plain + copied - PIECE) / number
    write(folder, "fsdp", shape=shape, slow=1.25, other=own)
    found = calibrate([folder], LINKS)
    assert found.lean == pytest.approx(lean, rel=1e-3)
    times = found.times("fsdp", shape, 2)
    products = FORWARD + PIECE * (len(shape.gradients) - 1)
    assert sum(times.forward + times.backward) == pytest.approx(
        1e-6 * (products + lean * plain), rel=1e-3
    )
    (folder / "fsdp_rank_0_trace.json").unlink()
    times = calibrate([folder], LINKS).times("fsdp", shape, 2)  # not traced: without the casts
    assert sum(times.forward + times.backward) == pytest.approx(1e-6 * (products + plain), rel=1e-3)


@pytest.mark.parametrize(("dtype", "gathered", "reduced"), [
    ("float32", 4, 4), ("mixed", 2, 4), ("bfloat16", 2, 4),
])  # fmt: skip
def test_fsdp_gathers_what_it_computes_with_and_reduces_float32(traces, dtype, gathered, reduced):
    shape, sizes = replace(SHAPE, dtype=dtype), {}

    class Noting(Network):
        def seconds(self, kind, nbytes, ranks):
            sizes.setdefault(kind, []).append(nbytes)
            return 1.0

    times = calibrate([traces], LINKS).times("fsdp", SHAPE, 2)
    program = program_of(times, Noting(0, 1, 8, 0, 1), "fsdp", shape, 2, launch=0)
    whole = sum(shape.gradients.values())
    assert sum(sizes["reduce_scatter"]) == reduced * whole
    assert set(sizes["all_gather"]) == {n * gathered / reduced for n in sizes["reduce_scatter"]}
    update = times.optimizer * 4 / shape.width / 2 + times.rest
    assert pytest.approx(update) in [amount for what, amount in program if what == "compute"]


def test_variants_have_the_order_that_their_ideas_imply(traces):
    found = calibrate([traces], LINKS)
    alone = found.simulate("none", SHAPE, 1).step
    for variant in VARIANTS:
        assert found.simulate(variant, SHAPE, 1).step == pytest.approx(alone)
        steps = [found.simulate(variant, SHAPE, n).step for n in (2, 8, 64, 1024)]
        assert steps == sorted(steps)
        if variant != "none":
            assert steps[0] > alone
    overlapped, blocking = (found.simulate(v, SHAPE, 8) for v in ("ddp_individual", "ddp"))
    assert overlapped.exposed < blocking.exposed
    # Of rounds of one step, nothing of the exchange is hidden; of long ones there is little of it.
    of_one, of_many = (
        replace(found, every=every).simulate("diloco", SHAPE, 8) for every in (1, 1000)
    )
    assert of_one.step - found.simulate("none", SHAPE, 8).step > of_one.exposed > 0
    assert of_many.step == pytest.approx(found.simulate("none", SHAPE, 8).step, rel=1e-2)
    # zero2 sends what zero1 sends; ZeRO's update is the part of one rank.
    assert found.simulate("zero1", SHAPE, 8) == found.simulate("zero2", SHAPE, 8)


def test_fsdp_gathers_and_scatters_each_unit(traces):
    found = calibrate([traces], LINKS)
    times = found.times("fsdp", SHAPE, 4)
    program = program_of(times, found.network, "fsdp", SHAPE, 4, launch=0)
    blocks = SHAPE.model.num_layers
    sends = (blocks + 1) + (blocks - 1) + (blocks + 1)  # forward, backward, gradients
    assert sum(what == "send" for what, _ in program) == sends
    # Two blocks: the next one's gather is not waited for, nor the gradients sent before it.
    assert [amount for what, amount in program if what == "wait"] == [1, 2, 3, 3, 4, 7]
    assert program[-1] == ("wait", sends)
    computed = sum(amount for what, amount in program if what == "compute")
    *of_blocks, root = (times.copy * n for n in plan("fsdp", SHAPE).nbytes)
    slices = sum(of_blocks[:-1] * 2 + of_blocks[-1:] + [root]) / 4  # once: the root, the last block
    copied = times.copy * SHAPE.gradient_bytes + slices
    assert computed == pytest.approx(
        sum(times.forward) + sum(times.backward) + times.optimizer / 4 + times.rest + copied
    )


def test_last_that_pays():
    curve = [1.0, 0.9, 0.85, 0.7] + [0.6] * (len(COUNTS) - 4)
    assert last_that_pays(curve) == "up to 4"
    assert last_that_pays([0.9] * len(COUNTS)) == "pays throughout"
    assert last_that_pays([1.0, 0.7, *[0.9] * (len(COUNTS) - 2)]) == "up to 1"  # the first below
    assert last_that_pays([0.7] * len(COUNTS)) == "up to 0"


def test_the_command_predicts_draws_and_says_how_far_off_it_was(traces, tmp_path, capsys):
    results = Results(tmp_path / "measured")
    for variant, step in (("none", 12.0), ("ddp_bucketed", 15.0), ("torch_zero1", 14.0)):
        for number in (0, 1):
            row = {"key": f"{variant}{number}", "implementation": variant, "kind": "timing",
                   "round": number, "status": OK, "step_ms": [step + number] * 3,
                   "config": config(variant)}  # fmt: skip
            results.record(row)
    picture = tmp_path / "simulation.png"
    command = [str(traces), "--gpus", "16", "--results", str(results.folder)]
    command += ["--output", str(picture)]
    assert main([*command, "--validate", str(results.folder)]) == 0
    text = capsys.readouterr().out
    validated, predicted = text.split("Predicted for 16 ranks")
    none = next(line for line in validated.splitlines() if line.startswith("none "))
    assert none.split()[1:3] == ["12.00", "12.00"]  # the fastest round, matched
    bucketed = next(line for line in validated.splitlines() if line.startswith("ddp_bucketed "))
    assert bucketed.split()[1] == "15.00"
    assert bucketed.split()[2] == "15.00"  # measured at the traces' shape
    assert "torch_zero1" not in validated  # of which there is no model
    rows = {line.split()[0]: line.split()[1:] for line in predicted.splitlines()[4:18]}
    assert set(rows) == {*VARIANTS, "torch_zero1", "torch_fsdp"}
    assert (rows["ddp"][-1], rows["zero2"][-1], rows["none"][-1]) == ("ddp", "ddp_bucketed", "–")
    memory = predict_memory("torch_zero1", SHAPE.model, ranks=16, batch_size=4)
    assert rows["torch_zero1"] == [*6 * "–", f"{sum(memory.values()) / 2**30:.2f}", "–"]
    assert "torch_zero1 and torch_fsdp: PyTorch decides inside" in predicted
    assert "contention of: the variant whose traces" in predicted
    assert read_picture(picture).description.startswith("Efficiency of each variant")


def test_folders_without_results_are_refused_in_one_line(traces, tmp_path, capsys):
    for option in ("--results", "--validate"):
        assert main([str(traces), option, str(tmp_path / "nowhere")]) == 2
        assert "nowhere has no results of benchmark_ddp.py --output" in capsys.readouterr().err
    results = Results(tmp_path / "measured")
    results.record({"key": "k", "implementation": "ddp", "kind": "timing", "round": 0, "status": OK,
                    "step_ms": [12.0], "config": config("ddp")})  # fmt: skip
    assert main([str(traces), "--validate", str(results.folder)]) == 2
    assert "measured has no results of none" in capsys.readouterr().err


def test_what_a_prediction_cannot_be_is_said(traces, monkeypatch):
    """Steps that no contention gives, and traces of none beside which other programs ran."""
    found = calibrate([traces], LINKS)
    none = found.simulate("none", SHAPE, 1).step
    measured = {"none": none, "ddp_bucketed": 0.5 * none}
    (line,) = found.matched({2: measured}).doubts(measured)
    assert line.startswith("ddp_bucketed: no contention gives the")
    measured["ddp_bucketed"] = 1.001 * found.simulate("ddp_bucketed", SHAPE, 2).step
    assert found.matched({2: measured}).doubts(measured) == []
    (line,) = replace(found, faster=("zero1",)).doubts({})
    assert line.startswith("zero1 took less time than none in the traces")
    assert calibrate([traces], LINKS).faster == ()
    true = calibrating.undisturbed
    monkeypatch.setattr(calibrating, "undisturbed", lambda trace: [
        replace(step, seconds=3 * step.seconds)
        if trace.configuration["implementation"] == "none" else step for step in true(trace)
    ])  # fmt: skip
    assert "ddp_bucketed" in calibrate([traces], LINKS).faster
