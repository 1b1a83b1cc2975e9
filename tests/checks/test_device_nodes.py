"""device_nodes: expected device files of GPUs and InfiniBand, with their mode."""

from __future__ import annotations

import errno
import stat

import pytest
from fakes import codes, findings, run_check, run_until_error
from hypothesis import given
from hypothesis import strategies as st
from story import Story

from healthd.checks import device_nodes
from healthd.checks.device_nodes import Config, validate
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host
from healthd.host.system import FileStat, Tree

# /dev of a GPU node. The major number is fixed for nvidia and assigned dynamically for the other files.
EXPECTED = {
    "/dev/nvidia0": "0666",
    "/dev/nvidiactl": "0666",
    "/dev/nvidia-uvm": "0666",
    "/dev/nvidia-caps/nvidia-cap1": "0400",
    "/dev/infiniband/uverbs0": "0666",
}
BASELINE = Config(expected=EXPECTED)


def device(mode: int, kind: int = stat.S_IFCHR) -> FileStat:
    return FileStat(kind | mode, 0, 0, (195, 0))


class Devices(Tree):
    """A tree with simulated device files: real ones require root."""

    def __init__(self, files: dict[str, FileStat | OSError]) -> None:
        super().__init__("/nonexistent")
        self.files = files

    def stat(self, path: str) -> FileStat:
        found = self.files.get(path) or FileNotFoundError(errno.ENOENT, "No such file or directory")
        if isinstance(found, OSError):
            raise found
        return found


def node(**changed: FileStat | OSError | None) -> Host:
    """Create a node with all expected files; node(nvidia0=None) removes /dev/nvidia0."""
    modes = {"/dev/null": "0666", **EXPECTED}
    files: dict[str, FileStat | OSError] = {path: device(int(mode, 8)) for path, mode in modes.items()}
    for name, found in changed.items():
        files.pop(f"/dev/{name}")
        if found is not None:
            files[f"/dev/{name}"] = found
    return Host(system=Devices(files))


def healthy(_tmp_path):
    return node(), BASELINE


def test_expected_device_files_give_nothing():
    assert run_check(device_nodes, node(), BASELINE) == []


def test_device_nodes_reports_nothing_without_expectation():
    assert run_check(device_nodes, Host(system=Devices({}))) == []
    assert run_check(device_nodes, Host()) == []


@pytest.mark.parametrize(
    ("found", "code", "problem"),
    [
        (None, "device_nodes/missing", "is missing"),
        (device(0o666, stat.S_IFREG), "device_nodes/missing", "is not a character device"),
        (device(0o666, stat.S_IFDIR), "device_nodes/missing", "is not a character device"),
        (device(0o660), "device_nodes/wrong_mode", "has the mode 0660, not 0666"),
        (device(0o000), "device_nodes/wrong_mode", "has the mode 0000, not 0666"),
        (device(0o777), "device_nodes/wrong_mode", "has the mode 0777, not 0666"),
    ],
)
def test_missing_or_wrong_device_file_is_degraded(found, code, problem):
    (finding,) = findings(device_nodes, node(nvidia0=found), BASELINE)
    assert (finding.code, finding.severity, finding.clears) == (code, Severity.DEGRADED, Clears.PASS)
    assert (finding.subject, finding.expects, finding.message) == (
        "/dev/nvidia0",
        "expected",
        f"/dev/nvidia0 {problem}",
    )


def test_expected_mode_may_have_three_digits():
    assert findings(device_nodes, node(), Config(expected={"/dev/nvidia0": "666"})) == []


def test_unreadable_device_file_fails_run_and_hides_no_other():
    host = node(nvidia0=PermissionError(errno.EACCES, "Permission denied"), nvidiactl=None)
    results, error = run_until_error(device_nodes, host, BASELINE)
    assert error == "/dev/nvidia0: Permission denied"
    assert codes([item for item in results if isinstance(item, Finding)]) == ["device_nodes/missing"]


def test_device_file_of_this_machine_is_read():
    assert findings(device_nodes, Host(), Config(expected={"/dev/null": "0666"})) == []


@pytest.mark.parametrize("mode", ["", "rw-rw-rw-", "0o666", "888", "66", "06666", "-666"])
def test_validate_rejects_invalid_mode(mode):
    assert 'must be octal as in "0666"' in (validate(Config(expected={"/dev/nvidia0": mode})) or "")


def test_validate_rejects_path_outside_dev():
    assert "is not below /dev" in (validate(Config(expected={"/etc/passwd": "0644"})) or "")
    assert validate(BASELINE) is None


@given(found=st.integers(0, 0o7777), wanted=st.integers(0, 0o777))
def test_only_exact_mode_passes(found, wanted):
    config = Config(expected={"/dev/nvidia0": f"{wanted:04o}"})
    assert validate(config) is None
    host = Host(system=Devices({"/dev/nvidia0": device(found)}))
    assert codes(findings(device_nodes, host, config)) == ([] if found == wanted else ["device_nodes/wrong_mode"])


# --- stories


@pytest.mark.parametrize("fault", [None, device(0o600)])
def test_driver_reload_does_not_drain(fault):
    story = Story(device_nodes, BASELINE).run_check(node()).run_checks(node(nvidia0=fault), 2, minutes=0.4)
    assert (story.run_checks(node(), 3).codes, story.drained) == ([], False)


@pytest.mark.parametrize("fault", [None, device(0o600)])
def test_wrong_device_file_drains_without_requeue_until_fixed(fault):
    story = Story(device_nodes, BASELINE).run_check(node()).run_checks(node(nvidia0=fault), 2, minutes=1)
    assert (story.drained, story.requeued) == (True, False)
    assert story.wait(600).run_checks(node(nvidia0=fault), 20).drained
    assert (
        story.reboot().run_check(node(nvidia0=fault)).drained
    )  # a reboot that does not restore the file clears nothing
    assert story.run_check(node()).drained
    assert not story.run_check(node()).drained


def test_device_file_guessed_by_profile_never_drains():
    guessed = Config(expected=EXPECTED, guessed=("expected",))
    story = Story(device_nodes, guessed).run_checks(node(nvidia0=None), 20)
    assert (story.codes, story.drained) == (["device_nodes/missing"], False)


def test_tree_without_dev_lacks_no_file_guessed_by_profile(tmp_path):
    expected = {"/dev/nvidia0": "0666"}
    assert findings(device_nodes, Host(str(tmp_path)), Config(expected=expected, guessed=("expected",))) == []
    assert codes(findings(device_nodes, Host(str(tmp_path)), Config(expected=expected))) == ["device_nodes/missing"]
