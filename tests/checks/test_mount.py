"""mount: whether a file system is mounted where jobs expect it, has the right type, and responds."""

from __future__ import annotations

import errno
import os

import pytest
from fakes import codes, findings, run_check, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import captured_text, write

from healthd.agent.conditions import absorb
from healthd.agent.conditions.absorb import as_configured
from healthd.checks import mount
from healthd.checks.mount import Config, validate
from healthd.common.model import CheckResult, Clears, Finding, Outcome, Severity
from healthd.host.host import Host

INFO = "/proc/self/mountinfo"
NFS = "16 1 0:42 / /data rw,relatime shared:1 - nfs4 server:/srv rw,vers=4.2\n"
ROOT = "21 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
AUTOFS = "30 21 0:50 / /data rw,relatime shared:9 - autofs systemd-1 rw,fd=41,direct\n"
DATA = Config(name="/data")


class StatvfsHost(Host):
    """A host whose statvfs fails with an error, or first mounts something as an automounter does."""

    def __init__(self, root: str, error: int = 0, mounts: str = "") -> None:
        super().__init__(root)
        self.error = error
        self.mounts = mounts
        self.statvfs_paths: list[str] = []

    def statvfs(self, path: str) -> os.statvfs_result:
        self.statvfs_paths.append(path)
        if self.mounts:
            with open(self.path(INFO), "a", encoding="utf-8") as file:
                file.write(self.mounts)
        if self.error:
            raise OSError(self.error, os.strerror(self.error), path)
        return os.statvfs("/")


def healthy(tmp_path):
    host = write(tmp_path, {INFO: ROOT + NFS})
    (tmp_path / "data").mkdir()
    return host, Config(name="/data", fstype="nfs")


@pytest.fixture
def host(tmp_path):
    """Return a function that creates a host with these lines in mountinfo and this result of statvfs."""

    def make(lines=ROOT + NFS, error=0, mounts=""):
        write(tmp_path, {INFO: lines})
        return StatvfsHost(str(tmp_path), error, mounts)

    return make


def single_finding(*args, **kwargs) -> Finding:
    (finding,) = findings(mount, *args, **kwargs)
    return finding


def test_mounted_file_system_that_responds_gives_no_finding(host):
    node = host()
    (observation,) = run_check(mount, node, DATA)
    assert (observation.name, observation.value) == ("mount_mounted", 1)
    assert node.statvfs_paths == ["/data"]


def test_missing_mount_is_critical_after_30_seconds_and_not_queried(host):
    node = host(ROOT)
    finding = single_finding(node, DATA)
    assert (finding.code, finding.subject, finding.shared_cause) == ("mount/missing", "/data", True)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.CRITICAL, Clears.PASS, 30.0)
    assert node.statvfs_paths == []


def test_stale_file_handle_is_critical_after_30_seconds(host):
    finding = single_finding(host(error=errno.ESTALE), DATA)
    assert (finding.code, finding.severity, finding.confirm_seconds) == ("mount/stale", Severity.CRITICAL, 30.0)
    assert finding.shared_cause


@pytest.mark.parametrize("error", [errno.ENOTCONN, errno.EIO, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.EHOSTDOWN])
def test_other_statvfs_error_is_degraded_and_never_critical(host, error):
    finding = single_finding(host(error=error), DATA)
    assert (finding.code, finding.severity, finding.worsens) == ("mount/failing", Severity.DEGRADED, None)
    assert errno.errorcode[error] in finding.message


def test_mount_hidden_by_another_mount_is_missing(host):
    assert single_finding(host(error=errno.ENOENT), DATA).code == "mount/missing"


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM])
def test_missing_permission_of_healthd_fails_run(host, error):
    with pytest.raises(PermissionError):
        run_check(mount, host(error=error), DATA)


@pytest.mark.parametrize(
    ("fstype", "expected"), [("", []), ("nfs4", []), ("nfs", []), ("lustre", ["mount/wrong_type"])]
)
def test_unexpected_type_is_degraded_at_once(host, fstype, expected):
    found = findings(mount, host(), Config(name="/data", fstype=fstype))
    assert codes(found) == expected
    assert all((f.severity, f.confirm_seconds, f.shared_cause) == (Severity.DEGRADED, 0.0, True) for f in found)


EMERGENCY_READ_ONLY = (
    "16 1 8:2 / /data rw - ext4 /dev/sdb1 rw,errors=remount-ro,emergency_ro\n"  # Linux 6.18, after an error
)


@pytest.mark.parametrize(
    "line", [NFS.replace("/data rw", "/data ro"), NFS.replace(" rw,vers", " ro,vers"), EMERGENCY_READ_ONLY]
)
def test_read_only_mount_is_degraded_unless_configured(host, line):
    finding = single_finding(host(ROOT + line), DATA)
    assert (finding.code, finding.severity) == ("mount/read_only", Severity.DEGRADED)
    assert findings(mount, host(ROOT + line), Config(name="/data", read_only=True)) == []


def test_message_reports_shut_down_file_system(host):
    assert (
        single_finding(host(ROOT + EMERGENCY_READ_ONLY.replace("emergency_ro", "shutdown")), DATA).message
        == "/data is shut down"
    )


def test_topmost_of_several_mounts_counts(host):
    topmost = "99 16 0:77 / /data ro,relatime - tmpfs tmpfs rw\n"
    found = findings(mount, host(ROOT + NFS + topmost), Config(name="/data", fstype="nfs"))
    assert codes(found) == ["mount/wrong_type", "mount/read_only"]
    assert findings(mount, host(ROOT + topmost + NFS), Config(name="/data", fstype="nfs")) == []


def test_automounter_is_triggered(host):
    node = host(ROOT + AUTOFS, mounts=NFS)
    assert findings(mount, node, Config(name="/data", fstype="nfs")) == []
    assert node.statvfs_paths == ["/data"]


def test_automounter_that_does_not_mount_is_missing(host):
    assert single_finding(host(ROOT + AUTOFS), DATA).code == "mount/missing"
    assert single_finding(host(ROOT + AUTOFS, error=errno.ENOENT), DATA).code == "mount/missing"
    assert single_finding(host(ROOT + AUTOFS, error=errno.EHOSTDOWN), DATA).code == "mount/missing"


def test_mounted_automounter_is_below_its_mount(host):
    assert findings(mount, host(ROOT + AUTOFS + NFS, error=0), DATA) == []
    assert codes(findings(mount, host(ROOT + AUTOFS + NFS, error=errno.ESTALE), DATA)) == ["mount/stale"]


def test_path_in_indirect_map_is_triggered(host):
    indirect = "30 21 0:50 / /home rw,relatime shared:9 - autofs auto.home rw,fd=41,indirect\n"
    node = host(ROOT + indirect, mounts=NFS.replace("/data", "/home/shared"))
    assert findings(mount, node, Config(name="/home/shared")) == []
    assert node.statvfs_paths == ["/home/shared"]
    assert single_finding(host(ROOT + indirect), Config(name="/home/shared")).code == "mount/missing"
    assert single_finding(host(ROOT + indirect), Config(name="/homes")).code == "mount/missing"


def test_root_file_system_can_be_monitored(host):
    assert findings(mount, host(), Config(name="/", fstype="ext4")) == []


def test_escaped_characters_in_mount_point_are_decoded(host):
    odd = "16 1 0:42 / /my\\040data\\134x rw - nfs4 server:/a\\040b rw\n"
    assert findings(mount, host(ROOT + odd), Config(name="/my data\\x")) == []


def test_other_file_systems_are_not_queried(host):
    node = host(ROOT + NFS + NFS.replace("/data", "/other"))
    findings(mount, node, DATA)
    assert node.statvfs_paths == ["/data"]


def test_mount_tables_of_real_machines_are_read(tmp_path):
    nfs = write(tmp_path / "a", {INFO: captured_text("mountinfo_nfs.txt")})
    os.makedirs(tmp_path / "a/mnt/nfs/test")
    assert findings(mount, nfs, Config(name="/mnt/nfs/test", fstype="nfs")) == []
    clients = write(tmp_path / "b", {INFO: captured_text("mountinfo_nfs_clients.txt")})
    os.makedirs(tmp_path / "b/public")
    assert codes(findings(mount, clients, Config(name="/public"))) == ["mount/read_only"]


def test_mount_table_of_this_machine_is_read():
    assert run_check(mount, Host(), Config(name="/"))[0].value == 1


def test_hanging_mount_warns_and_is_degraded_after_600_seconds():
    (finding,) = mount.overdue(DATA, 10.0)
    assert (finding.code, finding.subject, finding.shared_cause) == ("mount/hang", "/data", True)
    assert finding.severity is Severity.WARNING
    assert finding.worsens is not None
    assert (finding.worsens.severity, finding.worsens.after_seconds) == (Severity.DEGRADED, 600.0)


@pytest.mark.parametrize("name", ["data", "/data/"])
def test_validate_rejects_invalid_mount_point(name):
    assert "is not a mount point" in (validate(Config(name=name)) or "")
    assert validate(DATA) is None
    assert validate(Config(name="/")) is None


@pytest.mark.parametrize("text", ["", "\n", "N/A", NFS.replace(" - ", " "), "a b c - d", NFS[:30], "\0" * 50])
def test_garbled_mount_table_fails_run(host, text):
    with pytest.raises(ValueError, match="/proc/self/mountinfo"):
        run_check(mount, host(text), DATA)


def test_garbled_line_of_another_mount_is_ignored(host):
    assert findings(mount, host(f"garbage\n{NFS}garbage\n"), DATA) == []


def test_missing_mount_table_fails_run(tmp_path):
    with pytest.raises(ValueError, match="mountinfo is missing"):
        run_check(mount, Host(str(tmp_path)), DATA)


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(content=st.binary(max_size=80))
def test_any_content_of_mount_table_gives_finding_or_failure(tmp_path, content):
    (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
    (tmp_path / INFO[1:]).write_bytes(content)
    results, error = run_until_error(mount, StatvfsHost(str(tmp_path)), DATA)
    assert error or codes([item for item in results if isinstance(item, Finding)]) == ["mount/missing"]


# --- stories


def hang(story: Story, minutes: float) -> Story:
    """Add a run that hangs in statvfs, with the findings reported during the hang."""
    story.wait(minutes)
    found = tuple(as_configured(finding, story.config) for finding in mount.overdue(story.config, 10.0))
    story.result = CheckResult("mount", "/data", Outcome.TIMED_OUT, story.now, 10.0, found)
    story.conditions = absorb.absorb_result(story.conditions, story.result, 2, story.boot_id, tuple(story.cleared))
    return story._decide()


def test_file_server_failover_of_90_seconds_does_not_drain(host):
    story = Story(mount, DATA).run_check(host())
    hang(story, 5)
    assert (story.codes, story.drained) == (["mount/hang"], False)
    story.run_check(host(), 1.5).run_check(host())
    assert (story.codes, story.drained) == ([], False)


def test_file_server_away_for_ten_minutes_drains_without_requeue(host):
    story = Story(mount, DATA).run_check(host())
    hang(story, 5)
    hang(story, 9)
    assert not story.drained
    hang(story, 1)
    assert (story.drained, story.requeued) == (True, False)
    hang(story.wait(600), 5)
    assert story.drained  # no load, and no repair
    assert story.run_check(host()).drained
    assert not story.run_check(host()).drained


@pytest.mark.parametrize(
    ("code", "lines", "error"),
    [("mount/missing", ROOT, 0), ("mount/stale", ROOT + NFS, errno.ESTALE), ("mount/missing", ROOT + AUTOFS, 0)],
)
def test_missing_or_stale_mount_requeues_after_30_seconds_until_mounted(host, code, lines, error):
    story = Story(mount, DATA).run_check(host()).run_check(host(lines, error))
    assert not story.drained
    story.run_check(host(lines, error), 0.5)
    assert (story.codes, story.drained, story.requeued) == ([code], True, True)
    assert story.run_checks(host(lines, error), 20).drained
    assert story.reboot().run_check(host(lines, error)).drained  # a reboot that does not mount it clears nothing
    assert story.run_check(host()).drained
    assert not story.run_check(host()).drained


def test_mount_restored_within_30_seconds_does_not_drain(host):
    story = Story(mount, DATA).run_check(host(ROOT)).run_check(host(), 0.4)
    assert (story.codes, story.drained) == ([], False)


@pytest.mark.parametrize(
    ("code", "lines", "error"),
    [
        ("mount/wrong_type", ROOT + "16 1 0:42 / /data rw - tmpfs tmpfs rw\n", 0),
        ("mount/read_only", ROOT + NFS.replace("/data rw", "/data ro"), 0),
        ("mount/failing", ROOT + NFS, errno.EIO),
    ],
)
def test_wrong_mount_drains_without_requeue_until_fixed(host, code, lines, error):
    story = Story(mount, Config(name="/data", fstype="nfs")).run_checks(host(lines, error), 2)
    assert (story.codes, story.drained, story.requeued) == ([code], True, False)
    assert story.wait(600).run_checks(host(lines, error), 20).drained
    assert not story.run_checks(host(), 2).drained
