"""gpu_persistence: whether the driver keeps unused GPUs initialised."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpus import fake_pci_gpus
from fakes import codes, findings, run_check, run_rounds, run_until_error, scenarios
from story import Story
from trees import write

from healthd.checks import gpu_persistence
from healthd.checks.gpu_persistence import Config
from healthd.common.model import Clears, Repair, Severity
from healthd.host.host import Host

GPUS = fake_pci_gpus("dgx-h100")
PCI = GPUS[3]
REFERENCES = "/sys/module/nvidia/refcnt"
HOLDERS = "/sys/module/nvidia/holders"
ABSENT_IS_FINE = {
    REFERENCES: "persistence mode decides; the reference count only makes healthd run less often",
    HOLDERS: "subtracted from the reference count, see there",
}
HARMLESS = {("returns .*|is (empty|binary)", REFERENCES): "treated like a missing file: persistence mode decides"}


@pytest.fixture
def host(tmp_path):
    """Return a function that creates hosts: host(text, references=...). nvidia_uvm is one reference without a
    process."""
    make = scenarios(tmp_path)

    def node(text="", references="9"):
        files = {REFERENCES: f"{references}\n", f"{HOLDERS}/nvidia_uvm": ""}
        write(tmp_path / f"references{references}", files)
        return make(text, root=str(tmp_path / f"references{references}"))

    return node


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    write(tmp_path, {REFERENCES: "9\n", f"{HOLDERS}/nvidia_uvm": ""})
    return scenarios(tmp_path)(root=str(tmp_path)), Config()


def test_persistence_mode_with_daemon_gives_no_finding(host):
    assert run_check(gpu_persistence, host()) == []


def test_gpu_with_persistence_mode_off_warns(host):
    (finding,) = findings(gpu_persistence, host("gpu.3.persistence = false"))
    assert (finding.code, finding.subject) == ("gpu_persistence/off", PCI)
    assert (finding.severity, finding.clears) == (Severity.WARNING, Clears.PASS)


def test_driver_without_users_warns(host):
    (finding,) = findings(gpu_persistence, host(references="1"))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_persistence/not_held", "", Severity.WARNING)


def test_driver_without_users_is_not_reported_if_mode_is_off(host):
    assert codes(findings(gpu_persistence, host("gpu.3.persistence = false", "1"))) == ["gpu_persistence/off"]


def test_unreadable_reference_count_gives_no_finding(host):
    assert findings(gpu_persistence, host(references="N/A")) == []


def test_gpu_without_persistence_mode_gives_nothing(host):
    assert run_check(gpu_persistence, host('missing_functions = ["nvmlDeviceGetPersistenceMode"]')) == []


def test_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_persistence, Host(str(tmp_path))) == []


def test_failing_gpu_hides_no_other_finding(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetPersistenceMode = "Unknown" }\n[gpu.3]\npersistence = false'
    results, error = run_until_error(gpu_persistence, host(text))
    assert GPUS[0] in error
    assert codes(results) == ["gpu_persistence/off"]


@pytest.mark.parametrize(
    ("arguments", "code"), [(("gpu.3.persistence = false",), "off"), (("", "1"), "not_held")], ids=["off", "not held"]
)
def test_missing_persistence_warns_until_fixed_and_never_drains(host, arguments, code):
    story = Story(gpu_persistence).run_checks(host(*arguments), 300)
    assert story.codes == [f"gpu_persistence/{code}"]
    assert not story.drained
    story.reboot().run_check(host(*arguments))
    assert story.codes == [f"gpu_persistence/{code}"]
    assert story.run_check(host()).codes != []
    assert story.run_check(host()).codes == []


def resets(*nodes: Host) -> list[str]:
    """Return the GPUs that were reset, according to the last of these rounds."""
    return [item.subject for item in run_rounds(gpu_persistence, list(nodes)) if isinstance(item, Repair)]


def test_uptime_that_fell_is_a_reset(host):
    before, after = host("gpu.3.uptime_seconds = 5000"), host("gpu.3.uptime_seconds = 40")
    assert resets(before, after) == [PCI]
    assert resets(before, host("gpu.3.uptime_seconds = 5300")) == []
    assert resets(before, before) == []


def test_uptime_counts_with_mig(host):
    mig = "gpu.3.mig = true\n"
    assert resets(host(f"{mig}gpu.3.uptime_seconds = 5000"), host(f"{mig}gpu.3.uptime_seconds = 40")) == [PCI]


def test_uptime_without_persistence_mode_proves_nothing(host):
    off = "gpu.3.persistence = false\n"
    assert resets(host(f"{off}gpu.3.uptime_seconds = 5000"), host(f"{off}gpu.3.uptime_seconds = 40")) == []
    assert resets(host("gpu.3.uptime_seconds = 5000"), host(f"{off}gpu.3.uptime_seconds = 40")) == []


def test_first_or_missing_uptime_is_no_reset(host):
    assert resets(host(), host("gpu.3.uptime_seconds = 40")) == []
    assert resets(host("gpu.3.uptime_seconds = 5000"), host()) == []
