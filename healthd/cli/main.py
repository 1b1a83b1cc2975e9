"""The command line: `healthd COMMAND ...`. Each command loads only what it uses: the module of its family, which
loads the rest late.

Exit status: 0 done or healthy, 1 warning or refused, 2 degraded or critical, 3 unknown or no answer, 64 wrong use.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module

from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import INTERRUPTED, Stop, complain, prepare, say, usage

TWO_WORDS = ("config", "fleet", "hook")  # commands that have commands

HELP = """\
healthd: is this GPU node well, and may Slurm use it?

usage: healthd COMMAND [...]        healthd COMMAND --help says more

look
  check [NAME ...]            run the checks once, now, without the daemon
  record [FILE]               the same, and keep what they read, for a colleague
  scan FILE|-                 what a kernel log tells, also of another machine
  status                      what the daemon believes, and wants of Slurm
  events [FILE|DIR ...]       what happened on this node, as it was kept
  explain CODE                what a code means, why it matters, and what to do
  list                        the checks: what they look at, how often
  failslow FILE|DIR           which worker makes a job slow, by its iterations
  failslow period FILE        how long an iteration is, by its calls
  failslow plan FILE|DIR      which remedy is worth its cost, and when
  failslow split              micro-batches by how fast each group is
  validate                    measure this node's GPUs, links and ports, now

tell the running daemon
  ack CODE [PART] --for 2h --why TEXT
                              acknowledge a condition: no drain until it expires
  unack CODE [PART]           end an acknowledgement before its time
  repaired CODE [PART]        it is repaired: look again, resume if all is well
  pause --for 30m --why TEXT  leave Slurm alone for a while (driver upgrade)
  resume-checks               the pause is over
  failslow pause --for 2h --why TEXT
                              say nothing new of slow jobs, so long
  failslow resume-detection   slow jobs are told again
  reload                      read the settings again, or say why not

what Slurm calls
  hook epilog                 a job ended: look at the GPUs now
  hook healthcheck            for HealthCheckProgram: what was decided

set up
  run                         the daemon, in the foreground, as systemd does
  config check [FILE]         everything that is wrong with a settings file
  config show                 every setting that holds, and where it comes from
  baseline                    what this node has, for the checks to hold it to
  doctor                      what works here, what does not, and what mends it
  completion bash|zsh|fish    for your shell: what TAB offers behind healthd

the fleet, at the centre (with the extra "fleet": README.md)
  fleet ingest --out DB ...   what nodes told and Slurm accounted, in one store
  fleet prune                 forget what is older than a date
  fleet status                all nodes now, as Prometheus sees them: who is
                              drained, why, since when; it needs no extra
  fleet query [NAME|FILE.sql] ask the store: jobs by state, what was seen with
                              failures, what was not observed, ...
  fleet states                what became of the jobs and of the GPUs' time
  fleet goodput               the work that was lost when nodes failed
  fleet availability          how long nodes were up, out and by whom, or unseen
  fleet nccl DIR              which rank holds up a stuck job
  fleet attribution           what ended the jobs that failed
  fleet rate                  how often large jobs fail by their nodes
  fleet ettr                  how much progress that leaves them
  fleet lemons                which nodes keep failing and should be taken out
  fleet report --out DIR      all answers as one page, which fetches nothing
  fleet alarms                completed jobs that saw a failing check
  fleet checks                which check is the first evidence, how long until
                              the drain
  fleet links                 flaps, errors and lost speed, by port and switch
  fleet failslow              what slow jobs cost, on which nodes, how soon told
  fleet compare A B           what differs between two periods or partitions

examples
  healthd check                        # exit status: 0 healthy, 1 warning,
  healthd check --json | jq .health    #   2 degraded or critical, 3 unknown
  healthd check --fake-nvml dgx-h100   # without a GPU: a fake DGX H100
  healthd check --replay gpu-042.rec   # another node, as it was when recorded
  healthd scan /var/log/kern.log.1.gz  # what happened, first cause on top
  healthd events --since 2d            # what was found and done, and when
  healthd explain gpu_xid/79
  healthd failslow job.csv --series worker --value step_time
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
    "events": "events",
    "status": "control",
    "ack": "control",
    "unack": "control",
    "repaired": "control",
    "pause": "control",
    "reload": "control",
    "resume-checks": "control",
    "hook epilog": "hook",
    "hook healthcheck": "hook",
    "config check": "config",
    "config show": "config",
    "baseline": "baseline_file",
    "doctor": "doctor",
    "completion": "completion",
    "fleet ingest": "fleet",
    "fleet prune": "fleet",
    "fleet status": "fleet_status",
    "fleet query": "fleet_query",
    "fleet states": "fleet_answers",
    "fleet goodput": "fleet_answers",
    "fleet availability": "fleet_answers",
    "fleet nccl": "fleet_answers",
    "fleet attribution": "fleet_answers",
    "fleet rate": "fleet_answers",
    "fleet ettr": "fleet_answers",
    "fleet lemons": "fleet_answers",
    "fleet alarms": "fleet_answers",
    "fleet checks": "fleet_answers",
    "fleet links": "fleet_answers",
    "fleet failslow": "fleet_answers",
    "fleet compare": "fleet_compare",
    "fleet report": "fleet_report",
    "explain": "explain",
    "list": "listing",
    "failslow": "failslow",
    "failslow period": "failslow_period",
    "failslow plan": "failslow_plan",
    "failslow split": "failslow_plan",
    "validate": "validate",
    "failslow pause": "control",
    "failslow resume-detection": "control",
}


# Objects between two looks for garbage, of a command: at Python's 700 they are a tenth of what its imports cost.
GARBAGE = 50_000


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. An error is one sentence on standard error. None: the words of this process, which ends
    with it."""
    if argv is not None:
        return _main(argv)
    words = sys.argv[1:]
    if words[:1] != ["run"]:  # a daemon stays
        gc.set_threshold(GARBAGE)
    status = _main(words)
    if "duckdb" not in sys.modules:  # which says on standard error what is left of it then
        gc.freeze()  # Python would look through everything once more at its end, to the same end
    return status


def _main(words: Sequence[str]) -> int:
    prepare()
    try:
        return _dispatch(list(words))
    except Stop as stop:
        return complain(str(stop), stop.status)
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch(words: list[str]) -> int:
    while words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words:
        return usage(HELP)
    if words[0] in ("-h", "--help"):
        return say(HELP)
    if words[0] in ("-V", "--version"):
        from healthd import __version__

        return say(f"healthd {__version__}\n")
    count = 2 if words[0] in TWO_WORDS or " ".join(words[:2]) in FAMILIES else 1
    name, rest = " ".join(words[:count]), words[count:]
    if words[0] in TWO_WORDS and len(words) == 1:
        return usage(_commands_of(words[0]))
    if words[0] in TWO_WORDS and words[1] in ("-h", "--help"):
        return say(_commands_of(words[0]))
    if name not in FAMILIES:
        raise Stop(f'healthd: there is no command "{name}"{_hint(name)}')
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


def _hint(name: str) -> str:
    from healthd.convert import nearest

    if name.startswith("-"):
        return "; write the command first, then its options"
    first = name.partition(" ")[0]
    if first in TWO_WORDS:
        return nearest(name, (known for known in FAMILIES if known.startswith(f"{first} ")))
    hint = nearest(name, {*FAMILIES, *TWO_WORDS})
    return hint if "mean" in hint else "; healthd --help shows all"


def _commands_of(first: str) -> str:
    """The commands of a group, each with what it does, in 80 columns."""
    import textwrap

    usages = {"config check": "config check FILE"}
    mine = [name for name in FAMILIES if name.startswith(f"{first} ")]
    heads = [f"healthd {usages.get(name, name)}" for name in mine]
    wide = 7 + max(map(len, heads))
    lines = []
    for name, head in zip(mine, heads, strict=True):
        start = ("       " + head).ljust(wide) + "  "
        lines += textwrap.wrap(command(name).summary, 80, initial_indent=start, subsequent_indent=" " * len(start))
    return "usage: " + "\n".join(lines)[7:] + "\n"
