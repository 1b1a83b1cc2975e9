"""Test that healthd can read and change its node in Slurm, without changing anything.

The right to drain is tested on a node that does not exist. slurmctld checks the user's rights before it looks up the
node (src/slurmctld/proc_req.c: _slurm_rpc_update_node() calls validate_super_user() first).
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator

from healthd.agent.conditions.impairments import PROGRAMS, missing_programs, needs_slurm
from healthd.agent.doctor.result import Line, State, absent_line, ok_line
from healthd.agent.settings.config import Settings
from healthd.agent.slurm import blocking
from healthd.common.errors import HealthdError
from healthd.common.slurm import commands
from healthd.common.slurm.commands import CommandResult
from healthd.common.slurm.output import describe_unread, parse_node, parse_setting
from healthd.common.text import regex

NONEXISTENT_NODE = "healthd-doctor-asks"  # no node has this name
MUNGE = "munge -n | unmunge"
COMMAND_TIMEOUT_SECONDS = 10.0  # time limit of a command
DOCUMENT = "docs/prolog-epilog.md"

Run = Callable[[tuple[str, ...]], CommandResult]


def run(argv: tuple[str, ...]) -> CommandResult:
    """Run a command as the daemon does. Raises TimeoutError after COMMAND_TIMEOUT_SECONDS."""
    result = blocking.run(commands.Command(argv, COMMAND_TIMEOUT_SECONDS))
    if result.status is None:
        raise TimeoutError(f"{argv[0]}: did not end within {COMMAND_TIMEOUT_SECONDS:g} s")
    return result


def lines(
    settings: Settings, run: Run = run, find_program: Callable[[str], str | None] = shutil.which
) -> Iterator[Line]:
    """Yield the test results. If the mode changes nothing in Slurm, failures are only limits."""
    failure_state = State.FAILED if needs_slurm(settings.mode) else State.LIMITED
    missing = missing_programs(find_program)
    if len(missing) == len(PROGRAMS) and not needs_slurm(settings.mode):
        yield absent_line("Slurm", "no scontrol on this node; mode observe does not need it")
        return
    if missing:
        where = "systemctl edit healthd: [Service] Environment=PATH=/opt/slurm/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        fix = ("install slurm-client (Debian, Ubuntu) or slurm (EL); if it is installed but not on PATH:", where)
        yield Line("Slurm", failure_state, f"no {', '.join(missing)} on PATH", fix)
        return
    config = _run_command(run, commands.config())
    config_text = config.text if not isinstance(config, str) and config.status == 0 else ""
    yield from _munge(run, find_program, config_text, failure_state)
    if isinstance(config, str) or config.status != 0:
        why = config if isinstance(config, str) else _first_line(config)
        yield Line(
            "Slurm",
            failure_state,
            f"slurmctld does not answer: {why}",
            ("scontrol ping", "systemctl status slurmctld (on the controller)"),
        )
        return
    yield _node(settings, run, failure_state)
    yield _rights(run, failure_state)
    yield _hooks(config_text, settings)


def _run_command(run: Run, argv: tuple[str, ...]) -> CommandResult | str:
    """Return a command's result, or an error message if the command does not end."""
    try:
        return run(argv)
    except TimeoutError as error:
        return str(error)


def _first_line(result: CommandResult) -> str:
    lines = (result.stderr.strip() or result.text.strip()).splitlines()
    return lines[0][:200] if lines else f"exit status {result.status}"


def _munge(run: Run, find_program: Callable[[str], str | None], config: str, failure_state: State) -> Iterator[Line]:
    if config and parse_setting(config, "AuthType") != "auth/munge":
        yield absent_line("munge", f"Slurm has {parse_setting(config, 'AuthType')}")
        return
    if find_program("munge") is None or find_program("unmunge") is None:
        yield absent_line("munge", "no munge or unmunge on this node")
        return
    socket = regex(r"socket=([^,\s]+)").search(parse_setting(config, "AuthInfo"))
    option = f" -S '{socket[1]}'" if socket and "'" not in socket[1] else ""
    result = _run_command(run, ("sh", "-c", f"munge -n{option} | unmunge{option}"))
    if isinstance(result, str):
        yield Line("munge", failure_state, f"no credential: {result}", ("systemctl restart munge",))
    elif result.status != 0:
        fix = ("systemctl restart munge", "timedatectl (credentials expire with a wrong clock)", MUNGE)
        yield Line("munge", failure_state, f"no valid credential: {_first_line(result)}", fix)
    else:
        yield ok_line("munge", "a credential made on this node is accepted on this node")


def _node(settings: Settings, run: Run, failure_state: State) -> Line:
    result = _run_command(run, commands.node(settings.node_name))
    try:
        if isinstance(result, str) or result.status != 0:
            return Line(
                "Slurm node",
                failure_state,
                f"sinfo: {result if isinstance(result, str) else _first_line(result)}",
                ("sinfo -N",),
            )
        node = parse_node(result.stdout, settings.node_name)
    except HealthdError as error:
        fix = ("sinfo -N", 'node_name = "..." in healthd.toml')
        return Line("Slurm node", failure_state, f"Slurm has no node {settings.node_name}: {error}", fix)
    state = f"{settings.node_name} is {'+'.join(sorted(node.flags)).lower()}"
    if node.unread_rows:
        unread = f"{describe_unread(node.unread_rows)}: the fleet limit cannot be computed"
        return Line("Slurm node", State.LIMITED, f"{state}; {unread}", (shlex.join(commands.node(settings.node_name)),))
    return ok_line("Slurm node", f"{state}: {node.reason}" if node.reason else state)


def _rights(run: Run, failure_state: State) -> Line:
    result = _run_command(
        run, ("scontrol", "update", f"NodeName={NONEXISTENT_NODE}", "State=DRAIN", "Reason=healthd doctor")
    )
    output = result if isinstance(result, str) else _first_line(result)
    if "Invalid node name" in output:
        return ok_line(
            "Slurm rights", f"user {os.geteuid()} may drain and resume (tried on a node that does not exist)"
        )
    if "Invalid user id" in output or "denied" in output.lower():
        message = f"user {os.geteuid()} may not change nodes: {output}"
        return Line(
            "Slurm rights",
            failure_state,
            message,
            ("run it as root or SlurmUser; operators may only requeue (docs/slurm.md)",),
        )
    return Line(
        "Slurm rights",
        failure_state,
        f"it is unknown whether user {os.geteuid()} may change nodes: {output}",
        ("scontrol ping",),
    )


def _hooks(config: str, settings: Settings) -> Line:
    """Test that Slurm calls healthd. Only the names of the hook programs are checked."""
    names = ("Prolog", "Epilog", "HealthCheckProgram")
    set_up = {name: value for name in names if (value := parse_setting(config, name)) not in ("", "(null)")}
    if not set_up:
        message = (
            "slurm.conf has no prolog, epilog or health check: jobs can start on a node that is about to be drained"
        )
        return Line("Slurm hooks", State.LIMITED, message, (DOCUMENT,))
    hooks_text = ", ".join(f"{name}={value}" for name, value in set_up.items())
    return ok_line("Slurm hooks", f"slurm.conf has {hooks_text}; {DOCUMENT} lists the commands for them")
