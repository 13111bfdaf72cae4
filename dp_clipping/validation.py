"""Refuses networks that cannot be private, by the layer's name, with a replacement.

A per-sample gradient exists only where a sample's loss depends on that sample alone. Modules that
mix samples, or carry what they saw from one batch into the next, have none.
"""

import sys
from typing import NoReturn

from torch import nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.weight_norm import WeightNorm

from dp_clipping.distributed.torch_compat import ComposableReplica
from dp_clipping.layers.recurrent import kinds as recurrent_kinds
from dp_clipping.torch_compat import (
    BATCH_NORM,
    INSTANCE_NORM,
    hooks_of,
    never_compiled,
    own_buffers,
    own_parameters,
    tree_leaves,
)

REPLICAS = (
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    ComposableReplica,
)  # DDP as hooks on a module


def replicas() -> tuple[type, ...]:
    """Returns classes of wrappers that keep replicas in step, Opacus's too if it was imported."""
    opacus = sys.modules.get("opacus.distributed")
    if opacus is None:
        return REPLICAS
    return (*REPLICAS, opacus.DifferentiallyPrivateDistributedDataParallel)


def refuse_wrapper(kind: str) -> NoReturn:
    """Raises RuntimeError where a wrapper of class `kind` would call a private model."""
    raise RuntimeError(
        f"{kind} would wrap a private model, whose clipped sums it does not exchange: wrap or "
        "shard the network first and make that private, "
        'engine.make_private(module=ddp.wrap("ddp_bucketed", network), ..)'
    )


@never_compiled
def refuse_to_be_compiled() -> None:
    """Raises RuntimeError where a private model is called by compiled code: it is not traced."""
    raise RuntimeError(
        "torch.compile of a private model: compile the network or its blocks, and before "
        "make_private, as network.compile() or block.compile()"
    )


def check_module(module: nn.Module) -> None:
    """Raises ValueError listing every module that cannot be trained privately."""
    problems = [
        f"{name or 'the module'} ({type(child).__name__}): {problem[0]}; {problem[1]}"
        for name, child in module.named_modules()
        if (problem := problem_of(child, module.training))
    ]
    if problems:
        raise ValueError("not trainable privately: " + " | ".join(problems))
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the module has no trainable parameter: there is nothing to make private")


def normalizations(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns name and module of all normalisations that may mix samples in training mode."""
    kinds = (BATCH_NORM, INSTANCE_NORM)
    return [(name, m) for name, m in network.named_modules() if isinstance(m, kinds)]


def problem_of(module: nn.Module, in_training: bool = True) -> tuple[str, str] | None:
    """Returns why this one module is refused, and what to do; None if it is not.

    Args:
        in_training: the network is, so that a batch norm in evaluation will stay so.
    """
    if refusal := getattr(module, "refuses_privacy", None):  # a variant of ddp may have it
        return refusal
    if isinstance(module, replicas()) and not hasattr(module, "gradient_ready"):
        return "would not exchange clipped sums, which autograd does not accumulate", (
            'give ddp.wrap("torch_ddp", network), or another of its variants'
        )
    if isinstance(module, BATCH_NORM):
        fixed = not module.training and module.running_mean is not None
        if fixed and (in_training or not any(p.requires_grad for p in module.parameters())):
            return None  # fixed statistics mix nothing
        return "normalises with statistics of the batch, which mix samples", "use nn.GroupNorm"
    if isinstance(module, INSTANCE_NORM) and module.track_running_stats:
        return "carries statistics of earlier samples", "set track_running_stats=False"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        trainable = module.weight.requires_grad
        if trainable and module.sparse:
            return "has sparse gradients", "set sparse=False"
        if module.max_norm is not None:
            return "renormalises rows that the batch looks up", "set max_norm=None"
        if trainable and module.scale_grad_by_freq:
            return "scales by frequencies in the batch, which mixes samples", (
                "set scale_grad_by_freq=False"
            )
    own = list(module.parameters(recurse=False))
    if any(isinstance(p, UninitializedTensorMixin) for p in own):
        return "has parameters without a shape yet", (
            "run the network once on made-up inputs, and build the optimizer after that"
        )
    if any(p.is_complex() and p.requires_grad for p in own):
        return "has complex parameters, whose gradients are not clipped here", (
            "keep real and imaginary parts as two parameters, and use torch.complex in forward"
        )
    if any(p.requires_grad for p in module.parameters()):
        if isinstance(module, nn.RNNBase) and not recurrent_kinds.is_plain(module):
            return "computes something else than nn.LSTM, nn.GRU or nn.RNN, on their kernels", (
                "use one of those, without parametrizations, or freeze it"
            )
        if isinstance(module, nn.LSTMCell) and not recurrent_kinds.is_plain_cell(module):
            return "computes something else than nn.LSTMCell, on kernels without rules for vmap", (
                "use that, without parametrizations, or freeze it"
            )
    for hook in hooks_of(module):
        if isinstance(hook, WeightNorm):
            return "computes its weight before its forward, where no sample is seen", (
                "use nn.utils.parametrizations.weight_norm"
            )
        if isinstance(hook, BasePruningMethod):
            (name, *_) = [n for n in own_parameters(module) if n.endswith("_orig")] or ["weight"]
            name = name.removesuffix("_orig")
            return "is pruned, with a mask that is multiplied in before its forward", (
                f'call nn.utils.prune.remove(module, "{name}"), after which training fills the '
                "zeros; to keep them, also nn.utils.parametrize.register_parametrization(module, "
                f'"{name}", masked) with a module that returns x * mask, of a buffer'
            )
    buffers = set(own_buffers(module).keys())
    if "weight_u" in buffers or {"_u", "_v"} <= buffers:
        call = "torch.nn.utils.remove_spectral_norm(layer)"
        if "weight_u" not in buffers:
            call = 'torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")'
        return "updates the power iteration of spectral_norm in training", (
            f"remove it, {call}, or use torch.nn.utils.parametrizations.orthogonal or weight_norm"
        )
    return None


def refuse_packed(args: tuple, kwargs: dict) -> None:
    """Raises ValueError for a PackedSequence, which no sharded or compiled network is given."""
    leaves = tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise ValueError(
            "the model is given a PackedSequence, in which a sample has no rows of its own, and "
            "the network is sharded or compiled: give the padded tensor and the lengths, and pack "
            "in the model's forward, pack_padded_sequence(x, lengths.cpu(), batch_first=True, "
            "enforce_sorted=False)"
        )
