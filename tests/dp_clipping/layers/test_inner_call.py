"""Subclasses of layers whose own forward calls the layer's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.layers.inner_call import inner_of
from tests.dp_clipping.conftest import MODES, assert_exact, private, private_loss
from tests.dp_clipping.ops.records import (
    Adapted,
    ByFunction,
    ChannelsFirst,
    Padding,
    Positions,
    ScaledWords,
    Standardised,
    Twice,
    WithItsTransposed,
)
from tests.support import zoo


class SharedPositions(nn.Embedding):
    """The same for all samples."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(torch.arange(input_ids.shape[1])) * input_ids[..., None]


class Gated(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid() * x


class DoubledRms(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Groups(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() if x.dtype == torch.float16 else x).relu()


class WithoutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.bias.exp()


class Circular(nn.Conv1d):
    """Pads before the call that convolves."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def gemma_words() -> nn.Module:
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    return gemma.Gemma3TextScaledWordEmbedding(7, 5, 0, embed_scale=5**0.5)


def bart_words() -> nn.Module:
    bart = pytest.importorskip("transformers.models.bart.modeling_bart")
    return bart.BartScaledWordEmbedding(7, 5, 0, embed_scale=5**0.5)


def ids() -> Tensor:
    return torch.randint(7, (4, 6))


def numbers() -> Tensor:
    return torch.randn(4, 6, 5, dtype=torch.float64)


LAYERS = {
    "scaled words": (lambda: ScaledWords(7, 5, padding_idx=2), ids, "embedding"),
    "Gemma's words": (gemma_words, ids, "embedding"),
    "BART's words": (bart_words, ids, "embedding"),
    "positions": (lambda: Positions(9, 5), ids, "embedding"),
    "shared positions": (lambda: SharedPositions(9, 5), ids, "embedding"),
    "adapted": (lambda: Adapted(5, 5), numbers, "linear"),
    "twice": (lambda: Twice(5, 5), numbers, "linear"),
    "by function": (lambda: ByFunction(5, 5), numbers, "linear"),
    "layer norm": (lambda: ChannelsFirst(6), numbers, "layer_norm"),
    "RMS norm": (lambda: DoubledRms(5), numbers, "rms_norm"),
    "group norm": (lambda: Groups(2, 6), numbers, "group_norm"),
    "convolution": (lambda: Gated(6, 6, 3, padding=1), numbers, "convolution"),
    "standardised": (lambda: Standardised(6, 6, 3, padding=1), numbers, "vectorized"),
    "without bias": (lambda: WithoutBias(5, 5), numbers, "vectorized"),
    "with its transposed": (lambda: WithItsTransposed(5, 5), numbers, "vectorized"),
    "circular": (
        lambda: Circular(6, 6, 3, padding=1, padding_mode="circular"), numbers, "vectorized"
    ),
    "padding": (lambda: Padding(7, 5, padding_idx=2), ids, "vectorized"),
}  # fmt: skip


def network_of(name: str, bare: bool) -> tuple[nn.Module, Tensor]:
    """The layer behind another, in a network that may have a parameter of its own."""
    torch.manual_seed(0)
    build, inputs, _ = LAYERS[name]
    layers = {"layer": build(), "head": nn.Linear(5, 3)}
    if inputs is numbers:
        layers["first"] = nn.Linear(5, 5)
    network = zoo.Net(
        lambda net, x: (
            net.head(net.layer(net.first(x) if inputs is numbers else x))
            * (net.scale if bare else 1)
        ),
        **layers,
    )
    if bare:
        network.scale = nn.Parameter(torch.full((3,), 1.5))
    return network.double(), inputs()


@pytest.mark.parametrize("name", LAYERS)
def test_in_a_module_with_a_parameter_of_its_own(name):
    """Whose code runs under vmap, and the layer outside of it; by themselves they are records."""
    network, x = network_of(name, bare=True)
    batch = x, torch.randn_like(network(x))
    assert_exact(network, batch)
    private_loss(private(network), batch, zoo.product).backward()
    assert network.layer._private.kind == LAYERS[name][2]


def test_outside_of_a_step_it_is_the_user_s():
    network, x = network_of("scaled words", bare=False)
    expected = network(x)
    model = private(network)
    model.eval()
    assert torch.equal(model(x), expected)
    model.train()
    model(x)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert torch.equal(model.to_standard_module()(x), expected)


def test_samples_that_see_each_other_in_it_are_refused():
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    with pytest.raises(ValueError, match="what 0 sees of a sample depends on the other samples"):
        private(nn.Sequential(Centred(5, 5), nn.Linear(5, 3)))(torch.randn(4, 5))


class Changing(nn.Linear):
    """Computes with its weight otherwise from some step on."""

    changes = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.weight.sum() if self.changes else y


def test_a_layer_that_computes_otherwise_later_is_named():
    network = nn.Sequential(Changing(5, 5))
    model, batch = private(network), (torch.randn(4, 5), torch.randn(4, 5))
    private_loss(model, batch, zoo.product).backward()
    network[0].changes = True
    model.clear_gradients()
    with pytest.raises(RuntimeError, match=r"0\.weight: in the loss itself"):
        private_loss(model, batch, zoo.product).backward()


def test_a_tied_weight():
    torch.manual_seed(0)
    words = ScaledWords(7, 5)
    head = nn.Linear(5, 7, bias=False)
    head.weight = words.weight
    network = nn.Sequential(words, head).double()
    x = ids()
    for mode in MODES:
        assert_exact(network, (x, torch.randn(4, 6, 7, dtype=torch.float64)), mode)


def test_memory_is_that_of_the_layer():
    """No gradient of a sample is kept: the embedding hands over factors."""
    network, x = network_of("scaled words", bare=False)
    model = private(network)
    private_loss(model, (x, torch.randn_like(network(x))), zoo.product).backward()
    assert "weight" not in model.network.layer._private.slots


def test_classes():
    assert inner_of(ScaledWords).kind == "embedding"
    assert inner_of(nn.Bilinear) is None
