"""Types with limits, for the field declarations in settings classes.

`codec.load` refuses an invalid value and names the setting. A limit belongs to the class that declares the field, not
to the field's name, so a site's check may choose any names.
"""

from __future__ import annotations

from typing import Annotated

from healthd.common.codec import Rule, number, show
from healthd.common.model import LADDER, RepairStep
from healthd.common.text import regex

KERNEL_LOGS = ("kmsg", "journal", "off")  # values for kernel_log.source that are not files

_CLUSTER_NAME = regex(r"[A-Za-z0-9_.-]{1,40}")
_NODE_NAME = regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def between(minimum: float, maximum: float, unit: str = "") -> Rule:
    """Return the rule for a number from `minimum` to `maximum`. `unit` is the text after the limits (" seconds")."""
    requirement = f"must be {_figures(minimum)} to {_figures(maximum)}{unit}"
    return Rule(
        lambda value: "" if minimum <= value <= maximum else f"{requirement}, got {number(value)}", minimum, maximum
    )


def _figures(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else str(limit)


def _file_or_name(value: str) -> str:
    return "" if "\0" not in value else f"must not contain a NUL, got {show(value)}"


def absolute_path_problem(value: str) -> str:
    """Return the reason why `value` is not an absolute path, or "" if it is."""
    return "" if value.startswith("/") and "\0" not in value else f"must be an absolute path, got {show(value)}"


def _absolute_path_or_none(value: str) -> str:
    return absolute_path_problem(value) if value else ""


def _kernel_log(value: str) -> str:
    """Return the reason why the name is refused, or "". If healthd took a mistyped name for a file, it would wait for
    the file and miss all events.
    """
    fits = value in KERNEL_LOGS or not absolute_path_problem(value)
    return "" if fits else f'must be "kmsg", "journal", "off" or an absolute path, got {show(value)}'


def is_node_name(value: str) -> bool:
    """Return True if Slurm accepts this as the name of a single node. "ALL" and "n[1-9]" refer to other nodes as
    well.
    """
    return _NODE_NAME.fullmatch(value) is not None and value.upper() != "ALL"


def _node_name(value: str) -> str:
    """Check a name that becomes scontrol's NodeName."""
    return "" if not value or is_node_name(value) else f"must be the name of one node, got {show(value)}"


def _cluster_name(value: str) -> str:
    fits = not value or _CLUSTER_NAME.fullmatch(value)
    return "" if fits else f"must be the name of one cluster, got {show(value)}"


def addresses_problem(value: tuple[str, ...]) -> str:
    """Check a list of addresses. It must not contain "off" or duplicates."""
    if "off" in value:
        return 'must be a list of ADDRESS:PORT; "off" must not be in a list'
    duplicates = [address for number, address in enumerate(value) if address in value[:number]]
    return (
        f'"{duplicates[0]}" is listed twice'
        if duplicates
        else ""
        if value
        else 'must be ADDRESS:PORT, or "off" for none'
    )


def address_problem(value: str) -> str:
    """Return the reason why `value` is neither ADDRESS:PORT nor "off", or "" if it is valid."""
    address, _, port = value.rpartition(":")
    if address == "*":
        suggestion = f'to listen on every address, write "0.0.0.0:{port}" or "[::]:{port}"'
        return f'must be ADDRESS:PORT or "off", got "{value}"; {suggestion}'
    fits = value == "off" or (address and regex("[0-9]{1,5}").fullmatch(port) and int(port) <= 65535)
    return "" if fits else f'must be ADDRESS:PORT or "off", got "{value}"'


def program_problem(value: tuple[str, ...]) -> str:
    """Return the reason why `value` is not a program with its arguments, or "". An empty list means no program."""
    if value and not value[0].startswith("/"):
        return f"must begin with the absolute path of a program, got {show(value[0])}"
    return "must not contain a NUL" if any("\0" in word for word in value) else ""


_PATTERN_NAME = regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_NOT_PLAIN = regex(r"[^ !#-)+-\[\]-~]")  # "*", and characters that JSON escapes in logs
MIN_LITERAL_LENGTH = 4
MAX_PATTERN_LENGTH = 300
MAX_WILDCARDS = 10


def longest_literal(pattern: str) -> str:
    """Return a pattern's longest literal text, which every matching line contains in any log format.

    Lines are searched for this text, so a short text would be found in most lines.
    """
    return max(_NOT_PLAIN.split(pattern), key=len)


def _line_pattern(value: str) -> str:
    if not value.isprintable() or len(value) > MAX_PATTERN_LENGTH:
        return f"must be printable text of at most {MAX_PATTERN_LENGTH} characters, got {show(value)}"
    if value.count("*") > MAX_WILDCARDS:
        return f'must have at most {MAX_WILDCARDS} "*", got {show(value)}'
    if len(longest_literal(value)) < MIN_LITERAL_LENGTH:
        return (
            f'must have {MIN_LITERAL_LENGTH} plain characters in a row (no "*", quotes, backslash), got {show(value)}'
        )
    return ""


def _pattern_names(value: dict[str, object]) -> str:
    invalid = next((name for name in value if not _PATTERN_NAME.fullmatch(name)), None)
    if invalid is not None:
        return f"a name must have at most 40 letters, digits, dots, hyphens and underscores, got {show(invalid)}"
    return "" if len(value) <= 100 else f"must have at most 100 patterns, got {len(value)}"


def _repair_order(value: tuple[RepairStep, ...]) -> str:
    """Return the reason why this order of steps is refused, or "". A power cycle never skips the reboot."""
    if list(value) != [step for step in LADDER[:-1] if step in value]:
        return f"must list each step once, in this order: {', '.join(step.value for step in LADDER[:-1])}"
    if RepairStep.POWER_CYCLE in value and RepairStep.REBOOT not in value:
        return 'must contain "reboot" before "power_cycle"'
    return ""


def _repair_first_steps(value: dict[str, RepairStep]) -> str:
    refused = next((code for code, step in value.items() if step is RepairStep.POWER_CYCLE), None)
    return "" if refused is None else f'"{refused}": must not be "power_cycle", which only follows a failed reboot'


_CONCURRENT = regex(r"(?:100|[1-9]?[0-9])%")


def _max_concurrent(value: int | str) -> str:
    """Return the reason why this number of concurrent repairs is refused, or ""."""
    is_valid = _CONCURRENT.fullmatch(value) if isinstance(value, str) else 1 <= value <= 65536
    return "" if is_valid else f'must be at least 1, or a percentage such as "2%", got {show(value)}'


# Wide enough for every existing or announced machine, and narrow enough to catch a wrong unit or an extra digit.
Period = Annotated[float, between(0.1, 7 * 86400, " seconds (a week)")]  # an interval or a maximum duration
Seconds = Annotated[float, between(0, 366 * 86400, " seconds (a year)")]  # how long to wait or remember
Percent = Annotated[float, between(0, 100)]
Share = Annotated[float, between(0, 1)]
Count = Annotated[int, between(0, 10**9)]  # number of errors and similar events, which hardware counts in millions
Rate = Annotated[float, between(0, 1e9)]  # the same, per second or minute
SmallCount = Annotated[int, between(0, 1000)]  # restarts, runs
Times = Annotated[int, between(1, 1000)]
Retries = Annotated[int, between(0, 10)]  # the delays between retries grow fourfold
Nodes = Annotated[int, between(0, 65536, " nodes")]  # the largest clusters have about 10,000
Gpus = Annotated[int, between(0, 255, " GPUs")]  # /dev/nvidiactl has minor number 255, GPUs have those below it
MigDevices = Annotated[int, between(-1, 64)]  # per GPU; the driver creates at most 7
Links = Annotated[int, between(0, 64, " links")]  # per GPU; NVML_NVLINK_MAX_LINKS in nvml.h is 18
Lanes = Annotated[int, between(0, 32, " lanes")]  # PCI Express has at most 32
Cpus = Annotated[int, between(0, 8192, " CPUs")]  # maximum NR_CPUS of Linux on x86
Processes = Annotated[int, between(1, 2**22, " processes")]  # PID_MAX_LIMIT of Linux
ExitStatus = Annotated[int, between(0, 255)]  # waitpid(2): the low 8 bits
Bytes = Annotated[int, between(0, 2**52, " bytes (4 PiB)")]  # x86 has 52-bit physical addresses
Gib = Annotated[float, between(0, 2**20, " GiB (1 PiB)")]
Celsius = Annotated[float, between(0, 150, " degrees")]
WholeCelsius = Annotated[int, between(0, 150, " degrees")]
Mib = Annotated[int, between(1, 2**20, " MiB (1 TiB)")]  # space on a disk
Watts = Annotated[float, between(0, 10_000, " W")]
Gbps = Annotated[float, between(0, 10_000, " Gbit/s")]  # InfiniBand XDR over 12 lanes has 2,400
Mbps = Annotated[int, between(0, 10_000_000, " Mbit/s (10 Tbit/s)")]
Mtu = Annotated[int, between(68, 65536, " bytes")]  # IPv4's minimum (RFC 791), and Linux' value for lo
FileOrName = Annotated[str, Rule(_file_or_name)]  # "dgx-h100", "/path", ""
KernelLog = Annotated[str, Rule(_kernel_log)]
LinePattern = Annotated[str, Rule(_line_pattern)]  # for a kernel message: "LustreError: *evicted*"
PatternNames = Rule(_pattern_names)  # for a table of patterns: Annotated[dict[str, ...], PatternNames]
AbsolutePath = Annotated[str, Rule(absolute_path_problem)]
AbsolutePathOrNone = Annotated[str, Rule(_absolute_path_or_none)]  # "" = none
NodeName = Annotated[str, Rule(_node_name)]  # "" = the hostname
Address = Annotated[str, Rule(address_problem)]  # "127.0.0.1:9478", "[::1]:9478" or "off"
Addresses = Annotated[tuple[Address, ...], Rule(addresses_problem)]
ProgramOrNone = Annotated[tuple[str, ...], Rule(program_problem)]  # a program and its arguments; () = none
ClusterName = Annotated[str, Rule(_cluster_name)]  # "" = ClusterName in the node's slurm.conf
RepairOrder = Annotated[tuple[RepairStep, ...], Rule(_repair_order)]
MaxConcurrent = Annotated[int | str, Rule(_max_concurrent)]  # 2, "5%"
RepairFirstSteps = Annotated[dict[str, RepairStep], Rule(_repair_first_steps)]
