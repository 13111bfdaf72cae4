"""Leaves weights out of a checkpoint that another file has, and compares them by a digest.

A training framework writes the weights itself, and a LoRA adapter has a base model of its own file.
A checkpoint without these weights has a digest of them. A load uses the weights that the network
has by then, and refuses others.
"""

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dp_clipping.checkpoint.file_format import DETAILS, MODULE
from dp_clipping.trials.values import copied_bytes

LEFT_OUT = "left_out"  # in the details: the digest


def split(network: nn.Module, state: dict[str, Any], kind: str) -> tuple[dict[str, Any], str]:
    """Returns the entries of a state dict that are written, and a digest of the other ones.

    Args:
        kind: of the tensors that are written: `"trainable"` parameters, or `"none"`.
    """
    trainable = {name for name, p in network.named_parameters() if p.requires_grad}
    written = trainable if kind == "trainable" else set()
    kept = {n: x for n, x in state.items() if n in written or not isinstance(x, Tensor)}
    return kept, digest_of({name: x for name, x in state.items() if name not in kept})


def complete(network: nn.Module, saved: dict[str, Any], path: Path) -> None:
    """Completes a loaded state with the network's weights, which are not in the file.

    Raises:
        ValueError: the network has other ones.
    """
    digest = saved[DETAILS].get(LEFT_OUT)
    if digest is None:
        return
    state, written = network.state_dict(), saved[MODULE]
    others = {name: x for name, x in state.items() if name not in written}
    if digest_of(others) != digest:
        raise ValueError(
            f"{path} was saved without these weights, and the network has other ones than it had "
            "then: load the weights that were saved beside it (or the same base model) first, "
            "model.load_state_dict(..), and then the checkpoint"
        )
    saved[MODULE] = {name: written.get(name, state[name]) for name in state}


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 of names, types, shapes and values, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].detach()
        digest.update(repr((name, str(x.dtype), tuple(x.shape))).encode())
        if x.numel():
            digest.update(copied_bytes(x).data)
    return digest.hexdigest()
