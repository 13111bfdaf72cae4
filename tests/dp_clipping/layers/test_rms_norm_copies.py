"""RMS norms of other libraries: known by what they compute, and exact in every mode and dtype."""

import copy
import functools
import types

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.capture.layer_kinds import kind_of
from tests.dp_clipping.conftest import clipped_sums, private
from tests.support import zoo
from tests.support.language_models import language_model
from tests.support.turns import in_turn

N = 6
BODIES = {
    "llama_rms_norm": ("llama", "LlamaRMSNorm"),
    "t5_rms_norm": ("t5", "T5LayerNorm"),
    "olmo_rms_norm": ("olmo2", "Olmo2RMSNorm"),
    "gemma_rms_norm": ("gemma", "GemmaRMSNorm"),
}
COPIES = {  # under other names, for which no table of classes has to know them
    "llama_rms_norm": ("qwen2", "Qwen2RMSNorm"),
    "t5_rms_norm": ("umt5", "UMT5LayerNorm"),
    "olmo_rms_norm": ("gpt_oss", "GptOssRMSNorm"),
    "gemma_rms_norm": ("qwen3_next", "Qwen3NextRMSNorm"),
}


def built(family: str, name: str) -> nn.Module:
    code = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    return zoo.seeded(lambda: getattr(code, name)(N))


class Norm(nn.Module):
    """T5's, as a user may have written it: with a docstring and other names."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(N)), 1e-6

    def forward(self, features: Tensor) -> Tensor:
        """Has a docstring."""
        square: Tensor = features.to(torch.float32).pow(2).mean(-1, keepdim=True)
        features = features * torch.rsqrt(square + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            features = features.to(self.weight.dtype)
        return self.weight * features


def changed(change=None, /, **members) -> nn.Module:
    layer = zoo.seeded(type("Changed", (Norm,), members))
    if change is not None:
        change(layer)
    return layer


def without_mean(self, x):
    return Norm.forward(self, x - x.mean(-1, keepdim=True))


@functools.wraps(Norm.forward)
def wrapped(self, x):
    return 3 * Norm.forward(self, x)


LOOK_ALIKES = {
    "subtracts the mean": lambda: changed(forward=without_mean),
    "a wrapped forward": lambda: changed(forward=wrapped),
    "another epsilon": lambda: changed(
        lambda layer: layer.register_buffer("eps", torch.full((N,), 0.1)),
        variance_epsilon=property(lambda self: self.eps, lambda self, value: None),
    ),
    "a replaced forward": lambda: changed(
        lambda layer: setattr(layer, "forward", types.MethodType(without_mean, layer))
    ),
    "a weight of two dimensions": lambda: changed(
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(1, N)))
    ),
    "another parameter": lambda: changed(
        lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(N)))
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_of_transformers_are_known_under_any_name(kind):
    assert kind_of(built(*BODIES[kind])) == kind
    assert kind_of(built(*COPIES[kind])) == kind


def test_code_of_users_is_known():
    assert kind_of(Norm()) == kind_of(changed()) == "t5_rms_norm"


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_run_under_vmap_and_are_exact(name):
    layer = zoo.seeded(LOOK_ALIKES[name])
    assert kind_of(layer) == "vectorized"
    batch = zoo.numbers(4, 5, N, out=(5, N))
    own = copy.deepcopy(layer) if "replaced" not in name else zoo.seeded(LOOK_ALIKES[name])
    (sums,) = [g for k, g in clipped_sums(private(layer, max_grad_norm=1e6), batch).items()
               if k == "weight"]  # fmt: skip
    zoo.product(own(batch[0]), batch[1]).sum().backward()
    torch.testing.assert_close(sums, own.weight.grad, rtol=1e-4, atol=1e-5)


def test_a_gemma_whose_norm_is_another_is_not_known():
    gemma = type(built(*BODIES["gemma_rms_norm"]))
    other = type("Other", (gemma,), {"_norm": lambda self, x: x - x.mean(-1, keepdim=True)})
    assert kind_of(other(N)) == "vectorized"


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("kind", "dtype", "weight"),
    in_turn(
        [pytest.param(k, dtype, id=f"{k}-{dtype}") for dtype in DTYPES for k in BODIES],
        DTYPES,
        fast=2,
    ),
)
def test_outputs_are_rounded_as_their_own_forward_rounds_them(kind, dtype, weight):
    layer = built(*BODIES[kind]).to(weight)
    x = zoo.numbers(4, 5, N, out=())[0].to(dtype)
    expected = layer(x)
    found = private(copy.deepcopy(layer))(x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_models_have_no_norm_under_vmap(kind):
    model = private(language_model(kind))
    found = {handle.kind for handle in model.capture.handles}
    assert found == {"linear", "embedding", f"{kind}_rms_norm"}


def test_a_weight_that_is_broadcast_is_refused():
    model = private(nn.Sequential(nn.Linear(N, 1), Norm()))
    with pytest.raises(ValueError, match=r"1 \(Norm\) has a weight of shape \[6\] for inputs of 1"):
        clipped_sums(model, zoo.numbers(4, 5, N, out=(5, N)))
