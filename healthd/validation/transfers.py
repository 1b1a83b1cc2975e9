"""Transfers between nodes: the slow ones, and whether a node or only a link is suspect. Pure functions.

Rule: FALCON (arXiv 2410.12588) calls a transfer suspicious if it takes more than 1.1 times the median of transfers with
the same work, and found 42 of 43 slow jobs of several nodes to be congestion between them. A node is in two pairs of a
ring: if both are slow, the node is the suspect; if one is slow, the link between its two nodes is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from healthd.common.text import printable

TOO_SLOW = 1.1  # times the median
FEWEST = 3  # transfers that can be compared: with two it is unknown which is slow
UNIT = "Gb/s"
STATES = ("measured", "failed", "not_measured")
MOST_CHARACTERS = 300


class Transfer(NamedTuple):
    """Sender's report of one rail of a pair: its port like "mlx5_0/1", "" if none. `state`: one of STATES."""

    sender: str
    receiver: str
    rail: str
    gbits: float | None
    state: str
    message: str


class Judged(NamedTuple):
    """`verdict`: ok, slow, failed or not_measured. `expected`: the median, in Gb/s; None without a comparison."""

    transfer: Transfer
    verdict: str
    expected: float | None
    message: str


class Suspect(NamedTuple):
    """`kind`: "node" with one name, or "link" with sender and receiver."""

    what: str
    names: tuple[str, ...]
    message: str


def transfer_of(data: Any) -> Transfer | None:
    """Parse a sender's output; None for other data."""
    if not isinstance(data, Mapping):
        return None
    texts = [data.get(key) for key in ("sender", "receiver", "rail", "state", "message")]
    if not all(isinstance(text, str) for text in texts):
        return None
    sender, receiver, rail, state, message = (printable(str(text))[:MOST_CHARACTERS] for text in texts)
    gbits = data.get("gbits")
    is_number = isinstance(gbits, int | float) and not isinstance(gbits, bool) and 0 < gbits < 1e9
    if state not in STATES or (state == "measured") != is_number:
        return None
    return Transfer(sender, receiver, rail, float(gbits) if is_number and gbits is not None else None, state, message)


def judge(transfers: Iterable[Transfer]) -> list[Judged]:
    """Compare each transfer with the median of all transfers on rails of the same name."""
    every = list(transfers)
    speeds: dict[str, list[float]] = {}
    for one in every:
        if one.gbits is not None:
            speeds.setdefault(one.rail, []).append(one.gbits)
    return [_judged(one, speeds.get(one.rail, [])) for one in every]


def _judged(one: Transfer, speeds: Sequence[float]) -> Judged:
    if one.gbits is None:
        return Judged(one, one.state, None, one.message)
    if len(speeds) < FEWEST:
        return Judged(one, "ok", None, f"{one.gbits:.1f} {UNIT}; too few transfers to compare")
    middle = median(speeds)
    verdict = "slow" if middle > TOO_SLOW * one.gbits else "ok"
    return Judged(one, verdict, middle, f"{one.gbits:.1f} {UNIT}, the median is {middle:.1f}")


def suspects(judged: Iterable[Judged]) -> list[Suspect]:
    """Return nodes that are slow or failed in all of their two or more pairs, and further slow or failed links."""
    pairs: dict[tuple[str, str], bool] = {}
    for one in judged:
        if one.verdict != "not_measured":
            pair = (one.transfer.sender, one.transfer.receiver)
            pairs[pair] = pairs.get(pair, False) or one.verdict != "ok"
    bad = [pair for pair, is_bad in pairs.items() if is_bad]
    of_node = {name: [pairs[pair] for pair in pairs if name in pair] for pair in bad for name in pair}
    # With only two nodes each pair contains both: it is unknown which node is slow.
    nodes = [name for name, slow in of_node.items() if len(pairs) > 2 and len(slow) > 1 and all(slow)]
    found = [Suspect("node", (name,), f"slow in each of its {len(of_node[name])} pairs") for name in nodes]
    links = [pair for pair in bad if not set(pair) & set(nodes)]
    return found + [Suspect("link", pair, "slow between these two only") for pair in links]
