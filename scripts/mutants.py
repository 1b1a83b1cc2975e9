"""Mutation tests of the decisions: apply one stored fault at a time and run the tests that should detect it.

    scripts/mutants.py draw --seed N          draw the random half of the list again; mutants chosen by hand stay
    scripts/mutants.py draw --seed N --replace ID ...
                                              replace these mutants by new ones from other functions
    scripts/mutants.py verify                 check that each mutant of the list still applies
    scripts/mutants.py run [--only ID ...] [--jobs N] [--out FILE] [--tests FILE ...]

The list is tests/data/mutants.json. A mutant names a file, the qualified name of a function ("" for the module level),
one line without indentation, and the line that replaces it. After a rename or a move, adapt these by hand.

`run` works in copies of the tree, one for each job. It first records which test executes which function. The record is
kept in build/ until a source or a test changes. For each mutant, it then runs tests in this order: the test that killed
the mutant before, the tests that execute the mutated function (the fastest first), and the tests that import its module
or start healthd as a program. A test counts as killing only if it passes without the mutant. End-to-end tests do not
run. Mutants that already have a result are skipped.

Results are written to the list, or to FILE. FILE is then compared with the list: the exit status is 1 if a mutant
survives that is killed according to the list.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pytest

    Function = ast.FunctionDef | ast.AsyncFunctionDef

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/data/mutants.json"
RECORD = ROOT / "build/mutants-record.json"
# Each area with its folder and the number of mutants drawn at random in it. As many are chosen by hand, 100 in all.
AREAS = {
    "slurm": ("healthd/agent/slurm", 12),
    "conditions": ("healthd/agent/conditions", 13),
    "kernel_log": ("healthd/agent/kernel_log", 12),
    "checks": ("checks", 13),
}
# Tests that are not run: slow tests that execute none of the areas, and the test that each mutant applies to the
# source.
UNRELATED = re.compile(r"fleet(?!_limit|_lemons_apply)|spark|test_mutants")
EXTRA_SECONDS, MAX_SLOWDOWN = 60, 5  # how much longer than recorded a run may take (seconds, factor)
TIME_LIMIT = "time limit"
CHOSEN = "chosen"  # the kind of a mutant that was chosen by hand

# --- the list


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault. `occurrence` selects one of several equal lines of the function, from 1 on; 0 if the line is unique.

    harm    what goes wrong for a user (chosen mutants)
    result  "killed" with the killing test in `tests`, "survived" with the test files that ran, "" if not run
    """

    id: str
    area: str
    kind: str
    file: str
    function: str
    line: str
    mutated: str
    occurrence: int = 0
    harm: str = ""
    result: str = ""
    tests: tuple[str, ...] = ()


class NotApplicable(ValueError):
    """A mutant does not fit the current source."""


def read(path: Path) -> list[Mutant]:
    return [Mutant(**entry | {"tests": tuple(entry.get("tests", ()))}) for entry in json.loads(path.read_text("utf-8"))]


def write(path: Path, mutants: Iterable[Mutant]) -> None:
    entries = [
        {key: value for key, value in dataclasses.asdict(m).items() if value or key == "function"} for m in mutants
    ]
    new = path.with_suffix(".new")
    new.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", "utf-8")
    new.replace(path)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield each function with its qualified name: "Class.method", "outer.inner"."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        scope = node.name + "." if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ""
        yield from functions(node, prefix + scope)


def first_line(function: Function) -> int:
    """Return the first line of a function as its code object has it: with its decorators."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def matches(source: str, function: str, line: str) -> list[int]:
    """Return the indices of the equal lines of a function. Raises NotApplicable if the function does not exist."""
    lines = source.split("\n")
    begin, end = 0, len(lines)
    if function:
        nodes = [node for name, node in functions(ast.parse(source)) if name == function]
        if len(nodes) != 1:
            raise NotApplicable(f"{len(nodes)} functions {function}")
        begin, end = first_line(nodes[0]) - 1, nodes[0].end_lineno or 0
    return [number for number in range(begin, end) if lines[number].strip() == line]


def applied(mutant: Mutant, source: str) -> str:
    """Return the mutated source. Raises NotApplicable, even if only the result does not compile or is equivalent."""
    found = matches(source, mutant.function, mutant.line)
    if len(found) < max(mutant.occurrence, 1) or (len(found) > 1 and not mutant.occurrence):
        raise NotApplicable(f"{len(found)} lines {mutant.line!r} in {mutant.function}")
    lines = source.split("\n")
    number = found[max(mutant.occurrence, 1) - 1]
    lines[number] = lines[number].replace(mutant.line, mutant.mutated)
    new = "\n".join(lines)
    try:
        if ast.dump(ast.parse(new)) == ast.dump(ast.parse(source)):
            raise NotApplicable("changes nothing")
        compile(new, mutant.file, "exec")
    except SyntaxError as error:
        raise NotApplicable(f"does not compile: {error}") from None
    return new


def verify(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Return the problems of the list, one sentence for each mutant that does not apply."""
    problems = [f"{m.id}: twice in the list" for m in mutants if sum(m.id == other.id for other in mutants) > 1]
    for mutant in mutants:
        try:
            applied(mutant, (root / mutant.file).read_text("utf-8"))
        except (OSError, NotApplicable) as error:
            problems.append(f"{mutant.id}: {mutant.file}: {error}")
    return problems


# --- drawing


class Edit(NamedTuple):
    """Replace the bytes `start` to `end` of a line with `text`. Lines are counted from 1."""

    kind: str
    line: int
    start: int
    end: int
    text: str


COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
COMPARISONS |= {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
COMPARISONS |= {ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}
WORD = re.compile(r"[a-z0-9_]+(?:/[a-z0-9_]+)?")  # a code or a key, not prose
NOTHING = ("return", "return None", "return False", "return 0.0", "return ''", "return []", "return ()", "return {}")
LOGGING = ("log", "logging", "warnings", "print", "cast")
EXTREMES = {"min": "max", "max": "min"}
NO_LOGIC = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assert, ast.Raise, ast.JoinedStr, ast.arguments)


def logic(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` that can be mutated: no texts, logging, annotations or nested functions."""
    for child in ast.iter_child_nodes(node):
        is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        is_type = isinstance(node, ast.AnnAssign) and child is not node.value
        is_logged = isinstance(child, ast.Call) and ast.unparse(child.func).partition(".")[0] in LOGGING
        if not (is_text or is_type or is_logged or isinstance(child, NO_LOGIC)):
            yield child
            yield from logic(child)


def edits(function: Function, source: Sequence[bytes]) -> Iterator[Edit]:
    """Yield the mutations of a function that change one place on one line."""

    def over(kind: str, node: Any, text: str) -> Iterator[Edit]:
        if node.lineno == node.end_lineno:
            yield Edit(kind, node.lineno, node.col_offset, node.end_col_offset, text)

    def between(kind: str, left: Any, right: Any, old: str, new: str) -> Iterator[Edit]:
        line, start, end = left.end_lineno, left.end_col_offset, right.col_offset
        gap = source[line - 1][start:end].decode() if line == right.lineno else ""
        if old in gap:
            yield Edit(kind, line, start, end, gap.replace(old, new, 1))

    for node in logic(ast.Module(function.body, [])):
        if isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from between("comparison", left, right, *COMPARISONS[type(operator)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in itertools.pairwise(node.values):
                yield from between("boolean operator", left, right, *words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Edit("not removed", node.lineno, node.col_offset, node.col_offset + len(b"not "), "")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            signs = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            if not any(isinstance(getattr(part, "value", None), str) for part in ast.walk(node)):
                yield from between("sign", node.left, node.right, *signs)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = node.value
            yield from over("constant", node, str(not value if isinstance(value, bool) else value + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
            yield from over("constant", node, f'"{node.value}_"')
        elif isinstance(node, ast.Return) and ast.unparse(node) not in NOTHING:
            yield from over("return dropped", node, "return None")
        elif isinstance(node, ast.Continue | ast.Break):
            yield from over("jump", node, "break" if isinstance(node, ast.Continue) else "continue")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in EXTREMES:
                yield from over("extreme", node.func, EXTREMES[node.func.id])
            parts: list[Any] = sorted([*node.args, *node.keywords], key=lambda part: (part.lineno, part.col_offset))
            for before, last in itertools.pairwise(parts):
                if before.end_lineno == last.lineno == last.end_lineno and isinstance(last, ast.keyword):
                    end = last.end_col_offset or 0
                    yield Edit("argument dropped", last.lineno, before.end_col_offset or 0, end, "")
        tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
        for test in [*tests, *(node.ifs if isinstance(node, ast.comprehension) else ())]:
            if not isinstance(test, ast.Compare | ast.UnaryOp) and test.lineno == test.end_lineno:
                text = source[test.lineno - 1][test.col_offset : test.end_col_offset].decode()
                yield from over("condition negated", test, f"not ({text})")


def make_mutant(file: str, function: str, source: str, edit: Edit) -> Mutant:
    """Return the mutant that an edit makes. Raises NotApplicable."""
    old = source.split("\n")[edit.line - 1]
    data = old.encode()
    new = data[: edit.start] + edit.text.encode() + data[edit.end :]
    equal = matches(source, function, old.strip())
    occurrence = equal.index(edit.line - 1) + 1 if len(equal) > 1 else 0
    return Mutant("", "", edit.kind, file, function, old.strip(), new.decode().strip(), occurrence)


def draw(seed: int, root: Path, numbers: Mapping[str, int], taken: Container[tuple[str, str]] = ()) -> list[Mutant]:
    """Draw `numbers` mutants for each area: at most one for each function, and none in the functions `taken`."""
    chance = random.Random(seed)
    drawn: list[Mutant] = []
    for area, (folder, _) in AREAS.items():
        sources = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in (root / folder).rglob("*.py")}
        remaining = [
            (file, name, edit)
            for file, source in sorted(sources.items())
            for name, function in functions(ast.parse(source))
            if (file, name) not in taken and not name.endswith(("__repr__", "__str__"))
            for edit in edits(function, source.encode().split(b"\n"))
        ]
        mutants: list[Mutant] = []
        while len(mutants) < numbers.get(area, 0):
            kind = chance.choice(sorted({edit.kind for _, _, edit in remaining}))
            file, name, edit = choice = chance.choice(
                [candidate for candidate in remaining if candidate[2].kind == kind]
            )
            remaining.remove(choice)
            with suppress(NotApplicable):
                mutant = make_mutant(file, name, sources[file], edit)
                applied(mutant, sources[file])
                remaining = [candidate for candidate in remaining if candidate[:2] != (file, name)]
                mutants.append(dataclasses.replace(mutant, id=f"{area}-random-{len(mutants) + 1:02}", area=area))
        drawn += mutants
    return drawn


def redraw(seed: int, root: Path, mutants: Sequence[Mutant], replaced: Sequence[str]) -> list[Mutant]:
    """Return the list in which other mutants replace the mutants `replaced`, under the same ids."""
    numbers = Counter(mutant.area for mutant in mutants if mutant.id in replaced)
    new = iter(draw(seed, root, numbers, {(mutant.file, mutant.function) for mutant in mutants}))
    return [dataclasses.replace(next(new), id=mutant.id) if mutant.id in replaced else mutant for mutant in mutants]


# --- recording: a pytest plugin (-p mutants) in the worker processes

ENOUGH_CALLS = 1_000_000  # if a test makes this many calls without a new function, tracing it ends
_executed: set[tuple[str, int]] = set()
_times: dict[str, list[Any]] = {}  # test -> seconds, passed, functions
_began = 0.0
_repeated = 0


def _trace(frame: FrameType, event: str, argument: object) -> None:
    global _repeated
    code = frame.f_code
    _repeated += 1
    if "/healthd/" in code.co_filename or "/checks/" in code.co_filename:
        location = (code.co_filename, code.co_firstlineno)
        if location not in _executed:
            _executed.add(location)
            _repeated = 0
    if _repeated > ENOUGH_CALLS:
        sys.settrace(None)


def pytest_runtest_logstart(nodeid: str) -> None:
    global _began, _repeated
    _began, _repeated = time.monotonic(), 0
    _executed.clear()
    sys.settrace(_trace)
    threading.settrace(_trace)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _entry(report.nodeid)[1] &= not report.failed


def pytest_runtest_logfinish(nodeid: str) -> None:
    sys.settrace(None)
    threading.settrace(None)
    _entry(nodeid)[0] += time.monotonic() - _began
    _entry(nodeid)[2] |= _executed


def _entry(nodeid: str) -> list[Any]:
    return _times.setdefault(nodeid.partition("[")[0], [0.0, True, set()])


def pytest_sessionfinish() -> None:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        entries = {
            test: (seconds, passed, sorted({f"{os.path.realpath(file)}:{line}" for file, line in executed}))
            for test, (seconds, passed, executed) in _times.items()
        }
        Path(os.environ["MUTANTS_RECORD"], f"{worker}.json").write_text(json.dumps(entries), "utf-8")


class Test(NamedTuple):
    """A test that passes without a mutant. `functions` are named by their first lines: "checks/mount.py:61"."""

    seconds: float
    functions: frozenset[str]


# --- running


def copy_tree(folder: Path) -> Path:
    """Copy the files that git does not ignore and return the copy."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]:
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


def run_pytest(copy: Path, arguments: Sequence[str], seconds: float, **environment: str) -> tuple[int | None, str]:
    """Run pytest in a copy and end all processes that it started. Returns exit status (None at timeout) and output."""
    temporary = copy.with_name(copy.name.removeprefix("tree"))  # short: tests bind sockets below it (unix(7))
    temporary.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": f"{copy}:{copy}/scripts", "TMPDIR": str(temporary), **environment}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *arguments]
    command += [f"--basetemp={temporary}/p"]
    with tempfile.TemporaryFile("w+", dir=copy.parent) as output:
        process = subprocess.Popen(
            command, cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        shutil.rmtree(temporary, ignore_errors=True)
        return status, output.read()


def record(copy: Path, jobs: int) -> dict[str, Test]:
    """Return the passing tests, each with the functions that it executes."""
    code = sorted(path for folder in ("healthd", "checks", "tests") for path in (ROOT / folder).rglob("*.py"))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()
    recorded = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    if recorded.get("key") != key:
        files = [path.relative_to(copy).as_posix() for path in sorted((copy / "tests").rglob("test_*.py"))]
        selected = [file for file in files if "/e2e/" not in file and not UNRELATED.search(file)]
        print(f"recording which functions the tests of {len(selected)} files execute", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["-n", str(jobs), "-p", "mutants", *selected]
            status, output = run_pytest(copy, arguments, 7200.0, MUTANTS_RECORD=folder)
            if status not in (0, 1):
                raise SystemExit(f"the tests do not run without a mutant:\n{output}")
            parts = [json.loads(part.read_text("utf-8")) for part in Path(folder).iterdir()]
        tests: dict[str, tuple[float, list[str]]] = {}
        for test, (seconds, _, names) in (item for part in parts for item in part.items()):
            before, others = tests.get(test, (0.0, []))
            tests[test] = (before + seconds, others + [name.removeprefix(f"{copy.resolve()}/") for name in names])
        for test in {test for part in parts for test, (_, passed, _) in part.items() if not passed}:
            del tests[test]
        recorded = {"key": key, "tests": tests}
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(recorded), "utf-8")
    return {test: Test(seconds, frozenset(names)) for test, (seconds, names) in recorded["tests"].items()}


def choices(mutant: Mutant, copy: Path, tests: Mapping[str, Test]) -> Iterator[list[str]]:
    """Yield groups of tests to run against a mutant, the likeliest first.

    The first group is the test that killed the mutant before. The second group is the tests that execute the mutated
    function or, if the mutant is at the module level, any function of the file. The third group is the tests in files
    that import the mutated module, have its name, or start healthd as a program.
    """
    yield [test for test in tests if test.rpartition("/")[2] in mutant.tests]
    nodes = functions(ast.parse((copy / mutant.file).read_text("utf-8")))
    lines = {f"{mutant.file}:{first_line(node)}" for name, node in nodes if mutant.function in ("", name)}
    yield [test for test, recorded in tests.items() if not recorded.functions.isdisjoint(lines)]
    folder, _, stem = mutant.file.removesuffix(".py").rpartition("/")
    package = re.escape(folder.rpartition("/")[2])
    uses = re.compile(rf"{package}(?:\.{stem}\b| import [^\n]*\b{stem}\b)|\"-m\", \"healthd")
    files = {test.partition("::")[0] for test in tests}
    chosen = {file for file in files if stem in Path(file).stem or uses.search((copy / file).read_text("utf-8"))}
    yield [test for test in tests if test.partition("::")[0] in chosen]


_stamps = itertools.count(int(time.time()) - 10**8)


def set_source(path: Path, text: str) -> None:
    """Write a source with a new modification time, so Python does not use the bytecode of another text."""
    path.write_text(text, "utf-8")
    stamp = next(_stamps)
    os.utime(path, (stamp, stamp))


def failed_test(copy: Path, chosen: Sequence[str], tests: Mapping[str, Test]) -> str:
    """Run tests, the fastest first, up to the first failure. Returns the failed test (or file), "" if all passed."""
    chosen = sorted(chosen, key=lambda test: tests[test].seconds if test in tests else 0.0)
    if not chosen:
        return ""
    seconds_by_test = [tests[test].seconds for test in chosen if test in tests] or [600.0]
    limit, test_limit = (
        EXTRA_SECONDS + MAX_SLOWDOWN * seconds for seconds in (sum(seconds_by_test), max(seconds_by_test))
    )
    status, output = run_pytest(copy, ["-x", "-n", "0", f"--timeout={test_limit:.0f}", *chosen], limit)
    if status is None:
        return TIME_LIMIT
    if status in (0, 5):  # exit statuses: all passed, none selected
        return ""
    if found := re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE):
        return found[1].partition("[")[0]
    if "ERROR: not found" in output or "conftest" not in output:
        raise RuntimeError(f"pytest ended with {status}:\n{output}")
    return "conftest.py"


def judge(mutant: Mutant, copy: Path, tests: Mapping[str, Test], named: Sequence[str]) -> Mutant:
    """Return the mutant with its result. `named` are test files to run instead of those from the record.

    A test kills the mutant if it fails with the mutant, also when it runs alone, and passes without the mutant.
    """
    path = copy / mutant.file
    source = path.read_text("utf-8")

    def failed_with_mutant(chosen: Sequence[str]) -> str:
        set_source(path, applied(mutant, source))
        try:
            return failed_test(copy, chosen, tests)
        finally:
            set_source(path, source)

    ran: set[str] = set()
    for choice in [named] if named else choices(mutant, copy, tests):
        remaining = [test for test in choice if test not in ran]
        ran |= {*remaining}
        while failed := failed_with_mutant(remaining):
            if failed in (TIME_LIMIT, "conftest.py") or (
                failed_with_mutant([failed]) and not failed_test(copy, [failed], tests)
            ):
                return dataclasses.replace(mutant, result="killed", tests=(failed.rpartition("/")[2],))
            remaining = [test for test in remaining if failed not in (test, test.partition("::")[0])]
    files = {test.partition("::")[0].rpartition("/")[2] for test in ran}
    return dataclasses.replace(mutant, result="survived", tests=tuple(sorted(files)))


def without_result(mutant: Mutant) -> Mutant:
    return dataclasses.replace(mutant, result="", tests=())


def run(only: Sequence[str], jobs: int, out: Path, named: Sequence[str]) -> int:
    """Run the mutants that have no result in `out`. Returns the exit status."""
    stored = {mutant.id: mutant for mutant in read(LIST)}
    if problems := verify([*stored.values()], ROOT):
        raise SystemExit("\n".join(problems))
    results = {key: without_result(mutant) for key, mutant in stored.items()}
    results |= {m.id: m for m in (read(out) if out.exists() else ()) if results.get(m.id) == without_result(m)}
    remaining = [stored[m.id] for m in results.values() if (m.id in only if only else not m.result)]
    with tempfile.TemporaryDirectory(prefix="m.") as scratch, ThreadPoolExecutor(jobs) as pool:
        os.chmod(scratch, 0o755)  # tests connect to a socket in it as another user
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        trees = [copy_tree(Path(scratch, f"tree{number}")) for number in range(jobs)]
        tests = {} if named else record(trees[0], jobs)
        for tree in trees:
            copies.put(tree)

        def task(mutant: Mutant) -> tuple[Mutant, float]:
            copy, began = copies.get(), time.monotonic()
            try:
                return judge(mutant, copy, tests, named), time.monotonic() - began
            finally:
                copies.put(copy)

        try:
            for future in as_completed([pool.submit(task, mutant) for mutant in remaining]):
                after, seconds = future.result()
                print(f"{after.id}: {after.result} in {seconds:.0f} s by {', '.join(after.tests)}", flush=True)
                results[after.id] = after
                write(out, results.values())
        finally:
            pool.shutdown(cancel_futures=True)
    outcomes = [mutant.result for mutant in results.values()]
    print(f"{outcomes.count('killed')} killed, {outcomes.count('survived')} survived, {outcomes.count('')} not run")
    lost = [key for key, m in results.items() if stored[key].result == "killed" and m.result == "survived"]
    if lost:
        print(f"killed before, survived now: {', '.join(lost)}")
    return 1 if lost else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Mutation tests of the decisions.")
    commands = parser.add_subparsers(dest="command", required=True)
    draws = commands.add_parser("draw", help="draw the random half again")
    draws.add_argument("--seed", type=int, required=True)
    draws.add_argument("--replace", nargs="+", default=[], metavar="ID", help="replace only these mutants")
    commands.add_parser("verify", help="check that each mutant still applies")
    runs = commands.add_parser("run", help="run the tests for each mutant without a result")
    runs.add_argument(
        "--only", nargs="+", default=[], metavar="ID", help="run only these mutants, even if they have a result"
    )
    runs.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants to test in parallel")
    runs.add_argument("--out", type=Path, default=LIST, metavar="FILE", help="write results here (default: the list)")
    runs.add_argument("--tests", nargs="+", default=[], metavar="FILE", help="run only these test files")
    args = parser.parse_args(arguments)
    if args.command == "run":
        return run(args.only, args.jobs, args.out, args.tests)
    mutants = read(LIST) if LIST.exists() else []
    if args.command == "draw":
        if args.replace:
            mutants = redraw(args.seed, ROOT, mutants, args.replace)
        else:
            drawn = draw(args.seed, ROOT, {area: number for area, (_, number) in AREAS.items()})
            mutants = [*drawn, *(mutant for mutant in mutants if mutant.kind == CHOSEN)]
        write(LIST, mutants)
        return 0
    problems = verify(mutants, ROOT)
    print("\n".join(problems) or f"{len(mutants)} mutants apply")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
