"""`healthd repair`: show the step that this node needs, order or stop the repair, and show earlier faults."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from healthd.cli import flags
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, as_json, page, write_error, write_output

if TYPE_CHECKING:
    from healthd.agent.repair.history import StepStage

NEEDS_STEP, NEEDS_PERSON = 1, 2


def _repair_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="show the step and its requirements (the default); no step is taken"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    flags.add_client_flags(parser)


def _repair(args: argparse.Namespace) -> int:
    from healthd.agent.control import protocol
    from healthd.agent.reporting.repair import is_step_begun, requirement_rows, status_lines
    from healthd.cli.control import send

    document = send(args, protocol.simple_request(protocol.STATUS)).get("status", {})
    repair = document.get("repair")
    if repair is None:
        file = args.config or flags.DEFAULT_FILE
        raise Stop(
            f'healthd repair: off. Set mode = "advise" in [repair] in {file}, then run: healthd reload',
            REFUSED,
        )
    step = repair["step"] or ("person" if repair["has_given_up"] else None)
    status = {None: OK, "person": NEEDS_PERSON}.get(step, NEEDS_STEP)
    needs_step = status == NEEDS_STEP and not is_step_begun(repair)
    found = _requirements(args, document) if needs_step else []
    if args.json:
        return write_output(as_json({**repair, "requirements": found}), status)
    if step is None and repair["attempt"] is None:
        return write_output(f"{document['node']}: no repair is needed\n", status)
    paper = page()
    first, *others = status_lines(repair)
    lines = paper.wrap(f"{document['node']}: {first}")
    lines += [line for sentence in others for line in paper.wrap(sentence, "  ")]
    if needs_step:
        lines += ["", *paper.table(("required", "now"), requirement_rows(repair, found))]
    return write_output("\n".join(lines) + "\n", status)


def _requirements(args: argparse.Namespace, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the requirements in Slurm, on this node and of the step, read now."""
    from healthd.agent.repair.dry_run import read_requirements
    from healthd.agent.repair.journal import Request
    from healthd.common.model import Gpu, RepairStep

    with flags.settings_errors_as_usage():
        settings = flags.load_settings(args)[0].settings
    repair, evidence = document["repair"], document.get("evidence") or {}
    request = Request(
        "",
        settings.state_dir,
        node=settings.node_name,
        step=RepairStep(repair["step"]),
        reason="healthd",  # of the command, which is not run
        parts=tuple(repair["parts"]),
        gpus=tuple(Gpu(gpu["pci"], gpu["index"]) for gpu in document["inventory"]["gpus"]),
        command_timeout_seconds=settings.slurm.command_timeout_seconds,
        root=settings.root,
        settings=settings.repair,
    )
    found = read_requirements(request, evidence.get("stuck_pids", ()))
    return [{"name": r.name, "text": r.text, "met": r.met, "problem": r.problem} for r in found]


def _plain_arguments(parser: Parser) -> None:
    flags.add_client_flags(parser)


def _now(args: argparse.Namespace) -> int:
    from healthd.agent.control import protocol
    from healthd.cli.control import send

    return write_output(send(args, protocol.simple_request(protocol.REPAIR_NOW))["done"] + "\n")


def _stop(args: argparse.Namespace) -> int:
    from healthd.agent.control import protocol
    from healthd.cli.control import send

    return write_output(send(args, protocol.simple_request(protocol.REPAIR_STOP))["done"] + "\n")


def _history_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.add_argument(
        "--state-dir", metavar="DIR", help="directory with this node's stream (default: from the settings)"
    )
    flags.add_config_flag(parser)


def _history(args: argparse.Namespace) -> int:
    from healthd.agent.repair.history import NAMES, episode_json, episodes, step_json, steps
    from healthd.common.page import date
    from healthd.events import merge, reader

    tally = reader.Tally()
    streams = reader.find([flags.state_dir(args)], tally)
    events = list(merge.merged(streams, reader.Cursor(), tally, lambda event: event.fields.get("event") in NAMES))
    found, taken = episodes(events), steps(events)
    status = UNKNOWN if tally.problems else OK
    for sentence in tally.problems:
        write_error(f"healthd repair history: {sentence}")
    if args.json:
        history = {"episodes": [*map(episode_json, found)], "steps": [*map(step_json, taken)]}
        return write_output(as_json({"time": time.time(), **history}), status)
    if not found and tally.problems:
        return status
    if not found:
        return write_output("no fault has drained this node\n", status)
    rows = [
        (
            date(e.opened_at),
            f"{e.code} {e.subject}".strip(),
            e.advised.replace("_", " ") or "-",
            date(e.ended_at) if e.ended_at else "open",
            e.ended_by.value if e.ended_by else "-",
            date(e.returned_at) if e.returned_at else "-",
        )
        for e in found
    ]
    head = ("began", "fault", "advised step", "ended", "ended by", "returned")
    lines = page().table(head, rows)
    if taken:
        step_rows = [(date(s.at), s.step.replace("_", " "), s.id or "-", _result_text(s)) for s in taken]
        lines += ["", *page().table(("time", "step by healthd", "id", "result"), step_rows)]
    return write_output("\n".join(lines) + "\n", status)


def _result_text(step: StepStage) -> str:
    text = step.stage.replace("_", " ") if step.was_taken else "could not be taken"
    return f"{text}: {step.problem}" if step.problem else text


# --- run


def _run_arguments(parser: Parser) -> None:
    flags.add_client_flags(parser)


def _run(args: argparse.Namespace) -> int:
    import logging
    import sys

    from healthd.agent.evidence.programs import become_subreaper
    from healthd.agent.repair.executor import serve_requests
    from healthd.common.ownership import Untrusted

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="healthd: %(message)s")
    become_subreaper()
    runtime_dir = flags.runtime_dir(args)
    try:
        serve_requests(runtime_dir)
    except Untrusted as error:
        raise Stop(f"healthd repair run: {error.with_context(runtime_dir, 'runtime_dir')}", UNKNOWN) from None
    except OSError as error:
        raise Stop(f"healthd repair run: {error.filename}: {error.strerror}", UNKNOWN) from None
    return OK


COMMANDS = {
    "repair": Command(
        _repair_arguments,
        _repair,
        "Show the step that would repair this drained node, and whether each requirement for it is met. This command "
        "takes no step. docs/repair.md describes the steps and repair.mode.\n"
        "Exit status: 0 no repair is needed, 1 the node needs a step, or repair is off, 2 the node needs a person, "
        "3 the daemon does not answer, 64 usage error.",
        "  healthd repair --dry-run\n  healthd repair --json | jq .step\n",
    ),
    "repair now": Command(
        _plain_arguments,
        _now,
        'Repair this drained node now, also with repair.mode = "advise". healthd does not wait for the evidence or for '
        "a day between equal steps, but waits until the node is drained and idle. All protections of jobs apply. Only "
        "root may use this command.\n"
        "Exit status: 0 ordered, 1 refused, 3 the daemon does not answer, 64 usage error.",
        "  healthd repair --dry-run\n  healthd repair now\n",
    ),
    "repair stop": Command(
        _plain_arguments,
        _stop,
        "Stop the repair of this node until its drain ends. A step that has begun continues. Only root may use "
        "this command.\n"
        "Exit status: 0 stopped, 1 refused, 3 the daemon does not answer, 64 usage error.",
        "  healthd repair stop\n",
    ),
    "repair history": Command(
        _history_arguments,
        _history,
        "Show the faults that drained this node, with the advised step, what ended each fault, and whether it returned "
        "within 28 days. Also show the steps that healthd took, and their results.\n"
        "Exit status: 0 done, 3 a file or directory cannot be read, 64 usage error.",
        "  healthd repair history\n",
    ),
    "repair run": Command(
        _run_arguments,
        _run,
        "Take the repair step that the daemon has requested. healthd-repair.service runs this command; do not run it "
        "by hand. Without a request, it does nothing.\n"
        "Exit status: 0 done, 3 a file or directory cannot be used, 64 usage error.",
    ),
}
