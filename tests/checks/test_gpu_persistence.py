"""gpu_persistence: whether the driver keeps unused GPUs initialised."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpus import fake_pci_gpus
from fakes import codes, findings, run_check, scenarios, until_it_fails
from story import Story
from trees import write

from healthd.checks import gpu_persistence
from healthd.checks.gpu_persistence import Config
from healthd.common.model import Clears, Severity
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


def test_persistence_mode_with_its_daemon_is_no_finding(host):
    assert run_check(gpu_persistence, host()) == []


def test_a_gpu_whose_mode_is_off_warns(host):
    (finding,) = findings(gpu_persistence, host("gpu.3.persistence = false"))
    assert (finding.code, finding.subject) == ("gpu_persistence/off", PCI)
    assert (finding.severity, finding.clears) == (Severity.WARNING, Clears.PASS)


def test_a_driver_that_nobody_holds_warns(host):
    (finding,) = findings(gpu_persistence, host(references="1"))
    assert (finding.code, finding.subject, finding.severity) == ("gpu_persistence/not_held", "", Severity.WARNING)


def test_where_the_mode_is_off_it_is_not_said_twice(host):
    assert codes(findings(gpu_persistence, host("gpu.3.persistence = false", "1"))) == ["gpu_persistence/off"]


def test_where_nothing_tells_who_holds_the_driver_nothing_is_said_of_it(host):
    assert findings(gpu_persistence, host(references="N/A")) == []


def test_a_gpu_that_does_not_know_the_mode_gives_nothing(host):
    assert run_check(gpu_persistence, host('missing_functions = ["nvmlDeviceGetPersistenceMode"]')) == []


def test_a_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_persistence, Host(str(tmp_path))) == []


def test_a_gpu_that_fails_is_unknown_and_hides_no_other(host):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetPersistenceMode = "Unknown" }\n[gpu.3]\npersistence = false'
    given, error = until_it_fails(gpu_persistence, host(text))
    assert GPUS[0] in error
    assert codes(given) == ["gpu_persistence/off"]


@pytest.mark.parametrize(
    ("bad", "code"), [(("gpu.3.persistence = false",), "off"), (("", "1"), "not_held")], ids=["off", "not held"]
)
def test_it_warns_until_the_daemon_runs_and_never_drains(host, bad, code):
    story = Story(gpu_persistence).looks(host(*bad), 300)
    assert story.codes == [f"gpu_persistence/{code}"]
    assert not story.drained
    story.reboot().look(host(*bad))
    assert story.codes == [f"gpu_persistence/{code}"]
    assert story.look(host()).codes != []
    assert story.look(host()).codes == []
