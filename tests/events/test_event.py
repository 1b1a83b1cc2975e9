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
    event.GPUS: ({"subject": "0000:1b:00.0", "serial": "1650522003820", "uuid": "GPU-8a47", "name": "NVIDIA H100"},),
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
    spec = EVENTS[name]
    fields = {
        each: event.ALLOWED_VALUES[each][0] if each in event.ALLOWED_VALUES else SAMPLES[FIELDS[each]]
        for each in spec.required
    }
    fields |= {
        each: event.ALLOWED_VALUES[each][0] if each in event.ALLOWED_VALUES else SAMPLES[FIELDS[each]]
        for each in spec.optional
    }
    return Event(name, {**fields, **({"stage": stage} if stage else {})})


ALL_EVENTS = [sample(name, stage) for name, spec in EVENTS.items() for stage in spec.stages or ("",)]


def line(sample_event: Event) -> str:
    return render(SOURCE, 12, 1795349480.1234, 123.4567, sample_event)


def schema_script():
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


def test_schema_file_is_generated_from_code():
    schema = (ROOT / "docs/events.schema.json").read_text("utf-8")
    assert schema == schema_script().text(), "run scripts/events_schema.py: an event or a field of one changed"


def test_page_lists_every_event_with_its_fields():
    condition_fields = names(PAGE.split('"The condition" is ', 1)[1].split("\n", 1)[0])
    page = {}
    for name, _, always, at_times, *_ in table("Events"):
        mine = condition_fields if "the condition" in always else []
        page[name.strip("`")] = ({*mine, *names(always)}, set(names(at_times)))
    assert page == {name: (set(spec.required), set(spec.optional)) for name, spec in EVENTS.items()}


def test_page_explains_every_field():
    head_fields = {name for cell, *_ in table("Fields of every line") for name in names(cell)}
    assert head_fields == set(HEAD)
    assert {name for cell, *_ in table("Fields of the events") for name in names(cell)} == set(FIELDS) - head_fields


def test_page_mentions_every_value_of_a_field():
    all_values = [value for values in event.ALLOWED_VALUES.values() for value in values]
    all_values += [stage for spec in EVENTS.values() for stage in spec.stages]
    assert [value for value in all_values if f"`{value}`" not in PAGE] == []


def test_schema_has_severities_and_modes_of_healthd():
    assert [severity.name.lower() for severity in Severity] == list(event.SEVERITIES)
    assert {mode.value for mode in Mode} == set(event.ALLOWED_VALUES["mode"])


def test_every_field_of_an_event_is_defined():
    assert {name for spec in EVENTS.values() for name in (*spec.required, *spec.optional)} <= set(FIELDS)
    assert tuple(FIELDS)[: len(HEAD)] == HEAD


@pytest.mark.one_python
@pytest.mark.parametrize(
    "sample_event", ALL_EVENTS, ids=lambda told: f"{told.name} {told.fields.get('stage', '')}".strip()
)
def test_rendered_line_is_valid_for_schema(sample_event):
    from jsonschema import Draft202012Validator

    schema = schema_script().schema()
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    document = json.loads(line(sample_event))
    validator.validate(document)
    for name in (*HEAD, *EVENTS[sample_event.name].required):
        assert not validator.is_valid({key: value for key, value in document.items() if key != name}), name
    validator.validate({**document, "newer": 1})
    validator.validate({**document, "event": "of_a_newer_healthd"})
    assert not validator.is_valid({**document, "time": 1795349480})


@pytest.mark.one_python
def test_example_of_page_is_valid_for_schema():
    from jsonschema import Draft202012Validator

    (example,) = re.findall(r"```json\n(.*)\n```", PAGE)
    Draft202012Validator(schema_script().schema()).validate(json.loads(example))


# --- rendering


def test_render_writes_the_documented_line():
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
def test_format_time_limits_any_time(time, text):
    assert format_time(time) == text


def test_render_truncates_list_and_counts_the_rest():
    for count, expected_count, more in ((64, 64, None), (65, 64, 1), (1000, 64, 936)):
        document = json.loads(line(Event("opened", {"jobs": tuple(map(str, range(count)))})))
        assert (len(document["jobs"]), document.get("jobs_more")) == (expected_count, more)


def test_render_keeps_names_up_to_limit_and_counts_the_rest():
    names = [f"{number:040d}" for number in range(400)]
    fit = event.MAX_NAMES_BYTES // 43
    for count, more in ((65, None), (fit, None), (fit + 1, 1), (400, 400 - fit)):
        document = json.loads(line(Event("alive", {"conditions": (), "checks": tuple(names[:count])})))
        assert (document["checks"], document.get("checks_more")) == (names[:count][:fit], more)


def test_render_omits_only_the_name_that_is_too_long():
    long = "x" * event.MAX_NAMES_BYTES
    document = json.loads(line(Event("alive", {"conditions": (), "checks": ("a", long, "z")})))
    assert (document["checks"], document["checks_more"]) == (["a", "z"], 1)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 200),
    st.text(max_size=300) | st.sampled_from(["\u00e9" * 900, "\U0001f525" * 9000]),
    st.integers(0, 250),
)
def test_render_names_all_checks_with_any_conditions(condition_count: int, text: str, check_count: int):
    checks = tuple(f"a_check_of_the_site_{number}" for number in range(check_count))
    conditions = tuple(dict.fromkeys(event.ALIVE_CONDITION_FIELDS, text) for _ in range(condition_count))
    made = line(Event("alive", {"conditions": conditions, "checks": checks}))
    document = json.loads(made)
    assert len(made) < event.MAX_BYTES
    assert (document["checks"], "checks_more" in document) == (list(checks), False)
    assert len(document["conditions"]) + document.get("conditions_more", 0) == condition_count


def test_render_keeps_line_at_limit_and_truncates_longer_one():
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
@given(st.sampled_from(ALL_EVENTS), HOSTILE, st.integers(0, 200))
def test_render_of_any_text_is_one_printable_line(sample_event, text, count):
    fields = {}
    for name, value in sample_event.fields.items():
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
    made = line(Event(sample_event.name, fields))
    assert made.isascii()
    assert made.isprintable()
    assert len(made) < event.MAX_BYTES
    assert json.loads(made)["seq"] == 12
