"""Text output of `check` and `status`, and of the lists of settings, checks and codes. The functions are pure.

`document` is the document that `--json` prints (docs/json.md), so text and JSON agree. Control characters are never
passed to the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthd.agent.reporting.endings import ending_text
from healthd.agent.reporting.next_steps import next_steps, repaired_command
from healthd.common.duration import duration as duration  # re-exported for the other commands
from healthd.common.page import SEVERITIES, Page, ago, date, plain, time_ahead
from healthd.common.text import printable, regex

Document = Mapping[str, Any]

MAX_ROWS = 8  # up to this many checks without findings have their own rows; more are listed in one paragraph
MAX_SHOWN = 20  # maximum number of conditions to print; those that drain are always printed

# --- healthd check


def check(document: Document, page: Page, replayed: bool = False) -> str:
    """Return the text of `healthd check`: a row for each run with its worst finding, then all findings."""
    recorded_text = f", recorded on {date(document['time'])}" if replayed else ""
    lines = [f"{plain(document['node'])}: {page.paint(document['health'])}{recorded_text}"]
    daemon_checks = document.get("from_daemon", {}).get("checks", ())
    results = [r for r in document["results"] if r["check"] not in daemon_checks or r["findings"]]
    shown, quiet = _split_quiet(results)
    lines += [""] if results else []
    rows = [(_run_name(r), r["outcome"].replace("_", " "), duration(r["duration_seconds"]), *_worst(r)) for r in shown]
    lines += page.table(("check", "outcome", "took", "finding", ""), rows) if rows else []
    lines += [""] if rows and quiet else []
    log_only_checks = document["without_result"].get("kernel_log_only", ())
    log_results = [r for r in quiet if r["check"] in log_only_checks]
    lines += _quiet([r for r in quiet if r not in log_results], "", page)
    if log_results:
        names = ", ".join(sorted(map(_run_name, log_results)))
        lines += page.wrap(f"{_counted(len(log_results), 'check')} found no fault in this boot's kernel log: {names}")
    lines += _without_result(document, page)
    confirms = {(f["code"], f["subject"]): f["confirm_seconds"] for r in document["results"] for f in r["findings"]}
    if document["conditions"]:
        lines += ["", page.heading("Found")]
        for c in document["conditions"]:
            lines += _finding(c, page)
            lines += page.wrap(f"clears after: {_ending(c)}", "    ")
            seconds = confirms.get((c["code"], c["subject"]), 0.0)
            if seconds:
                lines += page.wrap(
                    f"the daemon opens a condition once the finding has lasted {duration(seconds)}", "    "
                )
            if c["history"]:
                lines += page.wrap(
                    f"in this boot's kernel log{_times(c)}, last {ago(c['last_seen'], document['time'])}: history, not "
                    "evidence of a current fault",
                    "    ",
                )
    if document["limits"]:
        lines += ["", page.heading("Problems with healthd")]
        lines += [line for sentence in document["limits"] for line in page.wrap(sentence, "  ")]
    lines += _daemon_findings(document, page)
    lines += _unknown(document, page)
    return _text(lines)


def _daemon_findings(document: Document, page: Page) -> Iterator[str]:
    """Yield the daemon's results for checks that only read the kernel log."""
    from_daemon = document.get("from_daemon")
    if from_daemon is None or from_daemon["problem"]:
        return
    names, now = ", ".join(from_daemon["checks"]), document["time"]
    only_listen = "only reads" if len(from_daemon["checks"]) == 1 else "only read"
    yield from ("", page.heading("Reported by the daemon"))
    yield from page.wrap(f"{names} {only_listen} the kernel log and cannot run on request", "  ")
    log = _kernel_log(from_daemon["kernel_log"], now)
    yield from page.wrap(f"kernel log: {log}; the daemon was started {ago(from_daemon['since'], now)}", "  ")
    for c in from_daemon["conditions"]:
        yield from (*_finding(c, page), *page.wrap(_condition_text(c, now), "    "))
        yield from (_step(*step) for step in next_steps(c, from_daemon["conditions"], ()))
    if not from_daemon["conditions"]:
        yield "  no open conditions"


def recorded(document: Document, path: str, size: int, answers: int, silent: Iterable[str], page: Page) -> str:
    """Return the text of `healthd record`: the findings, the file, and sentences about anything that did not
    respond."""
    lines = [
        "",
        page.heading("Recorded"),
        *page.wrap(
            f"{path}: {_bytes(size)}, {_counted(len(document['results']), 'run')}, {_counted(answers, 'answer')}", "  "
        ),
        *(line for sentence in silent for line in page.wrap(sentence, "  ")),
        *page.wrap(
            "It contains the node's name, its parts' addresses and serial numbers, process names, the checks' "
            "settings, and the output of their programs. To inspect it: zcat FILE | jq .".replace("FILE", path),
            "  ",
        ),
        *page.wrap(f"To replay it on any machine: healthd check --replay {path}", "  "),
    ]
    return check(document, page) + _text(lines)


def _bytes(size: int) -> str:
    return f"{size / 1024:.0f} KiB" if size < 10 << 20 else f"{size / (1 << 20):.0f} MiB"


def _split_quiet(results: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Return (runs with their own rows, runs without findings if there are too many for rows)."""
    quiet = [r for r in results if r["outcome"] == "completed" and not r["findings"]]
    return ([r for r in results if r not in quiet], quiet) if len(quiet) > MAX_ROWS else (list(results), [])


def _quiet(quiet: Sequence[Document], when: str, page: Page, indent: str = "") -> Iterator[str]:
    """Yield a paragraph with the checks that passed, and one for each reason why other checks had nothing to check."""
    passed = sorted(_run_name(r) for r in quiet if not r["nothing_to_check"])
    if passed:
        yield from page.wrap(f"{_counted(len(passed), 'check')} passed{when}: {', '.join(passed)}", indent)
    reasons: dict[str, list[str]] = {}
    for r in quiet:
        if nothing := r["nothing_to_check"]:
            fix = f" ({nothing['fix']})" if nothing["fix"] else ""
            reasons.setdefault(f"{nothing['reason']}{fix}", []).append(_run_name(r))
    if reasons:
        yield f"{indent}{_counted(len(quiet) - len(passed), 'check')} had nothing to check:"
        for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
            yield from page.wrap(f"{reason}: {', '.join(sorted(names))}", f"{indent}  ")


def _without_result(document: Document, page: Page, indent: str = "") -> Iterator[str]:
    """Yield the checks that are not part of a round, grouped by reason."""
    texts = {
        "kernel_log_only": ("only reads the kernel log", "only read the kernel log"),
        "idle": ("runs only while the node is drained and idle", "run only while the node is drained and idle"),
        "off": ("is off (enabled = false)", "are off (enabled = false)"),
        "not_set_up": ("is not set up", "are not set up"),
    }
    ran = {r["check"] for r in document["results"]}
    for why, (singular, plural) in texts.items():
        names = [name for name in document["without_result"].get(why, ()) if name not in ran]
        if names and not (why == "kernel_log_only" and document.get("from_daemon")):
            text = singular if len(names) == 1 else plural
            yield from page.wrap(f"{_counted(len(names), 'check')} {text}: {', '.join(names)}", indent)


def _run_name(result: Document) -> str:
    return f"{result['check']} {result['instance']}".strip()


def _worst(result: Document) -> tuple[str, str]:
    """Return a severity and a text. The text names the worst finding and counts the others, or gives the reason why
    nothing was checked.
    """
    findings = result["findings"]
    if not findings:
        nothing = result["nothing_to_check"]
        return "", f"nothing to check: {nothing['reason']}" if nothing else ""
    worst = max(findings, key=lambda f: SEVERITIES.index(f["severity"]))
    more = f" (+{len(findings) - 1} more)" if len(findings) > 1 else ""
    return worst["severity"], f"{_code_and_part(worst)}{more}"


def _code_and_part(finding: Document) -> str:
    return f"{finding['code']} {finding['subject']}".strip()


def _finding(c: Document, page: Page) -> list[str]:
    severity = page.paint(c["severity"].ljust(8), c["severity"])
    return [f"  {severity}  {page.heading(plain(_code_and_part(c)))}", *page.wrap(c["message"], "    ")]


def _ending(c: Document) -> str:
    return ending_text(c["clears"], c["window_seconds"], repaired=repaired_command(c))


def _times(c: Document) -> str:
    return f", {c['count']} times" if c["count"] > 1 else ""


def _unknown(document: Document, page: Page) -> Iterator[str]:
    if document["unknown"]:
        yield from ("", page.heading("No result"))
        names: dict[str, list[str]] = {}
        for sentence in document["unknown"]:
            name, _, why = str(sentence).partition(" ")
            names.setdefault(why, []).append(name)
        for why, run_names in names.items():  # a hung driver blocks all GPU checks; print one sentence for all
            yield from page.wrap(f"{', '.join(run_names)}{':' if len(run_names) > 1 else ''} {why}", "  ")


# --- healthd status


def status(document: Document, now: float, page: Page, flags: str = "") -> str:
    """Return the text of `healthd status`. Its parts are health and drain, open conditions, problems with healthd,
    Slurm, checks and service.

    `flags` are quoted options that select this daemon ("--runtime-dir run").
    """
    d = document
    lines = [f"{plain(d['node'])}: {page.paint(d['health'])}{_drain_text(d['slurm'])}"]
    problems = dict(zip(d["problems"], d["problem_commands"], strict=True))
    for limit in d["limits"]:
        lines += page.wrap(limit, "  ")
        # The command for this problem is listed with healthd's problems. Print both here, and only once.
        for sentence in [sentence for sentence in problems if _reason(sentence) and _reason(sentence) in limit]:
            if command := problems.pop(sentence):
                lines.append(_step("next", command))
    lines += _pauses(d, now, page, flags)
    lines += ["", page.heading("Open conditions")]
    shown = _urgent_first(d["conditions"])
    for c in shown:
        lines += [*_finding(c, page), *page.wrap(_condition_text(c, now), "    ")]
        steps = next_steps(c, d["conditions"], d["slurm"]["state"] or (), flags, _saved_evidence(d))
        lines += [_step(*step) for step in steps]
    if more := len(d["conditions"]) - len(shown):
        lines += page.wrap(f"and {more} more: healthd status --json", "  ")
    if not d["conditions"]:
        lines.append("  none")
    for incident in d["incidents"]:
        later, more = incident["then"][:MAX_SHOWN], len(incident["then"]) - MAX_SHOWN
        and_more = f" and {more} more" if more > 0 else ""
        lines += page.wrap(f"one incident: {incident['first']}, then {', '.join(later)}{and_more}", "  ")
    for c in d["cleared"][-3:]:
        lines += page.wrap(f"cleared {ago(c['cleared_at'], now)}: {_code_and_part(c)} ({c['cleared_by']})", "  ")
    lines += _repair(d.get("repair"), page)
    lines += _evidence(d.get("evidence"), now, page)
    lines += _problems(problems, d["blocked"], page)
    lines += ["", page.heading("Slurm"), *_slurm(d, now, page)]
    lines += ["", page.heading("Checks"), *_checks(d, now, page)]
    lines += _unknown(d, page)
    service = f"healthd {d['version']}, mode {d['mode']}, started {ago(d['started'], now)}; {_round(d, now)}"
    lines += ["", page.heading("Service"), *page.wrap(service, "  ")]
    log = d["kernel_log"]
    if any(log.get("problem", "") in sentence for sentence in (*d["limits"], *d["problems"])):
        log = {**log, "problem": ""}  # printed above
    lines += page.wrap(f"kernel log: {_kernel_log(log, now)}", "  ")
    if domain := d["inventory"].get("domain"):
        lines += page.wrap(f"NVLink domain: {d['inventory']['domain_id']} ({domain})", "  ")
    return _text(lines)


def _drain_text(slurm: Document) -> str:
    """Return text about the drain for the first line, such as ", drained (by healthd), 1 job requeued", or "" without a
    drain.

    In Slurm, a DOWN node has no running jobs, and a COMPLETING node still runs an epilog.
    """
    state = set(slurm["state"] or ())
    if "DRAIN" not in state:
        return ""
    owner = {"healthd": "by healthd", "unrecorded_healthd": "by an earlier healthd"}.get(
        slurm["owner"], "not by healthd"
    )
    drained = bool(state & {"IDLE", "DOWN"}) and "COMPLETING" not in state
    jobs = len(slurm.get("requeued", ()))
    requeued = f", {_counted(jobs, 'job')} requeued" if jobs else ""
    return f", {'drained' if drained else 'draining'} ({owner}){requeued}"


def _pauses(d: Document, now: float, page: Page, flags: str) -> Iterator[str]:
    if pause := d["pause"]:
        text = f"paused by {pause['who']}, ends {time_ahead(pause['until'], now)}: {pause['why']}"
        yield from page.wrap(text, "  ")
        yield _step("to end the pause now", " ".join(filter(None, ("healthd unpause", flags))))
    if pause := d.get("detection_pause"):
        text = f"slow-job detection paused by {pause['who']}, ends {time_ahead(pause['until'], now)}: {pause['why']}"
        yield from page.wrap(text, "  ")
        yield _step("to end this pause now", " ".join(filter(None, ("healthd failslow unpause", flags))))


def _repair(repair: Document | None, page: Page) -> Iterator[str]:
    """Yield the step that the node needs, if healthd plans repairs."""
    if repair is not None and (repair["step"] or repair["attempt"] or repair["has_given_up"]):
        from healthd.agent.reporting.repair import status_lines

        heading = "Repair" if repair["mode"] == "act" or repair["ordered_by"] else "Repair (advice only)"
        yield from ("", page.heading(heading))
        for sentence in status_lines(repair):
            yield from page.wrap(sentence, "  ")


def _saved_evidence(d: Document) -> str:
    """Return the id of the current case if it has a file, or ""."""
    evidence = d.get("evidence")
    return str(evidence["id"]) if evidence and evidence["path"] else ""


def _evidence(evidence: Document | None, now: float, page: Page) -> Iterator[str]:
    """Yield the evidence of the last fault that drained the node."""
    if evidence is None:
        return
    stages = {
        "first": "the kernel log, the journal and a recording are being saved",
        "waiting": "the rest is saved once the node is drained and no job runs on it",
        "full": "the bug report and the rest are being saved",
    }
    state = stages.get(evidence["stage"], "")
    saved = f"{evidence['path']}, {_bytes(evidence['bytes'])}" if evidence["path"] else "nothing saved yet"
    text = "; ".join(filter(None, (f"{saved}, begun {ago(evidence['began'], now)}", state, *evidence["problems"][:3])))
    yield from ("", page.heading("Evidence"), *page.wrap(text, "  "))
    if pids := evidence["stuck_pids"]:
        numbers = ", ".join(str(int(pid)) for pid in pids)
        yield from page.wrap(f"process {numbers} hangs in the kernel; do not reset a GPU before it has ended", "  ")
    if evidence["path"]:
        yield _step("show", f"healthd evidence show {evidence['id']}")


def _problems(problems: Mapping[str, str], blocked: Mapping[str, int], page: Page) -> Iterator[str]:
    """Yield healthd's own problems, each with the next command."""
    if problems or blocked:
        yield from ("", page.heading("Problems with healthd"))
    for sentence, command in problems.items():
        yield from page.wrap(sentence, "  ")
        if command:
            yield _step("next", command)
    for resource, pid in blocked.items():
        yield from page.wrap(f"worker {pid} hangs in {resource}; checks that need {resource} do not run", "  ")
        yield _step("next", f"ps -o pid,stat,etime,wchan:30,args -p {int(pid)}")


def _reason(problem: str) -> str:
    """Return the cause in a problem, such as "no such file" for "kernel log: no such file"."""
    return problem.partition(": ")[2]


def _step(when: str, command: str, indent: str = "    ") -> str:
    """Return an unwrapped line that ends with a command to paste."""
    return f"{indent}{when}: {printable(command)}"


def _urgent_first(conditions: Sequence[Document]) -> list[Document]:
    """Return all conditions that drain, and others up to MAX_SHOWN in total. Both groups keep their order, worst
    first.
    """

    def drains(c: Document) -> bool:
        return c["state"] == "open" and SEVERITIES.index(c["severity"]) >= 2 and not c.get("observed")

    return sorted(conditions, key=lambda c: not drains(c))[: max(MAX_SHOWN, sum(map(drains, conditions)))]


def _checks(d: Document, now: float, page: Page) -> Iterator[str]:
    """Yield a table of the runs with a finding or without a result, then paragraphs about the other runs."""
    with_a_row, quiet = _split_quiet(d["results"])
    rows = [
        (
            _run_name(r),
            r["outcome"].replace("_", " "),
            ago(_ended_at(r), now),
            duration(r["duration_seconds"]),
            *_worst(r),
        )
        for r in with_a_row
    ]
    if rows:
        head = ("check", "outcome", "last run", "took", "finding", "")
        yield from (f"  {line}" for line in page._replace(width=page.width - 2).table(head, rows))
    if quiet:
        yield from _quiet(quiet, f" (the oldest run {ago(min(map(_ended_at, quiet)), now)})", page, "  ")
        yield from _without_result(d, page, "  ")
    if not d["results"]:
        yield "  no check has run yet"


def _ended_at(result: Document) -> float:
    return float(result["started"] + result["duration_seconds"])


def _round(d: Document, now: float) -> str:
    last = d["round"]
    if not last.get("number"):
        return "no round yet"
    text = f"round {last['number']} began {ago(last['started'], now)}"
    return f"{text}, the next {time_ahead(last['next_at'], now)}" if last.get("next_at") else text


def _condition_text(c: Document, now: float) -> str:
    """Return a condition's state, such as "open since 3 min ago, seen 2 times, job 123; clears after: a reboot"."""
    parts = [f"{c['state']} since {ago(c['since'], now)}"]
    if c["count"] > 1:
        parts.append(f"seen {c['count']} times, last {ago(c['last_seen'], now)}")
    if c["job"]:
        parts.append(f"job {c['job']}")
    if c["history"]:
        parts.append("from before healthd's first start")
    if c.get("observed"):
        parts.append("displayed only: users can forge lines in this log")
    if c.get("ack"):
        parts.append(f"by {c['ack']['who']}, ends {time_ahead(c['ack']['until'], now)}: {c['ack']['why']}")
    return f"{', '.join(parts)}; clears after: {_ending(c)}"


def _slurm(d: Document, now: float, page: Page) -> Iterator[str]:
    """Yield the node's state in Slurm, the decision, and a drain that waits for the fleet limit.

    The decision omits the Reason, which the state line already contains or which consists of the conditions above.
    """
    s, hold = d["slurm"], d["slurm"].get("fleet_hold")
    if s["state"] is None:
        yield "  state: " + (f"unknown, last read {ago(s['read_at'], now)}" if s["read_at"] else "not queried")
    else:
        reason = f', reason "{s["reason"]}"' if s["reason"] else ""
        user = f" set by {s['reason_user']}" if s["reason_user"] else ""
        yield from page.wrap(f"state: {'+'.join(s['state'])}{reason}{user}, read {ago(s['read_at'], now)}", "  ")
    yield from page.wrap(f"decision: {_without_reason(d['decision']['text'], s['reason'])}", "  ")
    if hold:
        times = f", delayed {_counted(hold['times'], 'time')}" if hold["times"] else ""
        when = f"since {ago(hold['since'], now)}{times}; next attempt {time_ahead(hold['until'], now)}"
        yield from page.wrap(f"the drain waits for the fleet limit {when}", "  ")
        yield _step("next", "sinfo -R")


_REASON = regex(r'(?: with|, reason) "healthd: [^"]*"|: healthd: [^;"]*')


def _without_reason(decision: str, reason: str) -> str:
    return _REASON.sub("", decision.replace(f": {reason}", "") if reason else decision)


def _kernel_log(k: Document, now: float) -> str:
    if not k["alive"]:
        return f"{k['source']}, not read{': ' + k['problem'] if k.get('problem') else ''}"
    lost = f", {_counted(k['lost_total'], 'line')} lost" if k.get("lost_total") else ""
    last = f", last line {ago(k['last_line'], now)}" if k.get("last_line") else ""
    counts = f"{_counted(k.get('lines_total', 0), 'line')}, {_counted(k.get('events_total', 0), 'event')}"
    return f"{k['source']}, {counts}{lost}{last}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- settings, checks, codes


def settings(rows: Iterable[tuple[str, Any, str]], page: Page) -> str:
    """Return the text of `healthd config show`. The rows are (setting, value, origin)."""
    return _text(
        page.table(("setting", "value", "from"), [(name, _value(value), origin) for name, value, origin in rows])
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f'"{key}" = {_value(item)}' for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def drift(path: str, changes: Sequence[tuple[str, str, str, bool]], page: Page) -> str:
    """Return the text of `healthd baseline --diff`. The rows are (setting, old value, new value, is unknown)."""
    if not changes:
        return f"{plain(path)}: nothing has changed\n"
    rows = [(setting, previous or "-", current or "-") for setting, previous, current, _unknown in changes]
    return _text([f"{plain(path)}: changed", "", *page.table(("setting", "was", "is"), rows)])


def checks(rows: Iterable[Sequence[str]], page: Page) -> str:
    """Return the text of `healthd list`. The rows are (check, interval, timeout, subject)."""
    return _text(page.table(("check", "interval", "timeout", "checks"), list(rows)))


def codes(rows: Iterable[Sequence[str]], page: Page) -> str:
    """Return the text of `healthd list --codes`. The rows are (code, severity, ending, meaning)."""
    return _text(page.table(("code", "severity", "clears after", "meaning"), list(rows)))


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
