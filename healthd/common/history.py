"""A check's earlier readings: the last ones, and how its counters grew, across restarts of healthd.

A counter's absolute value says little (it may have been high for years); rules ask how much it grew. The store keeps
the last reading of each observation, and each increment of a counter with its time. A healthy node's counters never
grow, so the store stays small. Pure: `update` makes the next store from the last one and a run's readings.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from healthd.common.codec import ConvertError, load
from healthd.common.model import Observation, ObservationKind
from healthd.common.values import dataclass

KEEP_SECONDS = 48 * 3600.0  # the longest window that a rule of the catalogue asks for is 24 h
KEEP_INCREMENTS = 64  # beyond that the oldest are merged: a counter that grows in every round stays bounded


@dataclass(frozen=True, slots=True)
class Reading:
    value: float
    time: float


class Series(NamedTuple):
    """One observation: its last reading, in boot `boot_id`, and a counter's increments with times (oldest first)."""

    value: float
    time: float
    boot_id: str
    grown: tuple[tuple[float, float], ...] = ()


def key(reading: Observation) -> str:
    """The name of an observation in the store: "link_downed_total{port=mlx5_0/1}"."""
    return _key(reading.name, reading.labels)


@functools.lru_cache(maxsize=8192)
def _key(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    return f"{name}{{{','.join(f'{label}={value}' for label, value in labels)}}}"


def increment(series: Series, reading: Observation, boot_id: str) -> float:
    """How much the counter grew from the last reading to this one.

    Another boot: 0, since errors that link training counts at boot are no fault of the running node. A smaller value
    in the same boot: the counter wrapped at its width if it was near the end, else it was reset (driver reload,
    re-enumerated device), and its whole value is new.
    """
    if series.boot_id != boot_id:
        return 0.0
    if reading.value >= series.value:
        return reading.value - series.value
    limit = 2.0**reading.bits if reading.bits else 0.0
    if limit and series.value > 0.75 * limit and series.value < limit - 1:
        return limit - series.value + reading.value
    return reading.value


def sticks(reading: Observation) -> bool:
    """Whether the counter stands at the end of its width, where InfiniBand counters stop (255, 65535)."""
    return reading.bits is not None and reading.bits < 64 and reading.value >= 2.0**reading.bits - 1


class Past:
    """Earlier readings of one check, as given to its run(). `again`: what was read at its first moment, and stands, was
    read again until its second."""

    def __init__(
        self, store: dict[str, Series], now: float, boot_id: str, again: tuple[float, float] | None = None
    ) -> None:
        self._store = store
        self._now = now
        self._boot_id = boot_id
        self._again = again

    def growth(self, reading: Observation, within_seconds: float) -> float | None:
        """Growth within `within_seconds` before this reading; 0.0 at first sight or after a boot; None if it sticks."""
        if not reading.value and not within_seconds:
            return 0.0  # a counter at zero has not grown: most counters of a healthy node
        if sticks(reading):
            return None
        series = self._store.get(key(reading))
        if series is None:
            return 0.0
        old = sum(amount for when, amount in series.grown if when > self._now - within_seconds)
        return old + increment(series, reading, self._boot_id)

    def last(self, reading: Observation, any_boot: bool = False, within_seconds: float = math.inf) -> Reading | None:
        """The previous reading in this boot, or (`any_boot`) in any remembered boot; None if it is older than
        `within_seconds`. Gauges have one too."""
        series = self._store.get(key(reading))
        if series is None or (series.boot_id != self._boot_id and not any_boot):
            return None
        time = self._again[1] if self._again and series.time == self._again[0] else series.time
        return Reading(series.value, time) if self._now - time <= within_seconds else None

    def rate(self, reading: Observation) -> float | None:
        """Growth per second since the previous reading; None if there is none, or if the counter sticks."""
        last = self.last(reading)
        if last is None or sticks(reading) or self._now <= last.time:
            return None
        return increment(self._store[key(reading)], reading, self._boot_id) / (self._now - last.time)


def stands_until(store: dict[str, Series], readings: int, then: float, boot_id: str) -> float:
    """Until when a store that so many readings of one run made, at `then` in this boot, needs nothing but another
    moment if the same is read again (epoch seconds): then it forgets something. -inf if it would need more."""
    read = [each for each in store.values() if each.time == then]
    if len(read) != readings or any(each.boot_id != boot_id for each in read):
        return -math.inf
    oldest = [when for each in read for when, _ in each.grown[:1]]
    oldest += [each.time for each in store.values() if each.time != then]
    return min(oldest, default=math.inf) + KEEP_SECONDS


def read_again(store: dict[str, Series], then: float, now: float) -> dict[str, Series]:
    """What `update` makes of a store that stands, after a run that read the same again. Most runs of a healthy node."""
    return {
        name: Series(each.value, now, each.boot_id, each.grown) if each.time == then else each
        for name, each in store.items()
    }


def update(
    store: dict[str, Series], observations: Iterable[Observation], now: float, boot_id: str
) -> dict[str, Series]:
    """The store after a run. Series that were not read this time are kept for KEEP_SECONDS."""
    new = {name: series for name, series in store.items() if series.time > now - KEEP_SECONDS}
    for reading in observations:
        name = key(reading)
        series = new.get(name)
        grown: tuple[tuple[float, float], ...] = ()
        if series is not None and reading.kind is ObservationKind.COUNTER:
            grown = tuple(item for item in series.grown if item[0] > now - KEEP_SECONDS) if series.grown else ()
            amount = increment(series, reading, boot_id)
            if amount > 0:
                grown = (*grown, (now, amount))
            if len(grown) > KEEP_INCREMENTS:
                # The two oldest become one at the later time: a window then sees it a little too long, never too short.
                grown = ((grown[1][0], grown[0][1] + grown[1][1]), *grown[2:])
        new[name] = Series(reading.value, now, boot_id, grown)
    return new


# --- the store as text: the worker writes and reads it; the daemon keeps it between runs without looking inside


_encoded = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode(store: dict[str, Series]) -> str:
    """Raises ValueError for NaN or infinity (a site's check may give them)."""
    return _encoded(store)


_encoded_once = functools.lru_cache(maxsize=4)(_encoded)  # a boot's name


def encoded_again(text: str, then: float, now: float, boot_id: str) -> str:
    """The text of a store that stands, which was read at `then`, after a run that read the same again: what `encode`
    gives of `read_again`. No key can hold what is replaced: a quote in it has a backslash before it."""
    boot = _encoded_once(boot_id)
    return text.replace(f",{then!r},{boot},[", f",{now!r},{boot},[")


Row: TypeAlias = tuple[float, float, str, tuple[tuple[float, float], ...]]


@dataclass(frozen=True, slots=True)
class _Rows:
    rows: dict[str, Row]


def decode(text: str) -> dict[str, Series]:
    """An empty text gives an empty store. Raises ValueError in one sentence."""
    if not text:
        return {}
    try:
        rows = load(_Rows, {"rows": json.loads(text)}).rows
    except (ValueError, OverflowError, RecursionError) as error:  # ConvertError is a ValueError
        raise ConvertError(f"is not a store of counters: {error}") from None
    return {name: Series(*row) for name, row in rows.items()}


def without_growth(store: dict[str, Series], subject: str) -> dict[str, Series]:
    """The store after a part's repair: earlier growth proves nothing. `subject`: the value of a label; "" = all."""
    return {
        name: series._replace(grown=()) if f"={subject}," in name or f"={subject}}}" in name or not subject else series
        for name, series in store.items()
    }


def moved(store: dict[str, Series], move: Callable[[float], float]) -> dict[str, Series]:
    """The store after the clock was set: the same readings, at the times that `move` gives."""
    return {
        name: series._replace(
            time=move(series.time), grown=tuple((move(when), amount) for when, amount in series.grown)
        )
        for name, series in store.items()
    }
