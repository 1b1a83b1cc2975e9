"""Tests of `healthd validate`: a real measurement on the CPU, the saved results, and the refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from other_user import NOBODY, become, only_root
from trees import write
from waiting import until

from healthd.cli.validate import _alone, _save
from healthd.validation.document import Validation, parse, parse_history
from healthd.validation.run import has_waiter

ROOT = Path(__file__).parents[2]


def healthd(tmp_path: Path, *arguments: str, path: str = "/usr/bin:/bin", **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(tmp_path, *arguments), capture_output=True, text=True, timeout=300, env=environment(path), **more
    )


def command(tmp_path: Path, *arguments: str) -> list[str]:
    (tmp_path / "healthd.toml").touch()
    where = ("--state-dir", str(tmp_path / "state"), "--runtime-dir", str(tmp_path / "run"))
    settings = ("--config", str(tmp_path / "healthd.toml"), "--profile", "none", "--node-name", "n1")
    return [sys.executable, "-m", "healthd", "validate", *where, *settings, *arguments]


def environment(path: str) -> dict[str, str]:
    return {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": os.environ.get("PYTHONPYCACHEPREFIX", "")}


def tool(folder: Path, name: str, text: str) -> None:
    """Write a program that only its owner can change."""
    folder.mkdir(exist_ok=True, mode=0o755)
    (folder / name).write_text(f"#!{sys.executable} -I\n{text}")
    (folder / name).chmod(0o755)


def no_jobs(tmp_path: Path) -> str:
    write(tmp_path / "tree", {"/proc/sys/kernel/random/boot_id": "boot-1\n"})
    return str(tmp_path / "tree")


def test_a_matrix_product_on_the_cpu_is_measured_kept_and_compared(tmp_path):
    tree = no_jobs(tmp_path)
    for number in range(1, 5):
        done = healthd(tmp_path, "--only", "cpu", "--quick", "--seconds", "300", "--root", tree, "--json")
        assert done.returncode in (0, 1), done.stderr  # a busy machine makes the CPU slower than before
        told = json.loads(done.stdout)
        (result,) = told["results"]
        assert result["test"] == "cpu_gemm"
        assert result["value"] > 0
        assert (told["node"], told["boot_id"], told["why"], told["stopped_by"]) == ("n1", "boot-1", "manual", "")
        kept = (tmp_path / "state/validation.json").read_text()
        assert json.loads(kept) == told
        assert parse(kept).results[0].value == result["value"]
        values = parse_history((tmp_path / "state/validations.jsonl").read_text())
        assert 1 <= sum(map(len, values.values())) <= number
    assert (tmp_path / "run/validation.lock").read_text() == ""
    shown = healthd(tmp_path, "--show", "--json")
    assert (json.loads(shown.stdout), shown.returncode) == (told, done.returncode)


def test_where_nobody_validated_there_is_nothing_to_show(tmp_path):
    done = healthd(tmp_path, "--show")
    assert (done.returncode, done.stdout) == (3, "")
    assert "this node has no result yet" in done.stderr
    (tmp_path / "state").mkdir()
    (tmp_path / "state/validation.json").write_text("{}")
    done = healthd(tmp_path, "--show")
    assert (done.returncode, done.stdout) == (3, "")
    assert "validation.json: is not a validation" in done.stderr


def test_what_is_not_here_is_told_and_a_node_without_gpus_is_no_failure(tmp_path):
    done = healthd(tmp_path, "--quick", "--seconds", "300", "--root", no_jobs(tmp_path), path="/nowhere")
    assert done.returncode in (0, 1), done.stderr
    assert "cpu_gemm" in done.stdout
    assert "this node has no GPU, by sysfs" in done.stdout


GPU = {
    "/sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n",
    "/sys/bus/pci/devices/0000:1b:00.0/class": "0x030200\n",
    "/sys/bus/pci/devices/0000:1b:00.0/numa_node": "0\n",
}


def test_gpus_that_nothing_here_can_measure_are_not_looked_at(tmp_path):
    no_jobs(tmp_path)
    write(tmp_path / "tree", GPU)
    done = healthd(
        tmp_path,
        "--only",
        "memory,nccl,dcgm,cpu",
        "--quick",
        "--seconds",
        "300",
        "--json",
        "--root",
        str(tmp_path / "tree"),
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["verdict"]) == (3, "not_measured")  # the CPU result says nothing about the GPU
    message = {result["test"]: result["message"] for result in told["results"] if result["verdict"] == "not_measured"}
    assert "PyTorch" in message["memory"]
    assert "nccl: this node has only one GPU" in told["unmeasured"]
    assert message["dcgm"] == "there is no dcgmi"


# A Python with torch that answers as pytorch_program.py does, if it runs that program.
PYTHON = """
import json, os, sys
if "-c" not in sys.argv:
    assert os.path.basename(sys.argv[2]) == "pytorch_program.py", sys.argv
    assert "gemm" in json.loads(sys.argv[3])["families"]
    print(json.dumps({"test": "gemm_bf16", "part": "0000:1b:00.0", "value": 700.0}))
"""


def test_of_all_families_each_program_is_given_what_it_is_to_measure(tmp_path):
    no_jobs(tmp_path)
    write(tmp_path / "tree", GPU)
    tool(tmp_path / "bin", "python3", PYTHON)
    done = healthd(tmp_path, "--quick", "--json", "--root", str(tmp_path / "tree"), path=str(tmp_path / "bin"))
    told = {one["test"]: one for one in json.loads(done.stdout)["results"] if one["value"] is not None}
    assert set(told) == {"gemm_bf16", "cpu_gemm"}, done.stdout
    assert told["gemm_bf16"]["value"] == 700.0


def test_a_tool_on_the_path_is_run_and_its_failure_is_a_failure(tmp_path):
    tool(tmp_path / "bin", "dcgmi", "print('" + json.dumps(FAILING_DCGM) + "')\nraise SystemExit(226)\n")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = healthd(tmp_path, "--only", "dcgm", "--root", no_jobs(tmp_path), "--json", path=path)
    told = json.loads(done.stdout)
    assert (done.returncode, told["verdict"]) == (2, "failed"), done.stderr
    (result,) = told["results"]
    assert (result["test"], result["part"], result["source"]) == ("dcgm_memory", "DCGM 3", "DCGM 4.5.2")
    done = healthd(tmp_path, "--only", "dcgm", "--root", no_jobs(tmp_path), path=path)
    assert "dcgm_memory DCGM 3: memory is broken" in done.stdout


FAILING_DCGM = {
    "DCGM Diagnostic": {
        "test_categories": [
            {
                "category": "Hardware",
                "tests": [
                    {
                        "name": "memory",
                        "results": [
                            {
                                "entity_group": "GPU",
                                "entity_id": 3,
                                "status": "Fail",
                                "warnings": [{"warning": "memory is broken"}],
                            }
                        ],
                    }
                ],
            }
        ]
    },
    "metadata": {"version": "4.5.2"},
}


# Prints a recorded output; as a server it waits for its client first, as ib_write_bw does.
PRINTS = """
import socket, sys
if "-p" in sys.argv and sys.argv[-1] != "127.0.0.1":
    with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1]))) as listening:
        listening.accept()
elif "-p" in sys.argv:
    socket.create_connection(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1])), 60)
print(open({name!r}).read())
"""
RECORDED = ROOT / "tests/data/validation"


# A server that finds its port in use for the first `times` runs. `stranger`: another server listens on the port and
# gets the client.
TAKEN = """
import os, socket, sys
mark = {mark!r}
if sys.argv[-1] != "127.0.0.1" and len(os.listdir(mark)) < {times}:
    open(os.path.join(mark, str(os.getpid())), "w").close()
    if {stranger}:
        with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1]))) as listening:
            listening.accept()[0].send(b"no server")
    sys.exit("Couldn't listen to port" if {stranger} else "Unable to init the socket connection")
if {stranger} and sys.argv[-1] == "127.0.0.1":
    with socket.create_connection(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1])), 60) as stream:
        if stream.recv(9):
            sys.exit("Couldn't read remote address")
    print(open({name!r}).read())
    sys.exit()
"""


@pytest.mark.parametrize("stranger", [False, True])
@pytest.mark.parametrize(("times", "verdict"), [(0, "ok"), (1, "ok"), (2, "not_measured")])
def test_a_port_that_somebody_else_took_is_tried_once_more_and_then_named(tmp_path, times, verdict, stranger):
    no_jobs(tmp_path)
    write(tmp_path / "tree", {f"/sys/class/infiniband/mlx5_0/ports/1/{file}": text for file, text in PORT.items()})
    (tmp_path / "mark").mkdir()
    name = str(RECORDED / "perftest_loopback_8m.txt")
    taken = TAKEN.format(mark=str(tmp_path / "mark"), times=times, stranger=stranger, name=name)
    tool(tmp_path / "bin", "ib_write_bw", taken + PRINTS.format(name=name))
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = healthd(tmp_path, "--only", "ib", "--json", "--root", str(tmp_path / "tree"), path=path)
    (told,) = json.loads(done.stdout)["results"]
    assert (told["test"], told["part"], told["verdict"]) == ("ib_loopback", "mlx5_0/1", verdict), done.stdout
    assert len(os.listdir(tmp_path / "mark")) == times
    if verdict != "ok":
        words = (
            ("Couldn't read", "remote address")
            if stranger
            else ("ib_write_bw: ended with status 1; ", "; Unable to init")
        )
        assert told["message"].startswith(words[0])
        assert words[1] in told["message"]


def test_each_port_and_both_collectives_are_measured(tmp_path):
    no_jobs(tmp_path)
    more = {path.replace("1b", "43"): text for path, text in GPU.items()}
    ports = {f"/sys/class/infiniband/mlx5_{n}/ports/1/{file}": text for n in (0, 3) for file, text in PORT.items()}
    write(tmp_path / "tree", {**GPU, **more, **ports})
    for name, file in (
        ("all_reduce_perf", "nccl_all_reduce_a100_2021.txt"),
        ("sendrecv_perf", "nccl_cuda_error_2018.txt"),
        ("ib_write_bw", "perftest_loopback_8m.txt"),
    ):
        tool(tmp_path / "bin", name, PRINTS.format(name=str(RECORDED / file)))
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = healthd(tmp_path, "--only", "nccl,ib", "--json", "--root", str(tmp_path / "tree"), path=path)
    told = {(one["test"], one["part"]): one for one in json.loads(done.stdout)["results"]}
    assert set(told) == {
        ("nccl_all_reduce", ""),
        ("nccl_sendrecv", ""),
        *(("ib_loopback", f"mlx5_{n}/1") for n in (0, 3)),
    }
    assert (told["nccl_all_reduce", ""]["value"], told["nccl_sendrecv", ""]["verdict"]) == (235.26, "failed")
    port = told["ib_loopback", "mlx5_3/1"]
    assert (port["verdict"], port["against"], port["expected"]) == ("ok", "floor", 180.0)  # 0.9 of its rate
    assert done.returncode == 2


PORT = {"state": "4: ACTIVE\n", "rate": "200 Gb/sec (4X HDR)\n"}


def test_a_gpu_that_a_tool_does_not_see_is_not_passed_over(tmp_path):
    no_jobs(tmp_path)
    eight = (0x18, 0x38, 0x49, 0x59, 0x9B, 0xBB, 0xCA, 0xDA, 0xEA)
    more = {path.replace("1b", f"{bus:02x}"): text for bus in eight for path, text in GPU.items()}
    write(tmp_path / "tree", more)
    name = str(RECORDED / "nvbandwidth_v0.8_8xh20_memory.txt")
    tool(tmp_path / "bin", "nvbandwidth", PRINTS.format(name=name))
    path = f"{tmp_path / 'bin'}:/bin"
    done = healthd(tmp_path, "--only", "memory", "--json", "--root", str(tmp_path / "tree"), path=path)
    told = {one["part"]: one for one in json.loads(done.stdout)["results"]}
    assert len(told) == 9
    assert told["0000:ea:00.0"]["message"] == "nvbandwidth 0.8 does not see this GPU"
    assert {one["verdict"] for part, one in told.items() if part != "0000:ea:00.0"} == {"ok"}
    shown = healthd(tmp_path, "--show")
    assert "all measured results are good; 8 good, 1 not measured" in shown.stdout


def test_gpus_that_an_old_tool_only_numbers_are_named_by_their_addresses(tmp_path):
    no_jobs(tmp_path)
    eight = (0x18, 0x38, 0x49, 0x59, 0x9B, 0xBB, 0xCA, 0xDA)
    write(tmp_path / "tree", {p.replace("1b", f"{bus:02x}"): text for bus in eight for p, text in GPU.items()})
    tool(tmp_path / "bin", "nvbandwidth", PRINTS.format(name=str(RECORDED / "nvbandwidth_v0.2_8x4090.txt")))
    path = f"{tmp_path / 'bin'}:/bin"
    done = healthd(tmp_path, "--only", "pcie", "--json", "--root", str(tmp_path / "tree"), path=path)
    told = {(one["test"], one["part"]): one["value"] for one in json.loads(done.stdout)["results"]}
    assert told["pcie_h2d", "0000:49:00.0"] == 23.9
    assert len(told) == 16


def test_a_tool_that_others_may_write_is_not_run(tmp_path):
    tool(tmp_path / "bin", "dcgmi", f"open({str(tmp_path / 'was-run')!r}, 'w')")
    (tmp_path / "bin/dcgmi").chmod(0o777)
    done = healthd(tmp_path, "--only", "dcgm", "--root", no_jobs(tmp_path), "--json", path=f"{tmp_path / 'bin'}:/bin")
    assert not (tmp_path / "was-run").exists()
    assert done.returncode in (0, 3)


def test_a_tool_that_hangs_is_ended_and_told(tmp_path):
    tool(tmp_path / "bin", "dcgmi", "import time\ntime.sleep(600)")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = healthd(tmp_path, "--only", "dcgm", "--seconds", "8", "--root", no_jobs(tmp_path), "--json", path=path)
    told = json.loads(done.stdout)
    assert done.returncode == 3
    assert "did not end within" in told["results"][0]["message"]


def test_sigterm_ends_it_with_all_its_children_and_the_document_says_so(tmp_path):
    told = tmp_path / "pid"
    text = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(told)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(told)!r} + '.new', {str(told)!r})\ntime.sleep(600)"
    )
    tool(tmp_path / "bin", "dcgmi", text)
    arguments = command(tmp_path, "--only", "dcgm,cpu", "--root", no_jobs(tmp_path), "--json")
    ours = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    try:
        until(told.exists, "the tool runs")
        assert (tmp_path / "run/validation.lock").read_text() == f"{ours.pid}\n"
        ours.send_signal(signal.SIGTERM)
        out, _ = ours.communicate(timeout=120)
    finally:
        ours.kill()
        ours.wait(240)
    assert ours.returncode == 3
    document = json.loads(out)
    assert document["stopped_by"] == "a signal"
    assert {one["verdict"] for one in document["results"]} == {"not_measured"}
    until(lambda: not Path(f"/proc/{told.read_text()}").exists(), "it has ended")
    assert json.loads((tmp_path / "state/validation.json").read_text()) == document
    assert not (tmp_path / "state/validations.jsonl").exists()


def test_what_a_tool_put_into_a_session_of_its_own_is_ended_too(tmp_path):
    told = tmp_path / "pid"
    text = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        f"    open({str(told)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"    os.rename({str(told)!r} + '.new', {str(told)!r})\ntime.sleep(600)"
    )
    tool(tmp_path / "bin", "dcgmi", text)
    arguments = command(tmp_path, "--only", "dcgm", "--root", no_jobs(tmp_path))
    ours = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    try:
        until(told.exists, "the child of the tool runs")
        ours.send_signal(signal.SIGTERM)
        assert ours.wait(120) == 3
    finally:
        ours.kill()
        ours.wait(240)
    until(lambda: not Path(f"/proc/{told.read_text()}").exists(), "it has ended")


def test_what_a_tool_calls_failed_when_it_is_ended_is_no_failure(tmp_path):
    said = tmp_path / "said"
    text = (
        "import pathlib, time\n"
        f"print({json.dumps(FAILING_DCGM)!r}, flush=True)\npathlib.Path({str(said)!r}).touch()\ntime.sleep(600)"
    )
    tool(tmp_path / "bin", "dcgmi", text)
    arguments = command(tmp_path, "--only", "dcgm", "--root", no_jobs(tmp_path), "--json")
    ours = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    try:
        until(said.exists, "the tool has printed its result")
        ours.send_signal(signal.SIGTERM)
        out, _ = ours.communicate(timeout=120)
    finally:
        ours.kill()
        ours.wait(240)
    (result, *_) = json.loads(out)["results"]
    assert (result["verdict"], result["message"]) == ("not_measured", "was stopped: memory is broken")


def test_a_prolog_that_ends_it_and_waits_for_the_lock_is_told_as_a_job(tmp_path):
    tool(tmp_path / "bin", "dcgmi", "import time\ntime.sleep(600)")
    arguments = command(tmp_path, "--only", "dcgm", "--root", no_jobs(tmp_path), "--json")
    ours = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    lock = tmp_path / "run/validation.lock"
    waiter = None
    try:
        until(lambda: lock.exists() and lock.read_text() == f"{ours.pid}\n", "it runs")
        assert not has_waiter(str(lock))
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)"
        waiter = subprocess.Popen([sys.executable, "-I", "-c", code, str(lock)])
        until(lambda: has_waiter(str(lock)), "the prolog waits")
        ours.send_signal(signal.SIGTERM)
        out, _ = ours.communicate(timeout=120)
        assert waiter.wait(240) == 0
    finally:
        ours.kill()
        ours.wait(240)
        if waiter is not None:
            waiter.kill()
            waiter.wait(240)
    assert json.loads(out)["stopped_by"] == "a job"
    assert not has_waiter(str(lock))
    assert not has_waiter(str(tmp_path / "none"))


def test_one_validation_at_a_time(tmp_path):
    tool(tmp_path / "bin", "dcgmi", "import time\ntime.sleep(600)")
    arguments = command(tmp_path, "--only", "dcgm", "--root", no_jobs(tmp_path))
    first = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    lock = tmp_path / "run/validation.lock"
    try:
        until(lambda: lock.exists() and lock.read_text() == f"{first.pid}\n", "the first one runs")
        done = healthd(tmp_path, "--only", "cpu", "--root", no_jobs(tmp_path))
        assert (done.returncode, done.stdout) == (3, "")
        assert f"another validation runs on this node, process {first.pid}" in done.stderr
    finally:
        first.terminate()
        first.wait(240)
    # An old lock file with a pid that no process holds does not block a validation.
    lock.write_text("1\n")
    assert healthd(
        tmp_path, "--only", "cpu", "--quick", "--seconds", "300", "--root", no_jobs(tmp_path)
    ).returncode in (0, 1)


def test_it_refuses_beside_a_job_unless_forced(tmp_path):
    job = "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711"
    write(tmp_path / "tree", {f"{job}/cgroup.procs": "", f"{job}/step_0/cgroup.procs": "123\n"})
    tree = str(tmp_path / "tree")
    done = healthd(tmp_path, "--only", "cpu", "--root", tree)
    assert (done.returncode, done.stdout) == (3, "")
    assert "job 4711 runs on this node" in done.stderr
    assert not (tmp_path / "state").exists()
    assert healthd(tmp_path, "--only", "cpu", "--quick", "--seconds", "300", "--force", "--root", tree).returncode in (
        0,
        1,
    )


def test_a_job_that_comes_without_a_prolog_ends_it_before_the_next_tool(tmp_path):
    tree = no_jobs(tmp_path)
    step = Path(tree) / "sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711/step_0"
    text = f"import pathlib\nstep = pathlib.Path({str(step)!r})\nstep.mkdir(parents=True)\n"
    tool(tmp_path / "bin", "dcgmi", f"{text}(step / 'cgroup.procs').write_text('123\\n')\n")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = healthd(tmp_path, "--only", "dcgm,cpu", "--seconds", "300", "--root", tree, "--json", path=path)
    told = json.loads(done.stdout)
    assert (done.returncode, told["stopped_by"]) == (3, "a job")
    message = {one["test"]: one["message"] for one in told["results"]}
    assert message["cpu_gemm"] == "it was stopped by a job before this"
    assert not (tmp_path / "state/validations.jsonl").exists()


@pytest.mark.parametrize("left_mode", [None, 0o644])
def test_nobody_else_may_read_and_so_take_its_lock(tmp_path, left_mode):
    if left_mode is not None:
        (tmp_path / "run").mkdir(mode=0o755)
        (tmp_path / "run/validation.lock").touch()
        (tmp_path / "run/validation.lock").chmod(left_mode)
    with _alone(str(tmp_path / "run")):
        assert (tmp_path / "run/validation.lock").stat().st_mode & 0o777 == 0o600


def test_a_floor_of_a_test_that_there_is_not_is_told(tmp_path):
    arguments = command(tmp_path, "--only", "dcgm", "--root", no_jobs(tmp_path), "--json")
    floors = '[checks.validation.floors]\ngemm_bf17 = 600.0\ngemm_bf16 = 600.0\n"ib_loopback mlx5_0/1" = 350.0\n'
    (tmp_path / "healthd.toml").write_text(floors)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment("/usr/bin:/bin"))
    told = [words for words in json.loads(done.stdout)["unmeasured"] if words.startswith("floors")]
    assert told == ["floors: there is no test gemm_bf17; these floors are ignored"]


@only_root
def test_who_is_not_root_is_told_that_nothing_is_kept_nor_locked(tmp_path, capfd):
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "state").mkdir(mode=0o700)
    validation = Validation("n1", "", 0.0, 1.0, "manual", "", (), ())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            become(NOBODY)
            with _alone(str(tmp_path / "run")):
                _save(str(tmp_path / "state"), validation, {})
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    told = capfd.readouterr().err
    assert "not running as root: a job that starts does not end this validation" in told
    assert "the result is not saved" in told
    assert not [*(tmp_path / "state").iterdir(), *(tmp_path / "run").iterdir()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "gem"), 'unknown measurement "gem"'),
        (("--only", ""), 'unknown measurement ""'),
        (("--seconds", "0"), "--seconds must be"),
        (("--seconds", "nan"), "--seconds must be"),
        (("--seconds", ""), "--seconds must be"),
        (("--seconds", "99999999"), "--seconds must be"),
        (("--why", "fun"), "--why"),
    ],
)
def test_wrong_use_is_told_and_nothing_is_measured(tmp_path, arguments, message):
    done = healthd(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert message in done.stderr


def test_the_commands_help_and_the_daemon_load_nothing_of_it():
    code = (
        "import sys, healthd.agent.daemon, healthd.cli.run; from healthd.cli.main import main; main(['--help']); "
        "print([name for name in sys.modules if name.startswith('healthd.validation')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
