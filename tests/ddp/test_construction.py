"""What `wrap` accepts, refuses and does before the first step."""

import math
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp import IMPLEMENTATIONS, Unavailable, implementation, options_of, wrap
from ddp.internals.ranks import leave_time_at_exit
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside, Chain, chain_loss, wrapped
from tests.support.forked import run_forked
from tests.support.on_ranks import on_ranks

TABLE_ORDER = ["none", "ddp", "ddp_individual", "ddp_individual_v2", "ddp_bucketed"]


def test_the_table():
    assert list(IMPLEMENTATIONS)[:5] == TABLE_ORDER
    assert {"ddp_copy_engine", "torch_ddp"} <= set(IMPLEMENTATIONS)
    assert all(issubclass(cls, nn.Module) for cls in IMPLEMENTATIONS.values())


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"ddp_fancy.*none, ddp, ddp_individual") as error:
        wrap("ddp_fancy", nn.Linear(1, 1))
    assert all(name in str(error.value) for name in IMPLEMENTATIONS)
    assert "\n" not in str(error.value)


def test_bad_plug_ins_are_named(tmp_path: Path):
    broken = tmp_path / "broken.py"
    broken.write_text("class NotAModule: ...\nclass Lacking(__import__('torch').nn.Module): ...\n")
    failing = tmp_path / "failing.py"
    failing.write_text("1 / 0\n")
    for name, complaint in [
        (f"{tmp_path}/absent.py:Any", "no file"),
        (f"{broken}:NotAModule", "no nn.Module of that name"),
        (f"{broken}:Lacking", "finish_gradient_synchronization"),
        (f"{failing}:Any", "ZeroDivisionError"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            implementation(name)


WITHOUT_BUCKETS = ("none", "ddp", "ddp_individual", "fsdp", "torch_fsdp")


def test_options_only_where_they_mean_something():
    common = {"reduce", "process_group", "find_unused_parameters"}
    for name, cls in IMPLEMENTATIONS.items():
        options = set(options_of(cls))
        without = {"torch_fsdp": {"find_unused_parameters"}, "diloco": {"reduce"}}
        assert common - options == without.get(name, set()), name
        assert ("bucket_size_mb" in options) == (name not in WITHOUT_BUCKETS)


def refusals(context: Context, name: str) -> None:
    def build(**options):
        return wrapped(context, name, **options)

    with pytest.raises(TypeError, match="bucket_size") as error:
        build(bucket_size=3)
    assert "find_unused_parameters" in str(error.value)
    with pytest.raises(ValueError, match=r"reduce: 'max'.*mean, sum"):
        build(reduce="max")
    if "bucket_size_mb" in options_of(implementation(name)):
        for size in (0, -1, math.nan, math.inf, "25"):
            with pytest.raises(ValueError, match="bucket_size_mb"):
                build(bucket_size_mb=size)
    else:
        with pytest.raises(TypeError, match="bucket_size_mb"):
            build(bucket_size_mb=1)
    frozen = Chain().requires_grad_(False).to(context.device)
    for module in (frozen, nn.Flatten()):
        with pytest.raises(RuntimeError, match="no parameter requires a gradient"):
            wrapped(context, name, module)
    Beside(context, name).step(chain_loss(0))  # still in step


def network(**changes) -> nn.Module:
    module = nn.Sequential()
    module.add_module("first", nn.Linear(4, changes.get("width", 5)))
    module.add_module(changes.get("name", "second"), nn.Linear(changes.get("width", 5), 2))
    if changes.get("more"):
        module.add_module("third", nn.Linear(2, 2))
    if changes.get("frozen"):
        module[1].bias.requires_grad_(False)
    if changes.get("buffer"):
        module.register_buffer("offset", torch.zeros(changes["buffer"]))
    return module.to(changes.get("dtype", torch.float32))


DIFFERENCES = [
    ({"width": 6}, r"first\.weight \[5, 4\].*first\.weight \[6, 4\]"),
    ({"dtype": torch.float64}, r"first\.weight \[5, 4\] torch.float32.*\[5, 4\] torch.float64"),
    ({"more": True}, r"third\.weight \[2, 2\]"),
    ({"name": "other"}, r"second\.weight.*other\.weight"),
    ({"frozen": True}, r"second\.bias.*frozen"),
    ({"buffer": 3}, r"offset \[3\]"),
]


def different_models(context: Context, name: str) -> None:
    """One odd rank, first, middle or last, and everyone raises the same."""
    for turn, (changes, message) in enumerate(DIFFERENCES):
        odd = 1 + turn % (context.world_size - 1)
        module = network(**(changes if context.rank == odd else {})).to(context.device)
        with pytest.raises(ValueError, match=message) as error:
            wrapped(context, name, module)
        assert f"rank {odd}" in str(error.value)
        assert "\n" not in str(error.value)
    Beside(context, name).step(chain_loss(0))


def initial_values(context: Context, name: str) -> None:
    torch.manual_seed(context.rank)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[1].requires_grad_(False)
    module[2].running_mean.fill_(context.rank)
    model = wrapped(context, name, module)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    for (key, ours), theirs in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, msg=f"{key} is not rank 0's")


def one_bucket(context: Context, name: str) -> None:
    """Two tensors of 3 MiB and a small one, which any other size would send apart."""
    if "bucket_size_mb" not in options_of(implementation(name)):
        return
    network = nn.Sequential(nn.Linear(886, 886), nn.Linear(886, 886)).to(context.device)
    model = wrapped(context, name, network, bucket_size_mb=None)
    for _ in range(2):  # PyTorch rebuilds its buckets after the first
        model(torch.ones(1, 886, device=context.device)).sum().backward()
        model.finish_gradient_synchronization()
        assert model.stats()["buckets"] == 1


def lazy(context: Context, name: str) -> None:
    """On one rank only, and still refused on all."""
    network = nn.Sequential(nn.LazyLinear(2), nn.BatchNorm1d(2)).to(context.device)
    x = torch.ones(3, 4, device=context.device)
    if context.rank == 0:
        network(x)
    with pytest.raises(RuntimeError, match=r"0\.weight has no shape yet.*run one batch"):
        wrapped(context, name, network)
    network(x)
    model = wrapped(context, name, network)
    model(x).sum().backward()
    model.finish_gradient_synchronization()


def not_wrapped(context: Context, name: str) -> None:
    """Refuses on all ranks a network that has no values of its own on one of them."""
    for where, change, message in [
        ("bias", lambda b: b.to("meta"), r"bias is on the meta device: call network\.to_empty"),
        ("table", lambda t: t.expand(2, 3), r"table has elements in one place.*by clone\(\)"),
        ("table", lambda t: t[0, :1].expand(3), r"table has elements in one place.*by clone\(\)"),
    ]:
        module = nn.Linear(2, 2).to(context.device)
        module.register_buffer("table", torch.zeros(1, 3, device=context.device))
        if context.rank == 1:
            tensor = change(getattr(module, where))
            setattr(module, where, nn.Parameter(tensor) if where == "bias" else tensor)
        with pytest.raises(RuntimeError, match=message):
            wrap(name, module, process_group=context.group)
    with pytest.raises(TypeError, match=r"list.*is no nn\.Module: give the network, wrap\("):
        wrap(name, [nn.Linear(2, 2)], process_group=context.group)


def different_options(context: Context, name: str) -> None:
    """They would mix gradients, end the process or wait until the timeout."""
    for option, here, there in [
        ("reduce", "sum", "mean"),
        ("find_unused_parameters", True, False),
        ("bucket_size_mb", 1, 2),
        ("param_dtype", torch.float64, torch.float32),
        ("units", (nn.Linear,), (nn.Tanh,)),
        ("every", 3, 4),
    ]:
        if name not in IMPLEMENTATIONS or option not in options_of(implementation(name)):
            continue
        message = f"different options: {option}=.* on rank 0, {option}=.* on rank 1"
        for odd in ({option: there}, {}):
            own = {option: here} if context.rank == 0 else odd
            with pytest.raises(ValueError, match=message):
                wrap(name, Chain().to(context.device), process_group=context.group, **own)
    if "bucket_size_mb" in options_of(implementation(name)):  # a whole number is no other size
        size = 1 if context.rank else 1.0
        wrap(name, Chain().to(context.device), process_group=context.group, bucket_size_mb=size)


@pytest.mark.parametrize(
    "body",
    [
        refusals,
        different_models,
        initial_values,
        one_bucket,
        lazy,
        not_wrapped,
        different_options,
    ],
)
def test_construction(ranks, implementation, body):
    ranks.run(min(3, ranks.size), body, implementation)


@on_ranks(1)
def test_a_group_of_other_ranks_is_refused(context: Context) -> None:
    """Its size is -1 here, by which gradients would be divided."""
    for name in ("ddp", "torch_fsdp"):
        with pytest.raises(RuntimeError, match="process_group is without this rank: call wrap"):
            wrap(name, Chain(), process_group=dist.GroupMember.NON_GROUP_MEMBER)


@on_ranks(3)
def test_copy_engine_says_why_it_is_unavailable(context: Context) -> None:
    with pytest.raises(Unavailable, match=r"needs NVIDIA GPUs of one host with peer access.*cpu"):
        wrap("ddp_copy_engine", nn.Linear(2, 2), process_group=context.group)


PLUG_IN = '''
"""A learner's variant: blocking, in its own few lines."""
import torch.distributed as dist
from ddp import DataParallel


class Mine(DataParallel):
    launches_in_backward = False

    def launch(self, bucket):
        for i in bucket.members:
            dist.all_reduce(self.gradient(i), group=self.process_group)
            self.count(collectives=1, nbytes=bucket.nbytes)
            if self.reduce == "mean":
                self.gradient(i).div_(self.world_size)

    def wait(self, bucket, handle):
        pass
'''


@on_ranks(1)
def test_threads_of_collectives_have_time_at_exit(context: Context):
    """Registers one wait a process, with the first wrapper: gloo's threads end during it."""
    leave_time_at_exit.cache_clear()
    with patch("atexit.register") as register:
        for _ in range(2):
            wrapped(context, "fsdp", Chain())
    (call,) = register.call_args_list
    assert call.args[0] is time.sleep
    assert call.args[1] > 0
    leave_time_at_exit.cache_clear()  # nothing was registered


def pytest_on(plug_in: Path, tests: list[str], *arguments: str) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[2]
    command = [sys.executable, find_spec("pytest.__main__").origin, "-q", "-p", "no:cacheprovider"]
    command += [*tests, "--implementation", f"{plug_in}:Mine", "-k", "Mine", *arguments]
    env = {"PYTHONPATH": str(root), **os.environ}
    if "--collect-only" in arguments:  # no ranks, which would outlive a forked process
        return run_forked(command, root, env, 600)
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=600)


def test_collecting_the_tests_of_a_learners_variant(tmp_path: Path):
    plug_in = tmp_path / "mine.py"
    plug_in.write_text(PLUG_IN)
    files = ["tests/ddp/test_accumulation.py", "tests/ddp/test_unused.py"]
    collected = pytest_on(plug_in, files, "--collect-only")
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert "test_accumulation[Mine-cpu" in collected.stdout
    assert "test_unused_parameters[Mine-cpu" in collected.stdout
    assert "ddp_bucketed-cpu" not in collected.stdout


@pytest.mark.slow
def test_a_learners_variant_passes_every_behaviour_test(tmp_path: Path):
    plug_in = tmp_path / "mine.py"
    plug_in.write_text(PLUG_IN)
    run = pytest_on(plug_in, ["tests/ddp"])
    assert run.returncode == 0, run.stdout
    plug_in.write_text(PLUG_IN.replace("self.gradient(i).div_(self.world_size)", "pass"))
    run = pytest_on(plug_in, ["tests/ddp"], "-x")
    assert run.returncode == 1, run.stdout


def test_the_order_of_a_set_is_no_other_option():
    """It differs between processes, as here between two ways to make one."""
    one, other = {0, 8}, {8, 0}
    assert repr(one) != repr(other)
    told = []
    with patch.object(ddp, "told_by_all", lambda options, _: told.append(options) or [options]):
        for units in (one, other):
            ddp._agree_on({"units": units}, None)
    assert told[0] == told[1]
