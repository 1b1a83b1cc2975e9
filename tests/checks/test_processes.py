"""processes: killed processes that do not end, and large numbers of zombies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import BOOT, NOW, codes, findings, observations_named, parse_or_error, run_check, run_rounds, run_until_error
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import FakeSystem, write

from healthd.checks import processes
from healthd.checks.processes import FUSE_CONNECTIONS, MAX_FINDINGS, Config, parse, process_state, validate
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host
from healthd.host.system import FileStat, Tree

# Captured on Linux 6.18: /proc/2/stat, /proc/self/stat. The fields that the tests change have names.
STAT = (
    "{pid} ({command}) {state} {parent} 1 1 0 -1 {flags} 1081 0 0 0 1 0 0 0 20 0 {threads} 0 {start} 9912320 1536 "
    "18446744073709551615 94020000 94040000 140720 0 0 0 0 16781312 134217730 0 0 0 17 1 0 0 0 0 0 94050000 94051000 "
    "94100000 140720 140730 140730 140735 0\n"
)
KILLED, CALM = "0000000000000100", "0000000000000000"

ABSENT_IS_FINE = {
    "/proc": "a captured tree without processes",
    r"/proc/\d+/stat": "a process that ends",
    r"/proc/\d+/status": "a process that ends",
    r"/proc/\d+/task": "a process that ends",
    r"/proc/\d+/task/\d+/stat": "a thread that ends",
    r"/proc/\d+/task/\d+/status": "a thread that ends",
    r"/proc/2/task/2/children": "kernels without CONFIG_PROC_CHILDREN: kernel threads are read too",
}
HARMLESS = {
    ("is cut short", r"/proc/2/stat"): "the beginning shows that process 2 belongs to the kernel",
    ("returns .*|is (empty|binary)", r"/proc/2/task/2/children"): "lists the processes to skip; all others are read",
}


def process(pid: int, state: str = "S", command: str = "python3", own: str = "", **fields: int) -> dict[str, str]:
    """Return /proc/PID/stat."""
    values = {"parent": 1, "flags": 4194304, "threads": 1, "start": 100 * pid, **fields}
    return {f"/proc/{own or pid}/stat": STAT.format(pid=pid, command=command, state=state, **values)}


def status(pid: int | str, own: str = CALM, shared: str = CALM, dumping: int = 0) -> dict[str, str]:
    """Return a shortened /proc/PID/status."""
    lines = ("Name:\tpython3", "Umask:\t0022", "State:\tD (disk sleep)", f"CoreDumping:\t{dumping}", "Threads:\t1")
    signals = (f"SigPnd:\t{own}", f"ShdPnd:\t{shared}", f"SigBlk:\t{CALM}", f"SigIgn:\t{CALM}", f"SigCgt:\t{CALM}")
    return {f"/proc/{pid}/status": "\n".join([*lines, *signals, "Seccomp:\t0", ""])}


def stuck_process(pid: int, **fields: int) -> dict[str, str]:
    return {**process(pid, "D", **fields), **status(pid, own=KILLED)}


CALM_NODE = {
    **process(1, command="systemd"),
    **process(2, command="kthreadd", parent=0, start=0),
    **process(3, "I", command="kworker/0:0", parent=2),
    **process(4, "D", command="jbd2/sda1-8", parent=2),
    "/proc/2/task/2/children": "3 4 \n",
    **process(100, command="a) D (b"),
    **process(101, "D"),  # waits for a disk, not killed
    **status(101),
    **process(102, "Z", threads=2),  # the leader has ended, one thread still runs
    **process(102, "Z", own="102/task/102"),
    **process(103, "D", own="102/task/103"),
    **status("102/task/103"),
    **process(104, "Z", parent=100),
    "/proc/uptime": "10000.00 20000.00\n",
    "/sys/devices/system/cpu/online": "0-3\n",
}


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    return write(tmp_path, CALM_NODE), Config()


@pytest.fixture
def node(tmp_path):
    """Return a function that creates a calm node with additional processes."""
    return lambda *more: write(tmp_path, {path: text for files in (CALM_NODE, *more) for path, text in files.items()})


def test_processes_not_killed_give_no_finding(node):
    assert findings(processes, node()) == []


def test_killed_process_in_state_d_is_degraded_after_five_minutes(node):
    (finding,) = findings(processes, node(stuck_process(200, start=777), {"/proc/200/wchan": "rpc_wait_bit_killable"}))
    assert (finding.code, finding.severity, finding.clears) == (
        "processes/unkillable",
        Severity.DEGRADED,
        Clears.PASS,
    )
    assert (finding.subject, finding.confirm_seconds, finding.shared_cause) == ("200@777", 300.0, True)
    user = os.geteuid()
    assert finding.message == f"process 200 (python3) of user {user} was killed and hangs in rpc_wait_bit_killable"


@pytest.mark.parametrize("wchan", ["0", "", "N/A", "a b\nc"])
def test_wait_channel_is_reported_only_if_known(node, wchan):
    (finding,) = findings(processes, node(stuck_process(200), {"/proc/200/wchan": wchan}))
    assert finding.message.endswith("was killed and hangs")


def test_unprintable_process_name_is_escaped(node):
    (finding,) = findings(processes, node(process(200, "D", command="a\x1b) S 1 (\n"), status(200, own=KILLED)))
    assert "process 200 (a?) S 1 (?)" in finding.message


@pytest.mark.parametrize(
    "more",
    [
        {**process(200, "D"), **status(200, own=KILLED)},
        {**process(200, "D"), **status(200, shared=KILLED)},
        {**process(200, "D"), **status(200, shared="0000000100004102")},
        {**process(200, "D", flags=4194304 | 0x4), **status(200)},  # it has taken the signal and hangs during its exit
    ],
)
def test_pending_sigkill_or_started_exit_counts_as_killed(node, more):
    assert codes(findings(processes, node(more))) == ["processes/unkillable"]


@pytest.mark.parametrize(
    "more",
    [
        {**process(200, "D"), **status(200, own="0000000000004000")},  # SIGTERM, which it handles
        {**process(200, "D", flags=4194308), **status(200, own=KILLED, dumping=1)},  # writes a core dump
        {**process(200, "S"), **status(200, own=KILLED)},
        {**process(200, "R"), **status(200, own=KILLED)},
    ],
)
def test_process_not_killed_or_not_in_state_d_gives_no_finding(node, more):
    assert findings(processes, node(more)) == []


def test_hanging_thread_of_ended_leader_counts(node):
    files = {
        **process(200, "Z", threads=2),
        **process(200, "Z", own="200/task/200"),
        **process(201, "D", own="200/task/201"),
        **status("200/task/201", own=KILLED),
    }
    assert codes(findings(processes, node(files))) == ["processes/unkillable"]


def test_hundreds_of_hanging_processes_give_few_stable_findings(node):
    crowd = {path: text for pid in range(200, 300) for path, text in stuck_process(pid).items()}
    found = findings(processes, node(crowd))
    assert [f.subject for f in found] == [f"{pid}@{pid * 100}" for pid in range(200, 200 + MAX_FINDINGS)]


# --- zombies


def zombies(count: int, parent: int = 100) -> dict[str, str]:
    return {path: text for pid in range(1000, 1000 + count) for path, text in process(pid, "Z", parent=parent).items()}


def test_more_than_fifty_zombies_per_core_warn_and_name_parent(node):
    (finding,) = findings(processes, node(zombies(199)))  # in addition to two zombies of a calm node with 4 CPUs
    assert (finding.code, finding.severity, finding.subject) == ("processes/zombies", Severity.WARNING, "")
    assert finding.message == "201 zombies, more than 200; 200 are children of process 100"


def test_fifty_zombies_per_core_give_no_finding(node):
    assert findings(processes, node(zombies(198))) == []


def test_cpu_ranges_are_counted(node):
    ranges = {"/sys/devices/system/cpu/online": "0,2-3"}
    assert findings(processes, node(zombies(148), ranges)) == []
    assert codes(findings(processes, node(zombies(149), ranges))) == ["processes/zombies"]


# --- a share of the processes in each run


ASLEEP = {path: text for pid in range(1, 2001) for path, text in process(pid).items()}


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tree with 2,000 sleeping processes."""
    folder = tmp_path_factory.mktemp("sleepers")
    write(folder, ASLEEP)
    return folder


@pytest.fixture
def crowd(sleepers: Path) -> Iterator[Callable[..., Host]]:
    """Return a function that creates hosts with 2,000 sleeping processes and these changes, and undo the changes."""
    changed: dict[str, str] = {}

    def make(*more: dict[str, str]) -> Host:
        for each in more:
            changed.update(each)
        return write(sleepers, changed)

    yield make
    for path in changed:
        (sleepers / path.lstrip("/")).unlink()
    write(sleepers, {path: ASLEEP[path] for path in changed if path in ASLEEP})


class CountingSystem(FakeSystem):
    """A system that records which files are read."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.paths: list[str] = []

    def read(self, path: str) -> bytes:
        self.paths.append(path)
        return super().read(path)


def test_run_reads_a_share_and_a_few_runs_read_all(crowd):
    system = CountingSystem(crowd().root)
    host = Host(system._root, system=system)
    story = Story(processes).run_check(host)
    first, system.paths = system.paths, []
    assert len({path for path in first if path.endswith("/stat")}) == 2000
    for _ in range(10):
        before = len(system.paths)
        story.run_check(host)
        assert len(system.paths) - before <= 202
    assert len({path for path in system.paths if path.endswith("/stat")}) == 2000


@pytest.mark.one_python
@pytest.mark.parametrize("pid", [1, 2, 199, 200, 201, 1000, 1999, 2000])
def test_stuck_process_is_found_within_ten_runs(crowd, pid):
    story = Story(processes).run_checks(crowd(), 3)
    host = crowd(stuck_process(pid))
    runs = 0
    while not story.conditions:
        story.run_check(host)
        runs += 1
    assert runs <= 10
    assert story.run_check(host).drained  # after a suspicious process, the next run reads all


def test_zombies_of_several_shares_are_added(crowd):
    cpus = {"/sys/devices/system/cpu/online": "0"}
    story = Story(processes).run_check(crowd())
    host = crowd(zombies(51), cpus)
    for _ in range(7):
        story.run_check(host)
        if story.codes:
            break
    assert story.codes == ["processes/zombies"]


def test_first_run_after_boot_reads_all(crowd):
    system = CountingSystem(crowd().root)
    host = Host(system._root, system=system)
    story = Story(processes).run_checks(host, 2).reboot()
    system.paths = []
    story.run_check(host)
    assert len(system.paths) >= 2000


def test_kernel_threads_are_not_read(node):
    system = CountingSystem(node().root)
    run_check(processes, Host(system._root, system=system))
    assert "/proc/3/stat" not in system.paths
    assert "/proc/4/stat" not in system.paths


def test_children_of_process_2_are_read_if_it_is_not_kthreadd(node):
    host = node(process(2, command="bash", parent=1), stuck_process(3))
    assert codes(findings(processes, host)) == ["processes/unkillable"]


def test_end_of_scan_is_remembered(crowd):
    host = crowd()
    (first,) = observations_named(run_check(processes, host), "processes_scanned_up_to_pid")
    (second,) = observations_named(run_rounds(processes, [host, host]), "processes_scanned_up_to_pid")
    assert (first.value, second.value) == (2000, 200)


# --- stories


def test_killed_hanging_process_drains_until_it_ends(node):
    calm, hangs = node(), stuck_process(200, start=777)
    story = Story(processes).run_check(calm)
    story.run_check(node(hangs))
    assert not story.drained  # it may still end
    story.run_check(node(hangs))
    assert story.drained
    assert not story.requeued
    story.run_checks(node(hangs), 20)  # the load is gone, the process is not
    assert story.drained
    reused_pid = {
        "/proc/200/stat": STAT.format(pid=200, command="x", state="S", parent=1, flags=0, threads=1, start=9000)
    }
    story.run_check(node(reused_pid))  # the process has ended, and its pid belongs to another process
    assert story.drained
    story.run_check(node(reused_pid))
    assert not story.drained


def test_reused_pid_of_another_killed_process_does_not_drain(node):
    story = (
        Story(processes).run_check(node(stuck_process(200, start=777))).run_check(node(stuck_process(200, start=9000)))
    )
    assert not story.drained
    assert story.run_check(node(stuck_process(200, start=9000))).drained


def test_process_that_ends_within_five_minutes_does_not_drain(node, tmp_path):
    story = Story(processes).run_check(node(stuck_process(200)))
    (tmp_path / "proc/200/stat").unlink()
    assert not story.run_checks(node(), 3).drained
    assert story.conditions == {}


def test_zombies_warn_and_never_drain(node, tmp_path):
    story = Story(processes).run_checks(node(zombies(400)), 10)
    assert story.codes == ["processes/zombies"]
    assert not story.drained
    for pid in range(1000, 1400):
        (tmp_path / f"proc/{pid}/stat").unlink()
    assert story.run_checks(node(), 2).codes == []


# --- unreadable files


def test_unreadable_process_hides_no_other_finding(node):
    results, error = run_until_error(processes, node({"/proc/199/stat": "garbage\n"}, stuck_process(200)))
    assert "/proc/199/stat: not a process state: 'garbage'" in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["processes/unkillable"]


@pytest.mark.parametrize(
    "text", ["SigPnd:\t0000\nShdPnd:\t0\n", "N/A", "", f"SigPnd:\t{CALM}\n", "SigPnd:\t" + "x" * 16]
)
def test_status_without_signals_fails_run(node, text):
    assert (
        "/proc/200/status: no signals"
        in run_until_error(processes, node(process(200, "D"), {"/proc/200/status": text}))[1]
    )


def test_process_that_ends_during_read_is_ignored(node):
    class Ending(FakeSystem):
        def read(self, path: str) -> bytes:
            if path == "/proc/100/stat":
                raise ProcessLookupError(3, "No such process", path)
            return super().read(path)

    system = Ending(node().root)
    assert findings(processes, Host(system._root, system=system)) == []


def test_tree_without_processes_gives_nothing(tmp_path):
    assert run_until_error(processes, Host(str(tmp_path))) == ([], "")


@pytest.mark.parametrize("text", ["", "N/A", "0-", "a-b", "0-3;5"])
def test_garbled_cpu_list_fails_run(node, text):
    error = run_until_error(processes, node({"/sys/devices/system/cpu/online": text}))[1]
    assert "online: not a list of CPUs" in error


def test_validate_rejects_share_of_zero_processes():
    assert validate(Config(processes_per_run=0)) == "processes_per_run must be 1 or more"
    assert validate(Config()) is None


@given(st.one_of(st.text(max_size=80), st.text("0123456789 ()DZS", max_size=200)))
def test_parse_of_garbage_gives_process_or_error(text):
    for function in (process_state, parse):
        found, error = parse_or_error(function, text, "/proc/1/stat")
        assert found is not None or error.startswith("/proc/1/stat: not a process state")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=15), st.sampled_from("RSDTtZXxKWPI"))
def test_state_is_read_with_any_program_name(command, state):
    text = STAT.format(pid=7, command=command, state=state, parent=1, flags=0, threads=3, start=9).strip()
    assert process_state(text, "") == state
    assert parse(text, "") == (7, command, state, 1, 0, 3, 9)


# --- the real kernel


def test_processes_of_this_machine_are_read():
    results = list(processes.run(Host(), Config(), History({}, NOW, BOOT)))
    worse = {item.code for item in results if isinstance(item, Finding) and item.severity > Severity.WARNING}
    assert worse <= {"processes/unkillable"}  # other tests, which run in parallel, let processes hang


def test_kernel_shows_ended_leader_with_a_live_thread():
    exit_syscall = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    program = f"""
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall({exit_syscall}, 0)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        text, until = "", time.monotonic() + 50.0
        while not text or (process_state(text, "") != "Z" and time.monotonic() < until):
            time.sleep(0.01)
            text = Path(f"/proc/{child.pid}/stat").read_text()
        result = processes.ScanResult([], [], [], [])
        processes._scan(Host(), [child.pid], result)
        child.send_signal(signal.SIGKILL)
    assert [(found.state, found.threads) for found in result.zombies] == [("Z", 2)]
    assert (result.stuck, result.unreadable) == ([], [])


# --- FUSE file systems of users


FUSE = """[<0>] request_wait_answer+0x11c/0x220 [fuse]
[<0>] fuse_simple_request+0x16c/0x2c0 [fuse]
[<0>] fuse_lookup_name+0xe2/0x200 [fuse]
[<0>] __lookup_slow+0x81/0x130
[<0>] do_syscall_64+0x38/0x90
"""
BUILT_IN = FUSE.replace(" [fuse]", "")
CREATES = """[<0>] path_openat+0x2b6/0x1170
[<0>] do_filp_open+0xc3/0x180
[<0>] do_syscall_64+0x71/0x280
"""
LOCK = """[<0>] rwsem_down_write_slowpath+0x2c4/0x700
[<0>] path_openat+0x2b6/0x1170
[<0>] do_syscall_64+0x38/0x90
"""
DRIVER = "[<0>] os_acquire_mutex+0x3c/0x60 [nvidia]\n[<0>] nvidia_unlocked_ioctl+0x81/0x140 [nvidia]\n"
FAULTS_IN_A_DRIVER = FUSE + "[<0>] filemap_fault+0x1/0x2\n[<0>] copy_from_user+0x1/0x2\n" + DRIVER
FILE_SERVER = "[<0>] rpc_wait_bit_killable+0x1e/0xb0 [sunrpc]\n[<0>] nfs_readpage+0x1/0x2 [nfs]\n"
DISK = "[<0>] io_schedule+0x42/0x70\n[<0>] ext4_file_read_iter+0x1/0x2\n"


class FuseTree(Tree):
    """A tree with FUSE connections: number -> (uid, number of waiting requests)."""

    def __init__(self, root: str, connections: dict[str, tuple[int, int]]) -> None:
        super().__init__(root)
        self.connections = {f"{FUSE_CONNECTIONS}/{name}": found for name, found in connections.items()}

    def names(self, path: str) -> list[str]:
        if path == FUSE_CONNECTIONS:
            return [name.rpartition("/")[2] for name in self.connections]
        return super().names(path)

    def read(self, path: str) -> bytes:
        if path.startswith(FUSE_CONNECTIONS):
            return b"%d\n" % self.connections[path.removesuffix("/waiting")][1]
        return super().read(path)

    def stat(self, path: str) -> FileStat:
        if path in self.connections:
            return FileStat(0o40500, self.connections[path][0], 0, (0, 0))
        return super().stat(path)


def hanging_process(stack: str, pid: int = 200, user: int = 1000, **fields: int) -> dict[str, str]:
    files = {**stuck_process(pid, **fields), f"/proc/{pid}/stack": stack}
    files[f"/proc/{pid}/status"] = f"Name:\tx\nUid:\t{user}\t{user}\t{user}\t{user}\n" + files[f"/proc/{pid}/status"]
    return files


def finding_codes(tmp_path: Path, files: dict[str, str], connections: dict[str, tuple[int, int]]) -> list[str]:
    root = write(tmp_path, {**CALM_NODE, **files}).root
    return codes(findings(processes, Host(root, system=FuseTree(root, connections))))


USER_CONNECTION, CODE = {"40": (1000, 2)}, "processes/user_file_system"


OVERLAY = FUSE.replace("[<0>] do_sys", "[<0>] ovl_lookup+0x1/0x2 [overlay]\n[<0>] do_sys")


PAGE = """[<0>] __folio_lock+0xf6/0x240
[<0>] invalidate_inode_pages2_range+0x1e2/0x270
[<0>] fuse_open+0x22f/0x290
[<0>] do_dentry_open+0x1a6/0x430
"""
COPY = FUSE.replace("request_wait_answer", "request_wait_answer.isra.0")


@pytest.mark.parametrize("stack", [FUSE, BUILT_IN, LOCK, CREATES, PAGE, COPY, OVERLAY])
def test_process_in_file_system_of_its_user_warns_and_never_drains(tmp_path, stack):
    assert finding_codes(tmp_path, hanging_process(stack), USER_CONNECTION) == [CODE]


# Functions of Linux 4.15, 5.10 and 6.18. The last lines are callers that newer kernels show instead of a lock function.
WAIT_CHANNELS = [
    *("request_wait_answer", "request_wait_answer.isra.0", "fuse_get_req", "fuse_lock_inode", "fuse_file_write_iter"),
    *("rwsem_down_write_failed", "rwsem_down_write_slowpath", "rwsem_down_read_slowpath", "d_alloc_parallel"),
    *("path_openat", "path_openat.isra.0", "filename_create", "do_unlinkat", "do_rmdir", "do_renameat2", "lock_rename"),
    *("walk_component", "lookup_slow", "fdget_pos", "__fdget_pos", "__lock_page", "__folio_lock", "chmod_common"),
]


def process_without_stack(wchan: str) -> dict[str, str]:
    """Return a hanging process as healthd.service sees it, without CAP_SYS_ADMIN."""
    files = {**hanging_process(""), "/proc/200/wchan": wchan}
    del files["/proc/200/stack"]
    return files


@pytest.mark.parametrize("wchan", WAIT_CHANNELS)
def test_wait_channel_shows_file_system_of_user_without_stack(tmp_path, wchan):
    assert finding_codes(tmp_path, process_without_stack(wchan), USER_CONNECTION) == [CODE]


@pytest.mark.parametrize(
    ("wchan", "connections"),
    [
        ("nvidia_ioctl", USER_CONNECTION),  # in a driver, regardless of the user's connections
        ("rpc_wait_bit_killable", USER_CONNECTION),
        ("mnt_want_write", USER_CONNECTION),  # a frozen disk
        ("folio_wait_writeback", USER_CONNECTION),
        ("path_openat", {"40": (1001, 2)}),
        ("0", USER_CONNECTION),
        ("request_wait_answer", {"40": (0, 2)}),  # a shared file system
        ("request_wait_answer", {"40": (1001, 2), "41": (0, 1)}),
        ("d_alloc_parallel", {"40": (0, 2)}),
    ],
)
def test_driver_and_file_server_are_reported_without_stack(tmp_path, wchan, connections):
    assert finding_codes(tmp_path, process_without_stack(wchan), connections) == ["processes/unkillable"]


PODMAN = "         0       1000          1\n         1     100000      65536\n"
FIRST = "         0          0 4294967295\n"


@pytest.mark.parametrize(
    ("uid_map", "code"),
    [(PODMAN, CODE), (PODMAN.replace("1000 ", "1001 "), "processes/unkillable"), (FIRST, "processes/unkillable")],
)
@pytest.mark.parametrize("wchan", ["path_openat", "request_wait_answer"])
def test_user_of_rootless_container_is_the_one_that_started_it(tmp_path, wchan, uid_map, code):
    """The uid of the process is one of 65,536 sub-ids of its user (/etc/subuid). A file system of root waits as
    well."""
    files = process_without_stack(wchan)
    files["/proc/200/status"] = files["/proc/200/status"].replace("1000", "100004")
    files["/proc/200/uid_map"] = uid_map
    assert finding_codes(tmp_path, files, {**USER_CONNECTION, "41": (0, 1)}) == [code]


@pytest.mark.parametrize("stack", [DRIVER, FAULTS_IN_A_DRIVER, FILE_SERVER, DISK, "", "N/A", LOCK + DRIVER])
def test_driver_file_server_and_disk_are_reported_despite_fuse(tmp_path, stack):
    assert finding_codes(tmp_path, hanging_process(stack), USER_CONNECTION) == ["processes/unkillable"]


@pytest.mark.parametrize(
    ("user", "connections", "code"),
    [
        (1000, {"40": (0, 1)}, "processes/unkillable"),  # a file system that root mounted for all users
        (1000, {}, "processes/unkillable"),  # unknown: fusectl is not mounted
        (1000, {"40": (1000, 0)}, "processes/unkillable"),  # no request waits
        (1000, {"40": (1000, 10), "41": (0, 1)}, CODE),  # the user also waits for root's file system
        (1001, {"40": (1000, 1), "41": (0, 1)}, "processes/unkillable"),
        (1001, {"40": (1000, 1), "41": (0, 0)}, CODE),  # a sub-id of a user's container
        (0, {"40": (1000, 1), "41": (0, 1)}, "processes/unkillable"),
    ],
)
def test_finding_depends_on_owner_of_file_system(tmp_path, user, connections, code):
    assert finding_codes(tmp_path, hanging_process(FUSE, user=user), connections) == [code]


def test_thread_in_driver_counts_despite_other_threads(tmp_path):
    files = hanging_process(FUSE, threads=2)
    thread = {**process(201, "D", own="200/task/201"), **status("200/task/201", own=KILLED)}
    thread |= {"/proc/200/task/201/stack": DRIVER}
    assert finding_codes(tmp_path, {**files, **thread}, USER_CONNECTION) == ["processes/unkillable"]
    thread |= {"/proc/200/task/201/stack": FUSE}
    thread["/proc/200/task/201/status"] += "Uid:\t1000\t1000\t1000\t1000\n"
    assert finding_codes(tmp_path, {**files, **thread}, USER_CONNECTION) == [CODE]


@given(st.text())
def test_is_fuse_wait_accepts_any_text_and_excludes_drivers(stack):
    assert not (processes.is_fuse_wait(stack) and "[nvidia]" in stack)
