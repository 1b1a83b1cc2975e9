"""filesystem: kernel messages about file systems and their servers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import findings_of
from story import Story

from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.checks import filesystem
from healthd.checks.filesystem import EXPLAIN, Config, correlate
from healthd.common.model import Clears, Finding, Inventory, LocalMount, Severity

NODE = Inventory(mounts=(LocalMount("/", "ext4", "sda3", ("sda",)), LocalMount("/scratch", "xfs", "md0", ("nvme0n1",))))
SILENT = "nfs: server nas1 not responding, still trying"
ANSWERS = "nfs: server nas1 OK"
LOST = (
    "Lustre: scratch-MDT0000-mdc-ffff88203810d800: Connection to scratch-MDT0000 (at 10.0.0.1@o2ib) was lost; in "
    "progress operations using this service will wait for recovery to complete"
)
EVICTED = (
    "LustreError: 167-0: scratch-MDT0000-mdc-ffff88203810d800: This client was evicted by scratch-MDT0000; in progress "
    "operations using this service will fail."
)
RESTORED = "Lustre: scratch-MDT0000-mdc-ffff88203810d800: Connection restored to 10.0.0.1@o2ib (at 10.0.0.1@o2ib)"


def found(*lines: str) -> list[Finding]:
    """Return findings of lines, ten seconds apart."""
    findings = findings_of(filesystem, *lines, node=NODE)
    for finding in findings:
        explain = EXPLAIN[finding.code]
        assert (finding.severity, finding.clears) == (explain.severity, explain.clears)
    return findings


def summaries(*lines: str) -> list[tuple[str, str, str]]:
    return [(f.code, f.subject, f.message) for f in found(*lines) if not f.recovered]


def feed_lines(story: Story, *lines: str) -> Story:
    return story.log_lines(*lines, node=NODE)


def test_silent_server_warns_and_may_have_shared_cause():
    (finding,) = found(SILENT, SILENT)
    assert (finding.severity, finding.code, finding.subject) == (
        Severity.WARNING,
        "filesystem/not_responding",
        "nas1",
    )
    assert finding.message == "the nfs server nas1 does not respond (2 lines)"
    assert (finding.clears, finding.window_seconds, finding.shared_cause) == (Clears.WINDOW, 86400, True)


def test_servers_are_evaluated_separately():
    assert summaries(SILENT, SILENT.replace("nas1", "nas2"), ANSWERS) == [
        ("filesystem/not_responding", "nas2", "the nfs server nas2 does not respond")
    ]


def test_lock_service_of_server_is_a_separate_part():
    assert [subject for _, subject, _ in summaries(SILENT.replace("nfs:", "lockd:"), ANSWERS)] == ["nas1 (lockd)"]


def test_evicted_client_warns_until_connection_is_restored():
    expected_codes = ["filesystem/not_responding", "filesystem/evicted"]
    assert [code for code, *_ in summaries(LOST, EVICTED)] == expected_codes
    assert summaries(LOST, EVICTED, RESTORED) == []
    assert [finding.code for finding in found(LOST, EVICTED, RESTORED) if finding.recovered] == expected_codes


def test_answer_of_server_without_silence_gives_nothing():
    assert found(ANSWERS, RESTORED) == []


@pytest.mark.parametrize("device", ["dm-17", "loop5"])
@pytest.mark.parametrize(
    "line",
    [
        "EXT4-fs ({}): Remounting filesystem read-only",
        "XFS ({}): xfs_do_force_shutdown(0x8) called from line 955 of file fs/xfs/xfs_trans.c.",
        "Aborting journal on device {}-8.",
        "BTRFS info (device {}): forced readonly",
    ],
)
def test_stopped_volume_of_container_warns(line, device):
    ((code, subject, _),) = summaries(line.format(device))
    assert (code, subject) == ("filesystem/volume_stopped", device)


@pytest.mark.parametrize("device", ["sda3", "md0"])
def test_stopped_file_system_of_node_is_left_to_block_device(device):
    assert summaries(f"EXT4-fs ({device}): Remounting filesystem read-only") == []


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        ("EXT4-fs error (device sda3): ext4_find_entry:1455: inode #2: comm ls: reading", "errors", "sda3"),
        ("XFS (md0): Metadata corruption detected at xfs_inode_buf_verify+0x1, xfs_inode block 0x8", "errors", "md0"),
        ('XFS (md0): metadata I/O error in "xfs_imap" at daddr 0x8 len 8 error 5', "errors", "md0"),
        ("BTRFS: Transaction aborted (error -28)", "errors", ""),
        ("XFS (sdc): log mount/recovery failed: error -117", "mount_failed", "sdc"),
        ("LustreError: 123:0:(osc_cache.c:1:osc_release()) LBUG", "lustre_bug", ""),
    ],
)
def test_survivable_file_system_error_warns(line, code, part):
    assert [(c, s) for c, s, _ in summaries(line)] == [(f"filesystem/{code}", part)]


@pytest.mark.parametrize(
    "line",
    [
        "EXT4-fs (sda3): error count since last fsck: 3",
        "EXT4-fs warning (device sda3): ext4_dx_add_entry:2184: Directory (ino: 1) index full",
        "XFS: python3(77) possible memory allocation deadlock size 65552 in kmem_alloc",
        "LustreError: 11-0: scratch-MDT0000-mdc-ffff8820381: operation obd_ping to node 10.0.0.1@tcp failed: rc = -107",
        "Lustre: 1:0:(client.c:1:ptlrpc_expire_one_request()) @@@ Request sent has timed out for slow reply",
        "libceph: osd3 10.0.0.1:6800 socket closed (con state OPEN)",
    ],
)
def test_irrelevant_line_gives_nothing(line):
    assert summaries(line) == []


@given(st.text(max_size=400), st.sampled_from([SILENT, EVICTED, "EXT4-fs error (device sda3): f:1: comm {}: x"]))
def test_names_chosen_by_users_never_drain_or_change_the_code(name, line):
    found_event = make_event(RawLine(0.0, line.replace("nas1", name, 1).replace("{}", name)), "b")
    for finding in correlate([found_event] if found_event else [], NODE, Config()):
        assert finding.severity is Severity.WARNING
        assert len(finding.subject) <= 140
        assert finding.code in ("filesystem/not_responding", "filesystem/evicted", "filesystem/errors")


# --- stories


def test_failover_of_server_warns_while_silent_and_never_drains():
    story = feed_lines(Story(filesystem), SILENT)
    assert (story.codes, story.drained) == (["filesystem/not_responding"], False)
    story.wait(10)
    feed_lines(story, ANSWERS)
    assert (story.codes, story.drained) == ([], False)
    assert [c.cleared_by for c in story.cleared] == ["the server nas1 responds again"]
    assert feed_lines(story, SILENT).codes == ["filesystem/not_responding"]


def test_silent_server_clears_after_a_day_without_lines():
    story = feed_lines(Story(filesystem), SILENT)
    assert story.wait(23 * 60).codes
    assert story.wait(61).codes == []


def test_stopped_container_volume_does_not_drain():
    story = feed_lines(Story(filesystem), *["EXT4-fs (dm-17): Remounting filesystem read-only"] * 50)
    assert (story.codes, story.drained) == (["filesystem/volume_stopped"], False)
    assert story.wait(24 * 60 + 1).codes == []
