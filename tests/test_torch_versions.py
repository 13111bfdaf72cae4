"""On a PyTorch that nothing is tested with, programs run behind one warning."""

import warnings
from pathlib import Path

import pytest
import torch

from ddp_by_hand import torch_versions

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("version", "environment", "warned"),
    [
        ("2.11.0+cu130", {}, 0),
        (f"{torch_versions.TESTED[-1]}.9", {}, 0),
        ("2.10.1", {}, 1),
        ("2.99.0a0+git1", {}, 1),
        ("2.99.0", {"RANK": "0"}, 1),
        ("2.99.0", {"RANK": "1"}, 0),
    ],
)
def test_who_is_warned(monkeypatch, version, environment, warned):
    monkeypatch.setattr(torch, "__version__", version)
    for name in ("RANK", torch_versions.WARNED):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for times in (warned, 0):  # a second time: as in a process that this one starts
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch_versions.warn_if_untested()
        assert len(found) == times
    monkeypatch.delenv(torch_versions.WARNED, raising=False)


@pytest.mark.parametrize("document", ["README.md", "SECURITY.md"])
def test_documents_name_the_tested_versions(document):
    assert f"torch {torch_versions.RANGE}" in (ROOT / document).read_text()
