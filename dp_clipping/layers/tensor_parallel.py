"""Runs layers that tensor parallel has split on this rank's part of their `DTensor`s.

`parallelize_module` puts hooks around a layer, which make its input a `DTensor` and take its output
back; in between, the captured forwards compute with plain tensors. W is the number of ranks:

| layer | weight | input | output | per-sample gradients here |
| --- | --- | --- | --- | --- |
| colwise linear | [d/W, p] | whole | [.., d/W] | rows of W's and b's, of all tokens |
| rowwise linear | [d, p/W] | [.., p/W] | a term of a sum | columns of W's; all of b's |
| rowwise embedding | [V/W, d] | whole | a term of a sum | rows of the vocabulary |
| colwise embedding | [V, d/W] | whole | [.., d/W] | columns |
| replicated | whole | whole | whole | all, the same on every rank |

The input's gradient is a term of a sum where the output is split; the hooks' own conversions add
the terms up, forward and backward. So a rank's squared norms are those of its part, and add up over
the ranks, what is replicated counted once.

A layer that gets only some of a sample's tokens is refused: its G is a sum over ranks, and
‖Σ_r G_r‖² is not Σ_r ‖G_r‖².

`layer` is a captured layer's state (`handle.LayerState`), which errors name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dp_clipping.distributed import dtensor
from dp_clipping.distributed.dtensor import is_sharded
from dp_clipping.distributed.norm_reduce import refuse_split_samples

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class ShardedCall:
    """One call of a layer on local tensors.

    Attributes:
        x, weight, bias: what this rank computes with.
        mesh: the mesh of the layer's parameters; None: they are plain tensors, and so is the
            output.
        placement: the placement of the output.
        width: the width of the whole output, its last dimension.
        late_bias: what is added after the terms of all ranks.
        outside: [..], ids that are other ranks'.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    mesh: DeviceMesh | None = None
    placement: Placement | None = None
    width: int = 0
    late_bias: Tensor | None = None
    outside: Tensor | None = None

    def leave(self, y: Tensor) -> Tensor:
        """Returns the output that the hooks around the layer expect."""
        if self.mesh is None:
            return y
        if self.outside is not None:  # forward adds a zero there, backward gets one
            y = y.masked_fill(self.outside.expand(y.shape[:-1]).unsqueeze(-1), 0)
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placement = self.placement
        if placement.is_shard():
            placement = Shard(y.dim() - 1)
        shape = torch.Size((*y.shape[:-1], self.width))
        stride = torch.empty(shape, device="meta").stride()  # of a contiguous tensor
        y = DTensor.from_local(
            y, self.mesh, (placement,), run_check=False, shape=shape, stride=stride
        )
        if self.late_bias is None:
            return y
        whole = y.redistribute(placements=(Replicate(),))
        bias = self.late_bias.detach().to(whole.dtype)
        return whole + DTensor.from_local(bias, self.mesh, (Replicate(),), run_check=False)


def linear(
    layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> ShardedCall:
    """Returns the call for y = x Wᵀ + b; `transposed`: W is stored [p, d]."""
    if not is_sharded(weight):
        return ShardedCall(plain(layer, x), weight, bias)
    from torch.distributed.tensor import Partial, Replicate, Shard

    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    mesh, placement = _placement(layer, weight, "weight")
    width = weight.shape[out_dim]
    if placement.is_shard(in_dim):
        x = _local(layer, x, mesh, Shard(x.dim() - 1), Shard(x.dim() - 1))
        late = None if bias is None else _same_place(layer, bias, mesh, Replicate())
        return ShardedCall(x, local(weight), None, mesh, Partial(), width, late_bias=late)
    is_split = placement.is_shard(out_dim)
    of_output = Shard(0) if is_split else Replicate()
    x = _local(layer, x, mesh, Replicate(), Partial() if is_split else Replicate())
    bias = None if bias is None else _same_place(layer, bias, mesh, of_output)
    return ShardedCall(x, local(weight), bias, mesh, of_output, width)


def embedding(
    layer: Any, ids: Tensor, weight: Tensor, padding_idx: int | None
) -> tuple[ShardedCall, int | None]:
    """Returns the call for y = W[ids], and the padding's id here (None: another rank's)."""
    if not is_sharded(weight):
        return ShardedCall(plain(layer, ids), weight), padding_idx
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh, placement = _placement(layer, weight, "weight")
    ids = _local(layer, ids, mesh, Replicate(), Replicate())
    vocabulary, width = weight.shape
    rows = local(weight)
    if not placement.is_shard(0):
        of_output = Shard(-1) if placement.is_shard() else Replicate()
        return ShardedCall(ids, rows, None, mesh, of_output, width), padding_idx
    start = mesh.get_local_rank() * -(-vocabulary // mesh.size())  # as `torch.chunk` cuts
    ids = ids - start
    outside = (ids < 0) | (ids >= len(rows))
    if padding_idx is not None:
        padding_idx -= start
        padding_idx = padding_idx if 0 <= padding_idx < len(rows) else None
    ids = ids.masked_fill(outside, 0)
    return ShardedCall(ids, rows, None, mesh, Partial(), width, outside=outside), padding_idx


def norm(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> ShardedCall:
    """Returns the call of a normalisation, whose weights, if DTensors, are whole on every rank."""
    if not is_sharded(weight):
        return ShardedCall(plain(layer, x), weight, bias)
    from torch.distributed.tensor import Replicate

    mesh, placement = _placement(layer, weight, "weight")
    if not placement.is_replicate():
        _refuse_placement(layer, "weight", placement)
    x = _local(layer, x, mesh, Replicate(), Replicate())
    bias = None if bias is None else _same_place(layer, bias, mesh, Replicate())
    return ShardedCall(x, local(weight), bias, mesh, Replicate(), x.shape[-1])


def refuse_distributed(layer: Any, *tensors: Tensor | None) -> None:
    """Refuses DTensors, for layers whose arithmetic is not known here."""
    if any(map(is_sharded, tensors)):
        raise ValueError(
            f"{layer.name or 'the network'} is given DTensors, and tensor parallel is supported "
            "for linear layers, embeddings and norms: leave it out of the plan, or freeze it; if "
            "it has parameters of its own beside layers of the plan, move those to a module "
            "without such layers"
        )


def refuse_split_rows(layer: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Refuses a layer whose hooks are given other rows than they return, by its local parts.

    Where they gather or scatter tokens (sequence parallel), plain layers between two such have only
    some of each sample's, and nothing in them shows it.
    """
    if layer.kind in ("vectorized", "convolution"):
        return
    given, returned = inputs[0].shape, outputs[0].shape[:-1]
    if layer.kind != "embedding":
        given = given[:1] if layer.kind == "embedding_bag" else given[:-1]
    if given != returned:
        raise ValueError(
            f"{layer.name}: it is given rows {list(given)} and returns rows {list(returned)}, "
            "so its hooks gather or scatter tokens or samples over the tensor-parallel axis "
            "(sequence parallel). Layers beside it would hold a partial sum of one sample's "
            "gradient, and ‖Σ_r g_r‖² is not Σ_r ‖g_r‖². Use a plan that shards features only"
        )


def local(x: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, detached; all of a plain tensor."""
    return settled(dtensor.local(x.detach()))


def settled(x: Tensor) -> Tensor:
    """Returns a tensor that collectives are done with.

    What arrives from a hook may be a wrapper that waits when it is used, which kernels cannot take.
    """
    if type(x) is Tensor or torch.compiler.is_compiling():
        return x
    # An asynchronous tensor, whose class has no public name.
    return Settle.apply(x) if type(x).__name__ == "AsyncCollectiveTensor" else x


def arrived(gy: Tensor) -> Tensor:
    """Returns the gradient of a layer's output in its backward, settled.

    Raises:
        RuntimeError: the gradients that the layer computes of it are to be differentiated, and its
            weights would be constants there.
    """
    if not torch.is_grad_enabled():
        return gy if type(gy) is Tensor else settled(gy)
    if torch.compiler.is_compiling():
        return gy
    raise RuntimeError(DIFFERENTIATED_AGAIN)


DIFFERENTIATED_AGAIN = (
    "a gradient of what the network has computed is to be differentiated itself "
    "(create_graph=True), and where layers have arithmetic of their own it depends on no weight: "
    "compute it in the forward of the network that make_private is given, as "
    "torch.autograd.grad(energy.sum(), x, create_graph=True), in its first batch too, and return "
    "it beside the outputs; a network that is sharded over ranks, or compiled, has no such "
    "gradients"
)


class Settle(torch.autograd.Function):
    """Waits for an asynchronous tensor."""

    @staticmethod
    def forward(ctx, x):
        return x.wait().detach()

    @staticmethod
    def backward(ctx, gy):
        return gy


def _placement(layer: Any, parameter: DTensor, name: str) -> tuple[DeviceMesh, Placement]:
    """Returns the mesh, of one axis, and the placement of a parameter."""
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"{layer.name}: its {name} is spread over a mesh of {mesh.ndim} axes "
            f"({parameter.placements}) while it computes: parallelize it on one axis of the mesh"
        )
    (placement,) = parameter.placements
    if placement.is_replicate():
        return mesh, placement
    if not any(placement.is_shard(d) for d in (0, 1)):
        _refuse_placement(layer, name, placement)
    size, ranks = parameter.shape[placement.dim], mesh.size()
    if -(-size // ranks) * (ranks - 1) >= size:  # on all ranks, or the others would wait for one
        raise ValueError(
            f"{layer.name}: {size} rows or columns of its {name} leave the last of {ranks} ranks "
            "none: use fewer tensor-parallel ranks, or leave this layer out of the plan"
        )
    return mesh, placement


def _same_place(layer: Any, bias: Tensor, mesh: DeviceMesh, expected: Placement) -> Tensor:
    """Returns the local part of a bias that must lie as the weight asks for."""
    if not is_sharded(bias) or bias.device_mesh != mesh:
        raise ValueError(f"{layer.name}: its bias is not on the mesh of its weight")
    if bias.placements != (expected,):
        _refuse_placement(layer, "bias", bias.placements[0])
    return local(bias)


def _local(
    layer: Any, x: Tensor, mesh: DeviceMesh, expected: Placement, gradient: Placement
) -> Tensor:
    """Returns an input's local part; its gradient here will be as `gradient` says."""
    if not is_sharded(x) or x.device_mesh != mesh:
        raise ValueError(
            f"{layer.name}: its parameters are DTensors and its input is none on their mesh: the "
            "hooks of parallelize_module, or a DTensor, must say how the input is spread"
        )
    from torch.distributed.tensor import Shard

    features = 0 if layer.kind == "embedding" else 1
    refuse_split_samples(layer.name, "input", x.placements, x.shape, features)
    (placement,) = x.placements
    if placement.is_shard(-1):
        placement = Shard(x.dim() - 1)
    if placement != expected:
        _refuse_placement(layer, "input", placement)
    return settled(x.to_local(grad_placements=(gradient,)))


def plain(layer: Any, x: Tensor) -> Tensor:
    """Returns the input of a layer whose parameters are plain tensors."""
    if type(x) is Tensor:
        return x
    if is_sharded(x):
        raise ValueError(
            f"{layer.name}: its input is a DTensor and its parameters are plain tensors: give it "
            "x.to_local(), or name it in the plan"
        )
    return settled(x)


def _refuse_placement(layer: Any, what: str, placement: Placement) -> NoReturn:
    raise ValueError(
        f"{layer.name or 'the network'} ({layer.kind}): its {what} is placed {placement}, for "
        "which per-sample gradients are not to be had: use ColwiseParallel or RowwiseParallel"
    )
