"""Scores the tests: of mutants that a tool draws, how many do they catch?

    python -m tests.support.mutation_score                # draws 600, runs them, prints the score
    python -m tests.support.mutation_score --draw FILE    # writes them, to be run elsewhere
    python -m tests.support.mutation_score --mutants FILE --results FILE --processes 16 --minutes 9
    python -m tests.support.mutation_score --results FILE --print

cosmic-ray says where a file can be changed and how; running needs pytest alone. Which places are
drawn follows from a hash of their line, so that an edit changes the draw near itself only. A
mutant runs in a copy of the tree against the tests of its own folder, then those of its room and
`WIDER`: those of them that call its function, the fastest, for `MOST_SECONDS`. It is killed by the
first that fails, or where all take `PATIENCE` times as long as without it.
Results are appended as JSON lines: what is there already is not run again. They name functions
and not numbers of lines, so those of what an edit has not touched are kept.
"""

import argparse
import ast
import difflib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.equivalent_mutants import EQUIVALENT
from tests.support.forked import session_of
from tests.support.mutants import ROOT, copy_tree

ROOMS = tuple(f"dp_clipping/{r}" for r in ("clipping", "noise", "accounting", "sampling", "step"))
SCHEDULE = ("base", "bucketed", "buckets", "individual", "individual_v2", "schedule")
ON_GPUS = {  # programs of Triton, and what only launches them
    "dp_clipping/noise/kernel.py", "dp_clipping/noise/registers.py",
    "dp_clipping/noise/secure/kernel.py", "dp_clipping/step/sums/fused.py",
}  # fmt: skip
MEANINGLESS = re.compile(  # on tensors and floats these raise, which any test sees
    r"(Bit(Or|And|Xor)|LShift|RShift)$|_(BitOr|BitAnd|BitXor|LShift|RShift)_"
)
NOT_RUN = {  # those of kernels, in Triton's interpreter, and of mutants
    "tests/dp_clipping/noise/test_kernel.py", "tests/dp_clipping/noise/test_registers.py",
    "tests/dp_clipping/noise/secure/test_kernel.py", "tests/ddp/test_mutants.py",
}  # fmt: skip
PATIENCE, LEAST_SECONDS, MOST_SECONDS = 4, 25, (20, 60)  # of the two
DRAWN, SEED = 600, 42

_D = "tests/dp_clipping/"
WIDER = {
    "dp_clipping/clipping": [_D + "ops/test_ops.py", _D + "contract/test_contract.py"],
    "dp_clipping/noise": [_D + "test_mechanism.py", _D + "test_correlated_noise.py",
                          _D + "audit/test_noise.py", _D + "checkpoint/test_random_states.py"],
    "dp_clipping/accounting": [_D + "runs/test_accounts.py", _D + "checkpoint/test_accounting.py",
                               _D + "test_engine.py"],
    "dp_clipping/sampling": [_D + "test_samplings.py", _D + "test_units_of_privacy.py",
                             _D + "test_engine.py", _D + "misuse/test_arguments.py",
                             _D + "checkpoint/test_save_load.py"],
    "dp_clipping/step": [_D + "contract/test_contract.py", _D + "test_optimizer.py",
                         _D + "test_engine.py", _D + "ranks/test_steps.py",
                         _D + "misuse/test_afterwards.py", _D + "sampling/test_usage.py",
                         _D + "distributed/test_backends_sampling.py",
                         _D + "profiling/test_profile.py"],
    "ddp": [],
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A change of lines: `before` at `line`, counted from 0, becomes `after`.

    `earlier` counts the places before it with the same lines, in the same function.
    """

    file: str
    line: int
    operator: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    function: str | None
    earlier: int

    @property
    def key(self) -> str:
        change = " / ".join(self.after).strip()
        return f"{self.file}:{self.function} {self.operator} {change} #{self.earlier}"

    @property
    def reason(self) -> str | None:
        """Why no test can tell it from the original, if none can."""
        change = "\n".join(self.before).strip(), "\n".join(self.after).strip()
        return EQUIVALENT.get((self.file, *change))

    def apply(self, source: str) -> str:
        lines = source.split("\n")
        here = slice(self.line, self.line + len(self.before))
        if lines[here] != list(self.before):
            raise ValueError(f"{self.key}: the file has other lines there: draw the mutants anew")
        lines[here] = self.after
        return "\n".join(lines)


def files() -> list[str]:
    found = [f for room in ROOMS for f in sorted((ROOT / room).rglob("*.py"))]
    names = [f.relative_to(ROOT).as_posix() for f in found]
    return [name for name in names if name not in ON_GPUS] + [f"ddp/{n}.py" for n in SCHEDULE]


def draw(count: int, names: Sequence[str] = ()) -> list[Drawn]:
    """Returns one mutant at each of `count` places, of all in these files, or in `files()`."""
    import parso  # noqa: F401 - cosmic-ray's plugins do not load before it
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    sources = {name: (ROOT / name).read_text() for name in names or files()}
    places = sorted((hashed(place), place) for name in sources for place in all_places(name))
    chosen: list[Drawn] = []
    for _, (name, *_place, ways) in places:
        source = sources[name]
        for operator, occurrence in sorted(ways, key=lambda way: hashed((name, *_place, way))):
            mutated = mutate_code(source, get_operator(operator)(), occurrence)
            if mutated is None or meaning(mutated) in (None, meaning(source)):
                continue
            chosen.append(difference(name, operator, source, mutated))
            break
        if len(chosen) == count:
            break
    return chosen


def all_places(name: str) -> Iterator[tuple]:
    """(file, text of the line, column, which of such lines, ways to change it)."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / name).read_text()
    nodes, lines = list(ast_nodes(get_ast(source))), source.split("\n")
    ways: dict[tuple, list] = {}
    for operator in sorted(operator_names()):
        kind = get_operator(operator)
        if kind.arguments() or MEANINGLESS.search(operator):
            continue
        positions = (p for node in nodes for p in kind().mutation_positions(node))
        for occurrence, ((line, column), _) in enumerate(positions):
            ways.setdefault((line, column), []).append((operator, occurrence))
    seen: Counter = Counter()
    for (line, column), choices in sorted(ways.items()):
        text = lines[line - 1].strip()
        seen[text, column] += 1
        yield name, text, column, seen[text, column], choices


def hashed(thing: tuple) -> str:
    """Orders things at random, each by itself."""
    kept = [part for part in thing if not isinstance(part, list)]
    return hashlib.sha256(repr((SEED, *kept)).encode()).hexdigest()


def meaning(source: str) -> str | None:
    """The program without annotations, docstrings, texts of errors and sizes of caches; or None."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, ast.Constant(None))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lru_cache":
            node.args = []
    return ast.dump(tree)


def difference(name: str, operator: str, source: str, mutated: str) -> Drawn:
    old, new = source.split("\n"), mutated.split("\n")
    changed = [
        c for c in difflib.SequenceMatcher(None, old, new, False).get_opcodes() if c[0] != "equal"
    ]
    begin, end, new_begin, new_end = changed[0][1], changed[-1][2], changed[0][3], changed[-1][4]
    before, short = old[begin:end], operator.removeprefix("core/")
    function = function_at(source, begin + 1)
    alike = (n for n in range(begin) if old[n : n + len(before)] == before)
    earlier = sum(function_at(source, n + 1) == function for n in alike)
    after = tuple(new[new_begin:new_end])
    return Drawn(name, begin, short, tuple(before), after, function, earlier)


def tests_of(file: str) -> tuple[list[str], list[str]]:
    """Returns the test files of a module's folder; and the others of its room, with `WIDER`."""
    folder, module = Path("tests") / Path(file).parent, Path(file).stem
    room = next(room for room in WIDER if file.startswith(room))
    near = [
        *sorted((ROOT / folder).glob(f"test_{module}*.py")),
        *sorted((ROOT / folder).glob("test_*.py")),
    ]
    far = sorted((ROOT / "tests" / room).rglob("test_*.py")) if room != "ddp" else []
    names = [path.relative_to(ROOT).as_posix() for path in (*near, *far)]
    names = [name for name in dict.fromkeys((*names, *WIDER[room])) if name not in NOT_RUN]
    count = sum(Path(name).parent == folder for name in names)
    return names[:count], names[count:]


def function_at(source: str, line: int) -> str | None:
    """Returns the qualified name of the function that a line, from 1, is in; None outside of all.

    A line of a signature is not in its function.
    """
    found, inside = None, ast.parse(source).body
    prefix = ""
    while inside:
        node = next((n for n in inside if n.lineno <= line <= n.end_lineno), None)
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line:
            found = prefix + node.name
            prefix = f"{found}.<locals>."
        elif isinstance(node, ast.ClassDef):
            prefix += f"{node.name}."
        inside = (
            [n for n in ast.iter_child_nodes(node) if isinstance(n, (ast.stmt, ast.ExceptHandler))]
            if node
            else []
        )
    return found


class Watched:
    """A plugin of pytest: how long each test takes, and which functions of ours it calls.

    Calls in other processes are not seen: tests with a pool of ranks are said to have one.
    """

    def __init__(self, copy: Path):
        self.prefix = f"{copy}/"
        self.tests: dict[str, dict] = {}
        self.called: set = set()
        self.on_ranks: set = set()

    def pytest_collection_modifyitems(self, items: list) -> None:
        self.on_ranks |= {i.nodeid for i in items if any("ranks" in n for n in i.fixturenames)}

    def _call(self, frame, event, _argument) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.prefix):
            self.called.add((code.co_filename, code.co_qualname))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.called, self.began = set(), time.monotonic()
        self.tests[nodeid] = {"passed": True}
        sys.settrace(self._call)

    def pytest_runtest_logreport(self, report) -> None:
        self.tests[report.nodeid]["passed"] &= not report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        ours = {f"{file.removeprefix(self.prefix)}:{name}" for file, name in self.called}
        seconds = round(time.monotonic() - self.began, 2)
        mutated = sorted(at for at in ours if at.startswith((*ROOMS, "ddp/")))
        on_ranks = nodeid in self.on_ranks
        self.tests[nodeid] |= {"seconds": seconds, "calls": mutated, "on_ranks": on_ranks}


class Chosen:
    """A plugin of pytest: runs these tests alone, in this order."""

    def __init__(self, tests: Sequence[str]):
        self.order = {name: i for i, name in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order[item.nodeid])


@dataclass
class Run:
    """A process that tests copy `number`."""

    pid: int
    number: int
    began: float
    limit: float
    output: Path


class Copies:
    """Copies of the tree, each for one run at a time.

    A run is forked from this process, which has imported PyTorch: half of what short tests take.
    """

    def __init__(self, folder: Path, count: int):
        self.folder, self.count = folder, count
        for number in range(count):
            copy_tree(self.of(number), is_private=True)
        others = "hypothesis", "opacus", "scipy.stats", "torch._dynamo", "torch.distributed.fsdp"
        for module in others:
            import_module(module)

    def of(self, number: int) -> Path:
        return self.folder / str(number)

    def start(self, number: int, tests: Sequence[str], limit: float, chosen: Chosen | None) -> Run:
        output = self.folder / f"{number}.txt"
        pid = os.fork()
        if not pid:
            code = 9
            try:
                code = self._test(self.of(number), tests, output, chosen)
            finally:
                sys.stdout.flush()
                os._exit(code)
        return Run(pid, number, time.monotonic(), limit, output)

    @staticmethod
    def _test(copy: Path, tests: Sequence[str], output: Path, chosen: Chosen | None) -> int:
        os.setsid()
        os.chdir(copy)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
        ours = ("tests", "ddp", "dp_clipping", "ddp_by_hand")
        for name in [name for name in sys.modules if name.split(".")[0] in ours]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
        # A compiled file of the same second and size would pass for the changed one's.
        sys.dont_write_bytecode = True
        others = os.environ.get("PYTHONPATH", "").split(":")
        os.environ |= {
            "PYTHONPATH": ":".join([str(copy), *others]), "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        if not tests:
            return 0
        plugin, first = (chosen, ["-x"]) if chosen else (Watched(copy), [])
        options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        code = pytest.main([*first, *options, "-k", "not cuda", *tests], plugins=[plugin])
        if not chosen:
            output.with_suffix(".json").write_text(json.dumps(plugin.tests))
        return code

    @staticmethod
    def ended(run: Run) -> tuple[str, str] | None:
        """How a run ended: "passed", "killed" or "timeout", and the first test that failed."""
        pid, status = os.waitpid(run.pid, os.WNOHANG)
        if not pid and time.monotonic() - run.began < run.limit:
            return None
        end_session(run.pid)
        if not pid:
            os.waitpid(run.pid, 0)
            return "timeout", ""
        code = os.waitstatus_to_exitcode(status)
        if code in (0, 5):  # 5: no test is chosen there
            return "passed", ""
        text = run.output.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
        return "killed", failed.group(1) if failed else f"exit {code}: {text[-200:]}"


def end_session(leader: int) -> None:
    """Kills what a run has left."""
    for number in session_of(leader):
        with suppress(OSError):  # gone
            os.kill(number, signal.SIGKILL)


class TestFile:
    """A job: one test file without a mutant."""

    __test__ = False

    def __init__(self, name: str):
        self.name = name

    def arguments(self) -> tuple:
        return [self.name], 300, None

    def prepare(self, copy: Path) -> None:
        pass

    def finish(self, copy: Path, end: str, test: str, seconds: float) -> dict:
        seen = copy.with_suffix(".json")
        tests = json.loads(seen.read_text()) if seen.exists() else {}
        seen.unlink(missing_ok=True)
        failed = [name for name, facts in tests.items() if not facts["passed"]]
        end = end if tests or end == "passed" else f"{end} {test}"
        return {"kind": "test file", "key": self.name, "end": end, "tests": tests,
                "test": " ".join(failed), "seconds": seconds}  # fmt: skip


class Judged:
    """A job: one mutant with the tests that call the function it is in, and then those on ranks."""

    def __init__(
        self, mutant: Drawn, files: Sequence[str], known: dict[str, dict], most_seconds: float
    ):
        self.mutant, self.source = mutant, (ROOT / mutant.file).read_text()
        self.at = f"{mutant.file}:{mutant.function}"
        all_tests = [
            (place, name, facts)
            for place, file in enumerate(files)
            for name, facts in known[file]["tests"].items()
            if facts["passed"] and "seconds" in facts
        ]
        mine = [
            t for t in all_tests
            if mutant.function is None or self.at in t[2]["calls"] or t[2].get("on_ranks")
        ]  # fmt: skip
        for some in (mine, all_tests):
            some.sort(key=lambda t: (self.at not in t[2]["calls"], t[2]["seconds"]))
        chosen, self.seconds = [], 0.0
        for place, name, facts in mine or all_tests:
            if self.seconds + facts["seconds"] <= most_seconds:
                chosen.append((place, name))
                self.seconds += facts["seconds"]
        self.tests = [name for _, name in sorted(chosen, key=lambda pair: pair[0])]

    def arguments(self) -> tuple:
        files = list(dict.fromkeys(name.partition("::")[0] for name in self.tests))
        return files, LEAST_SECONDS + PATIENCE * self.seconds, Chosen(self.tests)

    def prepare(self, copy: Path) -> None:
        path = copy / self.mutant.file
        path.write_text(self.mutant.apply(self.source))
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)

    def finish(self, copy: Path, end: str, test: str, seconds: float) -> dict:
        (copy / self.mutant.file).write_text(self.source)
        end = "survived" if end == "passed" else end
        return {"kind": "mutant", "key": self.mutant.key, **asdict(self.mutant), "end": end,
                "test": test, "tests": len(self.tests), "seconds": seconds}  # fmt: skip


def run_all(mutants: Sequence[Drawn], results: Path, processes: int, seconds: float) -> None:
    """Appends a line for each mutant that has none yet; stops after so many seconds.

    First by the tests of their folders; what survives is run against the wider ones.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        copies = Copies(Path(folder), processes)
        for stage, most in enumerate(MOST_SECONDS):
            lines = read(results)
            judged = {line["key"] for line in lines if line["kind"] == "mutant"}
            tried = judged | {line["key"] for line in lines if line["kind"] == f"stage {stage}"}
            left = [m for m in mutants if m.key not in tried and m.reason is None]
            known = {line["key"]: line for line in lines if line["kind"] == "test file"}
            wanted = {name for m in left for name in tests_of(m.file)[stage]}
            known |= in_turn(copies, map(TestFile, sorted(wanted - known.keys())), results, end)
            if wanted - known.keys():
                return  # the time is over
            jobs = (
                Judged(m, [f for f in tests_of(m.file)[stage] if f in known], known, most)
                for m in left
            )
            in_turn(copies, jobs, results, end, stage)


def in_turn(
    copies: Copies, jobs: Iterable, results: Path, end: float, stage: int = 1
) -> dict[str, dict]:
    """Runs jobs in all copies; returns the lines of those that ended, by key."""
    waiting, lines, busy = iter(jobs), {}, {}
    free = list(range(copies.count))
    while True:
        while free and time.monotonic() < end and (job := next(waiting, None)):
            number = free.pop()
            job.prepare(copies.of(number))
            busy[number] = job, copies.start(number, *job.arguments())
        if not busy:
            return lines
        for number, (job, run) in list(busy.items()):
            ended = copies.ended(run)
            is_late = time.monotonic() > end  # then it is not judged: another call begins with it
            if ended is None and not is_late:
                continue
            if ended is None:
                end_session(run.pid)
                os.waitpid(run.pid, 0)
            line = job.finish(
                copies.of(number), *(ended or ("", "")), round(time.monotonic() - run.began, 1)
            )
            del busy[number]
            free.append(number)
            if ended is None:
                continue
            if line["end"] == "survived" and stage == 0:
                line["kind"] = "stage 0"
            lines[line["key"]] = line
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if line["kind"] != "stage 0":
                print(
                    f"{line['end']:9} {line['seconds']:6} {line['key']}  {line['test']}", flush=True
                )
        time.sleep(0.02)


def read(results: Path) -> list[dict]:
    lines = results.read_text().splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def score(mutants: Sequence[Drawn], results: Path) -> tuple[int, int, int, list[dict]]:
    """Returns how many of the mutants are killed, survive and are equivalent; and the survivors."""
    ends = {line["key"]: line for line in read(results) if line["kind"] == "mutant"}
    equivalent = sum(m.reason is not None for m in mutants)
    judged = [ends[m.key] for m in mutants if m.key in ends and m.reason is None]
    alive = [line for line in judged if line["end"] == "survived"]
    return len(judged) - len(alive), len(alive), equivalent, alive


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=DRAWN, help="mutants to draw")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write them to FILE and stop")
    parser.add_argument("--mutants", type=Path, metavar="FILE", help="run those that --draw wrote")
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"), help="JSON lines")
    parser.add_argument("--range", default=":", metavar="A:B", help="of the mutants, A to B - 1")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600, help="stop then; call again to go on")
    parser.add_argument("--print", action="store_true", help="print what is there; run nothing")
    given = parser.parse_args(arguments)
    if given.mutants:
        rows = json.loads(given.mutants.read_text())
        mutants = [Drawn(**r | {k: tuple(r[k]) for k in ("before", "after")}) for r in rows]
    else:
        mutants = draw(given.count)
    if given.draw:
        given.draw.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=0))
        return 0
    begin, _, end = given.range.partition(":")
    mutants = mutants[int(begin or 0) : int(end or len(mutants))]
    if not given.print:
        run_all(mutants, given.results, given.processes, 60 * given.minutes)
    killed, survived, equivalent, alive = score(mutants, given.results)
    for line in alive:
        print(f"\n{line['file']}:{line['line'] + 1} {line['operator']}")
        print(*(f"- {text}" for text in line["before"]), sep="\n")
        print(*(f"+ {text}" for text in line["after"]), sep="\n")
    judged, share = killed + survived + equivalent, killed / max(1, killed + survived)
    print(
        f"\n{judged} of {len(mutants)} mutants judged: {killed} killed, {survived} survived,",
        end="",
    )
    print(f" {equivalent} equivalent; {share:.1%} of the others killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
