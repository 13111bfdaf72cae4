"""Prints what looking for samples that see each other costs in a run of 1,000 steps.

    python -m tests.support.checks_cost --networks bert_base gpt2_small vit_b16

times networks of `experiments.networks` on the GPU, and with --device cpu in small, on one thread.
Ten of 1,000 steps are checked: 1, 2, 4, ..., 512. Each network is trained for a step before the one
that is measured: what only the first check of a process takes, to load kernels and parts of
PyTorch, is told apart.
"""

import argparse
import time
import warnings
from statistics import mean, median

import torch

from ddp_by_hand.experiments.networks.rows import ROWS
from ddp_by_hand.experiments.networks.training import training_of

STEPS, CHECKS = 33, 10  # checked are 1, 2, 4, 8, 16 and 32


def steps_of(name: str, device: torch.device, count: int) -> list[float]:
    """Returns the seconds of private steps on one batch, the first of which is the first."""
    training, batch = training_of("bookkeeping", ROWS[name], device.type == "cpu", device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    found = []
    for _ in range(count):
        start = clock()
        training.backward(batch)
        training.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - start)
    return found


def cost(name: str, device: torch.device) -> str:
    (cold,) = steps_of(name, device, 1)
    warm, *others = steps_of(name, device, STEPS)
    checked = [seconds for n, seconds in enumerate(others, 2) if not n & (n - 1)]
    plain = median(seconds for n, seconds in enumerate(others, 2) if n & (n - 1))
    first, later = warm / plain - 1, mean(checked) / plain - 1
    return (
        f"{name:14}: a step {plain * 1e3:.0f} ms, the first check {first:.1f} steps, a later one "
        f"{later:.2f}: {(first + (CHECKS - 1) * later) / 10:.2f} % of 1,000 steps; once a process "
        f"{cold - warm:.1f} s more"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--networks", nargs="+", choices=ROWS, default=["bert_base"])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in options.networks:
        print(cost(name, torch.device(options.device)), flush=True)


if __name__ == "__main__":
    main()
