"""Implementations that shard the model: FSDP2, tensor parallel, and both on a mesh.

| name | data axis: other samples | tensor axis: the same samples, parts of parameters |
| --- | --- | --- |
| `fsdp2` | all ranks; parameters gathered block by block | |
| `fsdp2_root` | all ranks; parameters gathered all at once | |
| `tp` | | all ranks |
| `fsdp2_tp` | the others | two ranks each |

Nothing wraps the network: its parameters become `DTensor`s, and PyTorch communicates where they are
gathered and differentiated. The variants of `ddp/` are the case without a tensor axis.
"""

import logging
import warnings

import torch
from torch import nn

from ddp_by_hand.lm.layout import Layout, mesh_of, whole
from ddp_by_hand.lm.model import ModelConfig, Transformer

REPLICATED = Layout()
SHARDED = {
    "fsdp2": Layout(wrap="block"),
    "fsdp2_root": Layout(wrap="root"),
    "tp": Layout(tensor_ranks=None),
    "fsdp2_tp": Layout(tensor_ranks=2, wrap="block"),
}
SPLIT = tuple(name for name, layout in SHARDED.items() if layout.splits_tensors)


def layout_of(name: str) -> Layout:
    """Returns the layout of any implementation; all of `ddp/` replicate the model."""
    return SHARDED.get(name, REPLICATED)


def check_ranks(name: str, config: ModelConfig, world_size: int) -> None:
    """Raises ValueError if the implementation cannot spread the network over `world_size` ranks."""
    try:
        layout_of(name).check(world_size, lambda: Transformer(config))
    except ValueError as error:
        raise ValueError(f"{name} on {world_size} ranks: {error}") from error


def shard(network: nn.Module, layout: Layout, world_size: int, device_type: str) -> None:
    """Makes the parameters `DTensor`s, in place. The network is on the meta device."""
    from ddp_by_hand.lm.parallel import parallelize

    if layout.wrap and layout.splits_tensors:
        # It advises, for every total norm, to make the two axes one.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        # The logits are a view of a DTensor's part, which is not written to.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
    mesh = mesh_of(layout, world_size, device_type)
    parallelize(network, mesh, **({"wrap": layout.wrap} if layout.wrap else {}))


def by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups parameters that one operator can take together: by mesh, and those without one."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> None:
    """Clips the total norm of gradients on several meshes, as `clip_grad_norm_` does on one."""
    groups = by_mesh([p for p in parameters if p.grad is not None])
    if not groups:
        return
    norms = [whole(nn.utils.get_total_norm([p.grad for p in own])) for own in groups]
    total = torch.stack(norms).norm()
    for own in groups:
        nn.utils.clip_grads_with_norm_(own, limit, total)
