"""The environment record is complete, publishable, and never fails; peaks are never guessed."""

import json
import platform
import subprocess
import sys
from datetime import datetime

import pytest
import torch

from ddp_by_hand.measure.environment import environment, git_state, peak_flops


def test_record_has_what_a_number_needs_and_neither_host_nor_variables(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--data", "~/text"])
    record = json.loads(json.dumps(environment()))
    assert record["command"] == ["bench.py", "--data", "~/text"]
    assert record["torch"] == torch.__version__
    assert record["python"] == sys.version.split()[0]
    assert 1 <= record["usable_cores"] <= record["cores"]
    assert len(record["gpus"]) == torch.cuda.device_count()
    assert datetime.fromisoformat(record["date"]).utcoffset().total_seconds() == 0
    keys = {"platform", "cpu", "triton", "cuda", "nccl", "driver", "git_commit", "git_dirty"}
    assert keys <= record.keys()
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    text = json.dumps(environment())
    assert "hf_secret_value" not in text
    assert "HF_TOKEN" not in text
    if len(platform.node()) > 6:  # a short name could be part of anything
        assert platform.node() not in text


def _git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_git_commit_and_dirty_tree(tmp_path):
    unknown = {"git_commit": None, "git_dirty": None}
    assert git_state(tmp_path) == unknown
    _git(tmp_path, "init")
    assert git_state(tmp_path) == unknown
    source = tmp_path / "source.py"
    source.write_text("1")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    (tmp_path / "results.jsonl").touch()
    state = git_state(tmp_path)
    assert len(state["git_commit"]) == 40
    assert state["git_dirty"] is False
    variant = tmp_path / "my variant.py"
    variant.touch()
    assert git_state(tmp_path)["git_dirty"] is True
    variant.unlink()
    source.write_text("2")
    assert git_state(tmp_path)["git_dirty"] is True
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "copy.py").touch()
    assert git_state(installed) == unknown


def test_without_git_and_without_torch(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "torch", None)
    record = environment()
    assert (record["git_commit"], record["torch"], record["gpus"]) == (None, None, [])


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312), ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5), ("NVIDIA H100 PCIe", torch.float16, 756.5),
        ("NVIDIA H200", torch.float32, 67), ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA A10", "bfloat16", 125), ("Tesla V100-SXM2-32GB", "float16", 125),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        *((name, "bfloat16", None) for name in (
            "Tesla V100-SXM2-32GB", "NVIDIA H100 NVL", "NVIDIA H200 MIG 1g.18gb", "NVIDIA A10G",
            "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40", "NVIDIA GH200 480GB",
        )),
        ("NVIDIA H100 80GB HBM3", "float64", None), ("cpu", "float32", None),
    ],
)  # fmt: skip
def test_known_peaks_and_others_are_none(name, dtype, tera):
    assert peak_flops(name, dtype) == (tera and pytest.approx(tera * 1e12))
