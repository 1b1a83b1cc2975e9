"""disk_space: local disks that are nearly full."""

from __future__ import annotations

import errno

import pytest
from fakes import codes, findings, observations_named, run_check, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import captured_text, write

from healthd.checks import disk_space
from healthd.checks.disk_space import Config, validate
from healthd.common.codec import ConvertError, load
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host
from healthd.host.system import FileSystem, Tree

INFO = "/proc/self/mountinfo"
ROOT = "21 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
TMP = "22 21 8:2 / /tmp rw,relatime - xfs /dev/sdb1 rw\n"
VAR = "23 21 8:3 / /var rw,relatime - btrfs /dev/sdc1 rw\n"
GIB = 2**30
ROOMY = FileSystem(100 * GIB, 60 * GIB, 1_000_000, 900_000)


ABSENT_IS_FINE = {INFO: "a captured tree without it"}


class Disks(Tree):
    """A tree whose file systems have this much space. `statvfs` of any other path fails the test."""

    def __init__(self, root: str, spaces: dict[str, FileSystem | OSError]) -> None:
        super().__init__(root)
        self.spaces = spaces
        self.statvfs_paths: list[str] = []

    def statvfs(self, path: str) -> FileSystem:
        self.statvfs_paths.append(path)
        space = self.spaces[path]
        if isinstance(space, OSError):
            raise space
        return space


@pytest.fixture
def node(tmp_path):
    """Return a function that creates a host with these mounts: node(ROOT, {"/": FileSystem(...)})."""

    def make(lines=ROOT + TMP + VAR, spaces=None):
        write(tmp_path, {INFO: lines})
        disk_spaces = {"/": ROOMY, "/tmp": ROOMY, "/var": ROOMY, **(spaces or {})}
        return Host(str(tmp_path), system=Disks(str(tmp_path), disk_spaces))

    return make


def free(percent: float) -> FileSystem:
    return ROOMY._replace(available_bytes=int(percent * GIB))


def inodes(percent: float) -> FileSystem:
    return ROOMY._replace(inodes_available=int(percent * 10_000))


def queried_paths(host: Host) -> list[str]:
    return host._system.statvfs_paths  # type: ignore[attr-defined,no-any-return]


def healthy(tmp_path):
    write(tmp_path, {INFO: ROOT + TMP + VAR})
    return Host(str(tmp_path), system=Disks(str(tmp_path), {"/": ROOMY, "/tmp": ROOMY, "/var": ROOMY})), Config()


def test_disks_with_free_space_give_ratios_and_no_finding(node):
    results = run_check(disk_space, node())
    assert [item for item in results if isinstance(item, Finding)] == []
    assert [(o.value, o.labels) for o in observations_named(results, "disk_space_available_ratio")] == [
        (0.6, (("mountpoint", "/"),)),
        (0.6, (("mountpoint", "/tmp"),)),
        (0.6, (("mountpoint", "/var"),)),
    ]


@pytest.mark.parametrize(
    ("space", "code", "severity"),
    [
        (free(4.99), "disk_space/no_space", Severity.DEGRADED),
        (free(0), "disk_space/no_space", Severity.DEGRADED),
        (free(5), "disk_space/low_space", Severity.WARNING),
        (free(9.99), "disk_space/low_space", Severity.WARNING),
        (inodes(4.99), "disk_space/no_inodes", Severity.DEGRADED),
        (inodes(5), "disk_space/low_inodes", Severity.WARNING),
    ],
)
def test_nearly_full_disk_is_degraded_and_filling_disk_warns(node, space, code, severity):
    (finding,) = findings(disk_space, node(spaces={"/tmp": space}))
    assert (finding.code, finding.severity, finding.subject, finding.clears) == (code, severity, "/tmp", Clears.PASS)


def test_ten_percent_free_is_enough_and_message_has_amounts(node):
    assert findings(disk_space, node(spaces={"/": free(10), "/tmp": inodes(10)})) == []
    (finding,) = findings(disk_space, node(spaces={"/": free(3)}))
    assert finding.message == "3.0 % of / is free: 3.0 of 100.0 GiB"


@pytest.mark.parametrize(
    ("gib", "code"),
    [(19.999, "disk_space/no_space"), (20, "disk_space/low_space"), (900, "disk_space/low_space")],
)
def test_large_disk_is_degraded_only_below_20_gib(node, gib, code):
    large = FileSystem(30_000 * GIB, int(gib * GIB), 1_000_000, 900_000)
    (finding,) = findings(disk_space, node(spaces={"/tmp": large}))
    assert finding.code == code


def test_small_disk_is_degraded_only_below_5_percent(node):
    small = FileSystem(40 * GIB, 3 * GIB, 1_000_000, 900_000)
    assert codes(findings(disk_space, node(spaces={"/tmp": small}))) == ["disk_space/low_space"]


def test_degraded_gib_is_a_setting_and_does_not_apply_to_inodes(node):
    large = FileSystem(30_000 * GIB, 900 * GIB, 1_000_000, 40_000)
    found = findings(disk_space, node(spaces={"/tmp": large}), Config(degraded_gib=1000.0))
    assert codes(found) == ["disk_space/no_space", "disk_space/no_inodes"]
    assert codes(findings(disk_space, node(spaces={"/tmp": large}))) == ["disk_space/low_space", "disk_space/no_inodes"]


def test_space_and_inodes_are_evaluated_separately(node):
    full = FileSystem(100 * GIB, GIB, 1000, 80)
    assert codes(findings(disk_space, node(spaces={"/": full}))) == ["disk_space/no_space", "disk_space/low_inodes"]


def test_path_below_mount_point_is_evaluated_once_with_its_mount(node):
    host = node(ROOT)
    assert len(list(observations_named(run_check(disk_space, host), "disk_space_available_ratio"))) == 1
    assert queried_paths(host) == ["/"]


def test_file_system_with_two_mount_points_is_evaluated_once(node):
    host = node(ROOT + "24 21 8:1 /tmp /tmp rw - ext4 /dev/sda1 rw\n", {"/": free(1)})
    assert [f.subject for f in findings(disk_space, host)] == ["/"]


@pytest.mark.parametrize(
    "fstype", ["nfs4", "nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.sshfs", "autofs", "9p"]
)
def test_network_file_system_is_not_queried(node, fstype):
    host = node(ROOT + f"24 21 0:50 / /tmp rw - {fstype} server:/tmp rw\n")
    run_check(disk_space, host)
    assert queried_paths(host) == ["/"]


def test_network_mount_over_local_mount_is_not_queried(node):
    host = node(ROOT + TMP + "24 22 0:50 / /tmp rw - nfs4 server:/tmp rw\n")
    run_check(disk_space, host)
    assert queried_paths(host) == ["/"]


def test_local_disk_below_network_mount_is_not_queried(node):
    nfs = "24 21 0:50 / /data rw - nfs4 server:/ rw\n25 24 8:7 / /data/scratch rw - xfs /dev/sdx rw\n"
    host = node(ROOT + nfs)
    run_check(disk_space, host, Config(paths=("/", "/data/scratch")))
    assert queried_paths(host) == ["/"]


def test_symbolic_link_is_resolved_to_its_mount(node, tmp_path):
    scratch = "24 21 8:9 / /scratch rw - xfs /dev/sdd1 rw\n"
    (tmp_path / "local").symlink_to("scratch")
    (tmp_path / "tmp").symlink_to("local/./tmp")
    host = node(ROOT + scratch, {"/scratch": free(2)})
    assert [f.subject for f in findings(disk_space, host)] == ["/scratch"]


def test_symbolic_link_to_network_mount_is_not_queried(node, tmp_path):
    (tmp_path / "tmp").symlink_to("/data/tmp")
    (tmp_path / "data/tmp").mkdir(parents=True)
    host = node(ROOT + "24 21 0:50 / /data rw - nfs4 server:/tmp rw\n")
    run_check(disk_space, host)
    assert queried_paths(host) == ["/"]


def test_circular_symbolic_link_ends(node, tmp_path):
    (tmp_path / "tmp").symlink_to("/tmp")
    assert findings(disk_space, node(ROOT)) == []


@pytest.mark.parametrize(
    "line",
    [
        "24 21 7:1 / /tmp ro - squashfs /dev/loop1 ro\n",
        "24 21 11:0 / /tmp ro - iso9660 /dev/sr0 ro\n",
        "24 21 0:60 / /tmp rw - overlay overlay ro,lowerdir=/a:/b\n",
        "24 21 0:60 / /tmp rw - erofs /dev/loop1 rw\n",
        "24 21 8:5 / /tmp ro - ext4 /dev/sde1 ro\n",
    ],
)
def test_full_read_only_media_give_no_finding(node, line):
    host = node(ROOT + line, {"/tmp": free(0)})
    assert findings(disk_space, host) == []


def test_overlay_root_of_live_system_is_evaluated(node):
    host = node(
        "1 0 0:30 / / rw - overlay LiveOS_rootfs rw,lowerdir=/sysroot,upperdir=/run/overlayfs\n", {"/": free(1)}
    )
    assert codes(findings(disk_space, host)) == ["disk_space/no_space"]


def test_file_systems_without_size_or_inodes_are_ignored(node):
    host = node(spaces={"/var": ROOMY._replace(inodes=0, inodes_available=0), "/tmp": FileSystem(0, 0, 0, 0)})
    assert findings(disk_space, host) == []


def test_statvfs_error_fails_run_and_hides_no_other_finding(node):
    host = node(spaces={"/": OSError(errno.EIO, "Input/output error"), "/var": free(1)})
    results, error = run_until_error(disk_space, host)
    assert error == "/: Input/output error"
    assert codes([item for item in results if isinstance(item, Finding)]) == ["disk_space/no_space"]


@pytest.mark.parametrize("text", ["", "N/A", "garbage\n" + ROOT])
def test_garbled_mount_table_fails_run(node, text):
    assert INFO in run_until_error(disk_space, node(text))[1]


def test_paths_setting_selects_file_systems(node):
    host = node(spaces={"/tmp": free(1)})
    assert findings(disk_space, host, Config(paths=("/var",))) == []
    assert queried_paths(host) == ["/var"]
    assert run_check(disk_space, node(), Config(paths=())) == []


def test_mounts_of_real_gpu_node_give_no_finding(tmp_path):
    write(tmp_path, {INFO: captured_text("mountinfo_gpu_node.txt")})
    host = Host(str(tmp_path), system=Disks(str(tmp_path), {"/": ROOMY}))
    assert findings(disk_space, host) == []
    assert queried_paths(host) == ["/"]


def test_disk_space_reports_nothing_above_info_on_this_machine():
    assert findings(disk_space, Host()) == []


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (Config(paths=("tmp",)), "must begin with a slash"),
        (Config(degraded_percent=20.0), "must not be above"),
        (Config(warning_percent=101.0), "between 0 and 100"),
        (Config(degraded_percent=-1.0), "between 0 and 100"),
        (Config(degraded_gib=0.0), "degraded_gib must be above 0, got 0"),
        (Config(degraded_gib=float("nan")), "degraded_gib must be above 0"),
    ],
)
def test_validate_rejects_invalid_settings(config, problem):
    assert problem in (validate(config) or "")
    assert validate(Config()) is None


@given(size=st.integers(0, 2**63), share=st.floats(0, 1))
def test_judge_degrades_exactly_below_both_limits(size, share):
    results = list(disk_space._judge("space", "/", int(size * share), size, Config()))
    degraded = [item for item in results if isinstance(item, Finding) and item.severity is Severity.DEGRADED]
    available = int(size * share)
    assert bool(degraded) == (size > 0 and 100.0 * available / size < 5 and available < 20 * GIB)


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(content=st.binary(max_size=80))
def test_any_content_of_mount_table_fails_run(tmp_path, content):
    (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
    (tmp_path / INFO[1:]).write_bytes(content)
    assert run_until_error(disk_space, Host(str(tmp_path), system=Disks(str(tmp_path), {})))[1]


# --- stories


@pytest.mark.parametrize("full", [free(3), inodes(3)])
def test_full_disk_drains_without_requeue_until_space_is_free(node, full):
    story = Story(disk_space).run_check(node()).run_check(node(spaces={"/tmp": full}))
    assert (story.drained, story.requeued) == (True, False)
    story.wait(600)
    assert story.run_checks(node(spaces={"/tmp": full}), 20).drained  # the load is gone, the files are still there
    assert story.reboot().run_check(node(spaces={"/tmp": full})).drained
    assert story.run_check(node()).drained
    assert not story.run_check(node()).drained


@pytest.mark.parametrize(("low", "code"), [(free(8), "disk_space/low_space"), (inodes(8), "disk_space/low_inodes")])
def test_filling_disk_warns_and_never_drains(node, low, code):
    story = Story(disk_space).run_checks(node(spaces={"/tmp": low}), 50)
    assert (story.codes, story.drained) == ([code], False)
    assert story.run_checks(node(), 2).codes == []


def test_disk_drains_below_second_limit_and_warns_again_above_it(node):
    story = Story(disk_space).run_check(node(spaces={"/tmp": free(8)})).run_check(node(spaces={"/tmp": free(4)}))
    assert story.drained
    story.run_checks(node(spaces={"/tmp": free(7)}), 2)
    assert (story.codes, story.drained) == (["disk_space/low_space"], False)


# --- limits of one path


def limited(**limits: disk_space.Limits) -> Config:
    return Config(paths=("/", "/tmp"), limits={f"/{name}": each for name, each in limits.items()})


def test_limits_of_path_replace_general_limits(node):
    host = node(spaces={"/": free(4), "/tmp": free(4)})
    assert codes(findings(disk_space, host, limited())) == ["disk_space/no_space"] * 2
    found = findings(disk_space, host, limited(tmp=disk_space.Limits(degraded_percent=3.0, warning_percent=3.5)))
    assert [(each.code, each.subject) for each in found] == [("disk_space/no_space", "/")]


def test_path_with_limits_need_not_be_in_paths(node):
    config = Config(paths=("/",), limits={"/var": disk_space.Limits(warning_percent=70.0)})
    found = findings(disk_space, node(spaces={"/var": free(60)}), config)
    assert [(each.code, each.subject) for each in found] == [("disk_space/low_space", "/var")]


@pytest.mark.parametrize("path", ["/tmp", "/tmp/", "/"])
def test_unmounted_disk_does_not_change_limits_of_file_system_below(node, path):
    host = node(spaces={path.rstrip("/") or "/": free(9)})
    strict, lax = disk_space.Limits(degraded_percent=50.0, warning_percent=60.0), disk_space.Limits(warning_percent=5.0)
    for limits in (strict, lax):
        config = Config(paths=(path,), limits={f"{path.rstrip('/')}/not-mounted": limits})
        found = findings(disk_space, host, config)
        assert [(each.code, each.subject) for each in found] == [("disk_space/low_space", path.rstrip("/") or "/")]


def test_limits_of_directory_apply_if_mount_point_is_not_in_paths(node):
    config = Config(paths=(), limits={"/tmp/jobs": disk_space.Limits(warning_percent=70.0)})
    found = findings(disk_space, node(spaces={"/tmp": free(60)}), config)
    assert [(each.code, each.subject) for each in found] == [("disk_space/low_space", "/tmp")]


def test_limit_not_set_for_path_is_that_of_the_check(node):
    config = limited(tmp=disk_space.Limits(degraded_gib=1.0))
    found = findings(disk_space, node(spaces={"/tmp": free(4)}), config)
    assert [(each.code, each.subject) for each in found] == [("disk_space/low_space", "/tmp")]


@pytest.mark.parametrize(
    ("path", "limits", "problem_part"),
    [
        ("scratch", disk_space.Limits(), "slash"),
        ("/scratch", disk_space.Limits(degraded_percent=20.0), "warning_percent"),
        ("/scratch", disk_space.Limits(warning_percent=1.0), "degraded_percent"),
        ("/scratch", disk_space.Limits(degraded_gib=0.0), "degraded_gib"),
    ],
)
def test_validate_rejects_contradicting_limits_and_names_path(path, limits, problem_part):
    problem = validate(Config(limits={path: limits})) or ""
    assert problem_part in problem
    assert path in problem


def test_limits_are_read_from_settings():
    table = {"limits": {"/scratch": {"degraded_percent": 3, "degraded_gib": 500}}}
    assert load(Config, table, "checks.disk_space").limits == {"/scratch": disk_space.Limits(3.0, 500.0)}
    with pytest.raises(ConvertError, match="degraded_percnt"):
        load(Config, {"limits": {"/scratch": {"degraded_percnt": 3}}}, "checks.disk_space")
