"""block_device: missing or dead disks, file systems that the kernel stopped, degraded RAIDs."""

from __future__ import annotations

import errno
from functools import partial

import pytest
from fakes import codes, findings, observations_named, run_check, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_lines import event_of, findings_of
from story import Story
from trees import captured_text, write

from healthd.agent.conditions import endings
from healthd.agent.kernel_log.coalesce import coalesce_events
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.checks import block_device
from healthd.checks.block_device import EXPLAIN, Config, validate
from healthd.common.model import Clears, Disk, Entry, Finding, Inventory, LocalMount, PciDevice, Severity
from healthd.host.host import Host
from healthd.host.system import FileStat, Tree

INFO = "/proc/self/mountinfo"
NVME = "/sys/class/nvme"
DEGRADED = "/sys/block/md0/md/degraded"
ROOT = "21 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro\n"
LOCAL = "22 21 9:0 / /local rw,relatime - ext4 /dev/md0 rw\n"
SCRATCH = "23 21 259:0 / /scratch rw,relatime - xfs /dev/nvme1n1 rw,attr2,inode64\n"
MOUNTS = ROOT + LOCAL + SCRATCH
BASELINE = Config(expected=("S64GNE0T100001", "S64GNE0T100002", "naa.5002538e00000001"))

ABSENT_IS_FINE = {
    "/proc/self/mountinfo": "a captured tree without it",
    DEGRADED: "striped arrays and single disks have nothing to lose",
    "/scratch": "a mount point that lies below another mount cannot be seen",
}


def make(tmp_path, changed=None, mounts=MOUNTS):
    """Create a node with two NVMe disks, a SATA disk and a RAID. `changed`: path -> text, or None to delete the
    file."""
    files = {INFO: mounts, DEGRADED: "0\n", "/sys/block/sda/device/wwid": "naa.5002538e00000001\n"}
    files |= {"/sys/block/loop0/size": "0\n", "/sys/block/md1/size": "0\n", "/scratch/data": ""}
    for n, pci in enumerate(("0000:5e:00.0", "0000:5f:00.0")):
        texts = {"state": "live", "serial": f"S64GNE0T10000{n + 1}    ", "transport": "pcie", "address": pci}
        files |= {f"{NVME}/nvme{n}/{name}": f"{text}\n" for name, text in texts.items()}
    host = write(tmp_path, files | {path: text for path, text in (changed or {}).items() if text is not None})
    for path, text in (changed or {}).items():
        if text is None:
            (tmp_path / path[1:]).unlink()
    return host


class ShutDownTree(Tree):
    """A tree on which `stat` of one path fails like on an XFS file system that was shut down."""

    def __init__(self, root: str, point: str, number: int = errno.EIO) -> None:
        super().__init__(root)
        self.point = point
        self.number = number
        self.stat_paths: list[str] = []

    def stat(self, path: str) -> FileStat:
        self.stat_paths.append(path)
        if path == self.point:
            raise OSError(self.number, "Input/output error", path)
        return super().stat(path)


def healthy(tmp_path):
    return make(tmp_path), BASELINE


def state(text, name="nvme1"):
    return {f"{NVME}/{name}/state": f"{text}\n"}


def test_block_device_reports_nothing_for_healthy_disks(node):
    results = run_check(block_device, node(), BASELINE)
    assert [item for item in results if isinstance(item, Finding)] == []
    assert [(o.value, o.labels) for o in observations_named(results, "md_missing_disks")] == [(0, (("array", "md0"),))]


def test_block_device_reports_nothing_without_local_disks(tmp_path):
    assert run_check(block_device, write(tmp_path, {INFO: "1 0 0:2 / / rw - tmpfs none rw\n"})) == []


def test_block_device_reports_nothing_on_this_machine():
    assert findings(block_device, Host()) == []


@pytest.mark.parametrize(("path", "name"), [(f"{NVME}/nvme1/serial", 1), ("/sys/block/sda/device/wwid", 2)])
def test_missing_disk_of_baseline_is_degraded(node, path, name):
    (finding,) = findings(block_device, node({path: None}), BASELINE)
    assert (finding.code, finding.severity, finding.clears) == ("block_device/missing", Severity.DEGRADED, Clears.PASS)
    assert (finding.subject, finding.expects) == (BASELINE.expected[name], "expected")


def test_baseline_notes_name_and_model_of_each_disk(node):
    models = {f"{NVME}/nvme0/model": "SAMSUNG MZQL23T8HCLS-00A07\n", "/sys/block/sda/device/model": "MTFDDAK960TGA\n"}
    entries = [item for item in block_device.baseline(node(models), Config()) if isinstance(item, Entry)]
    assert [(entry.key, entry.note) for entry in entries] == [
        ("S64GNE0T100001", "nvme0 SAMSUNG MZQL23T8HCLS-00A07"),
        ("S64GNE0T100002", "nvme1"),
        ("naa.5002538e00000001", "sda MTFDDAK960TGA"),
    ]


def test_missing_disk_without_expectation_is_ignored(node):
    assert findings(block_device, node({f"{NVME}/nvme1/serial": None})) == []


@pytest.mark.parametrize("path", ["/sys/block/nvme1n1/wwid", "/sys/block/sda/device/wwid", "/sys/block/vda/serial"])
def test_disk_is_identified_by_wwid(node, path):
    assert (
        findings(block_device, node({path: "eui.0025384b01000001\n"}), Config(expected=("eui.0025384b01000001",))) == []
    )


def test_loop_and_dm_serials_do_not_count_as_disks(node):
    host = node({"/sys/block/loop0/serial": "x\n", "/sys/block/dm-0/serial": "x\n"})
    assert codes(findings(block_device, host, Config(expected=("x",)))) == ["block_device/missing"]


@pytest.mark.parametrize(("text", "confirm"), [("dead", 0.0), ("resetting", 60.0), ("connecting", 60.0), ("new", 60.0)])
def test_nvme_controller_not_live_is_degraded_until_reboot(node, text, confirm):
    (finding,) = findings(block_device, node(state(text)))
    assert (finding.code, finding.severity, finding.clears) == ("block_device/nvme", Severity.DEGRADED, Clears.REBOOT)
    assert (finding.subject, finding.confirm_seconds) == ("0000:5f:00.0", confirm)
    assert finding.message == f"the NVMe controller nvme1 is {text}"


def test_nvme_controller_over_network_only_warns(node):
    host = node({**state("connecting"), f"{NVME}/nvme1/transport": "tcp", f"{NVME}/nvme1/address": "traddr=10.0.0.1"})
    (finding,) = findings(block_device, host)
    assert (finding.code, finding.severity, finding.clears) == ("block_device/nvme_path", Severity.WARNING, Clears.PASS)
    assert (finding.subject, finding.message) == (
        "nvme1",
        "the NVMe controller nvme1 is connecting (tcp, traddr=10.0.0.1)",
    )


@pytest.mark.parametrize("text", ["", "N/A", "Live", "unknown state", None])
def test_unrecognised_nvme_state_fails_run_and_hides_no_finding(node, text):
    host = node({f"{NVME}/nvme0/state": text, **state("dead")})
    results, error = run_until_error(block_device, host)
    assert f"{NVME}/nvme0/state: not a state" in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["block_device/nvme"]


@pytest.mark.parametrize(
    "line",
    [
        LOCAL.replace("/dev/md0 rw", "/dev/md0 ro,errors=remount-ro"),  # Linux before 6.15
        LOCAL.replace("/dev/md0 rw", "/dev/md0 rw,errors=remount-ro,emergency_ro"),  # seen on Linux 6.18
        LOCAL.replace("/dev/md0 rw", "/dev/md0 rw,shutdown"),  # seen on Linux 6.18
        LOCAL.replace("ext4 /dev/md0 rw", "btrfs /dev/md0 ro,space_cache=v2"),
    ],
)
def test_stopped_file_system_is_degraded_and_stopped_root_critical(node, line):
    (finding,) = findings(block_device, node(mounts=ROOT + line))
    assert (finding.code, finding.severity, finding.subject) == ("block_device/stopped", Severity.DEGRADED, "/local")
    (finding,) = findings(block_device, node(mounts=line.replace("/local", "/")))
    assert (finding.code, finding.severity) == ("block_device/root_stopped", Severity.CRITICAL)
    assert finding.clears is Clears.REBOOT


@pytest.mark.parametrize(
    "line",
    [
        "24 21 8:5 / /ro ro,relatime - ext4 /dev/sdb1 ro\n",  # mounted read-only
        "24 21 8:5 / /ro ro,relatime - ext4 /dev/sdb1 rw\n",  # a read-only bind mount
        "24 21 7:0 / /snap/core rw - squashfs /dev/loop0 ro\n",
        "24 21 11:0 / /cd rw - iso9660 /dev/sr0 ro\n",
        "24 21 0:44 / /data rw - nfs4 server:/data ro\n",
        "24 21 0:45 / /sealed rw - tmpfs none ro\n",
    ],
)
def test_intended_read_only_mount_is_ignored(node, line):
    assert findings(block_device, node(mounts=ROOT + line)) == []


def test_stopped_file_system_is_reported_once_and_as_root_if_root(node):
    bind = "20 21 8:1 /srv /srv rw - ext4 /dev/sda1 rw,emergency_ro\n"
    found = findings(block_device, node(mounts=bind + ROOT.replace("remount-ro", "remount-ro,emergency_ro") + bind))
    assert [(finding.code, finding.subject) for finding in found] == [("block_device/root_stopped", "/")]


@pytest.mark.parametrize(("point", "code"), [("/scratch", "block_device/stopped"), ("/", "block_device/root_stopped")])
def test_eio_from_xfs_means_shut_down(node, point, code):
    root = node(mounts=SCRATCH.replace("/scratch", point)).root
    (finding,) = findings(block_device, Host(root, system=ShutDownTree(root, point)))
    assert finding.code == code
    assert "was shut down" in finding.message


def test_stat_error_of_xfs_other_than_eio_fails_run(node):
    root = node().root
    assert run_until_error(block_device, Host(root, system=ShutDownTree(root, "/scratch", errno.EACCES)))[1]


@pytest.mark.parametrize("network_mount", ["/scratch", "/"])
def test_xfs_below_network_mount_is_not_queried(node, network_mount):
    deep = SCRATCH.replace("/scratch", "/data/scratch") if network_mount == "/" else SCRATCH
    nfs = "24 23 0:50 / /scratch rw - nfs4 server:/ rw\n24 23 0:50 / /data rw - nfs4 server:/ rw\n"
    root = node(mounts=ROOT + deep + nfs).root
    system = ShutDownTree(root, "/scratch")
    assert findings(block_device, Host(root, system=system)) == []
    assert system.stat_paths == []


@pytest.mark.parametrize("text", ["1", "2"])
def test_raid_with_missing_disks_warns(node, text):
    (finding,) = findings(block_device, node({DEGRADED: f"{text}\n"}))
    assert (finding.code, finding.severity, finding.clears) == (
        "block_device/raid_degraded",
        Severity.WARNING,
        Clears.PASS,
    )
    assert (finding.subject, finding.message) == ("md0", f"the RAID md0 runs without {text} of its disks")


@pytest.mark.parametrize("text", ["", "N/A", "-1", str(2**64)])
def test_garbled_raid_count_fails_run(node, text):
    assert "not a number of disks" in run_until_error(block_device, node({DEGRADED: text}))[1]


def test_unreadable_mount_table_hides_no_other_finding(node):
    results, error = run_until_error(block_device, node({**state("dead"), DEGRADED: "1"}, mounts=""))
    assert error == f"{INFO} is empty"
    found = codes([item for item in results if isinstance(item, Finding)])
    assert found == ["block_device/nvme", "block_device/raid_degraded"]


def test_mounts_of_real_gpu_node_give_no_finding(tmp_path):
    assert findings(block_device, write(tmp_path, {INFO: captured_text("mountinfo_gpu_node.txt")})) == []


def test_validate_rejects_empty_disk_name():
    assert "must not be empty" in (validate(Config(expected=("",))) or "")
    assert validate(BASELINE) is None


@settings(max_examples=80, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(
    path=st.sampled_from([f"{NVME}/nvme0/state", f"{NVME}/nvme0/serial", DEGRADED, "/sys/block/sda/device/wwid"]),
    content=st.one_of(st.binary(max_size=20), st.text(max_size=20).map(str.encode)),
)
def test_any_file_content_gives_finding_or_failure(node, path, content):
    results, error = run_until_error(block_device, node({path: content}), BASELINE)
    assert error or any(isinstance(item, Finding) for item in results) or content.strip() in (b"0", b"00", b"live")


# --- stories


def test_missing_disk_drains_until_disk_is_back(node):
    story = Story(block_device, BASELINE).run_check(node({f"{NVME}/nvme1/serial": None})).run_check(node(), minutes=0.5)
    assert (story.codes, story.drained) == ([], False), "it was reset"
    without_disk = node({f"{NVME}/nvme1/serial": None})
    story.run_checks(without_disk, 2, minutes=1)
    assert (story.codes, story.drained, story.requeued) == (["block_device/missing"], True, False)
    assert story.wait(600).run_checks(without_disk, 20).drained
    assert story.reboot().run_check(without_disk).drained
    back = node()
    assert story.run_check(back).drained
    assert not story.run_check(back).drained


def test_missing_disk_guessed_by_profile_never_drains(node):
    story = Story(block_device, Config(expected=("X",), guessed=("expected",))).run_checks(node(), 20)
    assert (story.codes, story.drained) == (["block_device/missing"], False)


def test_dead_controller_drains_until_reboot_even_if_it_leaves_sysfs(node):
    story = Story(block_device).run_check(node()).run_check(node(state("dead")))
    assert (story.codes, story.drained, story.requeued) == (["block_device/nvme"], True, False)
    assert story.wait(600).run_checks(node(state("live")), 20).drained  # missing or back: neither proves a repair
    assert not story.reboot().run_check(node()).drained


def test_controller_dead_after_reboot_needs_operator(node):
    story = Story(block_device).run_check(node(state("dead"))).reboot().run_check(node(state("dead")))
    assert story.drained
    node(state("live"))
    assert story.reboot().run_checks(node(), 5).drained
    assert not story.repaired("block_device/nvme").run_checks(node(), 2).drained


def test_controller_reset_within_a_minute_does_not_drain(node):
    story = Story(block_device).run_check(node(state("resetting"))).run_check(node(state("live")), 0.9)
    assert (story.codes, story.drained) == ([], False)
    story.run_check(node(state("resetting"))).run_check(node(state("resetting")), 1)
    assert story.drained


def test_lost_network_storage_path_warns_and_never_drains(node):
    story = Story(block_device).run_checks(node({**state("connecting"), f"{NVME}/nvme1/transport": "rdma"}), 20)
    assert (story.codes, story.drained) == (["block_device/nvme_path"], False)
    assert story.run_checks(node(state("live")), 2).codes == []


@pytest.mark.parametrize(
    ("line", "code", "requeued"),
    [
        (LOCAL.replace("md0 rw", "md0 rw,emergency_ro"), "block_device/stopped", False),
        (ROOT.replace("remount-ro", "remount-ro,emergency_ro"), "block_device/root_stopped", True),
    ],
)
def test_stopped_file_system_drains_until_reboot(node, line, code, requeued):
    story = Story(block_device).run_check(node()).run_check(node(mounts=line))
    assert (story.codes, story.drained, story.requeued) == ([code], True, requeued)
    assert story.wait(600).run_checks(node(mounts=ROOT), 20).drained  # unmounted is not repaired
    assert not story.reboot().run_checks(node(mounts=MOUNTS), 2).drained


def test_file_system_stopped_again_after_reboot_needs_operator(node):
    stopped = LOCAL.replace("md0 rw", "md0 rw,emergency_ro")
    story = Story(block_device).run_check(node(mounts=stopped)).reboot().run_check(node(mounts=stopped))
    assert story.reboot().run_checks(node(mounts=MOUNTS), 5).drained
    assert not story.repaired("block_device/stopped").run_checks(node(mounts=MOUNTS), 2).drained


def test_degraded_raid_warns_until_rebuilt_and_never_drains(node):
    story = Story(block_device).run_checks(node({DEGRADED: "1\n"}), 20)
    assert (story.codes, story.drained) == (["block_device/raid_degraded"], False)
    assert story.run_checks(node({DEGRADED: "0\n"}), 2).codes == []


# --- the kernel log

NODE_INVENTORY = Inventory(
    devices=(PciDevice("0000:5e:00.0", "0x144d", "0xa824", "0x010802", "nvme"),),
    disks=(
        Disk("nvme0", "0000:5e:00.0", ("S64GNE0T100001",)),
        Disk("nvme1", "0000:5f:00.0", ("S64GNE0T100002",)),
        Disk("nvme9"),
        Disk("nvme0n1", "0000:5e:00.0"),
        Disk("nvme1n1", "0000:5f:00.0"),
        Disk("sda", "0000:00:17.0", ("naa.5002538e00000001",)),
        Disk("sdb", "0000:00:17.0"),
        Disk("sdz"),
    ),
    mounts=(
        LocalMount("/", "ext4", "dm-0", ("sda",)),
        LocalMount("/scratch", "xfs", "nvme1n1", ("nvme1n1",)),
        LocalMount("/san", "xfs", "sdz1", ("sdz",)),
        LocalMount("/local", "ext4", "md0", ("nvme7n1", "nvme8n1")),
    ),
)


findings_from = partial(findings_of, block_device, node=NODE_INVENTORY, config=BASELINE)


def summaries(*lines, **kwargs):
    return [
        (f.code.partition("/")[2], f.subject, f.severity.name, f.clears.name) for f in findings_from(*lines, **kwargs)
    ]


def feed_lines(story, *lines):
    return story.log_lines(*lines, node=NODE_INVENTORY)


IO_ERROR = "I/O error, dev {}, sector 32545872 op 0x1:(WRITE) flags 0x80700 phys_seg 1 prio class 2"
RESET_FAILED = "nvme nvme1: Disabling device after reset failure: -19"


@pytest.mark.parametrize(
    ("line", "code", "part", "severity"),
    [
        (RESET_FAILED, "nvme", "0000:5f:00.0", "DEGRADED"),
        ("nvme nvme1: Removing after probe failure status: -19", "nvme", "0000:5f:00.0", "DEGRADED"),
        (
            "nvme nvme1: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
            "nvme",
            "0000:5f:00.0",
            "DEGRADED",
        ),
        ("nvme 0000:5f:00.0: Removing after probe failure", "nvme", "0000:5f:00.0", "DEGRADED"),
        ("nvme nvme77: Removing after probe failure status: -19", "nvme", "nvme77", "DEGRADED"),
        ("nvme nvme9: Removing after probe failure status: -19", "nvme_path", "nvme9", "WARNING"),
        ("nvme nvme9: Reconnecting in 10 seconds...", "nvme_path", "nvme9", "WARNING"),
        ("nvme nvme1: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10", "command_error", "nvme1", "WARNING"),
        ("nvme nvme1: I/O 39 QID 3 timeout, aborting", "command_error", "nvme1", "WARNING"),
        ("nvme nvme1: frozen state error detected, reset controller", "command_error", "nvme1", "WARNING"),
        (IO_ERROR.format("nvme1n1"), "io_error", "nvme1n1", "DEGRADED"),
        (IO_ERROR.format("nvme1c0n1"), "io_error", "nvme1n1", "DEGRADED"),
        (IO_ERROR.format("nvme0n1"), "io_error", "nvme0n1", "DEGRADED"),  # named in the settings
        (IO_ERROR.format("sda"), "io_error", "sda", "DEGRADED"),
        (IO_ERROR.format("dm-0"), "io_error", "dm-0", "DEGRADED"),
        (IO_ERROR.format("dm-17"), "io_error", "dm-17", "WARNING"),
        (IO_ERROR.format("sdb"), "io_error", "sdb", "WARNING"),
        (IO_ERROR.format("sda").replace("0x1:(WRITE)", "0x3:(DISCARD)"), "io_error", "sda", "WARNING"),
        ("Buffer I/O error on dev sda3, logical block 5, lost async page write", "io_error", "sda", "DEGRADED"),
        ("critical medium error, dev sda, sector 5 op 0x0:(READ) flags 0x0", "medium_error", "sda", "DEGRADED"),
        ("sd 0:0:0:0: [sda] tag#2 Sense Key : Medium Error [current] ", "medium_error", "sda", "DEGRADED"),
        (
            "sd 0:0:0:0: [sda] tag#2 FAILED Result: hostbyte=DID_OK driverbyte=DRIVER_OK",
            "command_error",
            "sda",
            "WARNING",
        ),
        ("critical target error, dev sda, sector 5 op 0x1:(WRITE) flags 0x0", "command_error", "sda", "WARNING"),
        ("sd 2:0:0:0: rejecting I/O to offline device", "command_error", "2:0:0:0", "WARNING"),
        ("kworker/u203:1: attempt to access beyond end of device", "command_error", "a disk", "WARNING"),
        ("ata2.00: exception Emask 0x0 SAct 0x5c50001f SErr 0x0 action 0x0", "command_error", "ata2.00", "WARNING"),
        ("mpt3sas_cm0: fault_state(0x2100)!", "adapter", "mpt3sas_cm0", "WARNING"),
        ("device-mapper: multipath: 253:3: Failing path 8:16.", "path", "8:16", "WARNING"),
        ("md/raid1:md0: Disk failure on sdb1, disabling device.", "raid_disk", "md0", "WARNING"),
        ("md/raid:md0: Cannot continue operation (2/4 failed).", "raid_failed", "md0", "DEGRADED"),
        ("md/raid:md9: Cannot continue operation (2/4 failed).", "raid_failed", "md9", "WARNING"),
        ("EXT4-fs (dm-0): Remounting filesystem read-only", "root_stopped", "/", "CRITICAL"),
        ("Aborting journal on device dm-0-8.", "root_stopped", "/", "CRITICAL"),
        ("XFS (nvme1n1): Filesystem has been shut down due to log error (0x2).", "stopped", "/scratch", "DEGRADED"),
    ],
)
def test_severity_of_line_depends_on_content_of_disk(line, code, part, severity):
    clears = "WINDOW" if severity == "WARNING" else "REBOOT"
    (finding,) = findings_from(line)
    assert summaries(line) == [(code, part, severity, clears)]
    assert finding.window_seconds == (86400 if severity == "WARNING" else 0)
    assert finding.code in EXPLAIN


@pytest.mark.parametrize(
    "line",
    [
        IO_ERROR.format("loop3"),
        IO_ERROR.format("sr0"),
        "nvme nvme1: Abort status: 0x0",
        "ata1: hard resetting link",
        "sd 0:0:0:0: [sda] tag#2 Add. Sense: Unrecovered read error",
        "mpt2sas_cm0: log_info(0x31080000): originator(PL), code(0x08), sub_code(0x0000)",
        "EXT4-fs (dm-17): Remounting filesystem read-only",
        "nvme nvme9: Successfully reconnected (1 attempt)",
    ],
)
def test_line_without_node_disk_or_follow_up_line_gives_nothing(line):
    assert [finding for finding in findings_from(line) if not finding.recovered] == []


def test_lines_of_disk_and_controller_give_one_finding_of_worst_severity():
    lines = ["nvme nvme1: I/O 39 QID 3 timeout, aborting", IO_ERROR.format("nvme1n1"), RESET_FAILED]
    (finding,) = findings_from(*lines)
    assert (finding.code, finding.subject, finding.events) == ("block_device/nvme", "0000:5f:00.0", (1, 2, 3))
    assert finding.message == "the NVMe controller nvme1 is dead (3 lines)"
    assert summaries(*lines[:2]) == [("io_error", "nvme1n1", "DEGRADED", "REBOOT")]
    assert len(findings_from(*lines, lines[1].replace("nvme1", "nvme0"))) == 2


def test_disk_and_controller_are_matched_by_pci_address():
    # github.com/xcp-ng/xcp/issues/430: nvme0 is the controller of nvme1n1
    disks = (Disk("nvme0", "0000:04:00.0"), Disk("nvme1", "0000:05:00.0"), Disk("nvme1n1", "0000:04:00.0"))
    lines = [
        "nvme nvme0: Removing after probe failure status: -19",
        "print_req_error: I/O error, dev nvme1n1, sector 8",
    ]
    events, _, _ = coalesce_events((), [event_of(line) for line in lines], 1)
    (finding,) = block_device.correlate(events, Inventory(disks=disks), Config())
    assert (finding.code, finding.subject, finding.events) == ("block_device/nvme", "0000:04:00.0", (1, 2))


def test_finding_message_names_mount_points_of_disk():
    (finding,) = findings_from(IO_ERROR.format("nvme1n1"))
    assert finding.message == "data on disk nvme1n1 could not be written; it contains /scratch"


def test_finding_rests_on_settings_if_only_settings_name_disk():
    assert [f.expects for f in findings_from(IO_ERROR.format("nvme0n1"))] == ["expected"]
    assert summaries(IO_ERROR.format("nvme0n1"), config=Config()) == [("io_error", "nvme0n1", "WARNING", "WINDOW")]
    assert [f.expects for f in findings_from(IO_ERROR.format("nvme1n1"))] == [""]


@pytest.mark.parametrize(("line", "shared"), [(IO_ERROR.format("sdz"), True), (IO_ERROR.format("sda"), False)])
def test_error_of_network_disk_may_have_shared_cause(line, shared):
    assert [f.shared_cause for f in findings_from(line)] == [shared]


def test_without_inventory_only_dead_controller_drains():
    lines = [IO_ERROR.format("sda"), "EXT4-fs (dm-0): Remounting filesystem read-only", RESET_FAILED]
    events, _, _ = coalesce_events((), [event_of(line) for line in lines], 1)
    found = block_device.correlate(events, Inventory(), Config())
    assert [(f.code, f.severity) for f in found] == [
        ("block_device/io_error", Severity.WARNING),
        ("block_device/nvme", Severity.DEGRADED),
    ]


@given(
    st.text(max_size=300),
    st.sampled_from(["I/O error, dev {}, sector 5", "nvme {}: Removing after probe failure", "{}"]),
)
def test_any_line_text_is_processed(text, line):
    kernel_event = make_event(RawLine(0.0, line.format(text)), "b")
    for finding in block_device.correlate([kernel_event] if kernel_event else [], NODE_INVENTORY, BASELINE):
        assert len(finding.subject) <= 80


def test_disk_errors_drain_until_reboot_and_clean_run_clears_nothing(node):
    story = feed_lines(Story(block_device).run_check(node()), IO_ERROR.format("nvme1n1"))
    assert (story.codes, story.drained, story.requeued) == (["block_device/io_error"], True, False)
    assert story.wait(3000).run_checks(node(), 20).drained
    assert not story.reboot().run_checks(node(), 2).drained


MIRRORED = Inventory(
    disks=(Disk("sda", "0000:00:17.0", ("naa.5002538e00000001",)), Disk("sdb", "0000:00:17.0")),
    mounts=(LocalMount("/", "ext4", "dm-0", ("sda", "sdb"), ("sda", "sdb")),),
)


@pytest.mark.parametrize("line", [IO_ERROR, "critical medium error, dev {}, sector 5 op 0x0:(READ) flags 0x0"])
@pytest.mark.parametrize("disk", ["sda", "sdb"])  # the settings name sda
def test_errors_of_one_copy_or_path_warn_and_never_drain(node, line, disk):
    story = Story(block_device, BASELINE).take_event(event_of(line.format(disk)), MIRRORED)
    (finding,) = block_device.correlate(story.events, MIRRORED, BASELINE)
    assert (finding.severity, finding.clears, finding.expects) == (Severity.WARNING, Clears.WINDOW, "")
    assert finding.message.endswith("; another copy or path serves /")
    assert (len(story.codes), story.drained) == (1, False)


def test_errors_above_all_copies_drain(node):
    assert Story(block_device).take_event(event_of(IO_ERROR.format("dm-0")), MIRRORED).drained


def test_errors_of_copy_with_unmirrored_data_drain(node):
    alone = LocalMount("/scratch", "xfs", "sda2", ("sda",))
    inventory = Inventory(disks=MIRRORED.disks, mounts=(*MIRRORED.mounts, alone))
    assert Story(block_device).take_event(event_of(IO_ERROR.format("sda")), inventory).drained
    assert not Story(block_device).take_event(event_of(IO_ERROR.format("sdb")), inventory).drained


def test_disk_errors_that_return_after_reboot_need_operator(node):
    story = feed_lines(Story(block_device).run_check(node()), IO_ERROR.format("nvme1n1")).reboot().run_check(node())
    assert feed_lines(story, IO_ERROR.format("nvme1n1")).drained
    assert story.reboot().run_checks(node(), 5).drained
    assert not story.repaired("block_device/io_error").run_checks(node(), 2).drained


def test_successful_controller_reset_warns_for_a_day_and_does_not_drain(node):
    story = feed_lines(
        Story(block_device).run_check(node()),
        "nvme nvme1: I/O 39 QID 3 timeout, reset controller",
        "nvme nvme1: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10",
    )
    story.run_check(node())
    assert (story.codes, story.drained) == (["block_device/command_error"], False)
    for _ in range(25):
        story.run_check(node(), minutes=60)
    assert story.codes == []


def test_log_and_sysfs_share_condition_of_dead_controller(node):
    story = feed_lines(
        Story(block_device).run_check(node()), "nvme nvme1: I/O 39 QID 3 timeout, aborting", RESET_FAILED
    )
    story.run_check(node(state("dead")))
    assert story.codes == ["block_device/command_error", "block_device/nvme"]
    assert story.run_checks(node(), 20).drained
    assert not story.reboot().run_checks(node(), 2).drained


def test_log_and_mounts_share_condition_of_stopped_file_system(node):
    story = feed_lines(Story(block_device).run_check(node()), "EXT4-fs (md0): Remounting filesystem read-only")
    story.run_check(node(mounts=ROOT + LOCAL.replace("md0 rw", "md0 rw,emergency_ro") + SCRATCH))
    assert (story.codes, story.drained, story.requeued) == (["block_device/stopped"], True, False)
    assert story.run_checks(node(), 20).drained
    assert not story.reboot().run_checks(node(), 2).drained


def test_stopped_root_in_log_drains_and_requeues_before_next_run(node):
    story = feed_lines(Story(block_device).run_check(node()), "EXT4-fs (dm-0): Remounting filesystem read-only")
    assert (story.codes, story.drained, story.requeued) == (["block_device/root_stopped"], True, True)


def test_reinstated_path_clears_condition(node):
    story = feed_lines(Story(block_device).run_check(node()), "device-mapper: multipath: 253:3: Failing path 8:16.")
    assert story.codes == ["block_device/path"]
    feed_lines(story, "device-mapper: multipath: 253:3: Reinstating path 8:16.")
    assert (story.codes, [c.cleared_by for c in story.cleared]) == ([], ["the path 8:16 to a disk is back"])


def test_resume_acknowledges_old_errors_and_new_ones_drain_again(node):
    story = feed_lines(Story(block_device).run_check(node()), IO_ERROR.format("nvme1n1"))
    story.conditions = endings.acknowledge_resumed(story.conditions, story.now, story.now)
    story.run_check(node())
    assert story.codes == []
    feed_lines(story, "nvme nvme1: I/O 39 QID 3 timeout, aborting")
    assert story.codes == ["block_device/command_error"]
    assert feed_lines(story, IO_ERROR.format("nvme1n1")).codes == [
        "block_device/command_error",
        "block_device/io_error",
    ]


def test_stopped_volume_of_container_is_ignored(node):
    volume = "24 21 253:17 / /var/lib/kubelet/pods/1/volumes/pvc/mount rw - ext4 /dev/mapper/pvc rw,emergency_ro\n"
    assert findings(block_device, node(mounts=MOUNTS + volume)) == []


def test_stopped_image_file_is_found_by_run_and_not_by_line(node):
    image = "24 21 7:5 / /mnt/image rw - ext4 /dev/loop5 rw,emergency_ro\n"
    assert codes(findings(block_device, node(mounts=MOUNTS + image))) == ["block_device/stopped"]
    assert summaries("EXT4-fs (loop5): Remounting filesystem read-only") == []
