"""mount: whether a file system is mounted where jobs expect it, has the right type, and responds."""

from __future__ import annotations

import errno
import os

import pytest
from fakes import codes, findings, run_check, until_it_fails
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import captured, write

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


class Answers(Host):
    """A host whose statvfs fails with an error, or first mounts something as an automounter does."""

    def __init__(self, root: str, error: int = 0, mounts: str = "") -> None:
        super().__init__(root)
        self.error = error
        self.mounts = mounts
        self.asked: list[str] = []

    def statvfs(self, path: str) -> os.statvfs_result:
        self.asked.append(path)
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
        return Answers(str(tmp_path), error, mounts)

    return make


def one(*args, **kwargs) -> Finding:
    (finding,) = findings(mount, *args, **kwargs)
    return finding


def test_what_is_mounted_and_answers_gives_no_finding(host):
    node = host()
    (observation,) = run_check(mount, node, DATA)
    assert (observation.name, observation.value) == ("mount_mounted", 1)
    assert node.asked == ["/data"]


def test_what_is_not_mounted_is_critical_after_half_a_minute_and_is_not_asked(host):
    node = host(ROOT)
    finding = one(node, DATA)
    assert (finding.code, finding.subject, finding.shared_cause) == ("mount/missing", "/data", True)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.CRITICAL, Clears.PASS, 30.0)
    assert node.asked == []


def test_a_stale_file_handle_is_critical_after_half_a_minute(host):
    finding = one(host(error=errno.ESTALE), DATA)
    assert (finding.code, finding.severity, finding.confirm_seconds) == ("mount/stale", Severity.CRITICAL, 30.0)
    assert finding.shared_cause


@pytest.mark.parametrize("error", [errno.ENOTCONN, errno.EIO, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.EHOSTDOWN])
def test_another_error_is_degraded_and_never_requeued_for(host, error):
    finding = one(host(error=error), DATA)
    assert (finding.code, finding.severity, finding.worsens) == ("mount/failing", Severity.DEGRADED, None)
    assert errno.errorcode[error] in finding.message


def test_what_is_hidden_by_another_mount_is_missing(host):
    assert one(host(error=errno.ENOENT), DATA).code == "mount/missing"


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM])
def test_healthds_own_lack_of_rights_is_a_failure(host, error):
    with pytest.raises(PermissionError):
        run_check(mount, host(error=error), DATA)


@pytest.mark.parametrize(
    ("fstype", "expected"), [("", []), ("nfs4", []), ("nfs", []), ("lustre", ["mount/wrong_type"])]
)
def test_another_type_than_expected_is_degraded_at_once(host, fstype, expected):
    found = findings(mount, host(), Config(name="/data", fstype=fstype))
    assert codes(found) == expected
    assert all((f.severity, f.confirm_seconds, f.shared_cause) == (Severity.DEGRADED, 0.0, True) for f in found)


TURNED = "16 1 8:2 / /data rw - ext4 /dev/sdb1 rw,errors=remount-ro,emergency_ro\n"  # Linux 6.18, after an error


@pytest.mark.parametrize("line", [NFS.replace("/data rw", "/data ro"), NFS.replace(" rw,vers", " ro,vers"), TURNED])
def test_read_only_is_degraded_unless_the_site_says_so(host, line):
    finding = one(host(ROOT + line), DATA)
    assert (finding.code, finding.severity) == ("mount/read_only", Severity.DEGRADED)
    assert findings(mount, host(ROOT + line), Config(name="/data", read_only=True)) == []


def test_a_file_system_that_the_kernel_shut_down_is_told_as_such(host):
    assert one(host(ROOT + TURNED.replace("emergency_ro", "shutdown")), DATA).message == "/data is shut down"


def test_the_uppermost_of_several_mounts_counts(host):
    over = "99 16 0:77 / /data ro,relatime - tmpfs tmpfs rw\n"
    found = findings(mount, host(ROOT + NFS + over), Config(name="/data", fstype="nfs"))
    assert codes(found) == ["mount/wrong_type", "mount/read_only"]
    assert findings(mount, host(ROOT + over + NFS), Config(name="/data", fstype="nfs")) == []


def test_an_automounter_is_made_to_mount(host):
    node = host(ROOT + AUTOFS, mounts=NFS)
    assert findings(mount, node, Config(name="/data", fstype="nfs")) == []
    assert node.asked == ["/data"]


def test_an_automounter_that_does_not_mount_is_missing(host):
    assert one(host(ROOT + AUTOFS), DATA).code == "mount/missing"
    assert one(host(ROOT + AUTOFS, error=errno.ENOENT), DATA).code == "mount/missing"
    assert one(host(ROOT + AUTOFS, error=errno.EHOSTDOWN), DATA).code == "mount/missing"


def test_an_automounter_that_has_mounted_stays_below_its_mount(host):
    assert findings(mount, host(ROOT + AUTOFS + NFS, error=0), DATA) == []
    assert codes(findings(mount, host(ROOT + AUTOFS + NFS, error=errno.ESTALE), DATA)) == ["mount/stale"]


def test_a_path_in_an_indirect_map_is_asked_for(host):
    indirect = "30 21 0:50 / /home rw,relatime shared:9 - autofs auto.home rw,fd=41,indirect\n"
    node = host(ROOT + indirect, mounts=NFS.replace("/data", "/home/shared"))
    assert findings(mount, node, Config(name="/home/shared")) == []
    assert node.asked == ["/home/shared"]
    assert one(host(ROOT + indirect), Config(name="/home/shared")).code == "mount/missing"
    assert one(host(ROOT + indirect), Config(name="/homes")).code == "mount/missing"


def test_the_root_file_system_can_be_watched(host):
    assert findings(mount, host(), Config(name="/", fstype="ext4")) == []


def test_blanks_in_a_mount_point_are_read_as_the_kernel_writes_them(host):
    odd = "16 1 0:42 / /my\\040data\\134x rw - nfs4 server:/a\\040b rw\n"
    assert findings(mount, host(ROOT + odd), Config(name="/my data\\x")) == []


def test_file_systems_that_nobody_named_are_not_touched(host):
    node = host(ROOT + NFS + NFS.replace("/data", "/other"))
    findings(mount, node, DATA)
    assert node.asked == ["/data"]


def test_real_tables_are_read(tmp_path):
    nfs = write(tmp_path / "a", {INFO: captured("mountinfo_nfs.txt")})
    os.makedirs(tmp_path / "a/mnt/nfs/test")
    assert findings(mount, nfs, Config(name="/mnt/nfs/test", fstype="nfs")) == []
    clients = write(tmp_path / "b", {INFO: captured("mountinfo_nfs_clients.txt")})
    os.makedirs(tmp_path / "b/public")
    assert codes(findings(mount, clients, Config(name="/public"))) == ["mount/read_only"]


def test_this_machines_own_table_is_read():
    assert run_check(mount, Host(), Config(name="/"))[0].value == 1


def test_what_does_not_answer_warns_then_is_degraded_and_never_more():
    (finding,) = mount.overdue(DATA, 10.0)
    assert (finding.code, finding.subject, finding.shared_cause) == ("mount/hang", "/data", True)
    assert finding.severity is Severity.WARNING
    assert finding.worsens is not None
    assert (finding.worsens.severity, finding.worsens.after_seconds) == (Severity.DEGRADED, 600.0)


@pytest.mark.parametrize("name", ["data", "/data/"])
def test_a_name_that_is_no_mount_point_is_refused(name):
    assert "is not a mount point" in (validate(Config(name=name)) or "")
    assert validate(DATA) is None
    assert validate(Config(name="/")) is None


@pytest.mark.parametrize("text", ["", "\n", "N/A", NFS.replace(" - ", " "), "a b c - d", NFS[:30], "\0" * 50])
def test_a_garbled_table_is_unknown(host, text):
    with pytest.raises(ValueError, match="/proc/self/mountinfo"):
        run_check(mount, host(text), DATA)


def test_a_garbled_line_beside_the_one_that_is_looked_for_is_no_matter(host):
    assert findings(mount, host(f"garbage\n{NFS}garbage\n"), DATA) == []


def test_no_table_is_unknown(tmp_path):
    with pytest.raises(ValueError, match="mountinfo is missing"):
        run_check(mount, Host(str(tmp_path)), DATA)


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(content=st.binary(max_size=80))
def test_no_content_of_the_table_passes_silently(tmp_path, content):
    (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
    (tmp_path / INFO[1:]).write_bytes(content)
    given_, error = until_it_fails(mount, Answers(str(tmp_path)), DATA)
    assert error or codes([item for item in given_ if isinstance(item, Finding)]) == ["mount/missing"]


# --- stories


def does_not_answer(story: Story, minutes: float) -> Story:
    """Add a run that hangs in statvfs, with the findings reported during the hang."""
    story.wait(minutes)
    found = tuple(as_configured(finding, story.config) for finding in mount.overdue(story.config, 10.0))
    story.result = CheckResult("mount", "/data", Outcome.TIMED_OUT, story.now, 10.0, found)
    story.conditions = absorb.absorb_result(story.conditions, story.result, 2, story.boot_id, tuple(story.cleared))
    return story._decide()


def test_a_file_server_that_fails_over_in_90_seconds_drains_nothing(host):
    story = Story(mount, DATA).look(host())
    does_not_answer(story, 5)
    assert (story.codes, story.drained) == (["mount/hang"], False)
    story.look(host(), 1.5).look(host())
    assert (story.codes, story.drained) == ([], False)


def test_a_file_server_that_is_away_for_ten_minutes_drains_without_a_requeue_until_it_answers_twice(host):
    story = Story(mount, DATA).look(host())
    does_not_answer(story, 5)
    does_not_answer(story, 9)
    assert not story.drained
    does_not_answer(story, 1)
    assert (story.drained, story.requeued) == (True, False)
    does_not_answer(story.wait(600), 5)
    assert story.drained  # no load, and no repair
    assert story.look(host()).drained
    assert not story.look(host()).drained


@pytest.mark.parametrize(
    ("code", "lines", "error"),
    [("mount/missing", ROOT, 0), ("mount/stale", ROOT + NFS, errno.ESTALE), ("mount/missing", ROOT + AUTOFS, 0)],
)
def test_what_is_gone_or_stale_requeues_after_half_a_minute_and_clears_when_it_is_mounted_again(
    host, code, lines, error
):
    story = Story(mount, DATA).look(host()).look(host(lines, error))
    assert not story.drained
    story.look(host(lines, error), 0.5)
    assert (story.codes, story.drained, story.requeued) == ([code], True, True)
    assert story.looks(host(lines, error), 20).drained
    assert story.reboot().look(host(lines, error)).drained  # a reboot that does not mount it clears nothing
    assert story.look(host()).drained
    assert not story.look(host()).drained


def test_a_mount_that_is_back_within_half_a_minute_drains_nothing(host):
    story = Story(mount, DATA).look(host(ROOT)).look(host(), 0.4)
    assert (story.codes, story.drained) == ([], False)


@pytest.mark.parametrize(
    ("code", "lines", "error"),
    [
        ("mount/wrong_type", ROOT + "16 1 0:42 / /data rw - tmpfs tmpfs rw\n", 0),
        ("mount/read_only", ROOT + NFS.replace("/data rw", "/data ro"), 0),
        ("mount/failing", ROOT + NFS, errno.EIO),
    ],
)
def test_a_mount_that_is_not_as_it_should_be_drains_without_a_requeue_until_it_is(host, code, lines, error):
    story = Story(mount, Config(name="/data", fstype="nfs")).looks(host(lines, error), 2)
    assert (story.codes, story.drained, story.requeued) == ([code], True, False)
    assert story.wait(600).looks(host(lines, error), 20).drained
    assert not story.looks(host(), 2).drained
