"""Tests of NVIDIA driver lines. Captured lines, with their public sources, are in tests/data/kernel_lines.jsonl."""

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import LINES, captured, events, fields

from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.rules import nvidia
from healthd.agent.kernel_log.rules.rule import pci_address
from healthd.common.model import KernelEvent
from healthd.nvidia import codes

KINDS = ("xid", "sxid", "gpu_fallen_off_bus", "gsp", "nvlink")


def parsed(text: str) -> KernelEvent:
    event = parse(text)
    assert event is not None
    return event


# A line in which a program quotes an Xid is not the driver's line.
QUOTED = {"k0023"}


@pytest.mark.parametrize("row", captured("xid"))
def test_parse_reads_captured_xid_with_gpu_and_process(row):
    expected = row["expected"]
    if row["id"] in QUOTED:
        assert events(row["text"]) == []
        return
    (event,) = events(row["text"])
    assert (event.kind, event.code, event.pci) == ("xid", str(expected["xid"]), pci_address(expected["pci"]))
    unknown = (None, "<unknown>")
    assert event.pid == (None if expected["pid"] in unknown else int(expected["pid"]))
    assert event.process == (None if expected["name"] in unknown else expected["name"])
    for name in ("link", "unit", "intr_info", "error_status"):
        if name in expected:
            assert fields(event)[name] == str(expected[name])


@pytest.mark.parametrize("row", captured("sxid"))
def test_parse_reads_captured_sxid_and_marks_further_lines(row):
    expected = row["expected"]
    (event,) = events(row["text"])
    assert ("further" in fields(event)) == ("Engine instance" in row["text"] or "Data {" in row["text"])
    assert (event.kind, event.code, event.pci) == ("sxid", str(expected["sxid"]), expected["pci"])
    assert fields(event)["switch"] == str(expected["nvswitch"])
    assert fields(event).get("fatal") == {"Fatal": "true", "Non-fatal": "false", None: None}[expected["severity"]]
    assert fields(event).get("link") == (None if expected["link"] is None else str(expected["link"]))


def test_rm_init_failure_names_gpu():
    (event,) = events("[  101.209077] NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:2168)")
    assert (event.code, event.pci, fields(event)) == ("rm_init_failed", "0000:a1:00.0", {"status": "0x62:0x40:2168"})
    (old_event,) = events("NVRM: RmInitAdapter failed! (0x26:0xffff:1096)")
    assert (old_event.code, old_event.pci) == ("rm_init_failed", "")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: GPU at 0000:01:00.0 has fallen off the bus.",
        "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
        "NVRM: The NVIDIA GPU 0000:01:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:1e07)\n"
        "NVRM: installed in this system has fallen off the bus and is not responding to commands.",
    ],
)
def test_gpu_off_the_bus_is_read_without_xid(text):
    event = parse(text)
    assert event is not None
    assert (event.kind, event.pci) == ("gpu_fallen_off_bus", "0000:01:00.0")


def test_gpu_off_the_bus_is_read_without_address():
    event = parse("NVRM: fallen off the bus and is not responding to commands.")
    assert event is not None
    assert (event.kind, event.pci) == ("gpu_fallen_off_bus", "")


def test_xid_with_masked_address_is_read():
    event = parse("NVRM: Xid (PCI:XXXX:XX:00): 79, pid=1, name=a, GPU has fallen off the bus.")
    assert event is not None
    assert (event.code, event.pci) == ("79", "")


@pytest.mark.parametrize(
    ("rest", "pid", "process"),
    [
        ("79, pid=12, name=python3, GPU has fallen off the bus.", 12, "python3"),
        ("79, pid='12', name='python3', GPU has fallen off the bus.", 12, "python3"),
        ("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", None, None),
        ("79, pid=<unknown>, name=<unknown>, GPU has fallen off the bus.", None, None),
        ("43, pid=12, name=a, b, Ch 00000008", 12, "a, b"),
        ("43, pid=12, name=Plex Media Serv, Ch 00000008", 12, "Plex Media Serv"),
        ("43, pid=12, name='a' \"b\", Ch 00000008", 12, "'a' \"b\""),
        ("43, pid=12, name=nvc:[driver], Ch 00000008", 12, "nvc:[driver]"),
        ("79, GPU has fallen off the bus.", None, None),
        ("79", None, None),
        ("79 GPU has fallen off the bus.", None, None),
    ],
)
def test_process_name_may_have_spaces_quotes_and_commas(rest, pid, process):
    event = parse(f"NVRM: Xid (PCI:0000:3b:00): {rest}")
    assert event is not None
    assert (event.pid, event.process) == (pid, process)


def test_process_name_cannot_forge_code_or_gpu():
    event = parse("NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name=): 79, x, Graphics Exception")
    assert event is not None
    assert (event.code, event.pci) == ("13", "0000:3b:00.0")


@pytest.mark.parametrize(
    "text",
    [
        "myprog: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/NVRM: Xid (PCI:0000:3b:00): 79, x",
        "NVRM: Xid (43, pid: 5678): ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR",
        "NVRM: Xid (PCI:0000:3b:00): , pid=1",
        "NVRM: Xid (PCI:0000:3b:00): 79.5",
        "NVRM: Xid (PCI:0000:3b:00): 99999999",
    ],
)
def test_parse_ignores_text_similar_to_xid(text):
    assert parse(text) is None


def test_xid_event_keeps_mig_instance():
    event = parse("NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:02): 94, pid=7194, Contained: CE User Channel (0x9).")
    assert event is not None
    assert event.pci == "0000:01:00.0"
    assert fields(event) == {"gpu_instance": "05", "compute_instance": "02"}


def test_recovery_action_is_read_by_number():
    event = parse("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0xa (PF FLR)")
    assert event is not None
    assert fields(event) == {"recovery_from": "0", "recovery_to": "10"}


def test_nvlink_xid_names_link_and_cause():
    event = parse(
        "NVRM: Xid (PCI:0000:b9:00): 74, pid=<unknown>, name=<unknown>, NVLink: fatal error detected on link "
        "6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0) caused by previous Xid 45"
    )
    assert event is not None
    assert fields(event) == {
        "link": "6",
        "fatal": "true",
        "register": "0x10000 0x0 0x0 0x0 0x0 0x0 0x0",
        "caused_by": "45",
    }


def test_xid_without_nvrm_prefix_is_read():
    event = parse("Xid (PCI:0000:3b:00): 79, pid=1, name=a, GPU has fallen off the bus.")
    assert event is not None
    assert (event.kind, event.code) == ("xid", "79")


@pytest.mark.parametrize("row", captured("gsp", "nvlink", "gpu_fallen_off_bus"))
def test_parse_reads_captured_gsp_and_nvlink_lines(row):
    (event,) = events(row["text"])
    expected = row["expected"]
    assert event.kind == row["kind"]
    if "gpu_instance" in expected:
        assert fields(event)["gpu"] == str(expected["gpu_instance"])
    if expected.get("gsp"):
        assert event.code == {"crashcat": "crash"}.get(expected["gsp"], expected["gsp"])


@pytest.mark.parametrize("row", [row for row in LINES if row["kind"] not in KINDS], ids=lambda row: row["id"])
def test_captured_lines_with_other_kinds_are_not_nvidia_events(row):
    assert {event.kind for event in events(row["text"])} & set(KINDS) == set()


# --- Xid


@pytest.mark.parametrize("number", range(1, 186))
@pytest.mark.parametrize(
    "rest", [", pid=7, name=a b, Ch 00000008", ", pid=7, Ch 00000008", ", Ch 00000008", ",Ch 00000008", " x", ""]
)
def test_parse_reads_every_xid_in_every_form(number, rest):
    event = parsed(f"NVRM: Xid (PCI:0000:3b:00): {number}{rest}")
    assert (event.kind, event.code, event.pci) == ("xid", str(number), "0000:3b:00.0")
    assert (event.pid, event.process) == (7 if "pid" in rest else None, "a b" if "name" in rest else None)


@pytest.mark.parametrize(
    ("address", "pci"),
    [
        (" (PCI:0000:3b:00)", "0000:3b:00.0"),
        (" (0000:3b:00)", "0000:3b:00.0"),  # to driver 334
        (" (003b:00)", "0000:3b:00.0"),  # to 2010: bus and device
        (" (PCI:0000:3B:00.0)", "0000:3b:00.0"),
        (" (PCI:00000009:01:00)", "0009:01:00.0"),
        (" (PCI:0000:10:1c)", "0000:10:1c.0"),
        (" (PCI:0018:01:00 GPU-I:05)", "0018:01:00.0"),
        (" (PCI:0018:01:00 GPU-I:05 GPU-CI:01)", "0018:01:00.0"),
        (" (PCI:XXXX:XX:XX)", ""),
        ("", ""),  # the oldest form
    ],
)
def test_xid_address_is_read_in_every_form(address, pci):
    event = parsed(f"NVRM: Xid{address}: 13, 0003 00000000 00008297 00000e08 00190000 00000040")
    assert (event.kind, event.code, event.pci) == ("xid", "13", pci)


MESSAGES = [
    "Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): Illegal Instruction Parameter",
    "Graphics Exception: ESR 0x57c730=0xc04000b 0x57c734=0x24",
    "Ch 0000005a, intr 10000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_1 faulted @ 0x0_00000000.",
    "channel 0x00000002, intr 00000000. MMU Fault: ENGINE CE0 HUBCLIENT_HSCE0 faulted",
    "Channel ID 00000052 intr 02000000",
    "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at physAddr 0x18f31d80",
    "223b6a66 00002100 00000000 20662342",
    "Row Remapper: New row (0x0000000018f31d80) marked for remapping, reset gpu to activate.",
    "Row Remapper Error: (0x00000002eebc4100) - All reserved rows for bank are remapped",
    "Dynamic Page Retirement: New page retired, reboot to activate (0x00000000000a1b2c).",
    "NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    "Contained: SM (0x1). RST: No, D-RST: No",
    "Uncontained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No",
    "GPU has fallen off the bus.",
    "Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x58005",
    "Timeout after 6s of waiting for RPC response from GPU4 GSP! Expected function 76 (GSP_RM_CONTROL) (0x2080 0x4c).",
    "GSP kernel exception: store access page fault (cause:0xf) @ pc:0xffffffff93003d42, partition:4#0",
    "RLW_SRC_TRACK Nonfatal XC1 i0 Link 03 (0x040868e2 0x00000008 0x0 0x0 0x0 0x0)",
    "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
    "BAD_TSG encountered on runlist: 0 with error code: 4",
    "CMDre 00000000 00002c88 000100bc 00000007 00000000",
    "High single-bit ECC error rate detected",
    "CE User Channel (0x9). RST: No, D-RST: No",
]
NAMES = [
    "python3",
    "Plex Media Serv",
    "a, b",
    "nvc:[driver]",
    "VLLM::Worker",
    "ray::WorkerDict",
    "x'y\"z",
    "pid=4",
    "a,",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("message", MESSAGES)
def test_process_name_ends_where_message_begins(name, message):
    event = parsed(f"NVRM: Xid (PCI:0000:3b:00): 119, pid=12, name={name}, {message}")
    assert (event.pid, event.process) == (12, name)


@pytest.mark.parametrize("name", ["): 79, x", "79, GPU has fal", "pid=1, name=b", "(PCI:0000:01:00", "a): 79, Ch 1"])
@pytest.mark.parametrize("message", MESSAGES)
def test_process_name_forges_no_field(name, message):
    event = parsed(f"NVRM: Xid (PCI:0000:3b:00): 145, pid=12, name={name}, {message}")
    assert (event.kind, event.code, event.pci, event.pid) == ("xid", "145", "0000:3b:00.0", 12)
    plain = parsed(f"NVRM: Xid (PCI:0000:3b:00): 145, pid=12, name=a, {message}")
    assert fields(event) in ({}, fields(plain))


XID_NAME = "NVRM: Xid (PCI:0000:01:00): 79"


@pytest.mark.parametrize("name", [XID_NAME, XID_NAME[:15], f"{XID_NAME}, GPU has fallen off the bus."])
@pytest.mark.parametrize(
    "line",
    [
        "INFO: task {}:4711 blocked for more than 120 seconds.",
        "Out of memory: Killed process 4711 ({}) total-vm:8kB, anon-rss:4kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/{},task={},pid=4711,uid=0",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [{}:4711]",
        "{}[4711]: segfault at 0 ip 0000 sp 0000 error 4 in a.out",
        "CPU: 3 PID: 4711 Comm: {} Tainted: P           OE",
        "nvidia-persistenced: {}",
        "NVRM: API mismatch: the client '{}' (pid 4711)",
        'audit: type=1400 audit(1.0:1): apparmor="DENIED" comm="{}"',
        "systemd[1]: Started {}.",
        "{} invoked oom-killer: gfp_mask=0xcc0",
    ],
)
def test_process_named_like_xid_yields_no_event(name, line):
    event = parse(line.replace("{}", name)) if not line.startswith("{}") else parse(f"x{line.replace('{}', name)}")
    assert event is None or event.kind not in KINDS


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "NVLink: fatal error detected on link 2(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
            {"link": "2", "fatal": "true", "register": "0x10000 0x0 0x0 0x0 0x0 0x0 0x0"},
        ),
        (
            "NVLink: non-fatal error detected on link 14(0x0, 0x0, 0x100000)",
            {"link": "14", "fatal": "false", "register": "0x0 0x0 0x100000"},
        ),
        ("NVLink: fatal error detected on link 2", {"link": "2", "fatal": "true"}),
        (
            "NVLink: fatal error detected on link 2(0x0, 0x0, 0x0, 0x60000, 0x0, 0x0, 0x0)",
            {"link": "2", "fatal": "true", "register": "0x0 0x0 0x0 0x60000 0x0 0x0 0x0", "reset": "true"},
        ),
        ("NVLink: error detected on link 05 (0x1,0x0)", {"link": "5", "register": "0x1 0x0"}),
        ("NVLink: Failed to train link 3 to remote PCI:0000:08:00", {"link": "3", "inactive": "true"}),
        ("NVLink: failed to train link 11 to remote PCI:0000:08:00", {"link": "11", "inactive": "true"}),
        ("Training error on link 4", {}),
    ],
)
def test_nvlink_xid_has_link_and_registers(message, expected):
    for process in ("", "pid='<unknown>', name=<unknown>, ", "pid=7, name=python3, "):
        assert fields(parsed(f"NVRM: Xid (PCI:0000:3b:00): 74, {process}{message}")) == expected


@pytest.mark.parametrize(
    ("register", "reset"), [("0x40000", "true"), ("0xfffbffff", None), ("0x20000", None), ("0x80000", None)]
)
def test_nvlink_xid_requires_reset_by_fourth_register_bit_18(register, reset):
    message = f"74, NVLink: fatal error detected on link 2(0x0, 0x0, 0x0, {register}, 0x0, 0x0, 0x0)"
    assert fields(parsed(f"NVRM: Xid (PCI:0000:3b:00): {message}")).get("reset") == reset


@pytest.mark.parametrize("row", codes.nvlink5_rows(), ids=lambda row: f"{row.code}-{row.units[0]}")
@pytest.mark.parametrize("severity_text", ["Fatal  ", "Nonfatal", "Link Fatal"])
def test_nvlink5_table_rows_are_decoded_from_lines(row, severity_text):
    for pattern in row.patterns:
        info = int(pattern.replace("-", "0"), 2)
        for status in row.statuses or (0,):
            for unit in row.units:
                registers = f"({info:#010x} {status:#010x} 0x00000000 0x00000000 0x00000000 0x00000000)"
                event = parsed(
                    f"NVRM: Xid (PCI:0018:01:00): {row.code}, {unit} {severity_text} XC1 i0 Link -1 {registers}"
                )
                event_fields = fields(event)
                assert (event_fields["unit"], event_fields["link"], event_fields["fatal"]) == (
                    unit,
                    "-1",
                    str(severity_text != "Nonfatal").lower(),
                )
                row_found = codes.nvlink5(
                    row.code, unit, int(event_fields["intr_info"], 16), int(event_fields["error_status"], 16)
                )
                assert row_found is not None
                assert (unit in row_found.units, row_found.action) == (True, row.action)
                assert codes.sub_code(info) == row.sub_code


def test_rpc_timeout_names_gpu_number():
    text = "119, pid=1, name=a, Timeout after 45s of waiting for RPC response from GPU4 GSP! Expected function 76"
    assert fields(parsed(f"NVRM: Xid (PCI:0000:9b:00): {text}")) == {"gpu": "4"}
    assert fields(parsed("NVRM: Xid (PCI:0000:9b:00): 119, Timeout waiting for RPC from GPU0 GSP! Expected")) == {
        "gpu": "0"
    }


# --- SXid


@pytest.mark.parametrize("number", codes.sxid_numbers())
def test_parse_reads_every_sxid_with_switch_severity_and_link(number):
    event = parsed(f"nvidia-nvswitch11: SXid (PCI:0000:C3:00.0): {number:05d}, Non-fatal, Link 07 x (First)")
    assert (event.kind, event.code, event.pci) == ("sxid", str(number), "0000:c3:00.0")
    assert fields(event) == {"switch": "11", "fatal": "false", "link": "7"}


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("26007, SOE EXTERR", {}),
        ("28006, SOE HALT data[3] = 0x             123", {}),
        ("20034, Fatal, Link 30 LTSSM Fault Up", {"fatal": "true", "link": "30"}),
        ("10003, Fatal, Host_unhandled_interrupt", {"fatal": "true"}),
        ("20009, Non-fatal, Li", {"fatal": "false"}),
        ("20009", {}),
    ],
)
def test_sxid_fields_match_line(rest, expected):
    event = parsed(f"nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): {rest}")
    assert fields(event) == {"switch": "0", **expected}


@pytest.mark.parametrize("rest", ["Severity 1 Engine instance 28 Sub-engine instance 00", "Data {0x0000003c, 0x0}"])
def test_further_sxid_line_names_switch_and_code(rest):
    event = parsed(f"nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, {rest}")
    assert (event.code, event.pci, fields(event)) == ("24007", "0000:c3:00.0", {"switch": "0", "further": "true"})


# --- other lines of the driver


@pytest.mark.parametrize(
    ("text", "code", "pci", "gpu"),
    [
        ("GPU 0000:01:00.0: GPU has fallen off the bus.", "fallen_off_bus", "0000:01:00.0", None),
        ("GPU at PCI:0000:01:00: GPU has fallen off the bus.", "fallen_off_bus", "0000:01:00.0", None),
        ("GPU 0000:01:00.0: GPU is lost, skipping PM event", "gpu_is_lost", "0000:01:00.0", None),
        (
            "GPU3 nvCheckOkFailedNoLog: Check failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F) returned",
            "gpu_is_lost",
            "",
            "3",
        ),
        (
            "nvAssertOkFailedNoLog: Assertion failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F) returned",
            "gpu_is_lost",
            "",
            None,
        ),
        (
            "GPU0 _intrServiceStallCommonCheckBegin: Failed GPU reg read : 0xffffffff. Check whether GPU is present on "
            "the bus",
            "gpu_is_lost",
            "",
            "0",
        ),
        ("_threadNodeCheckTimeout: API_GPU_ATTACHED_SANITY_CHECK failed!", "gpu_is_lost", "", None),
        ("GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:2168)", "rm_init_failed", "0000:a1:00.0", None),
        ("GPU 0000:a1:00.0: rm_init_adapter failed, device minor number 6", "rm_init_failed", "0000:a1:00.0", None),
        ("rm_init_adapter failed for device bearing minor number 0", "rm_init_failed", "", None),
    ],
)
def test_lost_gpu_is_read_in_every_wording(text, code, pci, gpu):
    event = parsed(f"NVRM: {text}")
    assert (event.kind, event.code, event.pci) == ("gpu_fallen_off_bus", code, pci)
    assert fields(event).get("gpu") == gpu


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "_kgspLogXid119: ********************************* GSP Timeout **********************************",
            "rpc_timeout",
        ),
        (
            "_kgspLogXid119: ********************************* GSP Failure **********************************",
            "rpc_timeout",
        ),
        ("_kgspLogRpcTimeout: ********************* GSP Timeout *********************", "rpc_timeout"),
        ("_kgspLogRpcTimeout: Note: Please also check logs above.", "dump"),
        (
            "_kgspIsHeartbeatTimedOut: Heartbeat timed out, currentTimeMs 812751949 heartbeat 1899482 diff 60",
            "rpc_timeout",
        ),
        ("_kgspRpcRecvPoll: GSP RM heartbeat timed out", "rpc_timeout"),
        ("_kgspRpcRecvPoll: LibOS heartbeat timed out", "rpc_timeout"),
        ("_kgspClassifyGspTimeout: ================ GSP core unresponsive ===============", "rpc_timeout"),
        (
            "_kgspLogRpcSanityCheckFailure: GPU6 sanity check failed 0xf waiting for RPC response from GSP.",
            "rpc_timeout",
        ),
        ("_issueRpcAndWait: rpcRecvPoll timedout for fn 76!", "rpc_timeout"),
        ("kgspHealthCheck_TU102: ****************************** GSP-CrashCat Report *******************", "crash"),
        ("kgspHealthCheck_TU102: *************** LibOS Task Watchdog Report ***************", "dump"),
        ("kgspHealthCheck_TU102: ***************************************************************************", "dump"),
        ("kgspPrintGspBinBuildId_IMPL: GSP bin buildId: 4f09703c5c7d57baa527d6a189bb6d118bc60e49", "dump"),
        ("_kgspRpcGspEventPmuHalted: Received signal from GSP that PMU has halted.", "pmu_halted"),
        ("_kgspBootGspRm: unexpected WPR2 already up, cannot proceed with booting GSP", "boot_failed"),
        ("_kgspBootGspRm: (the GPU is likely in a bad state and may need to be reset)", "boot_failed"),
        ("kgspWaitForGfwBootOk_TU102: (the GPU may be in a bad state and may need to be reset)", "boot_failed"),
        ("RmInitAdapter: Cannot initialize GSP firmware RM", "boot_failed"),
        ("kgspInitRm_IMPL: Max GSP-RM boot attempts exceeded: 4/4", "boot_failed"),
        ("kgspBootstrap_TU102: Failed to boot GSP.", "boot_error"),
        ("gpuWaitForGfwBootComplete_TU102: failed to wait for GFW_BOOT: (progress 0x3)", "boot_error"),
        (
            "RmFetchGspRmImages: Failed to load gsp_log_*.bin, no GSP-RM logs will be printed (non-fatal)",
            "message",
        ),
        ("kgspExecuteBooterLoad_TU102: failed to execute Booter Load: 0x62", "boot_error"),
        (
            "kgspBootstrap_GH100: Timeout waiting for lockdown release. It's also possible that bootrom may",
            "boot_error",
        ),
        ("kfspPollForQueueEmpty_IMPL: Timed out waiting for FSP command queue to be empty.", "boot_error"),
        ("kfspDumpDebugState_GH100: NV_PFSP_FALCON_COMMON_SCRATCH_GROUP_2(0) = 0x9f", "dump"),
        ("nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED]", "reset_required"),
        ("nvCheckOkFailedNoLog: Check failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000061)", "reset_required"),
        (
            "nvAssertFailedNoLog: Assertion failed: Back to back GSP RPC timeout detected! GPU marked for reset",
            "reset_required",
        ),
        ("GSP RPC buffer contains function 76 (GSP_RM_CONTROL) and data 0x000000002080a097 0x490.", "dump"),
        (
            "nvAssertOkFailedNoLog: Assertion failed: Invalid argument to call [NV_ERR_INVALID_ARGUMENT] (0x0000001F) "
            "returned from kgspWaitForRmInitDone(pGpu, pKernelGsp) @ kernel_gsp_gh100.c:1107",
            "message",
        ),
        ("RPC history (CPU -> GSP):", "dump"),
        ("RPC event history (CPU <- GSP):", "dump"),
        ("kflcnCoreDumpDestructive_IMPL: ICD: csr[100] = 0x0000000200000020", "dump"),
        ("kgspSomethingNew_GB300: a sentence of tomorrow", "message"),
    ],
)
def test_gsp_line_has_code(text, code):
    event = parsed(f"NVRM: {text}")
    assert (event.kind, event.code, fields(event)) == ("gsp", code, {})
    event = parsed(f"NVRM: GPU6 {text}")
    assert (event.kind, event.code, fields(event)) == ("gsp", code, {"gpu": "6"})


@pytest.mark.parametrize(
    "text",
    [
        "     0    76   GSP_RM_CONTROL        0x000000002080a097 0x0000000000000490 0x000609ffebd7f5bd          y",
        "    -1    103  GSP_RM_ALLOC          0x00000000000090cc 0x0000000000000000 0x00060ec47fc74b7c    706us",
        "    entry function                   data0              data1              ts_start           ts_end",
        "    Reported by libos partition:2#4 kernel v3.1 [0] @ ts:1787168183",
        "    RISC-V CSR State:",
        "        mstatus:0x0000000a00000080  mscratch:0x0000000000000000",
    ],
)
def test_gsp_table_lines_are_dump(text):
    event = parsed(f"NVRM: {text}")
    assert (event.kind, event.code, event.pci) == ("gsp", "dump", "")


def test_gsp_watchdog_report_is_dump():
    event = parsed("GSP task watchdog timeout @ pc:0x1b3e200, partition:4#0, task:3")
    assert (event.kind, event.code) == ("gsp", "dump")


def test_parse_ignores_other_assertions():
    assert parse("NVRM: nvAssertOkFailedNoLog: Assertion failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)") is None
    assert parse("NVRM: GPU0 iovaspaceDestruct_IMPL: 1 left-over mappings in IOVAS 0x100") is None


def test_rate_limit_and_failed_firmware_load_name_gpu():
    limited = "NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:9b:00 (printing 1 of every 30).  The GPU"
    event = parsed(f"{limited} likely needs to be reset.")
    assert (event.kind, event.code, event.pci) == ("gsp", "rpc_timeout", "0000:9b:00.0")
    event = parsed("nvidia 0000:03:00.0: Direct firmware load for nvidia/535.129.03/gsp_ga10x.bin failed with error -4")
    assert (event.kind, event.code, event.pci) == ("gsp", "boot_error", "0000:03:00.0")


def test_undecodable_firmware_log_is_no_event():
    message = "Failed to load gsp_log_*.bin, no GSP-RM logs will be printed (non-fatal)"
    assert parse(f"NVRM: GPU1 RmInitAdapter: {message}") is None
    assert parse("nvidia 0000:03:00.0: Direct firmware load for nvidia/580.65/gsp_log_ga10x.bin failed") is None


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!", "rx_detect", {}),
        (
            "NVRM: GPU2 knvlinkDiscoverPostRxDetLinks_GH100: Getting peer1's postRxDetLinkMask failed!",
            "rx_detect",
            {"gpu": "2"},
        ),
        (
            "NVRM: GPU0 knvlinkLogAliDebugMessages_GB100: ALI Error for GPU 0::linkId 3: 0x10001",
            "training",
            {"gpu": "0", "link": "3"},
        ),
        (
            "NVRM: knvlinkCheckTrainingIsComplete_IMPL: Timedout while checking to see if training complete!",
            "training",
            {},
        ),
        ("NVRM: knvlinkCoreRequest: Failed to request Link 7 to transition to active", "training", {"link": "7"}),
        ("NVRM: NVLink training failed on link 4", "training", {"link": "4"}),
        ("NVRM: GPU 0000:65:00.0: NVLink link 2 disabled due to error", "error", {"link": "2"}),
        (
            "NVRM: knvlinkPrepareForXVEReset_IMPL: failed to reset links on GPU3 while preparing XVE reset",
            "error",
            {"gpu": "3"},
        ),
        (
            "NVRM: GPU1 knvlinkFatalErrorRecovery_IMPL: Failed to recover from uncontained NVLINK error.",
            "error",
            {"gpu": "1"},
        ),
        ("nvidia-nvlink: Unable to create cdev", "error", {}),
        ("nvidia-nvlink: NVLink: Assertion failed!", "error", {}),
        ("nvidia-nvswitch3: Failed to initialize device", "error", {}),
    ],
)
def test_nvlink_line_has_code(text, code, expected):
    event = parsed(text)
    assert (event.kind, event.code, fields(event)) == ("nvlink", code, expected)
    assert event.pci == ("0000:65:00.0" if "0000:65" in text else "")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build  (root@epyc)",
        "NVRM: GPU at PCI:0000:3b:00: GPU-8a47641b-dff6-f09f-618c-c3eb58fb430d",
        "NVRM: GPU at 0000:3b:00: GPU-8a47641b-dff6-f09f-618c-c3eb58fb430d",
        "NVRM: GPU Board Serial Number: 1320223035733",
        "NVRM: Persistence mode is deprecated and will be removed in a future release.",
        "NVRM: knvlinkSetUniqueFabricBaseAddress_GV100: Fabric base addr 8000000000 is assigned to GPU 3",
        "NVRM: knvlinkEnterExitPowerState: Skipping L2 entry/exit since fabric is externally managed",
        "nvidia-nvlink: Nvlink Core is being initialized, major device number 237",
        "nvidia-nvlink: Unregistered Nvlink Core, major device number 508",
        "nvidia-nvlink: nvlink driver open",
        "nvidia-nvswitch0: open (major=236)",
        "nvidia-nvswitch0: Probing device 0000:08:00.0, Vendor Id = 0x10de, Device Id = 0x22a3, Class = 0x68000",
        "nvidia-nvswitch: Probing device 0000:08:00.0, Vendor Id = 0x10de, Device Id = 0x22a3, Class = 0x68000",
        "nvidia-nvswitch2: using MSI",
        "nvidia 0000:3b:00.0: enabling device (0000 -> 0003)",
        "nvidia-modeset: Loading NVIDIA UNIX Open Kernel Mode Setting Driver for x86_64  595.71.05",
        "nvidia-uvm: Loaded the UVM driver, major device number 505.",
        "[drm] [nvidia-drm] [GPU ID 0x00003b00] Loading driver",
        "nvidia: loading out-of-tree module taints kernel.",
        "nvidia: module license 'NVIDIA' taints kernel.",
        "nvidia-peermem nv_mem_dummy_callback:191 ERROR nv_mem_dummy_callback -- error -22 while calling x",
        "nvidia 0000:2c:00.0: probe with driver nvidia failed with error -1",
    ],
)
def test_parse_ignores_healthy_driver_lines(text):
    assert parse(text) is None


# --- any text


STARTS = [
    "NVRM: ",
    "NVRM: Xid (",
    "NVRM: Xid (PCI:0000:3b:00): 74, ",
    "NVRM: Xid (PCI:0000:3b:00): 74, NVLink: fatal error detected on link 2(0x1",
    "NVRM: Xid (PCI:0000:3b:00): 145, pid=1, name=",
    "NVRM: Xid (PCI:0000:3b:00): 145, RLW_REMAP Fatal XC0 i0 Link 03 (0x",
    "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x",
    "nvidia-nvswitch0: SXid (PCI:0000:3b:00.0): 20034, ",
    "NVRM: GPU at 0000:3b:00.0",
    "NVRM: The NVIDIA GPU 0000:3b:00.0",
    "NVRM: GPU6 _kgspBootGspRm: ",
    "NVRM: GPU6 nvAssertOkFailedNoLog: ",
    "NVRM: knvlinkFoo_IMPL: Failed ",
    "NVRM: NVLink ",
    "nvidia-nvlink: ",
    "NVRM:     ",
    "nvidia 0000:3b:00.0: Direct firmware load for nvidia/",
]
PIECES = [
    *(
        " ",
        ",",
        "'",
        "(",
        ")",
        "\n",
        ": ",
        "0x1",
        "0",
        "a",
        "pid=",
        "name=",
        "GPU",
        "Link ",
        "Fatal",
        "NVRM: ",
        "Xid (",
        "79",
    ),
    *(
        "fallen off the bus",
        "GPU is lost",
        "NVLink",
        "failed",
        "GSP",
        "PMU has halted",
        "marked for reset",
        "train",
        "\ufffd",
    ),
    *(
        "[NV_ERR_GPU_IS_LOST]",
        "XC0 i0 ",
        "NVRM: GPU0 ",
        "caused by previous Xid 79",
        "SXid (PCI:0000:01:00.0): 1, ",
        "\x1b[0m",
    ),
]


@given(st.sampled_from(STARTS), st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=60))
def test_parse_accepts_any_text_after_driver_prefix(start, pieces):
    text = start + "".join(pieces)
    event = parse(text)
    assert event is None or event.text == text.rstrip()[:1024]
    if event is not None and event.kind in ("xid", "sxid"):
        assert event.code.isdecimal()


@given(st.sampled_from(STARTS[2:8]), st.text(max_size=15), st.sampled_from(MESSAGES))
def test_process_may_have_any_name(start, name, message):
    line_start = start.partition("): ")[0] + "): 109, pid=12, name="
    event = parse(f"{line_start}{name}, {message}")
    if event is not None and event.kind == "xid":
        assert (event.code, event.pci, event.pid) == ("109", "0000:3b:00.0", 12)


@pytest.mark.parametrize("start", STARTS)
def test_rules_match_long_line_in_short_time(start):
    def match_all(text: str) -> None:
        for rule in nvidia.RULES:
            match = rule.pattern.match(text)
            if match is not None:
                rule.build(rule.kind, match)

    for piece in PIECES:
        text = start + piece * (16_000 // len(piece))
        assert cpu_seconds(lambda text=text: match_all(text), 0.05) < 0.05, piece


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("NVRM: The NVIDIA probe routine failed for 1 device(s).", "1"),
        ("NVRM: The NVIDIA probe routine failed for 8 device(s)", "8"),
        ("NVRM: The NVIDIA probe routine was not called for 3 device(s).", "3"),
        ("NVRM: None of the NVIDIA devices were initialized.", ""),
        ("NVRM: None of the NVIDIA graphics adapters were initialized!", ""),
        ("NVRM: No NVIDIA devices probed.", ""),
    ],
)
def test_failed_probe_is_read_with_count(text, count):
    event = parse(text)
    assert (event.kind, event.code, event.field("count")) == ("gpu_fallen_off_bus", "probe_failed", count)


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        ("NVRM: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F) returned from x @ y.c:1", ""),
        ("NVRM: GPU3 GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F)", "3"),
        ("NVRM: Check failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F)", ""),
        ("NVRM: GPU3 nvCheckOkFailedNoLog: Check failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F)", "3"),
    ],
)
def test_lost_gpu_is_read_without_function_name(text, gpu):
    event = parse(text)
    assert (event.kind, event.code, event.field("gpu")) == ("gpu_fallen_off_bus", "gpu_is_lost", gpu)


@pytest.mark.parametrize(
    ("message", "sm"),
    [
        ("Graphics SM Warp Exception on (GPC 7, TPC 5, SM 1): Illegal Instruction Parameter", "7.5.1"),
        ("Graphics SM Global Exception on (GPC 0, TPC 10, SM 0): Multiple Warp Errors", "0.10.0"),
        ("Graphics SM Warp Exception on (GPC 1, TPC 0): Out Of Range Address", "1.0"),
        ("Graphics Exception: ESR 0x57c730=0xc04000b 0x57c734=0x24", ""),
        ("Graphics Exception: ChID 000c, Class 0000cbc0, Offset 00000000, Data 00000000", ""),
    ],
)
def test_xid_13_names_sm(message, sm):
    for process in ("", "pid='<unknown>', name=<unknown>, ", "pid=7, name=python3, "):
        assert parse(f"NVRM: Xid (PCI:0000:cb:00): 13, {process}{message}").field("sm") == sm
    assert parse(f"NVRM: Xid (PCI:0000:cb:00): 31, {message}").field("sm") == ""
