"""Event schema: the code, docs/events.md and docs/events.schema.json agree, and each event is one line."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.common.model import Mode, Severity
from healthd.events import schema as event
from healthd.events.schema import EVENTS, FIELDS, HEAD, Event, Source, format_time, render

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/events.md").read_text("utf-8")
SOURCE = Source("c1", "gpu-1", "6a9f0c1e-boot", "0f3c6f1e2a9b4d57")

SAMPLES = {
    event.TEXT: "some words",
    event.TIME: 1795349480.123,
    event.TIME_OR_NULL: None,
    event.WHOLE: 3,
    event.NUMBER: 1.5,
    event.FLAG: True,
    event.TEXTS: ("4711", "4712"),
    event.NAMES: ("gpu_xid", "mount"),
    event.CONDITIONS: (
        {
            "condition": "9d1c2f0a-1795003880",
            "check": "mount",
            "instance": "/data",
            "code": "mount/missing",
            "subject": "/data",
            "severity": "critical",
            "state": "open",
        },
    ),
}


def sample(name: str, stage: str = "") -> Event:
    """Return an event with all its fields."""
    says = EVENTS[name]
    fields = {
        each: event.ALLOWED_VALUES[each][0] if each in event.ALLOWED_VALUES else SAMPLES[FIELDS[each]]
        for each in says.required
    }
    fields |= {
        each: event.ALLOWED_VALUES[each][0] if each in event.ALLOWED_VALUES else SAMPLES[FIELDS[each]]
        for each in says.optional
    }
    return Event(name, {**fields, **({"stage": stage} if stage else {})})


EVERY = [sample(name, stage) for name, says in EVENTS.items() for stage in says.stages or ("",)]


def line(told: Event) -> str:
    return render(SOURCE, 12, 1795349480.1234, 123.4567, told)


def script():
    spec = importlib.util.spec_from_file_location("events_schema", ROOT / "scripts/events_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- schema and page


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the page."""
    text = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[*row, "", ""] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_schema_is_that_of_the_code():
    schema = (ROOT / "docs/events.schema.json").read_text("utf-8")
    assert schema == script().text(), "run scripts/events_schema.py: an event or a field of one changed"


def test_the_page_names_every_event_with_its_fields_and_no_other():
    of_condition = names(PAGE.split('"The condition" is ', 1)[1].split("\n", 1)[0])
    page = {}
    for name, _, always, at_times, *_ in table("Events"):
        mine = of_condition if "the condition" in always else []
        page[name.strip("`")] = ({*mine, *names(always)}, set(names(at_times)))
    assert page == {name: (set(says.required), set(says.optional)) for name, says in EVENTS.items()}


def test_the_page_explains_every_field():
    of_all = {name for cell, *_ in table("Fields of every line") for name in names(cell)}
    assert of_all == set(HEAD)
    assert {name for cell, *_ in table("Fields of the events") for name in names(cell)} == set(FIELDS) - of_all


def test_the_page_names_every_word_that_a_field_may_hold():
    words = [word for some in event.ALLOWED_VALUES.values() for word in some]
    words += [stage for says in EVENTS.values() for stage in says.stages]
    assert [word for word in words if f"`{word}`" not in PAGE] == []


def test_severities_and_modes_are_those_of_healthd():
    assert [severity.name.lower() for severity in Severity] == list(event.SEVERITIES)
    assert {mode.value for mode in Mode} == set(event.ALLOWED_VALUES["mode"])


def test_every_field_of_an_event_is_a_field():
    assert {name for says in EVENTS.values() for name in (*says.required, *says.optional)} <= set(FIELDS)
    assert tuple(FIELDS)[: len(HEAD)] == HEAD


@pytest.mark.one_python
@pytest.mark.parametrize("told", EVERY, ids=lambda told: f"{told.name} {told.fields.get('stage', '')}".strip())
def test_a_line_is_as_the_schema_says(told):
    from jsonschema import Draft202012Validator

    schema = script().schema()
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    said = json.loads(line(told))
    validator.validate(said)
    for name in (*HEAD, *EVENTS[told.name].required):
        assert not validator.is_valid({key: value for key, value in said.items() if key != name}), name
    validator.validate({**said, "newer": 1})
    validator.validate({**said, "event": "of_a_newer_healthd"})
    assert not validator.is_valid({**said, "time": 1795349480})


@pytest.mark.one_python
def test_the_example_of_the_page_is_as_the_schema_says():
    from jsonschema import Draft202012Validator

    (example,) = re.findall(r"```json\n(.*)\n```", PAGE)
    Draft202012Validator(script().schema()).validate(json.loads(example))


# --- rendering


def test_a_line_is_this():
    assert line(Event("stopped", {"why": "SIGTERM"})) == (
        '{"schema":1,"cluster":"c1","node":"gpu-1","boot_id":"6a9f0c1e-boot","stream_id":"0f3c6f1e2a9b4d57","seq":12,'
        '"time":"2026-11-22T12:11:20.123Z","mono":123.457,"event":"stopped","why":"SIGTERM"}'
    )


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (-5.0, "1970-01-01T00:00:00.000Z"),
        (946684799.9999, "1999-12-31T23:59:59.999Z"),
        (event.LATEST, "9999-12-31T23:59:59.000Z"),
        (1e15, "9999-12-31T23:59:59.000Z"),
    ],
)
def test_any_time_has_a_date(time, text):
    assert format_time(time) == text


def test_a_list_has_so_many_entries_and_says_how_many_more():
    for count, kept, more in ((64, 64, None), (65, 64, 1), (1000, 64, 936)):
        said = json.loads(line(Event("opened", {"jobs": tuple(map(str, range(count)))})))
        assert (len(said["jobs"]), said.get("jobs_more")) == (kept, more)


def test_so_many_names_are_whole_and_one_more_is_left_out():
    names = [f"{number:040d}" for number in range(400)]
    fit = event.MAX_NAMES_BYTES // 43
    for count, more in ((65, None), (fit, None), (fit + 1, 1), (400, 400 - fit)):
        said = json.loads(line(Event("alive", {"conditions": (), "checks": tuple(names[:count])})))
        assert (said["checks"], said.get("checks_more")) == (names[:count][:fit], more)


def test_a_name_that_is_too_long_costs_no_other_its_place():
    long = "x" * event.MAX_NAMES_BYTES
    said = json.loads(line(Event("alive", {"conditions": (), "checks": ("a", long, "z")})))
    assert (said["checks"], said["checks_more"]) == (["a", "z"], 1)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 200),
    st.text(max_size=300) | st.sampled_from(["\u00e9" * 900, "\U0001f525" * 9000]),
    st.integers(0, 250),
)
def test_whatever_stands_the_checks_that_look_are_all_named(standing: int, text: str, looking: int):
    checks = tuple(f"a_check_of_the_site_{number}" for number in range(looking))
    conditions = tuple(dict.fromkeys(event.ALIVE_CONDITION_FIELDS, text) for _ in range(standing))
    made = line(Event("alive", {"conditions": conditions, "checks": checks}))
    said = json.loads(made)
    assert len(made) < event.MAX_BYTES
    assert (said["checks"], "checks_more" in said) == (list(checks), False)
    assert len(said["conditions"]) + said.get("conditions_more", 0) == standing


def test_a_line_at_the_bound_is_whole_and_one_beyond_is_cut():
    short = line(Event("stopped", {"why": ""}))
    room = event.MAX_BYTES - 1 - len(short)
    escaped = "\u00e9" * (room // 6)  # six bytes each in ASCII
    assert json.loads(line(Event("stopped", {"why": escaped})))["why"] == escaped
    beyond = line(Event("stopped", {"why": "\u00e9" * (room // 6 + 1)}))
    assert len(beyond) < event.MAX_BYTES
    assert len(json.loads(beyond)["why"]) == event.MAX_TEXT // 2


HOSTILE = st.text(max_size=40) | st.sampled_from(
    ["\n", "\u2028", "\x1b[2J", "\ud800", "\u202e", '","seq":1}', "\x00" * 9000, "\U0001f525" * 9000]
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EVERY), HOSTILE, st.integers(0, 200))
def test_whatever_others_write_is_one_printable_line(told, text, count):
    fields = {}
    for name, value in told.fields.items():
        kind = FIELDS[name]
        if name in event.ALLOWED_VALUES or name == "stage":
            fields[name] = value
        elif kind == event.TEXT:
            fields[name] = text
        elif kind in (event.TEXTS, event.NAMES):
            fields[name] = (text,) * count
        elif kind == event.CONDITIONS:
            fields[name] = tuple(dict.fromkeys(event.ALIVE_CONDITION_FIELDS, text) for _ in range(count))
        else:
            fields[name] = value
    made = line(Event(told.name, fields))
    assert made.isascii()
    assert made.isprintable()
    assert len(made) < event.MAX_BYTES
    assert json.loads(made)["seq"] == 12
