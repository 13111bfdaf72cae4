"""Prints what looking for samples that see each other costs in a run of 1,000 steps.

`python -m tests.support.checks_cost`: process time of one thread; ten of the steps are checked.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean, median
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.capture.checks.losses import Exchange, Watched
from dp_clipping.capture.discovery import LayoutDiscovery
from lm.model import ModelConfig, Transformer

CHECKS = ((LayoutDiscovery, "ensure"), (Watched, "check_graph"), (Exchange, "check"))
STEPS, TOKENS = 32, 128


@contextmanager
def timed(spent: list[float]) -> Iterator[None]:
    """Inside, the seconds of all checks are added to `spent[0]`."""

    def around(function: Callable) -> Callable:
        def call(*args, **kwargs):
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.process_time() - start

        return call

    patches = [patch.object(owner, name, around(getattr(owner, name))) for owner, name in CHECKS]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def cost(batch_size: int) -> str:
    torch.manual_seed(0)
    network = Transformer(ModelConfig(d_model=128, num_layers=4, num_heads=4, d_ff=512))
    data = TensorDataset(*(torch.randint(256, (4 * batch_size, TOKENS)) for _ in range(2)))
    model, optimizer, criterion, _ = PrivacyEngine(accountant="rdp").make_private(
        module=network, optimizer=torch.optim.AdamW(network.parameters()),
        criterion=nn.CrossEntropyLoss(), data_loader=DataLoader(data, batch_size=batch_size),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    x, y = (tensor[:batch_size] for tensor in data.tensors)
    spent, steps, checks = [0.0], [], {}
    with timed(spent):
        for number in range(1, STEPS + 1):
            spent[0], start = 0.0, time.process_time()
            outputs = model(x)
            criterion(outputs.flatten(0, 1), y.flatten(), shape=outputs.shape).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.process_time() - start - spent[0])
            if number & (number - 1) == 0:
                checks[number] = spent[0]
    step, later = median(steps), mean([checks[n] for n in checks if n > 1])
    ten = checks[1] + 9 * later
    return (
        f"{batch_size:3} x {TOKENS} tokens: a step {step * 1e3:.0f} ms, the first check "
        f"{checks[1] / step:.1f} steps, a later one {later / step:.1f}: {ten / step / 10:.2f} %"
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for size in (4, 8, 32):
        print(cost(size), flush=True)
