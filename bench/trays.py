"""Compare the CPU time of a round (daemon and worker) on a tray of a GB200 NVL72 and on a DGX H100."""

from __future__ import annotations

import statistics

from figure import Figure
from sizes import measured

NODES = {  # name -> parts of the node; the rest of the hardware is the same
    "DGX H100, 8 GPUs": {"gpus": 8, "profile": "dgx-h100"},
    "tray of a GB200 NVL72, 4 GPUs": {"gpus": 4, "profile": "gb200-nvl72"},
    "4 GPUs of a DGX H100": {"gpus": 4, "profile": "dgx-h100"},
}
AIM_PERCENT = 100.0  # a tray costs less than a DGX H100


def trays() -> list[Figure]:
    """Measure the nodes in parallel, so that other load slows all of them."""
    spent = measured(NODES)
    dgx, tray, half = (statistics.median(values) for values in spent.values())
    return [
        *(Figure(f"one round, {name}: CPU", "ms", values) for name, values in spent.items()),
        Figure("  tray, as a share of the DGX H100", "%", [tray / dgx * 100], aim=AIM_PERCENT),
        Figure("  tray, as a share of 4 GPUs of a DGX H100", "%", [tray / half * 100]),
    ]
