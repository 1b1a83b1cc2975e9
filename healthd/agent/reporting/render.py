"""What people read: the documents of `check` and `status`, settings, checks and explanations as text. Pure.

`document` is what `--json` prints (docs/json.md), so that people and programs are told the same. No text of a document
reaches the terminal as a control character.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthd.agent.reporting.endings import ends
from healthd.agent.reporting.next_steps import next_steps, repaired
from healthd.common.duration import duration as duration  # also for those who show what this shows
from healthd.common.page import SEVERITIES, Page, ago, ahead, date, plain
from healthd.common.text import printable

Document = Mapping[str, Any]

FEW = 8  # up to so many checks that found nothing have a row each; more are one paragraph
MOST_SHOWN = 20  # conditions in full; what drains always is

# --- healthd check


def check(document: Document, page: Page, replayed: bool = False) -> str:
    """A row for each run with its worst finding; then the findings, and what could not be looked at."""
    then = f", when it was recorded on {date(document['time'])}" if replayed else ""
    lines = [f"{plain(document['node'])}: {page.paint(document['health'])}{then}"]
    listening = document.get("from_daemon", {}).get("checks", ())
    looked = [r for r in document["results"] if r["check"] not in listening or r["findings"]]
    shown, quiet = _told_apart(looked)
    lines += [""] if looked else []
    rows = [(_name(r), r["outcome"].replace("_", " "), duration(r["duration_seconds"]), *_worst(r)) for r in shown]
    lines += page.table(("check", "outcome", "took", "finding", ""), rows) if rows else []
    lines += [""] if rows and quiet else []
    listens = document["without_result"].get("kernel_log_only", ())
    of_log = [r for r in quiet if r["check"] in listens]
    lines += _quiet([r for r in quiet if r not in of_log], "", page)
    if of_log:
        names = ", ".join(sorted(map(_name, of_log)))
        lines += page.wrap(f"{_counted(len(of_log), 'check')} found no fault in this boot's kernel log: {names}")
    lines += _without_result(document, page)
    confirms = {(f["code"], f["subject"]): f["confirm_seconds"] for r in document["results"] for f in r["findings"]}
    if document["conditions"]:
        lines += ["", page.heading("Found")]
        for c in document["conditions"]:
            lines += _finding(c, page)
            lines += page.wrap(f"clears after: {_ends(c)}", "    ")
            seconds = confirms.get((c["code"], c["subject"]), 0.0)
            if seconds:
                lines += page.wrap(f"the daemon counts it once it has lasted {duration(seconds)}", "    ")
            if c["history"]:
                lines += page.wrap(
                    f"in this boot's kernel log{_times(c)}, last {ago(c['last_seen'], document['time'])}: history, "
                    "no judgement of now",
                    "    ",
                )
    if document["limits"]:
        lines += ["", page.heading("Trouble")]
        lines += [line for sentence in document["limits"] for line in page.wrap(sentence, "  ")]
    lines += _heard(document, page)
    lines += _not_known(document, page)
    return _text(lines)


def _heard(document: Document, page: Page) -> Iterator[str]:
    """What the daemon says of checks that only listen; why it cannot say it is among what is not known."""
    heard = document.get("from_daemon")
    if heard is None or heard["problem"]:
        return
    names, now = ", ".join(heard["checks"]), document["time"]
    only_listen = "only listens" if len(heard["checks"]) == 1 else "only listen"
    yield from ("", page.heading("Heard by the daemon"))
    yield from page.wrap(f"{names} {only_listen} to the kernel log: there is nothing to look at now", "  ")
    log = _kernel_log(heard["kernel_log"], now)
    yield from page.wrap(f"{log}; the daemon was started {ago(heard['since'], now)}", "  ")
    for c in heard["conditions"]:
        yield from (*_finding(c, page), *page.wrap(_story(c, now), "    "))
        yield from (_step(*step) for step in next_steps(c, heard["conditions"], ()))
    if not heard["conditions"]:
        yield "  nothing stands"


def recorded(document: Document, path: str, size: int, answers: int, silent: Iterable[str], page: Page) -> str:
    """healthd record: what the round found, what was kept and where, and what did not answer (sentences)."""
    lines = [
        "",
        page.heading("Recorded"),
        *page.wrap(
            f"{path}: {_bytes(size)}, {_counted(len(document['results']), 'run')}, {_counted(answers, 'answer')}", "  "
        ),
        *(line for sentence in silent for line in page.wrap(sentence, "  ")),
        *page.wrap(
            "It holds this node's name, addresses and serial numbers of its parts, names of processes, the settings of "
            "the checks, and what their programs printed. Look at it with: zcat FILE | jq .".replace("FILE", path),
            "  ",
        ),
        *page.wrap(f"On any machine: healthd check --replay {path}", "  "),
    ]
    return check(document, page) + _text(lines)


def _bytes(size: int) -> str:
    return f"{size / 1024:.0f} KiB" if size < 10 << 20 else f"{size / (1 << 20):.0f} MiB"


def _told_apart(results: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """The runs that have a row each, and those that found nothing if they are too many for that."""
    quiet = [r for r in results if r["outcome"] == "completed" and not r["findings"]]
    return ([r for r in results if r not in quiet], quiet) if len(quiet) > FEW else (list(results), [])


def _quiet(quiet: Sequence[Document], when: str, page: Page) -> Iterator[str]:
    """Yield which checks passed, and which had nothing to check, by the reason."""
    passed = sorted(_name(r) for r in quiet if not r["nothing_to_check"])
    if passed:
        yield from page.wrap(f"{_counted(len(passed), 'check')} passed{when}: {', '.join(passed)}")
    reasons: dict[str, list[str]] = {}
    for r in quiet:
        if nothing := r["nothing_to_check"]:
            fix = f" ({nothing['fix']})" if nothing["fix"] else ""
            reasons.setdefault(f"{nothing['reason']}{fix}", []).append(_name(r))
    if reasons:
        yield f"{_counted(len(quiet) - len(passed), 'check')} had nothing to check:"
        for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
            yield from page.wrap(f"{reason}: {', '.join(sorted(names))}", "  ")


def _without_result(document: Document, page: Page) -> Iterator[str]:
    """Yield the checks that a round does not run, by the reason."""
    words = {
        "kernel_log_only": ("listens to the kernel log", "listen to the kernel log"),
        "idle": ("runs only while the node is drained and idle", "run only while the node is drained and idle"),
        "off": ("is off (enabled = false)", "are off (enabled = false)"),
        "not_set_up": ("is not set up", "are not set up"),
    }
    ran = {r["check"] for r in document["results"]}
    for why, (of_one, of_more) in words.items():
        names = [name for name in document["without_result"].get(why, ()) if name not in ran]
        if names and not (why == "kernel_log_only" and document.get("from_daemon")):
            words_of = of_one if len(names) == 1 else of_more
            yield from page.wrap(f"{_counted(len(names), 'check')} {words_of}: {', '.join(names)}")


def _name(result: Document) -> str:
    return f"{result['check']} {result['instance']}".strip()


def _worst(result: Document) -> tuple[str, str]:
    """Return severity and name of the worst finding, and how many more there are; or why nothing was checked."""
    findings = result["findings"]
    if not findings:
        nothing = result["nothing_to_check"]
        return "", f"nothing to check: {nothing['reason']}" if nothing else ""
    worst = max(findings, key=lambda f: SEVERITIES.index(f["severity"]))
    more = f" (+{len(findings) - 1} more)" if len(findings) > 1 else ""
    return worst["severity"], f"{_part(worst)}{more}"


def _part(finding: Document) -> str:
    return f"{finding['code']} {finding['subject']}".strip()


def _finding(c: Document, page: Page) -> list[str]:
    severity = page.paint(c["severity"].ljust(8), c["severity"])
    return [f"  {severity}  {page.heading(plain(_part(c)))}", *page.wrap(c["message"], "    ")]


def _ends(c: Document) -> str:
    return ends(c["clears"], c["window_seconds"], repaired=repaired(c))


def _times(c: Document) -> str:
    return f", {c['count']} times" if c["count"] > 1 else ""


def _not_known(document: Document, page: Page) -> Iterator[str]:
    if document["unknown"]:
        yield from ("", page.heading("Not known"))
        names: dict[str, list[str]] = {}
        for sentence in document["unknown"]:
            name, _, why = str(sentence).partition(" ")
            names.setdefault(why, []).append(name)
        for why, several in names.items():  # a hung driver keeps all GPU checks waiting: one sentence for all
            yield from page.wrap(f"{', '.join(several)}{':' if len(several) > 1 else ''} {why}", "  ")


# --- healthd status


def status(document: Document, now: float, page: Page, flags: str = "") -> str:
    """`flags`: the words with which this daemon is reached ("--runtime-dir run"), quoted for a shell."""
    d = document
    lines = [
        f"{plain(d['node'])}: {page.paint(d['health'])}{_drained(d['slurm'])}",
        *(line for sentence in d["limits"] for line in page.wrap(sentence, "  ")),
        *page.wrap(
            f"healthd {d['version']}, mode {d['mode']}, started {ago(d['started'], now)}; {_round(d, now)}", "  "
        ),
    ]
    if d["pause"]:
        lines += page.wrap(
            f"paused by {d['pause']['who']}, ends {ahead(d['pause']['until'], now)}: {d['pause']['why']}", "  "
        )
        lines.append(_step("to end that now", " ".join(filter(None, ("healthd unpause", flags))), "  "))
    if slow := d.get("detection_pause"):
        lines += page.wrap(
            f"slow jobs are not told: paused by {slow['who']}, ends {ahead(slow['until'], now)}: {slow['why']}", "  "
        )
        lines.append(_step("to end that now", " ".join(filter(None, ("healthd failslow unpause", flags))), "  "))
    lines += _troubles(d, now, page)
    lines += ["", page.heading("Conditions")]
    shown = _most_urgent(d["conditions"])
    for c in shown:
        lines += [*_finding(c, page), *page.wrap(_story(c, now), "    ")]
        lines += [_step(*step) for step in next_steps(c, d["conditions"], d["slurm"]["state"] or (), flags)]
    if more := len(d["conditions"]) - len(shown):
        lines += page.wrap(f"and {more} more: healthd status --json", "  ")
    if not d["conditions"]:
        lines.append("  none")
    for incident in d["incidents"]:
        then, more = incident["then"][:MOST_SHOWN], len(incident["then"]) - MOST_SHOWN
        and_more = f" and {more} more" if more > 0 else ""
        lines += page.wrap(f"one incident: {incident['first']}, then {', '.join(then)}{and_more}", "  ")
    for c in d["cleared"][-3:]:
        lines += page.wrap(f"cleared {ago(c['cleared_at'], now)}: {_part(c)} ({c['cleared_by']})", "  ")
    lines += _not_known(d, page)
    lines += ["", page.heading("Slurm"), *_slurm(d, now, page)]
    lines += ["", page.heading("Kernel log"), *page.wrap(_kernel_log(d["kernel_log"], now), "  ")]
    with_a_row, quiet = _told_apart(d["results"])
    rows = [
        (
            _name(r),
            r["outcome"].replace("_", " "),
            ago(_end(r), now),
            duration(r["duration_seconds"]),
            *_worst(r),
        )
        for r in with_a_row
    ]
    if rows:
        lines += ["", *page.table(("check", "outcome", "last run", "took", "finding", ""), rows)]
    if quiet:
        oldest = f" (the oldest run {ago(min(map(_end, quiet)), now)})"
        lines += ["", *_quiet(quiet, oldest, page)]
    if not d["results"]:
        lines += ["", "no check has run yet"]
    lines += _without_result(d, page) if quiet else []
    return _text(lines)


def _drained(slurm: Document) -> str:
    """Return for the first line whether the node is drained, and by what: ", drained (by healthd), 1 job requeued".

    As Slurm counts it: jobs on a DOWN node have ended, an epilog on a COMPLETING one has not.
    """
    state = set(slurm["state"] or ())
    if "DRAIN" not in state:
        return ""
    whose = {"healthd": "by healthd", "unrecorded_healthd": "by an earlier healthd"}.get(
        slurm["owner"], "not by healthd"
    )
    drained = bool(state & {"IDLE", "DOWN"}) and "COMPLETING" not in state
    jobs = len(slurm.get("requeued", ()))
    requeued = f", {_counted(jobs, 'job')} requeued" if jobs else ""
    return f", {'drained' if drained else 'draining'} ({whose}){requeued}"


def _troubles(d: Document, now: float, page: Page) -> Iterator[str]:
    """What keeps healthd from its work, each with what to type, above all that it found."""
    hold = d["slurm"].get("fleet_hold")
    if not (d["problems"] or d["blocked"] or hold):
        return
    yield from ("", page.heading("Trouble"))
    for sentence, command in zip(d["problems"], d["problem_commands"], strict=True):
        yield from page.wrap(sentence, "  ")
        if command:
            yield _step("next", command)
    for resource, pid in d["blocked"].items():
        yield from page.wrap(f"worker {pid} hangs in {resource}: what needs it waits", "  ")
        yield _step("next", f"ps -o pid,stat,etime,wchan:30,args -p {int(pid)}")
    if hold:
        times = f", held {_counted(hold['times'], 'time')}" if hold["times"] else ""
        when = f"since {ago(hold['since'], now)}{times}; tried again {ahead(hold['until'], now)}"
        yield from page.wrap(f"the drain waits for the fleet {when}", "  ")
        yield _step("next", "sinfo -R")


def _step(when: str, command: str, indent: str = "    ") -> str:
    """A command as it is to be typed: it stands alone at the line's end, and is never folded."""
    return f"{indent}{when}: {printable(command)}"


def _most_urgent(conditions: Sequence[Document]) -> list[Document]:
    """All that drains, then the others as they stand, the worst first."""

    def drains(c: Document) -> bool:
        return c["state"] == "open" and SEVERITIES.index(c["severity"]) >= 2 and not c.get("observed")

    return sorted(conditions, key=lambda c: not drains(c))[: max(MOST_SHOWN, sum(map(drains, conditions)))]


def _end(result: Document) -> float:
    return float(result["started"] + result["duration_seconds"])


def _round(d: Document, now: float) -> str:
    last = d["round"]
    if not last.get("number"):
        return "no round yet"
    words = f"round {last['number']} began {ago(last['started'], now)}"
    return f"{words}, the next {ahead(last['next_at'], now)}" if last.get("next_at") else words


def _story(c: Document, now: float) -> str:
    """Return the history of a condition: "open since 3 min ago, seen 2 times, job 123; clears after: a reboot"."""
    parts = [f"{c['state']} since {ago(c['since'], now)}"]
    if c["count"] > 1:
        parts.append(f"seen {c['count']} times, last {ago(c['last_seen'], now)}")
    if c["job"]:
        parts.append(f"job {c['job']}")
    if c["history"]:
        parts.append("from before healthd's first start")
    if c.get("observed"):
        parts.append("only observed: users can forge lines of this log")
    if c.get("ack"):
        parts.append(f"known to {c['ack']['who']}, ends {ahead(c['ack']['until'], now)}: {c['ack']['why']}")
    return f"{', '.join(parts)}; clears after: {_ends(c)}"


def _slurm(d: Document, now: float, page: Page) -> Iterator[str]:
    yield from page.wrap(f"wants: {d['decision']['text']}", "  ")
    s = d["slurm"]
    if s["state"] is None:
        yield from page.wrap(
            "has: not asked" if not s["read_at"] else f"has: not known, last read {ago(s['read_at'], now)}", "  "
        )
    else:
        reason = f' "{s["reason"]}"' if s["reason"] else ""
        user = f" by {s['reason_user']}" if s["reason_user"] else ""
        owner = f" ({s['owner']})" if s["owner"] else ""
        yield from page.wrap(f"has: {'+'.join(s['state'])}{reason}{user}{owner}; read {ago(s['read_at'], now)}", "  ")


def _kernel_log(k: Document, now: float) -> str:
    if not k["alive"]:
        return f"{k['source']}: not read{': ' + k['problem'] if k.get('problem') else ''}"
    lost = f", {_counted(k['lost_total'], 'line')} lost" if k.get("lost_total") else ""
    last = f", last line {ago(k['last_line'], now)}" if k.get("last_line") else ""
    heard = f"{_counted(k.get('lines_total', 0), 'line')}, {_counted(k.get('events_total', 0), 'event')}"
    return f"{k['source']}: {heard}{lost}{last}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# --- settings, checks, codes


def settings(rows: Iterable[tuple[str, Any, str]], page: Page) -> str:
    """healthd config show: (setting, value, origin)."""
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
    """healthd baseline --diff: (setting, what was, what is, whether that is not known)."""
    if not changes:
        return f"{plain(path)}: nothing has changed\n"
    rows = [(setting, was or "-", now or "-") for setting, was, now, _unknown in changes]
    return _text([f"{plain(path)}: changed", "", *page.table(("setting", "was", "is"), rows)])


def checks(rows: Iterable[Sequence[str]], page: Page) -> str:
    """healthd list: (check, every, timeout, what it looks at)."""
    return _text(page.table(("check", "every", "timeout", "looks at"), list(rows)))


def codes(rows: Iterable[Sequence[str]], page: Page) -> str:
    """healthd list --codes: (code, severity, what ends it, meaning)."""
    return _text(page.table(("code", "severity", "clears after", "meaning"), list(rows)))


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
