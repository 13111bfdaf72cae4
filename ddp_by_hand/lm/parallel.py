"""Shards training from outside the model: tensor parallel on one mesh axis, FSDP2 on another.

    network = Transformer(config)                                  # or on the meta device
    parallelize(network, mesh)                                     # axes "data", "tensor" or both
    materialize(network, device)                                   # only after the meta device

Tensor parallel (Shoeybi et al. 2019, arXiv:1909.08053) gives each rank some of the heads and of
the feed-forward's units: `query`, `key`, `value`, `gate`, `up` are split by outputs, `output` and
`down` by inputs, so that a block adds up terms of several ranks twice forward and twice backward.
The embedding and the head are split by the vocabulary; norms are whole on every rank. FSDP2
(`fully_shard`) then shards what is left of each parameter over ranks with different samples.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_by_hand.lm.layout import DATA, TENSOR
from ddp_by_hand.lm.model import Transformer

WRAPS = ("block", "root")
EMBEDDINGS = ("token_embedding", "model.embed_tokens")

Plan = dict[str, ParallelStyle]


def parallelize(network: nn.Module, mesh: DeviceMesh, *, wrap: str = "block") -> nn.Module:
    """Shards the network in place over the axes that the mesh has.

    Args:
        mesh: a mesh of one or two axes, named `data` (different samples) or `tensor` (the same
            samples).
        wrap: of FSDP2; see `shard_fully`.

    Raises:
        ValueError: for other axes, or a network that the tensor axis does not divide.
    """
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= {DATA, TENSOR}:
        raise ValueError(
            f"the mesh has axes {names}: name them {DATA!r} (different samples) and {TENSOR!r} "
            "(the same samples, parts of parameters), as in init_device_mesh(mesh_dim_names=...)"
        )
    if TENSOR in names:
        split_tensors(network, mesh[TENSOR])
    if DATA in names:
        shard_fully(network, mesh[DATA], wrap=wrap)
    return network


def split_tensors(network: nn.Module, mesh: DeviceMesh) -> None:
    """Applies tensor parallelism over a mesh of one axis; rank 0's values go to all."""
    plan = plan_of(network, mesh.size())
    tied = _tied(network)
    parallelize_module(network, mesh, plan)
    for name in plan:
        if name in EMBEDDINGS:
            network.get_submodule(name).register_forward_hook(_wait)
    for first, *others in tied:
        for other in others:
            module, _, name = other.rpartition(".")
            setattr(network.get_submodule(module), name, network.get_parameter(first))


def plan_of(network: nn.Module, ranks: int) -> Plan:
    """Returns the style of each module of a `Transformer`, or of a Hugging Face Llama."""
    if isinstance(network, Transformer):
        config = network.config
        _refuse_remainder(ranks, num_heads=config.num_heads, d_ff=config.d_ff)
        return transformer_plan()
    if hasattr(network, "model") and hasattr(network.config, "num_key_value_heads"):
        config = network.config
        _refuse_remainder(
            ranks,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            intermediate_size=config.intermediate_size,
        )
        return llama_plan(has_head=hasattr(network, "lm_head"))
    raise ValueError(
        f"no tensor-parallel plan is known for {type(network).__name__}: call parallelize_module "
        "with one of your own (see transformer_plan)"
    )


def transformer_plan() -> Plan:
    """Returns the styles of `lm.model.Transformer`.

    Attention and feed-forward take their input as one `DTensor`, so that the gradients of the
    projections that read it are added before they cross ranks: once, not two or three times.
    """
    block: Plan = {
        "attention": PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
        ),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        ),
    }
    for name in ("attention.query", "attention.key", "attention.value"):
        block[name] = ColwiseParallel()
    for name in ("feed_forward.gate", "feed_forward.up"):
        block[name] = ColwiseParallel()
    for name in ("attention.output", "feed_forward.down"):
        block[name] = RowwiseParallel()
    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        **{f"blocks.*.{name}": style for name, style in block.items()},
    }


def llama_plan(has_head: bool = True) -> Plan:
    """Returns the plan for Hugging Face's Llama and models with its names; keeps `score` whole."""
    plan: Plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    if has_head:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def _wait(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """Returns the output once its collectives have finished.

    The first block is the only one that would be given a wrapper that waits when it is used: the
    others are given sums. Compiled by itself it could not take that (torch 2.13).
    """
    return output.clone()


def _refuse_remainder(ranks: int, **sizes: int) -> None:
    """Raises ValueError if the ranks do not divide the heads: no head can be split."""
    for name, size in sizes.items():
        if size % ranks:
            raise ValueError(
                f"{name} is {size}, which {ranks} tensor-parallel ranks do not divide: choose a "
                "divisor of it for the tensor axis"
            )


def _tied(network: nn.Module) -> list[list[str]]:
    """Names of parameters that several modules share: each module would get one of its own."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def shard_fully(
    network: nn.Module,
    mesh: DeviceMesh,
    *,
    wrap: str = "block",
    mixed_precision: MixedPrecisionPolicy | None = None,
) -> None:
    """Applies FSDP2 over a mesh of one axis.

    | wrap | gathered together | |
    | --- | --- | --- |
    | `block` | a block of the network's list of blocks; the rest with the root | the usual one |
    | `root` | everything | one collective, nothing overlaps |

    Args:
        mixed_precision: what parameters are cast to while they compute, and gradients while they
            are reduced; see `torch.distributed.fsdp.MixedPrecisionPolicy`.
    """
    if wrap not in WRAPS:
        raise ValueError(f"wrap is {wrap!r}: choose one of {', '.join(WRAPS)}")
    policy = mixed_precision or MixedPrecisionPolicy()
    for module in [*(_blocks(network) if wrap == "block" else ()), network]:
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _blocks(network: nn.Module) -> list[nn.Module]:
    """Returns the members of the list of modules that holds most parameters."""
    lists = [m for m in network.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(network).__name__} has no list of blocks: choose wrap='root'")
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))


@torch.no_grad()
def materialize(
    network: nn.Module, device: torch.device | str, reset: Callable[[], None] | None = None
) -> None:
    """Fills a network that was made on the meta device, and sharded there.

    Each rank draws every parameter whole, one at a time, and keeps its part: with the same global
    seed on all ranks, the values are those that `reset` would give to a network of one process.
    (All but what it writes through an index: `weight[0].zero_()` of a DTensor reaches a copy.)

    Args:
        reset: what initialises the parameters; None: the network's `reset_parameters`.
    """
    network.to_empty(device=device)
    with WholeDraws():
        (reset or network.reset_parameters)()


class WholeDraws(TorchDispatchMode):
    """Random numbers drawn into a `DTensor` are a part of those drawn into the whole."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_draw = torch.Tag.nondeterministic_seeded in function.tags
        if not (is_draw and args and isinstance(args[0], DTensor)):
            return function(*args, **kwargs)
        if not function._schema.is_mutable:
            raise NotImplementedError(f"{function} of a DTensor: draw in place")
        target = args[0]
        part = target.to_local()
        whole = torch.empty(target.shape, dtype=part.dtype, device=part.device)
        function(whole, *args[1:], **kwargs)
        part.copy_(part_of(whole, target))
        return target


def part_of(whole: Tensor, like: DTensor) -> Tensor:
    """Returns this rank's part of a whole tensor placed as `like`, without communication."""
    mesh = like.device_mesh
    replicas = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicas.redistribute(placements=like.placements).to_local()
