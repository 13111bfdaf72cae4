"""GroupNorm and InstanceNorm: which modules take this way, and autocast."""

import pytest
import torch
from torch import nn

from tests.dp_clipping.conftest import private, private_loss
from tests.dp_clipping.step.test_on_gpu import compare_with_oracle
from tests.support import zoo


def kinds(network: nn.Module) -> set[str]:
    return {handle.kind for handle in private(network).capture.handles}


def test_which_layers_take_it():
    assert kinds(nn.GroupNorm(2, 4)) == {"group_norm"}
    assert kinds(nn.InstanceNorm1d(4, affine=True)) == {"group_norm"}
    fixed = nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval()
    assert kinds(nn.Sequential(nn.Linear(4, 4), fixed)) == {"linear", "vectorized"}
    assert kinds(nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4))) == {"convolution"}


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)], ids=str)
def test_under_autocast_outputs_are_pytorchs(layer):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), layer)
    x = torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = network(x)
        model = private(network, "bookkeeping")
        outputs = model(x)
        assert outputs.dtype == expected.dtype
        torch.testing.assert_close(outputs, expected, rtol=1e-2, atol=1e-2)
        private_loss(model, (x, torch.randn_like(expected)), zoo.product).backward()
    assert model.per_sample_gradient_norms.isfinite().all()


def check_networks() -> None:
    for name in ("group_norm", "instance_norm", "group_norm_without_tokens"):
        compare_with_oracle(zoo.BY_NAME[name], "cpu", torch.float32, "flash_bookkeeping")


def test_on_kernels_in_the_interpreter(interpreter):
    interpreter.run(check_networks)
