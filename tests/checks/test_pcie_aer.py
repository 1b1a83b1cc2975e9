"""pcie_aer: PCI Express errors that the kernel counts or logs for devices and the ports above them."""

from __future__ import annotations

from functools import partial

import pytest
from fakes import codes, findings, observations_named, parse_or_error, run_check, run_rounds, run_until_error
from health_checks import also
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_lines import event_of, findings_of
from msgspec.structs import replace
from story import Story
from trees import AER_NAMES, PCI, add_pci_device, aer_file, captured_text

from healthd.checks import pcie_aer
from healthd.checks.pcie_aer import TOTALS, Config, parse
from healthd.common.model import Clears, Finding, Inventory, PciDevice, Severity
from healthd.host.host import Host

GPU, NIC, NVME, PORT = "0000:1b:00.0", "0000:18:00.0", "0000:04:00.0", "0000:1a:01.0"


def device(root, pci, pci_class, above="", vendor="0x10de", **counts):
    """Create a device whose aer_dev_* files have these counts: fatal={"DLP": 1}."""
    files = {f"aer_dev_{kind}": aer_file(kind, **counts.get(kind, {})) for kind in TOTALS}
    add_pci_device(root, pci, pci_class, above, vendor, **files)


def healthy(tmp_path):
    for pci, pci_class, above in ((GPU, "0x030200", PORT), (NIC, "0x020700", ""), (NVME, "0x010802", "")):
        device(tmp_path, pci, pci_class, above, vendor="0x10de" if pci == GPU else "0x15b3")
    device(tmp_path, PORT, "0x060400", vendor="0x1000")
    return Host(str(tmp_path)), Config()


ABSENT_IS_FINE = {
    r".*/aer_dev_(correctable|nonfatal|fatal)": "AER belongs to the firmware, or the machine is virtual",
    r".*/(vendor|class)": "the device is being removed: pcie_devices reports it if it is expected",
    r"/sys/bus/pci/devices(/[^/]+)?": "a machine without PCI; a device on a root bus has no port above",
}


@pytest.fixture
def node(tmp_path):
    """Create a node with a GPU below a port, a network card and an NVMe disk. `at` is the device with `counts`."""

    def make(name="0", at=GPU, **counts):
        root = tmp_path / name
        device(root, PORT, "0x060400", vendor="0x1000", **(counts if at == PORT else {}))
        device(root, GPU, "0x030200", above=PORT, **(counts if at == GPU else {}))
        device(root, NIC, "0x020700", vendor="0x15b3", **(counts if at == NIC else {}))
        device(root, NVME, "0x010802", vendor="0x144d", **(counts if at == NVME else {}))
        return Host(str(root))

    return make


def findings_after(node, *steps, at=GPU, config=None, interval=300.0):
    """Return the findings of the last of several rounds with these counts."""
    hosts = [node(str(n), at, **step) for n, step in enumerate(steps)]
    return [item for item in run_rounds(pcie_aer, hosts, config, interval) if isinstance(item, Finding)]


def test_healthy_node_gives_counters_and_no_finding(node):
    results = run_check(pcie_aer, node())
    assert [item.value for item in observations_named(results, "pcie_aer_watched_devices")] == [4]
    assert {item.labels[0][1] for item in observations_named(results, "pcie_aer_fatal_total")} == {GPU, NIC, NVME, PORT}
    assert [item for item in results if isinstance(item, Finding)] == []


@pytest.mark.parametrize("at", [GPU, NIC, NVME, PORT])
def test_fatal_error_is_critical_until_reboot(node, at):
    (finding,) = findings_after(node, {}, {"fatal": {"DLP": 1}}, at=at)
    assert (finding.code, finding.subject) == ("pcie_aer/fatal", at)
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.REBOOT)
    assert "DLP 1" in finding.message


def test_error_of_port_names_the_device_below(node):
    (finding,) = findings_after(node, {}, {"fatal": {"SDES": 1}}, at=PORT)
    assert f"port above GPU {GPU}" in finding.message


def test_errors_from_before_healthd_started_give_no_finding(node):
    old = {"fatal": {"DLP": 3}, "nonfatal": {"TLP": 2}, "correctable": {"RxErr": 10**6}}
    assert findings(pcie_aer, node(**old)) == []
    assert findings_after(node, old, old) == []


def test_single_nonfatal_error_warns(node):
    (finding,) = findings_after(node, {}, {"nonfatal": {"CmpltTO": 1}})
    assert (finding.code, finding.severity) == ("pcie_aer/nonfatal", Severity.WARNING)
    assert (finding.clears, finding.window_seconds) == (Clears.WINDOW, 86400.0)


@pytest.mark.parametrize(("interval", "repeated"), [(3500.0, True), (3601.0, False)])
def test_nonfatal_errors_repeated_within_an_hour_are_degraded(node, interval, repeated):
    found = findings_after(node, {}, {"nonfatal": {"TLP": 1}}, {"nonfatal": {"TLP": 2}}, interval=interval)
    expected = (
        ("pcie_aer/nonfatal_repeated", Severity.DEGRADED) if repeated else ("pcie_aer/nonfatal", Severity.WARNING)
    )
    assert [(f.code, f.severity) for f in found] == [expected]


def test_more_than_100_corrected_errors_an_hour_warn(node):
    assert findings_after(node, {}, {"correctable": {"BadTLP": 100}}) == []
    (finding,) = findings_after(node, {}, {"correctable": {"BadTLP": 60}}, {"correctable": {"BadTLP": 101}})
    assert (finding.code, finding.severity) == ("pcie_aer/correctable", Severity.WARNING)
    slow = [{"correctable": {"BadTLP": 60 * n}} for n in range(4)]
    assert findings_after(node, *slow, interval=3700.0) == []


def test_limits_are_settings(node):
    assert len(findings_after(node, {}, {"correctable": {"BadTLP": 9}}, config=Config(correctable_per_hour=8))) == 1
    steps = ({}, {"nonfatal": {"TLP": 1}}, {"nonfatal": {"TLP": 2}})
    assert codes(findings_after(node, *steps, config=Config(nonfatal_repeat_seconds=100.0))) == ["pcie_aer/nonfatal"]


def test_counters_restarted_after_removal_count_from_zero(node):
    assert findings_after(node, {"fatal": {"DLP": 5}}, {}) == []
    assert codes(findings_after(node, {"fatal": {"DLP": 5}}, {"fatal": {"DLP": 1}})) == ["pcie_aer/fatal"]


def test_device_without_aer_files_is_not_watched(tmp_path):
    add_pci_device(tmp_path, GPU, "0x030200", port=PORT)
    results = run_check(pcie_aer, Host(str(tmp_path)))
    assert [(item.name, item.value) for item in results] == [("pcie_aer_watched_devices", 0)]


def test_machine_without_pci_gives_no_finding(tmp_path):
    assert findings(pcie_aer, Host(str(tmp_path))) == []


def test_virtual_functions_displays_and_lone_bridges_are_not_watched(tmp_path):
    device(tmp_path, "0000:18:00.2", "0x020700", vendor="0x15b3")
    (tmp_path / PCI[1:] / "0000:18:00.2" / "physfn").symlink_to("../0000:18:00.0")
    device(tmp_path, "0000:03:00.0", "0x030000", vendor="0x1a03")
    device(tmp_path, "0000:02:00.0", "0x060400", vendor="0x1000")
    results = run_check(pcie_aer, Host(str(tmp_path)))
    assert [item.value for item in observations_named(results, "pcie_aer_watched_devices")] == [0]


def test_vanished_file_gives_no_finding(node, tmp_path):
    host = node("0")
    (tmp_path / "0" / PCI[1:] / GPU / "aer_dev_fatal").unlink()
    assert findings(pcie_aer, host) == []


def test_parse_reads_names_with_spaces_of_linux_4_19():
    counts = parse(captured_text("aer_dev_correctable_4.19.txt").strip(), "TOTAL_ERR_COR")
    assert counts["Receiver Error"] == 2
    assert counts["RELAY_NUM Rollover"] == 0
    assert counts["TOTAL_ERR_COR"] == 2


@pytest.mark.parametrize("text", ["", "N/A", "RxErr", "RxErr 1", "RxErr x\nTOTAL_ERR_COR 1", f"TOTAL_ERR_COR {2**64}"])
def test_garbled_file_fails_run_and_hides_no_other_device(node, tmp_path, text):
    host = node("0")
    (tmp_path / "0" / PCI[1:] / GPU / "aer_dev_correctable").write_text(text)
    results, error = run_until_error(pcie_aer, host)
    assert f"{GPU}/aer_dev_correctable" in error
    assert NIC in {item.labels[0][1] for item in observations_named(results, "pcie_aer_correctable_total")}


def test_fatal_error_drains_and_requeues_until_reboot(node):
    healthy_host, broken = node("0"), node("1", fatal={"SDES": 1})
    story = Story(pcie_aer).run_check(healthy_host).run_check(broken)
    assert (story.drained, story.requeued) == (True, True)
    story.run_checks(broken, 400).repaired("pcie_aer/nonfatal")
    assert story.codes == ["pcie_aer/fatal"]  # a day and a half without errors repairs nothing
    story.reboot().run_checks(healthy_host, 2)
    assert (story.codes, story.drained) == ([], False)


def test_repeated_errors_drain_and_idle_time_is_not_clean(node):
    hosts = [node(str(n), nonfatal={"CmpltTO": n}) for n in range(3)]
    story = Story(pcie_aer)
    for host in hosts:
        story.run_check(host)
    assert (story.drained, story.requeued) == (True, False)
    story.run_checks(hosts[2], 2 * 288)
    assert story.codes == ["pcie_aer/nonfatal", "pcie_aer/nonfatal_repeated"]
    story.reboot().run_checks(node("3"), 280)
    assert story.drained  # repaired, but not clean for a day yet
    story.run_checks(node("3"), 12)
    assert (story.codes, story.drained) == ([], False)


@pytest.mark.parametrize(
    ("code", "counts"), [("nonfatal", {"nonfatal": {"TLP": 1}}), ("correctable", {"correctable": {"RxErr": 101}})]
)
def test_single_or_corrected_errors_never_drain_and_clear_after_clean_day(node, code, counts):
    healthy_host, worse = node("0"), node("1", **counts)
    story = Story(pcie_aer).run_check(healthy_host).run_check(worse)
    assert (story.codes, story.drained) == ([f"pcie_aer/{code}"], False)
    story.run_checks(worse, 285)
    assert story.codes == [f"pcie_aer/{code}"]
    story.run_checks(worse, 6)
    assert story.codes == []


# --- the kernel log

AUDIO, OTHER_PCI = "0000:1b:00.1", "0000:05:00.0"
NODE = Inventory(
    devices=(
        PciDevice(GPU, "0x10de", "0x2330", "0x030200", "gpu", PORT),
        PciDevice(NIC, "0x15b3", "0x1021", "0x020700", "nic", "0000:17:00.0"),
        PciDevice(NVME, "0x144d", "0xa80a", "0x010802", "nvme", "0000:01:00.0"),
        PciDevice("0000:0a:00.0", "0x10de", "0x22a3", "0x068000", "nvswitch", "0000:09:00.0"),
    )
)


def bus_error(pci, severity="Fatal", driver="pcieport"):
    severity = "Corrected" if severity == "Corrected" else f"Uncorrected ({severity})"
    return f"{driver} {pci}: PCIe Bus Error: severity={severity}, type=Transaction Layer, (Receiver ID)"


def port_line(pci, text):
    return f"pcieport {pci}: {text}"


findings_from = partial(findings_of, pcie_aer, node=NODE, interval=0.0)


def summaries(*lines, **kw):
    return [(f.code.partition("/")[2], f.subject, f.severity) for f in findings_from(*lines, **kw)]


@pytest.mark.parametrize("pci", [GPU, NIC, NVME, "0000:0a:00.0", PORT, "0000:17:00.0"])
@pytest.mark.parametrize(
    "line", ["PCIe Bus Error: severity=Uncorrected (Fatal)", "DPC: containment event, status:0x1f01 source:0x0000"]
)
def test_fatal_error_in_log_has_critical_condition_of_count(pci, line):
    (finding,) = findings_from(port_line(pci, line))
    assert (finding.code, finding.subject, finding.severity) == ("pcie_aer/fatal", pci, Severity.CRITICAL)
    assert (finding.clears, finding.window_seconds) == (Clears.REBOOT, 0.0)


def test_message_has_error_place_and_reporter():
    (finding,) = findings_from(
        f"pcieport {PORT}: AER: Uncorrectable (Fatal) error message received from {GPU}",
        bus_error(GPU, driver="nvidia"),
        f"nvidia {GPU}:    [18] MalfTLP                (First)",
    )
    start = f"fatal PCIe error on GPU {GPU}"
    assert finding.message == f"{start} (MalfTLP, Transaction Layer, reported by {PORT}, 3 lines)"
    assert f"on port above GPU {GPU}" in findings_from(bus_error(PORT))[0].message


def test_errors_of_devices_not_used_by_jobs_only_warn():
    assert summaries(bus_error(OTHER_PCI)) == [("fatal", OTHER_PCI, Severity.WARNING)]
    assert summaries(bus_error(OTHER_PCI, "Non-Fatal"), bus_error(OTHER_PCI, "Non-Fatal"), interval=60.0) == [
        ("nonfatal", OTHER_PCI, Severity.WARNING)
    ]
    assert summaries(port_line(OTHER_PCI, "AER: subordinate device reset failed")) == [
        ("not_recovered", OTHER_PCI, Severity.WARNING)
    ]


def test_other_function_of_card_counts_as_the_card():
    assert summaries(bus_error(AUDIO)) == [("fatal", GPU, Severity.CRITICAL)]


@pytest.mark.parametrize(("interval", "repeated"), [(4.0, False), (60.0, True), (3601.0, False)])
def test_nonfatal_error_in_log_warns_and_repeated_within_an_hour_is_degraded(interval, repeated):
    lines = [bus_error(GPU, "Non-Fatal")] * 2
    code, severity = ("nonfatal_repeated", Severity.DEGRADED) if repeated else ("nonfatal", Severity.WARNING)
    assert summaries(*lines, interval=interval) == [(code, GPU, severity)]


def test_errors_of_two_functions_within_five_seconds_count_once():
    lines = [bus_error(GPU, "Non-Fatal"), bus_error(AUDIO, "Non-Fatal")]
    assert summaries(*lines, interval=4.0) == [("nonfatal", GPU, Severity.WARNING)]
    assert summaries(*lines, interval=6.0) == [("nonfatal_repeated", GPU, Severity.DEGRADED)]


def test_corrected_errors_and_detail_lines_give_no_finding():
    lines = [
        bus_error(GPU, "Corrected"),
        f"nvidia {GPU}:   device [10de:2330] error status/mask=00001081/00006000",
        f"nvidia {NIC}:   device [10de:2330] error status/mask=00001081/00006000",
        port_line(PORT, "EDR: EDR event received"),
        port_line(PORT, "AER: device recovery successful"),
        f"nvidia {GPU}: AER: can't recover (no error_detected callback)",
    ]
    assert summaries(*lines) == []


def test_failed_reset_is_critical_and_failed_recovery_warns():
    assert summaries(port_line(PORT, "AER: subordinate device reset failed")) == [
        ("not_recovered", PORT, Severity.CRITICAL)
    ]
    assert summaries(port_line(PORT, "AER: device recovery failed")) == [("not_recovered", PORT, Severity.WARNING)]


def test_failed_recovery_after_an_error_adds_no_finding():
    failed = port_line(PORT, "AER: device recovery failed")
    assert summaries(bus_error(GPU), failed, interval=3.0) == [("fatal", GPU, Severity.CRITICAL)]
    assert summaries(bus_error(GPU, "Non-Fatal"), failed, interval=3.0) == [("nonfatal", GPU, Severity.WARNING)]
    assert ("not_recovered", PORT, Severity.WARNING) in summaries(bus_error(GPU), failed, interval=90.0)


def firmware_record(number, severity, pci):
    return [
        f"{{{number}}}[Hardware Error]: {line}"
        for line in (
            "Hardware error from APEI Generic Hardware Error Source: 5",
            f"event severity: {severity}",
            f" Error 0, type: {severity}",
            "  section_type: PCIe error",
            f"  device_id: {pci}",
            "  vendor_id: 0x10de, device_id: 0x2330",
        )
    ]


@pytest.mark.parametrize(
    ("severity", "expected"),
    [
        ("fatal", [("fatal", GPU, Severity.CRITICAL)]),
        ("recoverable", [("nonfatal", GPU, Severity.WARNING)]),
        ("corrected", []),
        ("info", []),
    ],
)
def test_firmware_record_is_an_error_of_its_device(severity, expected):
    assert summaries(*firmware_record(3, severity, GPU)) == expected
    assert summaries(*firmware_record(4, "corrected", NIC), *firmware_record(3, severity, GPU)) == expected


def test_firmware_record_and_its_kernel_lines_are_one_error():
    lines = [*firmware_record(3, "recoverable", GPU), f"nvidia {GPU}: AER: aer_uncor_severity: 0x004e2030"]
    assert summaries(*lines) == [("nonfatal", GPU, Severity.WARNING)]


def test_severity_without_inventory_depends_on_driver():
    assert summaries(bus_error(GPU, driver="nvidia"), node=Inventory()) == [("fatal", GPU, Severity.CRITICAL)]
    assert summaries(bus_error(GPU, driver="ahci"), node=Inventory()) == [("fatal", GPU, Severity.WARNING)]
    assert summaries(bus_error(NIC, driver="nvidia")) == [("fatal", NIC, Severity.CRITICAL)]
    assert summaries(bus_error(OTHER_PCI, driver="nvidia")) == [("fatal", OTHER_PCI, Severity.WARNING)]


def test_fatal_error_in_log_stays_until_reboot_despite_clean_counts(node):
    story = Story(pcie_aer).run_check(node("0")).take_event(event_of(bus_error(GPU)), NODE)
    assert (story.codes, story.drained, story.requeued) == (["pcie_aer/fatal"], True, True)
    story.run_checks(node("0"), 400)  # the files count nothing: AER belongs to the firmware
    assert (story.codes, story.drained) == (["pcie_aer/fatal"], True)
    story.reboot().run_check(node("0"))
    assert (story.codes, story.drained) == ([], False)


def test_logged_and_counted_error_is_one_condition(node):
    story = (
        Story(pcie_aer)
        .run_check(node("0"))
        .take_event(event_of(bus_error(GPU)), NODE)
        .run_check(node("1", fatal={"DLP": 1}), 0.1)
    )
    assert [(c.code, c.subject) for c in story.conditions.values()] == [("pcie_aer/fatal", GPU)]
    story.run_checks(node("1", fatal={"DLP": 1}), 400)
    assert story.drained
    story.repaired("pcie_aer/fatal").run_checks(node("1", fatal={"DLP": 1}), 2)
    assert (story.codes, story.drained) == ([], False)


def test_repeated_errors_in_log_drain_until_reboot_and_clean_day(node):
    story = Story(pcie_aer).run_check(node("0"))
    for _ in range(2):
        story.take_event(event_of(bus_error(GPU, "Non-Fatal")), NODE).run_check(node("0"))
    assert (story.drained, story.requeued) == (True, False)
    story.run_checks(node("0"), 2 * 288)
    assert story.drained  # no load: the time does not count
    story.reboot().run_checks(node("0"), 280)
    assert story.drained
    story.run_checks(node("0"), 12)
    assert (story.codes, story.drained) == ([], False)


def event_at(uptime, line):
    return replace(event_of(line), uptime=uptime)


@pytest.mark.parametrize("uptime", [0.0, 299.0])
def test_errors_in_first_minutes_of_boot_only_warn(node, uptime):
    story = Story(pcie_aer).run_check(node("0"))
    for _ in range(3):
        story.take_event(event_at(uptime, bus_error(GPU, "Non-Fatal")), NODE).run_check(node("0"), 1.0)
    assert (story.codes, story.drained) == (["pcie_aer/nonfatal"], False)


@pytest.mark.parametrize("uptime", [300.0, None])
def test_errors_later_or_without_uptime_drain_if_repeated(node, uptime):
    story = Story(pcie_aer).run_check(node("0"))
    story.take_event(event_at(uptime, bus_error(GPU, "Non-Fatal")), NODE).run_check(node("0"), 1.0)
    assert story.take_event(event_at(uptime, bus_error(GPU, "Non-Fatal")), NODE).drained


def test_errors_at_each_boot_do_not_keep_node_drained(node):
    story = Story(pcie_aer).run_check(node("0"))
    for uptime in (5000.0, 5100.0):
        story.take_event(event_at(uptime, bus_error(GPU, "Non-Fatal")), NODE).run_check(node("0"), 1.0)
    assert story.drained
    story.reboot()
    for uptime in (8.0, 20.0):
        story.take_event(event_at(uptime, bus_error(GPU, "Non-Fatal")), NODE).run_check(node("0"), 1.0)
    assert story.drained
    story.run_checks(node("0"), 289)  # one day
    assert not story.drained


def test_errors_that_return_after_boot_keep_node_drained(node):
    story = Story(pcie_aer).run_check(node("0"))
    for uptimes in ((5000.0, 5100.0), (400.0, 500.0)):
        for uptime in uptimes:
            story.take_event(event_at(uptime, bus_error(GPU, "Non-Fatal")), NODE).run_check(node("0"), 1.0)
        if uptimes[0] == 5000.0:
            story.reboot()
    assert story.run_checks(node("0"), 600).drained


COUNTS = st.one_of(st.integers(0, 2**64), st.sampled_from(["N/A", "", "-1", "ERR!", "0x1", "1.5", "¹"]))


@given(
    st.lists(st.tuples(st.sampled_from(AER_NAMES["fatal"].split()), COUNTS)), st.text(max_size=20), st.integers(0, 400)
)
@example([("TOTAL_ERR_FATAL", 2**64)], "", 400)
def test_parse_reads_file_exactly_or_rejects_it(lines, junk, cut):
    text = ("".join(f"{name} {count}\n" for name, count in lines) + junk)[:cut].strip()
    counts, error = parse_or_error(parse, text, "TOTAL_ERR_FATAL")
    if error:
        assert error.startswith(("not a name", "has no"))
        assert "\n" not in error
    else:
        assert counts["TOTAL_ERR_FATAL"] in range(2**64)
        assert len(counts) <= text.count("\n") + 1


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(content=st.binary(max_size=60))
def test_any_file_content_is_counted_or_fails_run(node, tmp_path, content):
    host = node("0")
    (tmp_path / "0" / PCI[1:] / GPU / "aer_dev_fatal").write_bytes(content)
    results, error = run_until_error(pcie_aer, host)
    read = {item.labels[0][1] for item in observations_named(results, "pcie_aer_fatal_total")}
    assert error or GPU in read
