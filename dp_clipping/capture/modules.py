"""What every step asks of all modules of a network."""

from collections.abc import Iterator

from torch import nn

from dp_clipping.torch_compat import own_modules


def every_module(network: nn.Module) -> Iterator[nn.Module]:
    """`network.modules()` in no particular order, in half of the time.

    PyTorch's own makes all names on the way, through a generator for each level.
    """
    seen, found = set(), [network]
    while found:
        module = found.pop()
        if module not in seen:
            seen.add(module)
            yield module
            found += [child for child in own_modules(module).values() if child is not None]
