"""Tests of the ledger: it survives encoding, kills, truncation, clock steps and corruption."""

from __future__ import annotations

import enum
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from healthd.agent.conditions import store
from healthd.agent.conditions.ledger import (
    CLEARED_RETENTION_SECONDS,
    MAX_CLEARED,
    Ledger,
    Pause,
    after_clock_step,
    trim_history,
    with_conditions,
    without_future_times,
)
from healthd.agent.conditions.state_files import LedgerError, read_text, set_aside
from healthd.agent.conditions.store import decode, decode_past
from healthd.common.atomic_files import replace_file
from healthd.common.codec import fields_of
from healthd.common.history import Series
from healthd.common.history import decode as decode_store
from healthd.common.history import encode as encode_store
from healthd.common.model import (
    Ack,
    Clears,
    Condition,
    ConditionState,
    DrainRecord,
    EndedDrain,
    FleetCount,
    Gpu,
    Inventory,
    KernelEvent,
    PartitionCount,
    SentRequeue,
    Severity,
    Slowness,
    UnsavedChange,
    Worsens,
)
from healthd.common.moments import MOMENT
from healthd.common.values import encode

T0 = 1_800_000_000.0


INTEGERS = st.integers(-(2**63), 2**63 - 1)


def value_strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of any type used in the ledger. Times are finite."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Struct):
        hints = typing.get_type_hints(kind)
        names = [f.name for f in fields_of(kind) if f.name != "version"]
        return st.builds(kind, **{name: value_strategy(hints[name]) for name in names})
    if hasattr(kind, "_fields"):  # a NamedTuple
        return st.builds(kind, **{name: value_strategy(hint) for name, hint in typing.get_type_hints(kind).items()})
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(value_strategy, args))
    if origin is tuple:
        if args[1:] == (Ellipsis,):
            return st.lists(value_strategy(args[0]), max_size=2).map(tuple)
        return st.tuples(*map(value_strategy, args))
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), value_strategy(args[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        float: st.floats(allow_nan=False, allow_infinity=False),
        int: INTEGERS,
        str: st.text(max_size=8),
        bool: st.booleans(),
        type(None): st.none(),
        Any: INTEGERS | st.text(max_size=5) | st.dictionaries(st.text(max_size=3), INTEGERS, max_size=2),
    }
    return plain[kind]


def condition(subject: str = "", **changes: Any) -> Condition:
    default = Condition(
        check="gpu_xid",
        instance="",
        code="gpu_xid/79",
        subject=subject,
        severity=Severity.CRITICAL,
        message="m",
        clears=Clears.REBOOT,
        state=ConditionState.OPEN,
        first_seen=T0,
        last_seen=T0,
        count=1,
        boot_id="b",
    )
    return replace(default, **changes)


def cleared(subject: str, at: float) -> Condition:
    return condition(subject, state=ConditionState.CLEARED, cleared_at=at, cleared_by="reboot")


FULL_LEDGER = Ledger(
    born=T0,
    boot_id="b",
    mode="act",
    trusted_since=T0,
    conditions=(
        condition("0000:1b:00.0", worsens=Worsens(240.0, Severity.CRITICAL), evidence='"quoted"\n é'),
        condition("0000:1c:00.0", slowness=Slowness(0.26, T0, ("4711",))),
    ),
    cleared=(cleared("0000:2a:00.0", T0),),
    events=(KernelEvent("xid", "79", "0000:1b:00.0", T0, pid=12, fields=(("link", "28"),), last_time=T0, sequence=7),),
    next_sequence=8,
    cursors={"kmsg": {"sequence": 12, "boot_id": "b"}},
    slurm=DrainRecord(
        "healthd: gpu_xid/79",
        confirmed_at=T0,
        resume_sent_at=T0,
        sent_requeues=(SentRequeue("12", 0, T0),),
        ended_drain=EndedDrain("healthd: a", "healthd: a", 5.0, T0, controller="1 ctl1"),
        unsaved_change=UnsavedChange(T0, "1 ctl1"),
        stored_count=FleetCount(T0, (PartitionCount("gpu", 8, 1),)),
        count_failing_since=T0,
        count_failed_at=T0,
    ),
    pause=Pause(T0, "driver upgrade", "root", T0 - 60),
    inventory=Inventory(gpus=(Gpu("0000:1b:00.0", 0, "GPU-1", "H100"),)),
)


# --- as text


@given(value_strategy(Ledger))
@settings(deadline=None)
def test_encode_decode_returns_equal_ledger(ledger: Ledger) -> None:
    assert decode(encode(ledger), "x") == ledger


@given(value_strategy(dict[str, dict[str, Series]]))
@settings(deadline=None)
def test_encode_decode_past_returns_equal_past(past: dict[str, dict[str, Series]]) -> None:
    texts = {check: encode_store(store) for check, store in past.items()}
    assert decode_past(encode(texts), "x") == texts
    assert {check: decode_store(text) for check, text in texts.items()} == past


ODD_VALUES = st.sampled_from([None, True, -1, 0.5, 2**70, 1e308, "", "x", [], {}, [[]], [{}], [[True], {}], {"": []}])


@given(st.data())
@settings(deadline=None)
def test_decode_raises_ledger_error_for_any_other_json_in_any_place(data: st.DataObject) -> None:
    """Replace one value at a random depth."""
    table: Any = json.loads(encode(data.draw(value_strategy(Ledger), "ledger")))
    container = table
    while True:
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        key = data.draw(st.sampled_from(keys), "key")
        below = container[key]
        if not isinstance(below, (dict, list)) or not below or data.draw(st.booleans(), "here"):
            container[key] = data.draw(ODD_VALUES, "value")
            break
        container = below
    assert is_decoded_or_refused(decode, json.dumps(table))


@given(st.recursive(ODD_VALUES, lambda below: st.lists(below) | st.dictionaries(st.text(), below), max_leaves=8))
def test_decode_past_raises_ledger_error_for_any_other_json(data: Any) -> None:
    for text in (json.dumps(data), json.dumps({"gpu_pcie": json.dumps(data)})):
        assert is_decoded_or_refused(decode_past, text)


def is_decoded_or_refused(decoder: Callable[[str, str], object], text: str) -> bool:
    """Return True if `read` returns a value or raises LedgerError. Other errors propagate."""
    try:
        return decoder(text, "x") is not None
    except LedgerError as error:
        return str(error).startswith("x: is")


def test_decode_keeps_non_utf8_reason() -> None:
    ledger = Ledger(slurm=DrainRecord(overriding_reason=b"L\xfcfter".decode("utf-8", "surrogateescape")))
    assert decode(encode(ledger), "x") == ledger


def test_decode_returns_empty_ledger() -> None:
    assert decode(encode(Ledger()), "x") == Ledger()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([f.name for f in fields_of(Ledger)]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values.map(json.dumps) | st.text())
@settings(deadline=None)
def test_decode_error_names_file(text: str) -> None:
    for decoder in (decode, decode_past):
        try:
            decoder(text, "/run/healthd/ledger.json")
        except LedgerError as error:
            assert str(error).startswith("/run/healthd/ledger.json: is")  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"version": 2}', "version 2; this healthd reads version 1"),
        ('{"born": "now"}', "Expected `float`, got `str` - at `$.born`"),
        ('{"born": NaN}', "malformed: invalid character (byte 9)"),
        ('{"birth": 1.0}', "unknown field `birth`"),
        ('{"slurm": {"cause": ""}}', "unknown field `cause` - at `$.slurm`"),
        ('{"born": 1' + "0" * 400 + "}", "Number out of range - at `$.born`"),
        ('{"cursors": {"a": ' + "[" * 100_000, "maximum recursion depth exceeded"),
    ],
    ids=[
        *("empty", "a list", "another version", "text for a time", "NaN"),
        *("unknown field", "unknown field below", "too large", "too deep"),
    ],
)
def test_decode_error_says_why(text: str, sentence: str) -> None:
    with pytest.raises(LedgerError) as error:
        decode(text, "x")
    assert str(error.value).startswith(("x: is ", "x: has "))
    assert sentence in str(error.value)


@given(st.integers(0, 1_000_000))
@settings(deadline=None)
def test_decode_rejects_truncated_ledger(length: int) -> None:
    text = encode(FULL_LEDGER)
    with pytest.raises(LedgerError):
        decode(text[: length % len(text)], "x")


# --- conditions and their history


def test_with_conditions_moves_cleared_to_history() -> None:
    cleared_condition, open_condition = cleared("a", T0), condition("b")
    ledger = with_conditions(Ledger(), {(c.code, c.subject): c for c in (cleared_condition, open_condition)})
    assert (ledger.conditions, ledger.cleared) == ((open_condition,), (cleared_condition,))
    assert ledger.by_key() == {("gpu_xid/79", "b"): open_condition}


def test_with_conditions_returns_same_ledger_without_change() -> None:
    assert with_conditions(FULL_LEDGER, FULL_LEDGER.by_key()) is FULL_LEDGER


def test_trim_history_keeps_newest() -> None:
    cleared_conditions = [cleared(str(number), T0 + number) for number in range(MAX_CLEARED + 1)]
    full = with_conditions(Ledger(), {c.key: c for c in cleared_conditions[1:]})
    assert trim_history(full, T0) is full
    overfull = with_conditions(Ledger(), {c.key: c for c in cleared_conditions})
    assert overfull.cleared == tuple(cleared_conditions), "the event stream must see all"
    assert trim_history(overfull, T0).cleared == tuple(cleared_conditions[1:])


def test_trim_history_removes_expired() -> None:
    old, new = cleared("old", T0), cleared("new", T0 + CLEARED_RETENTION_SECONDS)
    ledger = replace(Ledger(), cleared=(old, new))
    assert trim_history(ledger, T0 + CLEARED_RETENTION_SECONDS - 1) is ledger
    assert trim_history(ledger, T0 + CLEARED_RETENTION_SECONDS).cleared == (new,)


def test_history_is_kept_longer_than_relapse_time() -> None:
    from healthd.agent.conditions.absorb import RELAPSE_SECONDS

    assert CLEARED_RETENTION_SECONDS > RELAPSE_SECONDS


# --- the clock


def moments(value: Any) -> list[float]:
    """Return every number in a ledger that is a time: a float near T0, as in FULL."""
    if isinstance(value, Struct):
        return [moment for f in fields_of(type(value)) for moment in moments(getattr(value, f.name))]
    if isinstance(value, tuple):
        return [moment for item in value for moment in moments(item)]
    return [value] if isinstance(value, float) and value > 1e9 else []


@pytest.mark.parametrize("step", [3600.0, -86400.0])
def test_after_clock_step_moves_every_moment(step: float) -> None:
    stepped = after_clock_step(FULL_LEDGER, step)
    assert moments(stepped) == [moment + step for moment in moments(FULL_LEDGER)]
    assert after_clock_step(stepped, -step) == FULL_LEDGER


# Float fields of the ledger that are neither durations nor times of this machine's clock.
OTHER_NUMBERS = {
    ("Worsens", "after_seconds"),
    ("Slowness", "slowdown"),
    ("KernelEvent", "uptime"),  # since boot
    ("DrainRecord", "reason_time"),  # these are time stamps by slurmctld's clock
    ("DrainRecord", "prolog_drain_time"),
    ("EndedDrain", "reason_time"),
    ("UnaffectedJob", "start"),
}


def float_fields(kind: Any, owner: str = "", name: str = "") -> Iterator[tuple[str, str, bool]]:
    """Yield each float field below a type: class, field, and whether it is declared as a moment."""
    if (isinstance(kind, type) and issubclass(kind, Struct)) or hasattr(kind, "_fields"):
        for field, hint in typing.get_type_hints(kind, include_extras=True).items():
            yield from float_fields(hint, kind.__name__, field)
    elif typing.get_origin(kind) is Annotated:
        if typing.get_args(kind)[0] is float:
            yield owner, name, MOMENT in kind.__metadata__
    elif kind is float:
        yield owner, name, False
    else:
        for part in typing.get_args(kind):
            yield from float_fields(part, owner, name)


def test_every_float_field_is_declared_as_moment_or_exempt() -> None:
    float_field_list = list(float_fields(Ledger))
    assert {(owner, name) for owner, name, _ in float_field_list} >= OTHER_NUMBERS
    for owner, name, is_moment in float_field_list:
        assert is_moment != ((owner, name) in OTHER_NUMBERS or name.endswith("_seconds")), (owner, name)


def test_without_future_times_limits_past_moments_to_now() -> None:
    ahead = T0 + 9e6
    condition_ahead = condition(
        acknowledged_at=ahead, last_event=ahead, ack=Ack(ahead + 60, "w", "a", Severity.INFO, ahead)
    )
    ledger = Ledger(
        born=ahead,
        trusted_since=ahead,
        conditions=(condition_ahead,),
        cleared=(condition_ahead,),
        slurm=DrainRecord(pending_since=ahead, drained_at=ahead, earlier_drains=(EndedDrain("a", "a", ahead, ahead),)),
    )
    corrected = without_future_times(ledger, T0)
    assert (corrected.born, corrected.trusted_since, corrected.cleared) == (ahead, T0, ledger.cleared)
    (corrected_condition,) = corrected.conditions
    assert (corrected_condition.acknowledged_at, corrected_condition.last_event) == (T0, ahead)
    assert corrected_condition.ack is not None
    assert (corrected_condition.ack.requested_at, corrected_condition.ack.until) == (T0, T0 + 60)
    assert (corrected.slurm.pending_since, corrected.slurm.drained_at) == (ahead, T0)
    assert [(old.reason_time, old.ended_at) for old in corrected.slurm.earlier_drains] == [(ahead, T0)]


def test_after_clock_step_keeps_unset_times() -> None:
    assert after_clock_step(Ledger(), 3600.0) == Ledger()


def test_without_future_times_restarts_waits() -> None:
    slurm = DrainRecord(count_failing_since=T0 + 9e6, unsaved_change=UnsavedChange(T0 + 9e6, "1 ctl1"))
    corrected = without_future_times(Ledger(slurm=slurm), T0).slurm
    assert (corrected.count_failing_since, corrected.unsaved_change) == (T0, UnsavedChange(T0, "1 ctl1"))


# --- as files


def test_read_text_returns_none_without_file(tmp_path: Path) -> None:
    assert read_text(str(tmp_path / "none")) is None


def test_read_text_error_is_single_sentence(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=f"^{tmp_path}: cannot be read: Is a directory$"):
        read_text(str(tmp_path))


def test_decode_rejects_non_utf8_bytes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_bytes(b'{"boot_id": "\xff\xfe')
    text = read_text(str(path))
    assert text is not None
    with pytest.raises(LedgerError):
        decode(text, str(path))


def test_replace_file_writes_private_file_atomically(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.json")
    for ledger in (FULL_LEDGER, Ledger()):
        replace_file(path, encode(ledger), durable=True)
        assert decode(str(read_text(path)), path) == ledger
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["ledger.json"]


def test_set_aside_keeps_content(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text("scribble")
    moved = Path(set_aside(str(path)))
    assert moved.read_text() == "scribble"
    assert not path.exists()


WRITER = """
import sys
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.conditions.state_files import read_text
from healthd.agent.conditions.store import decode
from healthd.common.values import encode
from healthd.common.atomic_files import replace_file
path = sys.argv[1]
ledger = decode(read_text(path), path)
print("ready", flush=True)
from msgspec.structs import replace
while True:
    ledger = replace(ledger, next_sequence=ledger.next_sequence + 1, mode="m" * ledger.next_sequence)
    replace_file(path, encode(ledger))
"""


def test_kill_during_replace_file_leaves_old_or_new_ledger(tmp_path: Path) -> None:
    """The length of `mode` shows whether a ledger is one that was written."""
    path = str(tmp_path / store.FILE)
    replace_file(path, encode(replace(FULL_LEDGER, next_sequence=1, mode="")))
    rng = random.Random(7)
    reached = 1
    kills = 0
    while kills < 15 or reached <= 15:  # until the writers had time to write
        kills += 1
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.03))
            writer.send_signal(signal.SIGKILL)
        ledger = decode(str(read_text(path)), path)
        assert ledger.next_sequence >= reached
        assert ledger.mode == "m" * (ledger.next_sequence - 1)
        assert ledger.conditions == FULL_LEDGER.conditions
        reached = ledger.next_sequence
