"""Position tables that all samples share, as T5 reads one in its first attention.

Only the attention that reads the table computes with copies of it: all layers keep their own
arithmetic, those of the same attention too.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.dp_clipping.conftest import assert_step, gradients_of, private, private_loss, unchecked
from tests.support import zoo
from tests.support.turns import in_turn

TABLE = "relative_attention_bias.weight"
READERS = {
    f"model.{side}.block.0.layer.0.SelfAttention": (TABLE,) for side in ("encoder", "decoder")
}


class T5(nn.Module):
    """T5 with its default attention and cache; ids are also the decoder's."""

    def __init__(self, has_mask: bool = False, is_tied: bool = True, dropout: float = 0.0):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.T5Config(
            vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, pad_token_id=0,
            dropout_rate=dropout, decoder_start_token_id=0, tie_word_embeddings=is_tied,
        )  # fmt: skip
        self.model, self.has_mask = transformers.T5ForConditionalGeneration(config), has_mask

    def forward(self, ids: Tensor) -> Tensor:
        mask = {"attention_mask": (ids > 0).long()} if self.has_mask else {}
        return self.model(input_ids=ids, decoder_input_ids=ids, **mask).logits


def t5(**options) -> T5:
    torch.manual_seed(0)
    network = T5(**options).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return network


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 20, (3, 5))
    ids[1, 3:] = 0
    return ids, torch.randn(3, 5, 20, dtype=torch.float64)


NETWORKS = {
    "plain": {"is_tied": False}, "tied": {},
    "tied_and_masked": {"has_mask": True}, "masked": {"has_mask": True, "is_tied": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *in_turn(("plain", "tied_and_masked"), ["bookkeeping", "ghost"]),
        *in_turn(("tied", "masked"), ["ghost", "bookkeeping"], fast=0),
    ],
)
def test_norms_and_sums(name, mode):
    network, given = t5(**NETWORKS[name]), batch()
    limit = oracle.norms(oracle.per_sample_gradients(network, given, zoo.product)).median().item()
    model = unchecked(copy.deepcopy(network), mode, max_grad_norm=limit)
    assert_step(model, network, given, limit=limit, tolerance=1e-6)


def test_blocks_that_are_computed_again():
    """A step with checkpointed blocks, beside one without: the norms in it are in float32."""
    given, found = batch(), []
    for is_checkpointed in (False, True):
        model = unchecked(t5(), max_grad_norm=1.0)
        if is_checkpointed:
            model.network.model.gradient_checkpointing_enable({"use_reentrant": False})
        private_loss(model, given, zoo.product).backward()
        norms = model.per_sample_gradient_norms
        found.append({"norms": norms.double(), **gradients_of(model)})
        assert norms.max() > 1.0
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_table_has_copies(dtype):
    model = private(t5().to(dtype))
    model(batch()[0])
    handles = model.capture.handles
    copied = {h.name: h.trainable for h in handles if h.kind == "vectorized"}
    assert copied == READERS
    assert all(h.operations for h in handles if h.kind == "vectorized")
    linear = [h for h in handles if h.kind == "linear"]
    assert len(linear) == 2 * 6 + 2 * 10 + 1
    assert all(h.sites for h in linear)


class Table(nn.Module):
    """One row for all samples, made of a parameter or by a layer, and no argument."""

    def __init__(self, is_made: bool):
        super().__init__()
        self.made = nn.Linear(3, 20) if is_made else None
        self.rows = nn.Parameter(torch.randn(1, 20), requires_grad=not is_made)

    def forward(self) -> Tensor:
        rows = self.rows if self.made is None else self.made(self.rows[:, :3])
        return rows.view(1, 5, 4).tanh()


TAKEN = {"index": lambda rows: rows[0], "unbind": lambda rows: rows.unbind()[0]}  # fmt: skip


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("taken", TAKEN)
def test_the_only_row_of_a_table_is_taken(taken, is_made):
    """As of YOLOS, whose positions of two layers are a table of one."""
    network = zoo.Net(
        lambda net, x: net.head((net.layer(x) + TAKEN[taken](net.table())).tanh()),
        layer=nn.Linear(4, 4), table=Table(is_made), head=nn.Linear(4, 2),
    ).double()  # fmt: skip
    model = private(copy.deepcopy(network))
    for size in (4, 3, 5):
        x = torch.randn(size, 5, 4, dtype=torch.float64)
        assert_step(model, network, (x, torch.randn(size, 5, 2, dtype=torch.float64)))
