"""Subclasses of layers whose own forward calls the layer's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.dp_clipping.conftest import MODES, assert_exact, private, private_loss
from tests.dp_clipping.ops.records import NUMBER, RECORDS, Network, Record, ScaledWords
from tests.support import zoo


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


OF_OPS = {  # records of the operations, and the arithmetic of each
    "linear_subclass": "linear", "linear_subclass_twice": "linear", "linear_by_function": "linear",
    "linear_transposed_too": "vectorized", "layer_norm_channels_first": "layer_norm",
    "embedding_scaled": "embedding", "embedding_of_positions": "embedding",
    "embedding_trains_padding": "vectorized", "conv1d_standardised": "vectorized",
}  # fmt: skip
LAYERS = [
    *((RECORDS[NUMBER[name]], kind) for name, kind in OF_OPS.items()),
    (Record("rms_norm", lambda: DoubledRms(5), (6, 5)), "rms_norm"),
    (Record("group_norm", lambda: Groups(2, 6), (6, 5)), "group_norm"),
    (Record("convolution", lambda: Gated(6, 6, 3, padding=1), (6, 5)), "convolution"),
    (Record("without_bias", lambda: WithoutBias(5, 5), (6, 5)), "vectorized"),
]


class Scaled(Network):
    """Has a parameter of its own beside the layer."""

    def __init__(self, record: Record) -> None:
        width = None if record.ids is not None else record.shape[-1]
        super().__init__(record.layer(), record.call, width, is_reused=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize(("record", "kind"), LAYERS, ids=lambda value: getattr(value, "name", ""))
def test_in_a_module_with_a_parameter_of_its_own(record, kind):
    """Whose code runs under vmap, and the layer outside of it; by themselves they are records."""
    network = zoo.seeded(lambda: Scaled(record)).double()
    batch = oracle.move(record.batch(record.case().build, 4), dtype=torch.float64)
    assert_exact(network, batch)
    private_loss(private(network), batch, zoo.product).backward()
    assert network.layer._private.kind == kind


def words_and_head(is_tied: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    words, head = ScaledWords(7, 5), nn.Linear(5, 7, bias=False)
    if is_tied:
        head.weight = words.weight
    return nn.Sequential(words, head).double(), torch.randint(7, (4, 6))


def test_outside_of_a_step_it_is_the_user_s():
    network, x = words_and_head()
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
    network, x = words_and_head(is_tied=True)
    for mode in MODES:
        assert_exact(network, (x, torch.randn(4, 6, 7, dtype=torch.float64)), mode)
