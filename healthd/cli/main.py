"""Entry point of `healthd COMMAND ...`.

Each command imports only the module of its family, which imports other modules when they are needed.

Exit status: 0 success or healthy, 1 warning or refused, 2 degraded or critical, 3 unknown or no answer, 64 usage error.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import INTERRUPTED, Stop, prepare, usage, write_error, write_output

GROUPS = ("config", "evidence", "fleet", "hook", "hooks")  # commands with subcommands

HELP = """\
healthd: health daemon for GPU nodes that run Slurm

usage: healthd COMMAND [...]        healthd COMMAND --help for its options

inspect
  check [NAME ...]            run the checks once, without the daemon
  record [FILE]               run the checks and save everything they read
  scan FILE|-                 find faults in a kernel log from any machine
  status                      show open conditions, decisions and Slurm state
  events [FILE|DIR ...]       show what healthd found and did on this node
  evidence list               list the saved evidence of faults
  evidence show [ID]          show its faults, serial numbers and programs
  evidence path [ID]          print the file's path, or copy it for a vendor
  explain CODE                explain a code: what it means and what to do
  list                        list the checks and their intervals
  repair --dry-run            show the step that would repair this node
  repair history              show earlier faults and what ended them
  failslow FILE|DIR           find the worker that slows down a job
  failslow period FILE        find the duration of an iteration
  failslow plan FILE|DIR      find out which remedy is worth its cost, and when
  failslow split              divide micro-batches by each group's speed
  validate                    measure this node's GPUs, links and ports

control the running daemon
  ack CODE [PART] --for 2h --why TEXT
                              acknowledge a condition: no drain until it expires
  unack CODE [PART]           end an acknowledgement early
  repaired CODE [PART]        report a repair: check again, resume if all pass
  repair now                  order the repair of this drained node
  repair stop                 stop the repair of this drained node
  pause --for 30m --why TEXT  change nothing in Slurm for a while
  unpause                     end the pause
  failslow pause --for 2h --why TEXT
                              report no new slow jobs for a while
  failslow unpause            report slow jobs again
  reload                      reload the settings

called by Slurm
  hook epilog                 check the GPUs after a job
  hook healthcheck            print the decision for HealthCheckProgram

called for events (docs/hooks.md)
  hooks run                   run the hooks for new events
  hooks test HOOK             run a configured hook with a sample event

called by systemd
  evidence collect            save the evidence that the daemon has requested
  repair run                  take the repair step that the daemon has requested

set up
  run                         run the daemon in the foreground
  config check [FILE]         print all errors in the settings
  config show                 print all settings and their sources
  baseline                    record this node's hardware for the checks
  doctor                      show what works here, what does not, and fixes
  completion bash|zsh|fish    print the completion script for your shell

fleet, on the central host (extra "fleet": docs/deploy.md)
  fleet ingest --out DB ...   load events and Slurm accounting into a store
  fleet prune                 delete data older than a date
  fleet status                show drained and broken nodes, from Prometheus;
                              needs no extra
  fleet query [NAME|FILE.sql] query the store: jobs by state, faults seen near
                              failures, unobserved periods, ...
  fleet states                show how jobs ended and how GPU time was used
  fleet goodput               show the work lost to node failures
  fleet availability          show how long nodes were up or out of service
  fleet nccl DIR              find the rank that blocks a stuck job
  fleet attribution           show likely causes of failed jobs
  fleet rate                  show how often nodes make large jobs fail
  fleet ettr                  show the share of time with progress
  fleet lemons                show nodes that keep failing
  fleet report --out DIR      write all answers to one page
  fleet alarms                show completed jobs that saw a failing check
  fleet checks                show which check detects a fault first, and the
                              time until the node is drained
  fleet links                 show link flaps, errors and lost speed
  fleet repairs               show how often a reset or a reboot helped
  fleet failslow              show the cost of slow jobs by node
  fleet compare A B           compare two periods or partitions

examples
  healthd check                        # exit status: 0 healthy, 1 warning,
  healthd check --json | jq .health    #   2 degraded or critical, 3 unknown
  healthd check --fake-nvml dgx-h100   # simulate a DGX H100; needs no GPU
  healthd check --replay gpu-042.rec   # evaluate a recording from another node
  healthd scan /var/log/kern.log.1.gz  # incidents in chronological order
  healthd events --since 2d            # findings and actions since two days ago
  healthd explain gpu_xid/79
  healthd failslow job.csv --series worker --value step_time
  healthd repaired gpu_xid/79 0000:1b:00.0
  healthd run --mode observe --runtime-dir /tmp/h --state-dir /tmp/h/state

settings: /etc/healthd/healthd.toml         manual: man healthd, docs/
"""
# Maps each command to its family's module, which has a COMMANDS table.
FAMILIES = {
    "run": "run",
    "check": "check",
    "record": "check",
    "scan": "scan",
    "events": "events",
    "status": "control",
    "ack": "control",
    "unack": "control",
    "repaired": "control",
    "pause": "control",
    "reload": "control",
    "unpause": "control",
    "evidence list": "evidence",
    "evidence show": "evidence",
    "evidence path": "evidence",
    "evidence collect": "evidence",
    "hook epilog": "hook",
    "hook healthcheck": "hook",
    "hooks run": "hooks",
    "hooks test": "hooks",
    "config check": "config",
    "config show": "config",
    "baseline": "baseline",
    "doctor": "doctor",
    "completion": "completion",
    "fleet ingest": "fleet.ingest",
    "fleet prune": "fleet.ingest",
    "fleet status": "fleet.status",
    "fleet query": "fleet.query",
    "fleet states": "fleet.answers",
    "fleet goodput": "fleet.answers",
    "fleet availability": "fleet.answers",
    "fleet nccl": "fleet.answers",
    "fleet attribution": "fleet.answers",
    "fleet rate": "fleet.answers",
    "fleet ettr": "fleet.answers",
    "fleet lemons": "fleet.lemons",
    "fleet alarms": "fleet.answers",
    "fleet checks": "fleet.answers",
    "fleet links": "fleet.answers",
    "fleet repairs": "fleet.answers",
    "fleet failslow": "fleet.answers",
    "fleet compare": "fleet.compare",
    "fleet report": "fleet.report",
    "explain": "explain",
    "list": "explain",
    "failslow": "failslow.analyse",
    "failslow period": "failslow.period",
    "failslow plan": "failslow.plan",
    "failslow split": "failslow.plan",
    "validate": "validate",
    "repair": "repair",
    "repair now": "repair",
    "repair stop": "repair",
    "repair history": "repair",
    "repair run": "repair",
    "failslow pause": "control",
    "failslow unpause": "control",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. An error is printed as one sentence on standard error.

    If `argv` is None, use this process's arguments, and assume that the process exits afterwards.
    """
    if argv is not None:
        return _main(argv)
    status = _main(sys.argv[1:])
    if "duckdb" not in sys.modules:  # otherwise duckdb prints its remaining messages on standard error
        gc.freeze()  # saves 13 to 18 % of a command's time: no garbage collection at exit
    return status


def _main(arguments: Sequence[str]) -> int:
    prepare()
    try:
        if "_ARGCOMPLETE" in os.environ:
            status: int = import_module("healthd.cli.completion").complete()
            return status
        return _dispatch(list(arguments))
    except Stop as stop:
        return write_error(str(stop), stop.status)
    except KeyboardInterrupt:
        return INTERRUPTED


def _version() -> str:
    """Return the version. If healthd was installed by a distribution package, add the package version."""
    from healthd import __version__

    try:
        with open(f"{sys.prefix}/share/healthd/package-version", encoding="utf-8") as file:
            return f"{__version__} (package {file.read(100).strip()})"
    except OSError:
        return __version__


def _dispatch(arguments: list[str]) -> int:
    while arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments:
        return usage(HELP)
    if arguments[0] in ("-h", "--help"):
        return write_output(HELP)
    if arguments[0] in ("-V", "--version"):
        return write_output(f"healthd {_version()}\n")
    count = 2 if arguments[0] in GROUPS or " ".join(arguments[:2]) in FAMILIES else 1
    name, remaining = " ".join(arguments[:count]), arguments[count:]
    if arguments[0] in GROUPS and len(arguments) == 1:
        return usage(_group_help(arguments[0]))
    if arguments[0] in GROUPS and arguments[1] in ("-h", "--help"):
        return write_output(_group_help(arguments[0]))
    if name not in FAMILIES:
        raise Stop(f'healthd: unknown command "{name}"{_hint(name)}')
    chosen = command(name)
    parser = Parser(name, chosen.description, chosen.examples)
    chosen.flags(parser)
    if {"-h", "--help"} & set(remaining):
        return write_output(parser.format_help())
    return chosen.run(parser.parse_intermixed_args(remaining))


def command(name: str) -> Command:
    """Import the command's family and return the command."""
    commands: dict[str, Command] = import_module(f"healthd.cli.{FAMILIES[name]}").COMMANDS
    return commands[name]


def _hint(name: str) -> str:
    from healthd.common.codec import spelling_hint

    if name.startswith("-"):
        return "; put the command before its options"
    first = name.partition(" ")[0]
    if first in GROUPS:
        return spelling_hint(name, (family for family in FAMILIES if family.startswith(f"{first} ")))
    hint = spelling_hint(name, {*FAMILIES, *GROUPS})
    return hint if "mean" in hint else "; healthd --help lists all commands"


def _group_help(first: str) -> str:
    """Return the help for a group, in 80 columns: each command's summary and first example."""
    import textwrap

    subcommands = {name: command(name) for name in FAMILIES if name.startswith(f"{first} ")}
    width = max(map(len, subcommands))
    lines = [f"usage: healthd {first} COMMAND [...]", f"       healthd {first} COMMAND --help for its options", ""]
    for name, subcommand in subcommands.items():
        start = f"  {name.ljust(width)}  "
        lines += textwrap.wrap(subcommand.summary, 80, initial_indent=start, subsequent_indent=" " * len(start))
    examples = [subcommand.examples.splitlines()[0] for subcommand in subcommands.values() if subcommand.examples]
    return "\n".join([*lines, *(["", "examples:", *examples] if examples else [])]) + "\n"
