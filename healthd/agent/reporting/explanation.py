"""The JSON document (docs/json.md) and text of `healthd explain`: what a code means and how healthd reacts to it here.

The checks provide the texts. fault_timeline.py computes healthd's reaction from this node's settings.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from healthd.agent.reporting import render
from healthd.agent.reporting.endings import ending_text
from healthd.agent.reporting.fault_timeline import Effect, RackRequeue, Step, possible_findings, rack_requeue, timeline
from healthd.agent.reporting.next_steps import remedy_steps
from healthd.agent.reporting.render import Document
from healthd.agent.settings.config import CheckConfig, Loaded, Settings, is_kernel_log_forgeable
from healthd.agent.settings.effective import setting_path
from healthd.agent.settings.registry import Check
from healthd.agent.slurm.policy import Policy
from healthd.common.codec import dump
from healthd.common.duration import duration
from healthd.common.model import Clears, Explain, Finding, Mode, Requeue, RunName
from healthd.common.page import Page, date, plural
from healthd.common.text import printable, regex

RUNBOOKS = "docs/runbooks"
RESUME_SENTENCE = "healthd removes its own drain after a clean run of every check that can drain."


_KERNEL_LOG = "kernel_log.source"
_DOMAIN_LIMIT = "fleet.domain_limit_nodes"
MODE_UNKNOWN = "default; the actual mode is unknown"


class Running(NamedTuple):
    """State of the running daemon that is not in its settings.

    mode          the actual mode, which may differ from the settings because of a flag or an older file
    paused_until  epoch seconds, 0 = not paused
    domain        short id of the node's NVLink domain, or ""
    """

    mode: Mode
    paused_until: float
    domain: str = ""


class NodeContext(NamedTuple):
    """This node's settings and daemon.

    loaded   None if the settings could not be read; the defaults apply
    running  None if no daemon answers
    """

    loaded: Loaded | None
    running: Running | None = None

    @property
    def settings(self) -> Settings:
        return self.loaded.settings if self.loaded else Settings()

    def origin(self, setting: str) -> str:
        return (self.loaded.origins if self.loaded else {}).get(setting, "default")

    @property
    def mode(self) -> tuple[Mode, str]:
        """Return the mode and where it is set."""
        if self.running and self.loaded is None:
            return self.running.mode, "the running daemon"
        if self.running and self.running.mode is not self.settings.mode:
            return self.running.mode, f"the running daemon; settings: {self.settings.mode.value}"
        return self.settings.mode, self.origin("mode") if self.loaded else MODE_UNKNOWN

    def policy(self) -> Policy:
        paused = bool(self.running and self.running.paused_until)
        requeue = self.settings.slurm.requeue
        return Policy(mode=self.mode[0], paused_until=math.inf if paused else 0.0, requeue=requeue)

    def runs(self, check: Check) -> dict[RunName, tuple[CheckConfig, bool]]:
        """Return a check's runs, each with its settings and whether it is enabled. If there are no runs, return a run
        with defaults.
        """
        loaded = self.loaded
        found = {name: (config, True) for name, config in loaded.checks.items()} if loaded else {}
        found |= {name: (config, False) for name, config in loaded.disabled.items()} if loaded else {}
        check_runs = {name: run for name, run in found.items() if name.check == check.name}
        return check_runs or {RunName(check.name): (check.config(), not check.per)}


def anchor(code: str) -> str:
    """Return GitHub's anchor for a code's heading on its check's page: "gpu_xid79" for "gpu_xid/79"."""
    return code.lower().replace("/", "")


def runbook(check: Check, code: str) -> str:
    """Return a code's runbook page, or "" if the code is from a site check."""
    return "" if check.path else f"{RUNBOOKS}/{check.name}.md#{anchor(code)}"


def code_document(
    query: str,
    code: str,
    part: str,
    explain: Explain,
    check: Check | None,
    context: NodeContext,
    line: Finding | None = None,
) -> dict[str, Any]:
    """Return the document for a code.

    check  None for a name that appears only in messages
    line   the finding of the kernel line that the user passed
    """
    config = next((config for config, _ in _configs(check, part, context)), CheckConfig())
    findings = possible_findings(code, explain, config)
    findings = [line, *findings[1:]] if line else findings
    worst = {
        "check": check.name if check else "",
        "code": code,
        "subject": part or ("PCI" if findings[0].clears is Clears.GPU_RESET else "PART"),
        "severity": findings[0].severity.name.lower(),
        "clears": findings[0].clears.name.lower(),
        "remedy": explain.remedy.value if explain.remedy else "",
    }
    steps = remedy_steps(worst) if check and (line or not explain.line_decides) else ()
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
        "todo": _fill_in(explain.todo, code, part),
        "ends": "\n".join(_ending_sentences(findings, code if check else "", part, config)),
        "steps": [{"when": when, "command": command} for when, command in steps],
        "here": _run_documents(code, part, explain, check, context, line) if check else [],
        "runbook": runbook(check, code) if check else "",
    }


_PLACEHOLDER = regex(r"((?: -[is]|mstdump|repaired [a-z0-9_]{1,60}/[A-Za-z0-9_.:-]{1,60}) )(?:PCI|PART)\b")


def _fill_in(todo: str, code: str, part: str) -> str:
    """Return the text with the code and part, if known, filled into its commands."""
    todo = todo.replace("healthd repaired CODE ", f"healthd repaired {code} ")
    return _PLACEHOLDER.sub(lambda found: f"{found[1]}{shlex.quote(printable(part))}", todo) if part else todo


def _ending_sentences(findings: Sequence[Finding], code: str, part: str, config: CheckConfig) -> Iterator[str]:
    """Yield sentences about how a code's worst finding clears, and then about milder findings that clear differently.

    A sentence that ends with a command has no full stop, because a reader would copy it with the command. `code` is ""
    for a name that is not a condition, which `healthd repaired` does not accept.
    """
    command = f"healthd repaired {code} {shlex.quote(printable(part)) if part else 'PART'}"
    first = finding_ending(findings[0], config.clear_after, command)
    yield _as_sentence(f"Clears after {first}", command)
    for finding in findings[1:]:
        ending = finding_ending(finding, config.clear_after, command)
        if ending != first:
            yield _as_sentence(
                f"If the severity is {finding.severity.name.lower()}, the condition clears after {ending}", command
            )
    if any(finding.window_seconds and not finding.shared_cause for finding in findings):
        yield "Time while the node is drained counts only if the part was reset or the node rebooted."
    if code and findings[0].clears is not Clears.OPERATOR:
        yield f"To clear it now: {command}"


def _as_sentence(sentence: str, command: str) -> str:
    return sentence if sentence.endswith(command) else f"{sentence}."


def finding_ending(finding: Finding, clear_after: int = 0, repaired: str = "") -> str:
    """Return text on how a finding ends, worded as in `healthd status`."""
    return ending_text(finding.clears.name.lower(), finding.window_seconds, clear_after, repaired)


def _configs(check: Check | None, part: str, context: NodeContext) -> list[tuple[CheckConfig, bool]]:
    """Return the settings of the instance that the part names, or of all instances."""
    runs = context.runs(check) if check else {}
    named = [run for name, run in runs.items() if part and name.instance == part]
    return named or list(runs.values())


def _run_documents(
    code: str, part: str, explain: Explain, check: Check, context: NodeContext, line: Finding | None
) -> list[dict[str, Any]]:
    """Return a document about healthd's reaction on this node for each group of instances with the same behaviour."""
    found: list[dict[str, Any]] = []
    for config, enabled in _configs(check, part, context):
        document = _run_document(code, explain, check, config, enabled, context, line)
        same = next((existing for existing in found if {**existing, "instances": []} == document), None)
        if same is None:
            found.append(same := document)
        same["instances"] += [config.name] if config.name else []
    return found


def _run_document(
    code: str,
    explain: Explain,
    check: Check,
    config: CheckConfig,
    enabled: bool,
    context: NodeContext,
    line: Finding | None,
) -> dict[str, Any]:
    from_kernel_log = check.reads_kernel_log and (line is not None or not check.has_run)
    observed = check.reads_kernel_log and context.loaded is not None and is_kernel_log_forgeable(context.loaded)
    findings = possible_findings(code, explain, config)
    if line is not None:
        findings = [line, *(f for f in findings if f.severity is not line.severity)]
    timelines = [
        (finding, timeline(finding, config, context.policy(), from_kernel_log, observed=from_kernel_log and observed))
        for finding in findings
    ]
    expected = getattr(config, explain.expects) if explain.expects and hasattr(config, explain.expects) else True
    steps = [step for _, timeline_steps in timelines for step in timeline_steps]
    disabled_by = _disabled_by(explain, check, config, from_kernel_log, context)
    return {
        "instances": [],
        "set_up": not check.per or bool(config.name),
        "enabled": enabled,
        "required_setting": explain.expects if not expected else "",
        "disabled_by": disabled_by,
        "timelines": [
            {"severity": finding.severity.name.lower(), "steps": [_step(step) for step in timeline_steps]}
            for finding, timeline_steps in timelines
        ],
        "shared": explain.shared if line is None else line.shared_cause,
        "rack_requeue": rack_requeue(findings[0], explain.shared, config, from_kernel_log).value,
        "at_once": explain.at_once,
        "observed": from_kernel_log and observed,
        "paused_until": context.running.paused_until if context.running else 0.0,
        "settings": list(
            _deciding_settings(
                code, explain, check, config, enabled, context, steps, from_kernel_log and observed, disabled_by
            )
        ),
    }


def _disabled_by(
    explain: Explain, check: Check, config: CheckConfig, from_kernel_log: bool, context: NodeContext
) -> str:
    """Return the setting that disables the detection of this code, or "" if the code is detected."""
    if from_kernel_log and context.settings.kernel_log.source == "off":
        return _KERNEL_LOG
    if explain.needs and not getattr(config, explain.needs, True):
        return setting_path(check.name, config.name, explain.needs)
    return ""


def _step(step: Step) -> dict[str, Any]:
    return {
        "after_seconds": step.after_seconds,
        "severity": step.severity.name.lower(),
        "does": step.effect.value,
        "would": step.effect_in_act.value,
    }


def _deciding_settings(
    code: str,
    explain: Explain,
    check: Check,
    config: CheckConfig,
    enabled: bool,
    context: NodeContext,
    steps: Sequence[Step],
    observed: bool,
    disabled_by: str,
) -> Iterator[dict[str, Any]]:
    """Yield the settings that determine the reaction, with their values and origins."""

    def row(path: str, value: object) -> dict[str, Any]:
        return {"setting": path, "value": dump(value), "from": context.origin(path)}

    def full_name(setting: str) -> str:
        """Return a setting's full name: in the instance's table if it is set there, otherwise in the check's table."""
        instance_path = setting_path(check.name, config.name, setting)
        return (
            instance_path
            if context.loaded and instance_path in context.loaded.origins
            else setting_path(check.name, "", setting)
        )

    def config_row(setting: str) -> dict[str, Any]:
        return row(full_name(setting), getattr(config, setting))

    settings = context.settings
    drains = {Effect.DRAINS, Effect.REQUEUES} & {step.effect_in_act for step in steps}
    if not enabled and (config.name or not check.per):
        yield config_row("enabled")
    if drains:
        mode, origin = context.mode
        yield {"setting": "mode", "value": mode.value, "from": origin}
    worsens = explain.worsens.setting if explain.worsens else ""
    for setting in dict.fromkeys((explain.needs, explain.chosen_by, explain.expects, explain.confirm, worsens)):
        if setting and hasattr(config, setting) and not isinstance(getattr(config, setting), dict | tuple | list):
            yield config_row(setting)
    if not config.enforce:
        yield config_row("enforce")
    if code in config.severity:
        yield {
            **config_row("severity"),
            "setting": f'{full_name("severity")}."{code}"',
            "value": dump(config.severity[code]),
        }
    if explain.expects in config.guessed or "name" in config.guessed:
        yield row("profile", context.loaded.profile if context.loaded else "")
    if observed or disabled_by == _KERNEL_LOG:
        yield row(_KERNEL_LOG, settings.kernel_log.source)
    if observed:
        yield row("kernel_log.trust_file", settings.kernel_log.trust_file)
    if Effect.REQUEUES in drains and context.mode[0] is not Mode.DRAIN:
        yield row("slurm.requeue", settings.slurm.requeue)
    if drains:
        names = ("limit_percent", "limit_min_nodes")
        own_hardware = tuple(f"own_hardware_{name}" for name in names)
        for name in (*(names if explain.shared is not False else ()), *(own_hardware if not explain.shared else ())):
            yield row(f"fleet.{name}", getattr(settings.fleet, name))
        is_set = context.origin(_DOMAIN_LIMIT) != "default"
        if is_set or (context.running and context.running.domain):
            yield row(_DOMAIN_LIMIT, settings.fleet.domain_limit_nodes)


# --- as text

_EFFECT_TEXTS = {
    Effect.WAITS: "the condition is pending: healthd status shows it, and nothing else happens",
    Effect.RECORDS: "the condition is recorded, and the node stays in service",
    Effect.WARNS: "the condition is a warning in healthd status, the metrics and the log; nothing changes in Slurm",
    Effect.DRAINS: "healthd drains the node: running jobs finish, and no new jobs start",
    Effect.REQUEUES: "healthd drains the node and requeues {victims}",
}
_VICTIMS = {
    Requeue.PART.value: "the batch jobs that use the part",
    Requeue.NODE.value: "all batch jobs on the node",
}
_RACK_TEXTS = {
    RackRequeue.ALWAYS: (),
    RackRequeue.NOT_IF_SHARED: (
        "On an NVL72, if the message suspects the switch side, healthd requeues no job: running jobs continue.",
    ),
    RackRequeue.NOT_IF_ON_ALL_GPUS: (
        "On an NVL72, healthd waits 1 min before it requeues jobs. If all GPUs of the node have reported NVLink "
        "errors by then, it requeues none, because the switches may be the cause.",
    ),
}
_WOULD_TEXTS = {
    Effect.DRAINS: 'healthd would drain the node in mode "drain" or "act": running jobs finish, and no new jobs start',
    Effect.REQUEUES: 'healthd would drain the node in mode "drain", and in mode "act" it would also requeue {victims}',
}


def step_text(step: Document, victims: str) -> str:
    """Return the text for one step, such as "healthd drains the node: ..."."""
    effect, effect_in_act = Effect(step["does"]), Effect(step["would"])
    if effect is effect_in_act:
        return _EFFECT_TEXTS[effect].format(victims=victims)
    if effect is Effect.DRAINS:
        return f'{_EFFECT_TEXTS[effect]}. In mode "act" it would also requeue {victims}'
    return _WOULD_TEXTS[effect_in_act].format(victims=victims)


def sentences(run: Document) -> Iterator[str]:
    """Yield sentences about healthd's reaction to a code in one run of its check."""
    values = {row["setting"]: row["value"] for row in run["settings"]}
    victims = _VICTIMS[values.get("slurm.requeue", Requeue.PART.value)]
    for number, entry in enumerate(run["timelines"]):
        steps = entry["steps"]
        step_texts = [f"{_when(steps, index, run)} {step_text(step, victims)}" for index, step in enumerate(steps)]
        if not number:
            yield from (f"{sentence[:1].upper()}{sentence[1:]}." for sentence in step_texts)
        elif entry["steps"] != run["timelines"][0]["steps"]:
            yield f"If the severity is {entry['severity']}: {'; '.join(step_texts)}."
    if any(step["would"] == Effect.REQUEUES.value for entry in run["timelines"] for step in entry["steps"]):
        yield from _RACK_TEXTS[RackRequeue(run["rack_requeue"])]
    if run["observed"]:
        yield (
            "The kernel log is read from a file in which users can forge lines. Its lines are displayed but never "
            "drain or requeue."
        )
    reasons = [f"{row['setting']} = {_format_value(row['value'])} ({row['from']})" for row in run["settings"]]
    if capped := [sentence for sentence in reasons if sentence.partition(" ")[0].endswith(".enforce")]:
        yield f"It never drains: {capped[0]}."
    elif "profile" in values:
        yield "It never drains, because the expected value is only a guess from this machine type's profile."
    if _drains(run, "would"):
        yield from _limits(run, values)


def _when(steps: Sequence[Document], index: int, run: Document) -> str:
    seconds = steps[index]["after_seconds"]
    if seconds:
        return f"after {duration(seconds)}{' (at once if the evidence is conclusive)' if run['at_once'] else ''},"
    return "at first," if len(steps) > 1 else "at once,"


def _drains(run: Document, key: str) -> bool:
    return any(step[key] in ("drains", "requeues") for entry in run["timelines"] for step in entry["steps"])


def _limits(run: Document, values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("mode") == Mode.OBSERVE.value:
        origin = next(row["from"] for row in run["settings"] if row["setting"] == "mode")
        if origin == MODE_UNKNOWN:
            yield "The mode is unknown (no settings, no running daemon). In mode observe, nothing changes in Slurm."
        else:
            yield f'healthd changes nothing in Slurm: mode is "observe" ({origin}).'
    if run["paused_until"]:
        yield f"healthd is paused until {date(run['paused_until'])} and changes nothing in Slurm."
    if run["shared"] is not False:
        cause = (
            "Other nodes may have the same cause, so" if run["shared"] else "If other nodes may have the same cause,"
        )
        yield (
            f"{cause} a drain first waits for a random time. Fleet limit: healthd keeps at most "
            f"{_share(values, 'limit')} drained for shared faults. Above the limit, this drain waits."
        )
    if not run["shared"]:
        yield (
            f"Fleet limit: healthd keeps at most {_share(values, 'own_hardware_limit')} drained for faults of the "
            "node's own hardware. Above the limit, this drain waits."
        )
    if _DOMAIN_LIMIT in values:
        yield (
            "In an NVLink domain that spans several nodes (GB200, GB300), healthd keeps at most "
            f"{plural(values[_DOMAIN_LIMIT], 'node')} of the domain drained, whatever the cause."
        )


def _share(values: Mapping[str, Any], name: str) -> str:
    min_nodes = values[f"fleet.{name}_min_nodes"]
    nodes = f"{min_nodes} {'node' if min_nodes == 1 else 'nodes'}"
    return f"{values[f'fleet.{name}_percent']:g} % of a partition (at least {nodes})"


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def text(document: Document, page: Page) -> str:
    """Return the document as text."""
    narrow = Page(min(page.width, 100), page.colour)
    return "\n".join(_RENDERERS[document["what"]](document, narrow)) + "\n"


def _code_text(d: Document, page: Page) -> Iterator[str]:
    head = f"{page.heading(d['code'])}  {page.paint(d['severity'])}"
    head += f", if it lasts {page.paint(d['worsens'])}" if d["worsens"] else ""
    yield f"{head} (also {', '.join(d['also'])})" if d["also"] else head
    if d["part"]:
        yield from page.wrap(f"part: {d['part']}")
    if d["message"]:
        yield from page.wrap(f"message: {d['message']}")
    yield from _section("Meaning", d["meaning"], page)
    yield from _section("Why it matters", d["matters"], page)
    if d["settings_problem"]:
        yield from _section("On this node", "", page)
        problem = f"The settings could not be read, so this describes the defaults: {d['settings_problem']}"
        yield from page.wrap(problem, "  ")
    elif d["here"]:
        yield from _section("On this node", "", page)
    for run in d["here"]:
        yield from _run_text(run, d["check"], page)
    drains = any(_drains(run, "does") for run in d["here"])
    yield from _section("When it clears", "\n".join([d["ends"], *([RESUME_SENTENCE] if drains else [])]), page)
    yield from _section("What to do", d["todo"], page)
    for step in d["steps"]:
        yield from (*page.wrap(f"{step['when']}:", "  "), f"    {printable(step['command'])}")


def _run_text(run: Document, check: str, page: Page) -> Iterator[str]:
    if run["instances"]:
        yield from page.wrap(f"{check} {', '.join(run['instances'])}:", "  ")
    if not run["set_up"]:
        yield from page.wrap(f"Not checked on this node: there is no [checks.{check}.NAME]. If there were one:", "  ")
    elif not run["enabled"]:
        yield from page.wrap(
            "Not checked on this node: the check is disabled (enabled = false). If it were enabled:", "  "
        )
    elif run["disabled_by"]:
        yield from page.wrap(f"Not checked on this node: {run['disabled_by']} is off. If it were on:", "  ")
    elif run["required_setting"]:
        yield from page.wrap(
            f"Not checked on this node: [checks.{check}] {run['required_setting']} is empty. "
            "If you set it, or run healthd baseline --write:",
            "  ",
        )
    for sentence in sentences(run):
        yield from page.item(f"- {sentence}", "  ")
    if run["settings"]:
        yield ""
        rows = [(row["setting"], _format_value(row["value"]), row["from"]) for row in run["settings"]]
        yield from (f"  {line}" for line in page.table(("setting", "value", "from"), rows))


def _section(title: str, body: str, page: Page) -> Iterator[str]:
    yield ""
    yield page.heading(title)
    for paragraph in body.split("\n") if body else ():
        yield from page.item(paragraph, "  ") if paragraph.startswith("- ") else page.wrap(paragraph, "  ")


# --- documents for checks, kernel lines and Reasons


def code_row(code: Document) -> tuple[str, str, str, str]:
    """Return a row for `render.codes`."""
    return code["code"], code["severity"], code["ends"], _first_sentence(code["meaning"])


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def check_document(query: str, check: Check, codes: Iterable[Document]) -> dict[str, Any]:
    """Return the document for a check. `codes` contains rows from `healthd list --codes --json`."""
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


def kernel_line_document(query: str, message: str) -> dict[str, Any]:
    """Return the document for a kernel line that is not a fault."""
    return {"query": query, "what": "kernel_line", "message": message}


def _line_text(d: Document, page: Page) -> Iterator[str]:
    yield from page.wrap(d["message"])


def foreign_reason_document(query: str, origin: str, meaning: str, todo: str) -> dict[str, Any]:
    return {"query": query, "what": "foreign_reason", "origin": origin, "meaning": meaning, "todo": todo}


def _foreign_reason_text(d: Document, page: Page) -> Iterator[str]:
    yield from page.wrap(d["query"])
    yield from _section("Origin", f"{d['origin'][:1].upper()}{d['origin'][1:]}.", page)
    yield from _section("Meaning", d["meaning"], page)
    yield from _section("What to do", d["todo"], page)


def ambiguous_document(query: str, why: str, codes: Iterable[Document]) -> dict[str, Any]:
    """Return the document for a query that matches several codes. `codes` is as in `check_document`."""
    return {"query": query, "what": "ambiguous", "why": why, "codes": list(codes)}


def _ambiguous_text(d: Document, page: Page) -> Iterator[str]:
    yield from page.wrap(d["why"])
    yield ""
    yield render.codes(map(code_row, d["codes"]), page).rstrip("\n")


_RENDERERS = {
    "code": _code_text,
    "check": _check_text,
    "foreign_reason": _foreign_reason_text,
    "ambiguous": _ambiguous_text,
    "kernel_line": _line_text,
}
