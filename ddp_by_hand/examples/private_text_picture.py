"""Draws a private run: what was learned, how much was clipped, what it cost."""

from collections.abc import Sequence
from pathlib import Path

from ddp_by_hand.measure.picture import FAINT, INK, frame, new_figure, save_picture

# Okabe and Ito's colour-blind safe palette; the three also differ in lightness.
TRAINING, HELD_OUT, SPENT = "#8CC5E8", "#D55E00", "#0072B2"


def draw_training(
    path: Path, lines: Sequence[dict], *, unigram_bits: float, epsilon: float, title: str
) -> None:
    """Writes three panels over steps as a PNG, atomically.

    Args:
        lines: the lines of the log, one per step: `step` and, where known, `bits`, `clipped`,
            `held_out_bits`, `epsilon`.
        unigram_bits: the bits per byte of a guess by frequency.
        epsilon: the budget.
    """
    figure = new_figure(7.6, "Private training", [title])
    loss, clipped, spent = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1, 1], "hspace": 0.42}
    )
    figure.subplots_adjust(left=0.075, right=0.975, top=0.885, bottom=0.07)
    _draw_loss(loss, lines, unigram_bits)
    _draw_clipped(clipped, lines)
    _draw_spent(spent, lines, epsilon)
    spent.set_xlim(0, max((line["step"] for line in lines), default=1))
    spent.set_xlabel("steps", size=9, color=FAINT)
    save_picture(figure, path, f"Private training: {title}")


def _draw_loss(axes, lines: Sequence[dict], unigram_bits: float) -> None:
    steps, bits = _series(lines, "bits")
    axes.plot(steps, bits, ".", ms=5, color=TRAINING, mew=0, label="sequences drawn in the step")
    steps, bits = _series(lines, "held_out_bits")
    axes.plot(
        steps,
        bits,
        color=HELD_OUT,
        lw=1.8,
        label="held-out sequences (the last files), never trained on",
    )
    label = f"guessing bytes by their frequency: {unigram_bits:.2f}"
    axes.axhline(unigram_bits, color=INK, lw=0.9, ls=(0, (4, 3)), label=label)
    if bits:
        axes.annotate(
            f"{bits[-1]:.2f}", (steps[-1], bits[-1]), xytext=(-4, 7), textcoords="offset points",
            ha="right", size=10, weight="bold", color=HELD_OUT,
        )  # fmt: skip
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    _finish(axes, "Bits per byte: 8 is a guess, lower is better", "not covered by ε")


def _draw_clipped(axes, lines: Sequence[dict]) -> None:
    steps, shares = _series(lines, "clipped")
    axes.plot(steps, [100 * share for share in shares], color=TRAINING, lw=1.8)
    axes.set_ylim(0, 104)
    axes.set_yticks([0, 50, 100])
    _finish(
        axes,
        "Sequences of the step whose gradient is longer than C and was clipped, in percent",
        "not covered by ε",
    )


def _draw_spent(axes, lines: Sequence[dict], epsilon: float) -> None:
    steps, values = _series(lines, "epsilon")
    axes.plot(steps, values, color=SPENT, lw=1.8)
    axes.axhline(epsilon, color=INK, lw=0.9, ls=(0, (4, 3)))
    axes.annotate(
        f"budget {epsilon:g}", (0, epsilon), xytext=(5, -11), textcoords="offset points", size=9,
        color=INK,
    )  # fmt: skip
    axes.set_ylim(0, 1.15 * epsilon)
    _finish(axes, "ε spent so far", "what the parameters reveal of a sequence, at most; public")


def _finish(axes, title: str, note: str) -> None:
    axes.set_title(title, loc="left", size=10, color=INK)
    axes.set_title(note, loc="right", size=9, color=FAINT, style="italic")
    frame(axes, "bottom", "left")
    axes.grid(axis="y", color="#E4E4E4", lw=0.6)


def _series(lines: Sequence[dict], name: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of the lines that have this entry."""
    known = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in known], [value for _, value in known]
