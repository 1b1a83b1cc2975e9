"""Tests of lines about network cards.

Captured lines, with their public sources, are in tests/data/kernel_lines.jsonl; the others follow the formats in Linux
(mlx4, mlx5, infiniband, bonding, sch_generic) and MLNX_OFED.
"""

import json
import time
from pathlib import Path

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.kernel_log.coalesce import coalesce_events
from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.agent.kernel_log.source import RawLine, make_event

DATA = (Path(__file__).parents[3] / "data/kernel_lines.jsonl").read_text("utf-8")
CAPTURED = [row for row in map(json.loads, DATA.strip().split("\n")) if row["kind"] in ("mlx5", "ib")]
PCI = "0000:61:00.0"
CARD = f"mlx5_core {PCI}: "


def kind_and_code(text):
    """Return (kind, code) of a message, or None if no rule matches."""
    event = parse(text)
    return (event.kind, event.code) if event else None


def fields(text):
    return dict(parse(text).fields)


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in CAPTURED])
def test_parse_reads_captured_line_with_card_and_port(row):
    expected = row["expected"]
    event = parse(strip_prefix(row["text"], time.time()).text)
    assert (event.kind, event.pci) == (row["kind"], expected.get("pci", ""))
    event_fields = dict(event.fields)
    for name, key in (
        ("netdev", "netdev"),
        ("ibdev", "ibdev"),
        ("bond", "bond"),
        ("port", "port"),
        ("cq_error", "cqn"),
    ):
        assert event_fields.get(key) == (str(expected[name]) if name in expected else None)
    if "link" in expected:
        assert event.code == {"down": "link_down", "up": "link_up", "active": "link_up"}[expected["link"].lower()]
    codes = {
        ("cmd_timeout",): "command_timeout",
        ("high_temp",): "temperature",
        ("recovery", "fatal", "pci_unavailable", "health_compromised"): "health_fatal",
        ("pci_err_detected",): "pci_error",
        ("load_failed",): "load_failed",
    }
    for names, code in codes.items():
        if any(name in expected for name in names):
            assert event.code == code


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        ("poll_health:740:(pid 0): Fatal error 1 detected", "health_fatal"),
        ("poll_health:740:(pid 0): Fatal error 5 detected", "health_fatal"),
        ("poll_health:740:(pid 0): Fatal error 3 detected", "health_recovery"),  # switched off: virtual functions
        ("poll_health:740:(pid 0): Fatal error 4 detected", "health_recovery"),  # reset on purpose
        ("device's health compromised", "health_fatal"),  # Linux 3.10
        ("poll_health:216:(pid 0): device's health compromised - reached miss count", "health_fatal"),
        ("print_health_info:399:(pid 0): PCI slot is unavailable", "health_fatal"),
        ("mlx5_health_try_recover:338:(pid 9): health recovery flow aborted, PCI channel offline", "health_fatal"),
        ("health_recover_work:191:(pid 9): health recovery failed", "health_fatal"),
        ("health_care:154:(pid 27): handling bad device here", "health_recovery"),
        ("mlx5_health_try_recover:305:(pid 9): starting health recovery flow", "health_recovery"),
        ("NIC IFC still 7 after 2000ms.", "health_recovery"),
        ("print_health_info:188:(pid 0): synd 0x1: firmware internal error", "health"),
        ("synd 0x8: unrecoverable hardware error", "health"),
        ("print_health_info:520:(pid 0): synd 0x10: High temprature", "temperature"),  # to Linux 5.13
        ("print_health_info:188:(pid 0): assert_var[0] 0x00000001", "detail"),
        ("print_health_info:188:(pid 0): ext_synd 0x8d1f", "detail"),
        ("temp_warn:171:(pid 0): High temperature on sensors with bit set 0 1", "temperature"),
        ("Port module event[error]: module 0, Cable error, High Temperature", "module_temperature"),
        ("Port module event[error]: module 1, Cable error, Power budget exceeded", "module_power"),
        ("Port module event[error]: module 1, Cable error, PCIE system power slot exceeded", "slot_power"),
        ("Port module event[error]: module 1, Cable error, Bus stuck (I2C or data shorted)", "module_error"),
        ("Port module event[error]: module 1, Cable error, Unknown identifier", "module_error"),
        ("mlx5_port_module_event:1131:(pid 0): Port module event[error]: module 0, Cable error, x", "module_error"),
        ("wait_func:991:(pid 121): 2RST_QP(0x50a) timeout. Will cause a leak of a command resource", "command_timeout"),
        ("cb_timeout_handler:887:(pid 3): cmd[4]: CREATE_MKEY(0x200) Async, timeout. Will cause", "command_timeout"),
        ("wait_func:1155:(pid 1): DESTROY_QP(0x501) canceled on out of queue timeout.", "command_timeout"),
        (
            "mlx5_cmd_check:769:(pid 9): CREATE_QP(0x500) op_mod(0x0) failed, status bad resource(0x5), syndrome (0x1)",
            "command_failed",
        ),
        ("ib_post_recv failed: -12", "detail"),  # "Couldn't post receive WRs" follows
        ("cq_err_event_notifier:518:(pid 0): CQ error on CQN 0x4ad, syndrome 0x1", "cq_error"),
        ("mlx5_pci_err_detected:1380:(pid 1): mlx5_pci_err_detected was called", "pci_error"),
        ("mlx5_pci_slot_reset Device state = 2 health sensors: 0 pci_status: 1. Enter", "health_recovery"),
        ("mlx5_pci_slot_reset was called", "health_recovery"),
        ("cmd_work_handler:918:(pid 812): failed to allocate command entry", "command_timeout"),
        ("cmd_work_handler:960:(pid 9): CREATE_QP(0x500) timed out while waiting for a slot.", "command_timeout"),
        ("mlx5_cmd_enable:1950:(pid 1): All CMD slots are stalled, aborting command", "command_timeout"),
        ("probe_one:2003:(pid 3235): mlx5_init_one failed with error code -110", "load_failed"),
        ("init_one:1371:(pid 1): mlx5_load_one failed with error code -5", "load_failed"),
        ("mlx5_function_enable:1215:(pid 3): enable hca failed", "load_failed"),
        ("mlx5_function_setup:985:(pid 1): Firmware over 120000 MS in pre-initializing state, aborting", "load_failed"),
        ("probe with driver mlx5_core failed with error -110", "load_failed"),
        ("mlx5_pcie_event:299:(pid 12): Detected insufficient power on the PCIe slot (27W).", "slot_power"),
        ("63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at 0000:16:02.0", "pcie_limited"),
    ],
)
def test_parse_reads_mlx5_lines_from_all_versions(rest, code):
    event = parse(CARD + rest)
    assert (event.kind, event.code, event.pci) == ("mlx5", code, PCI)


# Texts of mlx5_pme_error_to_string(), earlier mlx5_pme_error[] (drivers/net/ethernet/mellanox/mlx5/core/events.c).
# Older drivers have the two longest texts (port.c, eq.c). NVIDIA's adapter manuals print the POWERED_DOWN line.
POWERED_DOWN = (
    "One or more network ports have been powered down due to insufficient/unadvertised power on the PCIe slot"
)
CONTACT = ". Please refer to the card's user manual for power specifications or contact Mellanox support"
MODULE_ERRORS = {
    "Power budget exceeded": "module_power",
    "Long Range for non MLNX cable": "module_error",
    "Bus stuck (I2C or data shorted)": "module_error",
    "Bus stuck(I2C or data shorted)": "module_error",
    "No EEPROM/retry timeout": "module_error",
    "Enforce part number list": "module_error",
    "Unknown identifier": "module_error",
    "High Temperature": "module_temperature",
    "Bad or shorted cable/module": "module_error",
    "Unknown error": "module_error",
    "Unknown status": "module_error",
    POWERED_DOWN: "slot_power",
    POWERED_DOWN + CONTACT: "slot_power",
    POWERED_DOWN + CONTACT + ".": "slot_power",
}


@pytest.mark.parametrize(("error", "code"), MODULE_ERRORS.items())
def test_parse_reads_every_driver_module_error(error, code):
    event = parse(
        f"mlx5_core 0003:01:00.0: port_module:254:(pid 0): Port module event[error]: module 0, Cable error, {error}"
    )
    assert (event.code, event.pci) == (code, "0003:01:00.0")
    assert dict(event.fields) == {"module": "0", "error": error}


def test_module_error_text_is_limited_to_256_characters():
    line_start = f"{CARD}Port module event[error]: module 1, Cable error, "
    assert dict(parse(line_start + "x" * 256).fields)["error"] == "x" * 256
    assert parse(line_start + "x" * 257) is None


@pytest.mark.parametrize(
    "rest",
    [
        "Port module event: module 0, Cable plugged",
        "Port module event: module 0, Cable unplugged",
        "mlx5_pcie_event:294:(pid 12): PCIe slot advertised sufficient power (75W).",
        "252.048 Gb/s available PCIe bandwidth (16.0 GT/s PCIe x16 link)",
        "mlx5_cmd_check:712:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3), syndrome (0x15c)",
        "mlx5_cmd_out_err:838:(pid 1): QUERY_VPORT_COUNTER(0x770) op_mod(0x0) failed, status bad operation(0x2), x",
        "cmd_exec_wait:1100:(pid 1): cmd[0]: ACCESS_REG(0x805) Async, recovered after timeout",
        "health recovery succeeded",
        "firmware version: 28.39.1002",
        "E-Switch: cleanup",
        "mlx5_error_sw_reset:243:(pid 198): start",
        "enabling device (0000 -> 0002)",
        "mlx5_fw_tracer_handle_traces:740:(pid 9): FWTracer: Events were lost",
        "probe with driver mlx5_core failed with error -517",
        "enp97s0f0np0: renamed from eth0",
    ],
)
def test_parse_ignores_start_and_stop_lines(rest):
    assert parse(CARD + rest) is None


def test_parse_reads_card_without_address():
    assert (
        parse("mlx5_core ADDR: Fatal error 1 detected").pci,
        kind_and_code("mlx5_core ADDR: Fatal error 1 detected"),
    ) == (
        "",
        ("mlx5", "health_fatal"),
    )
    assert parse("mlx5_core: probe of 0000:03:00.0 failed with error -22").pci == "0000:03:00.0"
    old_line = "mlx5_core 0000:03:00.0: 0000:03:00.0:wait_func:961:(pid 6): INIT_HCA(0x102) timeout. Will cause a leak"
    assert (parse(old_line).code, parse(old_line).pci) == ("command_timeout", "0000:03:00.0")
    assert kind_and_code("infiniband mlx5_0: dump_cqe:272:(pid 0): dump error cqe") == ("mlx5", "cqe_error")
    assert kind_and_code("mlx5_0:dump_cqe:262:(pid 1234): dump error cqe") == ("mlx5", "cqe_error")
    assert kind_and_code("mlx5_warn:mlx5_0:dump_cqe:270:(pid 24): dump error cqe") == ("mlx5", "cqe_error")


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("mlx5_core 0000:03:00.0 eth2: TX timeout detected", ("mlx5", "tx_timeout")),
        (
            "mlx5_core 0000:03:00.0 eth2: NETDEV WATCHDOG: CPU: 3: transmit queue 1 timed out 5123 ms",
            ("mlx5", "tx_timeout"),
        ),
        ("NETDEV WATCHDOG: eth2 (mlx5_core): transmit queue 5 timed out", ("mlx5", "tx_timeout")),
        ("NETDEV WATCHDOG: eth2 (mlx5_core): transmit queue timed out", ("mlx5", "tx_timeout")),
        ("NETDEV WATCHDOG: eno1 (ixgbe): transmit queue 5 timed out", ("ib", "tx_timeout")),
        ("ice 0000:31:00.0 ens1f0: NETDEV WATCHDOG: CPU: 3: transmit queue 1 timed out 5123 ms", ("ib", "tx_timeout")),
        ("ib0: transmit timeout: latency 1756 msecs", ("ib", "tx_timeout")),
        ("ib0: failed cm send event (status=12, wrid=3 vend_err 129)", ("ib", "send_failed")),
        (
            "ib0: multicast join failed for ff12:401b:ffff:0000:0000:0000:ffff:ffff, status -22",
            ("ib", "multicast_failed"),
        ),
        ("infiniband mlx5_1: Couldn't open port 1", ("ib", "port_failed")),
        ("ib_mad: Couldn't open mlx4_0 port 1 for agents", ("ib", "port_failed")),
        ("mlx4_core 0000:81:00.0: Internal error detected:", ("ib", "health_fatal")),
        ("mlx4_core 0000:81:00.0: command 0x23 timed out (go bit not cleared)", ("ib", "command_timeout")),
        ("mlx4_en: ens2: Link Down", ("ib", "link_down")),
        ("ice 0000:31:00.0 ens1f0: NIC Link is Down", ("ib", "link_down")),
        ("igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Down", ("ib", "link_down")),
        ("tg3 0000:02:00.0 eth0: Link is down", ("ib", "link_down")),
        ("e1000e: eno1 NIC Link is Down", ("ib", "link_down")),
        ("bnxt_en 0000:21:00.0 bnxt_re0: Port: 1 Link DOWN", ("ib", "link_down")),
        ("bonding: bond0: link status definitely down for interface eth0, disabling it", ("mlx5", "link_down")),
        ("bond0: now running without any active interface!", ("mlx5", "bond_down")),
        ("mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link INIT", ("mlx5", "link_init")),
        ("infiniband mlx5_0: create_qp:3047:(pid 29714): Create QP type 2 failed", ("mlx5", "command_failed")),
        (
            "infiniband mlx5_0: destroy_qp_common:2367:(pid 7): mlx5_ib: modify QP 0x000724 to RESET failed",
            ("mlx5", "command_failed"),
        ),
        ("infiniband mlx5_0: Couldn't start port", ("ib", "port_failed")),
        ("mlx5_1: couldn't register ipoib port 1; error -12", ("ib", "port_failed")),
        ("mlx5_1: failed to initialize device: ib0 port 1 (ret = -12)", ("ib", "port_failed")),
        ("infiniband rdmap0s6: Wait for completion (polling) timeout", ("ib", "command_timeout")),
        ("efa 0000:00:06.0: Wait for completion (polling) timeout", ("ib", "command_timeout")),
        (
            "infiniband rdmap0s6: The device didn't send any completion for admin cmd CREATE_QP(6)",
            ("ib", "command_timeout"),
        ),
        (
            "infiniband rdmap0s6: Failed to process command CREATE_QP (opcode 6) comp_status 1 err -22",
            ("ib", "command_failed"),
        ),
        ("infiniband rdmap0s6: Admin queue is closed", ("ib", "health_fatal")),
        ("efa 0000:00:06.0: Reset indication didn't turn off", ("ib", "health_fatal")),
        ("efa 0000:00:06.0: Device isn't ready, abort com init", ("ib", "health_fatal")),
        ("mlx5_port_module_event:1131:(pid 0): Port module event[error]: module 0, x", ("mlx5", "module_error")),
        ("mlx5_core 0000:5e:00.0: Link is Down", ("mlx5", "link_down")),
        ("infiniband mlx5_0: mlx5_handle_error_cqe:332:(pid 0): WC error: 4, Message: x", ("mlx5", "cqe_error")),
        ("infiniband rocep33s0f0: mlx5_poll_one:527:(pid 0): Responder error cqe on cqn 0x406:", ("mlx5", "cqe_error")),
        ("infiniband rocep33s0f0: mlx5_poll_one:530:(pid 0): syndrome 0x5, vendor syndrome 0xf9", ("mlx5", "detail")),
        ("infiniband rocep33s0f0: dump_cqe:272:(pid 0): dump error cqe", ("mlx5", "cqe_error")),
        ("bond0: (slave eth0): link status down for interface, disabling it in 200 ms", ("mlx5", "link_down")),
        ("bond0: link status down for active interface eth0, disabling it in 200 ms", ("mlx5", "link_down")),
    ],
)
def test_parse_reads_other_network_lines(text, event):
    assert kind_and_code(text) == event


@pytest.mark.parametrize(
    "text",
    [
        "ice 0000:31:00.0 ens1f0: NIC Link is up 100 Gbps Full Duplex, Requested FEC: RS-FEC",
        "bond0: (slave enp83s0f0np0): link status definitely up, 100000 Mbps full duplex",
        "bond0: active interface up!",
        "IPv6: ADDRCONF(NETDEV_CHANGE): ib0: link becomes ready",
        "infiniband mlx5_0: Created mr cache",
        "ena 0000:00:05.0 eth0: Wait for completion (polling) timeout",
        "infiniband mlx5_0: RDMA CMA: cma_listen_on_dev, error -38",
        "ib0: Not flushing - IPOIB_FLAG_ADMIN_UP not set.",
        "pcieport 0000:00:01.0: bw_notification: Link Down",
    ],
)
def test_parse_ignores_working_network_lines(text):
    assert parse(text) is None


def test_link_event_names_interface():
    assert fields("bonding: bond0: link status definitely down for interface eth0, disabling it") == {
        "bond": "bond0",
        "netdev": "eth0",
    }
    assert fields("igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Down") == {"netdev": "eno1"}
    assert fields("infiniband mlx5_1: Couldn't open port 1") == {"ibdev": "mlx5_1", "port": "1"}
    assert fields(f"{CARD}Port module event[error]: module 1, Cable error, Unknown identifier") == {
        "module": "1",
        "error": "Unknown identifier",
    }


def test_health_report_is_two_events_and_command_storm_single_event():
    report = [
        "print_health_info:431:(pid 0): Health issue observed, firmware internal error, severity(3) ERROR:",
        *(f"print_health_info:436:(pid 0): assert_var[{n}] 0x{n:08x}" for n in range(6)),
        "print_health_info:439:(pid 0): assert_exit_ptr 0x2090b7ac",
        "print_health_info:447:(pid 0): irisc_index 9",
        "print_health_info:448:(pid 0): synd 0x1: firmware internal error",
        "print_health_info:450:(pid 0): ext_synd 0x8b1c",
    ]
    events = [make_event(RawLine(1000.0 + n / 1e3, CARD + line), "b") for n, line in enumerate(report)]
    coalesced, _, _ = coalesce_events((), events, 1)
    assert [event.code for event in coalesced] == ["health", "health"]
    assert sum(event.lines for event in coalesced) == len(report)
    assert len(coalesced) == 2
    storm = [
        make_event(RawLine(1000.0 + n / 1e3, f"{CARD}eq:55:(pid 0): CQ error on CQN 0x{n:x}, syndrome 0x1"), "b")
        for n in range(100)
    ]
    assert [event.lines for event in coalesce_events((), storm, 1)[0]] == [100]


# --- user text, garbage, time


@given(st.text(max_size=15), st.sampled_from([row["text"] for row in CAPTURED]))
def test_process_name_forges_no_network_event(name, line):
    message = strip_prefix(line, time.time()).text
    for comm in (name, message[:15], "a: b Link down", "mlx5_core 0:1: "):
        for suffix in (
            " invoked oom-killer: gfp_mask=0x0",
            "[42]: segfault at 0 ip 0 sp 0 error 4",
            " (42): drop_caches: 3",
        ):
            event = parse(comm[:15] + suffix)
            assert event is None or event.kind == "oom"


PIECES = st.sampled_from(
    [
        CARD,
        "mlx5_core ",
        "mlx5_",
        "infiniband mlx5_0: ",
        "Link ",
        "down",
        " failed, status ",
        "CREATE_QP(0x500) ",
        ": ",
        "x",
        "bond0: ",
        "(slave ",
        "link status definitely down",
        "Port module event[error]: module 1, ",
        "0000:61:00.0",
        " ",
        "\n",
    ]
)


@given(st.lists(PIECES | st.text(max_size=8), max_size=40).map("".join))
def test_parse_accepts_any_text(text):
    event = parse(text)
    assert event is None or event.kind


@pytest.mark.parametrize(
    "piece",
    [
        "mlx5_core ",
        CARD,
        "a:",
        "a: ",
        "0000:61:00.0:",
        "mlx5_a:1:(pid 1): ",
        "x",
        " ",
        "CREATE_QP(0x500) ",
        "bond0: (slave ",
    ],
)
def test_parse_is_fast_for_long_line(piece):
    long_text = piece * (16384 // len(piece))
    texts = (
        long_text,
        CARD + long_text,
        f"{long_text} link status definitely down",
        f"mlx5_core {long_text} Link is Down",
    )
    assert cpu_seconds(lambda: [parse(text) for text in texts], 0.5) < 0.5
