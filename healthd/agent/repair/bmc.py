"""Proof that a power command reaches the BMC of this machine. All functions are pure.

A power command with a wrong address would switch off another node, with its jobs. Two facts can prove the address:

- The board serial number in the BMC's FRU (`ipmitool fru print 0`) equals this machine's in the DMI. Both commands run
  known programs (TOOLS), and address the same BMC: by the same host, or without a host. The chassis and product serial
  numbers prove nothing, because the nodes of a multi-node chassis may share them. Placeholders prove nothing either.
- The command contains the address of this machine's own BMC (`ipmitool lan print`, through /dev/ipmi0), and no other.

docs/adr/0043-steps-of-a-repair.md has the sources.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from healthd.common.slurm.commands import Argv
from healthd.common.text import regex
from healthd.common.values import Value

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
# Programs that run another program, so the BMC is unknown.
_WRAPPERS = regex(
    r"(?:ba|da|k|z|c|tc)?sh|busybox|env|sudo|doas|su|runuser|setpriv|chroot|nsenter|unshare|ssh|sshpass|rsh|pdsh|dsh|clush|"
    r"pssh|parallel|xargs|expect|timeout|nohup|nice|ionice|setsid|stdbuf|flock|systemd-run|srun|docker|podman|apptainer|"
    r"ansible|salt|cmsh|xdsh|(?:python|perl|ruby|awk|gawk|mawk|tclsh|lua)[0-9.]*"
)
_PLAIN_HOST = regex(r"(?=.*[A-Za-z])[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_IPV4 = regex(r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}")
# Several hosts in one word, as n[1-8] or n1,n2 or 10.0.0.1-8.
_HOST_LIST = regex(r"[A-Za-z0-9.-]+\[[0-9][0-9,-]*\].*|[A-Za-z0-9.-]+(?:,[A-Za-z0-9.-]+)+|[0-9.]+-[0-9.]+")


class Tool(Value, frozen=True):
    """A known program that addresses a BMC: with a host option that host's, otherwise this machine's own.

    hosts     options that name the host
    values    other options with a value that do not change the target
    flags     options without a value that do not change the target
    routes    option with a value that selects a local or a remote interface
    local, remote  values of `routes`, in lower case; "" if the option is absent
    power     words, other than options, of a command that switches the machine off and on
    power_flags  options that do the same, as "NAME" or "NAME=VALUE"
    serials   words of a command that prints serial numbers
    """

    hosts: tuple[str, ...]
    values: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    local: tuple[str, ...] = ("",)
    remote: tuple[str, ...] = ("",)
    power: tuple[tuple[str, ...], ...] = ()
    power_flags: tuple[str, ...] = ()
    serials: tuple[tuple[str, ...], ...] = ()


# ipmitool(1), ipmi-chassis(8), ipmipower(8), ipmi-fru(8). Options that bridge to another controller (-t, -b, -m, ...),
# choose another device or port (-d, -p) or read a file with settings are not among them.
_FREEIPMI = Tool(
    hosts=("-h", "--hostname"),
    values=("-u", "--username", "-p", "--password", "-l", "--privilege-level"),
    routes=("-D", "--driver-type"),
    local=("", "kcs", "ssif", "openipmi"),
    remote=("", "lan", "lan_2_0"),
)
_POWER_WORDS = tuple((*chassis, "power", verb) for chassis in ((), ("chassis",)) for verb in ("cycle", "reset"))
_CONTROLS = tuple(f"--chassis-control={verb}" for verb in ("power-cycle", "hard-reset"))
TOOLS: Mapping[str, Tool] = {
    "ipmitool": Tool(
        hosts=("-H",),
        values=("-U", "-P", "-f", "-L", "-A", "-C", "-k", "-y", "-R", "-N"),
        flags=("-v", "-vv", "-c", "-E", "-K", "-Y", "-a", "-4", "-6"),
        routes=("-I",),
        local=("", "open"),
        remote=("", "lan", "lanplus"),
        power=_POWER_WORDS,
        serials=(("fru",), ("fru", "list"), ("fru", "print"), ("fru", "print", "0")),
    ),
    "ipmi-chassis": replace(_FREEIPMI, power=((),), power_flags=_CONTROLS),
    "ipmipower": replace(_FREEIPMI, local=(), power=((),), power_flags=("-c", "--cycle", "-r", "--reset")),
    "ipmi-fru": replace(_FREEIPMI, serials=((),)),
}


class Target(Value, frozen=True):
    """The BMC that a command addresses. `host` is "" for this machine's own BMC.

    `words` are the command's words other than options. `acts` are its options that switch power.
    """

    host: str
    words: tuple[str, ...]
    acts: tuple[str, ...]


_USER_AT_HOST = regex(r"[A-Za-z0-9_.-]{1,60}@([^@/:\s]{1,255})")
_URL = regex(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://(?:[^/@\s]{0,200}@)?(\[[0-9A-Fa-f:.]{2,60}\]|[^/:?#\s]{1,255})")


class Proof(Value, frozen=True):
    """`evidence` is a clause that names the proof. If it is "", `problem` is a sentence about its absence."""

    evidence: str = ""
    problem: str = ""


def prove_board(fru: str, dmi_serial: str, power_command: Sequence[str], bmc_command: Sequence[str]) -> Proof:
    """Return the proof by the board's serial number.

    Args:
        fru: output of `bmc_command`, as that of `ipmitool fru print 0`.
        dmi_serial: the serial number of this machine's board, from DMI.
        power_command: the command that switches the machine off and on.
        bmc_command: the command that prints the serial numbers of the same BMC.
    """
    if problem := target_problem(power_command, bmc_command):
        return Proof(problem=problem)
    serial = parse_board_serial(fru)
    if not serial:
        return Proof(problem="repair.bmc_command printed no usable board serial number")
    if is_placeholder(dmi_serial):
        return Proof(problem=f'this machine has no usable board serial number in its DMI ("{dmi_serial}")')
    own = dmi_serial.casefold()  # Dell writes ".SERVICETAG.BOARD." into DMI, and only BOARD into the FRU (from memory)
    if serial.casefold() in (own, *own.split(".")[2:]):
        return Proof(f"the board serial number {serial} of the BMC is that of this machine")
    return Proof(problem=f"the BMC has the board serial number {serial}, but this machine has {dmi_serial}")


def prove_address(lan: str, power_command: Sequence[str]) -> Proof:
    """Return the proof by the BMC's address. `lan` is the output of LOCAL_ADDRESS.

    A site's own program is allowed. The command must contain this address, and no other.
    """
    if problem := _hidden_target_problem(power_command):
        return Proof(problem=f"repair.power_cycle_command: {problem}")
    local, found = parse_lan_address(lan), sorted(targets(power_command))
    if local and found == [local]:
        return Proof(f"{local} is the address of this machine's BMC")
    why = f"{', '.join(found) or 'no address'} in repair.power_cycle_command, {local or 'none'} in ipmitool lan print"
    return Proof(problem=f"the address of this machine's BMC does not match: {why}")


def _hidden_target_problem(argv: Sequence[str]) -> str:
    """Return why the command may address more than its visible target, or ""."""
    name = os.path.basename(argv[0]) if argv else ""
    if _WRAPPERS.fullmatch(name):
        return f"{name} runs another program, so its BMC is unknown"
    if name in TOOLS:
        found = parse_target(argv)
        return found if isinstance(found, str) else ""
    several = [word for word in argv[1:] if _HOST_LIST.fullmatch(word)]
    return f'"{several[0]}" may be several hosts' if several else ""


def target_problem(power_command: Sequence[str], bmc_command: Sequence[str]) -> str:
    """Return why the serial numbers may be from another BMC than the one that the power command addresses, or "".

    A command is accepted only if its program and all its words are known. Any other word may be a node's name.
    """
    found = []
    for name, argv in (("power_cycle_command", power_command), ("bmc_command", bmc_command)):
        target = parse_target(argv)
        if isinstance(target, str):
            return f"repair.{name}: {target}"
        found.append(target)
    power, bmc = found
    tool = TOOLS[os.path.basename(power_command[0])]
    if power.words not in tool.power or len(power.acts) != bool(tool.power_flags):
        return "repair.power_cycle_command is not known to switch a machine off and on"
    if bmc.words not in TOOLS[os.path.basename(bmc_command[0])].serials or bmc.acts:
        return "repair.bmc_command is not known to print serial numbers"
    if power.host != bmc.host:
        names = [target.host or "this machine" for target in (power, bmc)]
        return f"repair.power_cycle_command addresses {names[0]}, but repair.bmc_command {names[1]}"
    return ""


def parse_target(argv: Sequence[str]) -> Target | str:
    """Return the BMC that a command of a known program addresses, or why that is not certain."""
    name = os.path.basename(argv[0]) if argv else ""
    tool = TOOLS.get(name)
    if tool is None:
        return f"{name or 'the program'} is not one of {', '.join(TOOLS)}, so its BMC is unknown"
    hosts: list[str] = []
    routes, words, acts = [""], [], []
    rest = list(argv[1:])
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        option, has_value, value = _split_option(word)
        known = (*tool.hosts, *tool.values, *tool.routes)
        if word in tool.power_flags or (has_value and word.lower() in tool.power_flags):
            acts.append(word)
        elif word in tool.flags:
            pass
        elif option in known:
            value = value if has_value else rest.pop(0) if rest else ""
            if option in tool.hosts:
                hosts.append(_host(value))
            elif option in tool.routes:
                routes.append(value.lower())
        else:
            return f"{name}: the option {word} may address another BMC"
    if len(hosts) > 1 or len(routes) > 2:
        return f"{name} has several hosts or interfaces"
    if hosts and not _is_one_host(hosts[0]):
        return f'"{hosts[0]}" is not the name or address of one BMC'
    if routes[-1] not in (tool.remote if hosts else tool.local):
        return f"{name} does not use its interface {routes[-1] or '(none)'} for {hosts[0] if hosts else 'this machine'}"
    return Target(hosts[0] if hosts else "", tuple(words), tuple(acts))


def _is_one_host(host: str) -> bool:
    """Return True for a name or an address. Some programs take "localhost" for the machine's own BMC, others do not."""
    if _is_address(host):
        address = ipaddress.ip_address(host)
        return not (address.is_unspecified or address.is_loopback or address.is_multicast)
    return bool(_PLAIN_HOST.fullmatch(host)) and not host.startswith("localhost")


def _split_option(word: str) -> tuple[str, bool, str]:
    """Return an option, whether its value is in the same word, and this value: -HVALUE or --host=VALUE."""
    if word.startswith("--"):
        option, equals, value = word.partition("=")
        return option, bool(equals), value
    return word[:2], len(word) > 2, word[2:]


def targets(argv: Sequence[str]) -> frozenset[str]:
    """Return the hosts that a command addresses: addresses, hosts of URLs or of USER@HOST, and values of options such
    as -H. A bare name is not recognised."""
    return frozenset(_targets(argv))


def _targets(argv: Sequence[str]) -> Iterator[str]:
    is_host = False
    for word in argv[1:]:
        option, equals, value = word.partition("=")
        found = _URL.findall(word) or _USER_AT_HOST.findall(word)
        if found:
            yield from map(_host, found)
        elif is_host and not word.startswith("-"):
            yield _host(word)
        elif equals and option in _HOST_OPTIONS:
            yield _host(value)
        elif word[:2] == "-H" and len(word) > 2:
            yield _host(word[2:])
        elif _is_address(word):
            yield _host(word)
        else:
            yield from (address for address in _IPV4.findall(word) if _is_address(address))
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


def parse_board_serial(text: str) -> str:
    """Return the board's serial number from `ipmitool fru print 0`, or "" if there is none or only a placeholder.

    Several different numbers count as none: some may be from the FRUs of other nodes.
    """
    found = set()
    for line in text.split("\n"):
        label, _, value = line.partition(":")
        if label.strip().lower().removeprefix("fru ").split() in (["board", "serial"], ["board", "serial", "number"]):
            found.add(" ".join(value.split()))
    serial = found.pop() if len(found) == 1 else ""
    return "" if is_placeholder(serial) else serial


def is_placeholder(serial: str) -> bool:
    """Return True if the text cannot be the serial number of one machine."""
    text = regex(r"[^0-9a-z]").sub("", serial.lower())
    is_run = len(set(text)) <= 1
    return is_run or len(text) < MIN_SERIAL_LENGTH or text in _PLACEHOLDERS or bool(_DIGITS_IN_ORDER.fullmatch(text))


def parse_lan_address(text: str) -> str:
    """Return the BMC's address from `ipmitool lan print`, or "" if it has none."""
    for line in text.split("\n"):
        label, _, value = line.partition(":")
        address = value.strip()
        if label.strip() == "IP Address" and _is_address(address):
            parsed = ipaddress.ip_address(address)
            return "" if parsed.is_unspecified or parsed.is_loopback else str(parsed)
    return ""
