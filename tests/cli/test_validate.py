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


def run_validate(
    tmp_path: Path, *arguments: str, path: str = "/usr/bin:/bin", **options
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(tmp_path, *arguments), capture_output=True, text=True, timeout=300, env=environment(path), **options
    )


def command(tmp_path: Path, *arguments: str) -> list[str]:
    (tmp_path / "healthd.toml").touch()
    directories = ("--state-dir", str(tmp_path / "state"), "--runtime-dir", str(tmp_path / "run"))
    settings = ("--config", str(tmp_path / "healthd.toml"), "--profile", "none", "--node-name", "n1")
    return [sys.executable, "-m", "healthd", "validate", *directories, *settings, *arguments]


def environment(path: str) -> dict[str, str]:
    return {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": os.environ.get("PYTHONPYCACHEPREFIX", "")}


def write_tool(folder: Path, name: str, text: str) -> None:
    """Write a program that only its owner can change."""
    folder.mkdir(exist_ok=True, mode=0o755)
    (folder / name).write_text(f"#!{sys.executable} -I\n{text}")
    (folder / name).chmod(0o755)


def tree_without_jobs(tmp_path: Path) -> str:
    write(tmp_path / "tree", {"/proc/sys/kernel/random/boot_id": "boot-1\n"})
    return str(tmp_path / "tree")


def test_validate_measures_saves_and_compares_cpu(tmp_path):
    tree = tree_without_jobs(tmp_path)
    for number in range(1, 5):
        completed = run_validate(tmp_path, "--only", "cpu", "--quick", "--seconds", "300", "--root", tree, "--json")
        assert completed.returncode in (0, 1), completed.stderr  # a busy machine makes the CPU slower than before
        document = json.loads(completed.stdout)
        (result,) = document["results"]
        assert result["test"] == "cpu_gemm"
        assert result["value"] > 0
        assert (document["node"], document["boot_id"], document["why"], document["stopped_by"]) == (
            "n1",
            "boot-1",
            "manual",
            "",
        )
        saved = (tmp_path / "state/validation.json").read_text()
        assert json.loads(saved) == document
        assert parse(saved).results[0].value == result["value"]
        values = parse_history((tmp_path / "state/validations.jsonl").read_text())
        assert 1 <= sum(map(len, values.values())) <= number
    assert (tmp_path / "run/validation.lock").read_text() == ""
    printed = run_validate(tmp_path, "--show", "--json")
    assert (json.loads(printed.stdout), printed.returncode) == (document, completed.returncode)


def test_show_without_result_exits_3(tmp_path):
    result = run_validate(tmp_path, "--show")
    assert (result.returncode, result.stdout) == (3, "")
    assert "no result" in result.stderr
    assert "/state/validation.json" in result.stderr
    (tmp_path / "state").mkdir()
    (tmp_path / "state/validation.json").write_text("{}")
    result = run_validate(tmp_path, "--show")
    assert (result.returncode, result.stdout) == (3, "")
    assert "/state/validation.json: " in result.stderr


def test_validate_on_node_without_gpus_does_not_fail(tmp_path):
    result = run_validate(
        tmp_path, "--quick", "--seconds", "300", "--root", tree_without_jobs(tmp_path), path="/nowhere"
    )
    assert result.returncode in (0, 1), result.stderr
    assert "cpu_gemm" in result.stdout
    assert "no GPU in sysfs" in result.stdout


GPU_FILES = {
    "/sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n",
    "/sys/bus/pci/devices/0000:1b:00.0/class": "0x030200\n",
    "/sys/bus/pci/devices/0000:1b:00.0/numa_node": "0\n",
}


def test_gpus_without_measuring_tools_are_not_measured(tmp_path):
    tree_without_jobs(tmp_path)
    write(tmp_path / "tree", GPU_FILES)
    completed = run_validate(
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
    document = json.loads(completed.stdout)
    assert (completed.returncode, document["verdict"]) == (
        3,
        "not_measured",
    )  # the CPU result says nothing about the GPU
    message = {
        result["test"]: result["message"] for result in document["results"] if result["verdict"] == "not_measured"
    }
    assert "PyTorch" in message["memory"]
    assert any(reason.startswith("nccl: ") for reason in document["unmeasured"])
    assert "dcgmi" in message["dcgm"]


# A Python with torch that answers as pytorch_program.py does, if it runs that program.
FAKE_PYTHON = """
import json, os, sys
if "-c" not in sys.argv:
    assert os.path.basename(sys.argv[2]) == "pytorch_program.py", sys.argv
    assert "gemm" in json.loads(sys.argv[3])["families"]
    print(json.dumps({"test": "gemm_bf16", "part": "0000:1b:00.0", "value": 700.0}))
"""


def test_each_tool_measures_only_requested_families(tmp_path):
    tree_without_jobs(tmp_path)
    write(tmp_path / "tree", GPU_FILES)
    write_tool(tmp_path / "bin", "python3", FAKE_PYTHON)
    result = run_validate(tmp_path, "--quick", "--json", "--root", str(tmp_path / "tree"), path=str(tmp_path / "bin"))
    measured = {entry["test"]: entry for entry in json.loads(result.stdout)["results"] if entry["value"] is not None}
    assert set(measured) == {"gemm_bf16", "cpu_gemm"}, result.stdout
    assert measured["gemm_bf16"]["value"] == 700.0


def test_failure_of_tool_on_path_fails_validation(tmp_path):
    write_tool(tmp_path / "bin", "dcgmi", "print('" + json.dumps(FAILING_DCGM) + "')\nraise SystemExit(226)\n")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    completed = run_validate(tmp_path, "--only", "dcgm", "--root", tree_without_jobs(tmp_path), "--json", path=path)
    document = json.loads(completed.stdout)
    assert (completed.returncode, document["verdict"]) == (2, "failed"), completed.stderr
    (result,) = document["results"]
    assert (result["test"], result["part"], result["source"]) == ("dcgm_memory", "DCGM 3", "DCGM 4.5.2")
    completed = run_validate(tmp_path, "--only", "dcgm", "--root", tree_without_jobs(tmp_path), path=path)
    assert "dcgm_memory DCGM 3: " in completed.stdout


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
FAKE_TOOL = """
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
BUSY_PORT_TOOL = """
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
def test_busy_port_is_retried_once_and_then_reported(tmp_path, times, verdict, stranger):
    tree_without_jobs(tmp_path)
    write(
        tmp_path / "tree", {f"/sys/class/infiniband/mlx5_0/ports/1/{file}": text for file, text in PORT_FILES.items()}
    )
    (tmp_path / "mark").mkdir()
    name = str(RECORDED / "perftest_loopback_8m.txt")
    program = BUSY_PORT_TOOL.format(mark=str(tmp_path / "mark"), times=times, stranger=stranger, name=name)
    write_tool(tmp_path / "bin", "ib_write_bw", program + FAKE_TOOL.format(name=name))
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    result = run_validate(tmp_path, "--only", "ib", "--json", "--root", str(tmp_path / "tree"), path=path)
    (entry,) = json.loads(result.stdout)["results"]
    assert (entry["test"], entry["part"], entry["verdict"]) == ("ib_loopback", "mlx5_0/1", verdict), result.stdout
    assert len(os.listdir(tmp_path / "mark")) == times
    if verdict != "ok":
        expected = (
            ("Couldn't read", "remote address")
            if stranger
            else ("ib_write_bw: ended with status 1; ", "; Unable to init")
        )
        assert entry["message"].startswith(expected[0])
        assert expected[1] in entry["message"]


def test_each_port_and_both_collectives_are_measured(tmp_path):
    tree_without_jobs(tmp_path)
    second_gpu = {path.replace("1b", "43"): text for path, text in GPU_FILES.items()}
    ports = {
        f"/sys/class/infiniband/mlx5_{n}/ports/1/{file}": text for n in (0, 3) for file, text in PORT_FILES.items()
    }
    write(tmp_path / "tree", {**GPU_FILES, **second_gpu, **ports})
    for name, file in (
        ("all_reduce_perf", "nccl_all_reduce_a100_2021.txt"),
        ("sendrecv_perf", "nccl_cuda_error_2018.txt"),
        ("ib_write_bw", "perftest_loopback_8m.txt"),
    ):
        write_tool(tmp_path / "bin", name, FAKE_TOOL.format(name=str(RECORDED / file)))
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    result = run_validate(tmp_path, "--only", "nccl,ib", "--json", "--root", str(tmp_path / "tree"), path=path)
    entries = {(entry["test"], entry["part"]): entry for entry in json.loads(result.stdout)["results"]}
    assert set(entries) == {
        ("nccl_all_reduce", ""),
        ("nccl_sendrecv", ""),
        *(("ib_loopback", f"mlx5_{n}/1") for n in (0, 3)),
    }
    assert (entries["nccl_all_reduce", ""]["value"], entries["nccl_sendrecv", ""]["verdict"]) == (235.26, "failed")
    port = entries["ib_loopback", "mlx5_3/1"]
    assert (port["verdict"], port["against"], port["expected"]) == ("ok", "floor", 180.0)  # 0.9 of its rate
    assert result.returncode == 2


PORT_FILES = {"state": "4: ACTIVE\n", "rate": "200 Gb/sec (4X HDR)\n"}


def test_gpu_missing_in_tool_output_is_not_measured(tmp_path):
    tree_without_jobs(tmp_path)
    buses = (0x18, 0x38, 0x49, 0x59, 0x9B, 0xBB, 0xCA, 0xDA, 0xEA)
    gpu_files = {path.replace("1b", f"{bus:02x}"): text for bus in buses for path, text in GPU_FILES.items()}
    write(tmp_path / "tree", gpu_files)
    name = str(RECORDED / "nvbandwidth_v0.8_8xh20_memory.txt")
    write_tool(tmp_path / "bin", "nvbandwidth", FAKE_TOOL.format(name=name))
    path = f"{tmp_path / 'bin'}:/bin"
    result = run_validate(tmp_path, "--only", "memory", "--json", "--root", str(tmp_path / "tree"), path=path)
    entries = {entry["part"]: entry for entry in json.loads(result.stdout)["results"]}
    assert len(entries) == 9
    assert entries["0000:ea:00.0"]["verdict"] == "not_measured"
    assert "nvbandwidth 0.8" in entries["0000:ea:00.0"]["message"]
    assert {entry["verdict"] for part, entry in entries.items() if part != "0000:ea:00.0"} == {"ok"}
    printed = run_validate(tmp_path, "--show")
    assert "8 good, 1 not measured" in printed.stdout


def test_gpu_indexes_of_old_tool_become_addresses(tmp_path):
    tree_without_jobs(tmp_path)
    buses = (0x18, 0x38, 0x49, 0x59, 0x9B, 0xBB, 0xCA, 0xDA)
    write(tmp_path / "tree", {p.replace("1b", f"{bus:02x}"): text for bus in buses for p, text in GPU_FILES.items()})
    write_tool(tmp_path / "bin", "nvbandwidth", FAKE_TOOL.format(name=str(RECORDED / "nvbandwidth_v0.2_8x4090.txt")))
    path = f"{tmp_path / 'bin'}:/bin"
    result = run_validate(tmp_path, "--only", "pcie", "--json", "--root", str(tmp_path / "tree"), path=path)
    values = {(entry["test"], entry["part"]): entry["value"] for entry in json.loads(result.stdout)["results"]}
    assert values["pcie_h2d", "0000:49:00.0"] == 23.9
    assert len(values) == 16


def test_tool_writable_by_others_is_not_run(tmp_path):
    write_tool(tmp_path / "bin", "dcgmi", f"open({str(tmp_path / 'was-run')!r}, 'w')")
    (tmp_path / "bin/dcgmi").chmod(0o777)
    result = run_validate(
        tmp_path, "--only", "dcgm", "--root", tree_without_jobs(tmp_path), "--json", path=f"{tmp_path / 'bin'}:/bin"
    )
    assert not (tmp_path / "was-run").exists()
    assert result.returncode in (0, 3)


def test_hanging_tool_is_ended_and_reported(tmp_path):
    write_tool(tmp_path / "bin", "dcgmi", "import time\ntime.sleep(600)")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    result = run_validate(
        tmp_path, "--only", "dcgm", "--seconds", "8", "--root", tree_without_jobs(tmp_path), "--json", path=path
    )
    document = json.loads(result.stdout)
    assert result.returncode == 3
    assert "did not end" in document["results"][0]["message"]


def test_sigterm_ends_validation_and_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    text = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(pid_file)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(pid_file)!r} + '.new', {str(pid_file)!r})\ntime.sleep(600)"
    )
    write_tool(tmp_path / "bin", "dcgmi", text)
    arguments = command(tmp_path, "--only", "dcgm,cpu", "--root", tree_without_jobs(tmp_path), "--json")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    try:
        until(pid_file.exists, "the tool runs")
        assert (tmp_path / "run/validation.lock").read_text() == f"{process.pid}\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait(240)
    assert process.returncode == 3
    document = json.loads(out)
    assert document["stopped_by"] == "a signal"
    assert {entry["verdict"] for entry in document["results"]} == {"not_measured"}
    until(lambda: not Path(f"/proc/{pid_file.read_text()}").exists(), "it has ended")
    assert json.loads((tmp_path / "state/validation.json").read_text()) == document
    assert not (tmp_path / "state/validations.jsonl").exists()


def test_process_of_tool_in_own_session_is_ended(tmp_path):
    pid_file = tmp_path / "pid"
    text = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        f"    open({str(pid_file)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"    os.rename({str(pid_file)!r} + '.new', {str(pid_file)!r})\ntime.sleep(600)"
    )
    write_tool(tmp_path / "bin", "dcgmi", text)
    arguments = command(tmp_path, "--only", "dcgm", "--root", tree_without_jobs(tmp_path))
    process = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin")
    )
    try:
        until(pid_file.exists, "the child of the tool runs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 3
    finally:
        process.kill()
        process.wait(240)
    until(lambda: not Path(f"/proc/{pid_file.read_text()}").exists(), "it has ended")


def test_failure_of_stopped_tool_is_not_counted(tmp_path):
    marker = tmp_path / "said"
    text = (
        "import pathlib, time\n"
        f"print({json.dumps(FAILING_DCGM)!r}, flush=True)\npathlib.Path({str(marker)!r}).touch()\ntime.sleep(600)"
    )
    write_tool(tmp_path / "bin", "dcgmi", text)
    arguments = command(tmp_path, "--only", "dcgm", "--root", tree_without_jobs(tmp_path), "--json")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    try:
        until(marker.exists, "the tool has printed its result")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait(240)
    (result, *_) = json.loads(out)["results"]
    assert (result["verdict"], result["message"].partition(":")[0]) == ("not_measured", "was stopped")


def test_waiting_prolog_is_reported_as_stopped_by_job(tmp_path):
    write_tool(tmp_path / "bin", "dcgmi", "import time\ntime.sleep(600)")
    arguments = command(tmp_path, "--only", "dcgm", "--root", tree_without_jobs(tmp_path), "--json")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    lock = tmp_path / "run/validation.lock"
    waiter = None
    try:
        until(lambda: lock.exists() and lock.read_text() == f"{process.pid}\n", "it runs")
        assert not has_waiter(str(lock))
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)"
        waiter = subprocess.Popen([sys.executable, "-I", "-c", code, str(lock)])
        until(lambda: has_waiter(str(lock)), "the prolog waits")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
        assert waiter.wait(240) == 0
    finally:
        process.kill()
        process.wait(240)
        if waiter is not None:
            waiter.kill()
            waiter.wait(240)
    assert json.loads(out)["stopped_by"] == "a job"
    assert not has_waiter(str(lock))
    assert not has_waiter(str(tmp_path / "none"))


def test_second_validation_is_refused(tmp_path):
    write_tool(tmp_path / "bin", "dcgmi", "import time\ntime.sleep(600)")
    arguments = command(tmp_path, "--only", "dcgm", "--root", tree_without_jobs(tmp_path))
    first = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    lock = tmp_path / "run/validation.lock"
    try:
        until(lambda: lock.exists() and lock.read_text() == f"{first.pid}\n", "the first one runs")
        result = run_validate(tmp_path, "--only", "cpu", "--root", tree_without_jobs(tmp_path))
        assert (result.returncode, result.stdout) == (3, "")
        assert f"(process {first.pid})" in result.stderr
    finally:
        first.terminate()
        first.wait(240)
    # An old lock file with a pid that no process holds does not block a validation.
    lock.write_text("1\n")
    assert run_validate(
        tmp_path, "--only", "cpu", "--quick", "--seconds", "300", "--root", tree_without_jobs(tmp_path)
    ).returncode in (0, 1)


def test_validation_is_refused_during_job_unless_forced(tmp_path):
    job = "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711"
    write(tmp_path / "tree", {f"{job}/cgroup.procs": "", f"{job}/step_0/cgroup.procs": "123\n"})
    tree = str(tmp_path / "tree")
    result = run_validate(tmp_path, "--only", "cpu", "--root", tree)
    assert (result.returncode, result.stdout) == (3, "")
    assert "4711" in result.stderr
    assert not (tmp_path / "state").exists()
    assert run_validate(
        tmp_path, "--only", "cpu", "--quick", "--seconds", "300", "--force", "--root", tree
    ).returncode in (
        0,
        1,
    )


def test_job_without_prolog_stops_validation_before_next_tool(tmp_path):
    tree = tree_without_jobs(tmp_path)
    step = Path(tree) / "sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711/step_0"
    text = f"import pathlib\nstep = pathlib.Path({str(step)!r})\nstep.mkdir(parents=True)\n"
    write_tool(tmp_path / "bin", "dcgmi", f"{text}(step / 'cgroup.procs').write_text('123\\n')\n")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    result = run_validate(tmp_path, "--only", "dcgm,cpu", "--seconds", "300", "--root", tree, "--json", path=path)
    document = json.loads(result.stdout)
    assert (result.returncode, document["stopped_by"]) == (3, "a job")
    result_of = {entry["test"]: entry for entry in document["results"]}
    assert result_of["cpu_gemm"]["verdict"] == "not_measured"
    assert "stopped by a job" in result_of["cpu_gemm"]["message"]
    assert not (tmp_path / "state/validations.jsonl").exists()


@pytest.mark.parametrize("existing_mode", [None, 0o644])
def test_lock_file_is_private_so_other_users_cannot_lock_it(tmp_path, existing_mode):
    if existing_mode is not None:
        (tmp_path / "run").mkdir(mode=0o755)
        (tmp_path / "run/validation.lock").touch()
        (tmp_path / "run/validation.lock").chmod(existing_mode)
    with _alone(str(tmp_path / "run")):
        assert (tmp_path / "run/validation.lock").stat().st_mode & 0o777 == 0o600


def test_floor_of_unknown_test_is_reported(tmp_path):
    arguments = command(tmp_path, "--only", "dcgm", "--root", tree_without_jobs(tmp_path), "--json")
    floors = '[checks.validation.floors]\ngemm_bf17 = 600.0\ngemm_bf16 = 600.0\n"ib_loopback mlx5_0/1" = 350.0\n'
    (tmp_path / "healthd.toml").write_text(floors)
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment("/usr/bin:/bin"))
    messages = [message for message in json.loads(result.stdout)["unmeasured"] if message.startswith("floors")]
    (message,) = messages
    assert ("gemm_bf17" in message, "gemm_bf16" in message, "ib_loopback" in message) == (True, False, False)


@only_root
def test_other_user_is_warned_about_missing_save_and_lock(tmp_path, capfd):
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
    warnings = capfd.readouterr().err
    assert "as root" in warnings
    assert "not saved" in warnings
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
def test_wrong_use_exits_64_without_measuring(tmp_path, arguments, message):
    result = run_validate(tmp_path, *arguments)
    assert (result.returncode, result.stdout) == (64, "")
    assert message in result.stderr


def test_help_and_daemon_do_not_load_validation():
    code = (
        "import sys, healthd.agent.daemon, healthd.cli.run; from healthd.cli.main import main; main(['--help']); "
        "print([name for name in sys.modules if name.startswith('healthd.validation')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


# --- several nodes of an NVLink domain

MNDIAG = """
import sys
assert sys.argv[1] == "mndiag" and sys.argv[sys.argv.index("--hostList") + 1] == {hosts!r}, sys.argv
print(open({output!r}).read())
"""


def run_mndiag(tmp_path: Path, output: str, *arguments: str) -> tuple[int, dict]:
    text = MNDIAG.format(hosts="host-01;host-02;host-03", output=str(RECORDED / output))
    write_tool(tmp_path / "bin", "dcgmi", text)
    tree = tree_without_jobs(tmp_path)
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    result = run_validate(tmp_path, "--mndiag", "host-[01-03]", "--root", tree, "--json", *arguments, path=path)
    return result.returncode, json.loads(result.stdout)


@pytest.mark.parametrize(
    ("output", "status", "verdict"),
    [
        ("dcgm_mndiag_4.3_pass.json", 0, "ok"),
        ("dcgm_mndiag_4.3_fail.json", 2, "failed"),
        ("dcgm_mndiag_4.3_runtime_error.json", 3, "not_measured"),
        ("dcgm_3.1_pass.json.txt", 3, "not_measured"),
    ],
)
def test_mndiag_exit_status_is_that_of_the_verdict(tmp_path, output, status, verdict):
    returncode, document = run_mndiag(tmp_path, output)
    assert (returncode, document["verdict"]) == (status, verdict)
    assert document["hosts"] == ["host-01", "host-02", "host-03"]
    assert document["mndiag"]
    assert not (tmp_path / "state/validation.json").exists()


def test_mndiag_without_result_of_a_requested_host_is_not_ok(tmp_path):
    document = json.loads((RECORDED / "dcgm_mndiag_4.3_pass.json").read_text())
    (test,) = document["test_categories"][0]["tests"]
    test["results"] = [result for result in test["results"] if result["host_id"] != 2]
    path = tmp_path / "output.json"
    path.write_text(json.dumps(document))
    returncode, found = run_mndiag(tmp_path, str(path))
    assert (returncode, found["verdict"]) == (3, "not_measured")
    assert {row["part"]: row["verdict"] for row in found["mndiag"]}["host-03"] == "not_measured"


def test_mndiag_is_stopped_with_its_process_group(tmp_path):
    pid_file = tmp_path / "pid"
    text = (
        "import os, signal, subprocess, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pid_file)!r} + '.new', 'w').write(str(child.pid))\n"
        f"os.rename({str(pid_file)!r} + '.new', {str(pid_file)!r})\ntime.sleep(600)"
    )
    write_tool(tmp_path / "bin", "dcgmi", text)
    arguments = command(tmp_path, "--mndiag", "n1,n2", "--root", tree_without_jobs(tmp_path), "--json")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment(f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    try:
        until(pid_file.exists, "the tool runs")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait(240)
    assert process.returncode == 3
    assert json.loads(out)["mndiag"][0]["verdict"] == "not_measured"
    until(lambda: not Path(f"/proc/{pid_file.read_text()}").exists(), "it has ended")


@pytest.mark.parametrize(
    ("arguments", "nodes_of_job"),
    [
        (("--mndiag",), ""),
        (("--mndiag", "n1;n2"), ""),
        (("--mndiag", "n[1-2"), ""),
        (("--mndiag", "n[1-73]"), ""),
        (("--mndiag", "n[1-2]", "--seconds", "119"), ""),
        (("--mndiag", "n[1-3]"), "n[1-2]"),
        (("--nodes", "n[1-2]", "--mndiag", "n[1-2]"), ""),
    ],
)
def test_mndiag_rejects_unusable_hosts_and_times(tmp_path, arguments, nodes_of_job):
    variables = environment("/usr/bin:/bin") | ({"SLURM_JOB_NODELIST": nodes_of_job} if nodes_of_job else {})
    words = [*command(tmp_path, "--root", tree_without_jobs(tmp_path)), *arguments]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300, env=variables)
    assert (result.returncode, result.stdout) == (64, "")
    assert len(result.stderr.splitlines()) == 1


def test_mndiag_without_list_uses_nodes_of_the_job(tmp_path):
    variables = environment("/usr/bin:/bin") | {"SLURM_JOB_NODELIST": "n[1-2]"}
    words = command(tmp_path, "--mndiag", "--root", tree_without_jobs(tmp_path), "--json")
    result = subprocess.run(words, capture_output=True, text=True, timeout=300, env=variables)
    document = json.loads(result.stdout)
    assert (result.returncode, document["hosts"]) == (3, ["n1", "n2"])
    assert "dcgmi was not found" in document["mndiag"][0]["message"]
