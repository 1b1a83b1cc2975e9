"""gres.conf: whether it numbers the GPUs of a node in the order of their device files. The examples are real ones."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import ANY_TEXT

from healthd.common.slurm.commands import gres_conf
from healthd.common.slurm.gres import GRES_CONF_BYTES, lists_gpus_in_order

LISTED = "Name=gpu File=/dev/nvidia[0-7]\n"


@pytest.mark.parametrize(
    "text",
    [
        LISTED,
        "AutoDetect=nvml\n",
        "AutoDetect=NVML # all of them\n",
        "AutoDetect=nvidia\n",
        "AutoDetect=off\n" + LISTED,
        "AutoDetect=nvml\n" + LISTED,
        "AutoDetect=nvml\nNodeName=n1 AutoDetect=off Name=gpu File=/dev/nvidia[0-7]\n",
        "AutoDetect=nvml\nName=shard Count=32\n",
        "NodeName=n[1-8] Name=gpu Type=h100 File=/dev/nvidia[0-7] Cores=0-63\n",
        'nodename = n1 name = GPU file = "/dev/nvidia[0-3],/dev/nvidia[4-7]"\n',
        "".join(f"Name=gpu Type=a100 File=/dev/nvidia{i} Cores={i}\n" for i in range(8)),
        "Name=gpu File=/dev/nvidia[0,1-6,7]\nName=mps Count=800\n",
        "NodeName=m[1-4] Name=gpu File=/dev/nvidia[7,6,5-0]\n\n" + LISTED,
        "NodeName=m1 AutoDetect=rsmi\n" + LISTED,
    ],
)
def test_lists_gpus_in_order_accepts_usual_files(text: str) -> None:
    assert lists_gpus_in_order(text, "n1", 8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "AutoDetect=off\n",
        "AutoDetect=rsmi\n",
        "AutoDetect=full\n",
        "AutoDetect=nvml\nNodeName=n1 AutoDetect=off\n",
        "NodeName=m1 AutoDetect=nvml\n",
        "NodeName=m1 Name=gpu File=/dev/nvidia[0-7]\n",
        "Name=gpu File=/dev/nvidia[0-6]\n",
        "Name=gpu File=/dev/nvidia[0-8]\n",
        "Name=gpu File=/dev/nvidia[1-8]\n",
        "Name=gpu File=/dev/nvidia[7,6,5,4,3,2,1,0]\n",
        "Name=gpu File=/dev/nvidia[1,0,2-7]\n",
        "Name=gpu File=/dev/nvidia[4-7]\nName=gpu File=/dev/nvidia[0-3]\n",
        "".join(f"Name=gpu File=/dev/nvidia{i}\n" for i in range(7, -1, -1)),
        "AutoDetect=nvml\nName=gpu File=/dev/nvidia[4-7,0-3]\n",
        # slurm.conf decides which of two types comes first
        "Name=gpu Type=a File=/dev/nvidia[0-3]\nName=gpu Type=b File=/dev/nvidia[4-7]\n",
        "Name=gpu Type=a File=/dev/nvidia[4-7]\nName=gpu Type=b File=/dev/nvidia[0-3]\n",
        "Name=gpu Count=8\n",
        "AutoDetect=nvml\nName=gpu Count=8\n",
        "Name=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia1\n" + LISTED,
        "Name=gpu File=/dev/nvidia-caps/nvidia-cap[0-7]\n",
        "Name=gpu File=/dev/dri/renderD[128-135]\n",
        "Name=gpu File=/dev/nvidia[0-7\n",
        "Name=gpu File=/dev/nvidia[0-7],\n",
        "Name=gpu File=/dev/nvidia[]\n",
        "include /etc/slurm/more.conf\n" + LISTED,
        "Name=gpu \\\nFile=/dev/nvidia[0-7]\n",
        "Name+=gpu File=/dev/nvidia[0-7]\n",
        LISTED * 2,
        "rubbish\n" + LISTED,
    ],
)
def test_lists_gpus_in_order_rejects_other_orders_and_unknown_syntax(text: str) -> None:
    assert not lists_gpus_in_order(text, "n1", 8)


def test_lists_gpus_in_order_rejects_detection_of_more_than_ten_gpus() -> None:
    assert lists_gpus_in_order("AutoDetect=nvml\n", "n1", 10)
    assert not lists_gpus_in_order("AutoDetect=nvml\n", "n1", 11)
    assert not lists_gpus_in_order("AutoDetect=nvml\nName=gpu File=/dev/nvidia[0-15]\n", "n1", 16)
    assert lists_gpus_in_order("Name=gpu File=/dev/nvidia[0-15]\n", "n1", 16)


def test_lists_gpus_in_order_rejects_file_that_may_be_truncated() -> None:
    assert lists_gpus_in_order(LISTED.ljust(GRES_CONF_BYTES - 1, "\n"), "n1", 8)
    assert not lists_gpus_in_order(LISTED.ljust(GRES_CONF_BYTES, "\n"), "n1", 8)


@given(ANY_TEXT | st.text('NodeName=Name=gpuFile/dev/nvidia[0-7], ="\\\n#', max_size=80))
def test_lists_gpus_in_order_accepts_any_text(text: str) -> None:
    assert lists_gpus_in_order(text, "n1", 8) in (True, False)


@pytest.mark.parametrize("pump", ["[", "/a", "A=", "A=b ", " ", "/nvidia[0-7],", "n[1-2],", '"', "0,"])
def test_lists_gpus_in_order_is_fast_for_long_lines(pump: str) -> None:
    text = pump * ((64 << 10) // len(pump))
    lines = (text, f"Name=gpu File={text}", f"NodeName={text} Name=gpu")
    assert (
        cpu_seconds(lambda: [lists_gpus_in_order(line, "n1", 8) for line in lines], 5) < 5
    )  # a quadratic pattern takes minutes


def test_gres_conf_is_next_to_slurm_conf(tmp_path: Path) -> None:
    (tmp_path / "gres.conf").write_text(LISTED)
    environment = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    process = subprocess.run(gres_conf(8), env=environment, capture_output=True, text=True, timeout=240)
    assert (process.returncode, process.stdout) == (0, LISTED[:8])
    environment["SLURM_CONF"] = str(tmp_path / "none" / "slurm.conf")
    process = subprocess.run(gres_conf(8), env=environment, capture_output=True, text=True, timeout=240)
    assert (process.returncode, process.stdout) == (1, "")


def test_gres_conf_without_slurm_conf_reads_only_default_paths() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    process = subprocess.run(gres_conf(GRES_CONF_BYTES), env=environment, capture_output=True, text=True, timeout=240)
    found = [path for path in ("/etc/slurm", "/run/slurm/conf", "/usr/local/etc") if Path(path, "gres.conf").exists()]
    assert (process.returncode, process.stderr) == (0, "")
    assert bool(process.stdout) == bool(found)
