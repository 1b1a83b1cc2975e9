"""One pass of transfers between nodes, as one of its nodes does it: it receives from one, or sends to one, or neither.

perftest's ib_write_bw on each active port in turn, the receiver's first one with the sender's first one. Nothing tells
the sender when the receiver listens: it tries again until it does, which is bounded.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from healthd.common.errors import HealthdError
from healthd.common.text import is_decimal, regex
from healthd.validation import parts, programs
from healthd.validation.measurement import NotUnderstood
from healthd.validation.programs import Command
from healthd.validation.tool_paths import Tools
from healthd.validation.tools import perftest
from healthd.validation.transfers import Transfer

RAIL_SECONDS = 30.0  # of one port, the wait for the other side in it
AGAIN_SECONDS = 0.5
MOST_RAILS = 64  # the ports of TCP that reservation.py gives to a pair
_NAME = regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,253}")
_REFUSED = ("Couldn't connect", "Unable to init the socket")


class NotAPass(HealthdError):
    """One sentence for who gave it."""


class Role(NamedTuple):
    """Who this node is in a pair. `port`: the first of its TCP ports."""

    sender: str
    receiver: str
    address: str
    port: int
    sends: bool


def role_of(text: str, node: str) -> Role | None:
    """What `node` is in a pass (reservation.pairs_as_text); None: nothing. Raises NotAPass."""
    found = None
    for pair in text.split(","):
        words = pair.split()
        if len(words) != 4 or not all(_NAME.fullmatch(name) for name in words[:2]) or not _ADDRESS.fullmatch(words[2]):
            raise NotAPass(f'--pair: "{pair[:80]}" is no "SENDER RECEIVER ADDRESS PORT"')
        if not is_decimal(words[3]) or len(words[3]) > 5 or not 0 < int(words[3]) <= 65535 - MOST_RAILS:
            raise NotAPass(f'--pair: "{words[3][:20]}" is no port for {MOST_RAILS} rails')
        if node in words[:2] and found is None:
            found = Role(words[0], words[1], words[2], int(words[3]), node == words[0])
    return found


def transfer(role: Role, tools: Tools, root: str, stop: int) -> list[Transfer]:
    """What this node sent, a row a rail; [] of a receiver, whose sender tells."""
    rails = list(parts.look(root).ports)[:MOST_RAILS]
    program = tools.get("ib_write_bw", "")
    if not program or not rails:
        why = "there is no ib_write_bw" if not program else "it has no active InfiniBand or RoCE port, by sysfs"
        side = f"{role.sender if role.sends else role.receiver}: {why}"
        return [Transfer(role.sender, role.receiver, "", None, "not_looked", side)] if role.sends else []
    if not role.sends:
        for number, rail in enumerate(rails):
            server, _ = perftest.commands(program, rail, role.port + number)
            programs.run([Command(server)], RAIL_SECONDS, stop)
        return []
    return [_send(role, program, rail, role.port + number, stop) for number, rail in enumerate(rails)]


def _send(role: Role, program: str, rail: str, port: int, stop: int) -> Transfer:
    _, (*client, _) = perftest.commands(program, rail, port)
    until = time.monotonic() + RAIL_SECONDS
    said, how = "", "ended"
    while (left := until - time.monotonic()) > 0 and not programs.is_told_to_end(stop):
        (ended,) = programs.run([Command((*client, role.address))], left, stop)
        said, how = f"{ended.stdout}\n{ended.stderr}", ended.how
        if how != "ended" or not any(words in said for words in _REFUSED):
            break
        time.sleep(AGAIN_SECONDS)
    try:
        (measured,) = perftest.parse(said, rail)
    except NotUnderstood as error:
        why = f"{error}" if how == "ended" else f"ib_write_bw did not end within {RAIL_SECONDS:.0f} s"
        return Transfer(role.sender, role.receiver, rail, None, "not_looked", why)
    return Transfer(role.sender, role.receiver, rail, measured.value, measured.state, measured.says)


def as_document(node: str, transfers: list[Transfer]) -> dict[str, Any]:
    return {"node": node, "transfers": [one._asdict() for one in transfers]}
