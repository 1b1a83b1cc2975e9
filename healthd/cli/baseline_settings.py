"""`healthd baseline`: this node's hardware as a settings file that the checks then enforce, and changes since then.

The worker reads the values, check by check, with deadlines; this module makes a file from its replies. Pure except
`read_baseline`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from healthd.agent.scheduler.one_round import ask, close_nvml
from healthd.agent.settings.config import CheckConfig, Loaded
from healthd.agent.settings.registry import Check, with_baseline
from healthd.agent.worker.client import Request, Runner
from healthd.agent.worker.requests import BaselineAnswer, Run, RunAnswer, TakeBaseline
from healthd.common.codec import fields_of
from healthd.common.model import Entry, LeftOut, Outcome, RunName
from healthd.common.text import printable, without_class

CHECK_SECONDS = 10.0
GPU_SECONDS = 120.0  # an unused driver takes seconds per GPU to open
INSTANCE_SECONDS = 5.0
INSTANCES_SECONDS = 60.0  # for all instances: without their file server many mounts hang
NEAR = 0.03  # relative tolerance of a size in bytes: the kernel reserves a different amount after each update
COLUMN = 40


@dataclass(frozen=True, slots=True)
class Present:
    """Hardware of the node, and omitted parts."""

    entries: tuple[Entry, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


# --- reading


def take(loaded: Loaded, checks: Mapping[str, Check], runner: Runner) -> Present:
    """Read the values with the worker. Ends within the deadlines even if checks hang."""
    found: list[Entry | LeftOut] = []
    silent: dict[str, str] = {}  # resource -> why it is not read again
    for name in with_baseline(checks):
        resource = "nvml" if checks[name].uses == "nvml" else f"baseline {name}"
        if resource != "nvml":
            close_nvml(runner)
        seconds = GPU_SECONDS if resource == "nvml" else CHECK_SECONDS
        asked = TakeBaseline(name, loaded.tables.get(RunName(name), {}))
        reply = ask(runner, Request(resource, seconds, asked))
        if isinstance(reply.answer, BaselineAnswer):
            found += [*reply.answer.entries, *reply.answer.left_out]
            continue
        why = silent.get(resource) or _why(reply.error, seconds)
        if reply.outcome is Outcome.TIMED_OUT:
            silent[resource] = why
        found.append(LeftOut(name, f"could not be read: {why}"))
    close_nvml(runner)
    entries = [item for item in found if isinstance(item, Entry)]
    left_out = [item for item in found if isinstance(item, LeftOut)]
    broken = list(_broken(entries, checks, runner))
    instances = {(left.check, left.instance) for left in broken}
    known = [entry for entry in entries if (entry.check, entry.instance) not in instances]
    return Present(tuple(known), (*left_out, *broken))


def _broken(entries: Iterable[Entry], checks: Mapping[str, Check], runner: Runner) -> Iterator[LeftOut]:
    """Yield instances (mounts) in which the check itself finds a problem, or which do not answer."""
    tables: dict[RunName, dict[str, Any]] = {}
    for entry in entries:
        if checks[entry.check].per:
            name = RunName(entry.check, entry.instance)
            tables.setdefault(name, {"name": entry.instance})[entry.setting] = entry.value
    left = INSTANCES_SECONDS
    for (check, instance), table in tables.items():
        if left <= 0:
            yield LeftOut(check, "not read: other instances took too long", instance=instance, unread=True)
            continue
        run = Run(check, instance, table)
        reply = ask(runner, Request(checks[check].resource(instance), INSTANCE_SECONDS, run))
        left -= reply.seconds
        findings = reply.answer.findings if isinstance(reply.answer, RunAnswer) else ()
        problems = [finding.message for finding in findings]
        if reply.outcome is not Outcome.COMPLETED:
            problems.append(_why(reply.error, INSTANCE_SECONDS))
        if problems:
            unread = reply.outcome is not Outcome.COMPLETED
            yield LeftOut(check, "; ".join(problems), instance=instance, unread=unread)


def _why(error: str, seconds: float) -> str:
    return without_class(error) or f"no answer within {seconds:g} s"


# --- as a file


def as_toml(present: Present, checks: Mapping[str, Check], heading: str) -> str:
    """Return the file. Omitted parts are comments at their position."""
    lines = [*(f"# {line}" for line in heading.splitlines())]
    for check, (settings, _) in with_baseline(checks).items():
        entries = [entry for entry in present.entries if entry.check == check]
        left_out = [left for left in present.left_out if left.check == check]
        if checks[check].per:
            lines += _named_tables(check, entries, left_out)
        elif entries or left_out:
            lines += _table(checks[check].config, check, settings, entries, left_out)
    return "\n".join(lines) + "\n"


def _table(
    config: type[CheckConfig], check: str, settings: Sequence[str], entries: list[Entry], left_out: list[LeftOut]
) -> Iterator[str]:
    yield ""
    plain = [s for s in settings if _kind(config, s) is not dict]
    if plain:
        yield f"[checks.{check}]"
    yield from (_comment("", left.why) for left in left_out if not left.setting)
    for setting in settings:
        mine = [entry for entry in entries if entry.setting == setting]
        comments = [_comment(left.key or setting, left.why) for left in left_out if left.setting == setting]
        if _kind(config, setting) is dict:
            yield f"[checks.{check}.{setting}]"
            yield from (_noted(f"{_text(entry.key)} = {_value(entry.value)}", entry.note) for entry in mine)
        elif _kind(config, setting) is tuple and mine:
            yield f"{setting} = ["
            yield from (_noted(f"    {_text(entry.key)},", entry.note) for entry in mine)
            yield "]"
        else:
            yield from (_noted(f"{setting} = {_value(entry.value)}", entry.note) for entry in mine)
        yield from comments


def _named_tables(check: str, entries: list[Entry], left_out: list[LeftOut]) -> Iterator[str]:
    for instance in dict.fromkeys(entry.instance for entry in entries):
        yield ""
        yield f"[checks.{check}.{_text(instance)}]"
        mine = (entry for entry in entries if entry.instance == instance)
        yield from (_noted(f"{entry.setting} = {_value(entry.value)}", entry.note) for entry in mine)
    if left_out:
        yield ""
    yield from (_comment(f"{check} {left.instance}".strip(), left.why) for left in left_out)


def as_json(present: Present, kept: Iterable[Entry], changes: Iterable[Change]) -> dict[str, Any]:
    """Return the document of `healthd baseline --json` (docs/json.md), without the location of the file."""
    left_out = [
        {name: getattr(left, name) for name in ("check", "instance", "setting", "key", "why", "unseen")}
        for left in present.left_out
    ]
    return {
        "entries": list(map(_entry_json, present.entries)),
        "left_out": left_out,
        "kept": list(map(_entry_json, kept)),
        "changes": [change._asdict() for change in changes],
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("check", "instance", "setting", "key", "value", "note")}


def words_of_kept(entry: Entry) -> str:
    """Return a value that stays in the file unchanged, as text with its setting."""
    return _one_line(f"kept: {_name(_place(entry))} = {_shown(_place(entry), entry.value)}")


def words_of(left: LeftOut) -> str:
    """Return an omitted part, as text with its table."""
    place = " ".join(word for word in (left.check, left.instance, left.key or left.setting) if word)
    return _one_line(f"left out: {place}: {left.why}")


def _kind(config: type[CheckConfig], setting: str) -> type:
    return type(getattr(config(), setting))


def _noted(line: str, note: str) -> str:
    return f"{line.ljust(COLUMN)}# {_one_line(note)}" if note else line


def _comment(what: str, why: str) -> str:
    return _one_line(f"# left out: {what}: {why}" if what else f"# left out: {why}")


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _text(value) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    """Return a TOML string: like JSON's, but TOML requires more escapes."""
    whole = text.encode("utf-8", "replace").decode()
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- changes


class Change(NamedTuple):
    """`setting`: as in the file. `was`, `now`: "" for nothing. `unknown`: it could not be read."""

    setting: str
    was: str
    now: str
    unknown: bool = False


Place = tuple[str, str, str, str]  # check, instance, setting, key


def drift(tables: Mapping[str, Any], present: Present, checks: Mapping[str, Check]) -> list[Change]:
    """Return the changes from a baseline's [checks] (valid ones) to the present hardware, only in generated
    settings.
    """
    before, now = dict(_flat(tables, checks)), {_place(entry): entry.value for entry in present.entries}
    changes = []
    for place in sorted({*before, *now}):
        if place not in before:
            changes.append(Change(_name(place), "", _shown(place, now[place])))
        elif place not in now:
            why, unknown = _why_not(place, present.left_out)
            changes.append(Change(_name(place), _shown(place, before[place]), why, unknown))
        elif not _same(place, before[place], now[place]):
            changes.append(Change(_name(place), _shown(place, before[place]), _shown(place, now[place])))
    return changes


def by_hand(tables: Mapping[str, Any], checks: Mapping[str, Check]) -> list[Change]:
    """Return the settings that a person added to a baseline: writing the file again loses them."""
    return [
        Change(_name(place), _shown(place, value), "")
        for place, value in sorted(_flat(tables, checks, of_baseline=False))
    ]


def _place(entry: Entry) -> Place:
    return entry.check, entry.instance, entry.setting, entry.key


def _flat(
    tables: Mapping[str, Any], checks: Mapping[str, Check], of_baseline: bool = True
) -> Iterator[tuple[Place, Any]]:
    wants = with_baseline(checks)
    for check, table in tables.items():
        own = {field.name for field in fields_of(checks[check].config)}
        written = wants[check].settings if check in wants else ()
        for key, value in table.items():
            if checks[check].per and key not in own:
                for setting, one in value.items():
                    if (setting in written) == of_baseline and one is not False:
                        yield (check, key, setting, ""), one
            elif (not checks[check].per and key in written) == of_baseline:
                yield from _items(check, key, value)


def _items(check: str, setting: str, value: Any) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, Mapping):
        yield from (((check, "", setting, key), one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield from (((check, "", setting, str(item)), True) for item in value)
    else:
        yield (check, "", setting, ""), value


def _same(place: Place, before: Any, now: Any) -> bool:
    if place[2].endswith("_bytes"):
        return bool(abs(before - now) <= NEAR * before)
    return bool(before == now)


def _why_not(place: Place, left_out: Iterable[LeftOut]) -> tuple[str, bool]:
    """Return (why a part is missing, True if it could not be read)."""
    check, instance, setting, key = place
    for left in left_out:
        whole = not left.setting and not left.instance
        it = (left.check, left.instance) == (check, instance) and left.setting in ("", setting)
        if (left.check == check and whole) or (it and left.key in ("", key)):
            return left.why, left.unseen
    return "missing", False


class Kept(NamedTuple):
    """Values that could not be read stay in the file unchanged. `lost`: parts that the file did not have either."""

    present: Present
    entries: tuple[Entry, ...]
    lost: tuple[LeftOut, ...]


def keep(tables: Mapping[str, Any], present: Present, checks: Mapping[str, Check]) -> Kept:
    """Return the present hardware, and values of the old baseline that could not be read now.

    Without them, a baseline from a node whose driver does not answer would declare a node without GPUs as correct.
    """
    seen = {_place(entry) for entry in present.entries}
    kept: list[Entry] = []
    for place, value in _flat(tables, checks):
        if place not in seen and _why_not(place, present.left_out)[1]:
            check, instance, setting, key = place
            kept.append(Entry(check, setting, value, key, instance, "kept: could not be read"))
    without = [left for left in present.left_out if not any(_why_not(_place(entry), [left])[1] for entry in kept)]
    lost = tuple(left for left in without if left.unseen)
    return Kept(Present((*present.entries, *kept), tuple(without)), tuple(kept), lost)


def _shown(place: Place, value: Any) -> str:
    return "present" if place[3] and value is True else _value(value)


def _name(place: Place) -> str:
    check, instance, setting, key = place
    words = f'{check}."{instance}".{setting}' if instance else f"{check}.{setting}"
    return f"checks.{words} {key}".strip()
