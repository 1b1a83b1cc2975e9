"""pcie_link: links that are narrower or slower than both ends support."""

from __future__ import annotations

import pytest
from fakes import codes, findings, observations_named, parse_or_error, run_check, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import PCI, add_pci_device

from healthd.checks import pcie_link
from healthd.checks.pcie_link import Config, parse
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

# A root port, and a switch with an upstream port and two downstream ports, with a GPU and a network card below them.
# An NVMe disk at its own root port.
ROOT, UPPER, TO_GPU, TO_NIC = "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:17:01.0"
GPU, NIC, AT_NVME, NVME = "0000:1b:00.0", "0000:18:00.0", "0000:01:00.0", "0000:04:00.0"
GEN5, GEN4, GEN3 = "32.0 GT/s PCIe", "16.0 GT/s PCIe", "8.0 GT/s PCIe"


def link(width="16", speed=GEN5, max_width="16", max_speed=GEN5):
    names = ("current_link_width", "current_link_speed", "max_link_width", "max_link_speed")
    return dict(zip(names, (width, speed, max_width, max_speed), strict=True))


def make(tree, **changed):
    """Create the devices. nic={"current_link_width": "8"} changes files of one device."""
    for name, pci, pci_class, above, files in (
        ("root", ROOT, "0x060400", "", link()),
        ("upper", UPPER, "0x060400", ROOT, link()),
        ("to_gpu", TO_GPU, "0x060400", UPPER, link(speed="2.5 GT/s PCIe")),
        ("to_nic", TO_NIC, "0x060400", UPPER, link()),
        ("gpu", GPU, "0x030200", TO_GPU, link(speed="2.5 GT/s PCIe")),  # idle
        ("nic", NIC, "0x020700", TO_NIC, link()),
        ("at_nvme", AT_NVME, "0x060400", "", link("4", GEN4, "4", GEN5)),
        ("nvme", NVME, "0x010802", AT_NVME, link("4", GEN4, "4", GEN4)),
    ):
        add_pci_device(tree, pci, pci_class, above, "0x15b3", device="0x1021", **{**files, **changed.get(name, {})})
    return Host(str(tree))


def healthy(tmp_path):
    # The card supports more than its slot, so the check reads the files of the slot too.
    return make(tmp_path, to_nic=link("8", GEN4, "8", GEN4), nic=link("8", GEN4)), Config()


ABSENT_IS_FINE = {
    r".*/max_link_width": "not PCI Express: conventional PCI and virtual devices have none of these files",
    r".*/(vendor|class|device)": "the device is being removed: pcie_devices reports it if it is expected",
    r"/sys/bus/pci/devices(/[^/]+)?": "a machine without PCI; a device on a root bus has no link above",
}


def test_healthy_node_gives_no_finding_and_idle_gpu_is_ignored(node):
    results = run_check(pcie_link, node())
    assert [item for item in results if isinstance(item, Finding)] == []
    assert [item.value for item in observations_named(results, "pcie_link_watched_links")] == [3]


@pytest.mark.parametrize(("name", "pci"), [("nic", NIC), ("nvme", NVME), ("upper", UPPER)])
@pytest.mark.parametrize(("file", "text", "code"), [("width", "2", "narrow"), ("speed", "8.0 GT/s PCIe", "slow")])
def test_link_below_capability_of_both_ends_is_degraded_until_reboot(node, name, pci, file, text, code):
    (finding,) = findings(pcie_link, node(**{name: {f"current_link_{file}": text}}))
    assert (finding.code, finding.subject) == (f"pcie_link/{code}", pci)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.DEGRADED, Clears.REBOOT, 120.0)
    assert pci in finding.message


def test_link_can_be_narrow_and_slow(node):
    found = findings(pcie_link, node(nic=link("4", GEN3)))
    assert codes(found) == ["pcie_link/narrow", "pcie_link/slow"]
    assert "4 lanes of 16" in found[0].message
    assert "8 GT/s" in found[1].message
    assert "32" in found[1].message


def test_card_in_smaller_or_older_slot_is_as_built(node):
    assert findings(pcie_link, node(to_nic=link("8", GEN4, "8", GEN4), nic=link("8", GEN4))) == []
    assert codes(findings(pcie_link, node(to_nic=link("4", GEN4, "8", GEN4), nic=link("4", GEN4)))) == [
        "pcie_link/narrow"
    ]


@pytest.mark.parametrize("speed", ["8 GT/s", "8.0 GT/s", "8.0 GT/s PCIe"])
def test_speed_format_of_every_kernel_version_is_read(node, speed):
    assert findings(pcie_link, node(nvme=link("4", speed, "4", "8.0 GT/s PCIe"))) == []


@pytest.mark.parametrize("width", ["63", "0"])
def test_device_with_registers_of_all_ones_does_not_answer(node, width):
    (finding,) = findings(pcie_link, node(nic=link(width, "Unknown", "63" if width == "63" else "16", "Unknown")))
    assert (finding.code, finding.subject) == ("pcie_link/no_answer", NIC)


@pytest.mark.parametrize("files", [link("63", "Unknown", "63", "Unknown"), link("16", "2.5 GT/s PCIe")])
@pytest.mark.parametrize("state", ["D3cold", "D3hot"])
def test_sleeping_device_is_ignored(node, files, state):
    assert findings(pcie_link, node(nic={**files, "power_state": state})) == []
    assert findings(pcie_link, node(nic={**files, "power_state": "D0"})) != []


def test_device_built_into_processor_has_no_link(node):
    assert findings(pcie_link, node(nic=link("0", "Unknown", "255", "Unknown"))) == []
    assert findings(pcie_link, node(nic=link("8"), to_nic=link("0", "Unknown", "255", "Unknown"))) == []


def test_guest_without_slot_data_is_not_watched(tmp_path):
    add_pci_device(tmp_path, NIC, "0x020700", vendor="0x15b3", device="0x1021", **link("8"))
    results = run_check(pcie_link, Host(str(tmp_path)))
    assert [(item.name, item.value) for item in results] == [("pcie_link_watched_links", 0)]


def test_machine_without_pci_gives_no_finding(tmp_path):
    assert findings(pcie_link, Host(str(tmp_path))) == []


def test_other_functions_of_a_card_add_no_finding(node, tmp_path):
    host = node(nic=link("8"))
    for function in (1, 2):
        add_pci_device(tmp_path, f"{NIC[:-1]}{function}", "0x020700", TO_NIC, "0x15b3", device="0x1021", **link("8"))
    (tmp_path / PCI[1:] / f"{NIC[:-1]}2" / "physfn").symlink_to(f"../{NIC}")
    assert [finding.subject for finding in findings(pcie_link, host)] == [NIC]


def test_ports_inside_a_switch_have_no_link_to_each_other(node):
    assert findings(pcie_link, node(upper=link("16", GEN4, "16", GEN4), root=link("16", GEN4, "16", GEN4))) == []


@pytest.mark.parametrize(
    "files",
    [
        {"current_link_speed": "Unknown"},
        {"current_link_width": "N/A"},
        {"current_link_width": "3"},
        {"current_link_width": "255"},
        {"max_link_width": "1"},
        {"max_link_speed": "Unknown"},
        {"max_link_speed": "8.0 GT/s PCIe"},
        {"current_link_speed": str(2**64)},
    ],
)
def test_garbled_link_fails_run_and_hides_no_other_finding(node, files):
    results, error = run_until_error(pcie_link, node(nic=files, nvme=link("2", GEN4, "4", GEN4)))
    assert error.startswith(NIC)
    assert [item.subject for item in results if isinstance(item, Finding)] == [NVME]


@pytest.mark.parametrize("files", [{"max_link_width": "1"}, {"max_link_speed": "ERR!"}])
def test_garbled_slot_fails_run(node, files):
    assert NIC in run_until_error(pcie_link, node(nic=link("8"), to_nic=files))[1]


def test_device_that_vanishes_during_read_fails_run(node, tmp_path):
    host = node()
    (tmp_path / PCI[1:] / NIC / "current_link_speed").unlink()
    assert f"{NIC}/current_link_speed" in run_until_error(pcie_link, host)[1]


BAD_LINKS = pytest.mark.parametrize(
    ("code", "files"),
    [
        ("pcie_link/narrow", link("8")),
        ("pcie_link/slow", link(speed=GEN3)),
        ("pcie_link/no_answer", link("63", "Unknown")),
    ],
)


@BAD_LINKS
def test_bad_link_warns_after_two_minutes_and_never_drains(node, code, files):
    story = Story(pcie_link).run_check(node()).run_check(node(nic=files))
    assert story.codes == []
    story.run_check(node(nic=files), minutes=2)
    assert (story.codes, story.drained) == ([code], False)
    story.run_checks(node(), 300)
    assert story.codes == [code]  # good again without a repair: the cause is unknown
    story.reboot().run_checks(node(), 2)
    assert (story.codes, story.drained) == ([], False)


@BAD_LINKS
def test_enforced_bad_link_drains_until_reboot(node, code, files):
    story = Story(pcie_link, Config(enforce=True)).run_checks(node(nic=files), 2)
    assert (story.codes, story.drained, story.requeued) == ([code], True, False)
    story.run_checks(node(nic=files), 100).run_checks(node(), 200)
    assert (story.codes, story.drained) == ([code], True)  # no job runs and the link is good again: not sufficient
    story.reboot().run_checks(node(), 3)
    assert (story.codes, story.drained) == ([], False)


@BAD_LINKS
def test_enforced_bad_link_after_reboot_needs_operator(node, code, files):
    story = Story(pcie_link, Config(enforce=True)).run_checks(node(nic=files), 2)
    story.reboot().run_checks(node(nic=files), 3)
    assert (story.codes, story.drained) == ([code], True)
    story.reboot().run_checks(node(), 3)
    assert story.drained
    story.repaired(code).run_checks(node(), 2)
    assert not story.drained


def test_link_training_after_reset_gives_no_finding(node):
    story = Story(pcie_link).run_check(node(nic=link("8", "2.5 GT/s PCIe"))).run_check(node(), minutes=1)
    assert story.codes == []


TEXTS = st.one_of(
    st.sampled_from(["16", "Unknown", "255", "N/A", "16.0 GT/s PCIe", "-1", "١٦", "1e1", "inf GT/s"]),
    st.text(max_size=20),
)


@given(TEXTS, TEXTS)
def test_parse_reads_link_exactly_or_rejects_it(width, speed):
    found, error = parse_or_error(parse, "0000:18:00.0", "max", width, speed)
    if error:
        assert error.startswith("0000:18:00.0/max_link_")
    else:
        assert found.lanes <= 32
        assert found.speed < 1000


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(
    name=st.sampled_from(["current_link_width", "current_link_speed", "max_link_speed"]), content=st.binary(max_size=20)
)
def test_any_file_content_gives_finding_or_failure(tmp_path, name, content):
    host = make(tmp_path, nic={})
    (tmp_path / PCI[1:] / NIC / name).write_bytes(content)
    if content.strip() in (b"16", b"32.0 GT/s", b"32.0 GT/s PCIe", b"32 GT/s", b"32 GT/s PCIe"):
        return
    found, error = run_until_error(pcie_link, host)
    assert error or any(isinstance(item, Finding) for item in found)
