"""`healthd scan`: find faults in a kernel log from any machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from healthd.cli.flags import DEFAULT_FILE, Command, Parser, settings_errors_as_usage
from healthd.cli.terminal import HEALTH_STATUS, UNKNOWN, page, write_error, write_output, write_stream

if TYPE_CHECKING:
    from healthd.common.model import Finding, Inventory, KernelEvent
    from healthd.scan.findings import Judged
    from healthd.scan.lines import Block, Tally


def _scan_arguments(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="log file, may be .gz, .xz or .bz2; -: standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object per event and line (docs/json.md)")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"settings with [kernel_log.patterns] (default: {DEFAULT_FILE}, if it exists)",
    )
    parser.add_argument("--unknown", action="store_true", help="list lines from known drivers that no rule recognises")


def _scan(args: argparse.Namespace) -> int:
    import gc
    import itertools
    import time
    from contextlib import closing

    from healthd.common.model import Severity
    from healthd.scan import log_file
    from healthd.scan.events import merge_messages
    from healthd.scan.findings import event_line, judge
    from healthd.scan.lines import Tally
    from healthd.scan.messages import messages

    # Only waiting events have reference cycles, and those cycles disappear with the events. A search for other cycles
    # among a million messages would take a tenth of the time.
    gc.freeze()
    gc.set_threshold(100_000)
    _use_patterns(args.config)
    tally = Tally()
    problem: list[str] = []
    worst = Severity.INFO

    def watched() -> Iterator[Judged]:
        nonlocal worst
        for judgement in judge(merge_messages(parsed), correlate_all()):
            if judgement.meaning.severity > worst:
                worst = judgement.meaning.severity
            yield judgement

    name = "standard input" if args.file == "-" else args.file
    with closing(messages(_until_damaged(log_file.blocks(args.file), problem), time.time(), tally)) as parsed:
        if args.json:
            write_stream(
                itertools.chain((event_line(judgement) for judgement in watched()), _unrecognised(tally, args.unknown))
            )
        else:
            from healthd.scan import table as scan_table

            found = scan_table.summary(watched())
            if tally.kernel:
                write_output(scan_table.table(found, name, tally, page(), unknown=args.unknown))
    status = HEALTH_STATUS[{Severity.INFO: "healthy", Severity.WARNING: "warning"}.get(worst, "unhealthy")]
    if problem:
        return write_error(f"healthd scan: {problem[0]}", status or UNKNOWN)
    if not tally.kernel:
        return write_error(f"healthd scan: {name}: {_no_kernel_log(tally)}", UNKNOWN)
    return status


def _use_patterns(path: str | None) -> None:
    """Use the site's patterns, as the daemon does.

    If the default file cannot be read, only print a note: scan accepts logs from any machine, and its users may not be
    allowed to read this machine's settings.
    """
    import os

    from healthd.agent.kernel_log.parse import use_patterns
    from healthd.agent.settings.config import ConfigError, kernel_log_config
    from healthd.agent.settings.settings_file import read_file

    if path is None and not os.path.exists(DEFAULT_FILE):
        return
    with settings_errors_as_usage():
        try:
            patterns = kernel_log_config(read_file(path or DEFAULT_FILE, required=True), path or DEFAULT_FILE).patterns
        except ConfigError as error:
            if path is not None:
                raise
            write_error(f"healthd scan: note: scanning without the site's patterns: {error}")
            return
    use_patterns(patterns)


def _unrecognised(tally: Tally, each: bool) -> Iterator[str]:
    """Yield lines from known drivers that no rule recognises, as JSON, with one object per text or per driver.

    The counts are complete only after all events have been read.
    """
    from healthd.scan.findings import unrecognised_line

    remaining = dict(tally.drivers)
    for (driver, text), (line, count) in sorted(tally.texts.items(), key=lambda item: item[1]):
        if each:
            yield unrecognised_line(driver, text, line, count)
        elif driver in remaining:
            yield unrecognised_line(driver, text, line, remaining.pop(driver))


def _until_damaged(blocks: Iterator[Block], problem: list[str]) -> Iterator[Block]:
    """Yield the blocks up to the first error. The error is appended to `problem`."""
    from healthd.scan.log_file import LogError

    try:
        yield from blocks
    except LogError as error:
        problem.append(str(error))


def _no_kernel_log(tally: Tally) -> str:
    if not tally.lines:
        return "is empty"
    if tally.binary:
        return "is not text"
    return f"no line has a kernel prefix (dmesg, syslog, journalctl); lines read: {tally.lines:,}"


def correlate_all() -> Callable[[Sequence[KernelEvent], Inventory], list[Finding]]:
    """Return a function that evaluates kernel events with all built-in checks at their default settings."""
    from healthd.agent.conditions import intake
    from healthd.agent.settings import registry
    from healthd.common.guard import KERNEL_LOG, drop

    checks = [(check, check.config()) for check in registry.built_in_checks().values() if check.reads_kernel_log]

    def correlate(events: Sequence[KernelEvent], node: Inventory) -> list[Finding]:
        every: list[Finding] = []
        for check, config in checks:
            found, failed = intake.evaluate_check(check, config, events, node)
            every += found
            for event, error in failed:
                drop(KERNEL_LOG, error, event.text if event else f"check {check.name}")
        return every

    return correlate


COMMANDS = {
    "scan": Command(
        _scan_arguments,
        _scan,
        "Find faults in a kernel log from any machine. Formats: dmesg, syslog, journalctl (also -o json), a dump of "
        "/dev/kmsg, a serial console, pdsh. Incidents are in chronological order, and each begins with its first "
        "cause. The machine's configuration is unknown, so faults that depend on it (is this the root file system?) "
        "are only warnings.\n"
        "Exit status: 0 no fault, 1 warning, 2 degraded or critical, 3 not a kernel log or unreadable, 64 usage error.",
        "  healthd scan /var/log/kern.log.2.gz\n"
        "  ssh node17 dmesg -T | healthd scan -\n"
        "  healthd scan --json console.log | jq 'select(.severity == \"critical\")'\n",
    ),
}
