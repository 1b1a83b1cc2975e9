"""Proof that a power command reaches the BMC of this machine. All functions are pure.

A wrong address in a power command would switch off another node with its jobs. Two facts can prove the address:

- A serial number in the BMC's FRU (`ipmitool fru print 0`) equals the one of the same kind in this machine's DMI. The
  chassis serial number alone proves nothing, because all nodes of a multi-node chassis share it, as do placeholders.
- The command contains the address of this machine's own BMC (`ipmitool lan print`, through /dev/ipmi0).

docs/adr/0043-steps-of-a-repair.md has the sources.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from healthd.common.slurm.commands import Argv
from healthd.common.text import regex
from healthd.common.values import Value

KINDS = ("product", "board", "chassis")  # of serial numbers, in FRU and DMI
LOCAL_ADDRESS: Argv = ("ipmitool", "lan", "print")
MIN_SERIAL_LENGTH = 4
# Texts that vendors leave in place of a serial number, in lower case and without punctuation.
_PLACEHOLDERS = frozenset(
    (
        *("none", "null", "na", "oem", "unknown", "unspecified", "notspecified", "notavailable", "notapplicable"),
        *("notprovided", "notset", "empty", "default", "defaultstring", "tobefilledbyoem", "systemserialnumber"),
        *("serialnumber", "chassisserialnumber", "baseboardserialnumber", "boardserialnumber", "productserialnumber"),
        *("invalid", "serial", "serialno", "sernum", "test", "sample"),
    )
)
_DIGITS_IN_ORDER = regex(r"0?123456789[0-9a-z]*")
_HOST_OPTIONS = ("-H", "-h", "--host", "--hostname", "--ip", "--bmc", "-r", "--rhost")
_USER_AT_HOST = regex(r"[A-Za-z0-9_.-]{1,60}@([^@/:\s]{1,255})")
_URL = regex(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://(?:[^/@\s]{0,200}@)?(\[[0-9A-Fa-f:.]{2,60}\]|[^/:?#\s]{1,255})")


class Proof(Value, frozen=True):
    """`evidence` is a clause that names the proof. If it is "", `problem` is a sentence about its absence."""

    evidence: str = ""
    problem: str = ""


def prove_chassis(fru: str, dmi: Mapping[str, str], power_command: Sequence[str], bmc_command: Sequence[str]) -> Proof:
    """Return the proof by serial numbers.

    Args:
        fru: output of `bmc_command`, as that of `ipmitool fru print 0`.
        dmi: this machine's serial numbers by kind.
        power_command: the command that switches the machine off and on.
        bmc_command: the command that prints the serial numbers of the same BMC.
    """
    if problem := target_problem(power_command, bmc_command):
        return Proof(problem=problem)
    stored = parse_fru(fru)
    if not stored:
        return Proof(problem="repair.bmc_command printed no usable serial number")
    product, board = (_compare(stored, dmi, kind) for kind in ("product", "board"))
    if product and board is False:
        return Proof(problem=_describe(stored, dmi, "board"))  # nodes of a chassis may share the product serial
    for kind, is_equal in (("product", product), ("board", board)):
        if is_equal:
            return Proof(f"the {kind} serial number {stored[kind]} of the BMC is that of this machine")
    if product is None and board is None:
        only_chassis = _compare(stored, dmi, "chassis")
        why = "only the chassis serial number matches" if only_chassis else "no serial number of the same kind is known"
        return Proof(problem=f"the BMC is not proven to be that of this machine: {why}")
    return Proof(problem=_describe(stored, dmi, "board" if product is None else "product"))


def prove_address(lan: str, power_command: Sequence[str]) -> Proof:
    """Return the proof by the BMC's address. `lan` is the output of LOCAL_ADDRESS."""
    local, found = parse_lan_address(lan), sorted(targets(power_command))
    if local and found == [local]:
        return Proof(f"{local} is the address of this machine's BMC")
    why = f"{', '.join(found) or 'no address'} in repair.power_cycle_command, {local or 'none'} in ipmitool lan print"
    return Proof(problem=f"the address of this machine's BMC does not match: {why}")


def target_problem(power_command: Sequence[str], bmc_command: Sequence[str]) -> str:
    """Return the reason why the serial numbers may be those of another BMC than the power command's, or ""."""
    power, bmc = targets(power_command), targets(bmc_command)
    if power != bmc:
        names = [", ".join(sorted(found)) or "this machine" for found in (power, bmc)]
        return f"repair.power_cycle_command addresses {names[0]}, but repair.bmc_command {names[1]}"
    if not power and power_command[:1] != bmc_command[:1]:
        return "repair.power_cycle_command and repair.bmc_command are different programs without a visible address"
    return ""


def targets(argv: Sequence[str]) -> frozenset[str]:
    """Return the hosts that a command addresses: addresses, hosts of URLs or of USER@HOST, and values of options such
    as -H. A name without such a mark is not recognized."""
    return frozenset(_targets(argv))


def _targets(argv: Sequence[str]) -> Iterator[str]:
    is_host = False
    for word in argv[1:]:
        option, equals, value = word.partition("=")
        found = _URL.search(word) or _USER_AT_HOST.fullmatch(word)
        if found:
            yield _host(found[1])
        elif is_host and not word.startswith("-"):
            yield _host(word)
        elif equals and option in _HOST_OPTIONS:
            yield _host(value)
        elif word[:2] == "-H" and len(word) > 2:
            yield _host(word[2:])
        elif _is_address(word):
            yield _host(word)
        is_host = word in _HOST_OPTIONS


def _host(text: str) -> str:
    text = text.strip("[]").lower()
    return str(ipaddress.ip_address(text)) if _is_address(text) else text


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# --- serial numbers


def parse_fru(text: str) -> dict[str, str]:
    """Return serial numbers by kind, from `ipmitool fru print 0`. Placeholders are left out.

    A kind with several values, such as those of other FRUs, is left out too: they may belong to other nodes.
    """
    found: dict[str, set[str]] = {}
    for line in text.split("\n"):
        label, _, value = line.partition(":")
        words = label.strip().lower().removeprefix("fru ").split()
        if words[1:] in (["serial"], ["serial", "number"]) and words[0] in KINDS:
            found.setdefault(words[0], set()).add(" ".join(value.split()))
    return {kind: value for kind, (value, *more) in found.items() if not more and not is_placeholder(value)}


def is_placeholder(serial: str) -> bool:
    """Return True if the text is no serial number of one machine."""
    text = regex(r"[^0-9a-z]").sub("", serial.lower())
    is_run = len(set(text)) <= 1
    return is_run or len(text) < MIN_SERIAL_LENGTH or text in _PLACEHOLDERS or bool(_DIGITS_IN_ORDER.fullmatch(text))


def _compare(stored: Mapping[str, str], dmi: Mapping[str, str], kind: str) -> bool | None:
    """Return whether the serial numbers of a kind are equal, or None if one is unknown or a placeholder.

    Dell writes ".SERVICETAG.BOARD." into DMI's board serial, and only BOARD into the FRU (from memory).
    """
    own, other = dmi.get(kind, ""), stored.get(kind, "")
    if is_placeholder(own) or is_placeholder(other):
        return None
    return other.casefold() in (own.casefold(), *own.casefold().split("."))


def _describe(stored: Mapping[str, str], dmi: Mapping[str, str], kind: str) -> str:
    return f"the BMC has the {kind} serial number {stored[kind]}, but this machine has {dmi[kind]}"


def parse_lan_address(text: str) -> str:
    """Return the BMC's address from `ipmitool lan print`, or "" if it has none."""
    for line in text.split("\n"):
        label, _, value = line.partition(":")
        address = value.strip()
        if label.strip() == "IP Address" and _is_address(address):
            parsed = ipaddress.ip_address(address)
            return "" if parsed.is_unspecified or parsed.is_loopback else str(parsed)
    return ""
