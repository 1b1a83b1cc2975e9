"""Events of a node, one function each. Each waits for the expected result, but does not require a duration."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from random import Random

from healthd_daemon import condition
from machine import GPUS

from soak import growth
from soak.node import CONFIG, Node

HOSTILE = (
    b"{}",
    b"null",
    b"[" * 60_000,
    b"\xff\xfe\x00",
    b'{"command":["status"]}',
    b'{"command":%s}' % (b"9" * 400),
    b'{"command":"looks-left","asked":1e999}',
    b'{"command":"pause","seconds":NaN,"why":"x"}',
    b'{"command":"ack","code":%s,"seconds":1,"why":"x"}' % (b"9" * 400),
    b'{"command":"repaired","code":{"a":[]},"part":{}}',
)
NO_REQUEST = (b"", b"\n", b"GET", b"GET /metrics", b"\x16\x03\x01\x02\x00", b"POST / HTTP/1.1\r\n\r\n", b"A" * 100_000)
# A rank of a job. For each number that it reads, it makes a step of this many seconds by its own clock.
RANK = """
import os, sys
from healthd import client
client.SEND_SECONDS = 0.0
os.environ["RANK"] = sys.argv[1]
print(os.getpid(), flush=True)
seconds = 0.0
def clock():
    return seconds
client.time.perf_counter = clock
for line in sys.stdin:
    seconds += float(line)
    client.step(busy=0.8 * float(line))
    print(flush=True)
"""


def draining_fault(node: Node, random: Random) -> None:
    """Xid 79 while jobs run: the node is drained and each job requeued once; then it is repaired and resumed."""
    jobs = [node.cluster.sbatch("sleep 600", "-w", node.name) for _ in range(random.randrange(1, 3))]
    for job in jobs:
        node.cluster.wait_job(job, "RUNNING")
    time.sleep(1.1)  # wait, because Slurm's times have whole seconds, and the jobs must have started before the fault
    warnings = [node.xid(31) for _ in range(random.randrange(3))]
    part = node.xid(79)
    disturb(node, random)
    node.until_open("gpu_xid/79", part)
    node.until_drained()
    for job in jobs:
        node.cluster.wait_job(job, "PENDING", timeout=600)
        node.expected.requeued.add(job)
        node.until(lambda s: s["slurm"]["problem"] == "", "Slurm has no problem")
    disturb(node, random)
    node.cluster.run("scancel", *jobs, check=False)
    for code, parts in (("gpu_xid/31", warnings), ("gpu_xid/79", [part])):
        for warning_part in parts:
            node.until_open(code, warning_part)
            node.command("repaired", command="repaired", code=code, part=warning_part)
    disturb(node, random)
    node.until_resumed()


def warnings(node: Node, random: Random) -> None:
    """Kernel lines that only warn, each about another part. Some are repaired at once, the others at the next rest."""
    parts = [node.xid(31) for _ in range(random.randrange(1, 5))]
    disturb(node, random)
    for part in parts:
        node.until_open("gpu_xid/31", part)
        if random.random() < 0.5:
            node.command("repaired", command="repaired", code="gpu_xid/31", part=part)


def storm(node: Node, random: Random) -> None:
    """Thousands of lines about one fault at once, followed by another fault."""
    part = node.xid(31)
    for _ in range(random.randrange(1, 4)):
        node.repeat_fault(31, part, random.randrange(1000, 5000))
        last = node.xid(31)
        disturb(node, random)
    node.until_open("gpu_xid/31", part)
    node.until_open("gpu_xid/31", last)


def rotate_kernel_log(node: Node, random: Random) -> None:
    """Rotate the log as logrotate does: healthd reads the old file to its end, then the new one."""
    before = node.xid(31)
    time.sleep(random.uniform(0, 0.1))
    node.daemon.kernel_log.rename(node.daemon.kernel_log.with_suffix(".old"))
    node.daemon.kernel_log.touch()
    after = node.xid(31)
    node.until_open("gpu_xid/31", before)
    disturb(node, random)
    node.until_open("gpu_xid/31", after)


def hang_slurm(node: Node, random: Random) -> None:
    """slurmctld hangs when the node should be drained, and answers afterwards."""
    node.cluster.signal_slurmctld(signal.SIGSTOP)
    try:
        part = node.xid(79)
        node.until_open("gpu_xid/79", part)
        time.sleep(random.uniform(0, 8))  # its commands time out after MessageTimeout, which is 5 s
        disturb(node, random)
    finally:
        node.cluster.signal_slurmctld(signal.SIGCONT)
    node.until_drained()
    node.command("repaired", command="repaired", code="gpu_xid/79", part=part)
    node.until_resumed()


def lose_gpu(node: Node, random: Random) -> None:
    """NVML reports a lost GPU, and the node is drained. The GPU returns, but only `repaired` ends the condition."""
    number = random.randrange(len(GPUS))
    node.machine.gpus(f"[gpu.{number}]\nlost = true")
    node.expected.opened["gpu_access/lost", GPUS[number]] += 1
    node.until_open("gpu_access/lost", GPUS[number])
    disturb(node, random)
    node.until_drained()
    node.machine.gpus()
    disturb(node, random)
    node.until_cleared("gpu_count/fewer_than_expected", "")
    node.command("repaired", command="repaired", code="gpu_access/lost", part=GPUS[number])
    node.until_resumed()


def lose_persistence(node: Node, random: Random) -> None:
    number = random.randrange(len(GPUS))
    node.machine.gpus(f"[gpu.{number}]\npersistence = false")
    node.expected.opened["gpu_persistence/off", GPUS[number]] += 1
    node.until_open("gpu_persistence/off", GPUS[number])
    disturb(node, random)
    node.machine.gpus()
    node.until_cleared("gpu_persistence/off", GPUS[number])


def hang_driver(node: Node, random: Random) -> None:
    """Workers hang in NVML for one second per GPU. Another worker continues, and the driver recovers."""
    node.machine.gpus('hang = "nvmlDeviceGetPersistenceMode"\nhang_seconds = 1')
    node.until(lambda s: _outcome(s, "gpu_persistence") not in ("completed", None), "a worker hangs in NVML")
    disturb(node, random)
    node.machine.gpus()
    node.until(lambda s: _outcome(s, "gpu_persistence") == "completed", "NVML answers again")


def crash_driver(node: Node, random: Random) -> None:
    """Each worker that calls the driver crashes."""
    node.machine.gpus('crash = "nvmlDeviceGetPersistenceMode"')
    node.until(lambda s: _outcome(s, "gpu_persistence") not in ("completed", None), "a worker died in NVML")
    disturb(node, random)
    node.machine.gpus()
    node.until(lambda s: _outcome(s, "gpu_persistence") == "completed", "NVML answers again")


def _outcome(status: dict, check: str) -> str | None:
    return next((result["outcome"] for result in status["results"] if result["check"] == check), None)


def kill_worker(node: Node, random: Random) -> None:
    for _ in range(random.randrange(1, 4)):
        with contextlib.suppress(ProcessLookupError):
            node.kill_worker()
        time.sleep(random.uniform(0, 0.5))
    node.rounds(1)


def kill_daemon(node: Node, random: Random) -> None:
    """Kill the daemon. On the node whose daemon must not be killed, kill its worker instead."""
    if not node.is_killed:
        return kill_worker(node, random)
    for _ in range(random.randrange(1, 4)):
        node.kill()
        time.sleep(random.uniform(0, 0.8))


def stop_daemon(node: Node, random: Random) -> None:
    """Stop and start the daemon, as an upgrade does."""
    if not node.is_killed:
        return kill_worker(node, random)
    assert node.daemon.stop() == 0
    node.expected.expect_report("stopped")
    node.daemon.start()


def kill_during_command(node: Node, random: Random) -> None:
    """Kill the daemon during a pause request. The pause may begin once or never, and must end as often as it began."""
    if not node.is_killed:
        return pause(node, random)
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(node.daemon.run_dir / "healthd.sock"))
        stream.sendall(json.dumps({"command": "pause", "seconds": 1, "why": "of the soak"}).encode() + b"\n")
        time.sleep(random.uniform(0, 0.02))
        node.kill()
    node.expected.expect_report("pause begun", 0, 1)
    node.expected.expect_report("pause ended", 0, 1)
    node.until(lambda s: s["pause"] is None, "the pause is over")


def change_settings(node: Node, random: Random) -> None:
    node.configure(not node.has_site)
    disturb(node, random)
    for _ in range(random.randrange(5)):
        os.kill(node.daemon.process.pid, signal.SIGHUP)
    node.rounds(1)


def write_invalid_settings(node: Node, random: Random) -> None:
    node.write_config(CONFIG + random.choice(("interval_seconds = never", "[checks.gpu_xid]\nno_such = 1", "[")))
    assert "error" in node.daemon.request(command="reload")
    node.rounds(1)
    node.configure(node.has_site)


def scrapes(node: Node, random: Random) -> None:
    for number in range(random.randrange(1, 30)):
        headers = {} if number % 2 else {"Accept": "application/openmetrics-text", "Accept-Encoding": "gzip"}
        request = urllib.request.Request(growth.address(node.daemon), headers=headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            assert answer.status == 200
            assert answer.read()


def invalid_http_requests(node: Node, random: Random) -> None:
    """Metrics clients that send nonsense or nothing and stay connected. Then a real scrape must work."""
    host, _, port = growth.address(node.daemon).removeprefix("http://").partition("/")[0].partition(":")
    with contextlib.ExitStack() as clients:
        for _ in range(random.randrange(1, 30)):
            with contextlib.suppress(OSError):
                client = clients.enter_context(socket.create_connection((host, int(port)), timeout=60))
                client.sendall(random.choice(NO_REQUEST))
    for path in ("nothing", "-/healthy"):
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://{host}:{port}/{path}", timeout=600).close()
    scrapes(node, random)


def invalid_socket_requests(node: Node, random: Random) -> None:
    """Control clients that send invalid requests, leave before the answer, or stay silent.

    Then a real request must work.
    """
    path = str(node.daemon.run_dir / "healthd.sock")
    with contextlib.ExitStack() as clients:
        for _ in range(random.randrange(1, 60)):
            with contextlib.suppress(OSError):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.settimeout(60)
                client.connect(path)
                line, kind = random.choice(HOSTILE), random.random()
                client.sendall(line[: len(line) // 2] if kind < 0.5 else line + b"\n")
                if kind > 0.8:
                    assert b"error" in client.recv(1 << 16)
    node.daemon.status()


def run_commands(node: Node, random: Random) -> None:
    """Run `healthd status` and other commands, as people type them."""
    state = ["--state-dir", str(node.folder / "state")]
    run_dir = ["--runtime-dir", str(node.daemon.run_dir)]
    for command in random.sample((["status", *run_dir], ["hook", "epilog", *run_dir], ["explain", "gpu_xid/79"]), 2):
        argv = [sys.executable, "-m", "healthd", *command]
        done = subprocess.run(argv, env=node.daemon.env, capture_output=True, text=True, timeout=600)
        # exit status 3 means unknown: a check could not run at this moment, or the busy daemon did not answer in time
        assert done.returncode in (0, 1, 2, 3), (argv, state, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr


def acknowledge(node: Node, random: Random) -> None:
    """Acknowledge a warning, either for a long time until it is repaired, or briefly, so that it then counts again."""
    part, is_brief = node.xid(31), random.random() < 0.5
    node.until_open("gpu_xid/31", part)
    request = {"command": "ack", "code": "gpu_xid/31", "part": part, "why": "of the soak"}
    node.command("acknowledged", **request, seconds=1 if is_brief else 3600)
    disturb(node, random)
    if is_brief:
        node.until_open("gpu_xid/31", part)
    node.command("repaired", command="repaired", code="gpu_xid/31", part=part)


def pause(node: Node, random: Random) -> None:
    is_brief = random.random() < 0.5
    node.command("pause begun", command="pause", seconds=1 if is_brief else 3600, why="of the soak")
    disturb(node, random)
    if is_brief:
        node.expected.expect_report("pause ended")
    else:
        node.command("pause ended", command="unpause")
    node.until(lambda s: s["pause"] is None, "the pause is over")


def send_job_steps(node: Node, random: Random) -> None:
    """Ranks send their steps through healthd.client; some end without notice."""
    environment = {**node.daemon.env, "HEALTHD_SOCKET": str(node.daemon.run_dir / "failslow.sock")}
    with contextlib.ExitStack() as started:
        ranks = [started.enter_context(_rank(node, number, environment)) for number in range(random.randrange(1, 5))]
        for _ in range(random.randrange(10, 40)):
            for rank in ranks:
                rank.stdin.write("0.5\n")
                rank.stdin.flush()
            for rank in ranks:
                rank.stdout.readline()


@contextlib.contextmanager
def _rank(node: Node, number: int, environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    argv = [sys.executable, "-c", RANK, str(number)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as rank:
        try:
            process_folder = node.machine.root / f"proc/{int(rank.stdout.readline())}"
            (process_folder / "fd").mkdir(parents=True)
            (process_folder / "fd/7").symlink_to(f"/dev/nvidia{number}")
            (process_folder / "cgroup").write_text("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n")
            yield rank
        finally:
            rank.kill()


# These run another event at a random moment during an event.
def disturb(node: Node, random: Random) -> None:
    disturbance = random.choice((None, None, "kill", "kill", "worker", "hup", "status", "warning"))
    time.sleep(random.uniform(0, random.choice((0.01, 0.1, 0.6))))
    if disturbance == "kill" and node.is_killed:
        node.kill()
    elif disturbance in ("kill", "worker"):
        with contextlib.suppress(ProcessLookupError):
            node.kill_worker()
    elif disturbance == "hup":
        os.kill(node.daemon.process.pid, signal.SIGHUP)
    elif disturbance == "status":
        assert condition(node.daemon.status(), "no/such") is None
    elif disturbance == "warning":
        node.xid(31)


Action = Callable[[Node, Random], None]
DECK: tuple[Action, ...] = (
    draining_fault,
    warnings,
    storm,
    rotate_kernel_log,
    hang_slurm,
    lose_gpu,
    lose_persistence,
    hang_driver,
    crash_driver,
    kill_worker,
    kill_daemon,
    stop_daemon,
    kill_during_command,
    change_settings,
    write_invalid_settings,
    scrapes,
    invalid_http_requests,
    invalid_socket_requests,
    run_commands,
    acknowledge,
    pause,
    send_job_steps,
)
