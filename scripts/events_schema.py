"""Write docs/events.schema.json from healthd/events/schema.py. Run it after an event or one of its fields changes.

tests/events/test_event.py fails if the schema is outdated or docs/events.md contradicts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from healthd.events import schema as event  # noqa: E402

SCHEMA = ROOT / "docs/events.schema.json"
TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$"
TEXT: dict[str, Any] = {"type": "string", "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*$"}


def field_schema(name: str) -> dict[str, Any]:
    """Return the schema of a field."""
    if name in event.ALLOWED_VALUES:
        return {"enum": list(event.ALLOWED_VALUES[name])}
    kind = event.FIELDS[name]
    if kind == event.CONDITIONS:
        nested = {field: field_schema(field) for field in event.ALIVE_CONDITION_FIELDS}
        items = {"type": "object", "properties": nested, "required": list(event.ALIVE_CONDITION_FIELDS)}
        return {"type": "array", "maxItems": event.MAX_ENTRIES, "items": items}
    if kind == event.GPUS:
        items = {"type": "object", "properties": dict.fromkeys(event.GPU_FIELDS, TEXT), "required": ["subject"]}
        return {"type": "array", "maxItems": event.MAX_ENTRIES, "items": items}
    return {
        event.TEXT: TEXT,
        event.TIME: {"type": "string", "pattern": TIME},
        event.TIME_OR_NULL: {"type": ["string", "null"], "pattern": TIME},
        event.WHOLE: {"type": "integer", "minimum": 0},
        event.NUMBER: {"type": "number", "minimum": 0},
        event.FLAG: {"type": "boolean"},
        event.TEXTS: {"type": "array", "maxItems": event.MAX_ENTRIES, "items": TEXT},
        event.NAMES: {"type": "array", "items": TEXT},
    }[kind]


def event_rule(name: str, fields: event.EventFields) -> dict[str, Any]:
    """Return the rules for the lines of one event. Unknown fields are allowed: a newer version may have added them."""
    then: dict[str, Any] = {"required": list(fields.required)}
    if fields.stages:
        then["properties"] = {"stage": {"enum": list(fields.stages)}}
    return {"if": {"properties": {"event": {"const": name}}}, "then": then}


def schema() -> dict[str, Any]:
    fields = {name: field_schema(name) for name in event.FIELDS}
    fields["schema"] = {"const": event.SCHEMA}
    fields["stream_id"] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
    fields["seq"] = {"type": "integer", "minimum": 1}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "One line of healthd's event stream",
        "description": "docs/events.md documents each event and field. Readers must keep unknown events and fields.",
        "type": "object",
        "properties": fields,
        "required": list(event.HEAD),
        "allOf": [event_rule(name, event_fields) for name, event_fields in event.EVENTS.items()],
    }


def text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), "utf-8")
