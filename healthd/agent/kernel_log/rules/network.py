"""Rules for network cards: mlx5 in all its formats, InfiniBand, bonds, and other drivers' links that went down.

    mlx5   lines from NVIDIA's driver about its card, and lines about bonds. On GPU nodes, a bond consists of the card's
           ports, and one fault produces both kinds of lines
    ib     InfiniBand's own lines, and lines about other network cards (mlx4, bnxt, ice, irdma, ENA, EFA, other
           Ethernet)

Codes for both kinds, with their fields:

    link_down, link_up, link_init   state of a port's link; netdev or ibdev. Only mlx5 and InfiniBand report that a port
                                    is up again
    bond_down        none of a bond's members is up
    health           the firmware's health report; issue, synd; from Linux 5.14 on, severity (3 = error, 4 = warning)
    health_fatal     the firmware is dead or could not be recovered; error = the driver's sensor number
    rdma_failed      the driver cannot create RDMA objects, or its RDMA part failed; the port may remain ACTIVE
    health_recovery  the driver stops and restarts a card (earlier lines show the cause); device = the sub-function
    temperature   the card's temperature
    module_temperature, module_power, module_error   problems with the transceiver or cable
    command_timeout  the firmware did not answer; command; leaks is set if the driver reports a leaked resource
    slot_power       the slot supplies too little power to the card, or the card has disabled a port because of it
    command_failed, cq_error, cqe_error, send_failed, multicast_failed   one request failed, often a request by an
                                                                         application
    detail           the rest of a health report
    tx_timeout, pci_error, load_failed, port_failed, sriov_failed, pcie_limited

Ignored: cables plugged or unplugged, ACCESS_REG and QUERY_* commands that a firmware does not support, unlimited
bandwidth, and messages while the driver starts and stops. Formats: Linux 3.10 to 7.3, drivers/net/ethernet/mellanox
(mlx4, mlx5), drivers/infiniband, drivers/net/bonding, net/sched/sch_generic.c; MLNX_OFED.
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import DETAIL, PCI, Rule, event, event_builder
from healthd.common.model import KernelEvent
from healthd.common.text import regex

_IF = r"[^\s:/]{1,15}"  # a network interface

# mlx5_core 0000:61:00.0: print_health_info:520:(pid 0): synd 0x10: High temperature
# mlx5_core 0000:53:00.0 enp83s0f0np0: Link down              the card's interface, or its RDMA device (mlx5_3)
# mlx5_core.sf mlx5_core.sf.25: mlx5_health_try_recover:389:(pid 40948): health recovery failed      a sub-function
# mlx5_core 0000:03:00.0: 0000:03:00.0:wait_func:961:(pid 6): to Linux 4.x
# infiniband rocep33s0f0: mlx5_poll_one:527:(pid 0): ...; mlx5_0:dump_cqe:272:(pid 0): ...; mlx5_warn:mlx5_0:...
_MLX5 = regex(
    r"(?:mlx5_core(?:\.sf)?(?: ([\w:.]{1,24}))?(?: ([^\s:/]{1,64}))?(?: \(\w{1,16}\))?: |infiniband ([\w.-]{1,32}): "
    r"|(?:mlx5_\w{1,8}:)?(?=mlx5_\w{1,32}:))"
    r"(?:(?:[\w:.]{1,24}:)??\w{1,64}:\d{1,6}:\(pid \d{1,10}\): )?"
)

_LINK_CODES = {"down": "link_down", "up": "link_up", "active": "link_up", "init": "link_init", "armed": "link_init"}
_FORMS = tuple(
    (code, regex(pattern))
    for code, pattern in (
        ("link", r"Link (?:is )?(?P<link>(?i:down|up))\b"),
        ("link", r"(?:mlx5_ib: )?Port: ?(?P<port>\d{1,3}) Link (?P<link>DOWN|ACTIVE|INIT|ARMED)\b"),
        ("health", r"Health issue observed, (?P<issue>[^,\n]{1,64}), severity\((?P<severity>\d{1,3})\)"),
        ("health", r"synd (?P<synd>0x[0-9a-f]{1,8}): (?P<issue>[^\n]{1,64}?)\s*$"),
        ("health_fatal", r"Fatal error(?: (?P<error>\d{1,3}))? detected"),
        ("health_fatal", r"device's health compromised|health recovery (?:flow aborted|failed)"),
        ("health_fatal", r"PCI slot(?: \d{1,6})? is unavailable|FW is unable to respond"),
        ("health_recovery", r"handling bad device here|starting health recovery flow|NIC IFC still \d"),
        ("health_recovery", r"Expected to see disabled NIC but it is "),
        (DETAIL, r"(?:assert_(?:var\[\d\]|exit_ptr|callra)|hw_id|ext_synd|raw fw_ver) 0x[0-9a-f]{1,8}\s*$"),
        (DETAIL, r"(?:irisc_index|rfr|crr) \d{1,3}\s*$"),
        ("temperature", r"High temperature on sensors?\b"),
        (
            "module",
            r"Port module event\[error\]: module (?P<module>\d{1,3}), (?:Cable error, )?(?P<error>[^\n]{1,256}?)\s*$",
        ),
        (
            "command_timeout",
            r"(?:cmd\[\d{1,4}\]: )?(?P<command>\w{1,48})\(0x[0-9a-f]{1,8}\) "
            r"(?:No done completion|(?:Async, )?timeout\b(?P<leaks>\. Will cause a leak of a command resource)?"
            r"|canceled on out of queue timeout|timed out while waiting for a slot)",
        ),
        ("command_timeout", r"failed to allocate command entry|All CMD slots are stalled"),
        (
            "command_failed",
            r"(?P<command>\w{1,48})\(0x[0-9a-f]{1,8}\) [^\n]{0,48}?failed, status (?P<status>[^(,\n]{1,48})\(",
        ),
        ("command_failed", r"Create QP type \d{1,5} failed|mlx5_ib: modify QP \w{1,16} to RESET failed"),
        ("slot_power", r"(?:mlx5_pcie_event: )?Detected insufficient power on the PCIe slot \(\d{1,4}W\)"),
        ("cq_error", r"CQ error on CQN (?P<cqn>0x[0-9a-f]{1,8})"),
        ("cqe_error", r"dump error cqe|WC error: \d|(?:(?:Requestor |Responder )?[Ee]rror cqe|Error CQE|ERR CQE) on "),
        (DETAIL, r"syndrome 0x[0-9a-f]{1,4}, vendor syndrome 0x|ib_post_recv failed: "),
        ("tx_timeout", r"TX timeout (?:detected|on )|RX timeout on channel|NETDEV WATCHDOG: "),
        # A PCI Express error begins with err_detected. slot_reset is also a step of mlx5_recover_device(), health.c.
        ("pci_error", r"mlx5_pci_err_detected\b"),
        ("health_recovery", r"mlx5_pci_slot_reset\b"),
        ("load_failed", r"mlx5_\w{1,32} failed with error code(?: is)?:? (?P<error>-?\d{1,5})"),
        (
            "load_failed",
            r"probe (?:of (?P<device>[\w:.]{1,24})|with driver \w{1,16}) failed with error (?P<error>-\d{1,5})",
        ),
        ("load_failed", r"Firmware over \d{1,8} MS in |(?:enable|init) hca failed|handle_hca_cap\w* failed"),
        ("sriov_failed", r"not enough MMIO resources for SR-IOV|failed to enable eswitch SRIOV"),
        ("pcie_limited", r"[\d.]{1,12} Gb/s available PCIe bandwidth, limited by "),
    )
)
# mlx5_pme_error_to_string(), drivers/net/ethernet/mellanox/mlx5/core/events.c. The longest text, "One or more network
# ports have been powered down due to insufficient/unadvertised power on the PCIe slot", has 104 characters. Older
# drivers (mlx5/core/port.c, eq.c) add a sentence, which makes it 198.
_MODULE_CODES = (("slot", "slot_power"), ("power", "module_power"), ("temperature", "module_temperature"))
_PROBE_LATER = "-517"  # EPROBE_DEFER: another driver must be loaded first


def _mlx5(kind: str, match: re.Match[str]) -> KernelEvent | None:
    text = match.string
    for code, form in _FORMS:
        if found := form.match(text, match.end()):
            return _mlx5_event(kind, match, code, found.groupdict())
    return None


def _mlx5_event(kind: str, match: re.Match[str], code: str, found: dict[str, str | None]) -> KernelEvent | None:
    command = found.get("command") or ""
    if found.get("error") == _PROBE_LATER:
        return None
    if code == "command_failed" and (command == "ACCESS_REG" or command.startswith("QUERY_")):
        return None
    if code == "health" and "high temp" in (found["issue"] or "").lower():
        code = "temperature"
    if code == "module":
        error = (found["error"] or "").lower()
        code = next((code for word, code in _MODULE_CODES if word in error), "module_error")
    if found.get("leaks"):
        found["leaks"] = "true"
    if code == "link":
        code = _LINK_CODES[(found.pop("link") or "").lower()]
    if code == "health_fatal" and found.get("error") in ("3", "4"):
        # The card was powered off or is being reset, as by mlxfwreset or when virtual functions are removed.
        code = "health_recovery"
    name = match[2] or match[3]
    sub_function = match[1] if match[1] and match[1].startswith("mlx5_core.sf.") else None
    role = "ibdev" if match[3] or (name and name.startswith("mlx5_")) or "port" in found else "netdev"
    fields = [
        (role, name),
        ("device", sub_function),
        *((key, value) for key, value in found.items() if key != "device"),
    ]
    return event(kind, match, code, found.pop("device", None) or match[1] or "", fields)


# bond0: (slave enp83s0f0np0): link status definitely down, disabling slave
# bonding: bond0: link status definitely down for interface eth0, disabling it        (to Linux 5.1)
_BOND_MEMBER = regex(
    rf"(?:bonding: )?({_IF}): (?:\(slave ({_IF})\): )?"
    rf"link status (?:definitely )?down(?: for (?:\w{{1,8}} )?interface ({_IF}),)?"
)
_BOND = regex(rf"(?:bonding: )?({_IF}): now running without any active interface")


# ice 0000:31:00.0 ens1f0: NIC Link is Down; igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Down; mlx4_en: ens2: Link Down
# The pattern includes the line's end, because a process may be called "a: b Link down".
_LINK_DOWN = regex(
    rf"(?:[\w-]{{1,24}} {PCI}(?: ({_IF}))?: (?:\w{{1,16}}: {_IF} )?|[a-z][\w-]{{1,15}}: ({_IF}):? )"
    r"(?:NIC )?[Ll]ink (?:is )?[Dd]own\.?"
    # bnxt_link_down_reason(), 7.3
    r"(?: \((?:Remote fault|OTP Speed limit violation|Cable removed|Module fault|BMC request down)\))?\s*$"
)
# bnxt_en 0000:21:00.0 bnxt_re0: Port: 1 Link DOWN
_PORT = regex(rf"[\w-]{{1,24}} {PCI} (\w{{1,32}}): Port: ?(\d{{1,3}}) Link (DOWN|ACTIVE|INIT|ARMED)\b")


def _port(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, _LINK_CODES[match[4].lower()], match[1], (("ibdev", match[2]), ("port", match[3])))


# infiniband mlx5_0: Couldn't open port 1 for agents; ib_mad: Couldn't open mlx4_0 port 1 for agents (to Linux 3.x)
# mlx5_1: couldn't register ipoib port 1; error -12
_AGENTS = regex(
    r"(?:infiniband (\S{1,32}): |ib_mad: )(?:Couldn't (?:open|start) (?:(?!port)(\w{1,32}) )?port(?: (\d{1,3}))?"
    r"|Couldn't create ib_mad QP\d|Couldn't post receive WRs|ib_query_port failed \()"
    r"|(\w{1,32}): (?:couldn't register ipoib port|failed to initialize device: \S{1,15} port) (\d{1,3})"
)
# infiniband rdmap0s6: The device didn't send any completion for admin cmd CREATE_QP(6); efa 0000:00:06.0: ...
_EFA_FORMS = (
    (
        "command_timeout",
        regex(r"Wait for completion \(polling\) timeout|The device didn't send any completion for "),
    ),
    ("command_failed", regex(r"Failed to (?:process|submit) command (?P<command>\w{1,48}) \(opcode ")),
    (
        "health_fatal",
        regex(
            r"Admin queue is closed|Reset indication didn't turn |Device isn't ready, (?:can't reset|abort com init)"
        ),
    ),
)
_EFA = regex(rf"(?:infiniband (?!mlx)([\w.-]{{1,32}})|efa {PCI}(?: [\w.-]{{1,32}})?): ")
# Other cards. Formats: Linux 6.12 and 7.3, drivers/net/ethernet/broadcom/bnxt/bnxt.c, drivers/infiniband/hw/bnxt_re,
# drivers/net/ethernet/intel/ice/ice_main.c, drivers/infiniband/hw/irdma, drivers/net/ethernet/amazon/ena.
#
# bnxt_en 0000:41:00.0 eth0: Firmware reset aborted, rc = -110
# bnxt_en 0000:41:00.0 rocep65s0f0: Failed to create HW CQ
# ice 0000:b1:00.0: Rebuild failed, unload and reload driver
CARD_DRIVERS = ("bnxt_en", "bnxt_re", "ice", "idpf", "irdma", "i40e", "ixgbe", "ena")
_CARD = regex(
    rf"(?:(?:{'|'.join(CARD_DRIVERS)}) {PCI}(?: (\S{{1,32}}))?"
    r"|infiniband (?!mlx)([\w.-]{1,32})): "
)
# (code, literals, form); each message of the form contains at least one of the literals
_CARD_FORMS = tuple(
    (code, needs, regex(pattern))
    for code, needs, pattern in (
        (
            "health_fatal",
            ("Firmware reset aborted", "aborted firmware reset"),
            r"Firmware reset aborted|Failed to reinitialize after aborted firmware reset",
        ),
        (
            "health_fatal",
            ("failed during FW reset", "Firmware init phase ", "Firmware not responding, "),
            r"bnxt_open\(\) failed during FW reset|Firmware init phase \d failed|Firmware not responding, ",
        ),
        (
            "health_fatal",
            ("PCI config space inaccessible", "unload and reload driver", "PF reset failed"),
            r"PCI config space inaccessible after|Rebuild failed, unload and reload driver|PF reset failed",
        ),
        (
            "health_fatal",
            ("unrecoverable",),
            r"\w{1,48}(?: failed, device is unrecoverable|: unrecoverable device error)",
        ),
        (
            "health_fatal",
            ("tx_timeout recovery unsuccessful", "unloaded and reloaded"),
            r"tx_timeout recovery unsuccessful|driver needs to be unloaded and reloaded",
        ),
        (
            "health_fatal",
            ("Error resetting device", "VSI rebuild"),
            r"Error resetting device\. Please reload|Error during VSI rebuild: |PF VSI rebuild failed",
        ),
        (
            "health_fatal",
            ("Rebuild of main VSI", "Reset during resume", "recovery mode detected"),
            r"Rebuild of main VSI failed again|Reset during resume failed|Firmware recovery mode detected",
        ),
        (
            "health_fatal",
            ("Can not reset", "Reset indication didn't"),
            r"Reset attempt failed\. Can not reset|Can not reset device|Reset indication didn't turn ",
        ),
        ("health_fatal", ("Device isn't ready",), r"Device isn't ready, (?:can't reset|abort com init)"),
        (
            "health_recovery",
            ("firmware fatal condition", "firmware reset event"),
            r"Detected firmware fatal condition|(?:Fatal|Non-fatal) firmware reset event",
        ),
        (
            "health_recovery",
            ("Requesting a reset", "Keep alive watchdog", "Trigger reset is on"),
            r"Requesting a reset|Keep alive watchdog timeout|Trigger reset is on",
        ),
        (
            "rdma_failed",
            ("Failed to create HW", "Failed to allocate HW", "Create HW SRQ", "create HW QP1"),
            r"Failed to (?:create|allocate) HW (?:CQ|QP|PD|AH)|(?:Create HW SRQ|create HW QP1) failed",
        ),
        (
            "rdma_failed",
            ("FW STALL", "RCFW"),
            r"(?:QPLIB: )?(?:\w{1,40}: )?FW STALL Detected|Failed to (?:initialize|allocate|enable) RCFW",
        ),
        (
            "rdma_failed",
            ("Failed to register with ", "IRDMA hardware"),
            r"Failed to register with (?:Ethernet driver|netedev)|IRDMA hardware initialization FAILED",
        ),
        (
            "rdma_failed",
            ("HW runtime init", "AEQ has overflowed", "critical PE Error", "HMC Error: "),
            r"HW runtime init FAIL|AEQ has overflowed|critical PE Error|HMC Error: ",
        ),
        ("command_failed", ("cmdq[",), r"(?:QPLIB: )?cmdq\[0x[0-9a-f]{1,8}\]=(?P<command>0x[0-9a-f]{1,4}) status "),
        ("tx_timeout", ("TX timeout detected, starting",), r"TX timeout detected, starting reset task"),
    )
)
_CARD_LITERALS = tuple(literal for _, needs, _ in _CARD_FORMS for literal in needs)
# ib0: transmit timeout: latency 1756 msecs (IPoIB); NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 5 timed out
_TRANSMIT = regex(rf"({_IF}): transmit timeout: latency \d")
_WATCHDOG = regex(
    rf"(?:NETDEV WATCHDOG: ({_IF}) \(([\w-]{{1,32}})\): transmit (?:queue (?:\d|timed out)|timed out)"
    rf"|([\w-]{{1,24}}) {PCI} ({_IF}): NETDEV WATCHDOG: )"
)
_IPOIB = regex(rf"({_IF}): (?:failed (?:cm )?send event \(status=|(multicast join failed) for )")
# mlx4_core 0000:81:00.0: Internal error detected:
_MLX4 = regex(
    rf"mlx4_core {PCI}: (?:(Internal error (?:mark was )?detected)|(?:communication channel )?command 0x\w{{1,8}} "
    r"(?:op 0x\w{1,8} )?timed out)"
)


def _agents(kind: str, match: re.Match[str]) -> KernelEvent:
    fields = (("ibdev", match[1] or match[2] or match[4]), ("port", match[3] or match[5]))
    return event(kind, match, "port_failed", fields=fields)


def _efa(kind: str, match: re.Match[str]) -> KernelEvent | None:
    for code, form in _EFA_FORMS:
        if found := form.match(match.string, match.end()):
            # After an unanswered command, the driver stops its command queue permanently (efa_com.c).
            leaks = "true" if code == "command_timeout" else None
            fields = (("ibdev", match[1]), ("leaks", leaks), *found.groupdict().items())
            return event(kind, match, code, match[2] or "", fields)
    return None


def _card(kind: str, match: re.Match[str]) -> KernelEvent | None:
    pci, name, ibdev = match.groups()
    for code, _, form in _CARD_FORMS:
        if found := form.match(match.string, match.end()):
            # Messages about RDMA name the RDMA device. All others name the interface.
            is_rdma = code in ("rdma_failed", "command_failed")
            fields = (("ibdev", ibdev or (name if is_rdma else None)), ("netdev", None if is_rdma else name))
            return event(kind, match, code, pci or "", (*fields, *found.groupdict().items()))
    return None


def _watchdog(kind: str, match: re.Match[str]) -> KernelEvent:
    kind = "mlx5" if (match[2] or match[3]) == "mlx5_core" else kind
    return event(kind, match, "tx_timeout", match[4] or "", (("netdev", match[1] or match[5]),))


def _ipoib(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, "multicast_failed" if match[2] else "send_failed", fields=(("netdev", match[1]),))


def _mlx4(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, "health_fatal" if match[2] else "command_timeout", match[1])


RULES = (
    Rule("mlx5", ("mlx5_", "dump error cqe"), _MLX5, _mlx5, varies=("status", "cqn", "leaks")),
    Rule(
        "mlx5",
        ("link status definitely down", "link status down"),
        _BOND_MEMBER,
        event_builder("link_down", bond=1, netdev=(2, 3)),
    ),
    Rule("mlx5", ("running without any active interface",), _BOND, event_builder("bond_down", bond=1)),
    Rule(
        "ib",
        ("Link is Down", "Link is down", "Link Down", "Link down", "link is down", "link down"),
        _LINK_DOWN,
        event_builder("link_down", pci=1, netdev=(2, 3)),
    ),
    Rule("ib", (" Link DOWN", " Link ACTIVE", " Link INIT", " Link ARMED"), _PORT, _port),
    Rule(
        "ib",
        (
            "Couldn't open",
            "Couldn't start",
            "Couldn't create ib",
            "Couldn't post rec",
            "ib_query_port failed",
            "register ipoib port",
            "failed to initialize device: ",
        ),
        _AGENTS,
        _agents,
    ),
    Rule(
        "ib",
        (
            "efa 0000:",
            "completion (polling) timeout",
            "completion for admin cmd",
            "(opcode ",
            "Admin queue is closed",
            "Reset indication didn't",
            "Device isn't ready",
        ),
        _EFA,
        _efa,
    ),
    # With the drivers' names, `healthd scan` also inspects and counts lines whose format is unknown.
    Rule("ib", (*(f"{driver} 00" for driver in CARD_DRIVERS), *_CARD_LITERALS), _CARD, _card),
    Rule("ib", ("transmit timeout: latency",), _TRANSMIT, event_builder("tx_timeout", netdev=1)),
    Rule("ib", ("NETDEV WATCHDOG",), _WATCHDOG, _watchdog),
    Rule("ib", ("send event (status=", "multicast join failed"), _IPOIB, _ipoib),
    Rule("ib", ("mlx4_core",), _MLX4, _mlx4),
)
