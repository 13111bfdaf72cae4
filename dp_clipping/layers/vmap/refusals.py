"""Explains errors of code under `torch.vmap`: what the code cannot do there, and a remedy.

A plain forward of the same code has run before, so vmap is the cause of an error of these kinds.
"""

import linecache
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from dp_clipping.torch_compat import transforms_run

LIBRARIES = (
    *(str(Path(str(m.__file__)).parent) for m in (torch, linecache)),
    str(Path(__file__).parents[2]),
)
OF_VMAP = (
    "vmap|[Bb]atching rule|functorch|storage|broadcast shape|detach views|"
    "requires? grad|require gradient|requires_grad"
)
ESCAPED = "escaped from inside"
WITHOUT_RULE = (
    "must override the setup_context", "implement the jvp function for custom",
    "called under a transform within torch.vmap", "support saved tensor hooks",
)  # fmt: skip
TRANSFORMED = (
    "the network calls its layers under a transform of torch.func (grad, vjp, jvp, jacrev, jacfwd, "
    "vmap), where they have no per-sample gradients: use torch.autograd there, as "
    "torch.autograd.grad(energy.sum(), x, create_graph=True) in place of torch.func.grad"
    "(energy_of)(x), and torch.autograd.functional.jvp(f, x, v, create_graph=True) in place of "
    "torch.func.jvp"
)

UNUSED = "appears to not have been used in the graph"
OF_FUNCTION = (
    "a backward of the network's own, as the torch.autograd.Function of reversible layers has it, "
    "asks for gradients of parameters, which layers of a private step do not give: let "
    "checkpoint(block, x, use_reentrant=False) run the block in its place"
)
INSTEAD = (
    "checkpoint the module as a whole where it is called, as checkpoint(self.block, x, "
    "use_reentrant=False), or let that part be a module of its own"
)


def refusal_of(error: RuntimeError, name: str, module: nn.Module) -> ValueError | None:
    """Returns the error to raise for one in a module under vmap; None: vmap is not its cause."""
    if not re.search(OF_VMAP, str(error)):
        return None
    first_line = str(error).partition("\n")[0]
    return ValueError(
        f"{name or 'the network'} ({type(module).__name__}) cannot be run under torch.vmap, "
        f"so its per-sample gradients are not to be had ({place_of(error)}{first_line}); leave "
        "out what needs numbers or new shapes: torch.where(condition, a, b) in place of if, y * "
        "mask in place of y[mask], no item(), numpy(), tolist(), nonzero(), data_ptr(), copies of "
        "y or hooks on it, no y written into a tensor made before; or let parameters of its own be "
        "in a module that does nothing else, as def forward(self, x): return x * self.scale; or "
        "use layers with arithmetic of their own (nn.LSTM, nn.GRU and nn.RNN as PyTorch has them, "
        "for example), or freeze it"
    )


def reason_of(error: BaseException) -> str:
    """Returns why a module does not run under vmap: the line of its code, and the error's."""
    lines = str(error).splitlines() or [type(error).__name__]
    return f"torch.vmap cannot run it ({place_of(error)}{lines[0]})"


def recomputed(who: str) -> ValueError:
    """Returns the error for a module whose code a backward would compute again, and cannot."""
    return ValueError(
        f"{who} checkpoints a part of its own code, which backward computes again when the "
        f"samples' copies of its parameters are gone: {INSTEAD}"
    )


def recomputation_of(error: BaseException, kinds: Iterable[str]) -> ValueError | None:
    """Returns what an error of a backward means in which a part of the network cannot run again.

    Args:
        kinds: those of the captured layers; some must compute with copies of their parameters.

    Returns:
        None: it is another error.
    """
    if isinstance(error, RuntimeError) and UNUSED in str(error):
        return ValueError(OF_FUNCTION)
    is_of_it = isinstance(error, CheckpointError) or (
        isinstance(error, RuntimeError) and ESCAPED in str(error)
    )
    if not is_of_it or "vectorized" not in kinds:
        return None
    return ValueError(
        "backward computes a checkpointed part of the network again, and it computes otherwise "
        f"than in forward ({str(error).partition(chr(10))[0]}): if checkpointing was turned on "
        "after the first batch, call model.reset_batch_layouts(); if a module checkpoints a "
        f"part of its own code, {INSTEAD}"
    )


def place_of(error: BaseException) -> str:
    """Returns the last line of code outside of libraries that has led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    if not own:
        return ""
    line = linecache.getline(own[-1].filename, own[-1].lineno or 0).strip()
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}, {line}: "


def leaves_samples(left: Sequence[list[Tensor]]) -> bool:
    """Returns whether calls for single samples leave tensors that differ, or have gradients.

    Args:
        left: what each sample's call has left.
    """
    first = left[0] if left else []
    return any(
        len(one) != len(first)
        or any(x.requires_grad or not torch.equal(x, y) for x, y in zip(one, first, strict=True))
        for one in left
    )


def refuse_transforms(name: str) -> None:
    """Raises ValueError if a layer is called under a transform of the network's own code."""
    if transforms_run():
        raise ValueError(f"{name or 'the network'}: {TRANSFORMED}")


def escape_of(error: BaseException) -> ValueError | None:
    """Returns what an error of a forward means that uses a tensor of a finished vmap.

    Or layers are called under a transform, which they were not in the first batch. None: it is
    another error.
    """
    if not isinstance(error, RuntimeError):
        return None
    if any(text in str(error) for text in WITHOUT_RULE):
        return ValueError(
            f"{TRANSFORMED}; in the first batch, too, or after model.reset_batch_layouts()"
        )
    if ESCAPED not in str(error):
        return None
    return ValueError(
        "an attribute or a variable holds what a module under torch.vmap has computed of one "
        f"sample, and code outside of that module uses it ({place_of(error)}no such tensor is "
        "valid there): return it from the module's forward, as return y, attention, in place of "
        "self.attention = attention"
    )
