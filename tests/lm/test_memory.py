"""Predicted memory against what autograd keeps, and against peaks that were measured on GPUs."""

import gc
import json
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ddp import implementation, options_of, wrap
from ddp.internals import replicas
from ddp_by_hand.lm.memory import (
    KINDS,
    VARIANTS,
    _Step,
    block_activations,
    largest_model,
    loss_activations,
    predict_memory,
    total_parameters,
)
from ddp_by_hand.lm.model import PRESETS, ModelConfig, Transformer, forward_loss
from ddp_by_hand.lm.shape import arrivals

GIB = 1 << 30
SMALL = ModelConfig(
    vocab_size=500, d_model=192, num_heads=6, d_ff=512, context_length=32, num_layers=3
)

WIDE = ModelConfig(
    vocab_size=2000, d_model=256, num_heads=4, d_ff=704, context_length=64, num_layers=5
)


def kept_by_autograd(model: ModelConfig, batch_size: int, dtype: str) -> int:
    """Bytes of what a forward keeps for backward, storages counted once, without parameters."""
    network = Transformer(model)
    if dtype == "bfloat16":
        network.to(torch.bfloat16)
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(model.vocab_size, (batch_size, model.context_length))
    arithmetic = torch.autocast("cpu", torch.bfloat16) if dtype == "mixed" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), arithmetic:
        loss = forward_loss(network, (tokens, tokens))
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "mixed", "bfloat16"])
@pytest.mark.parametrize("model", [SMALL, replace(SMALL, num_layers=1, d_ff=320)])
def test_activations_are_what_autograd_keeps(model, dtype):
    tokens = 2 * model.context_length
    predicted = model.num_layers * block_activations(model, tokens, dtype, on_gpu=False)
    predicted += loss_activations(model, tokens, dtype, on_gpu=False)
    predicted -= 8 * tokens * model.vocab_size  # gradients of logits come with backward
    assert predicted == pytest.approx(kept_by_autograd(model, 2, dtype), rel=0.02)


@pytest.mark.parametrize(
    ("preset", "changes", "run", "gib"),
    [
        ("730m", {"context_length": 512}, (4, 8, "mixed"),
         {"none": 15.9, "ddp_copy_engine": 18.7, "torch_ddp": 21.4}),
        ("730m", {}, (4, 8, "mixed"), {"none": 21.9, "ddp_copy_engine": 24.7, "torch_ddp": 27.4}),
        ("1.2b", {}, (4, 8, "bfloat16"),
         {"none": 22.3, "ddp_copy_engine": 24.6, "torch_ddp": 26.8}),
        # Parameters of fsdp are gathered in bfloat16: no casts are kept.
        *(("730m", {"d_model": d, "d_ff": d_ff, "num_heads": d // 128}, (2, size, "mixed"),
           {"fsdp": mib / 1024})
          for d, d_ff, size, mib in
          ((2048, 5504, 8, 15_235), (2048, 5504, 12, 20_602), (2560, 6880, 8, 19_381))),
    ],
)  # fmt: skip
def test_peaks_that_were_measured_on_gpus(preset, changes, run, gib):
    """Compares with what docs/results.md has; `run`: ranks, sequences per GPU, dtype."""
    model = replace(PRESETS[preset], **{"context_length": 1024, **changes})
    ranks, size, dtype = run
    for variant, measured in gib.items():
        kinds = predict_memory(variant, model, ranks=ranks, batch_size=size, dtype=dtype)
        assert sum(kinds.values()) / GIB == pytest.approx(measured, rel=0.02)


def test_parameters_and_gradients_are_those_of_the_network():
    for model in (SMALL, replace(SMALL, tie_embeddings=True)):
        count = sum(p.numel() for p in Transformer(model).parameters())
        assert total_parameters(model) == count
    for model in (SMALL, replace(SMALL, tie_embeddings=True)):
        step = _Step("none", model, 1, 32, "float32", 0, on_gpu=True)
        assert step._gradients() == [4 * numel for numel in arrivals(model).values()]


def test_what_is_sharded_shrinks_with_the_ranks():
    def kinds(variant: str, ranks: int) -> dict[str, int]:
        # One token: the peak is at the end of backward, where all gradients are.
        model = replace(SMALL, context_length=1)
        return predict_memory(variant, model, ranks=ranks, batch_size=1, bucket_size_mb=1)

    whole = 4 * total_parameters(SMALL)
    everything = {"optimizer", "gradients", "parameters"}
    sharded = {
        "zero1": {"optimizer"},
        "torch_zero1": {"optimizer"},
        "zero2": everything - {"parameters"},
        "fsdp": everything,
        "torch_fsdp": everything,
    }
    for variant in VARIANTS:
        one, two = kinds(variant, 1), kinds(variant, 2)
        assert tuple(one) == KINDS
        assert one["parameters"] == whole
        assert one["optimizer"] == (4 if variant == "diloco" else 2) * whole
        for kind in ("parameters", "gradients", "optimizer"):
            ranks = 2 if kind in sharded.get(variant, ()) else 1
            if one[kind] and two[kind]:
                assert two[kind] == pytest.approx(one[kind] / ranks, rel=2e-2), (variant, kind)
    large = kinds("torch_zero1", 10**9)["optimizer"]  # no rank has more than the largest matrix
    assert large == 2 * 4 * max(SMALL.vocab_size, SMALL.d_ff) * SMALL.d_model
    many = kinds("fsdp", 64)
    assert (many["parameters"], many["optimizer"]) == (whole, 0)  # where the network is built


class Done:
    def wait(self) -> None:
        """Everything is there at once."""


def all_reduce(*_, **__) -> Done:
    return Done()


def reduce_scatter(output, input, **_) -> Done:  # the names of PyTorch's own
    output.copy_(input.view(-1)[: output.numel()].view_as(output))
    return Done()


def all_gather(output, input, **_) -> Done:
    for part in output.view(-1).split(input.numel()):
        if part.data_ptr() != input.data_ptr():
            part.copy_(input.view(-1))
    return Done()


def peak_of(variant: str, batch: tuple, group: dist.ProcessGroup, trace: str) -> float:
    """Returns the most bytes that PyTorch's allocator had in two steps, on this rank.

    gloo's threads copy and hold buffers, and free them late, where no profiler looks. So tensors
    are neither broadcast nor reduced, and the other collectives have stand-ins.
    """
    replaced = {
        (dist, f"{name}_{ending}"): stand_in
        for name, stand_in in (("reduce_scatter", reduce_scatter), ("all_gather", all_gather))
        for ending in ("single", "tensor", "into_tensor")
        if hasattr(dist, f"{name}_{ending}")
    } | {
        (replicas, "MESSAGE_BYTES"): 0,
        (dist, "broadcast"): lambda *_, **__: None,
        (dist, "all_reduce"): all_reduce,
    }
    gc.collect()  # else the last variant's network, if it is freed here, counts as less
    with ExitStack() as stack:
        for (place, name), value in replaced.items():
            stack.enter_context(mock.patch.object(place, name, value))
        profiler = stack.enter_context(
            profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        )
        options = options_of(implementation(variant))
        sizes = {"bucket_size_mb": 1.5} if "bucket_size_mb" in options else {}
        sizes |= {"every": 1} if "every" in options else {}
        model = wrap(variant, Transformer(WIDE), process_group=group, **sizes)
        optimizer = model.make_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        for _ in range(2):
            forward_loss(model, batch).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    profiler.export_chrome_trace(trace)
    events = json.loads(Path(trace).read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))


def peaks(context, variants: tuple, batch_size: int, folder: str) -> dict[str, float]:
    tokens = torch.randint(WIDE.vocab_size, (batch_size, WIDE.context_length))
    return {
        variant: peak_of(
            variant, (tokens, tokens), context.group, f"{folder}/{variant}_{context.rank}.json"
        )
        for variant in variants
    }


EVERY = ("none", "ddp_bucketed", "zero1", "zero2", "fsdp", "torch_fsdp")


@pytest.mark.parametrize(
    ("variants", "batch_size"),
    [
        (("zero2", "fsdp", "diloco"), 1),
        pytest.param(EVERY, 1, marks=pytest.mark.slow),
        pytest.param(EVERY, 6, marks=pytest.mark.slow),
    ],
)
def test_peaks_that_the_allocator_counts(cpu_ranks, tmp_path, variants, batch_size):
    """With many tokens the peak is at the loss, with few where gradients arrive."""
    for found in cpu_ranks.run(2, peaks, variants, batch_size, str(tmp_path)):
        for variant, measured in found.items():
            kinds = predict_memory(
                variant, WIDE, ranks=2, batch_size=batch_size, bucket_size_mb=1.5, on_gpu=False
            )
            near = 0.025 if variant.endswith("fsdp") else 0.01  # a block's activations weigh more
            assert sum(kinds.values()) == pytest.approx(measured, rel=near), variant


def test_what_does_not_fit_or_is_not_known_is_refused():
    with pytest.raises(ValueError, match="one block of width 192 does not fit"):
        largest_model("none", SMALL, 1000, ranks=4, batch_size=2, dtype="mixed")
    with pytest.raises(ValueError, match="'zero9' is unknown: choose from none"):
        predict_memory("zero9", SMALL, ranks=1, batch_size=1)
