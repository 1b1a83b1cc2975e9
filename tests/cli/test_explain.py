"""Tests of `healthd explain`: its description of a code matches what the daemon does with a condition of that code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import assert_ends_as_explained
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.conditions import intake
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.conditions.verdict import judge
from healthd.agent.reporting import explanation
from healthd.agent.reporting.explanation import NodeContext, Running
from healthd.agent.reporting.fault_timeline import Effect, RackRequeue, possible_findings, timeline
from healthd.agent.settings import registry
from healthd.agent.settings.config import CheckConfig, Loaded, Settings
from healthd.agent.slurm.policy import Policy, decide
from healthd.cli import flags
from healthd.cli.explain_query import (
    AmbiguousQuery,
    CheckQuery,
    Code,
    ForeignReasonQuery,
    HarmlessLine,
    Unknown,
    parse_query,
)
from healthd.cli.main import main
from healthd.common.model import (
    CheckResult,
    Drain,
    DrainRecord,
    Finding,
    Inventory,
    Mode,
    NodeState,
    Outcome,
    Severity,
)
from healthd.common.slurm.drain_reason import reason
from healthd.scan import events as scan
from healthd.scan.lines import Block, Tally

CHECKS = registry.built_in_checks()
CODES = registry.all_codes(CHECKS)
START = 1_800_000_000.0
ROUND_SECONDS = 10.0
MAX_SECONDS = 1200.0
IDLE = NodeState("n", frozenset({"IDLE"}))
DATA = sorted((Path(__file__).parents[1] / "data").glob("kernel_lines*.jsonl"))
LINES = [json.loads(line)["text"] for file in DATA for line in file.read_text("utf-8").splitlines()]


def config_of(code: str) -> CheckConfig:
    return CHECKS[code.partition("/")[0]].config()


def decided_times(finding: Finding, config: CheckConfig, mode: Mode) -> dict[str, float | None]:
    """Return when a condition that every run reports drains and requeues, by the daemon's own code."""
    ledger, times = Ledger(boot_id="b"), {"drains": None, "requeues": None}
    elapsed = 0.0
    while elapsed <= MAX_SECONDS:
        now = START + elapsed
        result = CheckResult(finding.code.partition("/")[0], config.name, Outcome.COMPLETED, now, 0.0, (finding,))
        ledger = intake.take_result(ledger, result, config, now).ledger
        verdict = judge(ledger.by_key(), {}, (), 0.0)
        decision = decide(verdict, IDLE, DrainRecord(), Policy(mode=mode), now)
        if isinstance(decision, Drain):
            times["drains"] = elapsed if times["drains"] is None else times["drains"]
            if decision.requeue and times["requeues"] is None:
                times["requeues"] = elapsed
        elapsed += ROUND_SECONDS
    return times


def explained_times(finding: Finding, config: CheckConfig, mode: Mode) -> dict[str, float | None]:
    """Return the same times as explain reports them."""
    steps = timeline(finding, config, Policy(mode=mode))
    drains = (s.after_seconds for s in steps if s.effect in (Effect.DRAINS, Effect.REQUEUES))
    requeues = (s.after_seconds for s in steps if s.effect is Effect.REQUEUES)
    return {"drains": next(drains, None), "requeues": next(requeues, None)}


@pytest.mark.one_python  # tests the rules only and takes 20 s
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_timeline_matches_policy_for_every_code(name):
    for code in CHECKS[name].codes():
        explain, config = CHECKS[name].explain(code), config_of(code)
        for finding in possible_findings(code, explain, config):
            assert finding.confirm_seconds % ROUND_SECONDS == 0
            for mode in Mode:
                assert explained_times(finding, config, mode) == decided_times(finding, config, mode), (code, mode)


@pytest.mark.parametrize(
    ("code", "drains", "requeues"),
    [("mount/hang", 600.0, None), ("gpu_access/hang", 240.0, None), ("ib_link/down", 60.0, 240.0),
     ("gpu_xid/79", 0.0, 0.0), ("mount/missing", 30.0, 30.0), ("gpu_xid/13", None, None),
     ("ipmi_sel/bus_fatal", None, None)],
)  # fmt: skip
def test_timeline_of_formerly_wrong_codes(code, drains, requeues):
    explain, config = registry.explain(CHECKS, code), config_of(code)
    worst = possible_findings(code, explain, config)[0]
    assert explained_times(worst, config, Mode.ACT) == {"drains": drains, "requeues": requeues}
    assert explained_times(worst, config, Mode.DRAIN) == {"drains": drains, "requeues": None}
    assert explained_times(worst, config, Mode.OBSERVE) == {"drains": None, "requeues": None}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("gpu_nvlink/inactive", RackRequeue.NOT_IF_SHARED),
        ("gpu_fabric/unhealthy", RackRequeue.NOT_IF_SHARED),
        ("gpu_fabric/not_joined", RackRequeue.NOT_IF_SHARED),
        *((f"gpu_xid/{number}", RackRequeue.NOT_IF_ON_ALL_GPUS) for number in (74, 144, 149, 150)),
        *((code, RackRequeue.ALWAYS) for code in ("gpu_xid/154", "gpu_xid/79", "mount/missing", "ib_link/down")),
    ],
)
def test_explain_names_exceptions_from_requeue_on_a_rack(code, expected):
    check = CHECKS[code.partition("/")[0]]
    (run,) = explanation.code_document(code, code, "", check.explain(code), check, NodeContext(None))["here"]
    assert run["rack_requeue"] == expected.value
    assert any("NVL72" in sentence for sentence in explanation.sentences(run)) == (expected is not RackRequeue.ALWAYS)


def test_captured_line_is_judged_as_its_code_is_explained():
    compared = 0
    blocks = [Block.from_lines(1, [line.encode() for line in text.splitlines()]) for text in LINES]
    for scanned in (scanned_event for block in blocks for scanned_event in scan.events([block], START, Tally())):
        event, text = scanned.event, scanned.event.text
        for check in CHECKS.values():
            for finding in check.correlate([replace(event, sequence=1)], Inventory(), check.config())[0]:
                explain = registry.explain(CHECKS, finding.code)
                assert explain is not None, text
                assert finding.severity in (explain.severity, *explain.also), (finding.code, text)
                assert explain.shared is None or finding.shared_cause == explain.shared, (finding.code, text)
                assert_ends_as_explained(finding, explain, check.config())
                assert finding.confirm_seconds == 0.0
                compared += 1
    assert compared > 300


def test_explain_names_only_existing_settings():
    for code in CODES:
        explain, config = registry.explain(CHECKS, code), config_of(code)
        worsens = explain.worsens and explain.worsens.setting
        ends = (explain.window, *(other.window for other in (explain.milder, explain.recorded) if other))
        setting_names = (explain.confirm, explain.chosen_by, explain.expects, explain.needs, worsens, *ends)
        assert [name for name in setting_names if name and not hasattr(config, name)] == [], code


# --- query


def correlate(events, node):
    return [f for check in CHECKS.values() for f in check.correlate(events, node, check.config())[0]]


def parse(words: str):
    return parse_query(words, CHECKS, correlate)


XID79 = "NVRM: Xid (PCI:0000:61:00): 79, pid=4711, name=python3, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("gpu_xid/79", "gpu_xid/79", ""),
        ("79", "gpu_xid/79", ""),
        ("Xid 79", "gpu_xid/79", ""),
        ("xid: 79", "gpu_xid/79", ""),
        ("XID79", "gpu_xid/79", ""),
        ("XID_79", "gpu_xid/79", ""),
        ("GPU_XID/79", "gpu_xid/79", ""),
        ("gpu_xid/079", "gpu_xid/79", ""),
        ("sxid 12028", "sxid/12028", ""),
        ("12028", "sxid/12028", ""),
        ("149:4", "nvlink5/149:4", ""),
        ("Xid 149.4", "nvlink5/149:4", ""),
        (XID79, "gpu_xid/79", "0000:61:00.0"),
        (f"[12345.678901] {XID79}", "gpu_xid/79", "0000:61:00.0"),
        (f"Nov 22 10:00:00 node17 kernel: {XID79}", "gpu_xid/79", "0000:61:00.0"),
        (f"<4>[12345.678901] {XID79}", "gpu_xid/79", "0000:61:00.0"),
        (
            "healthd: gpu_xid/79 0000:61:00.0: Xid 79: GPU has fallen off the bus (+1 more)",
            "gpu_xid/79",
            "0000:61:00.0",
        ),
        ("Reason=healthd: mount/missing /data: it is not mounted [root@2026-11-22T10:00:00]", "mount/missing", "/data"),
        ("healthd: gpu_xid/79  root      2026-11-20T21:53:48 n1", "gpu_xid/79", ""),
        ("healthd: gpu_xid/79", "gpu_xid/79", ""),
        ("critical  gpu_xid/79 0000:61:00.0", "gpu_xid/79", "0000:61:00.0"),
        ("mount/hang /data", "mount/hang", "/data"),
    ],
)  # fmt: skip
def test_query_recognises_codes_lines_and_reasons(words, code, part):
    found = parse(words)
    assert isinstance(found, Code)
    assert (found.code, found.part) == (code, part)


def test_query_truncated_reason_is_ambiguous():
    found = parse("healthd: gpu_row_rem  root 2026-11-20T21:53:48 n1")
    assert isinstance(found, AmbiguousQuery)
    assert found.codes == tuple(code for code in CODES if code.startswith("gpu_row_rem"))


@pytest.mark.parametrize("code", CODES)
def test_query_recognises_reason_of_every_code(code):
    from fakes import NOW

    ledger = intake.take_result(
        Ledger(boot_id="b"),
        CheckResult("x", "", Outcome.COMPLETED, NOW, 0.0, (Finding(Severity.CRITICAL, code, "0000:61:00.0", "words"),)),
        CheckConfig(),
        NOW,
    ).ledger
    full_reason = reason(ledger.conditions)
    assert parse(full_reason) == Code(code, "0000:61:00.0")
    truncated = parse(f"{full_reason[:20]} root 2026-11-20T21:53:48 n[1-3]")
    assert (
        isinstance(truncated, CheckQuery)
        or truncated == Code(code)
        or (isinstance(truncated, AmbiguousQuery) and code in truncated.codes)
    )


@pytest.mark.parametrize(
    ("words", "origin"),
    [
        ("Not responding", "Slurm"),
        ("Not responding [slurm@2026-11-22T10:00:00]", "Slurm"),
        ("Kill task failed", "Slurm"),
        ("Kill task failed (JobId=4711 StepId=0)", "Slurm"),
        ("Prolog error", "Slurm"),
        ("Duplicate jobid", "Slurm"),
        ("Prolog/Epilog failure", "Slurm"),
        ("Reason=Prolog error: the fan of rack 3", "a person or a script"),
        ("gres/gpu count reported lower than configured (7 < 8)", "Slurm"),
        ("Low RealMemory (reported:1 < 100.00% of configured:2)", "Slurm"),
        ("NHC: check_hw_eth: eth0 is down", "NHC (LBNL Node Health Check)"),
        ("lemon: 6 of 7 signals", "the command healthd fleet lemons --apply, on the head node"),
        ("broken fan, ticket 12 [anna@2026-11-22T10:00:00]", "a person or a script"),
        ("Reason=waits for a new power supply", "a person or a script"),
        ("waits for a new power supply", "either a Reason"),
        ("none", "none"),
        ("(null)", "none"),
        ("Reason=None", "none"),
        ("healthd: mount/mising /data: it is not mounted", "healthd, but with a code that this version does not have"),
        (
            "healthd: our_own/fan 3: stands still [root@2026-11-22T10:00:00]",
            "healthd, but with a code that this version",
        ),
    ],
)
def test_query_names_origin_of_foreign_reason(words, origin):
    found = parse(words)
    assert isinstance(found, ForeignReasonQuery)
    assert found.meaning.origin.startswith(origin)


@pytest.mark.parametrize("words", ["gpu_xid/7o", "mount/mising", "mout/missing", "fallen", "gpu_acess/hang"])
def test_query_suggests_codes_for_unknown_code(words):
    found = parse(words)
    assert isinstance(found, Unknown)
    assert 1 <= len(found.near) <= 3


def test_query_suggests_codes_in_reason_with_unknown_code():
    reason = "healthd: mount/mising /data: it is not mounted"
    assert "mount/missing" in parse(reason).meaning.origin


@pytest.mark.parametrize("words", ["Xid 12345", "Xid 1000000", "SXid 1234567", "sxid: 9999999", "NVRM Xid 12345"])
def test_query_does_not_truncate_long_numbers(words):
    assert isinstance(parse(words), Unknown | ForeignReasonQuery)


@pytest.mark.parametrize("words", ["Xid", "xid", "Xid 12345"])
def test_query_suggests_check_for_unknown_xid(words):
    assert parse(words).near[0] == "gpu_xid"


def test_unknown_query_is_truncated_to_80_characters(capsys):
    assert main(["explain", "y" * 5000]) == 64
    message = capsys.readouterr().err
    assert f'"{"y" * 77}..."' in message


@pytest.mark.parametrize(
    "line",
    ["[ 1.234567] usb 1-1: new high-speed USB device", "nfs: server f1 OK", "EXT4-fs (sda1): mounted filesystem",
     "nvidia-nvlink: Nvlink Core is being initialized", "NVRM: Xid (PCI:0000:3b:00): 12345, foo",
     "mlx5_core 0000:0c:00.0: something", "XFS (nvme0n1p1): Ending clean mount", "mce: CPU0 has no banks today",
     "pcieport 0000:00:01.0: hm hm", "kernel: something or other", "EDAC sbridge: Ver: 1.1.2",
     "nvme nvme0: 16/0/0 default/read/poll queues", "hisi_sas 0000:74:02.0: something or other"],
)  # fmt: skip
def test_query_recognises_harmless_kernel_line(line):
    assert isinstance(parse(line), HarmlessLine)


@pytest.mark.parametrize("words", ["zzz", "?", "/", "healthd:", "xid", "-", "99999999", "Xid (PCI:"])
def test_query_accepts_meaningless_words(words):
    assert parse(words) is not None


@given(st.text(max_size=80) | st.from_regex(r"(healthd: |Xid |Reason=)?[a-z_]{0,9}/?[0-9a-z]{0,6}[^\n]{0,40}"))
def test_query_accepts_any_text(words):
    assert isinstance(parse(words), Code | CheckQuery | ForeignReasonQuery | AmbiguousQuery | HarmlessLine | Unknown)


# --- output


def explained(capsys, *arguments: str) -> dict:
    assert main(["explain", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_explain_prints_command_without_full_stop(capsys):
    for code in ("gpu_xid/79", "gpu_xid/31", "ipmi_sel/bus_fatal", "filesystem/errors"):
        lines = explained(capsys, code)["ends"].split("\n")
        assert f"healthd repaired {code} PART" in lines[-1]
        assert not lines[-1].endswith(".")


def test_explain_prints_resume_on_its_own_line(tmp_path, capsys):
    file = tmp_path / "healthd.toml"
    file.write_text('mode = "act"\n')
    assert main(["explain", "--config", str(file), "gpu_xid/79", "0000:61:00.0"]) == 0
    printed_lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith(": healthd repaired gpu_xid/79 0000:61:00.0") for line in printed_lines)
    assert any(line.startswith("  healthd removes ") for line in printed_lines), "on its own line"


@pytest.mark.parametrize(
    ("change", "command"),
    [
        ("0x0 (None) to 0x1 (GPU Reset Required)", "nvidia-smi --gpu-reset -i 0000:61:00.0"),
        ("0x0 (None) to 0x2 (Node Reboot Required)", "systemctl reboot"),
    ],
)
def test_explain_xid_154_line_selects_command(change, command, capsys):
    document = explained(capsys, "gpu_xid/154")
    assert document["steps"] == []
    assert "nvidia-smi --gpu-reset" in document["todo"]
    assert "systemctl reboot" in document["todo"]
    line = f"NVRM: Xid (PCI:0000:61:00): 154, GPU recovery action changed from {change}"
    assert [step["command"] for step in explained(capsys, line)["steps"]] == ["healthd record", command]


def steps_of(run: dict) -> list[tuple[float, str, str]]:
    return [(step["after_seconds"], step["does"], step["would"]) for step in run["timelines"][0]["steps"]]


def test_explain_uses_and_names_settings_of_node(tmp_path, capsys):
    file = tmp_path / "healthd.toml"
    file.write_text(
        'mode = "act"\n[checks.mount]\nhang_degraded_seconds = 120\n[checks.mount."/data"]\n'
        '[checks.mount."/scratch"]\n[checks.mount."/old"]\nenforce = false\n'
    )
    document = explained(capsys, "--config", str(file), "mount/hang")
    both, old = document["here"]
    assert both["instances"] == ["/data", "/scratch"]
    assert steps_of(both) == [(0.0, "warns", "warns"), (120.0, "drains", "drains")]
    settings_by_name = {row["setting"]: (row["value"], row["from"]) for row in both["settings"]}
    assert settings_by_name["mode"] == ("act", str(file))
    assert settings_by_name["checks.mount.hang_degraded_seconds"] == (120.0, str(file))
    assert steps_of(old) == [(0.0, "warns", "warns")]
    assert ('checks.mount."/old".enforce', False) in [(row["setting"], row["value"]) for row in old["settings"]]
    (old_only,) = explained(capsys, "--config", str(file), "mount/hang", "/old")["here"]
    assert old_only["instances"] == ["/old"]


@pytest.mark.parametrize(
    ("text", "code", "does"),
    [
        ('mode = "act"\n', "gpu_xid/79", "requeues"),
        ('mode = "drain"\n', "gpu_xid/79", "drains"),
        ("", "gpu_xid/79", "warns"),
        ('mode = "act"\n[checks.gpu_xid]\nenforce = false\n', "gpu_xid/79", "warns"),
        ('mode = "act"\n[checks.gpu_xid]\nseverity = {"gpu_xid/79" = "info"}\n', "gpu_xid/79", "records"),
        ('mode = "act"\n[checks.gpu_xid]\nseverity = {"gpu_xid/13" = "degraded"}\n', "gpu_xid/13", "drains"),
        ('mode = "act"\n[kernel_log]\nsource = "/var/log/kern.log"\n', "gpu_xid/79", "warns"),
        ('mode = "act"\n[kernel_log]\nsource = "/var/log/kern.log"\ntrust_file = true\n', "gpu_xid/79", "requeues"),
        ('mode = "act"\n[checks.exec.x]\ncommand = ["/bin/x"]\ncritical_severity = "critical"\n', "exec/critical",
         "requeues"),
    ],
)  # fmt: skip
def test_explain_reflects_each_setting(tmp_path, capsys, text, code, does):
    file = tmp_path / "healthd.toml"
    file.write_text(text)
    (run,) = explained(capsys, "--config", str(file), code)["here"]
    assert steps_of(run)[-1][1] == does


def test_explain_reports_disabled_check(tmp_path, capsys):
    file = tmp_path / "healthd.toml"
    file.write_text("[checks.gpu_ecc]\nenabled = false\n")
    assert main(["explain", "--config", str(file), "gpu_ecc/uncorrected"]) == 0
    text = capsys.readouterr().out
    assert "Not checked" in text
    assert "checks.gpu_ecc.enabled" in text
    assert str(file) in text


def test_explain_reports_setting_disabling_code(tmp_path, capsys):
    file = tmp_path / "healthd.toml"
    for text, code, setting in (
        ("", "failslow/job", "checks.failslow.client"),
        ("[checks.failslow]\nclient = true\n", "failslow/job", ""),
        ("[checks.failslow]\nclient = true\n", "failslow/counters", "checks.failslow.sample"),
        ('[checks.failslow]\nsample = ["ib"]\n', "failslow/loss", "checks.failslow.action"),
        ('[checks.failslow]\nsample = ["ib"]\naction = "drain"\n', "failslow/loss", ""),
        ('[kernel_log]\nsource = "off"\n', "gpu_xid/79", "kernel_log.source"),
        ('[kernel_log]\nsource = "off"\n', "gpu_access/lost", ""),
    ):
        file.write_text(text)
        (run,) = explained(capsys, "--config", str(file), code)["here"]
        assert run["disabled_by"] == setting, text
        assert main(["explain", "--config", str(file), code]) == 0
        text = capsys.readouterr().out
        assert ("Not checked" in text, setting in text) == (bool(setting), True)


def test_explain_reports_unreadable_settings(tmp_path, capsys):
    file = tmp_path / "healthd.toml"
    file.write_text("mode = \n")
    document = explained(capsys, "--config", str(file), "xid", "79")
    assert str(file) in document["settings_problem"]
    assert document["todo"]
    assert main(["explain", "--config", str(file), "79"]) == 0
    assert str(file) in capsys.readouterr().out


def test_explain_takes_mode_from_daemon_with_unreadable_settings(tmp_path, capsys, monkeypatch):
    from status_daemon import StatusDaemon

    file = tmp_path / "healthd.toml"
    file.write_text("mode = \n")
    monkeypatch.setattr(flags.runtime_dir, "__defaults__", (str(tmp_path),))
    assert main(["explain", "--config", str(file), "79"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "nothing in Slurm" not in text
    assert "mode is unknown" in text
    with StatusDaemon(tmp_path, mode="drain", pause=None):
        document = explained(capsys, "--config", str(file), "79")
        assert main(["explain", "--config", str(file), "79"]) == 0
    assert {"setting": "mode", "value": "drain", "from": "the running daemon"} in document["here"][0]["settings"]
    text = " ".join(capsys.readouterr().out.split())
    assert [does for _, does, _ in steps_of(document["here"][0])] == ["drains"]
    assert "mode is unknown" not in text


def test_explain_kernel_line_uses_severity_of_that_line(tmp_path, capsys):
    file = tmp_path / "healthd.toml"
    file.write_text('mode = "act"\n')
    words = "NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
    line = f"NVRM: Xid (PCI:0000:c8:00): 74, pid=9, name=a, {words}"
    document = explained(capsys, "--config", str(file), line)
    assert document["part"] == "0000:c8:00.0"
    assert document["here"][0]["timelines"][0]["severity"] == "warning"
    assert document["message"]


@pytest.mark.parametrize(
    ("running", "words"),
    [
        (Running(Mode.ACT, 0.0), "healthd drains the node and requeues"),
        (Running(Mode.OBSERVE, 0.0), 'mode is "observe" (the running daemon; settings: act)'),
        (Running(Mode.ACT, START), "healthd is paused until 2027-01-15"),
    ],
)
def test_explain_prefers_mode_and_pause_of_daemon(running, words):
    loaded = Loaded(Settings(mode=Mode.ACT, node_name="n"), {}, {}, {"mode": "healthd.toml"})
    explain, context = registry.explain(CHECKS, "gpu_xid/79"), NodeContext(loaded, running)
    document = explanation.code_document("79", "gpu_xid/79", "", explain, CHECKS["gpu_xid"], context)
    text = explanation.text({**document, "settings_problem": ""}, explanation.Page(80))
    assert words in " ".join(text.split())


@pytest.mark.parametrize(
    ("running", "origins", "is_listed"),
    [
        (Running(Mode.ACT, 0.0, "1a2b3c4d"), {}, True),
        (Running(Mode.ACT, 0.0), {}, False),
        (None, {}, False),
        (None, {"fleet.domain_limit_nodes": "healthd.toml"}, True),
    ],
)
def test_explain_lists_limit_of_nvlink_domain_on_node_in_domain(running, origins, is_listed):
    context = NodeContext(Loaded(Settings(mode=Mode.ACT, node_name="n"), {}, {}, origins), running)
    explain = registry.explain(CHECKS, "gpu_xid/79")
    document = explanation.code_document("79", "gpu_xid/79", "", explain, CHECKS["gpu_xid"], context)
    rows = {row["setting"]: row["value"] for run in document["here"] for row in run["settings"]}
    assert rows.get("fleet.domain_limit_nodes") == (2 if is_listed else None)
    text = " ".join(explanation.text({**document, "settings_problem": ""}, explanation.Page(80)).split())
    assert ("at most 2 nodes of the domain drained" in text) is is_listed


@pytest.mark.parametrize("code", [*CODES, "gpu_xid/others", "nvlink5/149:4"])
def test_explain_has_text_for_every_code(code):
    explain = registry.explain(CHECKS, code)
    document = explanation.code_document(code, code, "", explain, CHECKS.get(code.partition("/")[0]), NodeContext(None))
    text = explanation.text({**document, "settings_problem": ""}, explanation.Page(80))
    assert all(title in text for title in ("Meaning", "Why it matters", "When it clears", "What to do"))
    assert len(text.splitlines()) < 90
