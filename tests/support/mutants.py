"""Mistakes that are often made, and the tests that catch them: of `ddp`, and of private training.

    pytest -m slow tests/test_mutants.py -k all-groups-are-one

A mutant is a change of source text, made in a copy of the package and of its tests in a temporary
folder; the named tests run there and one must fail. Mistakes of `dp_clipping` are in
private_mutants.py; mutation_score.py draws other changes and runs them by `run_tests` too.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support import private_mutants
from tests.support.forked import session_of

ROOT = Path(__file__).parents[2]
COPIED = ["pyproject.toml", "ddp", "ddp_by_hand", "tests/ddp", "tests/support", "tests/__init__.py"]
COPIED += ["tests/conftest.py"]
DDP, PRIVATE = "ddp/", "dp_clipping/"
OF_PRIVATE = (PRIVATE, f"tests/{PRIVATE}", "docs/proofs")

Change = tuple[str, str, str]


@dataclass(frozen=True)
class Mutant:
    """`changes`: (file, text, replacement); `tests`: a test file and, perhaps, -k."""

    name: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]


LAUNCH = "for bucket in schedule.buckets[schedule.launched :][:most]:"
LAUNCH_AS_READY = """rest = schedule.buckets[schedule.launched :]
        rest.sort(key=lambda b: not schedule.ready.issuperset(b.members))
        schedule.buckets[schedule.launched :] = rest
        for bucket in rest[:most]:"""
WAIT = "self.wait(bucket, self.schedule.in_flight.pop(bucket))"
BUFFERS = "self.replicas.broadcast_buffers(self.watch.buffers)"

ROWS = [  # of one change: name, file in ddp/, text, replacement, test file, and perhaps -k
    ("buffers not broadcast at construction", "internals/replicas.py",
     "*self._module.parameters(), *self._module.buffers()", "*self._module.parameters()",
     "test_replicas.py"),
    ("buffers not broadcast before a forward", "internals/interface.py",
     BUFFERS, "pass", "test_replicas.py"),
    ("buffers broadcast in eval too", "internals/step.py",
     "if not wrapper.training:", "if False:", "test_replicas.py"),
    ("no initial broadcast", "internals/replicas.py",
     "dist.broadcast(", "(lambda *_a, **_k: None)(", "test_construction.py", "initial_values"),
    ("blocking all-reduce in the hook", "individual.py",
     "async_op=True", "async_op=False", "test_collectives.py"),
    ("everything launched at finish", "base.py",
     "launches_in_backward: ClassVar[bool] = True", "launches_in_backward = False",
     "test_collectives.py"),
    ("leaked handles", "base.py",
     WAIT,
     "self.__dict__.setdefault('_old', []).append(self.schedule.in_flight[bucket])\n"
     f"                {WAIT}", "test_step.py", "leaks"),
    ("handles not cleared, waited for twice", "base.py",
     "self.schedule.in_flight.pop(bucket)", "self.schedule.in_flight[bucket]",
     "test_accumulation.py"),
    ("buckets launched in order of readiness", "base.py",
     LAUNCH, LAUNCH_AS_READY, "test_models.py", "networks"),
    ("no dtype split", "buckets.py",
     "by_dtype.setdefault(gradients[i].dtype, [])", 'by_dtype.setdefault("", [])', "test_models.py",
     "mixed_types"),
    ("no small last buckets", "buckets.py",
     "min(bucket_bytes, max(remaining / 2, SMALLEST_TAIL_BYTES))", "bucket_bytes",
     "test_buckets.py"),
    ("no_sync does nothing", "internals/interface.py",
     "= self.require_backward_grad_sync, False", "= self.require_backward_grad_sync, True",
     "test_collectives.py", "stats"),
    ("no_sync forgets after an exception", "internals/interface.py",
     "        try:\n            yield\n        finally:\n            self.require",
     "        if True:\n            yield\n            self.require", "test_accumulation.py",
     "exception"),
    ("unused everywhere becomes zero", "internals/gradients.py",
     "self.filled.difference(used)", "self.filled.difference(self.filled)", "test_unused.py"),
    ("averages the parameter instead of its gradient", "individual.py",
     "self.gradient(i)", "self.gradients.parameters[i].data", "test_gradients.py"),
    ("gradients doubled by a pre-accumulate hook", "internals/hooks.py",
     "began = version_of(parameter)",
     "began = version_of(parameter)\n        parameter.grad = incoming[0].clone()",
     "test_gradients.py"),
    ("a further clipped sum is added to what other ranks have added", "base.py",
     "[i])\n        self.gradients.make_local(i)", "[i])\n        self.gradients.dtypes.conform(i)",
     "test_manual_gradients.py", "rounds"),
    ("float32 sums travel in 16 bits", "bucketed.py",
     "dtype = self.gradients.dtypes.all[bucket.members[0]]", "dtype = None",
     "test_dtypes.py", "sums"),
    ("the optimizer's 16-bit gradients stay in the next step", "internals/gradients.py",
     "if self.least is not None:", "if self.least is None:", "test_dtypes.py", "sums"),
    ("mean of means of sums: the share is not taken back", "internals/gradients.py",
     "held.div_(self._reduction.contributors)", "pass", "test_accumulation.py", "never_zeroed"),
    ("late gradients are not reduced", "internals/step.py",
     "if anything_late:", "if False:", "test_accumulation.py", "behind"),
    ("a failed backward is not discarded", "internals/step.py",
     "if self.has_failed():", "if False:", "test_step.py", "failed_backward"),
    ("the copy engine pulls before its peers have filled their buffers", "copy_engine/exchange.py",
     "        self._memory.signal()\n        self._memory.wait_for_peers()\n        for mine",
     "        for mine", "test_copy_engine.py"),
    ("a discarded step passes for zeros", "internals/gradients.py",
     "self.absent = torch.nan", "self.absent = 0.0", "test_disagreement.py", "discards"),
    ("a user's later hooks run behind the reduction", "internals/hooks.py",
     "node.register_hook(after)",
     "self._gradients.parameters[i].register_post_accumulate_grad_hook(\n"
     "                lambda p, after=after: after((), ()))", "test_hooks.py", "hooks_of"),
    ("a gradient of None is missing", "internals/hooks.py",
     "        else:\n            find",
     "        elif parameter.grad is not None:\n            find", "test_hooks.py", "none"),
    ("zeros that were filled in for None pass for a gradient", "internals/hooks.py",
     "if incoming[0] is not None:", "if True:", "test_hooks.py", "none"),
    ("two wrappers of one network reduce at once", "internals/hooks.py",
     "self._handles.pop().remove()", "self._handles.pop()", "test_wrapper.py"),
    ("networks that share parameters are wrapped both", "internals/hooks.py",
     "if parameter.requires_grad and parameter in names:", "if False:", "test_wrapper.py"),
    ("a broadcast of buffers counts as a change", "internals/replicas.py",
     "buffer.data.copy_(values)", "buffer.copy_(values)", "test_replicas.py", "two_forwards"),
    ("a forgotten finish is not said", "internals/watch.py",
     "if version_of(self._parameters[i]) != version:", "if False:", "test_watch.py", "change"),
    ("a fused optimizer's writes are not counted", "internals/interface.py",
     "        optimizer.register_step_post_hook(count_writes)\n", "", "test_hooks.py",
     "optimizer_in_backward"),
    ("evaluation hides a forgotten finish", "internals/watch.py",
     "if unchanged:", "if True:", "test_watch.py", "change"),
    ("replaced parameters are not said", "internals/watch.py",
     "and self._index_of(p) < 0:", "and False:", "test_watch.py", "change"),
    ("the backward decides about no_sync", "internals/step.py",
     "if not self.in_backward or self._reduces is None:", "if True:", "test_accumulation.py",
     "no_sync_around"),
    ("the user's grad_dtype is not given back", "internals/hooks.py",
     "self._gradients.dtypes.give_back()", "pass", "test_dtypes.py", "types_of"),
    ("gradients keep the strides of the collective", "internals/step.py",
     "self._gradients.restore_strides()", "pass", "test_disagreement.py", "strides"),
    ("gloo's reduce-scatter does not average", "torch_compat.py",
     "x.div_(group.size())", "pass", "sharded/test_interface.py"),
    ("a rank gathers and does not wait", "sharded/zero1.py",
     "self._gathers.pop(0).wait()", "self._gathers.pop(0)", "sharded/test_zero1.py",
     "what_is_sent"),
    ("a reduced slice is averaged again", "sharded/internals/gradients.py",
     "own.mul_(self._reduction.contributors)", "pass", "test_accumulation.py", "zero1"),
    ("cleared gradients come back in the next backward", "sharded/internals/gradients.py",
     "            own.zero_()\n", "", "sharded/test_interface.py", "set_to_zero"),
    ("the norm is that of this rank's slices", "sharded/internals/interface.py",
     "dist.all_reduce(square, group=self.process_group)", "pass", "test_optimizer.py", "fsdp"),
    ("the schedule's learning rate does not reach the slices", "sharded/optimizer.py",
     "own.update(options_of(group))", "pass",
     "sharded/test_optimizer.py", "checkpoint"),
    ("a checkpoint holds one rank's state", "sharded/internals/state.py",
     "torch.cat(found)", "found[0].repeat(9)[: parameter.numel()]", "sharded/test_optimizer.py",
     "checkpoint"),
    ("a loaded state is shared with the checkpoint", "sharded/internals/state.py",
     "value.reshape(-1)[piece.of_whole].clone()", "value.reshape(-1)[piece.of_whole]",
     "sharded/test_optimizer.py", "checkpoint"),
    ("reduced buckets stay allocated", "sharded/zero2.py",
     "frees_gradients = True", "frees_gradients = False", "sharded/test_zero2.py", "freed"),
    ("all buckets wait for the end of backward", "sharded/zero2.py",
     "self.wait_for(*list(self.schedule.in_flight)[:-1])", "pass", "sharded/test_zero2.py",
     "freed"),
    ("diloco climbs where it should descend", "diloco.py",
     "self.start[i] - parameters[i]", "parameters[i] - self.start[i]", "test_diloco.py",
     "reference_loop"),
    ("the outer momentum is not saved", "internals/rounds.py",
     '("momentum", wrapper.momentum))', '("momentum", []))', "test_diloco.py", "goes_on"),
    ("the place in a round is not saved", "internals/rounds.py",
     '"steps": wrapper.counts[number]', '"steps": 0', "test_diloco.py", "goes_on"),
    ("buffers are broadcast in each local step", "diloco.py",
     "    def share_buffers(self)", "    def shares_buffers(self)", "test_diloco.py", "buffers"),
    ("fsdp's gradients are not averaged", "torch_compat.py",
     "x.div_(group.size())", "pass", "sharded/test_fsdp_networks.py", "test_networks"),
    ("a rank keeps the slice of another one", "sharded/units.py",
     "self.shard.clone()", "self.own(self.values.roll(self.slice_numel)).clone()",
     "test_construction.py", "initial_values"),
    ("a block computes before its gather has finished", "sharded/units.py",
     'noted(self._work.wait, "gather", self.name)', "pass", "sharded/test_fsdp_networks.py",
     "test_networks"),
    ("a block is freed before its last gradient", "sharded/fsdp.py",
     "if are_there and", "if", "sharded/test_fsdp_networks.py", "TwoSegments or unused or wire"),
    ("a segment computed again is taken for the whole backward", "sharded/fsdp.py",
     " and number_of_backward() == self.order.backward:", ":", "sharded/test_fsdp_networks.py",
     "InSegments"),
    ("other memory of a parameter is not seen", "sharded/internals/views.py",
     "raise RuntimeError(MOVED.format(name=name))", "pass", "sharded/test_fsdp_parameters.py",
     "other_memory"),
    ("values of a divided parameter are read", "sharded/internals/stand_in.py",
     "return name_of(func) in ABOUT_NO_VALUE", "return True", "sharded/test_fsdp_parameters.py",
     "looks"),
    ("an optimizer that looks at whole tensors steps slices", "sharded/optimizer.py",
     'getattr(self.cls, "treats_elements_alone", False)', "True", "sharded/test_optimizer.py",
     "elements_alone"),
    ("what a forward writes to parameters is lost", "sharded/internals/views.py",
     "take_written(unit.own(unit.values), unit.shard)", "pass", "sharded/test_fsdp_parameters.py",
     "written_takes_effect"),
    ("what a backward writes to parameters is lost", "sharded/internals/views.py",
     " or unit.versions != list(map(version_of, unit.parameters)):", ":",
     "sharded/test_fsdp_parameters.py", "writes"),
    ("what is written through .data is not looked for", "sharded/internals/whole.py",
     "            unit.was_called = True", "            pass", "sharded/test_fsdp_parameters.py",
     "written_takes_effect"),
    ("the digits of a slice are lost in the dtype that computes", "internals/kernels.py",
     "if own.dtype != shard.dtype:", "if False:", "sharded/test_fsdp_parameters.py", "digits"),
    ("a block that contains the next one is freed", "sharded/internals/blocks.py",
     "not in (*needed, *needed[-1].around)", "not in needed", "sharded/test_fsdp_networks.py",
     "nested_and_frozen"),
    ("blocks stay whole behind their forward", "sharded/fsdp.py",
     "if block is not self.root or not outputs:", "if False:", "sharded/test_fsdp.py", "overlap"),
    ("blocks stay whole behind their backward", "sharded/internals/blocks.py",
     "                block.free()", "                pass", "sharded/test_fsdp_networks.py",
     "freed_in_backward"),
    ("the next forward computes with the values of before the step", "sharded/fsdp.py",
     """        if not self.order.is_ahead:
            self.free()
        for unit in units:""", "        for unit in []:", "sharded/test_fsdp_networks.py",
     "gathered_before_the_step"),
    ("a second optimizer leaves what the first one has gathered of its own units",
     "sharded/fsdp.py",
     "        for unit in units:  #", "        for unit in []:  #", "sharded/test_fsdp.py",
     "two_optimizers_of_one_unit"),
    ("each optimizer gathers all units", "sharded/optimizer.py",
     "if given.intersection(unit.parameters)]", "]", "sharded/test_zero1.py",
     "gather_what"),
    ("ranks do not begin a step together", "sharded/optimizer.py",
     "agree(self.model.exchange, self._act(), self._broken)", "[]", "sharded/test_failed_steps.py",
     "late"),
    ("a forward does not see that others step", "sharded/internals/agreement.py",
     "if len(ranks) > 1:", "if False:", "sharded/test_fsdp_failures.py", "left_out"),
    ("a step that cannot begin tells nobody", "sharded/optimizer.py",
     "self.model.begin_step(self._units)\n        self._has_agreed = True",
     "self._has_agreed = True\n        self.model.begin_step(self._units)",
     "sharded/test_failed_steps.py", "changes_nothing and where_it_begins"),
    ("a parameter without elements has no owner", "sharded/slices.py",
     " or (unit.rank == 0 and parameter.numel() == 0):", ":",
     "sharded/test_optimizer.py", "without_elements"),
    ("a backward that fails before its first gradient is not seen", "internals/step.py",
     "x.register_hook(lambda _gradient: self.begin_backward(reduces))", "pass", "test_step.py",
     "before_its_first_gradient"),
    ("backward does not start the next gather", "sharded/internals/blocks.py",
     "            start(block.units)\n", "            pass\n", "sharded/test_fsdp.py", "overlap"),
    ("reduced slices of earlier backwards are lost", "sharded/internals/gradients.py",
     "[piece.of_whole].copy_(own)", "[piece.of_whole]", "test_accumulation.py", "fsdp"),
    ("gradients that were zeroed come back", "sharded/internals/gradients.py",
     "if stand_in.is_cleared:", "if False:", "test_accumulation.py", "fsdp"),
    ("a slice is freed that stands for what other ranks have used",
     "sharded/internals/interface.py",
     "if all(self.gradients.parameters[i].grad is None for i in unit.members):",
     "if any(self.gradients.parameters[i].grad is None or i in self.gradients.filled "
     "for i in unit.members):",
     "test_unused.py", "fsdp"),
    ("a failed backward leaves the others in their gathers", "sharded/internals/whole.py",
     "while not self._is_next():", "while False:", "sharded/test_fsdp_failures.py",
     "another_place"),
    ("a backward that fails under no_sync leaves the others in their gathers",
     "sharded/internals/whole.py",
     "self.order.way_back.complete(self.start)", "pass", "sharded/test_fsdp_failures.py",
     "another_place"),
    ("a reduction frees a block that backward is still in", "sharded/internals/whole.py",
     "if in_backward() and not self._is_next():", "if False:", "sharded/test_fsdp_networks.py",
     "order_of_the_wire"),
    ("the ranks' first calls are not compared", "sharded/internals/blocks.py",
     "agree(block.name, OTHER_ORDERS)", "pass", "sharded/test_fsdp_networks.py",
     "another_order"),
    ("a loss that a block keeps is not seen", "sharded/internals/whole.py",
     "block.look_for_keepers()", "pass", "sharded/test_fsdp_losses.py"),
    ("a gradient that was computed without values is taken", "internals/hooks.py",
     'if hasattr(parameter, "full_name"):', "if False:", "sharded/test_fsdp_losses.py"),
    ("a second backward is left to PyTorch's reducer", "torch_ddp.py",
     "self._is_by_torch &= i not in self._arrived", "pass", "test_accumulation.py", "torch_ddp"),
    ("ranks with other options are wrapped", "__init__.py",
     "if here != there:", "if False:", "test_construction.py", "different_options"),
]  # fmt: skip

MUTANTS = [
    *(
        Mutant(name, ((DDP + file, text, replacement),), (f"tests/{DDP}{tests[0]}", *tests[1:]))
        for name, file, text, replacement, *tests in ROWS
    ),
    Mutant(
        "buckets launched in forward order",
        (
            ("ddp/internals/interface.py", "list(reversed(range(len(self.gradients.parameters))))",
             "list(range(len(self.gradients.parameters)))"),
            ("ddp/internals/step.py", "if not self._order_is_observed and is_shared:",
             "if False:"),
        ),
        ("tests/ddp/test_collectives.py",),
    ),
    Mutant(
        "an unused parameter breaks the bucket",
        (
            ("ddp/base.py", "self.launch_buckets(everything=True)",
             "self.launch_buckets()"),
            ("ddp/internals/step.py", "wrapper.launch_buckets(everything=True)",
             "wrapper.launch_buckets()"),
        ),
        ("tests/ddp/test_unused.py",),
    ),
    Mutant(
        "a broadcast overwrites the buffers that autograd has saved",
        (
            ("ddp/internals/replicas.py", "if id(buffer) not in self._last:",
             "if False:"),
            ("ddp/internals/replicas.py", "self._last[id(buffer)][1] == version_of(buffer)",
             "True"),
        ),
        ("tests/ddp/test_replicas.py", "replaces"),
    ),
]  # fmt: skip


PRIVATE_MUTANTS = [
    Mutant(name, ((PRIVATE + file, text, replacement),), tests)
    for name, file, text, replacement, *rest in private_mutants.ROWS
    for tests in [tuple(rest)]
]


@dataclass(frozen=True)
class Outcome:
    """Holds pytest's exit status, None if it took too long, and the first test that failed."""

    code: int | None
    failed: str
    output: str


def caught_by(mutant: Mutant) -> str:
    """Returns the first test that fails on the mutant, or nothing."""
    file, *only = mutant.tests
    outcome = run_tests(mutant.changes, [file], 300, *only)
    if outcome.code not in (0, 1):
        raise RuntimeError(f"pytest did not run: {outcome.output}")
    return outcome.failed


def run_tests(
    changes: Sequence[Change], tests: Sequence[str], limit: float, only: str = ""
) -> Outcome:
    """Runs tests in a changed copy for at most so many seconds, up to the first failure.

    `only`: as -k. Nothing of it is left afterwards, ranks neither.
    """
    chosen = f"({only}) and not cuda" if only else "not cuda"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not gpu"]
    command += ["-p", "no:cacheprovider", *tests, "-k", chosen]
    with tempfile.TemporaryDirectory() as folder:
        copy, printed = Path(folder, "copy"), Path(folder, "printed")
        copy_tree(copy, is_private=tests[0].startswith(f"tests/{PRIVATE}"))
        for change in changes:
            apply(copy, *change)
        # A compiled file of the same second and size would pass for the changed one's.
        path = f"{copy}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        with printed.open("w") as output:
            process = subprocess.Popen(
                command, cwd=copy, env=env, stdout=output, stderr=output, start_new_session=True
            )
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit)
            code = process.poll()
            for number in session_of(process.pid):
                with suppress(OSError):  # gone
                    os.kill(number, signal.SIGKILL)
            process.wait()
        text = printed.read_text()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    return Outcome(code, failed.group(1) if failed else "", text)


def copy_tree(copy: Path, is_private: bool) -> None:
    """Copies what is changed and its tests, whose ranks wait for each other for 15 s at most."""
    for name in [*COPIED, *(OF_PRIVATE if is_private else [])]:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    apply(copy, "ddp_by_hand/lm/rank_pool.py", "timedelta(seconds=90)", "timedelta(seconds=15)")


def apply(root: Path, file: str, text: str, replacement: str) -> None:
    source = (root / file).read_text()
    if text not in source:
        raise ValueError(f"{file} no longer contains {text!r}: bring the mutant up to date")
    (root / file).write_text(source.replace(text, replacement))
