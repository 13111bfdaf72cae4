r"""Plans a private training: model size, batch, steps and noise for a budget, and the loss.

    python -m ddp_by_hand.experiments.plan_privacy --epsilon 2 --examples 1e8 --compute 1e21
    python -m ddp_by_hand.experiments.plan_privacy --epsilon 2 --examples 1e8 \
        --gpu-hours 5000 --gpus 8 --throughput-from results/llama-3.2-1b-2xh200
    python -m ddp_by_hand.experiments.plan_privacy --calibrate my_runs --epsilon 2 --compute 1.2e12

The law is the formula of McKenna et al. 2025, "Scaling Laws for Differentially Private Language
Models": loss from model size, steps and noise-batch ratio, fitted here to the twenty trainings that
the paper prints. These are BERTs: other models and data have other losses. `--calibrate` trains
small transformers, interpolates between them, then predicts a further training and trains it.
docs/planning.md says how far each law carries.
"""

import sys
from pathlib import Path

from ddp_by_hand.examples.private_text import cut_sequences
from ddp_by_hand.experiments.plan_privacy import calibrate
from ddp_by_hand.experiments.plan_privacy.law import Law
from ddp_by_hand.experiments.plan_privacy.options import (
    PROGRAM,
    PUBLISHED,
    Options,
    Throughput,
)
from ddp_by_hand.experiments.plan_privacy.picture import draw_plan
from ddp_by_hand.experiments.plan_privacy.plan import Budget, Candidate, Planner, sizes_of
from ddp_by_hand.experiments.plan_privacy.published import published_law
from ddp_by_hand.experiments.plan_privacy.runs import CONTEXT
from ddp_by_hand.measure import Column, format_table
from ddp_by_hand.measure.command_line import bad_input, check_folder
from ddp_by_hand.measure.options import program

HOUR = 3600


@program(PROGRAM, Options, needs=["matplotlib"])
@bad_input()
def main(options: Options) -> int:
    return plan(options) if options.calibrate is None else check(options, options.calibrate)


def plan(options: Options) -> int:
    """Prints the best training of each model size and of all, and draws them."""
    law = law_of(options.law)
    throughput = options.throughput()
    flops = options.compute or options.gpu_hours * HOUR * throughput.flops_per_second
    budget = budget_of(options, options.examples, flops)
    sizes = options.parameters or tuple(sizes_of(law))
    print(
        f"{title_of(budget)}\nlaw: {law.source}; {law.deviation:.1%} off on average {law.compared}"
    )
    if options.dry_run:
        print(f"{len(sizes)} model sizes, {law.steps[0]:,.0f} to {law.steps[1]:,.0f} steps: not "
              "searched")  # fmt: skip
        return 0
    planner = Planner(law, budget, sizes)
    chosen = planner.exact(planner.best(), options.accountant)
    print(table(planner, throughput, options.gpus))
    print(describe(law, budget, chosen, options.accountant))
    enough = planner.enough(planner.best())
    if enough < budget.flops / 2:
        print(f"{enough:.1e} FLOPs reach this loss to within 1%: --compute {enough:.0e}")
    if throughput:
        print(f"expected: {hours_of(chosen, law, throughput, options.gpus):,.1f} hours on "
              f"{options.gpus} GPUs; {throughput.source}")  # fmt: skip
    draw_plan(options.output, planner, chosen, title_of(budget))
    print(f"picture: {options.output}")
    return 0


def check(options: Options, folder: Path) -> int:
    """Fits a law to small runs on text; predicts a run, trains it, prints both side by side."""
    text = cut_sequences(options.data or "stdlib", CONTEXT)
    runs = calibrate.fitting_runs()
    budget = budget_of(options, len(text.training), options.compute)
    if options.dry_run:
        tokens = sum(run.steps * run.batch for run in runs) * CONTEXT
        print(f"{title_of(budget)}\n{len(runs)} runs of {tokens:,} tokens in all would be trained, "
              "and one within the budget")  # fmt: skip
        return 0
    check_folder("--calibrate", folder, create=True)
    calibrate.train_runs(folder, text, runs, lambda line: print(line, flush=True))
    law = calibrate.law_of(folder)
    print(f"law: {law.source}; {law.deviation:.1%} off on average {law.compared}")
    planner, width, chosen = calibrate.plan_check(law, budget, options.accountant)
    print(title_of(budget), table(planner, None, 1), sep="\n")
    print(describe(law, budget, chosen, options.accountant), flush=True)
    row = calibrate.checked(folder, text, width, chosen, budget, law.source)
    print(calibrate.side_by_side(row))
    seen = calibrate.observations(calibrate.fitting_rows(folder))
    draw_plan(options.output, planner, chosen, title_of(budget), row["measured_loss"], seen)
    print(f"picture: {options.output}")
    return 0


def law_of(name: str) -> Law:
    """Returns the published law, or that of a folder."""
    return published_law() if name == PUBLISHED else calibrate.law_of(Path(name))


def budget_of(options: Options, examples: int, flops: float) -> Budget:
    delta = examples**-1.1 if options.delta is None else options.delta
    return Budget(options.epsilon, delta, examples, flops)


def title_of(budget: Budget) -> str:
    return (
        f"({budget.epsilon:g}, {budget.delta:.1e})-private training on {budget.examples:,} "
        f"examples with {budget.flops:.2g} FLOPs"
    )


def hours_of(one: Candidate, law: Law, throughput: Throughput, gpus: int) -> float:
    return one.flops(law.tokens) / (throughput.flops_per_second * gpus) / HOUR


def table(planner: Planner, throughput: Throughput | None, gpus: int) -> str:
    """Formats the best training of each model size, with σ by the search's table."""
    rows = []
    for size in planner.sizes:
        one = planner.best_of(size)
        row = {"parameters": size}
        if one:
            row |= {"steps": one.steps, "batch": one.batch, "σ": one.sigma, "σ / batch": one.ratio,
                    "passes": one.steps * one.batch / planner.budget.examples,
                    "loss": one.loss}  # fmt: skip
            if throughput:
                row["hours"] = hours_of(one, planner.law, throughput, gpus)
        rows.append(row)
    forms = {"parameters": ",.3g", "steps": ",.0f", "batch": ",.0f", "σ": ".3f",
             "σ / batch": ".1e", "passes": ".2f", "loss": ".3f", "hours": ",.1f"}  # fmt: skip
    names = [name for name in forms if name != "hours" or throughput]
    columns = [Column(name, None, forms[name]) for name in names]
    return format_table(columns, rows, f"Best of each size; loss in {planner.law.unit}")


def describe(law: Law, budget: Budget, chosen: Candidate, accountant: str) -> str:
    """Says the chosen training, the call that makes it private, and where the law is left."""
    batch, steps = int(chosen.batch), int(chosen.steps)
    lines = [
        f"chosen: {chosen.parameters:,.3g} parameters, {steps:,} steps of {batch:,} examples, σ "
        f"{chosen.sigma:.3f} by {accountant}, σ / batch {chosen.ratio:.2e}: predicted loss "
        f"{chosen.loss:.3f}",
        f"engine.make_private(.., noise_multiplier={chosen.sigma:.4f}, "
        f"sample_rate={batch / budget.examples!r}, steps={steps}, expected_batch_size={batch})",
    ]
    beyond = law.beyond(chosen.parameters, chosen.steps, chosen.ratio)
    at_end = law.at_end(chosen.parameters, chosen.steps)
    if beyond:
        lines.append(f"beyond what the law was fitted to: {'; '.join(beyond)}")
    elif at_end:
        lines.append(f"at the end of what the law was fitted to: {', '.join(at_end)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
