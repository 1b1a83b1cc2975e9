"""A fault of one GPU requeues only the jobs on that GPU: with real Slurms whose GPUs are device files.

The GPUs of the fake machine are the eight of Slurm's node, in the same order. A job holds one by an open file with such
a path.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_versions
import waiting
from healthd_daemon import Healthd as Daemon
from healthd_daemon import xid_line
from msgspec.structs import replace
from slurm_cluster import SlurmCluster, start_job
from slurm_look import ACT, NodeController, condition, faulty, make_idle, wait_until_listed, with_every_slurm
from test_prolog_epilog import node_with_scripts

from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.agent.slurm.prolog_files import read_node_gpus
from healthd.common.model import Gpu, Inventory, PciDevice, Requeue, Severity, Verdict

BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
PCI = tuple(f"0000:{bus}:00.0" for bus in BUSES)
GPUS = tuple(Gpu(pci, i, f"GPU-{i}", minor=i) for i, pci in enumerate(PCI))
NODE = Inventory(GPUS, tuple(PciDevice(pci, "0x10de", "0x2330", "0x030200", "gpu") for pci in PCI))
BY_PART = replace(ACT, requeue=Requeue.PART)
# scontrol also reads the table of all nodes, because it shows the CPUs with the GPUs.
DETAIL_REQUESTS = {"REQUEST_JOB_INFO_SINGLE": 1, "REQUEST_FED_INFO": 1, "REQUEST_NODE_INFO": 1}
JOB_REQUESTS = {"REQUEST_JOB_INFO_SINGLE": 1, "REQUEST_PARTITION_INFO": 1, "REQUEST_FED_INFO": 1}
ROUND_REQUESTS = {"REQUEST_NODE_INFO_SINGLE": 1, "REQUEST_PARTITION_INFO": 1}


class ClusterWithShards(SlurmCluster):
    """Each GPU has four shards."""

    def _write_files(self) -> None:
        super()._write_files()
        conf, gres = self.directory / "slurm.conf", self.directory / "gres.conf"
        text = conf.read_text().replace("GresTypes=gpu", "GresTypes=gpu,shard")
        conf.write_text(text.replace("Gres=gpu:h100:8", "Gres=gpu:h100:8,shard:32"))
        gres.write_text(gres.read_text() + "".join(f"NodeName={name} Name=shard Count=32\n" for name in self.names))


class ReorderedCluster(SlurmCluster):
    """n1 has two types, the first on the upper devices. n2 has one type, listed from the last device to the first."""

    def _write_files(self) -> None:
        super()._write_files()
        conf, devices = self.directory / "slurm.conf", self.directory / "dev"
        conf.write_text(conf.read_text().replace("Gres=gpu:h100:8", "Gres=gpu:a:4,gpu:b:4", 1))
        lines = [
            *("AutoDetect=off", f"NodeName=n1 Name=gpu Type=a File={devices}/n1/nvidia[4-7]"),
            f"NodeName=n1 Name=gpu Type=b File={devices}/n1/nvidia[0-3]",
            *(f"NodeName=n2 Name=gpu Type=h100 File={devices}/n2/nvidia{i}" for i in range(7, -1, -1)),
        ]
        (self.directory / "gres.conf").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    with ClusterWithShards(nodes=2, version=getattr(request, "param", None)) as running:
        yield running


@pytest.fixture
def healthd(cluster: SlurmCluster, tmp_path: Path) -> Iterator[NodeController]:
    make_idle(cluster, "n1")
    (tmp_path / "jobs").mkdir()
    yield NodeController(cluster, "n1", BY_PART, gpus=read_node_gpus(NODE, GPUS, str(tmp_path), "/"))
    make_idle(cluster, "n1")


def fault(number: int, code: str = "gpu_xid/79", severity: Severity = Severity.CRITICAL) -> Verdict:
    now = time.time()
    return faulty(condition(severity, code, subject=PCI[number], critical_at=now), fault_time=now)


def start_on_node(healthd: NodeController, *options: str, script: str = "sleep 3000") -> str:
    return healthd.start_job(script, *options)


def write_prolog_gpus(folder: Path, job: str, gpu_numbers: str) -> None:
    (folder / "jobs" / str(int(job) % 1024)).write_text(f"{job} {gpu_numbers} \n")


def outcomes(cluster: SlurmCluster, *jobs: str) -> list[str]:
    records = [cluster.job(job) for job in jobs]
    return [REQUEUED if job["Restarts"] == "1" else job["JobState"] for job in records]


RUNS, REQUEUED = "RUNNING", "requeued"


def count_requests(healthd: NodeController, verdict: Verdict) -> dict[str, int]:
    before = Counter(healthd.cluster.sdiag_counts())
    assert healthd.reconcile_once(verdict).problem == ""
    spent = Counter(healthd.cluster.sdiag_counts()) - before
    other_requests = ("REQUEST_STATS_INFO", "REQUEST_COMPLETE", "REQUEST_STEP_COMPLETE")
    return {
        name: count
        for name, count in spent.items()
        if name.startswith("REQUEST") and not name.startswith(other_requests)
    }


def sum_counts(*parts: dict[str, int], **more: int) -> dict[str, int]:
    return dict(sum(map(Counter, parts), Counter(more)))


@with_every_slurm
def test_part_requeues_only_job_on_faulty_gpu(healthd: NodeController) -> None:
    """Includes the number of requests to slurmctld without a record of the prolog."""
    first, second = start_on_node(healthd, "--gres=gpu:1"), start_on_node(healthd, "--gres=gpu:2")
    time.sleep(1.1)
    healthd.reconcile_once(fault(0, severity=Severity.DEGRADED))
    victim = sum_counts(JOB_REQUESTS, JOB_REQUESTS, REQUEST_UPDATE_JOB=1, REQUEST_JOB_REQUEUE=1)
    assert count_requests(healthd, fault(0)) == sum_counts(
        ROUND_REQUESTS, victim, JOB_REQUESTS, DETAIL_REQUESTS, DETAIL_REQUESTS
    )
    assert outcomes(healthd.cluster, first, second) == [REQUEUED, RUNS]
    report = healthd.reconcile_until_settled(fault(0))  # a slurmstepd that is ending causes a short error
    assert report.not_requeued == ((second, f"has GPUs {PCI[1]}, {PCI[2]}, which the fault did not hit"),)
    assert count_requests(healthd, fault(0)) == ROUND_REQUESTS, "the spared run is not queried again"
    assert healthd.cluster.admin_comment(second) == ""

    later = faulty(*fault(0).causes, *fault(2).causes)  # another GPU of the second job
    assert healthd.reconcile_once(later).requeued == (second,)
    assert outcomes(healthd.cluster, second) == [REQUEUED]
    assert PCI[2] in healthd.cluster.admin_comment(second), "the comment names the fault of its own GPU"


@with_every_slurm
def test_part_uses_gpus_recorded_by_prolog_without_request(healthd: NodeController, tmp_path: Path) -> None:
    first, second = start_on_node(healthd, "--gres=gpu:1"), start_on_node(healthd, "--gres=gpu:1")
    write_prolog_gpus(tmp_path, first, "0")
    write_prolog_gpus(tmp_path, second, "1")
    time.sleep(1.1)
    healthd.reconcile_once(fault(1, severity=Severity.DEGRADED))
    victim = sum_counts(JOB_REQUESTS, JOB_REQUESTS, REQUEST_UPDATE_JOB=1, REQUEST_JOB_REQUEUE=1)
    assert count_requests(healthd, fault(1)) == sum_counts(ROUND_REQUESTS, victim, JOB_REQUESTS)
    assert outcomes(healthd.cluster, first, second) == [RUNS, REQUEUED]


@with_every_slurm
def test_fault_of_all_gpus_hits_gpu_jobs_and_fault_of_node_hits_all_jobs(healthd: NodeController) -> None:
    with_gpu, shard, without = (
        start_on_node(healthd, "--gres=gpu:1"),
        start_on_node(healthd, "--gres=shard:1"),
        start_on_node(healthd),
    )
    time.sleep(1.1)
    report = healthd.reconcile_once(faulty(condition(code="sxid/20034", subject="0000:07:00.0")))
    assert set(report.requeued) == {with_gpu, shard}
    assert report.not_requeued == ((without, "has no GPU"),)
    assert outcomes(healthd.cluster, without) == [RUNS]
    assert healthd.reconcile_once(faulty(condition(code="memory_edac/uncorrected", subject="mc0"))).requeued == (
        without,
    )


@with_every_slurm
def test_part_counts_shard_as_job_on_its_gpu(healthd: NodeController) -> None:
    whole, shard = start_on_node(healthd, "--gres=gpu:2"), start_on_node(healthd, "--gres=shard:2")
    time.sleep(1.1)
    assert healthd.reconcile_once(fault(0)).requeued == (whole,)
    report = healthd.reconcile_once(fault(0))
    (gpu_number,) = (
        i for i, pci in enumerate(PCI) if (shard, f"has GPU {pci}, which the fault did not hit") in report.not_requeued
    )
    assert gpu_number >= 2
    assert healthd.reconcile_once(fault(gpu_number)).requeued == (shard,)


@with_every_slurm
def test_part_handles_arrays_and_multi_node_jobs_by_gpu_on_this_node(healthd: NodeController) -> None:
    cluster = healthd.cluster
    elsewhere = cluster.sbatch("sleep 3000", "-w", "n2", "-n1", "--gres=gpu:3")
    two_node_job = cluster.sbatch("srun sleep 3000", "-N2", "-n2", "--ntasks-per-node=1", "--gres=gpu:1")
    cluster.wait_job(elsewhere, "RUNNING")
    cluster.wait_job(two_node_job, "RUNNING")
    array = cluster.sbatch("sleep 3000", "-w", "n1", "-n1", "--gres=gpu:1", "--array=0-1")
    tasks = [f"{array}_{i}" for i in range(2)]
    for task in tasks:
        cluster.wait_job(task, "RUNNING")
    job_ids = [cluster.job(task)["JobId"] for task in tasks]
    for job in (two_node_job, *job_ids):
        wait_until_listed(cluster, job, "n1")
    gpu_numbers = {job: gpu_number(cluster, job) for job in (two_node_job, *job_ids)}
    assert len(set(gpu_numbers.values())) == 3, "each has its own GPU on this node"
    time.sleep(1.1)
    assert healthd.reconcile_once(fault(gpu_numbers[job_ids[0]])).requeued == (tasks[0],)
    assert outcomes(cluster, two_node_job, tasks[1]) == [RUNS, RUNS]
    assert healthd.reconcile_once(fault(gpu_numbers[two_node_job])).requeued == (two_node_job,)
    assert outcomes(cluster, tasks[1]) == [RUNS]
    cluster.run("scancel", elsewhere, two_node_job, array)


@with_every_slurm
def test_part_of_heterogeneous_job_on_faulty_gpu_requeues_whole_job(healthd: NodeController) -> None:
    cluster = healthd.cluster
    with_gpu = ("-n1", "--gres=gpu:1")
    leader = cluster.sbatch("srun --het-group=0,1 sleep 3000", "-wn2", *with_gpu, ":", "-wn1", *with_gpu)
    cluster.wait_job(leader, "RUNNING")
    second = wait_until_listed(cluster, str(int(leader) + 1), "n1")
    other = start_on_node(healthd, "--gres=gpu:1")
    gpu_numbers = {job: gpu_number(cluster, job) for job in (second, other)}
    time.sleep(1.1)
    (unused_gpu, *_) = {*range(8)} - {*gpu_numbers.values()}
    assert dict(healthd.reconcile_once(fault(unused_gpu)).not_requeued).keys() == {leader, other}
    report = healthd.reconcile_once(fault(gpu_numbers[second]))
    assert (report.requeued, dict(report.not_requeued).keys()) == ((leader,), {other})
    assert outcomes(cluster, leader, other) == [REQUEUED, RUNS]
    cluster.run("scancel", leader)


def gpu_number(cluster: SlurmCluster, job: str) -> int:
    """Return the number of the only GPU of the job on n1."""
    lines = cluster.run("scontrol", "-d", "-o", "show", "job", job).splitlines()
    (record,) = (line for line in lines if line.startswith(f"JobId={job} "))
    return int(record.partition(" Nodes=n1 ")[2].partition("(IDX:")[2].partition(")")[0])


@pytest.mark.parametrize(
    ("inventory", "reason"),
    [
        (NODE, "the configured and the real number of GPUs differ"),
        (replace(NODE, gpus=tuple(replace(g, minor=7 - g.index) for g in GPUS)), "order"),
    ],
    ids=["number", "order"],
)
def test_ambiguous_gpu_numbers_hit_all_gpu_jobs(healthd: NodeController, inventory: Inventory, reason: str) -> None:
    if inventory is NODE:
        inventory = replace(NODE, gpus=GPUS[:7])
    healthd.gpus = NodeGpus(inventory, inventory.gpus, find_open=lambda processes: ({}, False))
    first, second = start_on_node(healthd, "--gres=gpu:1"), start_on_node(healthd, "--gres=gpu:1")
    time.sleep(1.1)
    assert set(healthd.reconcile_once(fault(0)).requeued) == {first, second}, reason


@pytest.mark.parametrize("version", [None, *slurm_versions.DEBIAN])
def test_gres_conf_in_other_order_spares_no_gpu_job(tmp_path: Path, version: str | None) -> None:
    with ReorderedCluster(nodes=2, version=version) as cluster:
        for name, faulty_gpu, gres in (("n1", 4, ("gpu:a:1", "gpu:b:1")), ("n2", 7, ("gpu:1", "gpu:1"))):
            healthd = NodeController(cluster, name, BY_PART, gpus=read_node_gpus(NODE, GPUS, str(tmp_path), "/"))
            without = start_on_node(healthd)
            jobs = [start_on_node(healthd, f"--gres={gres_option}") for gres_option in gres]
            time.sleep(1.1)
            report = healthd.reconcile_once(
                fault(faulty_gpu)
            )  # the device of the first job, whose number in Slurm is 0
            assert set(report.requeued) == set(jobs), cluster.run("scontrol", "-d", "show", "job", jobs[0])
            assert report.not_requeued == ((without, "has no GPU"),)


def test_job_opening_gpu_later_is_hit(healthd: NodeController, tmp_path: Path, cluster: SlurmCluster) -> None:
    (tmp_path / "dev").mkdir()
    device, go_file = tmp_path / "dev" / "nvidia5", tmp_path / "go"
    device.touch()
    script = f"while ! [ -e {go_file} ]; do sleep 0.1; done; exec 9< {device}; echo > {go_file}.done; sleep 3000"
    without, on_another = start_on_node(healthd, script=script), start_on_node(healthd, "--gres=gpu:1")
    time.sleep(1.1)
    verdict = fault(5)
    assert dict(healthd.reconcile_once(verdict).not_requeued)[without] == "has no GPU"
    go_file.touch()
    waiting.until(Path(f"{go_file}.done").exists, "the job has opened the GPU")
    report = healthd.reconcile_once(verdict)
    assert report.requeued == (without,)
    assert outcomes(cluster, without, on_another) == [REQUEUED, RUNS]


def test_requeue_node_hits_all_jobs(healthd: NodeController) -> None:
    healthd.policy = ACT
    first, without = start_on_node(healthd, "--gres=gpu:1"), start_on_node(healthd)
    time.sleep(1.1)
    assert set(healthd.reconcile_once(fault(5)).requeued) == {first, without}


def test_jobs_recorded_with_kernel_line_are_hit(healthd: NodeController) -> None:
    first, second = start_on_node(healthd, "--gres=gpu:1"), start_on_node(healthd, "--gres=gpu:1")
    time.sleep(1.1)
    now = time.time()
    cause = condition(subject=PCI[7], critical_at=now, job=f"{second},99")
    assert healthd.reconcile_once(faulty(cause, fault_time=now)).requeued == (second,)
    assert outcomes(healthd.cluster, first) == [RUNS]


@pytest.mark.parametrize("version", [None, "24.11", "26.05"])
def test_daemon_keeps_gpus_recorded_by_prolog_and_reports_spared_jobs(tmp_path: Path, version: str | None) -> None:
    with node_with_scripts(tmp_path, [], ["PrologFlags=Alloc"], version) as node, node.daemon(interval="2") as daemon:
        jobs = [start_job(node.cluster, "n1", "--gres=gpu:1") for _ in range(2)]
        for number, job in enumerate(jobs):
            record = (daemon.run_dir / "jobs" / job).read_text().split()
            assert record[:2] == [job, str(number)]
            wait_until_listed(node.cluster, job, "n1")
        daemon.kill()
        daemon.start()
        tables = node.cluster.sdiag_counts().get("REQUEST_NODE_INFO", 0)
        daemon.kernel_line(xid_line(79, pci="0000:43:00"))
        node.cluster.wait_job(jobs[1], "PENDING")
        wait_for_decision(daemon, lambda text: f"job {jobs[0]}: has GPU {PCI[0]}" in text)
        assert outcomes(node.cluster, *jobs) == [RUNS, REQUEUED]
        status = daemon.status()
        assert status["decision"]["not_requeued"] == [
            {"job": jobs[0], "why": f"has GPU {PCI[0]}, which the fault did not hit"}
        ]
        table_reads = node.cluster.sdiag_counts()["REQUEST_NODE_INFO"] - tables
        assert table_reads == 2, "the fleet was counted twice; no `scontrol -d` ran for a job"
        log = daemon.log.read_text()
        assert log.count(f"job {jobs[0]} is not requeued: has GPU") == 1, "logged once, not in each round"


def wait_for_decision(daemon: Daemon, is_reached: Callable[[str], bool]) -> None:
    daemon.wait_until(lambda s: is_reached(s["decision"]["text"]), "the text of the decision")
