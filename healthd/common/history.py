"""A check's earlier readings, kept across restarts: each observation's last value and the growth of counters. The
functions are pure.

A counter's absolute value means little (it may have been high for years), so rules evaluate its growth. The store keeps
each observation's last reading, and each increment of a counter with its time. A healthy node's counters never grow, so
the store stays small. `update` returns the next store from the previous store and a run's readings.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from healthd.common import values
from healthd.common.model import Observation, ObservationKind
from healthd.common.values import DecodeError, Value

KEEP_SECONDS = 48 * 3600.0  # the longest window that a rule uses is 24 h
MAX_INCREMENTS = 64  # older increments are merged, to bound the store for a counter that grows in every round


class Reading(Value, frozen=True):
    value: float
    time: float


class Series(NamedTuple):
    """State of one observation.

    It contains the last reading and, for a counter, the increments with their times, oldest first. `boot_id` is the
    boot of the last reading.
    """

    value: float
    time: float
    boot_id: str
    increments: tuple[tuple[float, float], ...] = ()


def key(reading: Observation) -> str:
    """Return an observation's name in the store, such as "link_downed_total{port=mlx5_0/1}"."""
    return _key(reading.name, reading.labels)


@functools.lru_cache(maxsize=8192)
def _key(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    if not all(isinstance(text, str) for text in (name, *itertools.chain(*labels))):
        raise TypeError(f"observation {name!r}: its name and labels must be text, got {labels!r:.100}")
    return f"{name}{{{','.join(f'{label}={value}' for label, value in labels)}}}"


def increment(series: Series, reading: Observation, boot_id: str) -> float:
    """Return the counter's growth from the last reading to this one.

    After a reboot the growth is 0, because errors counted by link training at boot are not a fault of the running node.
    A counter that became smaller in the same boot has wrapped if it was near the end of its width. Otherwise it was
    reset (driver reload, re-enumerated device), and its whole value is new.
    """
    if series.boot_id != boot_id:
        return 0.0
    if reading.value >= series.value:
        return reading.value - series.value
    limit = 2.0**reading.bits if reading.bits else 0.0
    if limit and series.value > 0.75 * limit and series.value < limit - 1:
        return limit - series.value + reading.value
    return reading.value


def is_saturated(reading: Observation) -> bool:
    """Return True if the counter has reached the end of its width, where InfiniBand counters stop (255, 65535)."""
    return reading.bits is not None and reading.bits < 64 and reading.value >= 2.0**reading.bits - 1


class History:
    """One check's earlier readings, which are passed to its run()."""

    def __init__(self, store: dict[str, Series], now: float, boot_id: str) -> None:
        self._store = store
        self._now = now
        self._boot_id = boot_id

    def growth(self, reading: Observation, within_seconds: float) -> float | None:
        """Return the growth in the `within_seconds` before this reading.

        The growth is 0.0 for the first reading and after a boot, and None if the counter is saturated.
        """
        if not reading.value and not within_seconds:
            return 0.0  # a counter at zero has not grown; most of a healthy node's counters are at zero
        if is_saturated(reading):
            return None
        series = self._store.get(key(reading))
        if series is None:
            return 0.0
        recorded = sum(amount for when, amount in series.increments if when > self._now - within_seconds)
        return recorded + increment(series, reading, self._boot_id)

    def last(self, reading: Observation, any_boot: bool = False, within_seconds: float = math.inf) -> Reading | None:
        """Return the previous reading of a counter or gauge in this boot or, with `any_boot`, in any recorded boot.

        Return None if there is no previous reading, or if it is older than `within_seconds`.
        """
        series = self._store.get(key(reading))
        if series is None or (series.boot_id != self._boot_id and not any_boot):
            return None
        return Reading(series.value, series.time) if self._now - series.time <= within_seconds else None

    def rate(self, reading: Observation) -> float | None:
        """Return the growth per second since the previous reading, or None if there is no previous reading or the
        counter is saturated.
        """
        last = self.last(reading)
        if last is None or is_saturated(reading) or self._now <= last.time:
            return None
        return increment(self._store[key(reading)], reading, self._boot_id) / (self._now - last.time)


def update(
    store: dict[str, Series], observations: Iterable[Observation], now: float, boot_id: str
) -> dict[str, Series]:
    """Return the store after a run. Series without a reading in this run are kept for KEEP_SECONDS."""
    new = {name: series for name, series in store.items() if series.time > now - KEEP_SECONDS}
    for reading in observations:
        name = key(reading)
        series = new.get(name)
        increments: tuple[tuple[float, float], ...] = ()
        if series is not None and reading.kind is ObservationKind.COUNTER:
            increments = (
                tuple(item for item in series.increments if item[0] > now - KEEP_SECONDS) if series.increments else ()
            )
            amount = increment(series, reading, boot_id)
            if 0 < amount < math.inf:
                increments = (*increments, (now, amount))
            if len(increments) > MAX_INCREMENTS:
                # Merge the two oldest at the later time, so a window includes them for slightly too long, never too
                # short.
                increments = ((increments[1][0], increments[0][1] + increments[1][1]), *increments[2:])
        new[name] = Series(reading.value, now, boot_id, increments)
    return new


# --- the store as text, which the worker reads and writes and the daemon keeps between runs


def encode(store: dict[str, Series]) -> str:
    return values.encode(store).decode()


def decode(text: str) -> dict[str, Series]:
    """Parse the store. Empty text gives an empty store. Raises DecodeError."""
    try:
        return values.decode(dict[str, Series], text) if text else {}
    except DecodeError as error:
        raise DecodeError(f"is not a store of counters: {error}") from None


def without_growth(store: dict[str, Series], subject: str) -> dict[str, Series]:
    """Return the store after a repair, without the earlier growth for `subject` (a label's value, or "" for all)."""
    return {
        name: series._replace(increments=())
        if f"={subject}," in name or f"={subject}}}" in name or not subject
        else series
        for name, series in store.items()
    }


def shift_times(store: dict[str, Series], shift: Callable[[float], float]) -> dict[str, Series]:
    """Return the store after the clock was set, with the same readings at shifted times."""
    return {
        name: series._replace(
            time=shift(series.time), increments=tuple((shift(when), amount) for when, amount in series.increments)
        )
        for name, series in store.items()
    }
