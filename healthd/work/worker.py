"""The worker: the process that may hang, crash or be abandoned. It does one request at a time for the daemon.

    python -m healthd.worker FD SETUP        FD: a stream socket to the daemon; SETUP: JSON, see Setup

Requests and replies are JSON lines: {"op": ..., "number": 1, ...} -> {"error": "", "number": 1, ...}. The end of the
stream is the order to end: an abandoned worker reads it when the call that it hangs in returns, so nobody ever kills it
inside the driver.
What a library or plug-in prints on standard output goes nowhere.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from healthd import past
from healthd.config import CheckConfig
from healthd.convert import dump, load
from healthd.host import Host
from healthd.model import Entry, Finding, Observation, Repair, RunName
from healthd.past import Past
from healthd.settings import registry

SHARED_SECONDS = 0.25  # answers are shared within a round, but not with the look after a removal


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told at its start. fake_nvml: a profile or scenario file, "" for the real NVML.

    record   a directory for notes of all questions and answers ("" = none)
    replay   a recording that answers instead of the machine ("" = none); root and fake_nvml are the recording's
    """

    root: str = "/"
    fake_nvml: str = ""
    checks_dir: str = ""
    record: str = ""
    replay: str = ""


def main() -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends us
    stream = socket.socket(fileno=int(sys.argv[1]))
    setup = load(Setup, json.loads(sys.argv[2]))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    host, begin = _host(setup)
    worker = Worker(setup, host, begin)
    for line in _lines(stream):
        try:
            stream.sendall(worker.answer_line(line))
        except ConnectionError:
            break  # abandoned while it hung: nobody waits for this answer
    host.close_nvml()


def _lines(stream: socket.socket) -> Iterator[bytes]:
    buffer = b""
    while True:
        try:
            chunk = stream.recv(1 << 16)
        except ConnectionError:
            return
        if not chunk:
            return
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        yield from lines


def _host(setup: Setup) -> tuple[Host, Callable[[str, str], None]]:
    """The Host to look at, and a function to be told of each run that begins."""
    if not setup.record and not setup.replay:
        open_nvml = _open_fake(setup.fake_nvml) if setup.fake_nvml else None
        return Host(setup.root, open_nvml, shared_seconds=SHARED_SECONDS), lambda check, instance: None
    from healthd.record import recording
    from healthd.record.host import recording_host, replaying_host

    if setup.replay:
        recorded = recording.read(setup.replay)
        player = recording.Player(recorded)
        return replaying_host(recorded, player), player.begin
    recorder = recording.Recorder(setup.record)
    return recording_host(setup.root, setup.fake_nvml, recorder), recorder.begin


def _open_fake(profile_or_file: str) -> Callable[[], Any]:
    def opened() -> Any:
        from healthd.nvidia.fake_nvml import open_fake

        return open_fake(profile_or_file)

    return opened


class Worker:
    """The operations. Each returns a plain table; an exception becomes "error" in one sentence."""

    def __init__(
        self, setup: Setup, host: Host, begin: Callable[[str, str], None] = lambda check, instance: None
    ) -> None:
        self.setup = setup
        self.host = host
        self.begin = begin
        self.checks: dict[str, registry.Check] = {}
        self._configs: dict[RunName, tuple[dict[str, Any], CheckConfig]] = {}
        self._stores: dict[str, dict[str, past.Series]] = {}  # text that the daemon keeps -> the store in it

    def answer_line(self, line: bytes) -> bytes:
        """The reply to one request. "outdated": the NVML that this process loaded does not fit the driver, for good."""
        request = json.loads(line)
        reply = self.answer(request)
        about = {"number": request["number"], "outdated": self.host.nvml_is_outdated}
        try:
            text = json.dumps({**reply, **about}, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            text = json.dumps({"error": f"what it gave cannot be sent: {one_sentence(error)}", **about})
        return text.encode() + b"\n"

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operation: Callable[[dict[str, Any]], dict[str, Any]] = getattr(self, f"do_{request['op']}")
        try:
            return {"error": "", **operation(request)}
        except Exception as error:
            return {"error": one_sentence(error)}

    def do_run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One run of one check: findings, observations, repairs. A site's check is imported when first asked for."""
        check = self._check(request["check"])
        self.begin(check.name, request["instance"])
        config = self._config(check, request["config"])
        store, boot_id = self._store(request["past"]), request["boot_id"]
        now = request["now"] if "now" in request else self.host.now()  # a caller that keeps no past names no moment
        found: dict[str, list[Any]] = {"findings": [], "observations": [], "repairs": []}
        error = ""
        try:
            for item in check.run(self.host, config, Past(store, now, boot_id)):
                found[_kind(item, check.name)].append(item)
        except Exception as problem:  # checks catch nothing: what stops one is caught here, once for all
            error = one_sentence(problem)
        store = past.update(store, found["observations"], now, boot_id)
        text = past.encode(store)
        self._stores[text] = store
        return {
            "error": error,
            "findings": dump(found["findings"]),
            "observations": f"[{','.join(map(_text, found['observations']))}]",
            "repairs": dump(found["repairs"]),
            "past": text,
        }

    def _config(self, check: registry.Check, table: dict[str, Any]) -> CheckConfig:
        """The check's settings, made anew only when the daemon sends others."""
        name = RunName(check.name, table.get("name", ""))
        before = self._configs.get(name)
        if before is None or before[0] != table:
            before = self._configs[name] = (table, load(check.config, table))
        return before[1]

    def _store(self, text: str) -> dict[str, past.Series]:
        """The counters' past from the daemon's text, which this worker made in the last run, or another worker did."""
        return self._stores.pop(text, None) or past.decode(text)

    def _check(self, name: str) -> registry.Check:
        """A check by name. A built-in one never depends on the site's directory, or on what somebody just put there."""
        if name not in self.checks:
            built_in = registry.built_in()
            self.checks = built_in if name in built_in else registry.find(self.setup.checks_dir, bounded=False)
        return self.checks[name]

    def do_close_nvml(self, _request: dict[str, Any]) -> dict[str, Any]:
        self.host.close_nvml()
        return {}

    def do_inventory(self, request: dict[str, Any]) -> dict[str, Any]:
        from healthd.machine.inventory import take

        return {"inventory": dump(take(self.host, gpus=request["gpus"]))}

    def do_baseline(self, request: dict[str, Any]) -> dict[str, Any]:
        """What this node has now of the settings that a check wants in the baseline."""
        from healthd.work.present import look

        check = self._check(request["check"])
        found = look(self.host, check, self._config(check, request["config"]))
        return {
            "entries": [dump(item) for item in found if isinstance(item, Entry)],
            "left_out": [dump(item) for item in found if not isinstance(item, Entry)],
        }

    def do_save_copy(self, request: dict[str, Any]) -> dict[str, Any]:
        """Copy files of the runtime directory to the state directory, durably. `keep`: the old copy could not be read
        at the start, and goes aside for a person instead of being replaced."""
        from healthd.judge.ledger_file import read_text, set_aside
        from healthd.machine.files import remove_leftovers, replace_file

        os.makedirs(request["to"], mode=0o700, exist_ok=True)
        remove_leftovers(request["to"])
        for name in request["names"]:
            text = read_text(os.path.join(request["from"], name))
            if request["keep"] and os.path.exists(os.path.join(request["to"], name)):
                set_aside(os.path.join(request["to"], name))
            if text is not None:
                replace_file(os.path.join(request["to"], name), text, durable=True)
        return {}

    def do_write_file(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write a file for others to read, on any disk."""
        from healthd.machine.files import replace_file

        replace_file(request["path"], request["text"], mode=0o644)
        return {}

    def do_load_copy(self, request: dict[str, Any]) -> dict[str, Any]:
        """The texts of files in the state directory."""
        from healthd.judge.ledger_file import read_text

        return {"texts": {name: read_text(os.path.join(request["from"], name)) for name in request["names"]}}

    def do_read_journal(self, request: dict[str, Any]) -> dict[str, Any]:
        """Kernel lines of this boot that the ring buffer no longer has."""
        from healthd.kernel.journal import read_journal

        lines = read_journal(**request["gap"])
        return {"lines": [list(line) for line in lines]}


@functools.lru_cache(maxsize=4096)
def _text(observation: Observation) -> str:
    """The observation as JSON. On a healthy node most are as in the last round."""
    return json.dumps(dump(observation), separators=(",", ":"), allow_nan=False)


def _kind(item: object, check: str) -> str:
    if isinstance(item, Finding):
        if item.code.partition("/")[0] != check:
            raise ValueError(
                f'the check "{check}" gave a finding with the code "{item.code}": it must be "{check}/..."'
            )
        return "findings"
    if isinstance(item, Observation):
        return "observations"
    if isinstance(item, Repair):
        return "repairs"
    raise TypeError(f'the check "{check}" gave {item!r:.100}: neither Finding nor Observation nor Repair')


def one_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())[:500]
    if type(error).__module__.startswith("healthd") and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
