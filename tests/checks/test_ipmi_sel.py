"""ipmi_sel: new entries in the BMC's event log that report broken hardware."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import codes, findings, parse_or_error, run_check, run_rounds, run_until_error
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import FakeSystem, captured_text, write

from healthd.agent.conditions.absorb import as_configured
from healthd.agent.conditions.verdict import judge
from healthd.checks import ipmi_sel
from healthd.checks.ipmi_sel import Config, Entry, parse
from healthd.common.history import History
from healthd.common.model import CheckResult, Clears, Finding, Outcome, RunName, Severity
from healthd.host.host import Host
from healthd.host.program import ProgramResult

SEL_COMMAND = ("ipmitool", "sel", "elist", "last", "200")
OLD = captured_text("ipmitool_sel_elist.txt")
BOOT = "  90 | 11/20/2026 | 09:00:00 | System Event BIOS Evt Sensor | OEM System boot event | Asserted\n"
FATAL = "  91 | 11/20/2026 | 10:01:17 | Critical Interrupt PCIe Err | Bus Fatal Error | Asserted\n"
AC_LOST = "  92 | 11/20/2026 | 10:01:18 | Power Supply PS1 Status | Power Supply AC lost | Asserted\n"
AC_BACK = "  93 | 11/20/2026 | 10:02:18 | Power Supply PS1 Status | Power Supply AC lost | Deasserted\n"

ABSENT_IS_FINE = {r"/dev/ipmi.*": "a machine without a BMC, or without its driver", r"ipmitool .*": "it is optional"}


@pytest.fixture
def bmc(tmp_path):
    """Return a function that creates a node whose SEL contains `text`."""

    def make(text: str = "", ran: ProgramResult | OSError | None = None) -> Host:
        write(tmp_path, {"/dev/ipmi0": ""})
        output = ran or ProgramResult(0, text, "" if text else "SEL has no entries\n")
        return Host(str(tmp_path), system=FakeSystem(str(tmp_path), {SEL_COMMAND: output}))

    return make


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    write(tmp_path, {"/dev/ipmi0": ""})
    return Host(str(tmp_path), system=FakeSystem(str(tmp_path), {SEL_COMMAND: ProgramResult(0, OLD, "")})), Config()


def findings_of_last_run(*hosts: Host) -> list[Finding]:
    """Return the findings of the last of several runs."""
    return [item for item in run_rounds(ipmi_sel, hosts) if isinstance(item, Finding)]


def test_entries_of_first_run_are_history(bmc):
    assert findings_of_last_run(bmc(OLD + FATAL)) == []


def test_machine_without_bmc_or_ipmitool_gives_nothing(tmp_path):
    system = FakeSystem(str(tmp_path), {SEL_COMMAND: OSError("must not run")})
    assert run_check(ipmi_sel, Host(str(tmp_path), system=system)) == []
    assert run_check(ipmi_sel, write(tmp_path, {"/dev/ipmi0": ""})) == []


def test_remedies_load_both_modules_and_name_no_package_manager(tmp_path):
    """Without -a, modprobe passes the second name to the first module as a parameter (modprobe(8))."""
    without = Host(str(tmp_path), system=FakeSystem(str(tmp_path), {SEL_COMMAND: OSError("must not run")}))
    (no_device,) = ipmi_sel.run(without, Config(), History({}, 0.0, ""))
    with_device = write(tmp_path, {"/dev/ipmi0": ""})
    (no_program,) = ipmi_sel.run(with_device, Config(), History({}, 0.0, ""))
    assert no_device.fix.split()[:2] == ["modprobe", "-a"]
    assert no_program.fix == "install ipmitool"


def test_new_fatal_bus_error_is_reported_once(bmc):
    (finding,) = findings_of_last_run(bmc(OLD), bmc(OLD + FATAL))
    assert (finding.code, finding.clears) == ("ipmi_sel/bus_fatal", Clears.OPERATOR)
    assert finding.subject == "Critical Interrupt PCIe Err"
    assert finding.message == "Critical Interrupt PCIe Err: Bus Fatal Error (11/20/2026 10:01:17, record 91)"
    assert findings_of_last_run(bmc(OLD), bmc(OLD + FATAL), bmc(OLD + FATAL)) == []


def test_finding_only_warns_unless_enforced(bmc):
    (finding,) = findings_of_last_run(bmc(OLD), bmc(OLD + FATAL))
    assert as_configured(finding, Config()).severity is Severity.WARNING
    assert as_configured(finding, Config(enforce=True)).severity is Severity.DEGRADED


@pytest.mark.parametrize(
    ("sensor", "event", "code"),
    [
        ("Critical Interrupt #0x90", "Bus Fatal Error", "bus_fatal"),
        ("Critical Interrupt #0xa1", "Bus Fatal Error (Bus fatal:B5d/D03/F02)", "bus_fatal"),
        ("Critical Interrupt PCIe Err", "Bus Uncorrectable error", "bus_fatal"),
        ("Critical Interrupt NMI", "PCI SERR", "critical_interrupt"),
        ("Critical Interrupt PCI Fat Sensor", "", "critical_interrupt"),
        ("Critical Interrupt PCIe Cor Sensor", "Bus Correctable error", None),
        ("Critical Interrupt #0x05", "Front Panel NMI", None),
        ("Memory #0x02", "Uncorrectable ECC (UnCorrectable ECC |  DIMMD7)", "uncorrectable"),
        ("Memory #0x88", "Correctable ECC (CPU0_G1)", None),
        ("Processor #0x40", "Uncorrectable machine check exception", "uncorrectable"),
        ("Processor #0xc9", "IERR", "uncorrectable"),
        ("Power Supply PS1 Status", "Power Supply AC lost", "power_supply"),
        ("Power Supply #0x3b", "Failure detected", "power_supply"),
        ("Power Supply PS1 Status", "Presence detected", None),
        ("Power Supply #0x62", "Fully Redundant", None),
        ("Power Unit Pwr Unit Status", "Power off/down", None),
        ("Physical Security Physical Scrty", "General Chassis intrusion", None),
    ],
)
def test_entry_is_classified_by_sensor_and_event(bmc, sensor, event, code):
    line = f"  91 | 11/20/2026 | 10:01:17 | {sensor} | {event} | Asserted\n"
    assert codes(findings_of_last_run(bmc(OLD), bmc(OLD + line))) == ([f"ipmi_sel/{code}"] if code else [])
    ended = line.replace("Asserted", "Deasserted")
    assert findings_of_last_run(bmc(OLD), bmc(OLD + ended)) == []


def test_repeated_entry_gives_one_finding_with_count(bmc):
    again = FATAL.replace("  91", "  94").replace("10:01", "10:09")
    (finding,) = findings_of_last_run(bmc(OLD), bmc(OLD + FATAL + again))
    assert finding.message.endswith("(11/20/2026 10:09:17, record 94, 2 new entries)")


def test_power_restored_between_runs_gives_no_finding(bmc):
    assert findings_of_last_run(bmc(OLD), bmc(OLD + AC_LOST + AC_BACK)) == []
    assert codes(findings_of_last_run(bmc(OLD), bmc(OLD + AC_LOST))) == ["ipmi_sel/power_supply"]


# --- new entries


def test_all_entries_of_cleared_log_are_new(bmc):
    first = FATAL.replace("  91", "   1")
    assert codes(findings_of_last_run(bmc(OLD + BOOT), bmc(), bmc(first))) == ["ipmi_sel/bus_fatal"]
    assert codes(findings_of_last_run(bmc(OLD + BOOT), bmc(first))) == ["ipmi_sel/bus_fatal"]


def test_reused_id_after_clearing_is_another_entry(bmc):
    first = FATAL.replace("  91", "  8f")
    again = BOOT.replace("09:00:00", "11:30:01")
    assert codes(findings_of_last_run(bmc(OLD + BOOT), bmc(first + again))) == ["ipmi_sel/bus_fatal"]


def test_entries_added_around_a_boot_are_new(bmc):
    story = Story(ipmi_sel).run_check(bmc(OLD)).reboot().run_check(bmc(OLD + FATAL + BOOT))
    assert story.codes == ["ipmi_sel/bus_fatal"]


def test_other_ipmitool_version_makes_no_old_entry_new(bmc):
    rewritten = FATAL.replace("11/20/2026 | 10:01:17", "11/20/26 | 11:01:17 CET")
    assert findings_of_last_run(bmc(OLD + FATAL), bmc(OLD + rewritten)) == []


# --- unreadable logs


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (ProgramResult(1, "", "Get SEL Info command failed\n"), "exit status 1: Get SEL Info command failed"),
        (ProgramResult(1, OLD, "Error: Unable to establish IPMI session"), "exit status 1: Error: Unable"),
        (ProgramResult(0, "", ""), "exit status 0: no error message"),
        (ProgramResult(0, "N/A\n", ""), "not an entry of the SEL: 'N/A'"),
        (ProgramResult(0, FATAL[:-12], ""), "not an entry of the SEL"),
        (TimeoutError("ipmitool: did not end within 54 s"), "did not end"),
    ],
)
def test_bmc_failure_fails_run(bmc, output, error):
    assert error in run_until_error(ipmi_sel, bmc(ran=output))[1]


@pytest.mark.parametrize("config", [Config(), Config(enforce=True)])
def test_dead_bmc_does_not_block_resume(config):
    story = Story(ipmi_sel, config)
    failed = CheckResult("ipmi_sel", "", Outcome.FAILED, 0.0, 0.0, error="ipmitool: exit status 1")
    names = [RunName("ipmi_sel")]
    assert not story.check.may_block_resume(config)
    verdict = judge({}, {names[0]: failed}, names, 0.0, optional=names)
    assert verdict.may_resume
    assert verdict.unknown == ("ipmi_sel failed: ipmitool: exit status 1",)


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        (
            "  3a | 12/14/22 | 23:09:44 CET | Memory #0x88 | Correctable ECC (CPU0_G1) | Asserted",
            Entry(0x3A, 9 * 60 + 44, "12/14/22 23:09:44 CET", "Memory #0x88", "Correctable ECC (CPU0_G1)", True),
        ),
        (
            "  34 | 02/25/2025 | 04:50:09 PM EST | Memory #0x02 | Uncorrectable ECC (UnCorrectable ECC |  DIMMD7) | "
            "Asserted",
            Entry(
                *(0x34, 50 * 60 + 9, "02/25/2025 04:50:09 PM EST", "Memory #0x02"),
                *("Uncorrectable ECC (UnCorrectable ECC | DIMMD7)", True),
            ),
        ),
        (
            "  3e | 10/02/2025 | 22:07:09 | Temperature Inlet | Upper Non-critical going high | Deasserted | Reading "
            "28 > Threshold 28 degrees C",
            Entry(
                *(0x3E, 7 * 60 + 9, "10/02/2025 22:07:09", "Temperature Inlet", "Upper Non-critical going high", False)
            ),
        ),
        (
            "   3 |  Pre-Init  |0000005906| Fan FAN1 Tach | Lower Critical going low  | Deasserted",
            Entry(3, 2306, "Pre-Init 0000005906", "Fan FAN1 Tach", "Lower Critical going low", False),
        ),
        (
            "  8b | 08/31/2016 | 06:21:15 | OEM record df | 040020 | 12616faaaaaa",
            Entry(0x8B, 21 * 60 + 15, "08/31/2016 06:21:15", "", "OEM record df", False),
        ),
        ("  8c | OEM record e0 | 0102", Entry(0x8C, 0, "", "", "OEM record e0", False)),
        ("  8d | Linux kernel panic: Fatal excep", Entry(0x8D, 0, "", "", "Linux kernel panic: Fatal excep", False)),
    ],
)
def test_parse_reads_every_form_of_entry(line, entry):
    assert parse(line) == entry


@given(st.one_of(st.text(max_size=80), st.text("|0123456789abc: AssertedOEM", max_size=120)))
def test_parse_of_garbage_gives_entry_or_error(line):
    entry, error = parse_or_error(parse, line)
    assert isinstance(entry, Entry) or error.startswith("ipmitool: not an entry of the SEL")


# --- stories


def test_fatal_bus_error_warns_until_repaired(bmc):
    story = Story(ipmi_sel).run_check(bmc(OLD)).run_check(bmc(OLD + FATAL), minutes=60)
    assert story.codes == ["ipmi_sel/bus_fatal"]
    assert not story.drained
    story.run_checks(bmc(OLD + FATAL), 30, minutes=60).reboot().run_checks(bmc(OLD + FATAL + BOOT), 3, minutes=60)
    assert story.codes == ["ipmi_sel/bus_fatal"]
    assert story.repaired("ipmi_sel/bus_fatal").codes == []
    assert story.run_checks(bmc(OLD + FATAL + BOOT), 3, minutes=60).codes == []


def test_enforced_power_supply_loss_drains_until_repaired(bmc):
    story = Story(ipmi_sel, Config(enforce=True)).run_check(bmc(OLD)).run_check(bmc(OLD + AC_LOST), minutes=60)
    assert story.drained
    assert not story.requeued
    assert story.run_checks(bmc(OLD + AC_LOST + AC_BACK), 30, minutes=60).drained
    story.repaired("ipmi_sel/power_supply", "Power Supply PS1 Status").run_check(
        bmc(OLD + AC_LOST + AC_BACK), minutes=1
    )
    assert not story.drained
    assert story.run_check(bmc(OLD + AC_LOST + AC_BACK + FATAL.replace("  91", "  99")), minutes=60).drained


def test_first_run_gives_no_finding(bmc):
    assert findings(ipmi_sel, bmc(OLD + FATAL)) == []
