"""Rows of InfiniBand, Ethernet and the cards."""

from __future__ import annotations

from stories import NOT_YET, Row, Step

from healthd.model import Severity


def port(up: bool) -> Step:
    return lambda scene: scene.machine.port(0, up=up)


ROWS = [
    Row(
        "ib_link/down",
        "mlx5_0/1",
        fault=port(up=False),
        repair=port(up=True),
        settings={"ib_link": {"confirm_seconds": 1.0}},
    ),
    Row(
        "ib_link/down",
        "mlx5_0/1",
        how="for so long that it is critical",
        fault=port(up=False),
        repair=port(up=True),
        settings={"ib_link": {"confirm_seconds": 1.0, "critical_seconds": 3.0}},
        severity=Severity.CRITICAL,
    ),
]

# Codes that drain and are not told here, and why.
LEFT = {
    "eth_link/down": NOT_YET,
    "eth_link/member_down": NOT_YET,
    "eth_link/missing": NOT_YET,
    "eth_link/slow": NOT_YET,
    "ib_errors/buffer_overrun": NOT_YET,
    "ib_errors/link_integrity": NOT_YET,
    "ib_errors/symbols": NOT_YET,
    "ib_flap/carrier_lost": NOT_YET,
    "ib_flap/link_downed": NOT_YET,
    "ib_link/missing": NOT_YET,
    "ib_link/slow": NOT_YET,
    "mlx5/health_fatal": NOT_YET,
}
