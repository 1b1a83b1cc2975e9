"""The command line: `healthd COMMAND ...`. Each command loads only what it uses: the module of its family, which
loads the rest late.

Exit status: 0 done or healthy, 1 warning or refused, 2 degraded or critical, 3 unknown or no answer, 64 wrong use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import INTERRUPTED, Stop, complain, prepare, say

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
# command -> the module of its family, whose COMMANDS has the rest.
FAMILIES = {
    "run": "run",
    "check": "check",
    "record": "check",
    "scan": "scan",
    "status": "control",
    "ack": "control",
    "repaired": "control",
    "pause": "control",
    "resume-checks": "control",
    "hook epilog": "hook",
    "hook healthcheck": "hook",
    "config check": "config",
    "config show": "config",
    "baseline": "baseline_file",
    "explain": "explain",
    "list": "explain",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. An error is one sentence on standard error."""
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
    if name not in FAMILIES:
        from healthd.convert import nearest

        hint = "; write the command first, then its options" if name.startswith("-") else nearest(name, FAMILIES)
        raise Stop(f'healthd: there is no command "{name}"{hint}')
    chosen = command(name)
    parser = Parser(name, chosen.description, chosen.examples)
    chosen.flags(parser)
    if {"-h", "--help"} & set(rest):
        return say(parser.format_help())
    return chosen.run(parser.parse_intermixed_args(rest))


def command(name: str) -> Command:
    """Loads the command's family."""
    commands: dict[str, Command] = import_module(f"healthd.cli.{FAMILIES[name]}").COMMANDS
    return commands[name]


def _commands_of(first: str) -> str:
    usages = {"config check": "config check FILE"}
    mine = [name for name in FAMILIES if name.startswith(f"{first} ")]
    heads = [f"healthd {usages.get(name, name)}" for name in mine]
    wide = max(map(len, heads))
    lines = [f"{head:{wide}}  {command(name).description}" for head, name in zip(heads, mine, strict=True)]
    return "usage: " + "\n       ".join(lines) + "\n"
