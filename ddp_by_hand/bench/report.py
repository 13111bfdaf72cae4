"""Turns rows of results into the comparison table, the picture and the exit status."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ddp_by_hand.bench.gate import FLOOR, TOLERANCE, tolerance
from ddp_by_hand.bench.memory import draw_predicted, predictions
from ddp_by_hand.bench.options import NOT_PRIVATE
from ddp_by_hand.bench.settings import Settings, Subject, has_rounds
from ddp_by_hand.bench.sharded import SPLIT
from ddp_by_hand.bench.worker import plan
from ddp_by_hand.lm.model import flops_per_token
from ddp_by_hand.measure import (
    OK,
    UNAVAILABLE,
    Column,
    Results,
    draw_comparison,
    format_table,
    peak_flops,
    summarize,
)
from ddp_by_hand.measure.files import say_unwritten
from ddp_by_hand.measure.report_tables import calls, milliseconds
from ddp_by_hand.measure.runs import Cell, beside, cells_of, ratio_beside
from ddp_by_hand.measure.statistics import NOISY, Summary
from ddp_by_hand.measure.words import counted

REFERENCE = "torch_ddp"
WITHOUT_PRIVACY = "not private"  # what the overhead of privacy is relative to, in the picture
MIB = 1 << 20


def report(
    settings: Settings, world_size: int, device: str, unwritten: Sequence[dict] = ()
) -> tuple[str, int]:
    """Print the comparison, then draw it and memory: a picture that fails costs no table.

    Returns what was printed, and the exit status: 1 if a gradient was wrong, a cell failed, or
    something could not be written.

    Args:
        unwritten: rows that are measured and not in the results' file.
    """
    rows = comparison(settings, world_size, device, unwritten)
    title = (
        f"{counted(world_size, 'rank')} on {device}, {settings.batch_size} sequences of "
        f"{settings.model.context_length} tokens per rank and step, {settings.dtype}"
    )
    if settings.has_private:
        title += f", {describe_privacy(settings)}"
    table = format_table(columns(rows), rows, title=title)
    parts = [table, _legend(rows, device, settings)]
    parts += [_plans(rows)] if settings.show_plan else []
    parts += [f"{row['name']}: {row['detail']}" for row in rows if row.get("detail")]
    text = "\n\n".join([*parts, f"results: {Results(settings.output_dir).path}"])
    print(text, flush=True)
    status = int(any(_is_bad(row) for row in rows) or bool(unwritten))
    on_gpu = device != "cpu"
    pictures = {
        "comparison": lambda path: _draw(settings, rows, device, title, path),
        "memory": lambda path: draw_predicted(settings, rows, world_size, on_gpu, title, path),
    }
    for name, draw in pictures.items():
        picture = settings.output_dir / f"{name}.png"
        try:
            if draw(picture):
                print(f"picture: {picture}", flush=True)
        except OSError as error:
            say_unwritten(picture, error)
            status = 1
    return text, status


def _draw(settings: Settings, rows: list[dict], device: str, subtitle: str, picture: Path) -> bool:
    has_overhead = any(row.get("ratio_to_ordinary") for row in rows)
    labels = {row["label"] for row in rows}
    reference = WITHOUT_PRIVACY if has_overhead else REFERENCE if REFERENCE in labels else None
    heading = "Step time, and the exposed communication in it"
    if settings.has_private:
        heading = "Step time with privacy and without, and the exposed communication in it"
    compared = "ratio_to_ordinary" if has_overhead else "ratio_to_reference"
    pictured = [
        row | {"label": _picture_label(row), "ratio_to_reference": row.get(compared)}
        # of a CPU: the process's memory, most of it Python and libraries
        | ({"peak_memory_mb": None} if device == "cpu" else {})
        for row in rows
    ]  # fmt: skip
    baseline = FLOOR if FLOOR in labels else None
    draw_comparison(
        pictured, picture, title=heading, subtitle=subtitle, baseline=baseline,
        reference=reference,
    )  # fmt: skip
    return True


def _picture_label(row: dict) -> str:
    wrong = row.get("is_wrong") and row["name"] not in (FLOOR, REFERENCE)
    return row["name"] + (" (WRONG)" if wrong else "")


def columns(rows: list[dict]) -> list[Column]:
    """Returns the table's columns: about 130 characters, and 40 more with private training.

    MFU only where the device's peak is known, the overhead of privacy only where something has it.
    """
    found = [
        Column("label", "implementation"),
        Column("clipping") if any(row["clipping"] != NOT_PRIVATE for row in rows) else None,
        Column("error", right=True),
        Column("step", "step ms [p10, p90]", _step, right=True),
        Column("tokens_per_second", "tokens/s", ",.0f"),
        Column("exposed_ms", "exposed ms", milliseconds),
        Column("ratio_to_ordinary", "overhead [95 %]", str, right=True),
        Column("ratio_to_baseline", f"× {FLOOR}", lambda found: f"{found.value:.3f}", right=True),
        Column("ratio_to_reference", f"× {REFERENCE} [95 %]", str, right=True),
        Column("collectives", "calls", calls),
        Column("bytes", "MiB sent", lambda count: f"{count / MIB:,.1f}"),
        Column("peak_memory_mb", "peak MiB", ",.0f"),
        Column("predicted", "predicted MiB", right=True),
        Column("mfu", "MFU", ".1%"),
    ]
    optional = ("ratio_to_ordinary", "predicted", "mfu")
    return [
        column for column in found
        if column and (column.key not in optional or any(row.get(column.key) for row in rows))
    ]  # fmt: skip


def _step(times: Summary) -> str:
    median, p10, p90 = map(milliseconds, (times.median, times.p10, times.p90))
    return f"{median} [{p10}, {p90}]"


def comparison(
    settings: Settings, world_size: int, device: str, unwritten: Sequence[dict] = ()
) -> list[dict]:
    """Returns one row per subject, in table order, from what has been measured so far."""
    measured = {row["key"]: row for row in (*Results(settings.output_dir).rows(), *unwritten)}
    rows: dict[Subject, list[dict]] = {subject: [] for subject in settings.subjects}
    for cell in plan(settings):
        if row := measured.get(cell.row(settings, world_size, device)["key"]):
            rows[cell.subject].append(row)
    cells = {subject: cell for subject, own in rows.items() for cell in cells_of(own)}
    for subject, cell in cells.items():
        ranks = subject.layout.sizes(world_size)[0]  # those with a batch of their own
        cell.facts["total_batch_size"] = ranks * settings.batch_size
    known = {} if device == "cpu" else predictions(settings, world_size, on_gpu=True)
    found = []
    for subject, own in rows.items():
        row = {
            "label": subject.name, "clipping": subject.clipping, "name": subject.label,
            "plan": None, "status": "missing", "reason": "not measured yet",
        }  # fmt: skip
        if cell := cells.get(subject):
            row |= _row(subject, own, cell, [*cells.values()], settings)
        if "step" in row:
            row["mfu"] = _mfu(settings, row["tokens_per_second"] / world_size, device)
            if row["label"] in known and not subject.is_private and row["peak_memory_mb"]:
                expected = sum(known[row["label"]].values())
                off = expected / row["peak_memory_mb"] - 1
                row["predicted"] = f"{expected:,.0f} ({off:+.1%})"
        found.append(row)
    return found


def _row(
    subject: Subject, rows: list[dict], cell: Cell, cells: list[Cell], settings: Settings
) -> dict:
    """Returns what is known of a subject.

    Ratios are to the floor and the reference in the same clipping mode, so that they show the cost
    of communication alone.
    """
    row: dict = {"plan": cell.facts.get("plan")}
    if (error := cell.gradient_error) is not None:
        row["is_wrong"] = not error <= tolerance(subject, settings)
        row["error"] = f"{error:.1e}" + (" WRONG" if row["is_wrong"] else "")
        row["detail"] = next((r["worst_gradient"] for r in rows if "worst_gradient" in r), None)
    if cell.failures:
        failed = next(r for r in rows if r["status"] != OK)
        row |= {"status": failed["status"], "reason": failed.get("reason")}
        if failed.get("traceback"):
            lines = textwrap.indent(failed["traceback"], "    ")
            row["detail"] = f"{row['reason']}\n{lines}"
    if cell.failures or not cell.samples():
        return row
    times = summarize(cell.samples())
    floor = beside(cells, cell, "implementation", FLOOR)
    return {
        **row,
        "status": OK,
        "reason": None,
        "samples_ms": cell.samples(),
        "step": times,
        "tokens_per_second": cell.tokens_per_step / times.median * 1e3,
        "exposed_ms": floor and times.median - summarize(floor.samples()).median,
        "ratio_to_baseline": ratio_beside(cell, floor),
        "ratio_to_reference": ratio_beside(cell, beside(cells, cell, "implementation", REFERENCE)),
        "ratio_to_ordinary": ratio_beside(cell, beside(cells, cell, "clipping", NOT_PRIVATE)),
        "collectives": cell.facts.get("collectives"),
        "bytes": cell.facts.get("bytes"),
        "peak_memory_mb": cell.peak_memory_mb,
    }


def _mfu(settings: Settings, tokens_per_second: float, device: str) -> float | None:
    dtype = "float32" if settings.dtype == "float32" else "bfloat16"
    peak = peak_flops(device, dtype)
    return flops_per_token(settings.model) * tokens_per_second / peak if peak else None


def _is_bad(row: dict) -> bool:
    return row.get("is_wrong", False) or row["status"] not in (OK, UNAVAILABLE)


def describe_privacy(settings: Settings) -> str:
    """Describes clipping and noise with the names of the options."""
    privacy = settings.privacy
    text = (
        f"noise multiplier {privacy.noise_multiplier:g}, gradient norm {privacy.max_grad_norm:g} "
        f"({privacy.clipping_style}, {privacy.clipping_function})"
    )
    if privacy.tile_size is not None:
        text += f", tiles of {privacy.tile_size}"
    if privacy.memory_budget_mb is not None:
        text += f", memory budget {privacy.memory_budget_mb:g} MiB"
    if set(SPLIT) & set(settings.implementations):
        text += f", norms reduced {privacy.norm_reduction}"
    return text


def _plans(rows: list[dict]) -> str:
    """Describes the plans of rank 0; a plan that several rows share is printed once."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row["plan"]:
            names.setdefault(row["plan"], []).append(row["name"])
    if not names:
        return "no plan: no step has run on fused kernels"
    return "\n\n".join(f"plan of {', '.join(own)}\n{plan}" for plan, own in names.items())


def _legend(rows: list[dict], device: str, settings: Settings) -> str:
    memory = "the process's memory" if device == "cpu" else "the GPU's allocated memory"
    lines = [
        f"error         largest relative error of a float32 gradient, against one process on the "
        f"whole batch ({FLOOR}: on its own shard); wrong above {TOLERANCE:g}",
        "step          of the slowest rank: median over all timed steps, with its spread; "
        "warmup is not timed",
        f"exposed       communication that computation does not hide, as step minus {FLOOR} (see "
        "PROFILING.md, Exposed communication)",
        "×             ratio of step times, below 1 is faster; [95 %]: confidence interval over "
        "the rounds",
        "calls, sent   collectives that a step starts, and bytes of gradients, and of "
        "gathered parameters, handed to them; –: the implementation has no stats()",
        f"peak          of {memory}, the largest over ranks and rounds",
    ]
    if any(row.get("predicted") for row in rows):
        lines.append(
            "predicted     the peak as it follows from the model's shape (by kind in memory.png), "
            "and how far off that is"
        )
    if apart := [subject for subject in settings.subjects if has_rounds(subject.implementation)]:
        lines.append(
            f"{apart[0].name:<13} one exchange in {settings.local_steps(apart[0])} steps, of which "
            "step, calls and sent are means; its error is that of what two rounds move"
        )
    if split := [name for name in SPLIT if name in settings.implementations]:
        lines.append(
            f"{', '.join(split):<13} ranks of the tensor axis share a batch and its work: no step "
            f"of {FLOOR} is like theirs, compare tokens/s"
        )
    if settings.has_private:
        lines += _privacy_legend(rows, settings)
    if any(row.get("mfu") for row in rows):
        lines.append("MFU           model FLOPs per second over the GPU's peak")
    floor = next((row for row in rows if row["label"] == FLOOR and row["status"] == OK), None)
    if floor and floor["step"].p90 > NOISY * floor["step"].p10:
        lines.append(
            f"The machine was busy: steps of {FLOOR} took {floor['step'].p10:.0f} to "
            f"{floor['step'].p90:.0f} ms. Close other programs, or raise --rounds, before you "
            "compare."
        )
    return "\n".join(lines)


def _privacy_legend(rows: list[dict], settings: Settings) -> list[str]:
    lines = [
        "clipping      mode of private training; error: of its gradient without noise, against one "
        "process that clips sequence by sequence",
        f"              exposed and × compare rows of the same clipping, with {FLOOR} the "
        "implementation",
    ]
    if any(":" in row["clipping"] for row in rows):
        lines.append(
            "              MODE:width, MODE:input_length: that algorithm for the norms of every "
            "linear layer; MODE alone: planned by cost"
        )
    limit = max(tolerance(subject, settings) for subject in settings.subjects)
    if limit > TOLERANCE:
        lines.append(
            "              width: norms with an allowance for their rounding, which grows with the "
            f"sequence, so the error is wrong above {limit:.2g}"
        )
    if any(row.get("ratio_to_ordinary") for row in rows):
        lines.append(
            "overhead      step time over that of the same implementation, clipping "
            f"{NOT_PRIVATE}, in the same rounds"
        )
    if any(row["label"].startswith(REFERENCE) for row in rows):
        lines.append(
            f"{REFERENCE}     its reducer does not see private gradients: they are all-reduced by "
            "our own calls, after backward"
        )
    return [
        *lines,
        "Private steps are timed on batches of fixed size, not on Poisson samples: no ε is stated.",
    ]
