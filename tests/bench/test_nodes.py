"""Under torchrun: one node, and two nodes that meet over a network of their own."""

import json
import os
import shutil
import subprocess

import pytest

from tests.bench.test_clipping import lines_of
from tests.support.benchmark_command import PLUGINS, benchmark, finish, launch, table_of

TORCHRUN = ("-m", "torch.distributed.run")
NAMES = ["--implementations", "none", "ddp_bucketed"]


@pytest.mark.slow
def test_torchrun_on_one_node(tmp_path):
    """Ranks of another launcher: rank 0 prints the table, and nobody else says a word of it."""
    run = benchmark(*NAMES, "--dtype", "mixed", "--output-dir", tmp_path,
                    launcher=(*TORCHRUN, "--nproc_per_node=2"))  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert list(table_of(run.stdout)) == NAMES[1:]
    assert run.stdout.count("results: ") == 1
    assert (tmp_path / "comparison.png").exists()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["invocation"] for row in rows} == {rows[0]["invocation"]}
    assert "rank" not in run.stderr


@pytest.fixture
def two_hosts():
    """Prefixes, variables and addresses of two hosts: network namespaces, or this one twice."""
    names = [f"ddp_{os.getpid()}_{side}" for side in "ab"]
    try:
        _make_namespaces(names)
    except (OSError, subprocess.CalledProcessError):
        _remove_namespaces(names)
        yield [[], []], {"GLOO_SOCKET_IFNAME": "lo"}, ["127.0.0.1"] * 2
        return
    prefixes = [["ip", "netns", "exec", name] for name in names]
    yield prefixes, {"GLOO_SOCKET_IFNAME": "veth0"}, ["10.111.0.1", "10.111.0.2"]
    _remove_namespaces(names)


def _make_namespaces(names: list[str]) -> None:
    for name in names:
        _ip("netns", "add", name)
    ends = [("veth0", "netns", name) for name in names]
    _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
    for number, name in enumerate(names, start=1):
        _ip("-n", name, "address", "add", f"10.111.0.{number}/24", "dev", "veth0")
        _ip("-n", name, "link", "set", "veth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")


def _remove_namespaces(names: list[str]) -> None:
    for name in names:
        if shutil.which("ip"):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def start_nodes(two_hosts, folders, *arguments):
    """One torchrun agent a host, which find each other at the first host's address."""
    prefixes, variables, addresses = two_hosts
    processes = []
    for number, (prefix, folder) in enumerate(zip(prefixes, folders, strict=True)):
        launcher = [
            *(*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint={addresses[0]}:29417", f"--local-addr={addresses[number]}"),
            # PyTorch would look for the endpoint among the addresses of the host's name
            f"--rdzv-conf=is_host={int(number == 0)},join_timeout=60",
        ]
        place = ["--output-dir", folder]
        options = {"prefix": prefix, "launcher": launcher, "env": variables}
        processes.append(launch(*arguments, *place, **options))
    return processes


@pytest.mark.slow
def test_two_nodes(two_hosts, tmp_path):
    """Replicated and sharded, ordinary and private."""
    folders = [tmp_path / "first", tmp_path / "second"]
    names = ["--implementations", "none", "ddp_bucketed", "fsdp2", "tp"]
    modes = ["--clipping", "none", "bookkeeping"]
    runs = [finish(process) for process in start_nodes(two_hosts, folders, *names, *modes)]
    assert [run.returncode for run in runs] == [0, 0], runs
    printed = [bool(run.stdout) for run in runs]
    assert sorted(printed) == [False, True]
    first = printed.index(True)  # the rendezvous decides which node has rank 0
    table = lines_of(runs[first].stdout)
    assert set(table) == {(name, mode) for name in names[1:] for mode in modes[1:]}
    assert all(float(row.split()[2]) <= 1e-6 for row in table.values())
    assert (folders[first] / "comparison.png").exists()
    assert not folders[1 - first].exists()


@pytest.mark.slow
def test_a_node_that_dies_ends_the_other(two_hosts, tmp_path):
    plugin = ["--implementations", "none", f"{PLUGINS}:Killed", "--timeout", "8"]
    runs = [finish(process) for process in start_nodes(two_hosts, [tmp_path] * 2, *plugin)]
    assert [run.returncode for run in runs] == [1, 1], runs
    said = runs[0].stderr + runs[1].stderr
    assert "Signal 9 (SIGKILL) received" in said
    assert "rank 0 failed first" not in said
    assert (tmp_path / "results.jsonl").read_text().count('"ok"') >= 2
