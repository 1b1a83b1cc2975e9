"""Finds slow transfers between nodes, and decides whether a node or only a link is suspect. All functions are pure.

FALCON (arXiv 2410.12588) calls a transfer suspicious if it takes more than 1.1 times the median time of transfers with
the same work. FALCON attributed 42 of 43 slow multi-node jobs to congestion between nodes. In a ring, each node is in
two pairs. If both pairs are slow, the node is suspect. If only one pair is slow, the link between its two nodes is
suspect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from healthd.common.text import printable

TOO_SLOW = 1.1  # a transfer is slow if its duration is more than this multiple of the median
MIN_TRANSFERS = 3  # minimum number of comparable transfers; with only two, it is unknown which one is slow
UNIT = "Gb/s"
STATES = ("measured", "failed", "not_measured")
MAX_CHARACTERS = 300


class Transfer(NamedTuple):
    """A sender's report about one rail in a pair.

    Attributes:
        rail: its port, such as "mlx5_0/1", or "".
        state: one of STATES.
    """

    sender: str
    receiver: str
    rail: str
    gbits: float | None
    state: str
    message: str


class AssessedTransfer(NamedTuple):
    """A transfer with its verdict.

    Attributes:
        verdict: ok, slow, failed or not_measured.
        expected: the median in Gb/s, or None without a comparison.
    """

    transfer: Transfer
    verdict: str
    expected: float | None
    message: str


class Suspect(NamedTuple):
    """A suspect node or link. `kind` is "node" with one name, or "link" with the sender's and the receiver's names."""

    kind: str
    names: tuple[str, ...]
    message: str


def parse_transfer(data: Any) -> Transfer | None:
    """Parse a sender's output. Return None for other data."""
    if not isinstance(data, Mapping):
        return None
    texts = [data.get(key) for key in ("sender", "receiver", "rail", "state", "message")]
    if not all(isinstance(text, str) for text in texts):
        return None
    sender, receiver, rail, state, message = (printable(str(text))[:MAX_CHARACTERS] for text in texts)
    gbits = data.get("gbits")
    is_number = isinstance(gbits, int | float) and not isinstance(gbits, bool) and 0 < gbits < 1e9
    if state not in STATES or (state == "measured") != is_number:
        return None
    return Transfer(sender, receiver, rail, float(gbits) if is_number and gbits is not None else None, state, message)


def judge(transfers: Iterable[Transfer]) -> list[AssessedTransfer]:
    """Compare each transfer with the median of all transfers on rails with the same name."""
    all_transfers = list(transfers)
    speeds: dict[str, list[float]] = {}
    for transfer in all_transfers:
        if transfer.gbits is not None:
            speeds.setdefault(transfer.rail, []).append(transfer.gbits)
    return [_assess(transfer, speeds.get(transfer.rail, [])) for transfer in all_transfers]


def _assess(transfer: Transfer, speeds: Sequence[float]) -> AssessedTransfer:
    if transfer.gbits is None:
        return AssessedTransfer(transfer, transfer.state, None, transfer.message)
    if len(speeds) < MIN_TRANSFERS:
        return AssessedTransfer(transfer, "ok", None, f"{transfer.gbits:.1f} {UNIT}; too few transfers to compare with")
    middle = median(speeds)
    verdict = "slow" if middle > TOO_SLOW * transfer.gbits else "ok"
    return AssessedTransfer(transfer, verdict, middle, f"{transfer.gbits:.1f} {UNIT}, the median is {middle:.1f}")


def suspects(judged: Iterable[AssessedTransfer]) -> list[Suspect]:
    """Return the suspects: nodes and links.

    A node is suspect if it is in at least two pairs and all of them are slow or failed. All other slow or failed pairs
    are suspect links.
    """
    pairs: dict[tuple[str, str], bool] = {}
    for assessed in judged:
        if assessed.verdict != "not_measured":
            pair = (assessed.transfer.sender, assessed.transfer.receiver)
            pairs[pair] = pairs.get(pair, False) or assessed.verdict != "ok"
    bad_pairs = [pair for pair, is_bad in pairs.items() if is_bad]
    results_by_node = {name: [pairs[pair] for pair in pairs if name in pair] for pair in bad_pairs for name in pair}
    # With only two nodes, each pair contains both nodes, so it is unknown which one is slow.
    nodes = [name for name, slow in results_by_node.items() if len(pairs) > 2 and len(slow) > 1 and all(slow)]
    found = [Suspect("node", (name,), f"slow in each of its {len(results_by_node[name])} pairs") for name in nodes]
    links = [pair for pair in bad_pairs if not set(pair) & set(nodes)]
    return found + [Suspect("link", pair, "slow only between these two nodes") for pair in links]
