"""Tests of healthd.service with a real systemd: what it denies the daemon, and that everything healthd reads works.

The tests also demonstrate why other directives are missing: tests/packaging/test_unit.py has the table.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import stub_nvml
from healthd_daemon import xid_line
from requirements import require_programs
from slurm_cluster import SlurmCluster
from systemd_container import CHECKOUT, SystemdContainer
from waiting import until

from tests.packaging.test_unit import DROP_IN, NEVER, OTHER_MOUNTS, directives

UNIT = (CHECKOUT / "packaging/systemd/healthd.service").read_text()
REPAIR_UNIT = (CHECKOUT / "packaging/systemd/healthd-repair.service").read_text()
SECURITY = (CHECKOUT / "docs/security.md").read_text()
FIRST_LIMIT = "\nCapabilityBoundingSet="
LIMITS = [f"{name}={value}" for name, value in directives(UNIT[UNIT.index(FIRST_LIMIT) : UNIT.index("[Install]")])]
REPAIR_LIMITS = [
    f"{name}={value}" for name, value in directives(REPAIR_UNIT[REPAIR_UNIT.index("\nNoNewPrivileges=") :])
]
SYS_RESOURCE = int(re.findall(r"CapBnd:\s*(\S+)", Path("/proc/self/status").read_text())[0], 16) >> 24 & 1
MAX_EXPOSURE = 4.2  # of 10; a unit without limits has 9.6

# Directive -> its value, if that is not "yes".
VALUES = {
    "ProtectSystem": "strict",
    "ProtectProc": "invisible",
    "ProcSubset": "pid",
    "MountFlags": "private",
    "TemporaryFileSystem": "/mnt",
    "BindPaths": "/tmp:/mnt",
    "BindReadOnlyPaths": "/tmp:/mnt",
    "LogNamespace": "other",
    **dict.fromkeys(("ReadOnlyPaths", "ReadWritePaths", "InaccessiblePaths", "NoExecPaths", "ExecPaths"), "/mnt"),
}
CHANGE_ROOT = ("RootDirectory", "RootImage", "DynamicUser")  # their other effects end the program or hide it


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def debian(request: pytest.FixtureRequest) -> Iterator[SystemdContainer]:
    """Run systemd 252 and 257."""
    with SystemdContainer(fresh=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def box() -> Iterator[SystemdContainer]:
    options = ["--bind=/dev/fuse", "--system-call-filter=clock_adjtime bpf"]  # nspawn denies these by default
    options.append("--capability=CAP_BPF,CAP_NET_ADMIN,CAP_SYS_RESOURCE")  # for the device ACL and the OOM score
    with SystemdContainer(kmsg=True, options=options) as running:
        yield running


def mount_namespace(box: SystemdContainer, *properties: str) -> str:
    options = [f"--property={property_text}" for property_text in properties]
    return box.exec("systemd-run", "--quiet", "--wait", "--pipe", *options, "readlink", "/proc/self/ns/mnt").stdout


def test_unit_has_lowest_exposure_without_mount_namespace(debian: SystemdContainer) -> None:
    debian.write("/opt/healthd.service", UNIT.replace("/usr/bin/healthd", "/usr/bin/true"))
    output = debian.exec("systemd-analyze", "security", "--offline=true", "--no-pager", "/opt/healthd.service").stdout
    overall = re.search(r"Overall exposure level for healthd.service: ([0-9.]+)", output)
    assert overall is not None, output
    assert float(overall[1]) <= MAX_EXPOSURE, output


def test_security_page_explains_each_open_item(debian: SystemdContainer) -> None:
    debian.write("/opt/healthd.service", UNIT.replace("/usr/bin/healthd", "/usr/bin/true"))
    output = debian.exec("systemd-analyze", "security", "--offline=true", "--json=short", "/opt/healthd.service").stdout
    still_open = {item["name"] for item in json.loads(output) if item["set"] is False and item.get("exposure")}
    rows = re.findall(
        r"^\| (`.+?) \| .+ \|$",
        SECURITY.partition("The unit does not use these restrictions")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    explained = {name.replace("\\|", "|") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert still_open - explained == set()
    assert explained - {item["name"] for item in json.loads(output)} == set()


def test_forbidden_directives_create_mount_namespace_and_unit_does_not(debian: SystemdContainer) -> None:
    of_pid_1 = debian.exec("readlink", "/proc/1/ns/mnt").stdout
    assert mount_namespace(debian) == of_pid_1
    tested_directives = [name for name, reason in NEVER.items() if OTHER_MOUNTS in reason and name not in CHANGE_ROOT]
    assert [
        directive
        for directive in tested_directives
        if mount_namespace(debian, f"{directive}={VALUES.get(directive, 'yes')}") == of_pid_1
    ] == []
    assert mount_namespace(debian, *LIMITS) == of_pid_1


# --- everything that healthd reads, under the limits of the unit

PROBES = """
import ctypes, json, os, socket, stat, sys, time
def open_kernel_log():
    os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
def read_the_clock_by_the_kernel():
    from healthd.host.system import adjtimex
    adjtimex()
def read_the_clock_by_systemd():
    from healthd.host.system import Tree
    assert isinstance(Tree("").clock().synchronised, bool)
def make_a_device_file():
    os.mknod("/dev/made", 0o600 | stat.S_IFCHR, os.makedev(511, 7))
def open_a_device_of_a_driver_that_comes_later():
    os.open("/dev/later", os.O_RDWR)
def open_a_disk():
    os.mknod("/dev/disk", 0o600 | stat.S_IFBLK, os.makedev(7, 0))
def see_what_another_users_process_holds():
    assert os.readlink(f"/proc/{sys.argv[1]}/fd/1") == "/dev/null"
    assert open(f"/proc/{sys.argv[1]}/wchan").read() not in ("", "0")
def hear_of_devices():
    from healthd.host.hot_unplug import hot_unplug
    heard = hot_unplug("/")
    heard.open()
    assert list(heard.waits())
def ask_a_file_system():
    assert os.statvfs("/").f_blocks
def see_processes_memory_and_disks():
    import psutil
    assert psutil.virtual_memory().total and psutil.disk_partitions(all=True)
    assert all(p.info["name"] for p in psutil.process_iter(["name", "username", "open_files"]))
def make_a_callback_of_c():
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda n: n)(7)
def ask_systemd():
    from healthd.host.program import run_program
    assert run_program(("systemctl", "is-active", "dbus.socket"), 60).stdout == "active\\n"
def be_reached_by_prometheus():
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        socket.socket(family).bind((address, 0))
def listen_to_all_packets():
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
def become_another_user():
    os.setuid(65534)
def mount():
    if ctypes.CDLL(None, use_errno=True).mount(b"x", b"/mnt", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "")
def make_a_namespace():
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "")
def set_the_clock():
    time.clock_settime(time.CLOCK_REALTIME, time.time())
def give_a_file_away():
    os.chown(os.memfd_create("x"), 65534, 65534)
def make_a_program_that_is_root():
    os.fchmod(os.open("/run/made", os.O_CREAT | os.O_WRONLY, 0o755), 0o4755)
said = {}
for name, probe in list(globals().items()):
    if getattr(probe, "__module__", "") == "__main__" and callable(probe):
        try:
            probe()
        except OSError as error:
            said[name] = os.strerror(error.errno)
        else:
            said[name] = ""
print(json.dumps(said))
"""
REFUSED = {
    "make_a_device_file",
    "read_the_clock_by_the_kernel",
    "open_a_disk",
    "listen_to_all_packets",
    "become_another_user",
    "mount",
    "make_a_namespace",
    "set_the_clock",
    "give_a_file_away",
    "make_a_program_that_is_root",
}


def run_with_limits(
    box: SystemdContainer, *argv: str, check: bool = True, limits: Sequence[str] = tuple(LIMITS)
) -> str:
    """Run a program with the limits of the unit and return its output."""
    options = [f"--property={property_text}" for property_text in limits]
    environment = [f"--setenv=PYTHONPATH={CHECKOUT}"]
    return box.exec("systemd-run", "--quiet", "--wait", "--pipe", *options, *environment, *argv, check=check).stdout


def test_unit_allows_all_inputs_of_healthd_and_refuses_rest(box: SystemdContainer) -> None:
    box.write("/opt/probes.py", PROBES)
    box.exec("systemd-run", "--unit=other", "--uid=65534", "--property=StandardOutput=null", "sleep", "1000")
    other = box.show("other", "MainPID")
    until(lambda: box.path(f"/proc/{other}/wchan").read_text() not in ("", "0"), "the process sleeps")
    box.exec("mknod", "/dev/later", "c", "511", "7")
    errors = json.loads(run_with_limits(box, sys.executable, "/opt/probes.py", other))
    no_driver = errors.pop("open_a_device_of_a_driver_that_comes_later")
    assert no_driver == os.strerror(errno.ENXIO)  # not EPERM: the device is not blocked
    assert {name for name, error in errors.items() if error} == REFUSED, errors


# The calls change nothing that remains: the command of the reboot, for example, does not exist. The error shows whether
# the unit allows a call.
REPAIR_PROBES = """
import ctypes, json, os, stat, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def reboot():
    call(libc.reboot, 1)
def mount():
    call(libc.mount, b"x", b"/mnt", b"tmpfs", 0, None)
    call(libc.umount, b"/mnt")
def make_device_file():
    os.mknod("/run/made-device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    os.unlink("/run/made-device")
def change_owner_and_user():
    os.chown(os.memfd_create("x"), 65534, 65534)
    subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", "true"], check=True)
def open_network_socket():
    import socket
    socket.socket(socket.AF_INET).close()
def use_clock_calls():
    from healthd.host.system import adjtimex
    adjtimex()
def make_namespace():
    call(libc.unshare, 0x10000000)
def make_setuid_program():
    os.fchmod(os.open("/run/made-program", os.O_CREAT | os.O_WRONLY, 0o755), 0o4755)
def change_personality():
    call(libc.personality, 0x0008)
errors = {"gain_privileges": next(x.split()[1] for x in open("/proc/self/status") if x.startswith("NoNewPrivs"))}
for name, probe in list(globals().items()):
    if getattr(probe, "__module__", "") == "__main__" and callable(probe) and name != "call":
        try:
            probe()
        except OSError as error:
            errors[name] = os.strerror(error.errno)
        else:
            errors[name] = ""
print(json.dumps(errors))
"""
REPAIR_ALLOWED = {
    *("reboot", "mount", "make_device_file", "change_owner_and_user", "open_network_socket"),
}


def test_repair_unit_refuses_what_no_step_needs(box: SystemdContainer) -> None:
    box.write("/opt/repair_probes.py", REPAIR_PROBES)
    argv = (sys.executable, "/opt/repair_probes.py")
    errors = json.loads(run_with_limits(box, *argv, limits=REPAIR_LIMITS))
    unlimited = json.loads(run_with_limits(box, *argv, limits=()))
    assert {name: errors[name] for name in REPAIR_ALLOWED} == {name: unlimited[name] for name in REPAIR_ALLOWED}
    assert errors["reboot"] == os.strerror(errno.EINVAL)
    assert (errors.pop("gain_privileges"), unlimited.pop("gain_privileges")) == ("1", "0")
    denied = {name for name, error in errors.items() if error == os.strerror(errno.EPERM)}
    assert denied == set(errors) - REPAIR_ALLOWED, errors
    assert {name: error for name, error in unlimited.items() if name in denied and error} == {}


def test_repair_unit_has_no_mount_namespace(debian: SystemdContainer) -> None:
    assert mount_namespace(debian, *REPAIR_LIMITS) == debian.exec("readlink", "/proc/1/ns/mnt").stdout


def test_nvml_works_through_its_library(box: SystemdContainer, tmp_path: Path) -> None:
    box.path("/opt/nvml").mkdir(exist_ok=True)
    shutil.copy(stub_nvml.build(tmp_path) / stub_nvml.NAME, box.path(f"/opt/nvml/{stub_nvml.NAME}"))
    check = (sys.executable, "-m", "healthd", "check", "gpu_access", "gpu_count", "--json")
    document = json.loads(run_with_limits(box, "env", "LD_LIBRARY_PATH=/opt/nvml", *check, check=False))
    assert (document["unknown"], document["conditions"]) == ([], []), document
    assert [
        observation["value"] for observation in document["results"][0]["observations"] if observation["name"] == "gpus"
    ] == [2]


SETTINGS = """\
mode = "observe"
[nvml]
fake = "dgx-h100"
[metrics]
listen = "127.0.0.1:9479"
[checks.mount."/"]
[checks.exec.site]
command = ["/bin/sh", "-c", "cat /proc/self/oom_score_adj; exit 1"]
"""


def open_conditions(box: SystemdContainer) -> set[str]:
    return {f"{entry['code']} {entry['subject']}".strip() for entry in box.status()["conditions"]}


def test_daemon_sees_mounts_of_node_and_only_daemon_has_oom_score(box: SystemdContainer) -> None:
    box.install_healthd(SETTINGS)
    box.systemctl("restart", "healthd")
    daemon = box.show("healthd", "MainPID")
    assert box.exec("readlink", f"/proc/{daemon}/ns/mnt").stdout == box.exec("readlink", "/proc/1/ns/mnt").stdout
    status = box.status()
    assert status["kernel_log"]["alive"] is True, status["kernel_log"]
    assert "mount/read_only /" not in open_conditions(box)
    daemon_score = "-500\n" if SYS_RESOURCE else "0\n"  # a test machine may not be allowed to set it
    assert box.exec("cat", f"/proc/{daemon}/oom_score_adj").stdout == daemon_score
    assert box.show("healthd", "OOMScoreAdjust") == "-500"
    worker = box.exec("pgrep", "--parent", daemon, "--full", "healthd.agent.worker").stdout.strip()
    assert box.exec("cat", f"/proc/{worker}/oom_score_adj").stdout == "0\n"
    (site,) = (entry for entry in status["conditions"] if entry["check"] == "exec")
    assert site["message"].endswith("0"), site
    box.systemctl("stop", "healthd")


def test_read_only_namespace_would_drain_healthy_node(box: SystemdContainer) -> None:
    """The reason why ProtectSystem= is not in the unit."""
    box.install_healthd(SETTINGS)
    box.write("/etc/systemd/system/healthd.service.d/strict.conf", "[Service]\nProtectSystem=strict\n")
    box.systemctl("daemon-reload")
    try:
        box.systemctl("restart", "healthd")
        assert "mount/read_only /" in open_conditions(box)
        box.systemctl("stop", "healthd")
    finally:
        box.path("/etc/systemd/system/healthd.service.d/strict.conf").unlink()
        box.systemctl("daemon-reload")


# --- further rights of a site's programs

ALL_LINES = re.sub(r"(?m)^#([A-Z][A-Za-z]+=)", r"\1", DROP_IN)
SITE = "[Service]\nType=oneshot\nStandardOutput=truncate:/run/said\nStandardError=truncate:/run/said\n"


def run_with_drop_in(box: SystemdContainer, *argv: str) -> str:
    """Run a program with the limits of the unit, extended by each line of healthd-exec-checks.conf. Return its
    output."""
    words = " ".join(f'"{word}"' for word in argv)
    unit = [SITE + f"Environment=PYTHONPATH={CHECKOUT}", *LIMITS, f"ExecStart={words}", ""]
    box.write("/etc/systemd/system/site.service.d/exec-checks.conf", ALL_LINES)
    box.install_unit("site.service", "\n".join(unit))
    box.systemctl("start", "site", check=False)
    return box.exec("cat", "/run/said").stdout


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("setpriv", "--reuid=65534", "--clear-groups", "id", "-u"), "65534\n"),
        (("sh", "-c", "mount -t tmpfs site /mnt && umount /mnt && echo mounted"), "mounted\n"),
        ((sys.executable, "-c", "from healthd.host.system import adjtimex; print(adjtimex()[2] > 0)"), "True\n"),
    ],
    ids=["another user", "a mount", "the clock"],
)
def test_drop_in_grants_rights_for_site_program(box: SystemdContainer, argv: tuple[str, ...], expected: str) -> None:
    assert run_with_limits(box, *argv, check=False) != expected
    assert run_with_drop_in(box, *argv).endswith(expected)


# --- a file server that is dead at boot


def test_daemon_is_ready_with_dead_file_server(box: SystemdContainer) -> None:
    box.install_healthd(SETTINGS + '[checks.mount."/mnt/dead"]\ntimeout_seconds = 1.0\n')
    box.systemctl("stop", "healthd")
    box.path("/mnt/dead").mkdir(exist_ok=True)
    server = f"sleep infinity | {sys.executable} {CHECKOUT}/tests/e2e/hangfs.py /mnt/dead"
    box.exec("systemd-run", "--unit=dead", "sh", "-c", server)
    try:
        until(lambda: " /mnt/dead " in box.exec("cat", "/proc/mounts").stdout, "the file system is mounted")
        box.systemctl("start", "healthd")  # returns after READY
        assert box.show("healthd", "ActiveState") == "active"
        until(lambda: "mount/hang /mnt/dead" in open_conditions(box), "the hang is reported")
    finally:
        box.systemctl("kill", "--signal=KILL", "dead")
        box.exec("umount", "--lazy", "/mnt/dead", check=False)
        box.systemctl("stop", "healthd", check=False)


# --- Slurm


def slurm_client_binds() -> list[str]:
    """Return options that bind this machine's scontrol, sinfo and squeue, with their libraries, at the same paths."""
    names = ("scontrol", "sinfo", "squeue")
    require_programs(*names, packages="slurm-client")
    programs = [shutil.which(name) or "" for name in names]
    ldd_output = subprocess.run(["ldd", *programs], capture_output=True, text=True, timeout=240, check=True).stdout
    libraries = set(re.findall(r"=> (/\S+) \(", ldd_output))
    plugins = next(Path(path).parent for path in libraries if "slurm" in path)
    munge = subprocess.run(["ldd", plugins / "auth_munge.so"], capture_output=True, text=True, timeout=240, check=True)
    needed = {*programs, str(plugins), *re.findall(r"=> (/\S+) \(", munge.stdout), *libraries}
    base = ("/libc.so", "/libm.so", "/libresolv.so", "/libslurm")
    return [f"--bind-ro={path}" for path in sorted(needed) if not any(name in path for name in base)]


@contextlib.contextmanager
def network_namespace_of(pid: int) -> Iterator[None]:
    """Enter the network namespace of a process for a block, so that programs listen there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as own_namespace, open(f"/proc/{pid}/ns/net") as other_namespace:
        assert libc.setns(other_namespace.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(own_namespace.fileno(), 0x40000000) == 0


DRAIN_SETTINGS = """\
mode = "drain"
node_name = "n1"
interval_seconds = 1.0
[nvml]
fake = "dgx-h100"
[metrics]
listen = "off"
[kernel_log]
source = "/opt/kernel.log"
trust_file = true
[checks.processes]
enabled = false
"""


def test_daemon_drains_and_resumes_real_slurm_through_munge() -> None:
    require_programs("ip", packages="iproute2")
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="slurm."))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        box = stack.enter_context(SystemdContainer(binds=[directory], options=slurm_client_binds()))
        stack.enter_context(network_namespace_of(box.leader))
        # slurmctld calls getaddrinfo(3) with AI_ADDRCONFIG, which ignores 127.0.0.1: it needs another address.
        subprocess.run(["ip", "address", "add", "192.0.2.1/32", "dev", "lo"], check=True, timeout=240)
        cluster = stack.enter_context(SlurmCluster(directory, nodes=1))
        box.write("/opt/kernel.log", "")
        box.install_healthd(DRAIN_SETTINGS)
        conf = f"[Service]\nEnvironment=SLURM_CONF={directory}/slurm.conf\n"
        box.write("/etc/systemd/system/healthd.service.d/slurm.conf", conf)
        box.systemctl("daemon-reload")
        box.systemctl("start", "healthd")
        with open(box.path("/opt/kernel.log"), "a") as log:
            log.write(f"{xid_line(79)}\n")
        until(lambda: "gpu_xid/79 0000:61:00.0" in open_conditions(box), "the Xid is reported")
        cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 0000:61:00.0")
        until(lambda: box.status()["slurm"]["problem"] == "", "Slurm answers")
        box.exec("healthd", "repaired", "gpu_xid/79")
        cluster.wait_state("n1", without=("DRAIN",))
        box.systemctl("stop", "healthd")
