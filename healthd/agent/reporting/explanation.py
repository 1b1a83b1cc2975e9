"""`healthd explain` as a document (docs/json.md), and that as text: what a code means, and what healthd does *here*.

The texts are the checks' own; what healthd does with a fault is fault_course.py's, by the settings of this node.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from healthd.agent.reporting import render
from healthd.agent.reporting.endings import ends
from healthd.agent.reporting.fault_course import Does, Step, course, findings_of
from healthd.agent.reporting.next_steps import remedies
from healthd.agent.reporting.render import Document
from healthd.agent.settings.config import CheckConfig, Loaded, Settings, only_observes_kernel_log
from healthd.agent.settings.effective import place_of
from healthd.agent.settings.registry import Check
from healthd.agent.slurm.policy import Policy
from healthd.common.codec import dump
from healthd.common.duration import duration
from healthd.common.model import Clears, Explain, Finding, Mode, Requeue, RunName
from healthd.common.page import Page, date
from healthd.common.text import printable, regex

RUNBOOKS = "docs/runbooks"
RESUMES = "healthd lifts its own drain when every check that can drain has completed clean."


_KERNEL_LOG = "kernel_log.source"
MODE_UNKNOWN = "default; which one is in force is not known"


class Running(NamedTuple):
    """What the daemon that runs here has beside its settings. mode: its own, which a flag or an older file gave it.
    paused_until: epoch seconds, 0 = not paused."""

    mode: Mode
    paused_until: float


class Here(NamedTuple):
    """What decides on this node. `loaded`: None where the settings could not be read: then the defaults count.
    `running`: None where no daemon answers."""

    loaded: Loaded | None
    running: Running | None = None

    @property
    def settings(self) -> Settings:
        return self.loaded.settings if self.loaded else Settings()

    def origin(self, place: str) -> str:
        return (self.loaded.origins if self.loaded else {}).get(place, "default")

    @property
    def mode(self) -> tuple[Mode, str]:
        """The mode, and where it came from."""
        if self.running and self.loaded is None:
            return self.running.mode, "the running daemon"
        if self.running and self.running.mode is not self.settings.mode:
            return self.running.mode, f"the running daemon; the settings say {self.settings.mode.value}"
        return self.settings.mode, self.origin("mode") if self.loaded else MODE_UNKNOWN

    def policy(self) -> Policy:
        paused = bool(self.running and self.running.paused_until)
        requeue = self.settings.slurm.requeue
        return Policy(mode=self.mode[0], paused_until=math.inf if paused else 0.0, requeue=requeue)

    def runs(self, check: Check) -> dict[RunName, tuple[CheckConfig, bool]]:
        """The runs of a check, and whether each is enabled. A check that has none is told by its defaults."""
        loaded = self.loaded
        found = {name: (config, True) for name, config in loaded.checks.items()} if loaded else {}
        found |= {name: (config, False) for name, config in loaded.disabled.items()} if loaded else {}
        mine = {name: each for name, each in found.items() if name.check == check.name}
        return mine or {RunName(check.name): (check.config(), not check.per)}


def anchor(code: str) -> str:
    """The place of a code on its check's page: GitHub's anchor of the heading that is the code. "gpu_xid/79" is
    `gpu_xid79`: the code in lower case without its "/"."""
    return code.lower().replace("/", "")


def runbook(check: Check, code: str) -> str:
    """The page of a built-in check's code, "" for a site's."""
    return "" if check.path else f"{RUNBOOKS}/{check.name}.md#{anchor(code)}"


def of_code(
    query: str, code: str, part: str, explain: Explain, check: Check | None, here: Here, line: Finding | None = None
) -> dict[str, Any]:
    """`check`: None for a name that only stands in messages. `line`: what a kernel line that was asked about is found
    to be."""
    config = next((config for config, _ in _configs(check, part, here)), CheckConfig())
    findings = findings_of(code, explain, config)
    findings = [line, *findings[1:]] if line else findings
    worst = {
        "check": check.name if check else "",
        "code": code,
        "subject": part or ("PCI" if findings[0].clears is Clears.GPU_RESET else "PART"),
        "severity": findings[0].severity.name.lower(),
        "clears": findings[0].clears.name.lower(),
        "remedy": explain.remedy.value if explain.remedy else "",
    }
    steps = remedies(worst) if check and (line or not explain.line_decides) else ()
    return {
        "query": query,
        "what": "code",
        "check": check.name if check else "",
        "code": code,
        "part": part,
        "message": line.message if line else "",
        "severity": explain.severity.name.lower(),
        "also": [severity.name.lower() for severity in explain.also],
        "worsens": explain.worsens.severity.name.lower() if explain.worsens else "",
        "clears": explain.clears.name.lower(),
        "meaning": explain.meaning,
        "matters": explain.matters,
        "todo": _filled_in(explain.todo, code, part),
        "ends": "\n".join(_ends_of(findings, code if check else "", part, config)),
        "steps": [{"when": when, "command": command} for when, command in steps],
        "here": _here(code, part, explain, check, here, line) if check else [],
        "runbook": runbook(check, code) if check else "",
    }


_PLACE = regex(r"((?: -[is]|mstdump|repaired [a-z0-9_]{1,60}/[A-Za-z0-9_.:-]{1,60}) )(?:PCI|PART)\b")


def _filled_in(todo: str, code: str, part: str) -> str:
    """Return the text with its commands for this code and part, as far as they are given."""
    todo = todo.replace("healthd repaired CODE ", f"healthd repaired {code} ")
    return _PLACE.sub(lambda found: f"{found[1]}{shlex.quote(printable(part))}", todo) if part else todo


def _ends_of(findings: Sequence[Finding], code: str, part: str, config: CheckConfig) -> Iterator[str]:
    """Yield sentences: what ends the worst finding of a code, then where a milder one ends in another way.

    A sentence that ends in a command has no full stop: it would be pasted with the command. `code`: "" for a name that
    is no condition, which `healthd repaired` does not take.
    """
    command = f"healthd repaired {code} {shlex.quote(printable(part)) if part else 'PART'}"
    first = ends_of(findings[0], config.clear_after, command)
    yield _ended(f"Clears after {first}", command)
    for finding in findings[1:]:
        other = ends_of(finding, config.clear_after, command)
        if other != first:
            yield _ended(f"Where it is {finding.severity.name.lower()}: after {other}", command)
    if any(finding.window_seconds and not finding.shared_cause for finding in findings):
        yield "Time while the node is drained does not count, unless the part was reset or the node rebooted."
    if code and findings[0].clears is not Clears.OPERATOR:
        yield f"At once: {command}"


def _ended(sentence: str, command: str) -> str:
    return sentence if sentence.endswith(command) else f"{sentence}."


def ends_of(finding: Finding, clear_after: int = 0, repaired: str = "") -> str:
    """Return what ends a finding, in the words of `healthd status`."""
    return ends(finding.clears.name.lower(), finding.window_seconds, clear_after, repaired)


def _configs(check: Check | None, part: str, here: Here) -> list[tuple[CheckConfig, bool]]:
    """Of the instance that the part names, if one has this name; else of all."""
    runs = here.runs(check) if check else {}
    named = [each for name, each in runs.items() if part and name.instance == part]
    return named or list(runs.values())


def _here(
    code: str, part: str, explain: Explain, check: Check, here: Here, line: Finding | None
) -> list[dict[str, Any]]:
    """What becomes of it on this node: one document for each way in which the instances of the check differ."""
    found: list[dict[str, Any]] = []
    for config, enabled in _configs(check, part, here):
        one = _of_run(code, explain, check, config, enabled, here, line)
        same = next((other for other in found if {**other, "instances": []} == one), None)
        if same is None:
            found.append(same := one)
        same["instances"] += [config.name] if config.name else []
    return found


def _of_run(
    code: str, explain: Explain, check: Check, config: CheckConfig, enabled: bool, here: Here, line: Finding | None
) -> dict[str, Any]:
    heard = check.listens and (line is not None or not check.runs)
    observed = check.listens and here.loaded is not None and only_observes_kernel_log(here.loaded)
    findings = findings_of(code, explain, config)
    if line is not None:
        findings = [line, *(f for f in findings if f.severity is not line.severity)]
    courses = [
        (finding, course(finding, config, here.policy(), heard, observed=heard and observed)) for finding in findings
    ]
    expected = getattr(config, explain.expects) if explain.expects and hasattr(config, explain.expects) else True
    steps = [step for _, each in courses for step in each]
    disabled_by = _disabled_by(explain, check, config, heard, here)
    return {
        "instances": [],
        "set_up": not check.per or bool(config.name),
        "enabled": enabled,
        "required_setting": explain.expects if not expected else "",
        "disabled_by": disabled_by,
        "timelines": [
            {"severity": finding.severity.name.lower(), "steps": [_step(step) for step in each]}
            for finding, each in courses
        ],
        "shared": explain.shared if line is None else line.shared_cause,
        "at_once": explain.at_once,
        "observed": heard and observed,
        "paused_until": here.running.paused_until if here.running else 0.0,
        "settings": list(
            _deciders(code, explain, check, config, enabled, here, steps, heard and observed, disabled_by)
        ),
    }


def _disabled_by(explain: Explain, check: Check, config: CheckConfig, heard: bool, here: Here) -> str:
    """Return the setting that switches the detection of this code off, "" if it is on."""
    if heard and here.settings.kernel_log.source == "off":
        return _KERNEL_LOG
    if explain.needs and not getattr(config, explain.needs, True):
        return place_of(check.name, config.name, explain.needs)
    return ""


def _step(step: Step) -> dict[str, Any]:
    return {
        "after_seconds": step.after_seconds,
        "severity": step.severity.name.lower(),
        "does": step.does.value,
        "would": step.would.value,
    }


def _deciders(
    code: str,
    explain: Explain,
    check: Check,
    config: CheckConfig,
    enabled: bool,
    here: Here,
    steps: Sequence[Step],
    observed: bool,
    disabled_by: str,
) -> Iterator[dict[str, Any]]:
    """The settings that decide it, and where each came from."""

    def row(place: str, value: object) -> dict[str, Any]:
        return {"setting": place, "value": dump(value), "from": here.origin(place)}

    def place(setting: str) -> str:
        """Where it is set: in the instance's own table, or in the check's."""
        own = place_of(check.name, config.name, setting)
        return own if here.loaded and own in here.loaded.origins else place_of(check.name, "", setting)

    def own(setting: str) -> dict[str, Any]:
        return row(place(setting), getattr(config, setting))

    settings = here.settings
    drains = {Does.DRAINS, Does.REQUEUES} & {step.would for step in steps}
    if not enabled and (config.name or not check.per):
        yield own("enabled")
    if drains:
        mode, origin = here.mode
        yield {"setting": "mode", "value": mode.value, "from": origin}
    worsens = explain.worsens.setting if explain.worsens else ""
    for setting in dict.fromkeys((explain.needs, explain.chosen_by, explain.expects, explain.confirm, worsens)):
        if setting and hasattr(config, setting) and not isinstance(getattr(config, setting), dict | tuple | list):
            yield own(setting)
    if not config.enforce:
        yield own("enforce")
    if code in config.severity:
        yield {**own("severity"), "setting": f'{place("severity")}."{code}"', "value": dump(config.severity[code])}
    if explain.expects in config.guessed or "name" in config.guessed:
        yield row("profile", here.loaded.profile if here.loaded else "")
    if observed or disabled_by == _KERNEL_LOG:
        yield row(_KERNEL_LOG, settings.kernel_log.source)
    if observed:
        yield row("kernel_log.trust_file", settings.kernel_log.trust_file)
    if Does.REQUEUES in drains and here.mode[0] is not Mode.DRAIN:
        yield row("slurm.requeue", settings.slurm.requeue)
    if drains:
        names = ("limit_percent", "limit_min_nodes")
        own_hardware = tuple(f"own_hardware_{name}" for name in names)
        for name in (*(names if explain.shared is not False else ()), *(own_hardware if not explain.shared else ())):
            yield row(f"fleet.{name}", getattr(settings.fleet, name))


# --- as text

_DOES = {
    Does.WAITS: "it is only suspected: healthd status shows it, nothing more is done",
    Does.RECORDS: "it is recorded, nothing more: the node stays in service",
    Does.WARNS: "it warns in status, metrics and log, and changes nothing in Slurm",
    Does.DRAINS: "it drains the node: running jobs finish, nothing new starts",
    Does.REQUEUES: "it drains the node and requeues {victims}",
}
_VICTIMS = {
    Requeue.PART.value: "the batch jobs that the broken part serves",
    Requeue.NODE.value: "all batch jobs of the node",
}
_WOULD = {
    Does.DRAINS: 'it would drain the node in mode "drain" or "act": running jobs finish, nothing new starts',
    Does.REQUEUES: 'it would drain the node in mode "drain", and in mode "act" also requeue {victims}',
}


def does_words(step: Document, victims: str) -> str:
    """One step of a course: "it drains the node: ..."."""
    does, would = Does(step["does"]), Does(step["would"])
    if does is would:
        return _DOES[does].format(victims=victims)
    if does is Does.DRAINS:
        return f'{_DOES[does]}. In mode "act" it would also requeue {victims}'
    return _WOULD[would].format(victims=victims)


def sentences(run: Document) -> Iterator[str]:
    """What healthd does with one code in one run of its check, as a list of sentences."""
    of = {row["setting"]: row["value"] for row in run["settings"]}
    victims = _VICTIMS[of.get("slurm.requeue", Requeue.PART.value)]
    for number, each in enumerate(run["timelines"]):
        steps = each["steps"]
        told = [f"{_when(steps, place, run)} {does_words(step, victims)}" for place, step in enumerate(steps)]
        if not number:
            yield from (f"{words[:1].upper()}{words[1:]}." for words in told)
        elif each["steps"] != run["timelines"][0]["steps"]:
            yield f"Where it is {each['severity']}: {'; '.join(told)}."
    if run["observed"]:
        yield (
            "The kernel log is read from a file, in which a user can forge lines: what it says is shown and decides "
            "nothing."
        )
    reasons = [f"{row['setting']} = {_written(row['value'])} ({row['from']})" for row in run["settings"]]
    if capped := [words for words in reasons if words.partition(" ")[0].endswith(".enforce")]:
        yield f"It never drains: {capped[0]}."
    elif "profile" in of:
        yield "It never drains: what it is compared with was only guessed, by the profile of this machine's type."
    if _drains(run, "would"):
        yield from _limits(run, of)


def _when(steps: Sequence[Document], place: int, run: Document) -> str:
    after = steps[place]["after_seconds"]
    if after:
        return f"after {duration(after)}{' (at once where it is sure)' if run['at_once'] else ''}"
    return "at first sight" if len(steps) > 1 else "at once"


def _drains(run: Document, word: str) -> bool:
    return any(step[word] in ("drains", "requeues") for each in run["timelines"] for step in each["steps"])


def _limits(run: Document, of: Mapping[str, Any]) -> Iterator[str]:
    if of.get("mode") == Mode.OBSERVE.value:
        origin = next(row["from"] for row in run["settings"] if row["setting"] == "mode")
        if origin == MODE_UNKNOWN:
            yield "Whether anything is changed in Slurm is not known: neither the settings nor a daemon tell the mode."
        else:
            yield f'Nothing is changed in Slurm: mode is "observe" ({origin}).'
    if run["paused_until"]:
        yield f"Nothing is changed in Slurm: healthd is paused until {date(run['paused_until'])}."
    if run["shared"] is not False:
        cause = (
            "Other nodes may have the same cause, so" if run["shared"] else "If other nodes may have the same cause,"
        )
        yield (
            f"{cause} a drain first waits a random time. Limit: healthd keeps at most {_share(of, 'limit')} drained "
            "for such faults. Past that, this drain waits."
        )
    if not run["shared"]:
        yield (
            f"Limit: healthd keeps at most {_share(of, 'own_hardware_limit')} drained for faults of the node's own "
            "hardware. Past that, this drain waits."
        )


def _share(of: Mapping[str, Any], name: str) -> str:
    least = of[f"fleet.{name}_min_nodes"]
    nodes = f"{least} {'node' if least == 1 else 'nodes'}"
    return f"{of[f'fleet.{name}_percent']:g} % of a partition (but at least {nodes})"


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def text(document: Document, page: Page) -> str:
    """The document as people read it."""
    narrow = Page(min(page.width, 100), page.colour)
    return "\n".join(_TEXTS[document["what"]](document, narrow)) + "\n"


def _code_text(d: Document, page: Page) -> Iterator[str]:
    head = f"{page.heading(d['code'])}  {page.paint(d['severity'])}"
    head += f", if it lasts {page.paint(d['worsens'])}" if d["worsens"] else ""
    yield f"{head} (some of it {', '.join(d['also'])})" if d["also"] else head
    if d["part"]:
        yield from page.wrap(f"of {d['part']}")
    if d["message"]:
        yield from page.wrap(f"The line says: {d['message']}")
    yield from _section("What it means", d["meaning"], page)
    yield from _section("Why it matters", d["matters"], page)
    if d["settings_problem"]:
        yield from _section("What healthd does here", "", page)
        problem = f"The settings could not be read, so this is by the defaults: {d['settings_problem']}"
        yield from page.wrap(problem, "  ")
    elif d["here"]:
        yield from _section("What healthd does here", "", page)
    for run in d["here"]:
        yield from _run_text(run, d["check"], page)
    drains = any(_drains(run, "does") for run in d["here"])
    yield from _section("What ends it", "\n".join([d["ends"], *([RESUMES] if drains else [])]), page)
    yield from _section("What to do", d["todo"], page)
    for step in d["steps"]:
        yield from (*page.wrap(f"{step['when']}:", "  "), f"    {printable(step['command'])}")


def _run_text(run: Document, check: str, page: Page) -> Iterator[str]:
    if run["instances"]:
        yield from page.wrap(f"{check} {', '.join(run['instances'])}:", "  ")
    if not run["set_up"]:
        yield from page.wrap(f"Not checked here: there is no [checks.{check}.NAME]. With one:", "  ")
    elif not run["enabled"]:
        yield from page.wrap("Not checked here: the check is off (enabled = false). If you turn it on:", "  ")
    elif run["disabled_by"]:
        yield from page.wrap(f"Not checked here: {run['disabled_by']} is off. If you turn it on:", "  ")
    elif run["required_setting"]:
        yield from page.wrap(
            f"Not checked here: [checks.{check}] {run['required_setting']} is empty. "
            "Set it, or run healthd baseline --write. Then:",
            "  ",
        )
    for sentence in sentences(run):
        yield from page.item(f"- {sentence}", "  ")
    if run["settings"]:
        yield ""
        rows = [(row["setting"], _written(row["value"]), row["from"]) for row in run["settings"]]
        yield from (f"  {line}" for line in page.table(("decided by", "value", "from"), rows))


def _section(title: str, words: str, page: Page) -> Iterator[str]:
    yield ""
    yield page.heading(title)
    for paragraph in words.split("\n") if words else ():
        yield from page.item(paragraph, "  ") if paragraph.startswith("- ") else page.wrap(paragraph, "  ")


# --- other things than a code


def code_row(code: Document) -> tuple[str, str, str, str]:
    """A row of render.codes."""
    return code["code"], code["severity"], code["ends"], _first_sentence(code["meaning"])


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def of_check(query: str, check: Check, codes: Iterable[Document]) -> dict[str, Any]:
    """codes: as `healthd list --codes --json` has them."""
    return {
        "query": query,
        "what": "check",
        "check": check.name,
        "summary": check.summary,
        "codes": list(codes),
        "runbook": "" if check.path else f"{RUNBOOKS}/{check.name}.md",
    }


def _check_text(d: Document, page: Page) -> Iterator[str]:
    yield page.heading(d["check"])
    yield from page.wrap(d["summary"], "  ")
    yield ""
    yield render.codes(map(code_row, d["codes"]), page).rstrip("\n")


def of_kernel_line(query: str, message: str) -> dict[str, Any]:
    """A line of the kernel log that is no fault."""
    return {"query": query, "what": "kernel_line", "message": message}


def _line_text(d: Document, page: Page) -> Iterator[str]:
    yield from page.wrap(d["message"])


def of_foreign_reason(query: str, origin: str, meaning: str, todo: str) -> dict[str, Any]:
    return {"query": query, "what": "foreign_reason", "origin": origin, "meaning": meaning, "todo": todo}


def _others_text(d: Document, page: Page) -> Iterator[str]:
    yield from page.wrap(d["query"])
    yield from _section("Whose it is", f"{d['origin'][:1].upper()}{d['origin'][1:]}.", page)
    yield from _section("What it means", d["meaning"], page)
    yield from _section("What to do", d["todo"], page)


def of_several(query: str, why: str, codes: Iterable[Document]) -> dict[str, Any]:
    """Codes that the words may mean, as in of_check."""
    return {"query": query, "what": "ambiguous", "why": why, "codes": list(codes)}


def _several_text(d: Document, page: Page) -> Iterator[str]:
    yield from page.wrap(d["why"])
    yield ""
    yield render.codes(map(code_row, d["codes"]), page).rstrip("\n")


_TEXTS = {
    "code": _code_text,
    "check": _check_text,
    "foreign_reason": _others_text,
    "ambiguous": _several_text,
    "kernel_line": _line_text,
}
