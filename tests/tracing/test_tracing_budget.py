"""Where the time of a step goes: hand-written traces whose budgets are known exactly."""

from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from ddp_by_hand.tracing import basis_of, budget, budgets, describe_budgets, draw_budgets
from ddp_by_hand.tracing.budget_chart import STYLES, budget_figure
from tests.tracing.test_tracing_gpu import SIDE, kernel, load, on_device, one_step
from tests.tracing.test_tracing_outputs import fixture, texts


def floor(tmp_path, rank=0):
    """The step of `one_step` without its all-reduce, and its backward kernels 10 µs shorter."""
    events = [e for e in one_step() if "nccl" not in e["name"]]
    for event in events:
        if event["name"] == "gemm_backward":
            event["dur"] -= 10
    return load(tmp_path, events, rank)


def slowed(tmp_path, rank=0):
    """`one_step` with a copy of the bucket in the gap before the optimizer."""
    return load(tmp_path, [*one_step(), kernel("copy", 322, 327)], rank)


def test_parts_are_exact_and_add_up(tmp_path):
    one = budget([slowed(tmp_path)], [floor(tmp_path)])
    assert one.parts() == {
        "computation": 90 + 100 + 40 + 40,
        "contention": 20,
        "added": 5,
        "exposed": 50,
        "waiting": 0,
        "idle": 5,
    }
    assert one.step == 350
    assert one.floor == 350
    base = budget([floor(tmp_path)], [floor(tmp_path)])
    assert (base.contention, base.added, base.exposed, base.idle) == (0, 0, 0, 80)
    assert base.is_floor


def test_a_kernel_that_runs_more_often_is_added_and_not_contention(tmp_path):
    """By its own mean time, under the name of a kernel that the floor has too."""
    twice = load(tmp_path, [*one_step(), kernel("adam", 320, 328)], 0)
    plain = load(tmp_path, one_step(), 0)
    one = budget([twice], [plain])
    assert (one.contention, one.added, one.computation) == (0, 8, 290)


def test_less_computation_than_the_floor_is_no_contention(tmp_path):
    one = budget([floor(tmp_path)], [slowed(tmp_path)])
    assert (one.contention, one.added, one.computation) == (0, 0, 270)
    assert one.step == 350
    assert describe_budgets({"ddp": one}, "GPU kernels")[-1].startswith(
        "Computed for a shorter time than the floor: ddp 8% less."
    )
    figure = budget_figure({"ddp": one}, "title", "GPU kernels")
    assert "ddp 8% less" in " ".join(figure.texts[-1].get_text().split())


def test_means_over_ranks_and_a_trace_without_steps_is_refused(tmp_path):
    both = [slowed(tmp_path, 0), load(tmp_path, one_step(), 1)]
    one = budget(both, [floor(tmp_path, 0), floor(tmp_path, 1)])
    assert (one.contention, one.added) == (20, 2.5)
    with pytest.raises(ValueError, match="does not tell its steps"):
        budget([load(tmp_path, [kernel("gemm", 0, 100)])], [floor(tmp_path)])


def test_the_table_says_what_it_is_made_of(tmp_path):
    found = {"none": budget([floor(tmp_path)], [floor(tmp_path)])}
    found["ddp"] = budget([slowed(tmp_path)], [floor(tmp_path)])
    on_gpu = describe_budgets(found, "GPU kernels")
    assert on_gpu[0].split() == [
        "step", "computation", "contention", "added", "exposed", "waiting", "idle", "x", "floor"
    ]  # fmt: skip
    assert on_gpu[3].split() == [
        "ddp", "0.350", "0.270", "0.020", "0.005", "0.050", "0.000", "0.005", "1.000"
    ]  # fmt: skip
    traces = {"ddp": [fixture("synchronous")], "v2": [fixture("overlapped")]}
    on_cpu = describe_budgets(budgets(traces, dict.fromkeys(traces, "ddp")), basis_of(traces))
    assert "added" not in on_cpu[0]
    basis, remark, *_ = on_cpu[5:]
    assert "CPU operators (a proxy)" in basis
    assert "told apart on a GPU only" in remark


def lengths(axes) -> dict[str, float]:
    """Milliseconds of each part's colour, bars added."""
    names = {to_hex(style[0]): part for part, style in STYLES.items()}
    found = {}
    for bar in axes.patches:
        part = names[to_hex(bar.get_facecolor())]
        found[part] = found.get(part, 0) + bar.get_width()
    return found


def test_bars_are_as_long_as_the_numbers(tmp_path):
    found = {"ddp": budget([slowed(tmp_path)], [floor(tmp_path)])}
    axes = budget_figure(found, "title", "GPU kernels").axes[0]
    drawn = {k: us / 1000 for k, us in found["ddp"].parts().items() if us}
    assert lengths(axes) == pytest.approx(drawn)
    assert "floor" in texts(axes)
    longer = {"ddp": replace(found["ddp"], floor=280)}
    assert "1.250 ×" in texts(budget_figure(longer, "t", "GPU kernels").axes[0])


def test_numbers_lie_in_their_parts_and_what_stands_beside_is_in_the_picture(tmp_path):
    one = budget([slowed(tmp_path)], [floor(tmp_path)])
    one = replace(one, computation=300_000)
    narrow = {f"n{k}": replace(one, exposed=1000 * k, idle=1100 * k) for k in range(1, 40)}
    figure = budget_figure(narrow, "title", "GPU kernels")
    renderer = FigureCanvasAgg(figure).get_renderer()
    axes = figure.axes[0]
    bars = [bar.get_window_extent(renderer) for bar in axes.patches]
    numbers = [text for text in axes.texts if text.get_text().replace(".", "").isdigit()]
    assert 0 < len(numbers) < len(bars)
    for text in numbers:
        own = text.get_window_extent(renderer)
        assert any(
            bar.x0 <= own.x0 and own.x1 <= bar.x1 and bar.y0 <= own.y0 and own.y1 <= bar.y1
            for bar in bars
        ), text
    one = budget([slowed(tmp_path)], [floor(tmp_path)])
    for times in (1, 40, 4000):  # up to more than 1000 s
        long = {"ddp": replace(one, computation=times * 300_000, floor=times * 200_000)}
        figure = budget_figure(long, "title", "GPU kernels")
        renderer = FigureCanvasAgg(figure).get_renderer()
        for text in figure.axes[0].texts:
            assert text.get_window_extent(renderer).x1 < figure.bbox.x1, text


def test_the_file_and_nothing_to_draw(tmp_path):
    found = {"ddp_bucketed+find_unused_parameters": budget([slowed(tmp_path)], [floor(tmp_path)])}
    draw_budgets(found, tmp_path / "b.png", "title", "GPU kernels")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="profile none"):
        draw_budgets({}, tmp_path / "c.png", "title", "GPU kernels")


def test_transfers_by_engine(tmp_path):
    """The proof that a copy ran on a copy engine; copies of the main stream are the model's."""
    copy = kernel("Memcpy PtoP (Device -> Device)", 230, 280, SIDE, cat="gpu_memcpy")
    copy["args"]["bytes"] = 3 << 20
    own = kernel("Memcpy DtoD (Device -> Device)", 321, 325, cat="gpu_memcpy")
    ranges = [on_device("communication: copy engines", 225, 310, SIDE)]
    trace = load(tmp_path, [*one_step(), *ranges, copy, own, kernel("sum", 285, 300, SIDE)])
    transfers = {(w.name, w.is_copy): (w.calls, w.time, w.nbytes) for w in trace.transfers}
    assert transfers == {
        ("ncclDevKernel_AllReduce", False): (1, 100, 0),
        ("Memcpy PtoP (Device -> Device)", True): (1, 50, 3 << 20),
        ("sum", False): (1, 15, 0),
    }
    assert ("Memcpy DtoD (Device -> Device)", True) in {(w.name, w.is_copy) for w in trace.kernels}
