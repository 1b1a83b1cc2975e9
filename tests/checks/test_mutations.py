"""Faults in the input of checks: each fault gives a finding or a failed run, never a traceback or "healthy".

Each tests/checks/test_NAME.py has `healthy(tmp_path) -> (Host, Config)`: a node on which the check can read all its
input. The test runs the check once to record its queries. Then it mutates one answer at a time: the answer is missing,
fails during the read, is empty, truncated, or has other content. Each mutation must give a finding, or an error that
makes the run unknown. The test does this for the first run and for a later run, which compares with the earlier one and
may read other files.

A test file declares answers that may be missing on a good machine: ABSENT_IS_FINE = {"regex of the path": "why"}, and
other mutations that change nothing: HARMLESS = {("regex of the mutation", "regex of the path"): "why"}. An excuse that
no silent mutation needs fails the test.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes import BOOT, NOW

from healthd.agent.settings.registry import Check, built_in_checks
from healthd.common.history import History, Series, update
from healthd.common.model import Finding, Observation, Severity
from healthd.host.host import Host
from healthd.host.program import ProgramResult
from healthd.host.system import FileStat, FileSystem, KernelClock, Tree
from healthd.nvidia.nvml import NvmlError

CHECKS = {name: check for name, check in built_in_checks().items() if check.has_run}
Question = tuple[str, Any]
Answer = Callable[[Any], Any]  # from the true answer to the wrong one; may raise


def failing(number: int) -> Answer:
    def fail(_true: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def too_slow(_true: Any) -> Any:
    raise TimeoutError("did not end within 5 s and was killed")


def truncate(true: bytes) -> bytes:
    return true[: len(true) // 2]


def returning(text: bytes) -> Answer:
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
    "is empty": {"read": returning(b""), "run": lambda _true: ProgramResult(0, "", "")},
    "is cut short": {
        "read": truncate,
        "run": lambda true: ProgramResult(true.status, true.stdout[: len(true.stdout) // 2], ""),
    },
    "returns N/A": {"read": returning(b"N/A\n"), "run": lambda _true: ProgramResult(0, "N/A\n", "")},
    "returns Unknown": {"read": returning(b"Unknown\n"), "run": lambda _true: ProgramResult(0, "Unknown\n", "")},
    "returns 2^64": {"read": returning(b"%d\n" % 2**64), "run": lambda _true: ProgramResult(0, f"{2**64}\n", "")},
    "is binary": {"read": returning(b"\xff\x00\x01ELF\x80"), "run": lambda _true: ProgramResult(0, "\ufffd\0ELF", "")},
    "fails with a message": {"run": lambda _true: ProgramResult(1, "", "Connection timed out")},
    "is too slow": {"run": too_slow},
}


class RecordingSystem(Tree):
    """A system that records its queries and mutates the answer of one."""

    def __init__(self, system: Tree, mutated_question: Question | None = None, mutate: Answer | None = None) -> None:
        self.questions: dict[Question, Any] = {}
        self._system = system
        self._mutated_question = mutated_question
        self._mutate = mutate

    def _answer(self, operation: str, argument: Any, query: Callable[[], Any]) -> Any:
        question = (operation, argument)
        true = query()
        self.questions[question] = true
        return self._mutate(true) if self._mutate and question == self._mutated_question else true

    def read(self, path: str) -> bytes:
        return self._answer("read", path, lambda: self._system.read(path))

    def names(self, path: str) -> list[str]:
        return self._answer("names", path, lambda: self._system.names(path))

    def scan(self, path: str) -> list[tuple[str, int]]:
        return self._answer("scan", path, lambda: self._system.scan(path))

    def readlink(self, path: str) -> str:
        return self._answer("readlink", path, lambda: self._system.readlink(path))

    def stat(self, path: str) -> FileStat:
        return self._answer("stat", path, lambda: self._system.stat(path))

    def statvfs(self, path: str) -> FileSystem:
        return self._answer("statvfs", path, lambda: self._system.statvfs(path))

    def run(
        self, argv: Sequence[str], seconds: float, environment: Mapping[str, str], anywhere: bool
    ) -> ProgramResult | None:
        return self._answer("run", " ".join(argv), lambda: self._system.run(argv, seconds, environment, anywhere))

    def clock(self) -> KernelClock | None:
        return self._answer("clock", "", self._system.clock)


def check_test_module(check: str) -> ModuleType:
    return importlib.import_module(f"tests.checks.test_{check}")


Store = dict[str, Series]


def run(check: Check, host: Host, config: Any, system: Tree, store: Store) -> list[Any]:
    """Run the check on a new host, which remembers nothing of earlier runs except `store`."""
    fresh = Host(host.root, host._open_nvml, host.now, system)
    return list(check.module.run(fresh, config, History(store, NOW, BOOT)))


def store_before_run(run_kind: str, check: Check, host: Host, config: Any) -> Store:
    """Return the history of the check before this run."""
    if run_kind == "first":
        return {}
    results = run(check, host, config, host._system, {})
    return update({}, [item for item in results if isinstance(item, Observation)], NOW - 300.0, BOOT)


RUN_KINDS = ("first", "later")


@pytest.mark.parametrize("run_kind", RUN_KINDS)
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_healthy_node_gives_nothing_above_info(name: str, run_kind: str, tmp_path: Path) -> None:
    host, config = check_test_module(name).healthy(tmp_path)
    results = run(CHECKS[name], host, config, host._system, store_before_run(run_kind, CHECKS[name], host, config))
    assert [item for item in results if isinstance(item, Finding) and item.severity > Severity.INFO] == []


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_mutated_answer_gives_finding_or_failure_or_is_excused(name: str, tmp_path: Path) -> None:
    check, tests = CHECKS[name], check_test_module(name)
    host, config = tests.healthy(tmp_path)
    excuses = Excuses(tests)
    silent = []
    for run_kind in RUN_KINDS:
        store = store_before_run(run_kind, check, host, config)
        recording = RecordingSystem(host._system)
        run(check, host, config, recording, store)
        for question, true in recording.questions.items():
            for mutation, answers in MUTATIONS.items():
                mutate = answers.get(question[0])
                if mutate is None or is_no_mutation(mutation, question, true):
                    continue
                if reports_problem(
                    lambda q=question, m=mutate, s=store: run(
                        check, host, config, RecordingSystem(host._system, q, m), s
                    )
                ):
                    continue
                if not excuses.cover(mutation, question[1]):
                    silent.append(f"{run_kind} run: {' '.join(question)} {mutation}")
    assert silent == [], f"{name} reports nothing"
    assert excuses.without_reason() == []
    assert excuses.unused() == [], f"{name} has excuses that no mutation needs"


def is_no_mutation(mutation: str, question: Question, true: Any) -> bool:
    if question[0] == "readlink" and mutation != VANISHES:
        return True
    return mutation == "is cut short" and isinstance(true, bytes) and len(true.strip()) <= 4  # half a number is one


class Excuses:
    """The excuses of a test file, and which of them were needed."""

    def __init__(self, tests: ModuleType) -> None:
        absent = {(VANISHES, where): why for where, why in getattr(tests, "ABSENT_IS_FINE", {}).items()}
        self._reasons: dict[tuple[str, str], str] = absent | getattr(tests, "HARMLESS", {})
        self._needed: set[tuple[str, str]] = set()

    def cover(self, mutation: str, where: str) -> bool:
        matching = [each for each in self._reasons if re.fullmatch(each[0], mutation) and re.fullmatch(each[1], where)]
        if len(matching) == 1:  # otherwise none of the excuses is needed for this mutation
            self._needed.update(matching)
        return bool(matching)

    def without_reason(self) -> list[tuple[str, str]]:
        return [each for each, why in self._reasons.items() if len(why) <= 10]

    def unused(self) -> list[tuple[str, str]]:
        return [each for each in self._reasons if each not in self._needed]


def reports_problem(run_check: Callable[[], list[Any]]) -> bool:
    """Return True if the run gives a finding or fails with an error that the worker reports in one sentence."""
    try:
        results = run_check()
    except (OSError, ValueError, RuntimeError, NvmlError):
        return True
    return any(isinstance(item, Finding) for item in results)
