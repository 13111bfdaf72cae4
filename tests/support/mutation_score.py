"""Scores the tests: of mutants that a tool draws, how many do they catch?

    python -m tests.support.mutation_score                # draws 600, runs them, prints the score
    python -m tests.support.mutation_score --draw FILE    # writes them, to be run elsewhere
    python -m tests.support.mutation_score --mutants FILE --results FILE --processes 16 --minutes 9
    python -m tests.support.mutation_score --results FILE --print

cosmic-ray says where a file can be changed and how; running needs pytest alone. Which places are
drawn follows from a hash of their line, so that an edit changes the draw near itself only. A
mutant runs as those of mutants.py do, against the tests of its own folder and then those of its
room and `WIDER`. It is killed by the first that fails, or where all take `PATIENCE` times as long
as without it.
Results are appended as JSON lines: what is there already is not run again. They name lines by
their text and not by numbers, so those of what an edit has not touched are kept.
"""

import argparse
import ast
import difflib
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.equivalent_mutants import EQUIVALENT
from tests.support.mutants import ROOT, Change, run_tests

ROOMS = tuple(f"dp_clipping/{r}" for r in ("clipping", "noise", "accounting", "sampling", "step"))
SCHEDULE = ("base", "bucketed", "buckets", "individual", "individual_v2", "schedule")
ON_GPUS = {  # programs of Triton, and what only launches them
    "dp_clipping/noise/kernel.py", "dp_clipping/noise/registers.py",
    "dp_clipping/noise/secure/kernel.py", "dp_clipping/step/sums/fused.py",
}  # fmt: skip
MEANINGLESS = re.compile(  # on tensors and floats these raise, which any test sees
    r"(Bit(Or|And|Xor)|LShift|RShift)$|_(BitOr|BitAnd|BitXor|LShift|RShift)_"
)
NOT_RUN = {  # those of kernels, in Triton's interpreter
    "tests/dp_clipping/noise/test_kernel.py", "tests/dp_clipping/noise/test_registers.py",
    "tests/dp_clipping/noise/secure/test_kernel.py",
}  # fmt: skip
PATIENCE, LEAST_SECONDS, MOST_SECONDS = 4, 25, 3600
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

    `earlier` counts the places before it with the same lines.
    """

    file: str
    line: int
    operator: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    earlier: int

    @property
    def key(self) -> str:
        change = " => ".join(" / ".join(lines).strip() for lines in (self.before, self.after))
        return f"{self.file} {self.operator} {change} #{self.earlier}"

    @property
    def reason(self) -> str | None:
        """Why no test can tell it from the original, if none can."""
        change = "\n".join(self.before).strip(), "\n".join(self.after).strip()
        return EQUIVALENT.get((self.file, *change))

    def change(self) -> Change:
        """Returns the change of the whole file: its lines occur elsewhere in it too."""
        source = (ROOT / self.file).read_text()
        lines = source.split("\n")
        here = slice(self.line, self.line + len(self.before))
        if lines[here] != list(self.before):
            raise ValueError(f"{self.key}: the file has other lines there: draw the mutants anew")
        lines[here] = self.after
        return self.file, source, "\n".join(lines)


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
    before, after = tuple(old[begin:end]), tuple(new[new_begin:new_end])
    earlier = sum(tuple(old[n : n + len(before)]) == before for n in range(begin))
    return Drawn(name, begin, operator.removeprefix("core/"), before, after, earlier)


def tests_of(file: str) -> list[list[str]]:
    """Returns the test files of a module's folder; and the others of its room with `WIDER`, if any.

    The module's own come first.
    """
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
    return [tests for tests in (names[:count], names[count:]) if tests]


def name_of(tests: Sequence[str]) -> str:
    """Names a list in the results, in whatever order it is run."""
    return " ".join(sorted(tests))


def run_all(mutants: Sequence[Drawn], results: Path, processes: int, seconds: float) -> None:
    """Appends a line for each mutant that has none yet; begins none after so many seconds.

    First all tests run without a mutant, which says how long they take.
    """
    end = time.monotonic() + seconds
    known = {line["key"]: line for line in read(results)}

    def run(kind: str, key: str, tests: Sequence[str], limit: float, *changes: Change) -> dict:
        began = time.monotonic()
        outcome = run_tests(changes, tests, limit)
        end_of = {None: "timeout", 0: "survived", 5: "survived"}  # 5: no test is chosen there
        return {
            "kind": kind, "key": key, "end": end_of.get(outcome.code, "killed"),
            "test": outcome.failed or ("" if outcome.code in end_of else outcome.output[-200:]),
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip

    def keep(line: dict) -> None:
        known[line["key"]] = line
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{line['end']:9} {line['seconds']:6} {line['key']}  {line['test']}", flush=True)

    def take_time(tests: Sequence[str]) -> None:
        if time.monotonic() < end:
            keep(run("tests", name_of(tests), tests, MOST_SECONDS))

    def judge(mutant: Drawn) -> None:
        for tests in tests_of(mutant.file):
            if time.monotonic() > end:
                return
            limit = LEAST_SECONDS + PATIENCE * known[name_of(tests)]["seconds"]
            line = run("mutant", mutant.key, tests, limit, mutant.change())
            if line["end"] != "survived":
                break
        keep(line | asdict(mutant))

    left = [m for m in mutants if m.key not in known and m.reason is None]
    lists = {name_of(tests): tests for m in left for tests in tests_of(m.file)}
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(take_time, [lists[name] for name in sorted(lists.keys() - known.keys())]))
        if not lists.keys() <= known.keys():
            return  # the time is over
        if wrong := [name for name in lists if known[name]["end"] != "survived"]:
            raise RuntimeError(f"without a mutant: {known[wrong[0]]}")
        list(pool.map(judge, left))


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
