"""What is stated is what was done, and does not depend on how many samples there are."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.accounting.statement import private_constants
from tests.support.engine import build, data

KEYS = [
    "relation", "unit", "noise_multiplier", "max_grad_norm", "sample_rate", "steps", "sampler",
    "accountant", "epsilon", "delta",
]  # fmt: skip


def made(samples=24, method="make_private", **arguments):
    """An engine and what it returned, over so many samples in batches of four."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(samples, 3), torch.randint(2, (samples,)))
    engine = PrivacyEngine(accountant="rdp")
    if method == "make_private":
        arguments = {"noise_multiplier": 1.0, **arguments}
    private = getattr(engine, method)(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        **{"max_grad_norm": 0.5, **arguments},
    )
    return engine, private


def train(private, epochs=1):
    model, optimizer, criterion, loader = private
    for _ in range(epochs):
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_keys_and_values_are_those_of_the_run():
    engine, private = made()
    train(private)
    statement = engine.privacy_statement(delta=1e-3).as_dict()
    assert list(statement)[: len(KEYS)] == KEYS
    assert {name: statement[name] for name in KEYS} == {
        "relation": "add or remove one unit", "unit": "one example", "noise_multiplier": 1.0,
        "max_grad_norm": 0.5, "sample_rate": 1 / 6, "steps": 6, "sampler": "poisson",
        "accountant": "rdp", "epsilon": engine.get_epsilon(1e-3), "delta": 1e-3,
    }  # fmt: skip


def test_before_the_first_step_nothing_is_spent():
    engine, _ = made(noise_multiplier=2.0, sample_rate=0.25)
    statement = engine.privacy_statement(1e-3)
    assert (statement.epsilon, statement.steps) == (0.0, 0)
    assert (statement.noise_multiplier, statement.sample_rate) == (2.0, 0.25)


def test_text_says_what_each_number_is():
    engine, private = made()
    train(private)
    text = str(engine.privacy_statement(1e-3))
    assert text.startswith(f"(epsilon, delta) = ({engine.get_epsilon(1e-3):.4g}, 0.001)")
    for line in (
        "neighbouring data sets: add or remove one unit",
        "unit:                   one example",
        "noise multiplier:       1",
        "clipping threshold:     0.5",
        "sample rate:            0.166667",
        "steps taken:            6",
        "sampler:                poisson",
        "accountant:             rdp",
    ):
        assert f"\n  {line}\n" in f"{text}\n"


@pytest.mark.parametrize(
    ("layers", "limits", "shown"),
    [(6, [0.5] * 6, "0.5, 0.5, 0.5, 0.5, ... (6 of them)\n"), (2, [0.5, 0.25], "0.5, 0.25\n")],
)
def test_many_thresholds_are_cut_short(layers, limits, shown):
    network = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
    run = build(module=network, max_grad_norm=limits, clipping="per_layer")
    assert f"clipping threshold:     {shown}" in str(run.engine.privacy_statement(1e-3))


@pytest.mark.parametrize(("poisson", "of"), [(True, "the data set"), (False, "a batch")])
@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_a_unit_of_several_examples_says_of_what(poisson, of):
    run = build(examples_per_unit=3, poisson_sampling=poisson)
    assert run.engine.privacy_statement(1e-3).unit == f"3 consecutive examples of {of}"


def test_no_noise_and_no_poisson_sampling_have_no_epsilon():
    engine, private = made(noise_multiplier=0.0)
    train(private)
    assert engine.privacy_statement(1e-3).epsilon == math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, private = made(poisson_sampling=False)
    train(private)
    statement = engine.privacy_statement(1e-3)
    assert statement.epsilon == math.inf
    assert statement.sampler == "the loader's own, for which no account is known"
    assert str(statement).startswith("No finite epsilon holds at delta = 0.001.")


def test_what_is_private_and_what_no_page_covers_is_said():
    engine, private = made()
    train(private)
    statement = engine.privacy_statement(1e-3)
    assert statement.public_constants == {
        "sample_rate": False, "steps": False, "divisor": True, "account": True
    }  # fmt: skip
    assert "from private numbers:   sample rate, steps\n" in str(statement)
    assert [words.partition(":")[0] for words in statement.unproved] == ["accountant='rdp'"]
    assert "unproved:               accountant='rdp': no page" in str(statement)
    assert "epsilons on the same data add up" in str(statement)
    answers = statement.answers()
    assert answers["constants"].startswith("sample rate, steps: from the private number of units")
    assert answers["unproved"].startswith("accountant='rdp': no page")
    assert answers["noise"].startswith("float32, from a generator that is not cryptographic")
    answers = replace(statement, secure={"resolution": 1.0}).answers()
    assert answers["noise"].startswith("rounded to a grid, from a cryptographic generator")
    assert private_constants([{"divisor": False}, {"steps": True}]) == ["divisor"]  # as of resumed


def test_a_covered_run_names_its_pages():
    sampling = {"sampling": "truncated_poisson", "max_batch_size": 6}
    run = build(accountant="pld", dataset=data(8), sample_rate=0.5, steps=2, **sampling)
    statement = run.engine.privacy_statement(1e-3)
    assert statement.unproved == []
    assert statement.answers()["unproved"] == "nothing"
    assert statement.proofs == [
        "accumulation", "clipping", "gaussian_poisson", "sharded_noise", "truncated_poisson"
    ]  # fmt: skip
    assert statement.account == {
        "accountant": None, "sampling": "truncated_poisson", "noise": "gaussian", "units": 8,
        "max_batch_size": 6, "histories": [],
    }  # fmt: skip
    assert "from private numbers:   epsilon\n" in str(statement)  # it counts the units


@pytest.mark.parametrize(
    ("constants", "private_ones", "give"),
    [
        ({}, "sample rate and steps", "sample_rate= and steps="),
        ({"sample_rate": 0.2, "steps": 4, "expected_batch_size": 24}, "divisor",
         "expected_batch_size="),
    ],
)  # fmt: skip
def test_the_first_step_says_what_follows_from_private_numbers(
    constants, private_ones, give, caplog
):
    train(made(**constants)[1])
    (record,) = [r for r in caplog.records if "number of samples" in r.message]
    assert record.message == (
        f"epsilon takes the number of samples as public, because {private_ones} of this training "
        f"came from it: if it is private, give {give} (docs/sharp_edges.md says how)"
    )
    caplog.clear()
    train(made(sample_rate=0.2, steps=4)[1])
    with pytest.warns(UserWarning, match="poisson_sampling=False"):
        own_batches = made(poisson_sampling=False)[1]  # no ε holds that would take the number
    train(own_batches)
    assert not caplog.records


def test_it_is_a_file_and_a_section_of_a_card(tmp_path):
    engine, private = made(noise_multiplier=0.0)
    train(private)
    engine.privacy_statement(1e-3).write_beside(tmp_path)
    file = json.loads((tmp_path / "privacy.json").read_text())
    assert (file["epsilon"], file["mu"], file["steps"]) == (None, None, 6)
    assert file["schema_version"] == 1

    engine, private = made()
    train(private)
    statement, card = engine.privacy_statement(1e-3), tmp_path / "README.md"
    card.write_text(f"---\nlicense: mit\n---\n# A model\n{card.read_text()}\n## Use\n")
    for _ in range(2):  # the section is replaced
        statement.write_beside(tmp_path)
    text = card.read_text()
    assert text.startswith("---\nlicense: mit\n---\n# A model\n")
    assert text.rstrip().endswith("## Use")
    assert text.count("## Differential privacy") == 1
    assert f"| parameters | ε = {statement.epsilon:.4g} at δ = 0.001 |" in text
    file = json.loads((tmp_path / "privacy.json").read_text())
    assert list(file)[1 : 1 + len(KEYS)] == KEYS
    assert file["epsilon"] == statement.epsilon
    assert file["answers"] == statement.answers()
    assert file["account"]["histories"] == [[[1.0, 1 / 6, 6]]]


def facts(samples, **arguments):
    """Returns what an observer may learn of a run without looking at its noise."""
    engine, (_, optimizer, _, loader) = private = made(samples, **arguments)
    train(private[1])
    statement = engine.privacy_statement(1e-3).as_dict()
    return statement, len(loader), optimizer.expected_batch_size, optimizer.noise_multiplier


@pytest.mark.parametrize(
    "target",
    [{}, {"method": "make_private_with_epsilon", "target_epsilon": 3.0, "target_delta": 1e-3}],
    ids=["sigma", "epsilon"],
)
def test_neighbours_are_treated_alike_under_public_rates(target):
    public = {"sample_rate": 1 / 6, "steps": 7, **target}
    assert facts(24, **public) == facts(25, **public)  # 25 samples are a batch more
    statement, length, divisor, _ = facts(25, **public)
    assert (statement["sample_rate"], statement["steps"], length, divisor) == (1 / 6, 7, 7, 4.0)


@pytest.mark.parametrize(
    ("given", "rate", "steps"),
    [
        ({}, 1 / 6, 6),
        ({"sample_rate": 0.1}, 0.1, 10),
        ({"steps": 3}, 1 / 6, 3),
        ({"sample_rate": 1, "steps": 2}, 1.0, 2),
    ],
)
def test_what_is_not_given_follows(given, rate, steps):
    engine, private = made(**given)
    loader = private[3]
    assert (loader.sample_rate, len(loader)) == (rate, steps)
    train(private)
    assert engine.privacy_statement(1e-3).steps == steps


@pytest.mark.parametrize("epochs", [1, 2])
def test_epsilon_ends_at_its_target_after_the_public_number_of_steps(epochs):
    engine, private = made(
        method="make_private_with_epsilon", target_epsilon=2.0, target_delta=1e-3,
        sample_rate=0.2, steps=20, epochs=epochs,
    )  # fmt: skip
    train(private, epochs)
    assert 1.98 <= engine.get_epsilon(1e-3) <= 2.0


def test_a_card_whose_section_has_no_end_is_left_as_it_is(tmp_path):
    engine, private = made()
    train(private)
    statement, card = engine.privacy_statement(1e-3), tmp_path / "new" / "README.md"
    statement.write_beside(card.parent)
    text = card.read_text().rpartition("<!--")[0] + "\n## My results\n"
    card.write_text(text)
    with pytest.raises(ValueError, match="where the section ends is not known"):
        statement.write_beside(card.parent)
    assert card.read_text() == text
