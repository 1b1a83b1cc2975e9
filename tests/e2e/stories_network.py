"""Rows of InfiniBand, Ethernet and network cards."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from machine import NICS, PORT
from stories import (
    WINDOW_SECONDS,
    Row,
    Scene,
    Step,
    kernel,
    nothing,
    rebooted,
    repaired,
    steps,
    wait_until_open,
    writes,
)

from healthd.common.model import Severity

NET = "/sys/class/net"
CARRIERS_LOST = "/sys/class/infiniband/mlx5_0/device/net/ib0/carrier_down_count"
QUICK_IB = {"ib_link": {"confirm_seconds": 1.0}}
BRIEF = {"ib_errors": {"clean_seconds": WINDOW_SECONDS}}

CARD = f"mlx5_core {NICS[0]}:"
CARD_WARNS = {
    "mlx5/health_warning": f"{CARD} print_health_info:431:(pid 0): Health issue observed, x, severity(4) WARNING:",
    "mlx5/health_recovery": f"{CARD} poll_health:740:(pid 0): Fatal error 3 detected",
    "mlx5/temperature": f"{CARD} temp_warn:171:(pid 0): High temperature on sensors with bit set 0 1",
    "mlx5/module_temperature": f"{CARD} Port module event[error]: module 0, Cable error, High Temperature",
    "mlx5/module_power": f"{CARD} Port module event[error]: module 0, Cable error, Power budget exceeded",
    "mlx5/module_error": f"{CARD} Port module event[error]: module 0, Cable error, Unknown identifier",
    "mlx5/slot_power": f"{CARD} mlx5_pcie_event:299:(pid 12): Detected insufficient power on the PCIe slot (27W).",
    "mlx5/pci_error": f"{CARD} mlx5_pci_err_detected Device state = 1 health sensors: 1 pci_status: 1. Enter",
    "mlx5/tx_timeout": f"{CARD} eth2: TX timeout detected",
    "mlx5/port_failed": "infiniband mlx5_1: Couldn't open port 1 for agents",
    "mlx5/bond_down": "bond0: now running without any active interface!",
    "mlx5/load_failed": f"mlx5_core: probe of {NICS[0]} failed with error -22",
}


def port(up: bool) -> Step:
    return lambda scene: scene.machine.port(0, up=up)


def counts(**counters: int) -> Step:
    """Set counters of the first port."""
    return lambda scene: scene.machine.count(0, **counters)


def hardware_counts(**counters: int) -> Step:
    """Set the counters of the card's vendor."""
    return writes({PORT.format(0, f"hw_counters/{name}"): f"{value}\n" for name, value in counters.items()})


def without(path: str) -> Step:
    """Remove this directory of the fake tree."""
    return lambda scene: shutil.rmtree(scene.machine.root / path.lstrip("/"))


def ethernet(up: bool = True, changes: int = 2) -> Step:
    return lambda scene: scene.machine.ethernet(up, changes)


def bond(second: str = "up") -> Step:
    """Create a bond of two interfaces."""

    def create(scene: Scene) -> None:
        scene.machine.write({f"{NET}/bond0/bonding/mode": "802.3ad 4\n", f"{NET}/bond0/operstate": "up\n"})
        for member, state in (("eth1", "up"), ("eth2", second)):
            scene.machine.write({f"{NET}/{member}/operstate": f"{state}\n"})
            link = scene.machine.root / f"{NET}/bond0/lower_{member}".lstrip("/")
            if not link.is_symlink():
                link.symlink_to(f"../{member}")

    return create


def quick_ethernet(**settings: object) -> Mapping[str, Mapping[str, object]]:
    return {"eth_link": {"confirm_seconds": 1.0, **settings}}


def expires(name: str, well: Step, fault: Step) -> Row:
    """Return a row with a rate in one run only."""
    return Row(f"ib_errors/{name}", "mlx5_0/1", well=well, fault=fault, repair=nothing, settings=BRIEF)


ROWS = [
    Row(
        "ib_link/down",
        "mlx5_0/1",
        fault=port(up=False),
        repair=port(up=True),
        settings=QUICK_IB,
    ),
    Row(
        "ib_link/down",
        "mlx5_0/1",
        how="until it is critical",
        fault=port(up=False),
        repair=port(up=True),
        settings={"ib_link": {"confirm_seconds": 1.0, "critical_seconds": 3.0}},
        severity=Severity.CRITICAL,
    ),
    Row(
        "ib_link/missing",
        "mlx5_0/1",
        fault=without(PORT.format(0, "")),
        repair=port(up=True),
        settings=QUICK_IB,
    ),
    Row(
        "ib_link/slow",
        "mlx5_0/1",
        fault=writes({PORT.format(0, "rate"): "100 Gb/sec (1X NDR)\n"}),
        repair=port(up=True),
        settings=QUICK_IB,
    ),
    Row(
        "ib_link/rate_unknown",
        "mlx5_0/1",
        fault=writes({PORT.format(number, "rate"): "10 Gb/sec (4X)\n" for number in (0, 1)}),
        repair=steps(port(up=True), lambda scene: scene.machine.port(1)),
        settings=QUICK_IB,
    ),
    Row("ib_flap/link_downed", "mlx5_0/1", fault=counts(link_downed=3), repair=repaired),
    Row(
        "ib_flap/carrier_lost",
        "mlx5_0/1",
        well=writes({CARRIERS_LOST: "2\n"}),
        fault=writes({CARRIERS_LOST: "7\n"}),
        repair=repaired,
    ),
    Row("ib_errors/symbols", "mlx5_0/1", fault=counts(symbol_error=200), repair=repaired),
    Row("ib_errors/link_integrity", "mlx5_0/1", fault=counts(local_link_integrity_errors=1), repair=repaired),
    Row("ib_errors/buffer_overrun", "mlx5_0/1", fault=counts(excessive_buffer_overrun_errors=1), repair=repaired),
    expires("symbol_rate", nothing, counts(symbol_error=100)),
    expires("recovery_rate", nothing, counts(link_error_recovery=50)),
    expires("receive_rate", nothing, counts(port_rcv_errors=1000)),
    expires("ack_timeout_rate", hardware_counts(local_ack_timeout_err=5), hardware_counts(local_ack_timeout_err=500)),
    expires("slow_restart_rate", hardware_counts(roce_slow_restart=5), hardware_counts(roce_slow_restart=500)),
    Row(
        "eth_link/down",
        "eth0",
        fault=ethernet(up=False),
        repair=ethernet(),
        settings=quick_ethernet(),
    ),
    Row(
        "eth_link/member_down",
        "eth2",
        well=bond(),
        fault=bond(second="down"),
        repair=bond(),
        settings=quick_ethernet(expected_mbps={"bond0": 0}),
    ),
    Row(
        "eth_link/missing",
        "eth0",
        fault=without(f"{NET}/eth0"),
        repair=ethernet(),
        settings=quick_ethernet(),
    ),
    Row(
        "eth_link/slow",
        "eth0",
        fault=writes({f"{NET}/eth0/speed": "25000\n"}),
        repair=ethernet(),
        settings=quick_ethernet(),
    ),
    Row(
        "eth_link/mtu",
        "eth0",
        well=writes({f"{NET}/eth0/mtu": "9000\n"}),
        fault=writes({f"{NET}/eth0/mtu": "1500\n"}),
        repair=writes({f"{NET}/eth0/mtu": "9000\n"}),
        settings=quick_ethernet(expected_mtu={"eth0": 9000}),
    ),
    Row(
        "eth_link/flapping",
        "eth0",
        fault=ethernet(changes=12),
        repair=nothing,
        settings=quick_ethernet(carrier_changes_window_seconds=WINDOW_SECONDS),
    ),
    Row(
        "mlx5/health_fatal",
        NICS[0],
        fault=kernel(f"mlx5_core {NICS[0]}: poll_health:801:(pid 0): device's health compromised - reached miss count"),
        repair=rebooted,
    ),
    Row(
        "mlx5/command_timeout",
        NICS[0],
        how="with a leak",
        fault=kernel(
            f"{CARD} wait_func:991:(pid 1): CREATE_DCT(0x710) timeout. Will cause a leak of a command resource"
        ),
        repair=rebooted,
    ),
    Row(
        "nic/firmware_failed",
        NICS[0],
        fault=kernel(f"ice {NICS[0]}: Rebuild failed, unload and reload driver"),
        repair=rebooted,
    ),
    Row(
        "nic/command_timeout",
        NICS[0],
        how="closes the command queue",
        fault=kernel(f"efa {NICS[0]}: Wait for completion (polling) timeout"),
        repair=rebooted,
    ),
    Row(
        "mlx5/temperature",
        NICS[0],
        how="and all others that expire",
        fault=steps(kernel(*CARD_WARNS.values()), wait_until_open(*CARD_WARNS)),
        repair=nothing,
        also=frozenset(CARD_WARNS) - {"mlx5/temperature"},
        settings={"mlx5": {"warning_window_seconds": WINDOW_SECONDS}},
    ),
]

# Codes that drain and have no story, and why.
UNTESTED: dict[str, str] = {}
