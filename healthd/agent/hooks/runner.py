"""Runs the hooks. This is the program `healthd hooks run`, which the daemon requests (trigger.py).

It reads the event stream from its own cursor in STATE_DIR/hooks.json, and runs the configured program for each event.
Each event runs a hook once if the run succeeds. If this program is killed, the event that it worked on runs again. A
program that fails or hangs is retried a few times; then its failure is recorded and the next event follows.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import field
from msgspec.structs import replace

from healthd.agent.hooks.payload import View, document, follow, hook_for_event
from healthd.agent.hooks.request import HooksRequest, parse_request
from healthd.agent.hooks.result import MAX_ERROR, HookResult, render_results, result_path
from healthd.agent.settings.config import HooksConfig
from healthd.common import ownership
from healthd.common.atomic_files import replace_file
from healthd.common.text import printable
from healthd.common.values import DecodeError, Value, decode, encode
from healthd.events.cursor_text import dump_cursor, load_cursor
from healthd.events.parse import StreamEvent
from healthd.events.reader import Tally, read
from healthd.host.program import ProgramResult, run_program

log = logging.getLogger("healthd")

FILE = "hooks.json"
FIRST_RETRY_SECONDS, RETRY_FACTOR = 5.0, 4.0  # delays of 5, 20 and 80 s
SETTLED = 0.0


class HooksState(Value, frozen=True):
    """The record in STATE_DIR/hooks.json.

    cursor   which events have been handled (events/cursor_text.py)
    view     state of the node after these events
    hooks    the configured hooks: SETTLED, or the time since which a new hook gets events
    results  the result of each hook
    """

    cursor: str = ""
    view: View = View()
    hooks: dict[str, float] = field(default_factory=dict)
    results: dict[str, HookResult] = field(default_factory=dict)


class Attempt(NamedTuple):
    """One run of a program. `error` is the reason why it failed, or ""."""

    error: str
    seconds: float
    output: str = ""


# --- state


def load_state(state_dir: str) -> HooksState:
    """Return the recorded state, or a new one if there is none. A damaged record is a new one too."""
    try:
        state = decode(HooksState, ownership.read(os.path.join(state_dir, FILE)))
        load_cursor(state.cursor)
    except FileNotFoundError:
        return HooksState()
    except (DecodeError, ValueError, TypeError) as error:
        log.error("%s: is damaged, and events that were not handled yet get no hook: %s", FILE, error)
        return HooksState()
    return state


def save_state(state_dir: str, runtime_dir: str, state: HooksState) -> None:
    """Record the state durably, and publish the results for the daemon. Raises ownership.Untrusted or OSError."""
    with ownership.open_folder(state_dir, make_mode=0o700):  # the daemon may not have written an event yet
        replace_file(os.path.join(state_dir, FILE), encode(state), durable=True)
    path = result_path(runtime_dir)
    if state.hooks:
        replace_file(path, render_results(state.results))
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def configure(state: HooksState, programs: Mapping[str, Sequence[str]], since: float) -> HooksState:
    """Return the state with these hooks. A new hook gets the events from `since` on."""
    hooks = {name: state.hooks.get(name, since) for name in programs}
    return replace(state, hooks=hooks, results={name: state.results.get(name, HookResult()) for name in programs})


def settle(state: HooksState) -> HooksState:
    """Return the state after all events were handled. The clock does not matter any more to these hooks."""
    return replace(state, hooks=dict.fromkeys(state.hooks, SETTLED))


def is_wanted(state: HooksState, hook: str, at: float | None) -> bool:
    """Return True if an event at this time runs the hook."""
    since = state.hooks.get(hook)
    return since is not None and (since == SETTLED or (at is not None and at >= since))


def record(state: HooksState, hook: str, error: str) -> HooksState:
    """Return the state with the result of an event. `error` is "" if a run succeeded."""
    before = state.results.get(hook, HookResult())
    return replace(state, results={**state.results, hook: HookResult(before.failures + bool(error), error[:MAX_ERROR])})


# --- one program


def run_hook(hook: str, argv: Sequence[str], payload: Mapping[str, Any], seconds: float) -> Attempt:
    """Run a hook's program once, with the payload on standard input."""
    began = time.monotonic()
    descriptor = os.memfd_create("healthd-hook", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, encode(payload) + b"\n")
        os.lseek(descriptor, 0, os.SEEK_SET)
        ownership.stat_program(argv[0])
        environment = {**os.environ, "HEALTHD_HOOK": hook, "HEALTHD_NODE": str(payload.get("node", ""))}
        result = run_program(argv, seconds, environment, stdin=descriptor)
    except ownership.Untrusted as error:
        return Attempt(str(error.with_context(argv[0], f"hooks.{hook}")), time.monotonic() - began)
    except TimeoutError as error:
        return Attempt(str(error), time.monotonic() - began)
    except OSError as error:
        why = str(error.strerror)
        if isinstance(error, FileNotFoundError) and os.path.exists(argv[0]):
            why = "the interpreter in its first line does not exist"
        return Attempt(f"{argv[0]}: {why}", time.monotonic() - began)
    finally:
        os.close(descriptor)
    return Attempt(describe_failure(argv, result), time.monotonic() - began, result.stdout + result.stderr)


def describe_failure(argv: Sequence[str], result: ProgramResult) -> str:
    """Return the status and the last line of output of a failed run, or "" if the run succeeded."""
    if result.status == 0:
        return ""
    ending = f"exit status {result.status}" if result.status > 0 else f"killed by signal {-result.status}"
    lines = [line.strip() for line in f"{result.stdout}\n{result.stderr}".split("\n") if line.strip()]
    last = f": {printable(lines[-1])}" if lines else ""
    return f"{argv[0]}: {ending}{last}"


def run_with_retries(
    hook: str,
    settings: HooksConfig,
    payload: Mapping[str, Any],
    sleep: Callable[[float], None],
    first_seconds: float = FIRST_RETRY_SECONDS,
) -> str:
    """Run a hook until a run succeeds, with a growing delay between runs. Return the last error, or ""."""
    error, delay = "", first_seconds
    for number in range(settings.retries + 1):
        if number:
            sleep(delay)
            delay *= RETRY_FACTOR
        error = run_hook(hook, settings.programs[hook], payload, settings.timeout_seconds).error
        if not error:
            log.info("hook %s for event %s has run", hook, payload.get("id"))
            return ""
        log.warning("hook %s for event %s failed: %s", hook, payload.get("id"), error)
    return error


# --- all events


def serve_request(
    text: str, runtime_dir: str, sleep: Callable[[float], None] = time.sleep, retry_seconds: float = FIRST_RETRY_SECONDS
) -> None:
    """Serve the daemon's request: run the hooks for all events that have not been handled yet."""
    request = parse_request(text)
    if request is None:
        log.error("the request for hooks is damaged, or another version of healthd wrote it; it is ignored")
        return
    run_events(request, runtime_dir, sleep, retry_seconds)


def run_events(request: HooksRequest, runtime_dir: str, sleep: Callable[[float], None], retry_seconds: float) -> None:
    """Run the hooks for all unhandled events. Raises ownership.Untrusted or OSError if the state cannot be recorded."""
    state = configure(load_state(request.state_dir), request.hooks.programs, request.since)
    cursor, tally = load_cursor(state.cursor), Tally()
    # The first save fails before a program runs, if the disk is full.
    save_state(request.state_dir, runtime_dir, state)
    for event in read(request.state_dir, cursor, tally):
        payload, view = _payload(state, event)
        if payload is not None:
            error = run_with_retries(payload["hook"], request.hooks, payload, sleep, retry_seconds)
            state = record(state, payload["hook"], error)
        state = replace(state, view=view)
        if payload is not None:  # the cursor contains this event and all events before it
            state = replace(state, cursor=dump_cursor(cursor))
            save_state(request.state_dir, runtime_dir, state)
    for problem in tally.problems:
        log.warning("%s", problem)
    save_state(request.state_dir, runtime_dir, settle(replace(state, cursor=dump_cursor(cursor))))


def _payload(state: HooksState, event: StreamEvent) -> tuple[dict[str, Any] | None, View]:
    """Return the document for an event that runs a hook, otherwise None, and the view after the event."""
    view = follow(state.view, event.fields)
    hook = hook_for_event(event.fields)
    if not hook or not is_wanted(state, hook, event.at):
        return None, view
    return document(hook, event.fields, state.view, view), view


def mark_working(hook: str, state_dir: str, runtime_dir: str) -> None:
    """Record that a hook works again, after a successful test. The caller holds the program's lock."""
    state = load_state(state_dir)
    if state.results.get(hook, HookResult()).error:
        save_state(state_dir, runtime_dir, record(state, hook, ""))
