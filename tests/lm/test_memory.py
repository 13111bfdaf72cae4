"""Predicted memory against what autograd keeps, and against peaks that were measured on GPUs."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from lm.memory import (
    KINDS,
    VARIANTS,
    block_activations,
    largest_model,
    loss_activations,
    predict_memory,
    total_parameters,
)
from lm.model import PRESETS, ModelConfig, Transformer, forward_loss

GIB = 1 << 30
SMALL = ModelConfig(
    vocab_size=500, d_model=192, num_heads=6, d_ff=512, context_length=32, num_layers=3
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
    predicted = model.num_layers * block_activations(model, tokens, dtype, fused_norm=False)
    predicted += loss_activations(model, tokens, dtype, fused_norm=False)
    predicted -= 8 * tokens * model.vocab_size  # gradients of logits come with backward
    assert predicted == pytest.approx(kept_by_autograd(model, 2, dtype), rel=0.02)


@pytest.mark.parametrize(
    ("preset", "length", "dtype", "gib"),
    [
        ("730m", 512, "mixed", {"none": 15.9, "ddp_copy_engine": 18.7, "torch_ddp": 21.4}),
        ("730m", 1024, "mixed", {"none": 21.9, "ddp_copy_engine": 24.7, "torch_ddp": 27.4}),
        ("1.2b", 1024, "bfloat16", {"none": 22.3, "ddp_copy_engine": 24.6, "torch_ddp": 26.8}),
    ],
)
def test_peaks_that_were_measured_on_four_gpus(preset, length, dtype, gib):
    """The figures are those of docs/variants.md, with 8 sequences per GPU."""
    model = replace(PRESETS[preset], context_length=length)
    for variant, measured in gib.items():
        kinds = predict_memory(variant, model, ranks=4, batch_size=8, dtype=dtype)
        assert sum(kinds.values()) / GIB == pytest.approx(measured, rel=0.02)


def test_parameters_are_those_of_the_network():
    for model in (SMALL, replace(SMALL, tie_embeddings=True)):
        count = sum(p.numel() for p in Transformer(model).parameters())
        assert total_parameters(model) == count


def test_what_is_sharded_shrinks_with_the_ranks():
    def kinds(variant: str, ranks: int) -> dict[str, int]:
        # One token: the peak is at the end of backward, where all gradients are.
        model = replace(SMALL, context_length=1)
        return predict_memory(variant, model, ranks=ranks, batch_size=1, bucket_size_mb=1)

    whole = 4 * total_parameters(SMALL)
    sharded = {"zero1": {"optimizer"}, "zero2": {"optimizer", "gradients"},
               "fsdp": {"optimizer", "gradients", "parameters"}}  # fmt: skip
    for variant in VARIANTS:
        one, eight = kinds(variant, 1), kinds(variant, 8)
        assert tuple(one) == KINDS
        assert one["parameters"] == whole
        assert one["optimizer"] == 2 * whole
        for kind in ("parameters", "gradients", "optimizer"):
            ranks = 8 if kind in sharded.get(variant, ()) else 1
            if one[kind] and eight[kind]:
                assert eight[kind] == pytest.approx(one[kind] / ranks, rel=1e-6)


def test_largest_model_is_the_last_that_fits():
    run = {"ranks": 4, "batch_size": 2, "dtype": "mixed"}
    capacity = 2 * GIB
    for variant in ("none", "zero1", "fsdp"):
        found = largest_model(variant, SMALL, capacity, **run)
        assert sum(predict_memory(variant, found, **run).values()) <= capacity
        more = replace(found, num_layers=found.num_layers + 1)
        assert sum(predict_memory(variant, more, **run).values()) > capacity
    with pytest.raises(ValueError, match="one block of width 192 does not fit"):
        largest_model("none", SMALL, 1000, **run)
    with pytest.raises(ValueError, match="'zero9' is unknown: choose from none"):
        predict_memory("zero9", SMALL, ranks=1, batch_size=1)
