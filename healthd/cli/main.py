"""The command line: `healthd COMMAND ...`. Each command loads only what it uses.

Exit status: 0 done or healthy, 1 warning or refused, 2 degraded or critical, 3 unknown or no answer, 64 wrong use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from healthd.cli import flags
from healthd.cli.flags import Parser, load_settings, wrong_settings_are_wrong_use
from healthd.cli.terminal import (
    INTERRUPTED,
    OF_HEALTH,
    OK,
    REFUSED,
    UNKNOWN,
    Stop,
    complain,
    page,
    prepare,
    say,
    stream,
)

if TYPE_CHECKING:
    from healthd.cli.baseline import Change
    from healthd.config import Loaded
    from healthd.model import Explain, Finding, Inventory, KernelEvent
    from healthd.scan.events import Judged, Tally
    from healthd.scan.log_file import Block
    from healthd.settings.registry import Check
    from healthd.work.once import KernelLog, Look
    from healthd.work.runner import Runner
    from healthd.work.worker import Setup

WORKER_SECONDS = 1.0  # how long an idle worker may take to end
WORKER_WORDS = 64 << 10
HEALTHCHECK_SECONDS = 10.0  # slurmd would kill it after 60, and start the next one beside it before
TWO_WORDS = ("config", "hook")  # commands that have commands

HELP = """\
healthd: is this GPU node well, and may Slurm use it?

usage: healthd COMMAND [...]        healthd COMMAND --help says more

look
  check [NAME ...]            run the checks once, now, without the daemon
  record FILE                 the same, and keep what they read, for a colleague
  scan FILE|-                 what a kernel log tells, also of another machine
  status                      what the daemon believes, and wants of Slurm
  explain CODE                what a code means, why it matters, and what to do
  list                        the checks: what they look at, how often

tell the running daemon
  ack CODE [PART] --for 2h --why TEXT
                              I know: do not drain for it, so long
  repaired CODE [PART]        it is repaired: look again, resume if all is well
  pause --for 30m --why TEXT  leave Slurm alone for a while (driver upgrade)
  resume-checks               the pause is over

what Slurm calls
  hook epilog                 a job ended: look at the GPUs now
  hook healthcheck            for HealthCheckProgram: what was decided

set up
  run                         the daemon, in the foreground, as systemd does
  config check FILE           is this settings file right?
  config show                 every setting that holds, and where it comes from
  baseline                    what this node has, for the checks to hold it to

examples
  healthd check                        # exit status: 0 healthy, 1 warning,
  healthd check --json | jq .health    #   2 degraded or critical, 3 unknown
  healthd check --fake-nvml dgx-h100   # without a GPU: a fake DGX H100
  healthd check --replay gpu-042.rec   # another node, as it was when recorded
  healthd scan /var/log/kern.log.1.gz  # what happened, first cause on top
  healthd explain gpu_xid/79
  healthd repaired gpu_xid/79 0000:1b:00.0
  healthd run --mode observe --runtime-dir /tmp/h --state-dir /tmp/h/state

settings: /etc/healthd/healthd.toml         manual: man healthd, docs/
"""


class Command(NamedTuple):
    flags: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    description: str
    examples: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; what goes wrong is one sentence on standard error."""
    prepare()
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except Stop as stop:
        return complain(str(stop), stop.status)
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        return say(HELP)
    if words[0] in ("-V", "--version"):
        from healthd import __version__

        return say(f"healthd {__version__}\n")
    count = 2 if words[0] in TWO_WORDS else 1
    name, rest = " ".join(words[:count]), words[count:]
    if words[0] in TWO_WORDS and words[1:2] in ([], ["-h"], ["--help"]):
        return say(_commands_of(words[0]))
    if name not in COMMANDS:
        from healthd.convert import nearest

        hint = "; write the command first, then its options" if name.startswith("-") else nearest(name, COMMANDS)
        raise Stop(f'healthd: there is no command "{name}"{hint}')
    command = COMMANDS[name]
    parser = Parser(name, command.description, command.examples)
    command.flags(parser)
    if {"-h", "--help"} & set(rest):
        return say(parser.format_help())
    return command.run(parser.parse_intermixed_args(rest))


def _commands_of(first: str) -> str:
    usages = {"config check": "config check FILE"}
    mine = {name: command for name, command in COMMANDS.items() if name.startswith(f"{first} ")}
    heads = [f"healthd {usages.get(name, name)}" for name in mine]
    wide = max(map(len, heads))
    lines = [f"{head:{wide}}  {command.description}" for head, command in zip(heads, mine.values(), strict=True)]
    return "usage: " + "\n       ".join(lines) + "\n"


def _json(document: Any) -> str:
    import json

    return json.dumps(document, indent=2) + "\n"


# --- run


def _run(args: argparse.Namespace) -> int:
    from healthd import daemon

    with wrong_settings_are_wrong_use():
        try:
            return daemon.run(lambda checks_dir: load_settings(args, checks_dir=checks_dir))
        except OSError as error:
            why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise Stop(f"healthd run: {why}", REFUSED) from None


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
        with _runner(Setup(settings.root, settings.nvml.fake, settings.checks_dir)) as runner:
            found = once.look(loaded, checks, runner, kernel_log)
    document = once.look_json(found)
    status = OF_HEALTH[document["health"]]
    if args.json:
        return say(_json(document), status)
    from healthd.say import render

    return say(render.check(document, page(), replayed=args.replay is not None), status)


def _to_look_at(args: argparse.Namespace) -> tuple[Loaded, dict[str, Check], KernelLog | None]:
    """This machine, as the settings have it."""
    from healthd.work import once

    with wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args)
        _require_scenario(loaded)
    kernel_log = once.kernel_log_of(loaded.settings)
    return _only(args.names, loaded, checks, kernel_log), checks, kernel_log


@contextmanager
def _runner(setup: Setup) -> Iterator[Runner]:
    """What its workers write to standard error is shown at the end."""
    import tempfile
    import time

    from healthd.work.runner import Runner

    with tempfile.TemporaryFile() as words:
        # A worker that hangs outlives us: who reads our standard error must not wait for its end.
        with _standard_error_to(words):
            runner = Runner(setup, "", time.monotonic)
            try:
                yield runner
            finally:
                runner.close(WORKER_SECONDS)
        words.seek(0)
        for line in words.read(WORKER_WORDS).decode("utf-8", "replace").splitlines():
            complain(line)


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
    with _runner(setup) as runner:
        return once.look(loaded, checks, runner, kernel_log, recorded, lost)


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
        with _runner(setup) as runner:
            found = once.look(loaded, checks, runner, kernel_log)
        recorded = replay.record(loaded, found, recording.read_notes(notes))
    try:
        size = recording.write(args.file, recorded)
    except OSError as error:
        raise Stop(f"healthd record: {args.file}: cannot be written: {error.strerror}", REFUSED) from None
    answers, silent = replay.told(recorded)
    return say(render.recorded(once.look_json(found), args.file, size, answers, silent, page()))


def _require_place(path: str, force: bool) -> None:
    """Before anything is looked at: whether the recording may be written there."""
    if os.path.lexists(path):
        if not os.path.isfile(path):
            raise Stop(f"healthd record: {path}: is there, and is not a file", REFUSED)
        if not force:
            raise Stop(f"healthd record: {path}: is there already; --force replaces it", REFUSED)
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if os.path.isdir(folder) else "there is no such directory"
        raise Stop(f"healthd record: {folder}: {why}", REFUSED)


def _only(names: Sequence[str], loaded: Loaded, checks: Mapping[str, Check], kernel_log: KernelLog | None) -> Loaded:
    """The settings with these checks alone. Raises Stop where there is nothing to run."""
    import dataclasses

    from healthd.convert import nearest
    from healthd.work.once import names_to_run

    for name in names:
        if name not in checks:
            raise Stop(f'healthd check: there is no check "{name}"{nearest(name, checks)}')
        if not any(check == name for check, _ in loaded.checks):
            raise Stop(f"healthd check: {name}: {_why_not(checks[name])}")
    asked = names or [name for name, check in checks.items() if not check.when]  # the others by their names only
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


def _require_scenario(loaded: Loaded) -> None:
    """A wrong scenario file is wrong use rather than a failure of every GPU check."""
    if loaded.settings.nvml.fake:
        from healthd.config import ConfigError
        from healthd.convert import ConvertError
        from healthd.nvidia.fake_scenario import read

        try:
            read(loaded.settings.nvml.fake)
        except ConvertError as error:
            raise ConfigError(f"{loaded.origins['nvml.fake']}: {error}") from None


@contextmanager
def _standard_error_to(file: IO[bytes]) -> Iterator[None]:
    """What this process and its children write to standard error goes there meanwhile."""
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


# --- baseline


def _baseline_arguments(parser: Parser) -> None:
    parser.add_argument("--diff", action="store_true", help="what has changed since the baseline was written")
    parser.add_argument("--write", action="store_true", help="write it to the settings' baseline_file, as root")
    parser.add_argument("--force", action="store_true", help="with --write: replace the file that is there")
    flags.look(parser)


def _baseline(args: argparse.Namespace) -> int:
    from healthd.cli import baseline
    from healthd.say import render
    from healthd.settings import layers
    from healthd.work.worker import Setup

    if args.diff and args.write:
        raise Stop("healthd baseline: --diff and --write are two things")
    if args.force and not args.write:
        raise Stop("healthd baseline: --force is for --write")
    with wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args, layers.without_baseline)
        _require_scenario(loaded)
        path = _baseline_file(loaded) if args.diff or args.write else ""
        before = _baseline_before(path, checks, args) if path else None
    settings = loaded.settings
    with _runner(Setup(settings.root, settings.nvml.fake, settings.checks_dir)) as runner:
        present = baseline.take(loaded, checks, runner)
    changes = baseline.drift(before, present, checks) if before is not None else []
    if args.diff:
        known = [change for change in changes if not change.unknown]
        return say(render.drift(path, changes, page()), REFUSED if known else UNKNOWN if changes else OK)
    text = baseline.as_toml(present, checks, _baseline_heading(settings.node_name))
    if not args.write:
        return say(text)
    changes += baseline.by_hand(before, checks) if before is not None else []
    status = _write_baseline(path, text, changes, args.force, checks)
    for left in present.left_out:
        complain(baseline.words_of(left))
    return status


def _baseline_file(loaded: Loaded) -> str:
    """Where it is, or is to be. What is looked at must be this machine, unless the file was named for it."""
    from healthd.config import Settings

    settings = loaded.settings
    if not settings.baseline_file:
        raise Stop('healthd baseline: baseline_file is "": name a file with --baseline')
    if (settings.root != "/" or settings.nvml.fake) and settings.baseline_file == Settings().baseline_file:
        raise Stop("healthd baseline: this is not the machine that is looked at: name a file with --baseline")
    return settings.baseline_file


def _baseline_before(path: str, checks: Mapping[str, Check], args: argparse.Namespace) -> Mapping[str, Any] | None:
    """The tables of the file; None where there is none, or a wrong one that is to be replaced. Raises ConfigError."""
    from healthd.config import ConfigError, settle
    from healthd.settings.layers import checks_of

    if not os.path.exists(path):
        if args.write:
            return None
        raise Stop(f"healthd baseline: {path}: there is no such file; healthd baseline --write makes it", UNKNOWN)
    try:
        tables: Mapping[str, Any] = checks_of(path)
        settle({"checks": tables}, path, {}, checks)
    except ConfigError as error:
        if not args.force:
            raise
        complain(str(error))
        return None
    return tables


def _baseline_heading(node: str) -> str:
    import time

    from healthd import __version__

    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"""\
What {node} has, as healthd {__version__} found it on {now}: healthd baseline --write.
The checks hold the node to it: what is gone or less later drains it. Take out what may come and go.
After a change of hardware or software: healthd baseline --diff, then healthd baseline --write --force."""


def _write_baseline(path: str, text: str, changes: Sequence[Change], force: bool, checks: Mapping[str, Check]) -> int:
    from healthd.config import parse_toml, settle
    from healthd.judge.ledger import replace_file
    from healthd.say import render

    settle(parse_toml(text, path), path, {}, checks)  # never a file with which the daemon would not start
    if os.path.exists(path) and changes and not force:
        say(f"{render.drift(path, changes, page())}\n")
        raise Stop(f"healthd baseline: {path}: is there and differs; --force replaces it", REFUSED)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, text, mode=0o644, durable=True)
    except OSError as error:
        raise Stop(f"healthd baseline: {path}: cannot be written: {error.strerror}", REFUSED) from None
    return say((f"{render.drift(path, changes, page())}\n" if changes else "") + f"{path}: written\n")


# --- scan


def _scan_arguments(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="a log, also .gz, .xz or .bz2; - is standard input")
    parser.add_argument("--json", action="store_true", help="one object for each event, one a line (docs/json.md)")


def _scan(args: argparse.Namespace) -> int:
    import time

    from healthd.model import Severity
    from healthd.scan import events as scan
    from healthd.scan import log_file

    tally = scan.Tally()
    trouble: list[str] = []
    worst = Severity.INFO

    def watched() -> Iterator[Judged]:
        nonlocal worst
        blocks = _until_damaged(log_file.blocks(args.file), trouble)
        for one in scan.judged(scan.events(blocks, time.time(), tally), correlate_all()):
            if one.verdict.severity > worst:
                worst = one.verdict.severity
            yield one

    name = "standard input" if args.file == "-" else args.file
    if args.json:
        stream(scan.event_line(one) for one in watched())
    else:
        from healthd.scan import table as scan_table

        found = scan_table.summary(watched())
        if tally.kernel:
            say(scan_table.table(found, name, tally, page()))
    status = OF_HEALTH[{Severity.INFO: "healthy", Severity.WARNING: "warning"}.get(worst, "unhealthy")]
    if trouble:
        return complain(f"healthd scan: {trouble[0]}", status or UNKNOWN)
    if not tally.kernel:
        return complain(f"healthd scan: {name}: {_no_kernel_log(tally)}", UNKNOWN)
    return status


def _until_damaged(blocks: Iterator[Block], trouble: list[str]) -> Iterator[Block]:
    """What was read before counts."""
    from healthd.scan.log_file import LogError

    try:
        yield from blocks
    except LogError as error:
        trouble.append(str(error))


def _no_kernel_log(tally: Tally) -> str:
    if not tally.lines:
        return "is empty"
    if tally.binary:
        return "is no text"
    return f"none of its {tally.lines:,} lines is known to be the kernel's (by a prefix of dmesg, syslog, journalctl)"


def correlate_all() -> Callable[[Sequence[KernelEvent], Inventory], list[Finding]]:
    """All built-in checks that listen, with their own settings."""
    from healthd.judge import absorb
    from healthd.settings import registry

    checks = [(check, check.config()) for check in registry.built_in().values() if check.listens]

    def correlate(events: Sequence[KernelEvent], node: Inventory) -> list[Finding]:
        return [
            absorb.as_configured(finding, config)
            for check, config in checks
            for finding in check.correlate(events, node, config) or ()
        ]

    return correlate


# --- status, and what the daemon is told


def _ask(args: argparse.Namespace, request: dict[str, Any]) -> dict[str, Any]:
    from healthd.cli import control

    try:
        return control.ask(flags.runtime_dir(args), request)
    except control.NoAnswer as error:
        from healthd.cli import running

        there = running.daemons() or "no process of it is to be seen"
        raise Stop(f"{error}; {there}", UNKNOWN) from None
    except control.Refused as error:
        raise Stop(f"healthd: {error}", REFUSED) from None


def _status_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs (docs/json.md)")
    flags.client(parser)


def _status(args: argparse.Namespace) -> int:
    import time

    from healthd.say import render

    document = _ask(args, {"command": "status"}).get("status", {})
    try:
        status = OF_HEALTH[document["health"]]
        text = _json(document) if args.json else render.status(document, time.time(), page())
    except (KeyError, TypeError, ValueError) as error:
        from healthd import __version__

        there = document.get("version", "unknown") if isinstance(document, dict) else "unknown"
        raise Stop(
            f"healthd: the daemon (version {there}) answered something that this version ({__version__}) cannot show: "
            f"{type(error).__name__} {error}",
            UNKNOWN,
        ) from None
    return say(text, status)


def _repaired_arguments(parser: Parser) -> None:
    parser.add_argument("code", metavar="CODE", help="gpu_xid/79, as status shows it")
    parser.add_argument("part", metavar="PART", nargs="?", help="0000:1b:00.0 (default: every part with that code)")
    parser.add_argument("--why", metavar="TEXT", help="what was done: for the log, and for status")
    flags.client(parser)


def _repaired(args: argparse.Namespace) -> int:
    request = {"command": "repaired", "code": args.code, "part": args.part, "why": args.why}
    return say(_ask(args, request)["done"] + "\n")


def _ack_arguments(parser: Parser) -> None:
    parser.add_argument("code", metavar="CODE", help="ib_link/down, as status shows it")
    parser.add_argument("part", metavar="PART", nargs="?", help="mlx5_3/1 (default: every part with that code)")
    _pause_arguments(parser)


def _ack(args: argparse.Namespace) -> int:
    request = {"command": "ack", "code": args.code, "part": args.part}
    return say(_ask(args, {**request, "seconds": _seconds(args, "ack"), "why": args.why})["done"] + "\n")


def _pause_arguments(parser: Parser) -> None:
    parser.add_argument("--for", metavar="TIME", dest="time", required=True, help="30m, 2h, 1d, 90s; at most a week")
    parser.add_argument("--why", metavar="TEXT", required=True, help="for whoever looks at the node meanwhile")
    flags.client(parser)


def _pause(args: argparse.Namespace) -> int:
    request = {"command": "pause", "seconds": _seconds(args, "pause"), "why": args.why}
    return say(_ask(args, request)["done"] + "\n")


def _seconds(args: argparse.Namespace, command: str) -> float:
    seconds = flags.duration(args.time)
    if seconds is None:
        must = "must be a time like 30m, 2h or 1h30m (units s, m, h, d)"
        raise Stop(f'healthd {command}: --for: {must}, is "{args.time}"')
    return seconds


def _resume_checks(args: argparse.Namespace) -> int:
    return say(_ask(args, {"command": "resume-checks"})["done"] + "\n")


# --- what Slurm calls


def _hook_epilog_arguments(parser: Parser) -> None:
    parser.add_argument("--wait", metavar="SECONDS", type=float, default=10.0, help="at most so long (default: 10)")
    flags.client(parser)


def _hook_epilog(args: argparse.Namespace) -> int:
    from healthd.cli import hook

    hook.end_after(args.wait + 1)
    return say(hook.epilog(flags.runtime_dir(args), os.environ.get("SLURM_JOB_ID", ""), args.wait) + "\n")


def _hook_healthcheck(args: argparse.Namespace) -> int:
    import time

    from healthd.cli import hook

    hook.end_after(HEALTHCHECK_SECONDS)
    status, sentence = hook.healthcheck(flags.runtime_dir(args), time.time())
    return say(sentence + "\n", status)


# --- settings, checks and codes


def _config_check_arguments(parser: Parser) -> None:
    parser.add_argument("config", metavar="FILE")


def _config_check(args: argparse.Namespace) -> int:
    with wrong_settings_are_wrong_use():
        loaded, _ = load_settings(args)
        _require_scenario(loaded)
    return say(f"{args.config}: right; mode {loaded.settings.mode.value}, {len(loaded.checks)} checks\n")


def _config_show_arguments(parser: Parser) -> None:
    parser.add_argument("--changed", action="store_true", help="only what is not at its default")
    flags.daemon(parser)


def _config_show(args: argparse.Namespace) -> int:
    from healthd import config
    from healthd.say import render

    with wrong_settings_are_wrong_use():
        loaded, _ = load_settings(args)
    rows = [row for row in config.effective(loaded) if not args.changed or row[2] != "default"]
    return say(render.settings(rows, page()))


def _explain_arguments(parser: Parser) -> None:
    parser.add_argument("code", metavar="CODE|NAME", help="gpu_xid/79, ...; the name of a check for all of its codes")
    parser.add_argument("--config", metavar="FILE", help=argparse.SUPPRESS)


def _explain(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from healthd.convert import nearest
    from healthd.say import render
    from healthd.settings import registry

    checks = registry.built_in()
    if args.code.partition("/")[0] not in checks and registry.explain(checks, args.code) is None:
        with wrong_settings_are_wrong_use():
            _, checks = load_settings(args)  # the site's own
    if args.code in checks:
        known = checks[args.code]
        rows = _code_rows(registry.explained({args.code: known}))
        return say(render.explain_check(known.name, known.summary, rows, page()))
    found = registry.explain(checks, args.code)
    if found is None:
        hint = registry.renamed(args.code) or nearest(args.code, registry.all_names(checks))
        raise Stop(f'healthd explain: there is no code "{args.code}"{hint}')
    texts = (found.meaning, found.matters, found.todo)
    check = checks.get(args.code.partition("/")[0])
    enforced = check is None or bool(next(f.default for f in fields(check.config) if f.name == "enforce"))
    severity, clears = found.severity.name.lower(), found.clears.name.lower()
    return say(render.explain(args.code, severity, clears, texts, page(), enforced))


def _list_arguments(parser: Parser) -> None:
    parser.add_argument("--codes", action="store_true", help="the codes of findings instead")
    parser.add_argument(
        "--config", metavar="FILE", help=f"the settings (default: {flags.DEFAULT_FILE}, if there is one)"
    )


def _list(args: argparse.Namespace) -> int:
    from healthd.say import render

    with wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args)
    if args.codes:
        from healthd.settings import registry

        return say(render.codes(_code_rows(registry.explained(checks)), page()))
    return say(render.checks(_check_rows(loaded, checks), page()))


def _code_rows(explained: Mapping[str, Explain]) -> Iterator[tuple[str, str, str, str]]:
    for code, text in explained.items():
        meaning = text.meaning.partition(". ")[0].rstrip(".")
        yield code, text.severity.name.lower(), text.clears.name.lower().replace("_", " "), meaning


def _check_rows(loaded: Loaded, checks: Mapping[str, Check]) -> Iterator[tuple[str, str, str, str]]:
    from healthd.say.render import duration as words

    for name, check in checks.items():
        mine = {instance: config for (owner, instance), config in loaded.checks.items() if owner == name}
        if not mine:
            yield name, "not set up" if check.per else "off", "", check.summary
        for instance, config in mine.items():
            every = words(config.interval_seconds or loaded.settings.interval_seconds)
            every += ", when idle" if check.when else ""
            timing = (every, words(config.timeout_seconds)) if check.runs else ("each kernel line", "")
            yield (f"{name} {instance}".strip(), *timing, check.summary)


COMMANDS = {
    "run": Command(
        flags.daemon,
        _run,
        "The daemon, in the foreground, until SIGTERM. SIGHUP reads the settings again. A flag wins over the file.",
        "  healthd run                        # as systemd does\n"
        "  # a second one beside it, to play with:\n"
        "  healthd run --fake-nvml dgx-h100 --kernel-log /tmp/log --listen off \\\n"
        "              --runtime-dir /tmp/h --state-dir /tmp/h/state\n",
    ),
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
    "scan": Command(
        _scan_arguments,
        _scan,
        "What a kernel log tells: dmesg, syslog, journalctl (also -o json), a dump of /dev/kmsg, a serial console, "
        "pdsh; of any machine. Incidents in the order of time, the first cause on top. Nothing else of that machine is "
        "known, so what depends on it (is this file system the root?) is only a warning.\n"
        "Exit status: 0 no fault, 1 warning, 2 degraded or critical, 3 it is no kernel log or cannot be read, 64 wrong "
        "use.",
        "  healthd scan /var/log/kern.log.2.gz\n"
        "  ssh node17 dmesg -T | healthd scan -\n"
        "  healthd scan --json console.log | jq 'select(.severity == \"critical\")'\n",
    ),
    "status": Command(
        _status_arguments,
        _status,
        "What the running daemon believes: health, conditions, the last round, and what Slurm has.\n"
        "Exit status: 0 healthy, 1 warning, 2 degraded or critical, 3 unknown or not running, 64 wrong use.",
        "  healthd status\n  healthd status --json | jq '.conditions[] | {code, subject, job}'\n",
    ),
    "ack": Command(
        _ack_arguments,
        _ack,
        "Tell the daemon that you know of something. It does not drain for that until the time is over, lifts a drain "
        "that it made for nothing else, and shows who knows and why. It counts again when the time is over, or as soon "
        "as it is worse. A new ack takes the place of the old one: --for 1s ends it.",
        '  healthd ack ib_link/down mlx5_3/1 --for 2h --why "cable is on its way"\n',
    ),
    "repaired": Command(
        _repaired_arguments,
        _repaired,
        "Tell the daemon that something is repaired. It ends the condition, looks at everything again, and "
        "resumes the node in Slurm once every check has passed.",
        '  healthd repaired gpu_xid/79 0000:1b:00.0 --why "reseated, ticket 12"\n',
    ),
    "pause": Command(
        _pause_arguments,
        _pause,
        "Leave Slurm alone for a while. Checks go on; what opens meanwhile acts only if a check still finds it "
        "afterwards.",
        '  healthd pause --for 30m --why "driver upgrade"\n',
    ),
    "resume-checks": Command(flags.client, _resume_checks, "End the pause now. All checks look at once."),
    "hook epilog": Command(
        _hook_epilog_arguments,
        _hook_epilog,
        "For Slurm's epilog: the job ended, look at the GPUs now; and wait for that. Exit status 0, always.",
    ),
    "hook healthcheck": Command(
        flags.client,
        _hook_healthcheck,
        "For HealthCheckProgram: what the daemon has decided. Exit status: 0 usable, 2 drained, 3 no daemon.",
    ),
    "config check": Command(
        _config_check_arguments, _config_check, "Read a settings file; say in one sentence what is wrong with it."
    ),
    "config show": Command(_config_show_arguments, _config_show, "Every setting that holds, and where it comes from."),
    "baseline": Command(
        _baseline_arguments,
        _baseline,
        "What this node has now, as a settings file that the checks then hold it to: GPUs, ports and their rates, "
        "disks, memory, CPUs, mounts, device nodes, services. What looks broken now is left out, with the reason.\n"
        "Exit status: 0 done, or nothing has changed; 1 something has, or refused; 3 could not look; 64 wrong use.",
        "  healthd baseline                        # look at it first\n"
        "  healthd baseline --write && systemctl reload healthd\n"
        "  healthd baseline --diff                 # what has changed since\n",
    ),
    "explain": Command(
        _explain_arguments,
        _explain,
        "What a code means, why it matters, what healthd does, what ends it, and what an engineer should do.\n"
        "With the name of a check: what it looks at, and its codes. nvlink5/149:4 is what an Xid 149 names as 149:4.",
        "  healthd explain gpu_xid/79\n  healthd explain nvlink5/149:4\n  healthd explain mount\n",
    ),
    "list": Command(
        _list_arguments, _list, "The checks: what they look at, how often they run, how long they may take."
    ),
}
