"""pcie_aer: PCI Express errors that the kernel counts or logs for devices and the ports above them."""

from __future__ import annotations

from functools import partial

import pytest
from fakes import codes, findings, observed, refusal, rounds, run_check, until_it_fails
from health_checks import also
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_lines import event, findings_of
from msgspec.structs import replace
from story import Story
from trees import AER_NAMES, PCI, aer, captured, pci_device

from healthd.checks import pcie_aer
from healthd.checks.pcie_aer import TOTALS, Config, parse
from healthd.common.model import Clears, Finding, Inventory, PciDevice, Severity
from healthd.host.host import Host

GPU, NIC, NVME, PORT = "0000:1b:00.0", "0000:18:00.0", "0000:04:00.0", "0000:1a:01.0"


def device(root, pci, pci_class, above="", vendor="0x10de", **counts):
    """Create a device whose aer_dev_* files have these counts: fatal={"DLP": 1}."""
    files = {f"aer_dev_{kind}": aer(kind, **counts.get(kind, {})) for kind in TOTALS}
    pci_device(root, pci, pci_class, above, vendor, **files)


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


def after(node, *steps, at=GPU, config=None, apart=300.0):
    """Return the findings of the last of several rounds with these counts."""
    hosts = [node(str(n), at, **step) for n, step in enumerate(steps)]
    return [item for item in rounds(pcie_aer, hosts, config, apart) if isinstance(item, Finding)]


def test_a_healthy_node_gives_its_counters_and_no_finding(node):
    given = run_check(pcie_aer, node())
    assert [item.value for item in observed(given, "pcie_aer_watched_devices")] == [4]
    assert {item.labels[0][1] for item in observed(given, "pcie_aer_fatal_total")} == {GPU, NIC, NVME, PORT}
    assert [item for item in given if isinstance(item, Finding)] == []


@pytest.mark.parametrize("at", [GPU, NIC, NVME, PORT])
def test_a_fatal_error_is_critical_until_a_reboot(node, at):
    (finding,) = after(node, {}, {"fatal": {"DLP": 1}}, at=at)
    assert (finding.code, finding.subject) == ("pcie_aer/fatal", at)
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.REBOOT)
    assert "DLP 1" in finding.message


def test_errors_of_a_port_name_the_device_below_it(node):
    (finding,) = after(node, {}, {"fatal": {"SDES": 1}}, at=PORT)
    assert f"port above GPU {GPU}" in finding.message


def test_errors_from_before_healthd_started_are_no_finding(node):
    old = {"fatal": {"DLP": 3}, "nonfatal": {"TLP": 2}, "correctable": {"RxErr": 10**6}}
    assert findings(pcie_aer, node(**old)) == []
    assert after(node, old, old) == []


def test_a_single_non_fatal_error_warns(node):
    (finding,) = after(node, {}, {"nonfatal": {"CmpltTO": 1}})
    assert (finding.code, finding.severity) == ("pcie_aer/nonfatal", Severity.WARNING)
    assert (finding.clears, finding.window_seconds) == (Clears.WINDOW, 86400.0)


@pytest.mark.parametrize(("apart", "repeated"), [(3500.0, True), (3601.0, False)])
def test_non_fatal_errors_again_within_an_hour_are_degraded(node, apart, repeated):
    found = after(node, {}, {"nonfatal": {"TLP": 1}}, {"nonfatal": {"TLP": 2}}, apart=apart)
    expected = (
        ("pcie_aer/nonfatal_repeated", Severity.DEGRADED) if repeated else ("pcie_aer/nonfatal", Severity.WARNING)
    )
    assert [(f.code, f.severity) for f in found] == [expected]


def test_corrected_errors_warn_above_a_hundred_an_hour(node):
    assert after(node, {}, {"correctable": {"BadTLP": 100}}) == []
    (finding,) = after(node, {}, {"correctable": {"BadTLP": 60}}, {"correctable": {"BadTLP": 101}})
    assert (finding.code, finding.severity) == ("pcie_aer/correctable", Severity.WARNING)
    slow = [{"correctable": {"BadTLP": 60 * n}} for n in range(4)]
    assert after(node, *slow, apart=3700.0) == []


def test_the_thresholds_are_settings(node):
    assert len(after(node, {}, {"correctable": {"BadTLP": 9}}, config=Config(correctable_per_hour=8))) == 1
    steps = ({}, {"nonfatal": {"TLP": 1}}, {"nonfatal": {"TLP": 2}})
    assert codes(after(node, *steps, config=Config(nonfatal_repeat_seconds=100.0))) == ["pcie_aer/nonfatal"]


def test_counters_that_start_again_after_a_device_was_removed_and_found_again_count_what_they_show(node):
    assert after(node, {"fatal": {"DLP": 5}}, {}) == []
    assert codes(after(node, {"fatal": {"DLP": 5}}, {"fatal": {"DLP": 1}})) == ["pcie_aer/fatal"]


def test_devices_without_the_files_are_not_judged(tmp_path):
    pci_device(tmp_path, GPU, "0x030200", above=PORT)
    given = run_check(pcie_aer, Host(str(tmp_path)))
    assert [(item.name, item.value) for item in given] == [("pcie_aer_watched_devices", 0)]


def test_a_machine_without_pci_is_not_judged(tmp_path):
    assert findings(pcie_aer, Host(str(tmp_path))) == []


def test_virtual_functions_other_vendors_displays_and_bridges_alone_are_not_watched(tmp_path):
    device(tmp_path, "0000:18:00.2", "0x020700", vendor="0x15b3")
    (tmp_path / PCI[1:] / "0000:18:00.2" / "physfn").symlink_to("../0000:18:00.0")
    device(tmp_path, "0000:03:00.0", "0x030000", vendor="0x1a03")
    device(tmp_path, "0000:02:00.0", "0x060400", vendor="0x1000")
    given = run_check(pcie_aer, Host(str(tmp_path)))
    assert [item.value for item in observed(given, "pcie_aer_watched_devices")] == [0]


def test_a_file_that_vanishes_is_not_judged(node, tmp_path):
    host = node("0")
    (tmp_path / "0" / PCI[1:] / GPU / "aer_dev_fatal").unlink()
    assert findings(pcie_aer, host) == []


def test_names_with_blanks_as_in_linux_4_19_are_read():
    counts = parse(captured("aer_dev_correctable_4.19.txt").strip(), "TOTAL_ERR_COR")
    assert counts["Receiver Error"] == 2
    assert counts["RELAY_NUM Rollover"] == 0
    assert counts["TOTAL_ERR_COR"] == 2


@pytest.mark.parametrize("text", ["", "N/A", "RxErr", "RxErr 1", "RxErr x\nTOTAL_ERR_COR 1", f"TOTAL_ERR_COR {2**64}"])
def test_a_garbled_file_is_unknown_and_hides_no_other_device(node, tmp_path, text):
    host = node("0")
    (tmp_path / "0" / PCI[1:] / GPU / "aer_dev_correctable").write_text(text)
    given, error = until_it_fails(pcie_aer, host)
    assert f"{GPU}/aer_dev_correctable" in error
    assert NIC in {item.labels[0][1] for item in observed(given, "pcie_aer_correctable_total")}


def test_a_fatal_error_under_load_drains_and_requeues_until_the_reboot(node):
    well, broken = node("0"), node("1", fatal={"SDES": 1})
    life = Story(pcie_aer).look(well).look(broken)
    assert (life.drained, life.requeued) == (True, True)
    life.looks(broken, 400).repaired("pcie_aer/nonfatal")
    assert life.codes == ["pcie_aer/fatal"]  # a day and a half without errors repairs nothing
    life.reboot().looks(well, 2)
    assert (life.codes, life.drained) == ([], False)


def test_repeated_errors_drain_and_idle_time_does_not_count_as_clean(node):
    hosts = [node(str(n), nonfatal={"CmpltTO": n}) for n in range(3)]
    life = Story(pcie_aer)
    for host in hosts:
        life.look(host)
    assert (life.drained, life.requeued) == (True, False)
    life.looks(hosts[2], 2 * 288)
    assert life.codes == ["pcie_aer/nonfatal", "pcie_aer/nonfatal_repeated"]
    life.reboot().looks(node("3"), 280)
    assert life.drained  # repaired, but not clean for a day yet
    life.looks(node("3"), 12)
    assert (life.codes, life.drained) == ([], False)


@pytest.mark.parametrize(
    ("code", "counts"), [("nonfatal", {"nonfatal": {"TLP": 1}}), ("correctable", {"correctable": {"RxErr": 101}})]
)
def test_a_single_error_and_many_corrected_ones_never_drain_and_are_forgotten_after_a_clean_day(node, code, counts):
    well, worse = node("0"), node("1", **counts)
    life = Story(pcie_aer).look(well).look(worse)
    assert (life.codes, life.drained) == ([f"pcie_aer/{code}"], False)
    life.looks(worse, 285)
    assert life.codes == [f"pcie_aer/{code}"]
    life.looks(worse, 6)
    assert life.codes == []


# --- the kernel log

AUDIO, OTHER = "0000:1b:00.1", "0000:05:00.0"
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


def said(pci, text):
    return f"pcieport {pci}: {text}"


heard = partial(findings_of, pcie_aer, node=NODE, apart=0.0)


def judged(*lines, **kw):
    return [(f.code.partition("/")[2], f.subject, f.severity) for f in heard(*lines, **kw)]


@pytest.mark.parametrize("pci", [GPU, NIC, NVME, "0000:0a:00.0", PORT, "0000:17:00.0"])
@pytest.mark.parametrize(
    "line", ["PCIe Bus Error: severity=Uncorrected (Fatal)", "DPC: containment event, status:0x1f01 source:0x0000"]
)
def test_a_fatal_error_in_the_log_is_the_same_critical_condition_as_its_count(pci, line):
    (finding,) = heard(said(pci, line))
    assert (finding.code, finding.subject, finding.severity) == ("pcie_aer/fatal", pci, Severity.CRITICAL)
    assert (finding.clears, finding.window_seconds) == (Clears.REBOOT, 0.0)


def test_a_message_tells_what_it_was_where_and_who_reported_it():
    (finding,) = heard(
        f"pcieport {PORT}: AER: Uncorrectable (Fatal) error message received from {GPU}",
        bus_error(GPU, driver="nvidia"),
        f"nvidia {GPU}:    [18] MalfTLP                (First)",
    )
    what = f"fatal PCIe error on GPU {GPU}"
    assert finding.message == f"{what} (MalfTLP, Transaction Layer, reported by {PORT}, 3 lines)"
    assert f"on port above GPU {GPU}" in heard(bus_error(PORT))[0].message


def test_errors_of_what_jobs_do_not_depend_on_warn_at_most():
    assert judged(bus_error(OTHER)) == [("fatal", OTHER, Severity.WARNING)]
    assert judged(bus_error(OTHER, "Non-Fatal"), bus_error(OTHER, "Non-Fatal"), apart=60.0) == [
        ("nonfatal", OTHER, Severity.WARNING)
    ]
    assert judged(said(OTHER, "AER: subordinate device reset failed")) == [("not_recovered", OTHER, Severity.WARNING)]


def test_a_further_function_of_a_card_is_the_card():
    assert judged(bus_error(AUDIO)) == [("fatal", GPU, Severity.CRITICAL)]


@pytest.mark.parametrize(("apart", "repeated"), [(4.0, False), (60.0, True), (3601.0, False)])
def test_a_single_non_fatal_error_in_the_log_warns_and_again_within_an_hour_it_is_degraded(apart, repeated):
    lines = [bus_error(GPU, "Non-Fatal")] * 2
    code, severity = ("nonfatal_repeated", Severity.DEGRADED) if repeated else ("nonfatal", Severity.WARNING)
    assert judged(*lines, apart=apart) == [(code, GPU, severity)]


def test_pcie_aer_counts_errors_of_two_functions_of_a_card_within_five_seconds_once():
    lines = [bus_error(GPU, "Non-Fatal"), bus_error(AUDIO, "Non-Fatal")]
    assert judged(*lines, apart=4.0) == [("nonfatal", GPU, Severity.WARNING)]
    assert judged(*lines, apart=6.0) == [("nonfatal_repeated", GPU, Severity.DEGRADED)]


def test_corrected_errors_and_further_lines_alone_are_judged_by_nobody():
    lines = [
        bus_error(GPU, "Corrected"),
        f"nvidia {GPU}:   device [10de:2330] error status/mask=00001081/00006000",
        f"nvidia {NIC}:   device [10de:2330] error status/mask=00001081/00006000",
        said(PORT, "EDR: EDR event received"),
        said(PORT, "AER: device recovery successful"),
        f"nvidia {GPU}: AER: can't recover (no error_detected callback)",
    ]
    assert judged(*lines) == []


def test_a_device_that_does_not_come_back_after_the_reset_is_critical_and_one_without_recovery_warns():
    assert judged(said(PORT, "AER: subordinate device reset failed")) == [("not_recovered", PORT, Severity.CRITICAL)]
    assert judged(said(PORT, "AER: device recovery failed")) == [("not_recovered", PORT, Severity.WARNING)]


def test_that_no_driver_recovers_is_no_second_fault():
    failed = said(PORT, "AER: device recovery failed")
    assert judged(bus_error(GPU), failed, apart=3.0) == [("fatal", GPU, Severity.CRITICAL)]
    assert judged(bus_error(GPU, "Non-Fatal"), failed, apart=3.0) == [("nonfatal", GPU, Severity.WARNING)]
    assert ("not_recovered", PORT, Severity.WARNING) in judged(bus_error(GPU), failed, apart=90.0)


def record(number, severity, pci):
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
def test_a_firmwares_record_is_an_error_of_the_device_that_it_names(severity, expected):
    assert judged(*record(3, severity, GPU)) == expected
    assert judged(*record(4, "corrected", NIC), *record(3, severity, GPU)) == expected


def test_a_firmwares_record_and_what_the_kernel_prints_of_it_are_one_error():
    lines = [*record(3, "recoverable", GPU), f"nvidia {GPU}: AER: aer_uncor_severity: 0x004e2030"]
    assert judged(*lines) == [("nonfatal", GPU, Severity.WARNING)]


def test_in_the_log_of_another_machine_the_driver_tells_what_it_is():
    assert judged(bus_error(GPU, driver="nvidia"), node=Inventory()) == [("fatal", GPU, Severity.CRITICAL)]
    assert judged(bus_error(GPU, driver="ahci"), node=Inventory()) == [("fatal", GPU, Severity.WARNING)]
    assert judged(bus_error(NIC, driver="nvidia")) == [("fatal", NIC, Severity.CRITICAL)]
    assert judged(bus_error(OTHER, driver="nvidia")) == [("fatal", OTHER, Severity.WARNING)]


def test_a_fatal_error_in_the_log_outlives_clean_counts_and_waits_for_the_reboot(node):
    life = Story(pcie_aer).look(node("0")).hear(event(bus_error(GPU)), NODE)
    assert (life.codes, life.drained, life.requeued) == (["pcie_aer/fatal"], True, True)
    life.looks(node("0"), 400)  # the files count nothing: AER belongs to the firmware
    assert (life.codes, life.drained) == (["pcie_aer/fatal"], True)
    life.reboot().look(node("0"))
    assert (life.codes, life.drained) == ([], False)


def test_an_error_that_is_logged_and_counted_is_one_condition(node):
    life = Story(pcie_aer).look(node("0")).hear(event(bus_error(GPU)), NODE).look(node("1", fatal={"DLP": 1}), 0.1)
    assert [(c.code, c.subject) for c in life.conditions.values()] == [("pcie_aer/fatal", GPU)]
    life.looks(node("1", fatal={"DLP": 1}), 400)
    assert life.drained
    life.repaired("pcie_aer/fatal").looks(node("1", fatal={"DLP": 1}), 2)
    assert (life.codes, life.drained) == ([], False)


def test_repeated_errors_in_the_log_drain_until_they_are_repaired_and_clean_for_a_day(node):
    life = Story(pcie_aer).look(node("0"))
    for _ in range(2):
        life.hear(event(bus_error(GPU, "Non-Fatal")), NODE).look(node("0"))
    assert (life.drained, life.requeued) == (True, False)
    life.looks(node("0"), 2 * 288)
    assert life.drained  # no load: the time does not count
    life.reboot().looks(node("0"), 280)
    assert life.drained
    life.looks(node("0"), 12)
    assert (life.codes, life.drained) == ([], False)


def at(uptime, line):
    return replace(event(line), uptime=uptime)


@pytest.mark.parametrize("uptime", [0.0, 299.0])
def test_errors_of_the_first_minutes_of_a_boot_warn_however_often_they_come(node, uptime):
    life = Story(pcie_aer).look(node("0"))
    for _ in range(3):
        life.hear(at(uptime, bus_error(GPU, "Non-Fatal")), NODE).look(node("0"), 1.0)
    assert (life.codes, life.drained) == (["pcie_aer/nonfatal"], False)


@pytest.mark.parametrize("uptime", [300.0, None])
def test_later_ones_and_those_of_a_source_without_uptimes_count(node, uptime):
    life = Story(pcie_aer).look(node("0"))
    life.hear(at(uptime, bus_error(GPU, "Non-Fatal")), NODE).look(node("0"), 1.0)
    assert life.hear(at(uptime, bus_error(GPU, "Non-Fatal")), NODE).drained


def test_a_platform_that_logs_errors_at_each_boot_gets_its_drained_node_back(node):
    life = Story(pcie_aer).look(node("0"))
    for uptime in (5000.0, 5100.0):
        life.hear(at(uptime, bus_error(GPU, "Non-Fatal")), NODE).look(node("0"), 1.0)
    assert life.drained
    life.reboot()
    for uptime in (8.0, 20.0):
        life.hear(at(uptime, bus_error(GPU, "Non-Fatal")), NODE).look(node("0"), 1.0)
    assert life.drained
    life.looks(node("0"), 289)  # one day
    assert not life.drained


def test_errors_that_come_again_after_the_reboot_keep_the_node_drained(node):
    life = Story(pcie_aer).look(node("0"))
    for uptimes in ((5000.0, 5100.0), (400.0, 500.0)):
        for uptime in uptimes:
            life.hear(at(uptime, bus_error(GPU, "Non-Fatal")), NODE).look(node("0"), 1.0)
        if uptimes[0] == 5000.0:
            life.reboot()
    assert life.looks(node("0"), 600).drained


COUNTS = st.one_of(st.integers(0, 2**64), st.sampled_from(["N/A", "", "-1", "ERR!", "0x1", "1.5", "¹"]))


@given(
    st.lists(st.tuples(st.sampled_from(AER_NAMES["fatal"].split()), COUNTS)), st.text(max_size=20), st.integers(0, 400)
)
@example([("TOTAL_ERR_FATAL", 2**64)], "", 400)
def test_a_file_is_read_exactly_or_refused_in_one_sentence(lines, junk, cut):
    text = ("".join(f"{name} {count}\n" for name, count in lines) + junk)[:cut].strip()
    counts, said = refusal(parse, text, "TOTAL_ERR_FATAL")
    if said:
        assert said.startswith(("not a name", "has no"))
        assert "\n" not in said
    else:
        assert counts["TOTAL_ERR_FATAL"] in range(2**64)
        assert len(counts) <= text.count("\n") + 1


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(content=st.binary(max_size=60))
def test_no_content_of_a_file_passes_silently(node, tmp_path, content):
    host = node("0")
    (tmp_path / "0" / PCI[1:] / GPU / "aer_dev_fatal").write_bytes(content)
    given_, error = until_it_fails(pcie_aer, host)
    read = {item.labels[0][1] for item in observed(given_, "pcie_aer_fatal_total")}
    assert error or GPU in read
