"""`healthd check` and `healthd record`: one round of the checks, without a daemon."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings, require_scenario, wrong_settings_are_wrong_use
from healthd.cli.terminal import OF_HEALTH, REFUSED, Stop, as_json, complain, page, say

if TYPE_CHECKING:
    from healthd.config import Loaded
    from healthd.settings.registry import Check
    from healthd.work.once import KernelLog, Look
    from healthd.work.runner import Runner
    from healthd.work.worker import Setup

WORKER_SECONDS = 1.0  # how long an idle worker may take to end
WORKER_WORDS = 64 << 10


# --- check


def _check_arguments(parser: Parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these checks (default: all that are enabled)")
    parser.add_argument("--json", action="store_true", help="for programs (docs/json.md)")
    parser.add_argument("--replay", metavar="FILE", help="look at what healthd record wrote, not at this machine")
    flags.look(parser)


def _check(args: argparse.Namespace) -> int:
    from healthd.work import once

    if args.replay is not None:
        found = _replay(args)
    else:
        from healthd.work.worker import Setup

        loaded, checks, kernel_log = _to_look_at(args)
        settings = loaded.settings
        with runner_of(Setup(settings.root, settings.nvml.fake, settings.checks_dir)) as runner:
            found = once.look(loaded, checks, runner, kernel_log)
    document = once.look_json(found)
    status = OF_HEALTH[document["health"]]
    if args.json:
        return say(as_json(document), status)
    from healthd.say import render

    return say(render.check(document, page(), replayed=args.replay is not None), status)


def _to_look_at(args: argparse.Namespace) -> tuple[Loaded, dict[str, Check], KernelLog | None]:
    """What to look at: this machine, as in the settings."""
    from healthd.work import once

    with wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args)
        require_scenario(loaded)
    kernel_log = once.kernel_log_of(loaded.settings)
    return _only(args.names, loaded, checks, kernel_log), checks, kernel_log


def _replay(args: argparse.Namespace) -> Look:
    from healthd.cli import replay
    from healthd.record import recording
    from healthd.work import once
    from healthd.work.worker import Setup

    for flag in ("--root", "--fake-nvml", "--profile", "--baseline"):
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            settings = "; for other settings: --config" if flag in ("--profile", "--baseline") else ""
            raise Stop(f"healthd check: {flag} does not go with --replay: the recording has its own{settings}")
    try:
        recorded = recording.read(args.replay)
        kernel_log = replay.kernel_log_of(recorded)
    except recording.RecordingError as error:
        raise Stop(f"healthd check: {error}") from None
    with wrong_settings_are_wrong_use():
        given, checks = flags.settings_elsewhere(args)
    loaded, lost = replay.settings_of(recorded, checks) if given is None else (replay.at_that_node(given, recorded), [])
    lost = [result for result in lost if not args.names or result.check in args.names]
    if args.names or given is not None:
        loaded = _only(args.names, loaded, checks, kernel_log)
    setup = Setup(checks_dir=loaded.settings.checks_dir, replay=os.path.abspath(args.replay))
    with runner_of(setup) as runner:
        return once.look(loaded, checks, runner, kernel_log, recorded, lost)


def _only(names: Sequence[str], loaded: Loaded, checks: Mapping[str, Check], kernel_log: KernelLog | None) -> Loaded:
    """The settings with only these checks. Raises Stop if there is nothing to run."""
    import dataclasses

    from healthd.convert import nearest
    from healthd.work.once import names_to_run

    for name in names:
        if name not in checks:
            raise Stop(f'healthd check: there is no check "{name}"{nearest(name, checks)}')
        if not any(check == name for check, _ in loaded.checks):
            raise Stop(f"healthd check: {name}: {_why_not(checks[name])}")
    asked = names or [name for name, check in checks.items() if not check.when]  # the others run only by their names
    wanted = {key: config for key, config in loaded.checks.items() if key[0] in asked}
    chosen = dataclasses.replace(loaded, checks=wanted)
    if not names_to_run(chosen, checks, kernel_log):
        listening = "they only listen to the kernel log, and there is none to read here"
        raise Stop(f"healthd check: nothing to run: {listening if wanted else 'no check is enabled'}")
    return chosen


def _why_not(check: Check) -> str:
    if check.per:
        return f"nothing to check: no table [checks.{check.name}.NAME] is in the settings, or none is enabled"
    return "is switched off in the settings (enabled = false)"


# --- record


def _record_arguments(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="where to write it (for you alone to read, mode 0600)")
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these checks (default: all that are enabled)")
    parser.add_argument("--force", action="store_true", help="replace FILE if there is one")
    flags.look(parser)


def _record(args: argparse.Namespace) -> int:
    import tempfile

    from healthd.cli import replay
    from healthd.record import recording
    from healthd.say import render
    from healthd.work import once
    from healthd.work.worker import Setup

    _require_place(args.file, args.force)
    loaded, checks, kernel_log = _to_look_at(args)
    settings = loaded.settings
    with tempfile.TemporaryDirectory(prefix="healthd-record.") as notes:
        setup = Setup(settings.root, settings.nvml.fake, settings.checks_dir, record=notes)
        with runner_of(setup) as runner:
            found = once.look(loaded, checks, runner, kernel_log)
        recorded = replay.record(loaded, found, recording.read_notes(notes))
    try:
        size = recording.write(args.file, recorded)
    except OSError as error:
        raise Stop(f"healthd record: {args.file}: cannot be written: {error.strerror}", REFUSED) from None
    answers, silent = replay.told(recorded)
    return say(render.recorded(once.look_json(found), args.file, size, answers, silent, page()))


def _require_place(path: str, force: bool) -> None:
    """Raises Stop, before any check looks, if the recording may not be written there."""
    if os.path.lexists(path):
        if not os.path.isfile(path):
            raise Stop(f"healthd record: {path}: is there, and is not a file", REFUSED)
        if not force:
            raise Stop(f"healthd record: {path}: is there already; --force replaces it", REFUSED)
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if os.path.isdir(folder) else "there is no such directory"
        raise Stop(f"healthd record: {folder}: {why}", REFUSED)


# --- the worker of a command


@contextmanager
def runner_of(setup: Setup) -> Iterator[Runner]:
    """A Runner. What its workers write to standard error is shown at the end."""
    import tempfile
    import time

    from healthd.work.runner import Runner

    with tempfile.TemporaryFile() as words:
        # A worker that hangs outlives us: a reader of our standard error must not wait for its end.
        with _standard_error_to(words):
            runner = Runner(setup, "", time.monotonic)
            try:
                yield runner
            finally:
                runner.close(WORKER_SECONDS)
        words.seek(0)
        for line in words.read(WORKER_WORDS).decode("utf-8", "replace").splitlines():
            complain(line)


@contextmanager
def _standard_error_to(file: IO[bytes]) -> Iterator[None]:
    """Meanwhile this process and its children write standard error into that file."""
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


COMMANDS = {
    "check": Command(
        _check_arguments,
        _check,
        "Run the checks once, now. Needs no daemon and changes nothing: findings count at face value.\n"
        "Exit status: 0 healthy, 1 warning, 2 degraded or critical, 3 unknown, 64 wrong use.",
        "  healthd check\n  healthd check gpu_ecc gpu_nvlink\n  healthd check --json | jq -r '.conditions[].message'\n"
        "  healthd check --replay gpu-042.rec\n",
    ),
    "record": Command(
        _record_arguments,
        _record,
        "Run the checks once, as check does, and keep all that they read in FILE: files, NVML's answers, what "
        "programs printed, the lines of the kernel log that mean something. healthd check --replay FILE judges it "
        "on any machine, with the settings of then or, with --config, with others.\n"
        "FILE names the node, its parts with their serial numbers, and processes. No environment, no user's files.\n"
        "Exit status: 0 written, whatever was found; 1 not written; 64 wrong use.",
        "  healthd record gpu-042.rec\n  healthd record --force hang.rec mount gpu_access\n",
    ),
}
