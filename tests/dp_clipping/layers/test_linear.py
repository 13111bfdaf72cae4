"""`nn.Linear` and Hugging Face's `Conv1D` in a private step."""

import pytest
import torch
from torch import nn

from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import MODES, clipped_sums, unchecked
from tests.support import zoo


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transposed", [False, True])
def test_one_layer(mode, transposed):
    layer = nn.Linear(5, 3)
    if transposed:
        layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(3, 5)
    network = nn.Sequential(layer).double()
    batch = torch.randn(4, 6, 5).double(), torch.randn(4, 6, 3).double()
    gradients = oracle.per_sample_gradients(network, batch, zoo.product)
    threshold = oracle.norms(gradients).median().item()
    model = unchecked(network, mode, max_grad_norm=threshold)
    kinds = [handle.kind for handle in model.capture.handles]
    assert kinds == ["conv1d" if transposed else "linear"]
    sums, expected = clipped_sums(model, batch), oracle.clipped_sum(gradients, threshold)
    for name, total in expected.items():
        torch.testing.assert_close(sums[name], total)
