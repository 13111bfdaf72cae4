"""`privacy.json` is checked with dp-accounting alone, and a changed number is named."""

import ast
import copy
import json
import math
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples import check_privacy
from dp_clipping import CorrelatedNoise, PrivacyEngine
from dp_clipping.accounting.tradeoff import gaussian_mu

RUNS = {
    "poisson, two sigmas": ({"noise_multiplier": 0.7}, [2.0]),
    "truncated": (
        {"sampling": "truncated_poisson", "max_batch_size": 9, "noise_multiplier": 5.0},
        [],
    ),
    "balls in bins": ({"sampling": "balls_in_bins"}, [2.0]),
    "cyclic": ({"sampling": "cyclic"}, [2.0]),
    "correlated": ({"sampling": "cyclic", "noise_mechanism": CorrelatedNoise(bands=4)}, []),
    "planned": ({"sampling": "cyclic", "noise_mechanism": CorrelatedNoise(bands=4, epochs=2)}, []),
    "secure": ({"secure_mode": True}, []),
    "rdp": ({"accountant": "rdp"}, []),
    "few steps": ({"size": 64, "steps": 2, "noise_multiplier": 0.4986544912508121}, []),
    "no noise": ({"noise_multiplier": 0.0}, []),
    "no step": ({"epochs": 0}, []),
}


def statement_of(more, sigmas):
    """Returns the statement of an epoch, of six steps, and of one more with each further σ."""
    more, network = dict(more), nn.Linear(3, 2)
    own = {name: more.pop(name) for name in ("accountant", "secure_mode") if name in more}
    engine, epochs = PrivacyEngine(**own), more.pop("epochs", 1)
    size, most = more.pop("size", 24), more.pop("steps", None)
    data = TensorDataset(torch.randn(size, 3), torch.randint(2, (size,)))
    model, optimizer, criterion, loader = engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4), **{"noise_multiplier": 1.0, **more},
        max_grad_norm=1.0,
    )  # fmt: skip
    for sigma in [optimizer.noise_multiplier, *sigmas][: epochs + len(sigmas)]:
        optimizer.noise_multiplier = sigma
        for x, y in islice(loader, most) if epochs else ():
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return engine.privacy_statement(1e-5)


def checked(path, monkeypatch):
    """Returns the exit status and what is printed."""
    monkeypatch.setattr(sys, "argv", ["dp-check-privacy", str(path)])
    try:
        check_privacy.main()
    except SystemExit as end:
        return end.code
    return 0


SLOW = ("planned", "secure", "rdp", "few steps")  # accounts of the kinds that others have


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS]
)
def test_what_was_written_holds_and_what_was_changed_does_not(name, tmp_path, monkeypatch, capsys):
    path = tmp_path / "privacy.json"
    statement_of(*RUNS[name]).save(path)
    assert checked(path, monkeypatch) == 0, capsys.readouterr()
    file = json.loads(path.read_text())
    stated = math.inf if file["epsilon"] is None else file["epsilon"]
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        f"epsilon = {stated:.4g} at delta = 1e-05 after {file['steps']} steps; "
        f"stated, not checked: unit 'one example', neighbours {file['relation']!r}"
    )
    assert second.startswith(f"{len(file['curve'])} pairs of epsilon and delta")
    assert second.endswith("whether they were those of the run cannot be seen here")
    if not file["epsilon"]:
        return
    less = copy.deepcopy(file)
    less["curve"] = [[delta, 0.9 * epsilon] for delta, epsilon in file["curve"]]
    less["epsilon"] = dict(less["curve"])[1e-5]
    if name == "rdp":
        return  # a loose account: what is 10 % smaller still holds
    path.write_text(json.dumps(less))
    assert checked(path, monkeypatch) == 1
    assert "smaller than that of the account's steps" in capsys.readouterr().out


def test_each_number_that_was_changed_is_named(tmp_path, monkeypatch, capsys):
    path = tmp_path / "privacy.json"
    statement_of(*RUNS["cyclic"]).save(path)
    file = json.loads(path.read_text())
    longer = copy.deepcopy(file)
    longer["account"]["histories"][0][-1][2] += 30
    longer["steps"] += 30
    for change, words in (
        (longer, "smaller than that of the account's steps"),
        (file | {"curve": [[d, 1.1 * e] for d, e in file["curve"]]}, "larger than that of the acc"),
        (file | {"mu": 0.9 * file["mu"]}, "mu is "),
        (file | {"epsilon": 0.5 * file["epsilon"]}, "that of the curve"),
        (
            file | {"true_positive_rates": [[0.001, 0.5], [0.01, 0.011], [0.1, 0.5]]},
            "the true positive rate at 0.01 is",
        ),
        (file | {"true_positive_rates": []}, "true positive rates are of []"),
        (file | {"answers": {"parameters": "ε = 0.001 at δ = 1e-09"}}, "the answers say"),
        (file | {"steps": 5}, "steps is 5"),
        (file | {"noise_multiplier": 9.0}, "noise_multiplier is 9.0"),
        (file | {"sample_rate": 0.5}, "sample_rate is 0.5"),
    ):
        path.write_text(json.dumps(change))
        assert checked(path, monkeypatch) == 1
        assert words in capsys.readouterr().out


def test_what_cannot_be_checked_is_said(tmp_path, monkeypatch, capsys):
    path = tmp_path / "privacy.json"
    statement_of(*RUNS["cyclic"]).save(path)
    file = json.loads(path.read_text())
    other = copy.deepcopy(file)
    other["account"]["sampling"] = "every unit is in each batch"
    file["account"] |= {"noise": "laplace", "sampling": "poisson"}
    for content, words in (
        (json.dumps(file), "is its author's"), (json.dumps(other), "is not known here"),
    ):  # fmt: skip
        path.write_text(content)
        assert checked(path, monkeypatch) == 2
        assert words in capsys.readouterr().err


def test_what_is_no_statement_is_said_in_a_line_with_what_writes_one(tmp_path, monkeypatch, capsys):
    path, folder = tmp_path / "privacy.json", tmp_path / "folder"
    folder.mkdir()
    for content, words in (
        (None, "there is no file"), (b"{", "is no statement"), (b"", "is no statement"),
        (b"[1]", "is no statement"), (b"3", "is no statement"), (b"\x94\xff" * 99, "no statement"),
        (b"{}", "is no whole statement, it has no 'account'"),
    ):  # fmt: skip
        if content is not None:
            path.write_bytes(content)
        assert checked(path, monkeypatch) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert line.endswith(
            ": engine.privacy_statement(delta=1e-5).save('privacy.json') writes one"
        )
        assert len(line) < 300
    assert checked(folder, monkeypatch) == 2
    assert f"{folder} cannot be read (Is a directory): engine." in capsys.readouterr().err


def test_it_needs_nothing_of_ours_and_mu_of_one_pair_is_never_lost():
    tree = ast.parse(Path(check_privacy.__file__).read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    ]
    known = {"dp_accounting", "scipy", "numpy"}
    assert {name.split(".")[0] for name in modules} <= known | set(sys.stdlib_module_names)
    # its one kink is on the diagonal, on either side of it by rounding
    for i in range(1, 200):
        curve = [(1e-5, i / 20)]
        assert check_privacy.mu_of(curve, 1e-5) == pytest.approx(gaussian_mu(curve, 1e-5))
