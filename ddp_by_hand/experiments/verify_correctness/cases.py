"""Networks, data, ranks, cases and references of `experiments.verify_correctness`.

The reference (`reference.py`) takes one sample after the other through an ordinary backward
in float64, on an unsharded copy of the same weights: norms n_i, coefficients min(1, C / n_i), sum.
A case is one way to compute the same; `step` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddp import wrap
from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.model import ModelConfig, Transformer
from ddp_by_hand.lm.parallel import DATA, TENSOR, parallelize
from dp_clipping import MODES
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from dp_clipping.kernels.launch.tiles import available
from dp_clipping.modes import REFERENCE_MODE
from dp_clipping.planning.plan import NORM_ALGORITHMS

PRIVATE_MODES = tuple(mode for mode in MODES if mode != "no_dp")
CLIPPINGS = ("flat", "per_layer")
IGNORED = -100  # a target that does not count
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """Sizes of networks and samples. No number of ranks divides the vocabulary."""

    tokens: int
    width: int
    hidden: int
    vocabulary: int


SMALL = Sizes(tokens=8, width=64, hidden=96, vocabulary=61)
LARGE = Sizes(tokens=200, width=192, hidden=320, vocabulary=509)  # several tiles of each kernel


def transformer(sizes: Sizes) -> nn.Module:
    """Builds the transformer of `lm`."""
    return Transformer(
        ModelConfig(
            vocab_size=sizes.vocabulary, d_model=sizes.width, num_layers=2, num_heads=8,
            d_ff=sizes.hidden,
        )
    )  # fmt: skip


def llama(sizes: Sizes) -> nn.Module:
    """Builds Hugging Face's Llama from a config; two query heads share a key and value head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes.vocabulary, hidden_size=sizes.width, intermediate_size=sizes.hidden,
            num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
            max_position_embeddings=sizes.tokens, use_cache=False, attn_implementation="sdpa",
        )
    )  # fmt: skip


NETWORKS: dict[str, Callable[[Sizes], nn.Module]] = {"transformer": transformer, "llama": llama}


def build(name: str, sizes: Sizes, dtype: torch.dtype) -> nn.Module:
    """Builds a network with the same weights on every rank.

    None of them is 0 or 1, which could hide errors.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = NETWORKS[name](sizes).train()
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network.to(dtype)


def make_batch(name: str, sizes: Sizes, samples: int) -> oracle.Batch:
    """Makes token ids [B, T] and targets; in two of three samples the last targets are ignored."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(sizes.vocabulary, (samples, sizes.tokens + 1), generator=draw)
    lengths = sizes.tokens - 3 * (torch.arange(samples) % 3)
    targets = ids[:, 1:].where(torch.arange(sizes.tokens) < lengths[:, None], IGNORED)
    inputs = ids[:, :-1]
    return ({"input_ids": inputs} if name == "llama" else inputs), targets


def sample_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns losses [B] for logits [B, T, V], targets [B, T]: the mean over counted targets."""
    losses = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none", ignore_index=IGNORED)
    return losses.sum(1) / (targets != IGNORED).sum(1)


@dataclass(frozen=True)
class Ranks:
    """The ranks that check together, and this one among them.

    Attributes:
        device: the device of this rank.
        group: all of them; None: one process alone.
        mesh: with an axis `data` (FSDP2), `tensor` (tensor parallel) or both; None: nothing is
            sharded, several ranks are replicas on `ddp_bucketed`.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def sizes(self) -> Sizes:
        return LARGE if self.device.type == "cuda" else SMALL

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.mesh is None else self.mesh.mesh_dim_names

    @property
    def data_place(self) -> tuple[int, int]:
        """(Which batch this rank reads, number of batches.)"""
        if self.mesh is None:
            return (0, 1) if self.group is None else (dist.get_rank(self.group), self.size)
        if DATA not in self.axes:
            return 0, 1
        return self.mesh.get_local_rank(DATA), self.mesh.size(self.axes.index(DATA))

    @property
    def where(self) -> str:
        """Returns the ranks' description in a table."""
        if self.group is None:
            return self.device.type
        if self.mesh is None:
            return f"{self.size} ddp_bucketed"
        short = {DATA: "fsdp2", TENSOR: "tp"}
        sizes = zip(self.mesh.shape, self.axes, strict=True)
        return " x ".join(f"{size} {short[axis]}" for size, axis in sizes)

    def share(self, network: nn.Module) -> nn.Module:
        """Spreads the network over the ranks."""
        if self.mesh is not None:
            return parallelize(network, self.mesh)
        if self.group is None:
            return network
        return wrap("ddp_bucketed", network, process_group=self.group)

    def gather(self, own: object) -> list:
        """Returns the objects of all ranks, on every rank."""
        if self.group is None:
            return [own]
        found: list = [None] * self.size
        dist.all_gather_object(found, own, group=self.group)
        return found


@dataclass(frozen=True)
class Case:
    """One combination of network, mode, clipping and norm options that is checked.

    Attributes:
        norm_algorithm: the norm algorithm of linear layers on fused kernels; None: these modes run
            in plain PyTorch.
        norm_reduction: how norms travel over a tensor axis; None: there is none, so they do not.
    """

    network: str
    mode: str
    clipping: str
    norm_algorithm: str | None = None
    norm_reduction: str | None = None

    @property
    def how(self) -> str:
        """Mode and norm algorithm, as the benchmark writes them."""
        plain = self.norm_algorithm in (None, "auto")
        return self.mode if plain else f"{self.mode}:{self.norm_algorithm}"

    @property
    def label(self) -> str:
        parts = (self.network, self.how, self.clipping, self.norm_reduction)
        return ", ".join(part for part in parts if part)


def plan(
    networks: Sequence[str], modes: Sequence[str], ranks: Ranks, dtype: torch.dtype
) -> list[Case]:
    """Lists every combination with a computation of its own."""
    fused = available(ranks.device, dtype)
    reductions = NORM_REDUCTIONS if TENSOR in ranks.axes else (None,)
    return [
        Case(network, mode, clipping, algorithm, reduction)
        for network in networks
        for mode in modes
        for algorithm in (NORM_ALGORITHMS if fused and mode in REFERENCE_MODE else (None,))
        for clipping in CLIPPINGS
        for reduction in reductions
    ]


@dataclass(frozen=True)
class Reference:
    """Right results in float64, and what they are for.

    Attributes:
        batch: the batch of all data ranks, G samples.
        norms: [G].
        limit: C, between the norms: some samples are clipped and some are not.
        groups: clipping -> parameters by clipping group, K of them.
        group_norms: clipping -> [K, G].
        sums: clipping -> parameter -> Σ_i c_i g_i.
    """

    batch: oracle.Batch
    norms: Tensor
    limit: float
    groups: dict[str, list[list[str]]]
    group_norms: dict[str, Tensor]
    sums: dict[str, oracle.Gradients]

    @classmethod
    def of(cls, name: str, sizes: Sizes, dtype: torch.dtype, samples: int) -> Reference:
        batch = make_batch(name, sizes, samples)
        gradients = oracle.per_sample_gradients(build(name, sizes, dtype), batch, sample_losses)
        norms = oracle.norms(gradients)
        low, high = norms.sort().values[(samples - 1) // 2 :][:2].tolist()
        limit = (low + high) / 2
        names = list(gradients)
        groups = {"flat": [names], "per_layer": oracle.module_groups(names)}
        group_norms = {
            clipping: torch.stack([oracle.norms({n: gradients[n] for n in g}) for g in members])
            for clipping, members in groups.items()
        }
        sums = {clipping: oracle.clipped_sum(gradients, limit, clipping) for clipping in groups}
        return cls(batch, norms, limit, groups, group_norms, sums)
