"""Mistakes that hand-built data parallelism often makes, and the tests that catch them.

    python -m tests.support.mutants             # apply each, print the table: mutant → caught by
    python -m tests.support.mutants NAME ...    # some of them

A mutant is a change of source text, made in a copy of `ddp/` and of its tests in a temporary
folder; the named tests run there and one must fail. The first of them that does is the table's.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ["pyproject.toml", "ddp", "lm", "tests/ddp", "tests/support", "tests/__init__.py"]
COPIED += ["tests/conftest.py"]


@dataclass(frozen=True)
class Mutant:
    """`changes`: (file in ddp/, text, replacement); `tests`: a test file and, perhaps, -k."""

    name: str
    changes: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


LAUNCH = """            bucket = self._buckets[self._launched]
            if not (everything or self._ready.issuperset(bucket.members)):
                return
"""
LAUNCH_AS_READY = """            rest = self._buckets[self._launched :]
            done = [b for b in rest if everything or self._ready.issuperset(b.members)]
            if not done:
                return
            bucket = done[0]
            self._buckets.remove(bucket)
            self._buckets.insert(self._launched, bucket)
            self._bucket_of = {i: n for n, b in enumerate(self._buckets) for i in b.members}
"""
BY_DTYPE = "for dtype in dict.fromkeys(gradients[i].dtype for i in order)"
BUFFERS = "self._buffers_of_module.broadcast()"

MUTANTS = [
    Mutant(
        "buffers not broadcast at construction",
        (("base.py", "[*module.parameters(), *module.buffers()]", "[*module.parameters()]"),),
        ("tests/ddp/test_buffers.py",),
    ),
    Mutant(
        "buffers not broadcast before a forward",
        (("base.py", BUFFERS, "pass"),),
        ("tests/ddp/test_buffers.py",),
    ),
    Mutant(
        "buffers broadcast in eval too",
        (("base.py", "self.training and torch.is_grad_enabled()", "torch.is_grad_enabled()"),),
        ("tests/ddp/test_buffers.py",),
    ),
    Mutant(
        "no initial broadcast",
        (("checks.py", "dist.broadcast(", "(lambda *_a, **_k: None)("),),
        ("tests/ddp/test_construction.py", "initial_values"),
    ),
    Mutant(
        "blocking all-reduce in the hook",
        (("individual.py", "pending.append(", "work.wait()\n            pending.append("),),
        ("tests/ddp/test_collectives.py",),
    ),
    Mutant(
        "everything launched at finish",
        (("base.py", "launches_in_backward: ClassVar[bool] = True",
          "launches_in_backward = False"),),
        ("tests/ddp/test_collectives.py",),
    ),
    Mutant(
        "leaked handles",
        (
            (
                "rounds.py",
                "self.wait(bucket, self._in_flight.pop(number))",
                "self.__dict__.setdefault('_old', []).append(self._in_flight[number])\n"
                "        self.wait(bucket, self._in_flight.pop(number))",
            ),
        ),
        ("tests/ddp/test_failures.py", "leaks"),
    ),
    Mutant(
        "handles not cleared, waited for twice",
        (("rounds.py", "self._in_flight.pop(number)", "self._in_flight[number]"),),
        ("tests/ddp/test_accumulation.py",),
    ),
    Mutant(
        "hooks outlive the wrapper",
        (("ownership.py", "        handle.remove()", "        pass"),),
        ("tests/ddp/test_failures.py", "trace"),
    ),
    Mutant(
        "buckets launched in forward order",
        (
            ("base.py", "list(reversed(range(len(self._parameters_by_index))))",
             "list(range(len(self._parameters_by_index)))"),
            ("base.py", "if not self._order_is_observed:", "if False:"),
        ),
        ("tests/ddp/test_collectives.py",),
    ),
    Mutant(
        "buckets launched in order of readiness",
        (("rounds.py", LAUNCH, LAUNCH_AS_READY),),
        ("tests/ddp/test_models.py", "networks"),
    ),
    Mutant(
        "no dtype split",
        (
            ("buckets.py", BY_DTYPE, "for dtype in [None]"),
            ("buckets.py", "[i for i in order if gradients[i].dtype == dtype]", "list(order)"),
        ),
        ("tests/ddp/test_models.py", "mixed_types"),
    ),
    Mutant(
        "no small last buckets",
        (("buckets.py", "min(bucket_bytes, max(remaining / 2, SMALLEST_TAIL_BYTES))",
          "bucket_bytes"),),
        ("tests/ddp/test_buckets.py",),
    ),
    Mutant(
        "no_sync does nothing",
        (("base.py", "= self._synchronizing, False", "= self._synchronizing, True"),),
        ("tests/ddp/test_collectives.py", "stats"),
    ),
    Mutant(
        "no_sync forgets after an exception",
        (("base.py", "        try:\n            yield\n        finally:\n            self._sync",
          "        if True:\n            yield\n            self._sync"),),
        ("tests/ddp/test_accumulation.py", "exception"),
    ),
    Mutant(
        "an unused parameter breaks the bucket",
        (("rounds.py", "self._launch_complete_buckets(everything=True)",
          "self._launch_complete_buckets()"),),
        ("tests/ddp/test_unused.py",),
    ),
    Mutant(
        "unused everywhere becomes zero",
        (("rounds.py", "            if i in used:\n", "            if True:\n"),),
        ("tests/ddp/test_unused.py",),
    ),
    Mutant(
        "averages the parameter instead of its gradient",
        (("individual.py", "self.gradient(i)", "self._parameters_by_index[i].data"),),
        ("tests/ddp/test_gradients.py",),
    ),
    Mutant(
        "gradients doubled by a pre-accumulate hook",
        (("hooks.py", "wrapper.before_gradient(parameter)\n\n",
          "parameter.grad = _gradients[0].clone()\n\n"),),
        ("tests/ddp/test_gradients.py",),
    ),
    Mutant(
        "a further clipped sum is added to what other ranks have added",
        (("base.py", "        self._conform(i)\n        self._take_back_share(i)",
          "        self._conform(i)"),),
        ("tests/ddp/test_gradient_ready.py", "rounds"),
    ),
    Mutant(
        "float32 sums travel in 16 bits",
        (("bucketed.py", "dtype=self.dtype_of(first)",
          "dtype=self._parameters_by_index[first].dtype"),),
        ("tests/ddp/test_gradient_dtype.py", "sums"),
    ),
    Mutant(
        "the optimizer's 16-bit gradients stay in the next step",
        (("arithmetic.py", "_dtype is not None:\n            self._give_dtype(",
          "_dtype is None:\n            self._give_dtype("),
         ("arithmetic.py", "_dtype is not None:\n            self._give_dtypes",
          "_dtype is None:\n            self._give_dtypes")),
        ("tests/ddp/test_gradient_dtype.py", "sums"),
    ),
    Mutant(
        "mean of means of sums: the share is not taken back",
        (("rounds.py", "gradient.div_(self.world_size)", "pass"),),
        ("tests/ddp/test_accumulation.py", "never_zeroed"),
    ),
    Mutant(
        "late gradients are not reduced",
        (("base.py", "if anything_late:", "if False:"),),
        ("tests/ddp/test_accumulation.py", "behind"),
    ),
    Mutant(
        "a failed backward is not discarded",
        (("base.py", "if self._in_backward:", "if False:"),),
        ("tests/ddp/test_failures.py", "failed_backward"),
    ),
    Mutant(
        "the copy engine pulls before its peers have filled their buffers",
        (("copy_engine.py",
          "        self._memory.signal()\n        self._memory.wait_for_peers()\n        for mine",
          "        for mine"),),
        ("tests/ddp/test_copy_engine.py",),
    ),
    Mutant(
        "a discarded step passes for zeros",
        (("base.py", "self._absent = torch.nan", "self._absent = 0.0"),),
        ("tests/ddp/test_disagreement.py", "discards"),
    ),
    Mutant(
        "a user's later hooks run behind the reduction",
        (("hooks.py", "node.register_hook(after)",
          "parameter.register_post_accumulate_grad_hook(lambda p, after=after: after((), ()))"),),
        ("tests/ddp/test_hooks.py", "hooks_of"),
    ),
    Mutant(
        "a gradient of None is missing",
        (("hooks.py", "wrapper.gradient_absent(parameter)", "pass"),),
        ("tests/ddp/test_hooks.py", "none"),
    ),
    Mutant(
        "zeros that stand for None are reduced anew in a second backward",
        (("bucketed.py", "if absent is None", "if True"),),
        ("tests/ddp/test_hooks.py", "none and Bucketed or none and bucketed"),
    ),
    Mutant(
        "two wrappers of one network reduce at once",
        (("hooks.py", "wrapper is not None and wrapper._is_active", "wrapper is not None"),),
        ("tests/ddp/test_ownership.py",),
    ),
    Mutant(
        "networks that share parameters are wrapped both",
        (("ownership.py", "if parameter in names:", "if False:"),),
        ("tests/ddp/test_ownership.py",),
    ),
    Mutant(
        "a broadcast of buffers counts as a change",
        (("buffers.py", "buffer.data.copy_(values)", "buffer.copy_(values)"),),
        ("tests/ddp/test_buffers.py", "two_forwards"),
    ),
    Mutant(
        "a broadcast overwrites the buffers that autograd has saved",
        (("buffers.py", "if id(buffer) not in self._last:", "if False:"),
         ("buffers.py", "self._last[id(buffer)][1] == version_of(buffer)", "True")),
        ("tests/ddp/test_buffers.py", "replaces"),
    ),
    Mutant(
        "a forgotten finish is not said",
        (("watch.py", "if version_of(parameter) != version:", "if False:"),),
        ("tests/ddp/test_watch.py", "change"),
    ),
    Mutant(
        "evaluation hides a forgotten finish",
        (("watch.py", "if unchanged:", "if True:"),),
        ("tests/ddp/test_watch.py", "change"),
    ),
    Mutant(
        "replaced parameters are not said",
        (("watch.py", "if self._wrapped.get(id(p)) != (p, p.dtype, p.device):", "if False:"),),
        ("tests/ddp/test_watch.py", "change"),
    ),
    Mutant(
        "the backward decides about no_sync",
        (("base.py", "if not self._in_backward or self._backward_reduces is None:", "if True:"),),
        ("tests/ddp/test_watch.py", "no_sync"),
    ),
    Mutant(
        "a copy speaks to the other ranks",
        (("base.py", "if not self._is_copy:\n", "if True:\n"),),
        ("tests/ddp/test_copies.py",),
    ),
    Mutant(
        "the user's grad_dtype is not given back",
        (("ownership.py", "        give_dtype(parameter, dtype)", "        pass"),),
        ("tests/ddp/test_gradient_dtype.py", "types_of"),
    ),
    Mutant(
        "gradients keep the strides of the collective",
        (("base.py", "self._restore_strides()", "pass"),),
        ("tests/ddp/test_disagreement.py", "strides"),
    ),
]  # fmt: skip


def run_tests(changes: tuple[tuple[str, str, str], ...], tests: tuple[str, ...]) -> str:
    """Pytest's output on a changed copy, up to the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source, target = ROOT / name, copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        change(copy / "lm/rank_pool.py", "timedelta(seconds=90)", "timedelta(seconds=15)")
        for file, text, replacement in changes:
            change(copy / "ddp" / file, text, replacement)
        keyword = ["-k", f"({tests[1]}) and not cuda"] if tests[1:] else ["-k", "not cuda"]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not gpu"]
        command += ["-p", "no:cacheprovider", tests[0], *keyword]
        run = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
        if run.returncode not in (0, 1):
            raise RuntimeError(f"pytest did not run: {run.stdout}{run.stderr}")
        return run.stdout


def change(file: Path, text: str, replacement: str) -> None:
    source = file.read_text()
    if text not in source:
        raise ValueError(f"{file.name} no longer contains {text!r}: bring the mutant up to date")
    file.write_text(source.replace(text, replacement))


def caught_by(mutant: Mutant) -> str | None:
    """The first test that fails on the mutant."""
    failed = re.search(
        r"^(?:FAILED|ERROR) \S+::(\S+)", run_tests(mutant.changes, mutant.tests), re.M
    )
    return failed.group(1) if failed else None


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or m.name in names]
    width = max(len(m.name) for m in chosen)
    survivors = 0
    for mutant in chosen:
        test = caught_by(mutant)
        survivors += test is None
        print(f"{mutant.name:{width}}  {test or 'SURVIVES'}", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
