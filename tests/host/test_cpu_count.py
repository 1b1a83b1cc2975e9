"""How many cores a process may use: its affinity, and what its cgroups pay for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from healthd.host.cpu_count import cores


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


V2 = "0::/system.slice/a.service\n"
V1 = "9:name=systemd:/\n2:cpu,cpuacct:/jobs/one\n1:memory:/\n0::/\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/system.slice/a.service/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/system.slice/a.service/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/system.slice/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/system.slice/a.service/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),  # in a container
        ({"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/system.slice/cpu.max": "nonsense"}, 8),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/jobs/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_no_more_cores_than_the_cgroups_pay_for(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert cores(tree(tmp_path, files)) == expected


def test_here_there_is_one_at_least() -> None:
    assert cores() >= 1
