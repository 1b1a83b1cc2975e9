"""Tests of the ending and the advice of each code: equal in status, explain, list, the runbooks and the docs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from fakes import CODES_WITH_VARIABLE_ENDING
from msgspec.structs import replace

from healthd.agent.conditions.absorb import absorb_events, absorb_result
from healthd.agent.conditions.endings import after_quiet_time
from healthd.agent.reporting import explanation, render
from healthd.agent.reporting.endings import condition_remedy, ending_text
from healthd.agent.reporting.explanation import NodeContext, finding_ending
from healthd.agent.reporting.fault_timeline import possible_findings
from healthd.agent.reporting.next_steps import next_steps
from healthd.agent.reporting.status import condition_json
from healthd.agent.settings import registry
from healthd.cli.main import main
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionState,
    Inventory,
    KernelEvent,
    Outcome,
    Remedy,
    Severity,
)

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import checks_page  # noqa: E402
import runbooks  # noqa: E402

pytestmark = pytest.mark.one_python

CHECKS = registry.built_in_checks()
TEXTS = registry.explained(CHECKS)
DESTROYS = re.compile(r"systemctl (reboot|poweroff)|nvidia-smi --gpu-reset")
POWER = re.compile(r"[Pp]ower the node off|[Pp]ower-cycle|with the power off")
PCI = "0000:61:00.0"


def get_check(code):
    return CHECKS[code.partition("/")[0]]


def worst_finding(code):
    return replace(possible_findings(code, TEXTS[code], get_check(code).config())[0], subject=PCI)


def make_condition(code, finding):
    """Return the condition that the ledger makes of a finding, from a run or from a kernel line."""
    check = get_check(code).name
    if get_check(code).reads_kernel_log and not get_check(code).has_run:
        event = KernelEvent("", time=1.0, last_time=1.0, sequence=1)
        (condition,) = absorb_events(
            {}, check, [replace(finding, events=(1,))], {1: event}, frozenset({1}), "b", ()
        ).values()
        return condition
    (condition,) = absorb_result(
        {}, CheckResult(check, "", Outcome.COMPLETED, 1.0, 0.0, (finding,)), 2, "b", ()
    ).values()
    return condition


def status_document(code):
    condition = make_condition(code, replace(worst_finding(code), confirm_seconds=0.0))
    assert isinstance(condition, Condition)
    return condition_json(condition, registry.remedies(CHECKS, [code]))


def explain_document(code):
    return explanation.code_document(f"{code} {PCI}", code, PCI, TEXTS[code], get_check(code), NodeContext(None))


@pytest.fixture(scope="module")
def listed_codes():
    from healthd.cli.explain import codes_json

    return {row["code"]: row for row in codes_json(CHECKS)}


@pytest.fixture(scope="module")
def pages():
    runbook = "\n".join(runbooks.page(check) for check in CHECKS.values())
    sections = re.split(r"(?m)^## (?=[a-z0-9_]+/)", runbook)
    return {"checks": checks_page.page(CHECKS), "runbooks": {s.partition("\n")[0]: s for s in sections}}


@pytest.mark.one_python
@pytest.mark.parametrize("code", sorted(TEXTS))
def test_every_text_prints_same_ending(code, listed_codes, pages):
    document = status_document(code)
    general = finding_ending(worst_finding(code))
    part_ending = ending_text(document["clears"], document["window_seconds"], repaired=f"healthd repaired {code} {PCI}")
    assert listed_codes[code]["ends"] == general
    assert f"| `{code}` |" in pages["checks"]
    (row,) = (line for line in pages["checks"].splitlines() if line.startswith(f"| `{code}` |"))
    assert row.split(" | ")[2] == general
    explained_ending = explain_document(code)["ends"]
    clear_after = get_check(code).config().clear_after
    command = f"healthd repaired {code} {PCI}"
    ending = finding_ending(worst_finding(code), clear_after, command)
    final_stop = "" if ending.endswith(command) else "."
    assert explained_ending.split("\n")[0] == f"Clears after {ending}{final_stop}"
    status_text = render._condition_text({**document, "since": 0.0, "last_seen": 0.0}, 1.0)
    assert status_text.endswith(f"clears after: {part_ending}")
    runbook_text = " ".join(pages["runbooks"][code].replace("\\", "").split())
    assert finding_ending(worst_finding(code), clear_after, f"healthd repaired {code} PART") in runbook_text


@pytest.mark.one_python
@pytest.mark.parametrize("code", sorted(TEXTS))
def test_status_explain_and_runbook_offer_same_commands(code, pages):
    runbook = pages["runbooks"][code]
    document = status_document(code)
    steps = list(next_steps(document, [document], ()))[:-1]
    explained_steps = [(step["when"], step["command"]) for step in explain_document(code)["steps"]]
    if TEXTS[code].line_decides:
        assert explained_steps == []
        assert "**Commands.**" not in runbook
        return
    assert steps == explained_steps
    commands = [command for _, command in steps]
    for command in commands:
        assert f"`{command.replace(PCI, 'PCI')}`" in runbook or f"`{command.replace(PCI, 'PART')}`" in runbook
    destructive_steps = [index for index, command in enumerate(commands) if DESTROYS.match(command)]
    if commands[-1:] and commands[-1].startswith("healthd repaired") and TEXTS[code].severity >= Severity.DEGRADED:
        destructive_steps = [len(commands) - 1]  # the part is repaired with the power off
    assert not destructive_steps or commands.index("healthd record") < destructive_steps[0]
    assert all("PCI" not in command and "PART" not in command for command in commands)


@pytest.mark.parametrize("code", sorted(TEXTS))
def test_advice_text_matches_commands(code):
    text = TEXTS[code]
    remedy = condition_remedy(
        text.clears.name.lower(), text.severity.name.lower(), text.remedy.value if text.remedy else ""
    )
    todo = explain_document(code)["todo"]
    if remedy == "power_cycle" or text.remedy is Remedy.POWER_CYCLE:
        assert POWER.search(todo), todo
    elif remedy == "reboot":
        assert "power off" not in todo.lower(), todo
        assert not todo.startswith("Power"), todo
    elif remedy == "nothing" and text.severity < Severity.DEGRADED and code.startswith("sxid/"):
        assert todo.startswith("No action tonight"), todo
    assert " -i PCI" not in todo, todo
    assert f"repaired {code} PCI" not in todo
    assert "repaired CODE" not in todo
    assert "{_" not in todo, "a string without f prefix"


def test_switch_warning_ends_with_time_and_says_so(capsys):
    """The condition expired after a day, while every text named a reboot."""
    event = KernelEvent("sxid", "12028", "0000:05:00.0", 1.0, "", last_time=1.0, sequence=1, boot_id="b")
    ((finding,),) = (CHECKS["sxid"].correlate([event], Inventory(), CHECKS["sxid"].config())[0],)
    open_conditions = absorb_events({}, "sxid", [finding], {1: event}, frozenset({1}), "b", ())
    open_conditions = after_quiet_time(open_conditions, 24 * 3600.0 - 1, True, 24 * 3600.0)
    assert [c.state for c in open_conditions.values()] == [ConditionState.OPEN]
    (cleared_condition,) = after_quiet_time(open_conditions, 2.0, True, 24 * 3600.0 + 2).values()
    assert (cleared_condition.state, cleared_condition.cleared_by) == (ConditionState.CLEARED, "window")
    assert main(["explain", "--json", "sxid/12028"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ends"].startswith("Clears after 24 h ")
    assert "reboot" in document["ends"]
    assert document["steps"] == []


@pytest.mark.parametrize(
    ("clears", "window", "clear_after", "expected"),
    [
        ("pass", 0.0, 0, "clean runs of the check"),
        ("pass", 0.0, 1, "1 clean run of the check"),
        ("pass", 0.0, 2, "2 clean runs of the check"),
        ("window", 86400.0, 0, "24 h without a repeat"),
        ("window", 0.0, 0, "time without a repeat"),
        ("reboot", 86400.0, 0, "24 h without a repeat, or a reboot"),
        ("gpu_reset", 0.0, 0, "a GPU reset or a reboot"),
        ("operator", 3600.0, 0, "60 min without a repeat, or healthd repaired CODE PART"),
    ],
)
def test_ending_text_names_time_and_cause(clears, window, clear_after, expected):
    assert ending_text(clears, window, clear_after) == expected


def test_every_ending_and_remedy_has_text():
    for clears in Clears:
        assert ending_text(clears.name.lower())
        for severity in Severity:
            assert condition_remedy(clears.name.lower(), severity.name.lower()) in {remedy.value for remedy in Remedy}


def test_codes_with_varying_ending_exist():
    assert set(TEXTS) >= CODES_WITH_VARIABLE_ENDING


def test_drained_page_gives_same_advice():
    """The table names the first action. The page once named a power cycle where status named a reboot."""
    page = (ROOT / "docs/drained.md").read_text("utf-8")
    remedy_texts = {Remedy.POWER_CYCLE: "power cycle", Remedy.REBOOT: "reboot", Remedy.GPU_RESET: "reset the GPU"}
    rows = [line for line in page.splitlines() if line.startswith("| [") and "runbooks/" in line]
    assert rows
    for row in rows:
        first_action = row.split(" | ")[1].lower()
        for code in re.findall(r"\[([a-z_0-9]+/[a-z_0-9]+)\]\(runbooks", row):
            document = status_document(code)
            remedy = Remedy(document["remedy"])
            for other_remedy, text in remedy_texts.items():
                if remedy in remedy_texts:
                    assert (text.lower() in first_action) == (other_remedy is remedy), (code, row)
    assert page.index("## 4. Save the evidence") < page.index("## 5. Repair")
