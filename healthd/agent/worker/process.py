"""The worker process, which may hang, crash or be abandoned. It handles one request at a time.

    python -m healthd.agent.worker FD SETUP    FD: a stream socket to the daemon; SETUP: JSON, see Setup

Messages and responses are JSON lines (requests.py). The worker exits at the end of the stream. An abandoned worker
detects the end before its next NVML call, or when it reads the next request, so that it is never killed in the driver.
Output of libraries and plug-ins to standard output is discarded.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from healthd.agent.settings import registry
from healthd.agent.settings.config import CheckConfig, Settings
from healthd.agent.worker import requests
from healthd.agent.worker.requests import (
    NO_ANSWER,
    SEPARATOR,
    Answer,
    BaselineAnswer,
    CopyAnswer,
    Identities,
    JournalLines,
    Message,
    Operation,
    Response,
    Run,
    RunAnswer,
    operation_name,
)
from healthd.common import history
from healthd.common.codec import dump, load
from healthd.common.history import History
from healthd.common.model import Entry, Finding, Inventory, LeftOut, NothingToCheck, Observation, Repair, RunName
from healthd.common.paths import RUNTIME_DIR, STATE_DIR
from healthd.common.text import strip_error_class
from healthd.common.values import Value, decode, encode
from healthd.host.host import Host, fake_nvml_opener
from healthd.host.oom import raise_score

CHUNK_BYTES = 1 << 16
MAX_OBSERVATIONS = 4096  # maximum number per run; each is a series, and a DGX H100 has about 600 for its NVLinks
NO_CHECKS: Mapping[str, registry.Check] = MappingProxyType({})
CACHE_SECONDS = 0.25  # answers are shared within a round, but not with a run after a device removal


class Setup(Value, frozen=True):
    """Parameters for a worker.

    fake_nvml    a profile or scenario file, or "" for the real NVML
    record       a directory for notes of all questions and answers, or ""
    replay       a recording that answers instead of the machine, or ""; root and fake_nvml are then the recording's
    state_dir    the daemon's state directory, for checks that read files which other parts of healthd wrote
    runtime_dir  the daemon's runtime directory, for the same purpose
    """

    root: str = "/"
    fake_nvml: str = ""
    checks_dir: str = ""
    record: str = ""
    replay: str = ""
    state_dir: str = STATE_DIR
    runtime_dir: str = RUNTIME_DIR


def worker_setup(settings: Settings, record: str = "") -> Setup:
    """Return the parameters for the worker of a daemon with these settings."""
    return Setup(
        settings.root,
        settings.nvml.fake,
        settings.checks_dir,
        record,
        state_dir=settings.state_dir,
        runtime_dir=settings.runtime_dir,
    )


def main() -> None:
    stream = socket.socket(fileno=int(sys.argv[1]))
    serve(decode(Setup, sys.argv[2]), stream)


def serve(setup: Setup, stream: socket.socket, checks: Mapping[str, registry.Check] = NO_CHECKS) -> None:
    """Answer requests until the stream ends. `checks` contains the checks that are already imported."""
    raise_score()
    faulthandler.enable(2)  # by number, because sys.stderr may be the parent's object in a fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in a terminal, the daemon handles Ctrl-C and then stops this process
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    host, begin = _open_host(setup)
    host.before_nvml_call = partial(_end_if_abandoned, stream)
    worker = Worker(setup, host, begin, checks)
    for line in _lines(stream):
        try:
            stream.sendall(worker.respond(line))
        except ConnectionError:
            break  # the worker was abandoned while it hung, so the answer is not needed
    host.close_nvml()


def _end_if_abandoned(stream: socket.socket) -> None:
    """Exit if the daemon has closed its end of the stream.

    nvmlShutdown is skipped, because it may hang too. The kernel closes the driver's files anyway.
    """
    poller = select.poll()
    poller.register(stream, select.POLLRDHUP)
    if poller.poll(0):
        os._exit(0)


def _lines(stream: socket.socket) -> Iterator[bytes]:
    buffer = b""
    chunk = bytearray(CHUNK_BYTES)  # shared, because a new buffer for each request would fragment the heap
    while True:
        try:
            size = stream.recv_into(chunk)
        except ConnectionError:
            return
        if not size:
            return
        buffer += memoryview(chunk)[:size]
        *lines, buffer = buffer.split(b"\n")
        yield from lines


def _open_host(setup: Setup) -> tuple[Host, Callable[[str, str], None]]:
    """Return the Host for the checks, and a function to call at the beginning of each run."""
    host, begin = _create_host(setup)
    host.state_dir, host.runtime_dir = setup.state_dir, setup.runtime_dir
    return host, begin


def _create_host(setup: Setup) -> tuple[Host, Callable[[str, str], None]]:
    if not setup.record and not setup.replay:
        open_nvml = fake_nvml_opener(setup.fake_nvml) if setup.fake_nvml else None
        return Host(setup.root, open_nvml, shared_seconds=CACHE_SECONDS), lambda check, instance: None
    from healthd.agent.recording import recording
    from healthd.agent.recording.host import recording_host, replaying_host

    if setup.replay:
        recorded = recording.read(setup.replay)
        player = recording.Player(recorded)
        return replaying_host(recorded, player), player.begin
    recorder = recording.Recorder(setup.record)
    return recording_host(setup.root, setup.fake_nvml, recorder), recorder.begin


class Worker:
    """The worker's operations. Each takes a request (agent/worker/requests.py) and returns its answer.

    An exception becomes a one-sentence error.
    """

    def __init__(
        self,
        setup: Setup,
        host: Host,
        begin: Callable[[str, str], None] = lambda check, instance: None,
        checks: Mapping[str, registry.Check] = NO_CHECKS,
    ) -> None:
        self.setup = setup
        self.host = host
        self.begin = begin
        self.checks = checks
        self._configs: dict[RunName, tuple[dict[str, Any], CheckConfig]] = {}

    def respond(self, line: bytes) -> bytes:
        """Return the response to one message."""
        message = decode(Message, line)
        error, answer = self.answer(message.operation, message.now)
        try:
            raw = encode(answer)
        except (TypeError, ValueError) as problem:
            error, raw = f"the answer cannot be sent: {error_sentence(problem)}", NO_ANSWER
        return encode(Response(message.number, error, self.host.nvml_is_outdated)) + SEPARATOR + raw + b"\n"

    def answer(self, operation: Operation, now: float | None = None) -> tuple[str, Answer | None]:
        """Execute a request. Return the error as one sentence (or "") and the answer."""
        try:
            if isinstance(operation, Run):
                return self.do_run(operation, now)
            method: Callable[[Any], Answer | None] = getattr(self, f"do_{operation_name(type(operation))}")
            return "", method(operation)
        except Exception as error:
            return error_sentence(error), None

    def do_run(self, operation: Run, now: float | None = None) -> tuple[str, RunAnswer]:
        """Run a check once. A site check is imported at its first request.

        `now` is the time for the readings (epoch seconds), or None for this machine's clock.
        """
        check = self._check(operation.check)
        self.begin(check.name, operation.instance)
        config = self._config(check, operation.config)
        moment = self.host.now() if now is None else now
        store = history.decode(operation.past)
        found: dict[type, list[Any]] = {kind: [] for kind in (Finding, Observation, Repair, NothingToCheck)}
        error, gone_before = "", self.host.gpus_lost_since_open
        try:
            for item in check.run(self.host, config, History(store, moment, operation.boot_id)):
                found[_item_type(item, check.name)].append(item)
        except Exception as problem:  # checks do not catch exceptions, so all of them are caught here
            error = error_sentence(problem)
        observations = found[Observation]
        left_out = max(len(observations) - MAX_OBSERVATIONS, 0)
        del observations[MAX_OBSERVATIONS:]
        return error, RunAnswer(
            self.host.gpus_lost_since_open > gone_before,
            tuple(found[Finding]),
            tuple(observations),
            left_out,
            tuple(found[Repair]),
            tuple(found[NothingToCheck]),
            history.encode(history.update(store, observations, moment, operation.boot_id)),
        )

    def _config(self, check: registry.Check, table: dict[str, Any]) -> CheckConfig:
        """Return the check's settings, which are decoded again only if the daemon sends different settings."""
        name = RunName(check.name, table.get("name", ""))
        cached = self._configs.get(name)
        if cached is None or cached[0] != table:
            cached = self._configs[name] = (table, load(check.config, table))
        return cached[1]

    def _check(self, name: str) -> registry.Check:
        """Return a check by name. A built-in check does not depend on the site's directory."""
        if name not in self.checks:
            built_in = registry.built_in_checks()
            self.checks = built_in if name in built_in else registry.find_checks(self.setup.checks_dir, bounded=False)
        return self.checks[name]

    def do_close_nvml(self, _operation: requests.CloseNvml) -> None:
        self.host.close_nvml()

    def do_inventory(self, operation: requests.TakeInventory) -> Inventory:
        from healthd.host.inventory import collect

        return collect(self.host, gpus=operation.gpus)

    def do_baseline(self, operation: requests.TakeBaseline) -> BaselineAnswer:
        check = self._check(operation.check)
        found = baseline_items(self.host, check, self._config(check, operation.config))
        return BaselineAnswer(
            tuple(item for item in found if isinstance(item, Entry)),
            tuple(item for item in found if isinstance(item, LeftOut)),
        )

    def do_save_copy(self, operation: requests.SaveCopy) -> None:
        """Copy files from the runtime directory to the state directory, durably.

        With `keep_old`, the old copy is moved aside instead of being replaced, because it could not be read at the
        start.
        """
        from healthd.agent.conditions.state_files import read_text, set_aside
        from healthd.common import ownership
        from healthd.common.atomic_files import remove_leftovers, replace_file

        try:
            with ownership.open_folder(operation.target, make_mode=0o700):
                remove_leftovers(operation.target)
        except ownership.Untrusted as error:
            raise error.with_context(operation.target, "state_dir") from None
        for name in operation.names:
            text = read_text(os.path.join(operation.source, name))
            if operation.keep_old and os.path.exists(os.path.join(operation.target, name)):
                set_aside(os.path.join(operation.target, name))
            if text is not None:
                replace_file(os.path.join(operation.target, name), text, durable=True)

    def do_append_events(self, operation: requests.AppendEvents) -> int:
        """Append lines to the stream durably, then send them to the journal. Return the number of lines that the
        journal lost.
        """
        from healthd.common.ownership import Untrusted
        from healthd.events import writer
        from healthd.host.journald import stderr_is_the_journal

        try:
            writer.append(operation.folder, operation.lines, operation.may_repeat)
        except Untrusted as error:
            raise error.with_context(operation.folder, "state_dir") from None
        return writer.send_to_journal(operation.lines) if stderr_is_the_journal() else 0

    def do_read_cluster_name(self, _operation: requests.ReadClusterName) -> str:
        from healthd.common.slurm.slurm_conf import cluster_name

        return cluster_name(self.setup.root)

    def do_write_file(self, operation: requests.WriteFile) -> None:
        """Write a file that every user may read, on any disk."""
        from healthd.common.atomic_files import replace_file

        replace_file(operation.path, operation.text, mode=0o644)

    def do_load_copy(self, operation: requests.LoadCopy) -> CopyAnswer:
        from healthd.agent.conditions.state_files import read_text
        from healthd.common.atomic_files import newest_mtime

        texts = {name: read_text(os.path.join(operation.source, name)) for name in operation.names}
        return CopyAnswer(texts, newest_mtime(operation.source, operation.names))

    def do_check_installed_files(self, operation: requests.CheckInstalledFiles) -> Identities:
        from healthd.agent.worker.installed_files import identities

        return identities(operation.paths)

    def do_read_journal(self, operation: requests.ReadJournal) -> JournalLines:
        """Return kernel lines from this boot that the ring buffer no longer has."""
        from healthd.agent.kernel_log.journal import read_journal

        lines = read_journal(
            operation.boot_id, operation.since_usec, operation.until_usec, operation.limit, operation.accept_injected
        )
        return tuple(lines)


def baseline_items(host: Host, check: registry.Check, config: CheckConfig) -> list[Entry | LeftOut]:
    """Return this node's current hardware as settings of one check. A check that raises an exception is left out
    completely.

    A part that may be broken (a port that is down, a GPU that does not answer) is left out with a reason. Parts that
    come and go (mounts of containers and users, virtual functions, unused ports) are left out without a reason.
    """
    from healthd.nvidia.nvml import NvmlError

    found: list[Entry | LeftOut] = []
    try:
        for item in check.baseline(host, config):
            found.append(_validated(check, item))
    except NvmlError as error:
        if not host.nvml_is_open:
            raise
        found.append(LeftOut(check.name, str(error)))
    return found


def _validated(check: registry.Check, item: object) -> Entry | LeftOut:
    """Return the item in the form in which it will be sent.

    Raises TypeError if the check may not yield the item, or if the item cannot be written as JSON. Raises ConvertError
    if a field has a wrong type.
    """
    settings = check.baseline_settings.settings if check.baseline_settings else ()
    if isinstance(item, Entry) and (item.check, item.setting in settings) == (check.name, True):
        return load(Entry, json.loads(json.dumps(dump(item))))
    if isinstance(item, LeftOut) and (item.check, item.setting in ("", *settings)) == (check.name, True):
        return load(LeftOut, dump(item))
    raise TypeError(f'the check "{check.name}" yielded {item!r:.100}: must be an Entry or a LeftOut of its BASELINE')


def _item_type(item: object, check: str) -> type:
    """Return the type of an item that a check yielded. Raises ValueError or TypeError if a check may not yield it."""
    if isinstance(item, Finding) and item.code.partition("/")[0] != check:
        raise ValueError(f'the check "{check}" yielded a finding with the code "{item.code}": it must be "{check}/..."')
    if isinstance(item, Observation):
        if not math.isfinite(item.value):
            raise ValueError(
                f'the check "{check}" yielded the observation "{item.name}" with the value {item.value}: must be finite'
            )
        return Observation
    for kind in (Finding, Repair, NothingToCheck):
        if isinstance(item, kind):
            json.dumps(dump(item))  # rejects bytes, which msgspec would send as text
            return kind
    raise TypeError(
        f'the check "{check}" yielded {item!r:.100}: must be a Finding, an Observation, a Repair or NothingToCheck'
    )


def error_sentence(error: BaseException) -> str:
    """Return an exception as one sentence."""
    text = " ".join(str(error).split())[:500].encode("utf-8", "backslashreplace").decode()
    if type(error).__module__.startswith("healthd") and text:
        return text
    return strip_error_class(f"{type(error).__name__}: {text}") if text else type(error).__name__
