"""device_nodes: expected device files of GPUs and InfiniBand, with their mode."""

from __future__ import annotations

import errno
import stat

import pytest
from fakes import codes, findings, run_check, until_it_fails
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
    there = {"/dev/null": "0666", **EXPECTED}
    files: dict[str, FileStat | OSError] = {path: device(int(mode, 8)) for path, mode in there.items()}
    for name, found in changed.items():
        files.pop(f"/dev/{name}")
        if found is not None:
            files[f"/dev/{name}"] = found
    return Host(system=Devices(files))


def healthy(_tmp_path):
    return node(), BASELINE


def test_device_files_as_expected_give_nothing():
    assert run_check(device_nodes, node(), BASELINE) == []


def test_without_an_expectation_nothing_is_asked():
    assert run_check(device_nodes, Host(system=Devices({}))) == []
    assert run_check(device_nodes, Host()) == []


@pytest.mark.parametrize(
    ("found", "code", "says"),
    [
        (None, "device_nodes/missing", "is missing"),
        (device(0o666, stat.S_IFREG), "device_nodes/missing", "is not a character device"),
        (device(0o666, stat.S_IFDIR), "device_nodes/missing", "is not a character device"),
        (device(0o660), "device_nodes/wrong_mode", "has the mode 0660, not 0666"),
        (device(0o000), "device_nodes/wrong_mode", "has the mode 0000, not 0666"),
        (device(0o777), "device_nodes/wrong_mode", "has the mode 0777, not 0666"),
    ],
)
def test_a_device_file_that_is_missing_or_wrong_is_degraded(found, code, says):
    (finding,) = findings(device_nodes, node(nvidia0=found), BASELINE)
    assert (finding.code, finding.severity, finding.clears) == (code, Severity.DEGRADED, Clears.PASS)
    assert (finding.subject, finding.expects, finding.message) == ("/dev/nvidia0", "expected", f"/dev/nvidia0 {says}")


def test_the_mode_may_be_written_with_three_digits():
    assert findings(device_nodes, node(), Config(expected={"/dev/nvidia0": "666"})) == []


def test_a_device_file_that_cannot_be_asked_is_unknown_and_hides_no_other():
    host = node(nvidia0=PermissionError(errno.EACCES, "Permission denied"), nvidiactl=None)
    given_, error = until_it_fails(device_nodes, host, BASELINE)
    assert error == "/dev/nvidia0: Permission denied"
    assert codes([item for item in given_ if isinstance(item, Finding)]) == ["device_nodes/missing"]


def test_a_device_file_of_this_machine_is_asked():
    assert findings(device_nodes, Host(), Config(expected={"/dev/null": "0666"})) == []


@pytest.mark.parametrize("mode", ["", "rw-rw-rw-", "0o666", "888", "66", "06666", "-666"])
def test_a_mode_that_is_none_is_refused(mode):
    assert 'must be octal as in "0666"' in (validate(Config(expected={"/dev/nvidia0": mode})) or "")


def test_a_path_that_is_no_device_file_is_refused():
    assert "is not below /dev" in (validate(Config(expected={"/etc/passwd": "0644"})) or "")
    assert validate(BASELINE) is None


@given(found=st.integers(0, 0o7777), wanted=st.integers(0, 0o777))
def test_only_the_very_mode_is_right(found, wanted):
    config = Config(expected={"/dev/nvidia0": f"{wanted:04o}"})
    assert validate(config) is None
    host = Host(system=Devices({"/dev/nvidia0": device(found)}))
    assert codes(findings(device_nodes, host, config)) == ([] if found == wanted else ["device_nodes/wrong_mode"])


# --- stories


@pytest.mark.parametrize("wrong", [None, device(0o600)])
def test_a_driver_that_is_loaded_anew_drains_nothing(wrong):
    story = Story(device_nodes, BASELINE).look(node()).looks(node(nvidia0=wrong), 2, minutes=0.4)
    assert (story.looks(node(), 3).codes, story.drained) == ([], False)


@pytest.mark.parametrize("wrong", [None, device(0o600)])
def test_a_wrong_device_file_drains_without_a_requeue_until_it_is_right(wrong):
    story = Story(device_nodes, BASELINE).look(node()).looks(node(nvidia0=wrong), 2, minutes=1)
    assert (story.drained, story.requeued) == (True, False)
    assert story.wait(600).looks(node(nvidia0=wrong), 20).drained
    assert story.reboot().look(node(nvidia0=wrong)).drained  # a reboot that does not restore the file clears nothing
    assert story.look(node()).drained
    assert not story.look(node()).drained


def test_a_device_file_that_a_profile_guessed_warns_and_never_drains():
    guessed = Config(expected=EXPECTED, guessed=("expected",))
    story = Story(device_nodes, guessed).looks(node(nvidia0=None), 20)
    assert (story.codes, story.drained) == (["device_nodes/missing"], False)


def test_a_tree_without_device_files_lacks_none_of_those_that_only_a_profile_names(tmp_path):
    expected = {"/dev/nvidia0": "0666"}
    assert findings(device_nodes, Host(str(tmp_path)), Config(expected=expected, guessed=("expected",))) == []
    assert codes(findings(device_nodes, Host(str(tmp_path)), Config(expected=expected))) == ["device_nodes/missing"]
