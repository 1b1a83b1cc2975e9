"""`healthd validate --mndiag`: runs DCGM's diagnostic over several nodes of an NVLink domain, from this node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from healthd.common.text import printable
from healthd.validation import document as documents
from healthd.validation import programs
from healthd.validation.document import Result
from healthd.validation.measurement import Measurement, NotUnderstood, judge
from healthd.validation.programs import FinishedProgram
from healthd.validation.tool_paths import Tools
from healthd.validation.tools import mndiag


def run(hosts: Sequence[str], tools: Tools, seconds: float, stop: int) -> list[Result]:
    """Run the diagnostic until it ends, `seconds` are over or `stop` is readable. Its whole process group is ended.

    dcgmi aborts the diagnostic on all hosts when it gets SIGTERM (dcgmi/MnDiag.cpp, AbortMnDiag).
    """
    program = tools.get("dcgmi")
    if program is None:
        refused = f" ({tools.refused['dcgmi']})" if "dcgmi" in tools.refused else ""
        return _results([_not_measured(f"dcgmi was not found{refused}")])
    command = programs.Command(mndiag.command(program, hosts, seconds))
    (ended,) = programs.run([command], seconds, stop)
    return _results(measurements(ended, hosts, seconds))


def measurements(ended: FinishedProgram, hosts: Sequence[str], seconds: float) -> list[Measurement]:
    """Return the measurements of an ended dcgmi. A failure that it reports because it was stopped does not count."""
    try:
        found = mndiag.parse(ended.stdout, hosts)
    except NotUnderstood as error:
        return [_not_measured("; ".join(filter(None, (_ending(ended, seconds), str(error), _last_line(ended)))))]
    if ended.ending == "ended":
        return found
    ending = _ending(ended, seconds)
    return [
        item._replace(state="not_measured", message=f"{ending}: {item.message}"[:400])
        if item.state in ("failed", "passed")
        else item
        for item in found
    ]


def _not_measured(message: str) -> Measurement:
    return Measurement(mndiag.TEST, "", None, "", "not_measured", message[: documents.MAX_CHARACTERS], "")


def _ending(ended: FinishedProgram, seconds: float) -> str:
    hangs = ", but could not be ended" if ended.is_hanging else ""
    if ended.ending == "overdue":
        return f"dcgmi did not end within {seconds:.0f} s and was terminated{hangs}"
    if ended.ending == "stopped":
        return f"dcgmi was stopped{hangs}"
    if ended.ending == "missing" or ended.status is None:
        return "dcgmi could not be started"
    return f"dcgmi ended with status {ended.status}" if ended.status else ""


def _last_line(ended: FinishedProgram) -> str:
    lines = [line.strip() for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
    return printable(lines[-1])[:160] if lines and ended.status else ""


def _results(found: Sequence[Measurement]) -> list[Result]:
    return judge(found, {}, {}, lambda _part: "")


def as_document(head: str, hosts: Sequence[str], results: Sequence[Result]) -> dict[str, Any]:
    """Return the document described in docs/json.md. One GPU or host without a result makes the verdict not_measured,
    unless a GPU failed.
    """
    verdicts = {result.verdict for result in results}
    return {
        "schema": documents.SCHEMA,
        "head": head,
        "hosts": list(hosts),
        "mndiag": [asdict(result) for result in results],
        "verdict": next((word for word in ("failed", "not_measured", "ok") if word in verdicts), "not_measured"),
    }


def as_text(document: dict[str, Any]) -> str:
    """Return the document as text: hosts without a good result first, with the reason."""
    rows = document["mndiag"]
    hosts = ", ".join(document["hosts"][:8]) + (" ..." if len(document["hosts"]) > 8 else "")
    lines = [f"{hosts}, started from {document['head']}: {document['verdict'].replace('_', ' ')}"]
    lines += [
        "  " + ": ".join(filter(None, (row["verdict"].replace("_", " "), row["part"], row["message"])))
        for verdict in ("failed", "not_measured")
        for row in rows
        if row["verdict"] == verdict
    ]
    passed = sum(row["verdict"] == "ok" for row in rows)
    return "\n".join([*lines, *([f"  {passed} GPUs passed"] if passed else [])]) + "\n"
