"""What a check asks of the node goes wrong, one question at a time: never a traceback, and never "healthy".

Each tests/test_NAME.py gives `healthy(tmp_path) -> (Host, Config)`: a node on which its check looks at all that it can.
The check runs on it once to learn what it asks; then each answer in turn vanishes, fails in mid-read, is empty, cut
short, or something else. What comes of it must be a finding, or an error that makes the run unknown.

Where an answer may be missing on a good machine the file says so: ABSENT_IS_FINE = {"regex of the path": "why"}; where
its content decides nothing: HARMLESS = {"regex": "why"}.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes import BOOT, NOW

from healthd.host import Host
from healthd.model import Finding, Severity
from healthd.nvml import NvmlError
from healthd.past import Past
from healthd.program import Ran
from healthd.registry import Check, built_in
from healthd.system import FileStat, FileSystem, KernelClock, System

CHECKS = {name: check for name, check in built_in().items() if check.runs}
Question = tuple[str, Any]
Answer = Callable[[Any], Any]  # from the true answer to the wrong one; may raise


def failing(number: int) -> Answer:
    def fail(_true: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def too_slow(_true: Any) -> Any:
    raise TimeoutError("did not end within 5 s, and was killed")


def cut(true: bytes) -> bytes:
    return true[: len(true) // 2]


def saying(text: bytes) -> Answer:
    return lambda _true: text


ALL = {"read", "names", "scan", "readlink", "stat", "statvfs", "run", "clock"}
VANISHES = "vanishes"
MUTATIONS: dict[str, dict[str, Answer]] = {
    VANISHES: {
        **dict.fromkeys(("read", "readlink", "stat", "statvfs"), failing(errno.ENOENT)),
        **dict.fromkeys(("names", "scan"), lambda _true: []),
        "run": lambda _true: None,
        "clock": lambda _true: None,
    },
    "fails in mid-read": dict.fromkeys(
        ("read", "names", "scan", "stat", "statvfs", "run", "clock"), failing(errno.EIO)
    ),
    "is empty": {"read": saying(b""), "run": lambda _true: Ran(0, "", "")},
    "is cut short": {"read": cut, "run": lambda true: Ran(true.status, true.stdout[: len(true.stdout) // 2], "")},
    "says N/A": {"read": saying(b"N/A\n"), "run": lambda _true: Ran(0, "N/A\n", "")},
    "says Unknown": {"read": saying(b"Unknown\n"), "run": lambda _true: Ran(0, "Unknown\n", "")},
    "says 2^64": {"read": saying(b"%d\n" % 2**64), "run": lambda _true: Ran(0, f"{2**64}\n", "")},
    "is binary": {"read": saying(b"\xff\x00\x01ELF\x80"), "run": lambda _true: Ran(0, "\ufffd\0ELF", "")},
    "fails with a message": {"run": lambda _true: Ran(1, "", "Connection timed out")},
    "is too slow": {"run": too_slow},
}


class Asked(System):
    """A system that notes what it is asked, and answers one question wrongly."""

    def __init__(self, system: System, wrong: Question | None = None, mutate: Answer | None = None) -> None:
        self.questions: dict[Question, Any] = {}
        self._system = system
        self._wrong = wrong
        self._mutate = mutate

    def _answer(self, operation: str, argument: Any, ask: Callable[[], Any]) -> Any:
        question = (operation, argument)
        true = ask()
        self.questions[question] = true
        return self._mutate(true) if self._mutate and question == self._wrong else true

    def read(self, path: str) -> bytes:
        return self._answer("read", path, lambda: self._system.read(path))

    def names(self, path: str) -> list[str]:
        return self._answer("names", path, lambda: self._system.names(path))

    def scan(self, path: str) -> list[tuple[str, int]]:
        return self._answer("scan", path, lambda: self._system.scan(path))

    def readlink(self, path: str, anywhere: bool = False) -> str:
        return self._answer("readlink", path, lambda: self._system.readlink(path, anywhere))

    def stat(self, path: str, anywhere: bool = False) -> FileStat:
        return self._answer("stat", path, lambda: self._system.stat(path, anywhere))

    def statvfs(self, path: str) -> FileSystem:
        return self._answer("statvfs", path, lambda: self._system.statvfs(path))

    def run(self, argv: Sequence[str], seconds: float, environment: Mapping[str, str], anywhere: bool) -> Ran | None:
        return self._answer("run", " ".join(argv), lambda: self._system.run(argv, seconds, environment, anywhere))

    def clock(self) -> KernelClock | None:
        return self._answer("clock", "", self._system.clock)


def file_of(check: str) -> ModuleType:
    return importlib.import_module(f"test_{check}")


def run(check: Check, host: Host, config: Any, system: System) -> list[Any]:
    """One run, on a host of its own: nothing that an earlier one read is remembered."""
    fresh = Host(host.root, host._open_nvml, host.now, system)
    return list(check.module.run(fresh, config, Past({}, NOW, BOOT)))


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_healthy_node_gives_nothing_above_info(name: str, tmp_path: Path) -> None:
    host, config = file_of(name).healthy(tmp_path)
    given = run(CHECKS[name], host, config, host._system)
    assert [item for item in given if isinstance(item, Finding) and item.severity > Severity.INFO] == []


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_an_answer_that_goes_wrong_is_a_finding_or_unknown(name: str, mutation: str, tmp_path: Path) -> None:
    host, config = file_of(name).healthy(tmp_path)
    asked = Asked(host._system)
    run(CHECKS[name], host, config, asked)
    silent = []
    for question, true in asked.questions.items():
        mutate = MUTATIONS[mutation].get(question[0])
        if mutate is None or is_excused(file_of(name), mutation, question, true):
            continue
        if not speaks(lambda q=question, m=mutate: run(CHECKS[name], host, config, Asked(host._system, q, m))):
            silent.append(question)
    assert silent == [], f"{mutation}, and {name} says that all is well"


def is_excused(tests: ModuleType, mutation: str, question: Question, true: Any) -> bool:
    operation, where = question
    if operation == "readlink" and mutation != VANISHES:
        return True
    if mutation == "is cut short" and isinstance(true, bytes) and len(true.strip()) <= 4:
        return True  # half of a number is a number
    excuses = [getattr(tests, "HARMLESS", {})]
    if mutation == VANISHES:
        excuses.append(getattr(tests, "ABSENT_IS_FINE", {}))
    return any(re.fullmatch(pattern, where) for table in excuses for pattern in table)


def speaks(run_it: Callable[[], list[Any]]) -> bool:
    """Whether a run gives a finding or fails in a way that the worker tells in one sentence."""
    try:
        given = run_it()
    except (OSError, ValueError, RuntimeError, NvmlError):
        return True
    return any(isinstance(item, Finding) for item in given)


def excuses() -> Iterator[tuple[str, str, str]]:
    for name in sorted(CHECKS):
        for table in ("ABSENT_IS_FINE", "HARMLESS"):
            for pattern, why in getattr(file_of(name), table, {}).items():
                yield name, pattern, why


def test_an_excuse_gives_its_reason_and_is_needed(tmp_path: Path) -> None:
    for number, (name, pattern, why) in enumerate(excuses()):
        assert len(why) > 10, f"{name}: {pattern}"
        folder = tmp_path / str(number)
        folder.mkdir()
        host, config = file_of(name).healthy(folder)
        asked = Asked(host._system)
        run(CHECKS[name], host, config, asked)
        assert any(re.fullmatch(pattern, where) for _, where in asked.questions), f"{name}: nobody asks for {pattern}"
