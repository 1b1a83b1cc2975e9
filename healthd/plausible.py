"""Types with limits for settings: a class of settings declares its fields with them.

`convert.load` refuses a value that does not fit, with its place. So a rule goes with the class that declares the field,
and no field is judged by its name: a site's check may name its own fields as it likes.
"""

from __future__ import annotations

import re
from typing import Annotated

from healthd.convert import Rule, show

_NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def at_least(least: int) -> Rule:
    return Rule(lambda value: "" if value >= least else f"must be {least} or more, is {show(value)}")


def _period(value: float) -> str:
    fits = 0 < value <= 7 * 86400
    return "" if fits else f"must be a number of seconds above 0 and up to a week, is {value:g}"


def _seconds(value: float) -> str:
    return "" if value >= 0 else f"must not be negative, is {value:g}"


def _percent(value: float) -> str:
    return "" if 0 <= value <= 100 else f"must be 0 to 100, is {value:g}"


def _file_or_name(value: str) -> str:
    return "" if "\0" not in value else f"must not hold a NUL, is {show(value)}"


def no_absolute_path(value: str) -> str:
    """Why `value` is no absolute path; "" = it is one."""
    return "" if value.startswith("/") and "\0" not in value else f"must be an absolute path, is {show(value)}"


def _absolute_path_or_none(value: str) -> str:
    return no_absolute_path(value) if value else ""


def _node_name(value: str) -> str:
    """The value becomes scontrol's NodeName, where "ALL" and "n[1-9]" also mean other nodes."""
    fits = not value or (_NODE_NAME.fullmatch(value) and value.upper() != "ALL")
    return "" if fits else f"must be the name of one node, is {show(value)}"


def no_address(value: str) -> str:
    """Why `value` is neither ADDRESS:PORT nor "off"; "" = it is one."""
    address, _, port = value.rpartition(":")
    fits = value == "off" or (address and re.fullmatch("[0-9]{1,5}", port) and int(port) <= 65535)
    return "" if fits else f'must be ADDRESS:PORT or "off", is "{value}"'


Count = Annotated[int, at_least(0)]
Period = Annotated[float, Rule(_period)]  # seconds: how often something runs, or how long it may take
Seconds = Annotated[float, Rule(_seconds)]  # how long to wait for something, or to remember it
Percent = Annotated[float, Rule(_percent)]
FileOrName = Annotated[str, Rule(_file_or_name)]  # "kmsg", "dgx-h100", "/path", ""
AbsolutePath = Annotated[str, Rule(no_absolute_path)]
AbsolutePathOrNone = Annotated[str, Rule(_absolute_path_or_none)]  # "" = none
NodeName = Annotated[str, Rule(_node_name)]  # "" = the host's
Address = Annotated[str, Rule(no_address)]  # "127.0.0.1:9478", "[::1]:9478" or "off"
