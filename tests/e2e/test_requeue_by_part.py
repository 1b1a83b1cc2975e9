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
from healthd_daemon import xid
from msgspec.structs import replace
from slurm_cluster import SlurmCluster, running_job
from slurm_look import ACT, Healthd, condition, every_slurm, faulty, make_idle, until_listed
from test_prolog_epilog import made

from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.agent.slurm.prolog_files import read_node_gpus
from healthd.common.model import Gpu, Inventory, PciDevice, Requeue, Severity, Verdict

BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
PCI = tuple(f"0000:{bus}:00.0" for bus in BUSES)
GPUS = tuple(Gpu(pci, i, f"GPU-{i}", minor=i) for i, pci in enumerate(PCI))
NODE = Inventory(GPUS, tuple(PciDevice(pci, "0x10de", "0x2330", "0x030200", "gpu") for pci in PCI))
BY_PART = replace(ACT, requeue=Requeue.PART)
# scontrol also reads the table of all nodes, because it shows the CPUs with the GPUs.
ASKED = {"REQUEST_JOB_INFO_SINGLE": 1, "REQUEST_FED_INFO": 1, "REQUEST_NODE_INFO": 1}
JOB = {"REQUEST_JOB_INFO_SINGLE": 1, "REQUEST_PARTITION_INFO": 1, "REQUEST_FED_INFO": 1}
LOOK = {"REQUEST_NODE_INFO_SINGLE": 1, "REQUEST_PARTITION_INFO": 1}


class WithShards(SlurmCluster):
    """Each GPU has four shards."""

    def _write_files(self) -> None:
        super()._write_files()
        conf, gres = self.directory / "slurm.conf", self.directory / "gres.conf"
        text = conf.read_text().replace("GresTypes=gpu", "GresTypes=gpu,shard")
        conf.write_text(text.replace("Gres=gpu:h100:8", "Gres=gpu:h100:8,shard:32"))
        gres.write_text(gres.read_text() + "".join(f"NodeName={name} Name=shard Count=32\n" for name in self.names))


class InOtherOrders(SlurmCluster):
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
    with WithShards(nodes=2, version=getattr(request, "param", None)) as running:
        yield running


@pytest.fixture
def healthd(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Healthd]:
    make_idle(cluster, "n1")
    (tmp_path / "jobs").mkdir()
    yield Healthd(cluster, "n1", BY_PART, gpus=read_node_gpus(NODE, GPUS, str(tmp_path), "/"))
    make_idle(cluster, "n1")


def fault(number: int, code: str = "gpu_xid/79", severity: Severity = Severity.CRITICAL) -> Verdict:
    now = time.time()
    return faulty(condition(severity, code, subject=PCI[number], critical_at=now), fault_time=now)


def on(healthd: Healthd, *options: str, script: str = "sleep 3000") -> str:
    return healthd.running(script, *options)


def prolog_tells(folder: Path, job: str, numbers: str) -> None:
    (folder / "jobs" / str(int(job) % 1024)).write_text(f"{job} {numbers} \n")


def fate(cluster: SlurmCluster, *jobs: str) -> list[str]:
    found = [cluster.job(job) for job in jobs]
    return [REQUEUED if job["Restarts"] == "1" else job["JobState"] for job in found]


RUNS, REQUEUED = "RUNNING", "requeued"


def costs(healthd: Healthd, verdict: Verdict) -> dict[str, int]:
    before = Counter(healthd.cluster.sdiag_counts())
    assert healthd.look(verdict).problem == ""
    spent = Counter(healthd.cluster.sdiag_counts()) - before
    others = ("REQUEST_STATS_INFO", "REQUEST_COMPLETE", "REQUEST_STEP_COMPLETE")
    return {name: n for name, n in spent.items() if name.startswith("REQUEST") and not name.startswith(others)}


def total(*parts: dict[str, int], **more: int) -> dict[str, int]:
    return dict(sum(map(Counter, parts), Counter(more)))


@every_slurm
def test_of_two_jobs_side_by_side_the_one_on_the_bad_gpu_is_requeued_and_the_other_runs_on(healthd: Healthd) -> None:
    """Includes the number of requests to slurmctld without a record of the prolog."""
    first, second = on(healthd, "--gres=gpu:1"), on(healthd, "--gres=gpu:2")
    time.sleep(1.1)
    healthd.look(fault(0, severity=Severity.DEGRADED))
    victim = total(JOB, JOB, REQUEST_UPDATE_JOB=1, REQUEST_JOB_REQUEUE=1)
    assert costs(healthd, fault(0)) == total(LOOK, victim, JOB, ASKED, ASKED)
    assert fate(healthd.cluster, first, second) == [REQUEUED, RUNS]
    report = healthd.look_until_settled(fault(0))  # a slurmstepd that is ending causes a short error
    assert report.not_requeued == ((second, f"has GPUs {PCI[1]}, {PCI[2]}, which the fault did not hit"),)
    assert costs(healthd, fault(0)) == LOOK, "the spared run is not queried again"
    assert healthd.cluster.admin_comment(second) == ""

    later = faulty(*fault(0).causes, *fault(2).causes)  # another GPU of the second job
    assert healthd.look(later).requeued == (second,)
    assert fate(healthd.cluster, second) == [REQUEUED]
    assert PCI[2] in healthd.cluster.admin_comment(second), "the comment names the fault of its own GPU"


@every_slurm
def test_what_the_prolog_wrote_down_costs_no_request(healthd: Healthd, tmp_path: Path) -> None:
    first, second = on(healthd, "--gres=gpu:1"), on(healthd, "--gres=gpu:1")
    prolog_tells(tmp_path, first, "0")
    prolog_tells(tmp_path, second, "1")
    time.sleep(1.1)
    healthd.look(fault(1, severity=Severity.DEGRADED))
    victim = total(JOB, JOB, REQUEST_UPDATE_JOB=1, REQUEST_JOB_REQUEUE=1)
    assert costs(healthd, fault(1)) == total(LOOK, victim, JOB)
    assert fate(healthd.cluster, first, second) == [RUNS, REQUEUED]


@every_slurm
def test_all_jobs_on_gpus_or_all_jobs_are_hit_by_a_fault_of_all(healthd: Healthd) -> None:
    with_gpu, shard, without = on(healthd, "--gres=gpu:1"), on(healthd, "--gres=shard:1"), on(healthd)
    time.sleep(1.1)
    report = healthd.look(faulty(condition(code="sxid/20034", subject="0000:07:00.0")))
    assert set(report.requeued) == {with_gpu, shard}
    assert report.not_requeued == ((without, "has no GPU"),)
    assert fate(healthd.cluster, without) == [RUNS]
    assert healthd.look(faulty(condition(code="memory_edac/uncorrected", subject="mc0"))).requeued == (without,)


@every_slurm
def test_a_shard_is_on_its_gpu(healthd: Healthd) -> None:
    whole, shard = on(healthd, "--gres=gpu:2"), on(healthd, "--gres=shard:2")
    time.sleep(1.1)
    assert healthd.look(fault(0)).requeued == (whole,)
    report = healthd.look(fault(0))
    (number,) = (
        i for i, pci in enumerate(PCI) if (shard, f"has GPU {pci}, which the fault did not hit") in report.not_requeued
    )
    assert number >= 2
    assert healthd.look(fault(number)).requeued == (shard,)


@every_slurm
def test_of_arrays_and_of_jobs_over_nodes_the_part_on_this_nodes_gpu_counts(healthd: Healthd) -> None:
    cluster = healthd.cluster
    elsewhere = cluster.sbatch("sleep 3000", "-w", "n2", "-n1", "--gres=gpu:3")
    wide = cluster.sbatch("srun sleep 3000", "-N2", "-n2", "--ntasks-per-node=1", "--gres=gpu:1")
    cluster.wait_job(elsewhere, "RUNNING")
    cluster.wait_job(wide, "RUNNING")
    array = cluster.sbatch("sleep 3000", "-w", "n1", "-n1", "--gres=gpu:1", "--array=0-1")
    tasks = [f"{array}_{i}" for i in range(2)]
    for task in tasks:
        cluster.wait_job(task, "RUNNING")
    raw = [cluster.job(task)["JobId"] for task in tasks]
    for job in (wide, *raw):
        until_listed(cluster, job, "n1")
    numbers = {job: given(cluster, job) for job in (wide, *raw)}
    assert len(set(numbers.values())) == 3, "each has its own GPU on this node"
    time.sleep(1.1)
    assert healthd.look(fault(numbers[raw[0]])).requeued == (tasks[0],)
    assert fate(cluster, wide, tasks[1]) == [RUNS, RUNS]
    assert healthd.look(fault(numbers[wide])).requeued == (wide,)
    assert fate(cluster, tasks[1]) == [RUNS]
    cluster.run("scancel", elsewhere, wide, array)


@every_slurm
def test_of_a_heterogeneous_job_the_part_on_this_nodes_gpu_counts_and_the_whole_is_requeued(healthd: Healthd) -> None:
    cluster = healthd.cluster
    with_gpu = ("-n1", "--gres=gpu:1")
    leader = cluster.sbatch("srun --het-group=0,1 sleep 3000", "-wn2", *with_gpu, ":", "-wn1", *with_gpu)
    cluster.wait_job(leader, "RUNNING")
    second = until_listed(cluster, str(int(leader) + 1), "n1")
    other = on(healthd, "--gres=gpu:1")
    numbers = {job: given(cluster, job) for job in (second, other)}
    time.sleep(1.1)
    (free, *_) = {*range(8)} - {*numbers.values()}
    assert dict(healthd.look(fault(free)).not_requeued).keys() == {leader, other}
    report = healthd.look(fault(numbers[second]))
    assert (report.requeued, dict(report.not_requeued).keys()) == ((leader,), {other})
    assert fate(cluster, leader, other) == [REQUEUED, RUNS]
    cluster.run("scancel", leader)


def given(cluster: SlurmCluster, job: str) -> int:
    """Return the number of the only GPU of the job on n1."""
    lines = cluster.run("scontrol", "-d", "-o", "show", "job", job).splitlines()
    (record,) = (line for line in lines if line.startswith(f"JobId={job} "))
    return int(record.partition(" Nodes=n1 ")[2].partition("(IDX:")[2].partition(")")[0])


@pytest.mark.parametrize(
    ("inventory", "why"),
    [
        (NODE, "the configured and the real number of GPUs differ"),
        (replace(NODE, gpus=tuple(replace(g, minor=7 - g.index) for g in GPUS)), "order"),
    ],
    ids=["number", "order"],
)
def test_where_slurms_numbers_can_mean_other_gpus_all_jobs_with_gpus_are_hit(
    healthd: Healthd, inventory: Inventory, why: str
) -> None:
    if inventory is NODE:
        inventory = replace(NODE, gpus=GPUS[:7])
    healthd.gpus = NodeGpus(inventory, inventory.gpus, find_open=lambda processes: ({}, False))
    first, second = on(healthd, "--gres=gpu:1"), on(healthd, "--gres=gpu:1")
    time.sleep(1.1)
    assert set(healthd.look(fault(0)).requeued) == {first, second}, why


@pytest.mark.parametrize("version", [None, *slurm_versions.DEBIAN])
def test_where_gres_conf_lists_the_gpus_in_another_order_no_job_on_a_gpu_is_spared(
    tmp_path: Path, version: str | None
) -> None:
    with InOtherOrders(nodes=2, version=version) as cluster:
        for name, bad, gres in (("n1", 4, ("gpu:a:1", "gpu:b:1")), ("n2", 7, ("gpu:1", "gpu:1"))):
            healthd = Healthd(cluster, name, BY_PART, gpus=read_node_gpus(NODE, GPUS, str(tmp_path), "/"))
            without = on(healthd)
            jobs = [on(healthd, f"--gres={what}") for what in gres]
            time.sleep(1.1)
            report = healthd.look(fault(bad))  # the device of the first job, whose number in Slurm is 0
            assert set(report.requeued) == set(jobs), cluster.run("scontrol", "-d", "show", "job", jobs[0])
            assert report.not_requeued == ((without, "has no GPU"),)


def test_a_job_that_opens_a_gpu_is_hit_by_its_fault_also_later(
    healthd: Healthd, tmp_path: Path, cluster: SlurmCluster
) -> None:
    (tmp_path / "dev").mkdir()
    device, go = tmp_path / "dev" / "nvidia5", tmp_path / "go"
    device.touch()
    script = f"while ! [ -e {go} ]; do sleep 0.1; done; exec 9< {device}; echo > {go}.done; sleep 3000"
    without, on_another = on(healthd, script=script), on(healthd, "--gres=gpu:1")
    time.sleep(1.1)
    verdict = fault(5)
    assert dict(healthd.look(verdict).not_requeued)[without] == "has no GPU"
    go.touch()
    waiting.until(Path(f"{go}.done").exists, "the job has opened the GPU")
    report = healthd.look(verdict)
    assert report.requeued == (without,)
    assert fate(cluster, without, on_another) == [REQUEUED, RUNS]


def test_with_node_all_jobs_are_requeued_as_ever(healthd: Healthd) -> None:
    healthd.policy = ACT
    first, without = on(healthd, "--gres=gpu:1"), on(healthd)
    time.sleep(1.1)
    assert set(healthd.look(fault(5)).requeued) == {first, without}


def test_the_jobs_that_held_the_gpu_when_the_line_came_are_hit(healthd: Healthd) -> None:
    first, second = on(healthd, "--gres=gpu:1"), on(healthd, "--gres=gpu:1")
    time.sleep(1.1)
    now = time.time()
    cause = condition(subject=PCI[7], critical_at=now, job=f"{second},99")
    assert healthd.look(faulty(cause, fault_time=now)).requeued == (second,)
    assert fate(healthd.cluster, first) == [RUNS]


@pytest.mark.parametrize("version", [None, "24.11", "26.05"])
def test_the_daemon_keeps_what_our_prolog_told_and_says_who_was_spared(tmp_path: Path, version: str | None) -> None:
    with made(tmp_path, [], ["PrologFlags=Alloc"], version) as node, node.daemon(interval="2") as daemon:
        jobs = [running_job(node.cluster, "n1", "--gres=gpu:1") for _ in range(2)]
        for number, job in enumerate(jobs):
            told = (daemon.run_dir / "jobs" / job).read_text().split()
            assert told[:2] == [job, str(number)]
            until_listed(node.cluster, job, "n1")
        daemon.kill()
        daemon.start()
        tables = node.cluster.sdiag_counts().get("REQUEST_NODE_INFO", 0)
        daemon.kernel_line(xid(79, pci="0000:43:00"))
        node.cluster.wait_job(jobs[1], "PENDING")
        until(daemon, lambda text: f"job {jobs[0]}: has GPU {PCI[0]}" in text)
        assert fate(node.cluster, *jobs) == [RUNS, REQUEUED]
        status = daemon.status()
        assert status["decision"]["not_requeued"] == [
            {"job": jobs[0], "why": f"has GPU {PCI[0]}, which the fault did not hit"}
        ]
        read = node.cluster.sdiag_counts()["REQUEST_NODE_INFO"] - tables
        assert read == 2, "the fleet was counted twice; no `scontrol -d` ran for a job"
        log = daemon.log.read_text()
        assert log.count(f"job {jobs[0]} is not requeued: has GPU") == 1, "logged once, not in each round"


def until(daemon: Daemon, reached: Callable[[str], bool]) -> None:
    daemon.until(lambda s: reached(s["decision"]["text"]), "the text of the decision")
