"""disk_space: local disks that are nearly full."""

from __future__ import annotations

import errno

import pytest
from fakes import codes, findings, observed, run_check, until_it_fails
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import captured, write

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
        self.asked: list[str] = []

    def statvfs(self, path: str) -> FileSystem:
        self.asked.append(path)
        space = self.spaces[path]
        if isinstance(space, OSError):
            raise space
        return space


@pytest.fixture
def node(tmp_path):
    """Return a function that creates a host with these mounts: node(ROOT, {"/": FileSystem(...)})."""

    def make(lines=ROOT + TMP + VAR, spaces=None):
        write(tmp_path, {INFO: lines})
        given = {"/": ROOMY, "/tmp": ROOMY, "/var": ROOMY, **(spaces or {})}
        return Host(str(tmp_path), system=Disks(str(tmp_path), given))

    return make


def free(percent: float) -> FileSystem:
    return ROOMY._replace(available_bytes=int(percent * GIB))


def inodes(percent: float) -> FileSystem:
    return ROOMY._replace(inodes_available=int(percent * 10_000))


def asked(host: Host) -> list[str]:
    return host._system.asked  # type: ignore[attr-defined,no-any-return]


def healthy(tmp_path):
    write(tmp_path, {INFO: ROOT + TMP + VAR})
    return Host(str(tmp_path), system=Disks(str(tmp_path), {"/": ROOMY, "/tmp": ROOMY, "/var": ROOMY})), Config()


def test_disks_with_room_give_their_shares_and_no_finding(node):
    given = run_check(disk_space, node())
    assert [item for item in given if isinstance(item, Finding)] == []
    assert [(o.value, o.labels) for o in observed(given, "disk_space_available_ratio")] == [
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
def test_what_is_nearly_full_is_degraded_and_what_fills_up_warns(node, space, code, severity):
    (finding,) = findings(disk_space, node(spaces={"/tmp": space}))
    assert (finding.code, finding.severity, finding.subject, finding.clears) == (code, severity, "/tmp", Clears.PASS)


def test_ten_percent_is_enough_and_the_message_says_how_much_there_is(node):
    assert findings(disk_space, node(spaces={"/": free(10), "/tmp": inodes(10)})) == []
    (finding,) = findings(disk_space, node(spaces={"/": free(3)}))
    assert finding.message == "3.0 % of / is free: 3.0 of 100.0 GiB"


@pytest.mark.parametrize(
    ("gib", "code"),
    [(19.999, "disk_space/no_space"), (20, "disk_space/low_space"), (900, "disk_space/low_space")],
)
def test_a_large_disk_with_little_of_its_space_left_is_short_of_it_only_below_20_gib(node, gib, code):
    large = FileSystem(30_000 * GIB, int(gib * GIB), 1_000_000, 900_000)
    (finding,) = findings(disk_space, node(spaces={"/tmp": large}))
    assert finding.code == code


def test_a_small_disk_is_short_of_space_only_below_5_percent(node):
    small = FileSystem(40 * GIB, 3 * GIB, 1_000_000, 900_000)
    assert codes(findings(disk_space, node(spaces={"/tmp": small}))) == ["disk_space/low_space"]


def test_how_many_gib_are_few_is_a_setting_and_inodes_know_no_gib(node):
    large = FileSystem(30_000 * GIB, 900 * GIB, 1_000_000, 40_000)
    given = findings(disk_space, node(spaces={"/tmp": large}), Config(degraded_gib=1000.0))
    assert codes(given) == ["disk_space/no_space", "disk_space/no_inodes"]
    assert codes(findings(disk_space, node(spaces={"/tmp": large}))) == ["disk_space/low_space", "disk_space/no_inodes"]


def test_space_and_inodes_are_judged_each(node):
    both = FileSystem(100 * GIB, GIB, 1000, 80)
    assert codes(findings(disk_space, node(spaces={"/": both}))) == ["disk_space/no_space", "disk_space/low_inodes"]


def test_a_path_that_is_no_mount_of_its_own_is_judged_once_with_the_one_above(node):
    host = node(ROOT)
    assert len(list(observed(run_check(disk_space, host), "disk_space_available_ratio"))) == 1
    assert asked(host) == ["/"]


def test_one_file_system_at_two_mount_points_is_judged_once(node):
    host = node(ROOT + "24 21 8:1 /tmp /tmp rw - ext4 /dev/sda1 rw\n", {"/": free(1)})
    assert [f.subject for f in findings(disk_space, host)] == ["/"]


@pytest.mark.parametrize(
    "fstype", ["nfs4", "nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.sshfs", "autofs", "9p"]
)
def test_a_network_file_system_is_never_asked(node, fstype):
    host = node(ROOT + f"24 21 0:50 / /tmp rw - {fstype} server:/tmp rw\n")
    run_check(disk_space, host)
    assert asked(host) == ["/"]


def test_a_network_mount_over_a_local_one_is_not_asked(node):
    host = node(ROOT + TMP + "24 22 0:50 / /tmp rw - nfs4 server:/tmp rw\n")
    run_check(disk_space, host)
    assert asked(host) == ["/"]


def test_a_local_disk_below_a_network_mount_is_not_asked(node):
    nfs = "24 21 0:50 / /data rw - nfs4 server:/ rw\n25 24 8:7 / /data/scratch rw - xfs /dev/sdx rw\n"
    host = node(ROOT + nfs)
    run_check(disk_space, host, Config(paths=("/", "/data/scratch")))
    assert asked(host) == ["/"]


def test_a_link_is_followed_to_where_it_really_is(node, tmp_path):
    scratch = "24 21 8:9 / /scratch rw - xfs /dev/sdd1 rw\n"
    (tmp_path / "local").symlink_to("scratch")
    (tmp_path / "tmp").symlink_to("local/./tmp")
    host = node(ROOT + scratch, {"/scratch": free(2)})
    assert [f.subject for f in findings(disk_space, host)] == ["/scratch"]


def test_a_link_to_a_network_mount_is_not_asked(node, tmp_path):
    (tmp_path / "tmp").symlink_to("/data/tmp")
    (tmp_path / "data/tmp").mkdir(parents=True)
    host = node(ROOT + "24 21 0:50 / /data rw - nfs4 server:/tmp rw\n")
    run_check(disk_space, host)
    assert asked(host) == ["/"]


def test_links_in_a_circle_end(node, tmp_path):
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
def test_read_only_media_are_full_and_well(node, line):
    host = node(ROOT + line, {"/tmp": free(0)})
    assert findings(disk_space, host) == []


def test_a_live_systems_overlay_is_judged_by_its_writable_layer(node):
    host = node(
        "1 0 0:30 / / rw - overlay LiveOS_rootfs rw,lowerdir=/sysroot,upperdir=/run/overlayfs\n", {"/": free(1)}
    )
    assert codes(findings(disk_space, host)) == ["disk_space/no_space"]


def test_file_systems_without_a_limit_or_without_inodes_are_not_judged_by_it(node):
    host = node(spaces={"/var": ROOMY._replace(inodes=0, inodes_available=0), "/tmp": FileSystem(0, 0, 0, 0)})
    assert findings(disk_space, host) == []


def test_a_file_system_that_does_not_answer_is_unknown_and_hides_no_other(node):
    host = node(spaces={"/": OSError(errno.EIO, "Input/output error"), "/var": free(1)})
    given, error = until_it_fails(disk_space, host)
    assert error == "/: Input/output error"
    assert codes([item for item in given if isinstance(item, Finding)]) == ["disk_space/no_space"]


@pytest.mark.parametrize("text", ["", "N/A", "garbage\n" + ROOT])
def test_a_garbled_table_is_unknown(node, text):
    assert INFO in until_it_fails(disk_space, node(text))[1]


def test_paths_are_a_setting(node):
    host = node(spaces={"/tmp": free(1)})
    assert findings(disk_space, host, Config(paths=("/var",))) == []
    assert asked(host) == ["/var"]
    assert run_check(disk_space, node(), Config(paths=())) == []


def test_a_real_gpu_node_is_read(tmp_path):
    write(tmp_path, {INFO: captured("mountinfo_gpu_node.txt")})
    host = Host(str(tmp_path), system=Disks(str(tmp_path), {"/": ROOMY}))
    assert findings(disk_space, host) == []
    assert asked(host) == ["/"]


def test_this_machine_gives_nothing_above_info():
    assert findings(disk_space, Host()) == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config(paths=("tmp",)), "must begin with a slash"),
        (Config(degraded_percent=20.0), "must not be above"),
        (Config(warning_percent=101.0), "between 0 and 100"),
        (Config(degraded_percent=-1.0), "between 0 and 100"),
        (Config(degraded_gib=0.0), "degraded_gib must be above 0, got 0"),
        (Config(degraded_gib=float("nan")), "degraded_gib must be above 0"),
    ],
)
def test_nonsense_is_refused(config, says):
    assert says in (validate(config) or "")
    assert validate(Config()) is None


@given(size=st.integers(0, 2**63), share=st.floats(0, 1))
def test_every_size_and_share_is_judged(size, share):
    given = list(disk_space._judge("space", "/", int(size * share), size, Config()))
    degraded = [item for item in given if isinstance(item, Finding) and item.severity is Severity.DEGRADED]
    free = int(size * share)
    assert bool(degraded) == (size > 0 and 100.0 * free / size < 5 and free < 20 * GIB)


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(content=st.binary(max_size=80))
def test_no_content_of_the_table_passes_silently(tmp_path, content):
    (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
    (tmp_path / INFO[1:]).write_bytes(content)
    assert until_it_fails(disk_space, Host(str(tmp_path), system=Disks(str(tmp_path), {})))[1]


# --- stories


@pytest.mark.parametrize("full", [free(3), inodes(3)])
def test_a_full_disk_drains_without_a_requeue_until_there_is_room_again(node, full):
    story = Story(disk_space).look(node()).look(node(spaces={"/tmp": full}))
    assert (story.drained, story.requeued) == (True, False)
    story.wait(600)
    assert story.looks(node(spaces={"/tmp": full}), 20).drained  # the load is gone, the files are still there
    assert story.reboot().look(node(spaces={"/tmp": full})).drained
    assert story.look(node()).drained
    assert not story.look(node()).drained


@pytest.mark.parametrize(("low", "code"), [(free(8), "disk_space/low_space"), (inodes(8), "disk_space/low_inodes")])
def test_a_disk_that_fills_up_warns_and_never_drains(node, low, code):
    story = Story(disk_space).looks(node(spaces={"/tmp": low}), 50)
    assert (story.codes, story.drained) == ([code], False)
    assert story.looks(node(), 2).codes == []


def test_a_disk_that_fills_up_further_is_drained_and_afterwards_warns_again(node):
    story = Story(disk_space).look(node(spaces={"/tmp": free(8)})).look(node(spaces={"/tmp": free(4)}))
    assert story.drained
    story.looks(node(spaces={"/tmp": free(7)}), 2)
    assert (story.codes, story.drained) == (["disk_space/low_space"], False)


# --- limits of one path


def limited(**limits: disk_space.Limits) -> Config:
    return Config(paths=("/", "/tmp"), limits={f"/{name}": each for name, each in limits.items()})


def test_a_path_with_limits_of_its_own_is_judged_by_these_alone(node):
    host = node(spaces={"/": free(4), "/tmp": free(4)})
    assert codes(findings(disk_space, host, limited())) == ["disk_space/no_space"] * 2
    found = findings(disk_space, host, limited(tmp=disk_space.Limits(degraded_percent=3.0, warning_percent=3.5)))
    assert [(each.code, each.subject) for each in found] == [("disk_space/no_space", "/")]


def test_a_path_with_limits_need_not_be_among_the_paths(node):
    config = Config(paths=("/",), limits={"/var": disk_space.Limits(warning_percent=70.0)})
    found = findings(disk_space, node(spaces={"/var": free(60)}), config)
    assert [(each.code, each.subject) for each in found] == [("disk_space/low_space", "/var")]


@pytest.mark.parametrize("path", ["/tmp", "/tmp/", "/"])
def test_a_disk_that_is_not_mounted_leaves_the_limits_of_the_file_system_below(node, path):
    host = node(spaces={path.rstrip("/") or "/": free(9)})
    strict, lax = disk_space.Limits(degraded_percent=50.0, warning_percent=60.0), disk_space.Limits(warning_percent=5.0)
    for limits in (strict, lax):
        config = Config(paths=(path,), limits={f"{path.rstrip('/')}/not-mounted": limits})
        found = findings(disk_space, host, config)
        assert [(each.code, each.subject) for each in found] == [("disk_space/low_space", path.rstrip("/") or "/")]


def test_limits_of_a_directory_count_if_its_mount_point_is_not_among_the_paths(node):
    config = Config(paths=(), limits={"/tmp/jobs": disk_space.Limits(warning_percent=70.0)})
    found = findings(disk_space, node(spaces={"/tmp": free(60)}), config)
    assert [(each.code, each.subject) for each in found] == [("disk_space/low_space", "/tmp")]


def test_a_limit_that_a_path_does_not_set_is_the_checks(node):
    config = limited(tmp=disk_space.Limits(degraded_gib=1.0))
    found = findings(disk_space, node(spaces={"/tmp": free(4)}), config)
    assert [(each.code, each.subject) for each in found] == [("disk_space/low_space", "/tmp")]


@pytest.mark.parametrize(
    ("path", "limits", "words"),
    [
        ("scratch", disk_space.Limits(), "slash"),
        ("/scratch", disk_space.Limits(degraded_percent=20.0), "warning_percent"),
        ("/scratch", disk_space.Limits(warning_percent=1.0), "degraded_percent"),
        ("/scratch", disk_space.Limits(degraded_gib=0.0), "degraded_gib"),
    ],
)
def test_limits_that_contradict_are_refused_with_their_path(path, limits, words):
    problem = validate(Config(limits={path: limits})) or ""
    assert words in problem
    assert path in problem


def test_limits_are_read_from_the_settings_file():
    table = {"limits": {"/scratch": {"degraded_percent": 3, "degraded_gib": 500}}}
    assert load(Config, table, "checks.disk_space").limits == {"/scratch": disk_space.Limits(3.0, 500.0)}
    with pytest.raises(ConvertError, match="degraded_percnt"):
        load(Config, {"limits": {"/scratch": {"degraded_percnt": 3}}}, "checks.disk_space")
