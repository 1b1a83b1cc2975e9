"""Proof that a power command reaches this machine's own BMC."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.repair.bmc import (
    is_placeholder,
    parse_fru,
    parse_lan_address,
    prove_address,
    prove_chassis,
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
DMI = {"product": "1660224000123", "board": "QTFCOU2230021", "chassis": "CHS55512"}


def fru(**serials: str) -> str:
    return FRU.format(**{"product": "", "board": "", "chassis": "", **serials})


def is_proven(stored: str, dmi: dict[str, str] = DMI) -> bool:
    proof = prove_chassis(stored, dmi, CYCLE, PRINT)
    assert bool(proof.evidence) != bool(proof.problem)
    return bool(proof.evidence)


@pytest.mark.parametrize(
    ("serials", "expected"),
    [
        (DMI, True),
        ({"product": DMI["product"]}, True),
        ({"board": DMI["board"]}, True),
        ({"board": DMI["board"].lower()}, True),
        ({"chassis": DMI["chassis"]}, False),  # all nodes of a multi-node chassis share it
        ({"product": DMI["board"]}, False),  # another kind
        ({"product": "1660224000124"}, False),
        ({"product": "1660224000124", "board": DMI["board"]}, True),
        ({"product": DMI["product"], "board": "QTFCOU2230022"}, False),  # another node with the chassis' product number
        ({"product": "01234567890123456789AB", "board": DMI["board"]}, True),
        ({}, False),
    ],
)
def test_serial_number_of_the_same_kind_is_a_proof(serials: dict[str, str], expected: bool) -> None:
    assert is_proven(fru(**serials)) is expected


@pytest.mark.parametrize(
    "serial", ["01234567890123456789AB", "Default string", "To be filled by O.E.M.", "", "0000000"]
)
def test_equal_placeholders_prove_nothing(serial: str) -> None:
    assert is_placeholder(serial)
    assert not is_proven(fru(product=serial, board=serial), {"product": serial, "board": serial, "chassis": "C1"})


@pytest.mark.parametrize("serial", ["1660224000123", "QTFCOU2230021", "JX7GKM3", "S462789X2C12345", "CN7016335D01AB"])
def test_serial_numbers_of_vendors_are_no_placeholders(serial: str) -> None:
    assert not is_placeholder(serial)


def test_dell_has_more_in_dmi_than_in_fru() -> None:
    assert is_proven(
        fru(product="JX7GKM3", board="CN7016335D01AB"), {"product": "JX7GKM3", "board": ".JX7GKM3.CN7016335D01AB."}
    )


def test_unreadable_dmi_proves_nothing() -> None:
    assert not is_proven(fru(**DMI), {"product": "", "board": "", "chassis": ""})
    assert not is_proven(fru(**DMI), {})


def test_serial_numbers_of_several_parts_prove_nothing() -> None:
    assert not is_proven(fru(board=DMI["board"]) + fru(board="QTFCOU2230022"))
    assert is_proven(fru(board=DMI["board"]) + fru(board=DMI["board"]))


def test_fru_of_freeipmi_is_parsed() -> None:
    text = "  FRU Board Serial Number: QTFCOU2230021\n  FRU Board Part Number: 1\n  FRU Product Serial Number: NONE\n"
    assert parse_fru(text) == {"board": "QTFCOU2230021"}


@pytest.mark.parametrize(
    ("power", "bmc", "expected"),
    [
        (("/usr/bin/ipmitool", "-H", "n1-bmc", "power", "cycle"), PRINT, False),
        (("/usr/bin/ipmitool", "-H", "n1-bmc", "power", "cycle"), ("/usr/bin/ipmitool", "-H", "n1-bmc", "fru"), True),
        (("/usr/bin/ipmitool", "-H", "n1-bmc", "power", "cycle"), ("/usr/bin/ipmitool", "-H", "n2-bmc", "fru"), False),
        (("/usr/sbin/ipmipower", "-h", "10.0.0.7", "-c"), ("/usr/sbin/ipmi-fru", "-h", "10.0.0.7"), True),
        (("/opt/site/power", "cycle"), PRINT, False),
        (("/opt/site/power", "cycle"), ("/opt/site/power", "serials"), True),
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
    assert bool(prove_chassis(fru(**DMI), DMI, power, bmc).evidence) is expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (CYCLE, set()),
        (("/x", "-H", "10.0.0.7"), {"10.0.0.7"}),
        (("/x", "-H10.0.0.7"), {"10.0.0.7"}),
        (("/x", "--host=N1-BMC"), {"n1-bmc"}),
        (("/x", "10.0.0.7", "10.0.0.8"), {"10.0.0.7", "10.0.0.8"}),
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
        ("0.0.0.0", ("/x", "-H", "0.0.0.0"), False),
        ("", ("/x", "-H", "10.0.0.7"), False),
    ],
)
def test_address_of_the_own_bmc_is_a_proof(local: str, argv: tuple[str, ...], expected: bool) -> None:
    proof = prove_address(LAN.format(address=local), argv)
    assert (bool(proof.evidence), bool(proof.problem)) == (expected, not expected)


@given(st.text(), st.dictionaries(st.sampled_from(("product", "board", "chassis")), st.text()), st.lists(st.text()))
def test_any_text_is_proof_or_problem(text: str, dmi: dict[str, str], words: list[str]) -> None:
    for proof in (prove_chassis(text, dmi, words, words), prove_address(text, words)):
        assert bool(proof.evidence) != bool(proof.problem)
    parse_lan_address(text)
