"""Proof that a power command reaches this machine's own BMC."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.repair.bmc import (
    is_placeholder,
    parse_board_serial,
    parse_lan_address,
    prove_address,
    prove_board,
    targets,
)

FRU = """\
 Board Mfg             : Quanta
 Board Serial          : {board}
 Chassis Type          : Rack Mount Chassis
 Chassis Serial        : {chassis}
 Product Manufacturer  : NVIDIA
 Product Name          : DGX H100
 Product Serial        : {product}
"""
LAN = """\
Set in Progress         : Set Complete
IP Address Source       : DHCP Address
IP Address              : {address}
Subnet Mask             : 255.255.255.0
MAC Address             : 5c:ff:35:e2:00:01
Default Gateway IP      : 10.0.0.1
"""
CYCLE = ("/usr/bin/ipmitool", "chassis", "power", "cycle")
PRINT = ("/usr/bin/ipmitool", "fru", "print", "0")
DMI = "QTFCOU2230021"  # serial number of this machine's board


def fru(**serials: str) -> str:
    return FRU.format(**{"product": "", "board": "", "chassis": "", **serials})


def is_proven(stored: str, dmi: str = DMI) -> bool:
    proof = prove_board(stored, dmi, CYCLE, PRINT)
    assert bool(proof.evidence) != bool(proof.problem)
    return bool(proof.evidence)


@pytest.mark.parametrize(
    ("serials", "expected"),
    [
        ({"product": "1660224000123", "board": DMI, "chassis": "CHS55512"}, True),
        ({"board": DMI}, True),
        ({"board": DMI.lower()}, True),
        ({"board": "QTFCOU2230022"}, False),
        ({"product": DMI, "chassis": DMI}, False),  # all nodes of a multi-node chassis may share them
        ({"product": DMI, "board": "QTFCOU2230022"}, False),
        ({"product": "01234567890123456789AB", "board": DMI}, True),
        ({}, False),
    ],
)
def test_only_the_board_serial_number_is_a_proof(serials: dict[str, str], expected: bool) -> None:
    assert is_proven(fru(**serials)) is expected


@pytest.mark.parametrize("board", ["To Be Filled By O.E.M.", "Default string", ""])
def test_sibling_in_the_same_chassis_is_not_power_cycled(board: str) -> None:
    """Both nodes have the chassis' serial number as their product serial number, and no board serial number."""
    sibling = ("/usr/bin/ipmitool", "-H", "10.0.0.9")
    stored = fru(product="CHS12345678", board=board, chassis="CHS12345678")
    for dmi in (board, "Default string", "CHS12345678"):
        assert prove_board(stored, dmi, (*sibling, "power", "cycle"), (*sibling, "fru")).evidence == ""


@pytest.mark.parametrize(
    "serial", ["01234567890123456789AB", "Default string", "To be filled by O.E.M.", "", "0000000"]
)
def test_equal_placeholders_prove_nothing(serial: str) -> None:
    assert is_placeholder(serial)
    assert not is_proven(fru(board=serial), serial)


@pytest.mark.parametrize("serial", ["1660224000123", "QTFCOU2230021", "JX7GKM3", "S462789X2C12345", "CN7016335D01AB"])
def test_serial_numbers_of_vendors_are_no_placeholders(serial: str) -> None:
    assert not is_placeholder(serial)


def test_dell_has_more_in_dmi_than_in_fru() -> None:
    assert is_proven(fru(product="JX7GKM3", board="CN7016335D01AB"), ".JX7GKM3.CN7016335D01AB.")
    for board in ("CN7016335D01AC", "JX7GKM3"):
        assert not is_proven(fru(product="JX7GKM3", board=board), ".JX7GKM3.CN7016335D01AB.")


def test_unreadable_dmi_proves_nothing() -> None:
    assert not is_proven(fru(board=DMI), "")


def test_serial_numbers_of_several_boards_prove_nothing() -> None:
    assert not is_proven(fru(board=DMI) + fru(board="QTFCOU2230022"))
    assert is_proven(fru(board=DMI) + fru(board=DMI))


def test_fru_of_freeipmi_is_parsed() -> None:
    text = "  FRU Board Serial Number: QTFCOU2230021\n  FRU Board Part Number: 1\n  FRU Product Serial Number: NONE\n"
    assert parse_board_serial(text) == "QTFCOU2230021"


@pytest.mark.parametrize(
    ("power", "bmc", "expected"),
    [
        (("/usr/bin/ipmitool", "-H", "n1-bmc", "power", "cycle"), PRINT, False),
        (("/usr/bin/ipmitool", "-H", "n1-bmc", "power", "cycle"), ("/usr/bin/ipmitool", "-H", "n1-bmc", "fru"), True),
        (("/usr/bin/ipmitool", "-H", "n1-bmc", "power", "cycle"), ("/usr/bin/ipmitool", "-H", "n2-bmc", "fru"), False),
        (("/usr/sbin/ipmipower", "-h", "10.0.0.7", "-c"), ("/usr/sbin/ipmi-fru", "-h", "10.0.0.7"), True),
        (("/opt/site/power", "cycle"), PRINT, False),
        (("/opt/site/power", "cycle"), ("/opt/site/power", "serials"), False),
        (("/usr/bin/ipmitool", "power", "cycle"), ("/usr/bin/ipmitool", "-v", "-I", "open", "fru"), True),
        (CYCLE, ("/usr/sbin/ipmi-fru",), True),
        (("/usr/sbin/ipmi-chassis", "--chassis-control=POWER-CYCLE"), ("/usr/sbin/ipmi-fru", "-D", "KCS"), True),
        (("/usr/sbin/ipmipower", "--cycle"), ("/usr/sbin/ipmi-fru",), False),  # its file may name hosts
        # words whose meaning is a node's name
        (("/usr/bin/ssh", "bmc18", "reset"), ("/usr/bin/ssh", "bmc17", "fru"), False),
        (("/usr/bin/ssh", "admin@n1-bmc", "reset"), ("/usr/bin/ssh", "admin@n1-bmc", "show"), False),
        (("/bin/sh", "-c", "ipmitool -H n2-bmc power cycle"), ("/bin/sh", "-c", "ipmitool fru"), False),
        (("/usr/bin/env", "ipmitool", "power", "cycle"), ("/usr/bin/env", "ipmitool", "fru"), False),
        (("/usr/bin/sudo", "ipmitool", "power", "cycle"), ("/usr/bin/sudo", "ipmitool", "fru"), False),
        (("/opt/bmctl", "node18", "cycle"), ("/opt/bmctl", "node17", "fru"), False),
        (("/opt/bmctl", "-H", "cmm1", "node18", "cycle"), ("/opt/bmctl", "-H", "cmm1", "node17", "fru"), False),
        (("/usr/bin/ipmitool", "power", "cycle", "n2"), PRINT, False),
        (("/usr/bin/ipmitool", "exec", "/etc/cycle"), PRINT, False),
        # one address, but other controllers
        (("/usr/bin/ipmitool", "-t", "0x24", "power", "cycle"), PRINT, False),
        (
            ("/usr/bin/ipmitool", "-b7", "-t0x24", "power", "cycle"),
            ("/usr/bin/ipmitool", "-b7", "-t0x26", "fru"),
            False,
        ),
        (("/usr/bin/ipmitool", "-d", "1", "power", "cycle"), PRINT, False),
        (
            ("/usr/bin/ipmitool", "-H", "n1-bmc", "-p", "6231", "power", "cycle"),
            ("/usr/bin/ipmitool", "-H", "n1-bmc", "fru"),
            False,
        ),
        (
            ("/usr/bin/ipmitool", "-I", "lanplus", "-H", "n2-bmc", "power", "cycle"),
            ("/usr/bin/ipmitool", "-I", "open", "-H", "n2-bmc", "fru"),
            False,
        ),
        (("/usr/bin/ipmitool", "-I", "lanplus", "power", "cycle"), PRINT, False),
        (("/usr/bin/ipmitool", "-H", "n1-bmc", "-H", "n2-bmc", "power", "cycle"), PRINT, False),
        # several hosts, or one that depends on the program
        (("/usr/sbin/ipmipower", "-h", "n[1-2]", "-c"), ("/usr/sbin/ipmi-fru", "-h", "n[1-2]"), False),
        (("/usr/sbin/ipmipower", "-h", "n1,n2", "-c"), ("/usr/sbin/ipmi-fru", "-h", "n1,n2"), False),
        (("/usr/sbin/ipmipower", "-h", "10.0.0.7-9", "-c"), ("/usr/sbin/ipmi-fru", "-h", "10.0.0.7-9"), False),
        (("/usr/bin/ipmitool", "-H", "localhost", "power", "cycle"), ("/usr/sbin/ipmi-fru", "-h", "localhost"), False),
        # commands that do something else
        (("/usr/bin/ipmitool", "fru", "print", "0"), PRINT, False),
        (("/usr/bin/ipmitool", "power", "off"), PRINT, False),
        (CYCLE, CYCLE, False),
        (CYCLE, ("/usr/sbin/ipmi-chassis",), False),
        (CYCLE, (), False),
        ((), PRINT, False),
        (
            ("/usr/bin/curl", "https://root@10.0.0.7/redfish/v1"),
            ("/usr/bin/curl", "https://10.0.0.8/redfish/v1"),
            False,
        ),
        (("/usr/bin/ssh", "admin@n1-bmc", "reset"), ("/usr/bin/ssh", "admin@n2-bmc", "show"), False),
    ],
)
def test_serial_numbers_count_only_if_both_commands_have_the_same_target(
    power: tuple[str, ...], bmc: tuple[str, ...], expected: bool
) -> None:
    assert bool(prove_board(fru(board=DMI), DMI, power, bmc).evidence) is expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (CYCLE, set()),
        (("/x", "-H", "10.0.0.7"), {"10.0.0.7"}),
        (("/x", "-H10.0.0.7"), {"10.0.0.7"}),
        (("/x", "--host=N1-BMC"), {"n1-bmc"}),
        (("/x", "10.0.0.7", "10.0.0.8"), {"10.0.0.7", "10.0.0.8"}),
        (("/x", "--via=10.0.0.8", "10.0.0.7:623"), {"10.0.0.7", "10.0.0.8"}),
        (("/x", "http://10.0.0.7 http://n2-bmc/"), {"10.0.0.7", "n2-bmc"}),
        (("/x", "https://[fd00::0007]:443/redfish"), {"fd00::7"}),
        (("10.0.0.7",), set()),
    ],
)
def test_targets_of_a_command(argv: tuple[str, ...], expected: set[str]) -> None:
    assert targets(argv) == expected


@pytest.mark.parametrize(
    ("local", "argv", "expected"),
    [
        ("10.0.0.7", ("/x", "-H", "10.0.0.7"), True),
        ("10.0.0.7", ("/x", "-H", "10.0.0.8"), False),
        ("10.0.0.7", ("/x", "-H", "10.0.0.7", "10.0.0.8"), False),
        ("10.0.0.7", ("/x", "-H", "n1-bmc"), False),
        ("10.0.0.7", ("/x",), False),
        ("10.0.0.7", ("/opt/bmctl", "10.0.0.7", "cycle"), True),
        ("10.0.0.7", ("/usr/bin/curl", "-d", '{"ResetType":"PowerCycle","x":[1,2]}', "https://10.0.0.7/redfish"), True),
        ("10.0.0.7", ("/usr/bin/ipmitool", "-I", "lanplus", "-H", "10.0.0.7", "raw", "0x00", "0x02", "0x02"), True),
        ("10.0.0.7", ("/usr/bin/ipmitool", "-t", "0x24", "-H", "10.0.0.7", "power", "cycle"), False),
        ("10.0.0.7", ("/usr/bin/ssh", "10.0.0.7", "reset"), False),
        ("10.0.0.7", ("/usr/bin/ssh", "-J", "10.0.0.7", "bmc18", "reset"), False),
        ("10.0.0.7", ("/bin/sh", "-c", "ipmitool -H n2-bmc power cycle", "10.0.0.7"), False),
        ("10.0.0.7", ("/usr/bin/python3", "/opt/power.py", "10.0.0.7"), False),
        ("10.0.0.7", ("/opt/bmctl", "10.0.0.7", "node[1-8]"), False),
        ("10.0.0.7", ("/opt/bmctl", "10.0.0.7", "node1,node2"), False),
        ("0.0.0.0", ("/x", "-H", "0.0.0.0"), False),
        ("", ("/x", "-H", "10.0.0.7"), False),
    ],
)
def test_address_of_the_own_bmc_is_a_proof(local: str, argv: tuple[str, ...], expected: bool) -> None:
    proof = prove_address(LAN.format(address=local), argv)
    assert (bool(proof.evidence), bool(proof.problem)) == (expected, not expected)


@given(st.text(), st.text(), st.lists(st.text()))
def test_any_text_is_proof_or_problem(text: str, dmi: str, words: list[str]) -> None:
    for proof in (prove_board(text, dmi, words, words), prove_address(text, words)):
        assert bool(proof.evidence) != bool(proof.problem)
    parse_lan_address(text)
