"""Programs written for Opacus's ghost mode, under Opacus and here: the import is the difference."""

import math
import warnings

import pytest
import torch

from examples import (
    opacus_accounting,
    opacus_distributed,
    opacus_finetune,
    opacus_mnist_like,
    opacus_text_classifier,
)
from examples.engines import ENGINES

PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

torch.manual_seed(0)
network = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20))
tokens = torch.arange(9).repeat(60, 1) + torch.randint(11, (60, 1))
optimizer = torch.optim.SGD(network.parameters(), lr=2.0)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, criterion, loader = privacy_engine.make_private(
    module=network,
    optimizer=optimizer,
    data_loader=DataLoader(TensorDataset(tokens), batch_size=20),
    criterion=nn.CrossEntropyLoss(),
    noise_multiplier=0.5,
    max_grad_norm=1.0,
    poisson_sampling=True,
    grad_sample_mode="ghost",
)
losses = []
for epoch in range(5):
    for (batch,) in loader:
        optimizer.zero_grad()
        logits = model(batch[:, :-1].contiguous())
        loss = criterion(logits.flatten(0, 1), batch[:, 1:].flatten(), shape=logits.shape)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
epsilon = privacy_engine.get_epsilon(1e-3)
"""


def trained(example, engine: str, *arguments: str) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return example.train(example.options().parse_args(["--engine", engine, *arguments]))


CASES = {
    "image classifier": (opacus_mnist_like, "--epochs", "2"),
    "text classifier": (opacus_text_classifier, "--epochs", "2"),
    "fine-tuning the last block": (opacus_finetune, "--epochs", "4"),
    "fine-tuning LoRA": (opacus_finetune, "--epochs", "2", "--train", "lora"),
}


LONG = ("image classifier", "fine-tuning the last block")  # the others do the same in less time


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        pytest.param(e, a, marks=[pytest.mark.slow] if name in LONG else [])
        for name, (e, *a) in CASES.items()
    ],
    ids=CASES,
)
def test_both_engines_learn_alike_and_spend_the_same(example, arguments):
    if example is opacus_finetune:
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    ours, theirs = (trained(example, engine, *arguments) for engine in ENGINES)
    assert ours["noise_multiplier"] == theirs["noise_multiplier"]
    assert ours["epsilon"] == pytest.approx(theirs["epsilon"], rel=1e-6)
    # Noise and draws differ, so that losses are equal only roughly; exactly without them, below.
    for which in ("first", "last"):
        assert ours[which] == pytest.approx(theirs[which], abs=0.35 * theirs["first"])


def test_accountants_say_the_same_of_both_engines():
    ours, theirs = (trained(opacus_accounting, engine, "--epochs", "2") for engine in ENGINES)
    assert list(ours) == ["prv", "rdp", "gdp", "rdp, less noise"]
    for name, values in ours.items():
        assert values == pytest.approx(theirs[name], rel=1e-6), name
    assert ours["prv"][1] < ours["rdp"][1] < ours["rdp, less noise"][1]


def of_a_rank(context, engine: str) -> dict:
    torch.set_num_threads(1)
    return trained(opacus_distributed, engine, "--epochs", "2", "--epsilon", "50")


def test_ranks_of_both_engines_spend_the_same_and_learn(cpu_ranks):
    ours, theirs = (cpu_ranks.run(4, of_a_rank, engine) for engine in ENGINES)
    assert ours[0]["epsilon"] == pytest.approx(theirs[0]["epsilon"], rel=1e-6)
    for ranks in (ours, theirs):
        assert ranks[0]["last"] < 0.8 * ranks[0]["first"]
        for rank in ranks[1:]:
            for one, other in zip(ranks[0]["parameters"], rank["parameters"], strict=True):
                assert torch.equal(one, other)


def test_everything_is_trained_where_opacus_cannot():
    pytest.importorskip("transformers")
    result = trained(opacus_finetune, "dp_clipping", "--train", "all", "--epochs", "3")
    assert result["last"] < result["first"]


def ran(package: str, program: str = PROGRAM) -> dict:
    """The names that the program leaves behind, its import changed to `package`."""
    exec(program.replace("from opacus import", f"from {package} import"), names := {})
    assert type(names["privacy_engine"]).__module__.startswith(package)
    return names


@pytest.mark.filterwarnings("ignore")
def test_a_program_runs_with_its_import_changed():
    ours, theirs = ran("dp_clipping"), ran("opacus")
    assert ours["epsilon"] == theirs["epsilon"]
    assert len(ours["losses"]) == len(theirs["losses"]) == 15
    for names in (ours, theirs):
        assert names["losses"][0] == pytest.approx(math.log(20), rel=0.2)
        assert sum(names["losses"][-3:]) < sum(names["losses"][:3])


@pytest.mark.filterwarnings("ignore")
def test_without_noise_and_draws_the_program_has_the_same_losses():
    program = PROGRAM.replace("noise_multiplier=0.5", "noise_multiplier=0.0")
    program = program.replace("poisson_sampling=True", "poisson_sampling=False")
    program = program[: program.index("epsilon =")]
    ours, theirs = (ran(package, program)["losses"] for package in ENGINES)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < 0.8 * ours[0]


@pytest.mark.parametrize(
    "module", [opacus_mnist_like, opacus_text_classifier, opacus_finetune, opacus_accounting]
)
def test_wrong_input_is_one_line_and_status_2(module, capsys):
    from examples.engines import run

    for wrong in (["--engine", "other"], ["--epochs", "0"], ["--epsilon", "-1"]):
        with pytest.raises(SystemExit) as stopped:
            run(module.options(), module.train, wrong)
        assert stopped.value.code == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert wrong[0] in message


def test_group_normalisation_has_replaced_what_mixes_samples():
    from dp_clipping import PrivacyEngine

    network = PrivacyEngine.get_compatible_module(opacus_mnist_like.Network())
    kinds = [type(module) for module in network.modules()]
    assert torch.nn.BatchNorm2d not in kinds
    assert kinds.count(torch.nn.GroupNorm) == 2
