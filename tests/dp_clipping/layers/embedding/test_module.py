"""Embeddings, one sample at a time and in a private step."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from dp_clipping.layers.embedding.factors import TableGradients
from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import MODES, assert_close, clipped_sums, private
from tests.dp_clipping.layers.embedding.test_bag import Bags
from tests.dp_clipping.step.test_on_gpu import compare_with_oracle
from tests.support import zoo


class Words(nn.Module):
    """An embedding of ids, whose weight may be the head's too."""

    def __init__(self, tied: bool):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.words(ids).sin())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [lambda: Words(False), lambda: Words(True), lambda: Bags("mean")])
def test_ids_in_int32(build, mode):
    """PyTorch's embeddings take them too."""
    torch.manual_seed(0)
    network = build().double()
    ids = torch.randint(9, (4, 6), dtype=torch.int32)
    batch = ids, torch.randn_like(network(ids))
    gradients = oracle.per_sample_gradients(network, batch, zoo.product)
    threshold = oracle.norms(gradients).median().item()
    model = private(network, mode, max_grad_norm=threshold)
    sums, expected = clipped_sums(model, batch), oracle.clipped_sum(gradients, threshold)
    assert_close(sums, expected, 1e-9)


def check_small_tables_on_kernels() -> None:
    made = []
    of = TableGradients.of

    with patch.object(TableGradients, "of", lambda *given: made.append(given) or of(*given)):
        for mode in ("flash", "flash_bookkeeping"):
            compare_with_oracle(zoo.BY_NAME["relative_positions"], "cpu", torch.float32, mode)
    assert len(made) >= 2
    assert all(ids.stride(0) == 0 for ids, _, _ in made)  # nothing was sorted, or repeated


def test_small_tables_on_kernels_in_the_interpreter(interpreter):
    interpreter.run(check_small_tables_on_kernels)
