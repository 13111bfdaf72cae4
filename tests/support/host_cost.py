"""Counts what a private step asks of the host: `python -m tests.support.host_cost`.

Kernels are looked up by Triton's own launcher and then not run, so neither a GPU nor a compiler is
needed, and what is left is Python: calls of functions, and milliseconds of this thread. A step's
results are whatever memory held. Beside it stands a step as it is without a GPU.
"""

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import dp_clipping
from dp_clipping import PrivacyEngine
from dp_clipping.kernels.launch import tiles
from dp_clipping.noise import gaussian as noise

WARM_UP, STEPS = 4, 30
OWN = f"{dp_clipping.__path__[0]}/"
DEVICE = "no device"  # under which kernels are kept: real ones have numbers


class Block(nn.Module):
    """A layer of BERT."""

    def __init__(self, width: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(nn.functional.gelu(self.up(x))))


class Classifier(nn.Module):
    def __init__(self, layers: int, width: int):
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.layers = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.words(tokens))[:, 0])


class Residual(nn.Module):
    """A block of a WideResNet, with GroupNorm."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())


def transformer(layers: int) -> tuple[nn.Module, Tensor]:
    return Classifier(layers, 64), torch.randint(50, (4, 16))


def convolutional(layers: int) -> tuple[nn.Module, Tensor]:
    blocks = [Residual(16) for _ in range(layers)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head), torch.randn(4, 3, 8, 8)


NETWORKS = {"transformer": transformer, "convolutional": convolutional}


class NoDevice:
    """Stands in for Triton's driver."""

    def get_current_device(self) -> str:
        return DEVICE

    get_current_stream = staticmethod(bool)  # no function in Python, as the real one

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class NoKernel:
    """Stands in for a compiled kernel: a launch of it is counted."""

    function, packed_metadata, launches = 0, (), 0

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        NoKernel.launches += 1


def _compile(self: JITFunction, key: Any, signature: Any, device: Any, *_: Any) -> NoKernel:
    kernel = self.device_caches[device][0][key] = NoKernel()
    return kernel


def _compile_for_a_gpu(
    self: JITFunction, key: Any, signature: Any, device: Any, constants: Any, options: Any,
    attributes: Any, *_: Any,
) -> NoKernel:  # fmt: skip
    """Compiles a kernel: Triton looks at its types, which its interpreter does not."""
    source = ASTSource(self, signature, constants, attributes)
    compile(source, NoDevice().get_current_target(), vars(options))
    return _compile(self, key, signature, device)


@contextmanager
def without_kernels(*, compiles: bool = False) -> Iterator[None]:
    """Enters a context in which kernels are launched on tensors of the CPU, and not run.

    `compiles`: they are compiled for an H100.
    """
    with (
        patch.object(driver, "_active", NoDevice()),
        patch.object(JITFunction, "_do_compile", _compile_for_a_gpu if compiles else _compile),
        patch.object(tiles, "HOST_DTYPES", tiles.DTYPES),
        patch.dict(tiles._known, clear=True),
        patch.object(noise, "serves", lambda total: True),
    ):
        yield


def step_of(name: str, layers: int, private: bool, compiled: bool = False) -> Callable[[], None]:
    """Returns a step of a network on one batch, as a user writes it.

    Args:
        compiled: as a whole, but without a compiler of kernels.
    """
    torch.manual_seed(0)
    network, x = NETWORKS[name](layers)
    if compiled:
        network.compile(backend="aot_eager")
    model: Any = network
    criterion: Any = nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.AdamW(network.parameters(), fused=True)
    y = torch.randint(3, (len(x),))
    if private:
        model, optimizer, criterion, _ = PrivacyEngine(accountant="rdp").make_private(
            module=network, optimizer=optimizer, criterion=criterion,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)), noise_multiplier=1.0,
            max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode="flash_bookkeeping",
        )  # fmt: skip
        model.skip_checks()

    def step() -> None:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def called_of(step: Callable[[], None]) -> Counter[str]:
    """Returns how many functions written in Python a step calls, by the file that they are in.

    `table_on` is left out: it is called again where memory is at other addresses.
    """
    counts: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is not tiles.table_on.__code__:
            counts[frame.f_code.co_filename] += 1

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # finalizers of what other code has left are no part of the step
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return counts


def calls_of(step: Callable[[], None]) -> tuple[int, int]:
    """Returns how many functions written in Python a step calls, and how many of `dp_clipping`."""
    counts = called_of(step)
    return counts.total(), sum(counts[file] for file in counts if file.startswith(OWN))


def files_of(step: Callable[[], None]) -> list[str]:
    """Returns the files of `dp_clipping` that a step passes, in their folder."""
    return sorted(file.removeprefix(OWN) for file in called_of(step) if file.startswith(OWN))


def milliseconds_of(step: Callable[[], None]) -> float:
    samples = []
    for _ in range(STEPS):
        start = time.thread_time()
        step()
        samples.append(1e3 * (time.thread_time() - start))
    return median(samples)


def main() -> None:
    torch.set_num_threads(1)
    for how, context in (("kernels left out", without_kernels), ("no GPU", nullcontext)):
        for name in NETWORKS:
            with context():
                ordinary, private = (show(how, name, is_private) for is_private in (False, True))
            print(f"{name}, 12 layers, {how}: {private / ordinary:.2f} of an ordinary step's time")


def show(how: str, name: str, private: bool) -> float:
    """Prints what a step asks of the host, and returns its milliseconds."""
    step = step_of(name, 12, private)
    for _ in range(WARM_UP):
        step()
    before = NoKernel.launches
    step()
    launches = NoKernel.launches - before
    calls, own = calls_of(step)
    took = milliseconds_of(step)
    print(
        f"{name}, 12 layers, {how}, {'private' if private else 'ordinary'}: {calls} calls in "
        f"Python, {own} of dp_clipping, in {len(files_of(step))} of its files; {launches} launches "
        f"of its kernels; {took:.1f} ms"
    )
    return took


if __name__ == "__main__":
    main()
