"""Whether healthd can read and change its node in Slurm. Nothing is changed: the right to drain is tried on a node that
does not exist, which slurmctld only looks for once it has found that the user may change nodes
(src/slurmctld/proc_req.c: _slurm_rpc_update_node() asks validate_super_user() first).
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator

from healthd.agent.conditions.impairments import PROGRAMS, missing_programs, needs_slurm
from healthd.agent.doctor.result import Line, State, absent, works
from healthd.agent.settings.config import Settings
from healthd.agent.slurm import blocking
from healthd.common.errors import HealthdError
from healthd.common.slurm import commands
from healthd.common.slurm.commands import CommandResult
from healthd.common.slurm.output import describe_unread, parse_node
from healthd.common.text import regex

NO_NODE = "healthd-doctor-asks"  # no node is called so
MUNGE = "munge -n | unmunge"
SECONDS = 10.0  # for one command
DOCUMENT = "docs/prolog-epilog.md"

Run = Callable[[tuple[str, ...]], CommandResult]


def run(argv: tuple[str, ...]) -> CommandResult:
    """Run a command as the daemon does. Raises TimeoutError after SECONDS."""
    result = blocking.run(commands.Command(argv, SECONDS))
    if result.status is None:
        raise TimeoutError(f"{argv[0]}: did not end within {SECONDS:g} s")
    return result


def lines(settings: Settings, run: Run = run, which: Callable[[str], str | None] = shutil.which) -> Iterator[Line]:
    """What is missing is only limited where the mode changes nothing."""
    bad = State.FAILS if needs_slurm(settings.mode) else State.LIMITED
    missing = missing_programs(which)
    if len(missing) == len(PROGRAMS) and not needs_slurm(settings.mode):
        yield absent("Slurm", "no scontrol here, and mode observe needs none")
        return
    if missing:
        where = "systemctl edit healthd: [Service] Environment=PATH=/opt/slurm/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        fix = ("install slurm-client (Debian, Ubuntu) or slurm (EL); where it is installed but not on PATH:", where)
        yield Line("Slurm", bad, f"no {', '.join(missing)} on PATH", fix)
        return
    config = _asked(run, commands.config())
    settled = config.text if not isinstance(config, str) and config.status == 0 else ""
    yield from _munge(run, which, settled, bad)
    if isinstance(config, str) or config.status != 0:
        why = config if isinstance(config, str) else _said(config)
        yield Line(
            "Slurm", bad, f"slurmctld does not answer: {why}", ("scontrol ping", "systemctl status slurmctld (there)")
        )
        return
    yield _node(settings, run, bad)
    yield _right(run, bad)
    yield _hooks(settled, settings)


def _asked(run: Run, argv: tuple[str, ...]) -> CommandResult | str:
    """The answer, or in a sentence why there is none."""
    try:
        return run(argv)
    except TimeoutError as error:
        return str(error)


def _said(ran: CommandResult) -> str:
    lines = (ran.stderr.strip() or ran.text.strip()).splitlines()
    return lines[0][:200] if lines else f"exit status {ran.status}"


def _munge(run: Run, which: Callable[[str], str | None], config: str, bad: State) -> Iterator[Line]:
    if config and setting(config, "AuthType") != "auth/munge":
        yield absent("munge", f"Slurm has {setting(config, 'AuthType')}")
        return
    if which("munge") is None or which("unmunge") is None:
        yield absent("munge", "no munge and unmunge here")
        return
    socket = regex(r"socket=([^,\s]+)").search(setting(config, "AuthInfo"))
    option = f" -S '{socket[1]}'" if socket and "'" not in socket[1] else ""
    ran = _asked(run, ("sh", "-c", f"munge -n{option} | unmunge{option}"))
    if isinstance(ran, str):
        yield Line("munge", bad, f"no credential: {ran}", ("systemctl restart munge",))
    elif ran.status != 0:
        fix = ("systemctl restart munge", "timedatectl (a wrong clock makes credentials expire)", MUNGE)
        yield Line("munge", bad, f"no valid credential: {_said(ran)}", fix)
    else:
        yield works("munge", "a credential of this node is valid here")


def _node(settings: Settings, run: Run, bad: State) -> Line:
    ran = _asked(run, commands.node(settings.node_name))
    try:
        if isinstance(ran, str) or ran.status != 0:
            return Line("Slurm node", bad, f"sinfo: {ran if isinstance(ran, str) else _said(ran)}", ("sinfo -N",))
        node = parse_node(ran.stdout, settings.node_name)
    except HealthdError as error:
        fix = ("sinfo -N", 'node_name = "..." in healthd.toml')
        return Line("Slurm node", bad, f"this node is not known by the name {settings.node_name}: {error}", fix)
    state = f"{settings.node_name} is {'+'.join(sorted(node.flags)).lower()}"
    if node.unread_rows:
        unread = f"{describe_unread(node.unread_rows)}: a drain cannot be counted against the fleet limit"
        return Line("Slurm node", State.LIMITED, f"{state}; {unread}", (shlex.join(commands.node(settings.node_name)),))
    return works("Slurm node", f"{state}: {node.reason}" if node.reason else state)


def _right(run: Run, bad: State) -> Line:
    ran = _asked(run, ("scontrol", "update", f"NodeName={NO_NODE}", "State=DRAIN", "Reason=healthd doctor"))
    said = ran if isinstance(ran, str) else _said(ran)
    if "Invalid node name" in said:
        return works("Slurm rights", f"user {os.geteuid()} may drain and resume (tried on a node that does not exist)")
    if "Invalid user id" in said or "denied" in said.lower():
        message = f"user {os.geteuid()} may not change nodes: {said}"
        return Line(
            "Slurm rights", bad, message, ("run it as root or SlurmUser; operators may only requeue (docs/slurm.md)",)
        )
    return Line("Slurm rights", bad, f"whether nodes may be changed is not known: {said}", ("scontrol ping",))


def _hooks(config: str, settings: Settings) -> Line:
    """Whether Slurm calls us, as far as the names of its programs tell."""
    names = ("Prolog", "Epilog", "HealthCheckProgram")
    set_up = {name: value for name in names if (value := setting(config, name)) not in ("", "(null)")}
    if not set_up:
        message = "slurm.conf names no prolog, epilog or health check: jobs start on a node that is about to be drained"
        return Line("Slurm hooks", State.LIMITED, message, (DOCUMENT,))
    said = ", ".join(f"{name}={value}" for name, value in set_up.items())
    return works("Slurm hooks", f"slurm.conf has {said}; {DOCUMENT} says what they should call")


def setting(config: str, name: str) -> str:
    """The value of a setting in what `scontrol show config` prints, "" if it is not there. Array-like settings of newer
    versions ("Epilog[0] = /a") count as the plain one."""
    found = regex(rf"(?m)^{name}(?:\[0\])?\s*=\s*(.*?)\s*$").search(config)
    return str(found[1]) if found else ""
