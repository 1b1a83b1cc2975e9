"""Runs the hooks. This is the program `healthd hooks run`, which the daemon requests (trigger.py).

It reads the event stream from its own cursor in STATE_DIR/hooks.json, and runs the configured program for each event.
Each event runs a hook once if the run succeeds. A program that fails or hangs is retried a few times; then its failure
is recorded and the next event follows. Each run is recorded before it begins. A run that was interrupted, because this
program or the node was killed, therefore counts as a failed run.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from msgspec import field
from msgspec.structs import replace

from healthd.agent.hooks.payload import View, document, follow, hook_for_event
from healthd.agent.hooks.request import HooksRequest, UnreadableRequest, parse_request
from healthd.agent.hooks.result import MAX_ERROR, HookResult, render_results, result_path, state_path
from healthd.agent.settings.config import HooksConfig
from healthd.common import ownership
from healthd.common.atomic_files import replace_file
from healthd.common.text import printable
from healthd.common.values import DecodeError, Value, Whole, decode, encode
from healthd.events.cursor_text import dump_cursor, load_cursor
from healthd.events.parse import StreamEvent
from healthd.events.reader import Tally, read
from healthd.host.program import ProgramResult, run_program
from healthd.host.separate_program import OpenRequest

log = logging.getLogger("healthd")

FIRST_RETRY_SECONDS, RETRY_FACTOR = 5.0, 4.0  # delays of 5, 20 and 80 s
SETTLED = 0.0
INTERRUPTED = "the last run was interrupted: the program that runs the hooks was killed, or the node went down"


class HooksState(Value, frozen=True):
    """The record in STATE_DIR/hooks.json.

    cursor   which events have been handled (events/cursor_text.py)
    view     state of the node after these events
    hooks    the configured hooks: SETTLED, or the time since which a new hook gets events
    results  the result of each hook
    event    id of the event whose hook is being run, or ""
    runs     number of runs that have begun for this event
    """

    cursor: str = ""
    view: View = View()
    hooks: dict[str, float] = field(default_factory=dict)
    results: dict[str, HookResult] = field(default_factory=dict)
    event: str = ""
    runs: Whole = 0


class Pass(NamedTuple):
    """Settings and effects of one pass over the events.

    save         records the state durably
    is_replaced  returns True if the daemon has written another request since, so that the pass must end
    """

    settings: HooksConfig
    save: Callable[[HooksState], None]
    is_replaced: Callable[[], bool]
    sleep: Callable[[float], None]
    retry_seconds: float


class Attempt(NamedTuple):
    """One run of a program. `error` is the reason why it failed, or ""."""

    error: str
    seconds: float
    output: str = ""


# --- state


def load_state(state_dir: str) -> HooksState:
    """Return the recorded state, or a new one if there is none. A damaged record is a new one too."""
    try:
        state = decode(HooksState, ownership.read(state_path(state_dir)))
        load_cursor(state.cursor)
    except FileNotFoundError:
        return HooksState()
    except (DecodeError, ValueError, TypeError) as error:
        path = state_path(state_dir)
        log.error("%s: is damaged; only events from after the last request that was served run a hook: %s", path, error)
        return HooksState()
    return state


def save_state(state_dir: str, runtime_dir: str, state: HooksState) -> None:
    """Record the state durably, and publish the results for the daemon. Raises ownership.Untrusted or OSError."""
    with ownership.open_folder(state_dir, make_mode=0o700) as folder:  # the daemon may not have written an event yet
        replace_file(state_path(state_dir), encode(state), durable=True)
        os.fsync(folder)  # a hook may power-cycle its node
    replace_file(result_path(runtime_dir), render_results(state.results))


def remove_state(state_dir: str, runtime_dir: str) -> None:
    """Remove the record and the results, because no hook is configured. Raises ownership.Untrusted or OSError."""
    for path in (state_path(state_dir), result_path(runtime_dir)):
        with suppress(FileNotFoundError), ownership.open_parent(path) as (folder, name):
            os.unlink(name, dir_fd=folder)


def configure(state: HooksState, programs: Mapping[str, Sequence[str]], since: Mapping[str, float]) -> HooksState:
    """Return the state with these hooks. A new hook gets the events from its time in `since` on."""
    hooks = {name: state.hooks.get(name, since[name]) for name in programs}
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
    result = HookResult(before.failures + bool(error), error[:MAX_ERROR])
    return replace(state, results={**state.results, hook: result}, event="", runs=0)


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


def run_with_retries(state: HooksState, payload: Mapping[str, Any], begun: Pass) -> str | None:
    """Run an event's hook until a run succeeds, with a growing delay between runs. Return the last error, or "".

    Return None if the pass must end before that. Raises ownership.Untrusted or OSError if a run cannot be recorded.
    """
    hook, name, settings = payload["hook"], payload["id"], begun.settings
    first = state.runs if state.event == name else 0
    error = INTERRUPTED if first else ""
    for number in range(first, settings.retries + 1):
        if number > first:
            begun.sleep(begun.retry_seconds * RETRY_FACTOR ** (number - 1))
        if begun.is_replaced():
            return None
        begun.save(replace(state, event=name, runs=number + 1))
        error = run_hook(hook, settings.programs[hook], payload, settings.timeout_seconds).error
        if not error:
            log.info("hook %s for event %s has run", hook, name)
            return ""
        log.warning("hook %s for event %s failed: %s", hook, name, error)
    return error


# --- all events


def serve_request(
    open_request: OpenRequest,
    runtime_dir: str,
    sleep: Callable[[float], None] = time.sleep,
    retry_seconds: float = FIRST_RETRY_SECONDS,
) -> None:
    """Serve the daemon's request: run the hooks for all events that have not been handled yet.

    Raises UnreadableRequest if a new process may be able to read the request, because healthd was upgraded since this
    process started.
    """
    request = parse_request(open_request.text)
    if request is None:
        if open_request.number > 1:
            raise UnreadableRequest("another version of healthd wrote the request; a new process must serve it")
        log.error("the request for hooks is damaged, or another version of healthd wrote it; it is ignored")
        return
    if not request.hooks.programs:
        remove_state(request.state_dir, runtime_dir)
        return
    save = partial(save_state, request.state_dir, runtime_dir)
    run_events(request, Pass(request.hooks, save, open_request.is_replaced, sleep, retry_seconds))


def run_events(request: HooksRequest, begun: Pass) -> None:
    """Run the hooks for all unhandled events. Raises ownership.Untrusted or OSError if the state cannot be recorded."""
    state = configure(load_state(request.state_dir), request.hooks.programs, request.since)
    cursor, tally = load_cursor(state.cursor), Tally()
    begun.save(state)
    for event in read(request.state_dir, cursor, tally):
        payload, view = _payload(state, event)
        if payload is not None:
            error = run_with_retries(state, payload, begun)
            if error is None:
                return
            state = record(state, payload["hook"], error)
        state = replace(state, view=view)
        if payload is not None:  # the cursor contains this event and all events before it
            state = replace(state, cursor=dump_cursor(cursor))
            begun.save(state)
    for problem in tally.problems:
        log.warning("%s", problem)
    begun.save(settle(replace(state, cursor=dump_cursor(cursor))))


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
