"""The default device is the user's: nothing of ours is made there.

`torch.set_default_device("cuda")` makes tensors on a GPU that name no device, and an index or a
generator on the CPU does not go with them. The meta device, which has no values, stands for it.
"""

import ast
import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from tests.dp_clipping.conftest import gradients_of, private, private_loss
from tests.support import engine, zoo

ROOT = Path(__file__).parents[2]
FACTORIES = {function.__name__ for function in _device_constructors()}


def unplaced(path: Path) -> list[str]:
    """Returns `file:line` of each call of `torch.zeros` and its like without a device."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and getattr(node.func.value, "id", None) == "torch"
        and not {"device", None} & {keyword.arg for keyword in node.keywords}  # None: **options
    ]


@pytest.mark.parametrize("package", ["dp_clipping", "ddp"])
def test_every_tensor_that_is_made_names_its_device(package):
    assert {"zeros", "tensor", "arange", "randint"} <= FACTORIES
    found = [line for path in (ROOT / package).rglob("*.py") for line in unplaced(path)]
    assert found == []


@pytest.mark.parametrize("mode", ["per_sample", "bookkeeping"])
@pytest.mark.parametrize(
    "case",
    zoo.parameters("mlp", "transformer_tied", "table", "lstm_packed", "cells", "fixed_batch_norm"),
)
def test_a_first_step_with_its_checks(case, mode):
    torch.manual_seed(0)
    network, batch = case.build(), case.batch(3)
    found = []
    for context in (nullcontext(), torch.device("meta")):
        model = private(copy.deepcopy(network), mode)
        with context:
            private_loss(model, batch, case.per_sample_loss).backward()
        found.append(gradients_of(model))
    plain, elsewhere = found
    for name, gradient in plain.items():
        torch.testing.assert_close(elsewhere[name], gradient, rtol=0, atol=0, msg=name)


def trained(path: Path, context) -> tuple[list[float], dict]:
    """Trains, checks, saves and loads; the loader is PyTorch's, which draws on the default device.

    Returns the parameters, and the statement.
    """
    run = engine.build(noise_generator=engine.fixed(), criterion=torch.nn.CrossEntropyLoss())
    for x, y in run.loader:
        with context:
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    with context:
        assert run.engine.check(run.model, (x, y)).ok
        run.engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
        run.engine.load_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
        statement = run.engine.privacy_statement(1e-3).as_dict()
    return [p.tolist() for p in run.network.parameters()], statement


@pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed")
def test_a_run(tmp_path):
    plain = trained(tmp_path / "plain.pt", nullcontext())
    assert trained(tmp_path / "elsewhere.pt", torch.device("meta")) == plain
