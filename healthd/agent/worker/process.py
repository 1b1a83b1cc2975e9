"""The worker: the process that may hang, crash or be abandoned. It does one request at a time for the daemon.

    python -m healthd.agent.worker FD SETUP    FD: a stream socket to the daemon; SETUP: JSON, see Setup

Requests and replies are JSON lines: {"op": ..., "number": 1, ...} -> {"error": "", "number": 1, ...}. The end of the
stream is the order to end: an abandoned worker notices it before its next call of NVML, or when it reads the next
request, so nobody ever kills it inside the driver.
What a library or plug-in prints on standard output goes nowhere.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

from healthd.agent.settings import registry
from healthd.agent.settings.config import CheckConfig, Settings
from healthd.agent.worker import requests
from healthd.common import history
from healthd.common.codec import dump, load
from healthd.common.history import Past
from healthd.common.model import Entry, Finding, NothingToCheck, Observation, Repair, RunName
from healthd.common.paths import RUNTIME_DIR, STATE_DIR
from healthd.common.text import without_class
from healthd.common.values import dataclass
from healthd.host.host import Host
from healthd.host.oom import raise_score

CHUNK_BYTES = 1 << 16
MOST_OBSERVATIONS = 4096  # of one run: a DGX H100 gives some 600 of its NVLinks; each is a series, and kept in the past
NO_CHECKS: Mapping[str, registry.Check] = MappingProxyType({})
_encoded = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_line = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes one for each line
SHARED_SECONDS = 0.25  # answers are shared within a round, but not with the look after a removal


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told at its start. fake_nvml: a profile or scenario file, "" for the real NVML. state_dir,
    runtime_dir: the daemon's, for checks that read what other parts of healthd left there.

    record   a directory for notes of all questions and answers ("" = none)
    replay   a recording that answers instead of the machine ("" = none); root and fake_nvml are the recording's
    """

    root: str = "/"
    fake_nvml: str = ""
    checks_dir: str = ""
    record: str = ""
    replay: str = ""
    state_dir: str = STATE_DIR
    runtime_dir: str = RUNTIME_DIR


def setup_of(settings: Settings, record: str = "") -> Setup:
    """What the worker of a daemon with these settings is told."""
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
    serve(load(Setup, json.loads(sys.argv[2])), stream)


def serve(setup: Setup, stream: socket.socket, checks: Mapping[str, registry.Check] = NO_CHECKS) -> None:
    """Answer requests until the stream ends. `checks`: those that are known already."""
    raise_score()
    faulthandler.enable(2)  # by its number: in a copy sys.stderr may be what the parent put there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends us
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    host, begin = _host(setup)
    host.before_nvml_call = partial(_end_if_abandoned, stream)
    worker = Worker(setup, host, begin, checks)
    for line in _lines(stream):
        try:
            stream.sendall(worker.answer_line(line))
        except ConnectionError:
            break  # abandoned while it hung: nobody waits for this answer
    host.close_nvml()


def _end_if_abandoned(stream: socket.socket) -> None:
    """End this process if the daemon has closed its end of the stream. nvmlShutdown is left out: it may hang too, and
    the kernel closes the driver's files."""
    hung_up = select.poll()
    hung_up.register(stream, select.POLLRDHUP)
    if hung_up.poll(0):
        os._exit(0)


def _lines(stream: socket.socket) -> Iterator[bytes]:
    buffer = b""
    chunk = bytearray(CHUNK_BYTES)  # one for all: a new one for each request leaves holes in the heap for ever
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


def _host(setup: Setup) -> tuple[Host, Callable[[str, str], None]]:
    """The Host to look at, and a function to be told of each run that begins."""
    host, begin = _host_of(setup)
    host.state_dir, host.runtime_dir = setup.state_dir, setup.runtime_dir
    return host, begin


def _host_of(setup: Setup) -> tuple[Host, Callable[[str, str], None]]:
    if not setup.record and not setup.replay:
        open_nvml = _open_fake(setup.fake_nvml) if setup.fake_nvml else None
        return Host(setup.root, open_nvml, shared_seconds=SHARED_SECONDS), lambda check, instance: None
    from healthd.agent.recording import recording
    from healthd.agent.recording.host import recording_host, replaying_host

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


class _Kept(NamedTuple):
    """The last run of each: what did not change since is neither made nor sent again (unchanged.py). `number`: of its
    request; `config`: its table of settings; `texts`: each observation as JSON; `said`: what else it gave.

    `store` is of the run at `made`, the same was read again until `now`: so it is, but for that moment, `until`.
    """

    number: int
    config: dict[str, Any]
    now: float
    boot_id: str
    observations: list[Observation]
    texts: list[str]
    store: dict[str, history.Series]
    made: float
    until: float
    said: dict[str, Any]


class Worker:
    """The operations, each given what was asked (agent/worker/requests.py; a run as its table, since it may be
    shortened). Each returns a plain table; an exception becomes "error" in one sentence."""

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
        self._kept: dict[RunName, _Kept] = {}

    def answer_line(self, line: bytes) -> bytes:
        """The reply to one request. "outdated": the NVML that this process loaded does not fit the driver, for good."""
        request = json.loads(line)
        reply = self.answer(request)
        about = {"number": request["number"], "outdated": self.host.nvml_is_outdated}
        try:
            text = _line({**reply, **about})
        except (TypeError, ValueError) as error:
            text = json.dumps({"error": f"what it gave cannot be sent: {one_sentence(error)}", **about})
        return text.encode() + b"\n"

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "run":
                return {"error": "", **self.do_run(request)}
            operation: Callable[[Any], dict[str, Any]] = getattr(self, f"do_{request['op']}")
            return {"error": "", **operation(requests.asked_in(request))}
        except Exception as error:
            return {"error": one_sentence(error)}

    def do_run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One run of one check: findings, observations, repairs. A site's check is imported when first asked for.
        "gone": a GPU that had answered before was lost to NVML meanwhile."""
        check = self._check(request["check"])
        self.begin(check.name, request["instance"])
        name, boot_id = RunName(check.name, request["instance"]), request["boot_id"]
        kept = self._kept.pop(name, None)
        known = kept if "before" in request else None
        if "before" in request and (known is None or known.number != request["before"]):
            raise ValueError(f"it does not know request {request['before']}")
        table = request["config"] if known is None or "config" in request else known.config
        config = self._config(check, table)
        now = request["now"] if "now" in request else self.host.now()  # a caller that keeps no past names no moment
        same = known if "past" not in request else None
        store = history.decode(request["past"]) if same is None else same.store
        again = (same.made, same.now) if same else None
        found: dict[str, list[Any]] = {"findings": [], "observations": [], "repairs": [], "nothing": []}
        error, gone_before = "", self.host.gpus_gone
        try:
            for item in check.run(self.host, config, Past(store, now, boot_id, again)):
                found["observations" if type(item) is Observation else _kind(item, check.name)].append(item)
        except Exception as problem:  # checks catch nothing: what stops one is caught here, once for all
            error = one_sentence(problem)
        read = found["observations"]
        left_out = max(len(read) - MOST_OBSERVATIONS, 0)
        del read[MOST_OBSERVATIONS:]
        as_before = kept is not None and kept.observations == read
        texts = kept.texts if kept and as_before else _texts(read, kept)
        said = {name: dump(found[name]) for name in ("findings", "repairs", "nothing")} | {"left_out": left_out}
        answer = {"error": error, "gone": self.host.gpus_gone > gone_before}
        if known is None or not as_before:
            answer["observations"] = f"[{','.join(texts)}]"
        answer |= {name: value for name, value in said.items() if known is None or known.said[name] != value}
        stands = same is not None and as_before and same.boot_id == boot_id and now < same.until
        made, until = (same.made, same.until) if same and stands else (now, 0.0)
        if not stands:
            store = history.update(history.read_again(store, *again) if again else store, read, now, boot_id)
            until = history.stands_until(store, len(read), now, boot_id)
            answer["past"] = history.encode(store)
        number = request.get("number", 0)
        self._kept[name] = _Kept(number, table, now, boot_id, read, texts, store, made, until, said)
        return answer

    def _config(self, check: registry.Check, table: dict[str, Any]) -> CheckConfig:
        """The check's settings, made anew only when the daemon sends others."""
        name = RunName(check.name, table.get("name", ""))
        before = self._configs.get(name)
        if before is None or before[0] != table:
            before = self._configs[name] = (table, load(check.config, table))
        return before[1]

    def _check(self, name: str) -> registry.Check:
        """A check by name. A built-in one never depends on the site's directory, or on what somebody just put there."""
        if name not in self.checks:
            built_in = registry.built_in()
            self.checks = built_in if name in built_in else registry.find(self.setup.checks_dir, bounded=False)
        return self.checks[name]

    def do_close_nvml(self, _asked: requests.CloseNvml) -> dict[str, Any]:
        self.host.close_nvml()
        return {}

    def do_inventory(self, asked: requests.TakeInventory) -> dict[str, Any]:
        from healthd.host.inventory import take

        return {"inventory": dump(take(self.host, gpus=asked.gpus))}

    def do_baseline(self, asked: requests.TakeBaseline) -> dict[str, Any]:
        """What this node has now of the settings that a check wants in the baseline."""
        from healthd.agent.worker.present import look

        check = self._check(asked.check)
        found = look(self.host, check, self._config(check, asked.config))
        return {
            "entries": [dump(item) for item in found if isinstance(item, Entry)],
            "left_out": [dump(item) for item in found if not isinstance(item, Entry)],
        }

    def do_save_copy(self, asked: requests.SaveCopy) -> dict[str, Any]:
        """Copy files of the runtime directory to the state directory, durably. `keep`: the old copy could not be read
        at the start, and goes aside for a person instead of being replaced."""
        from healthd.agent.conditions.state_files import read_text, set_aside
        from healthd.common import ownership
        from healthd.common.atomic_files import remove_leftovers, replace_file

        try:
            with ownership.folder(asked.to, make_mode=0o700):
                remove_leftovers(asked.to)
        except ownership.Untrusted as error:
            raise error.at(asked.to, "state_dir") from None
        for name in asked.names:
            text = read_text(os.path.join(asked.from_, name))
            if asked.keep and os.path.exists(os.path.join(asked.to, name)):
                set_aside(os.path.join(asked.to, name))
            if text is not None:
                replace_file(os.path.join(asked.to, name), text, durable=True)
        return {}

    def do_append_events(self, asked: requests.AppendEvents) -> dict[str, Any]:
        """Write lines of the stream behind the others, durably, then to the journal. "journal_lost": how many of them
        that did not take."""
        from healthd.common.ownership import Untrusted
        from healthd.events import journal, writer
        from healthd.host.journald import stderr_is_the_journal

        try:
            writer.append(asked.to, asked.lines, asked.again)
        except Untrusted as error:
            raise error.at(asked.to, "state_dir") from None
        return {"journal_lost": journal.send(asked.lines) if stderr_is_the_journal() else 0}

    def do_read_cluster_name(self, _asked: requests.ReadClusterName) -> dict[str, Any]:
        """The name of the cluster, as Slurm's settings on this node have it."""
        from healthd.common.slurm.slurm_conf import cluster_name

        return {"cluster": cluster_name(self.setup.root)}

    def do_write_file(self, asked: requests.WriteFile) -> dict[str, Any]:
        """Write a file for others to read, on any disk."""
        from healthd.common.atomic_files import replace_file

        replace_file(asked.path, asked.text, mode=0o644)
        return {}

    def do_load_copy(self, asked: requests.LoadCopy) -> dict[str, Any]:
        """The texts of files in the state directory. "written": when the newest of them was (epoch), 0 = not known."""
        from healthd.agent.conditions.state_files import read_text
        from healthd.common.atomic_files import newest

        texts = {name: read_text(os.path.join(asked.from_, name)) for name in asked.names}
        return {"texts": texts, "written": newest(asked.from_, asked.names)}

    def do_look_at_own_files(self, asked: requests.LookAtOwnFiles) -> dict[str, Any]:
        """What lies where the daemon was started from."""
        from healthd.agent.worker.installed_files import identities

        return {"files": identities(asked.paths)}

    def do_read_journal(self, asked: requests.ReadJournal) -> dict[str, Any]:
        """Kernel lines of this boot that the ring buffer no longer has."""
        from healthd.agent.kernel_log.journal import read_journal

        lines = read_journal(
            asked.gap.boot_id, asked.gap.since_usec, asked.gap.until_usec, asked.gap.limit, asked.gap.accept_injected
        )
        return {"lines": [list(line) for line in lines]}


def _texts(observations: list[Observation], kept: _Kept | None) -> list[str]:
    """Each as JSON; most are what they were in the last run, and stand where they stood."""
    before = zip(kept.observations, kept.texts, strict=True) if kept else ()
    pairs = zip_longest(observations, islice(before, len(observations)), fillvalue=(None, ""))
    return [text if each == was else _encoded(dump(each)) for each, (was, text) in pairs]


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
    if isinstance(item, NothingToCheck):
        return "nothing"
    raise TypeError(
        f'the check "{check}" gave {item!r:.100}: it must be a Finding, an Observation, a Repair or NothingToCheck'
    )


def one_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())[:500]
    if type(error).__module__.startswith("healthd") and text:
        return text
    return without_class(f"{type(error).__name__}: {text}") if text else type(error).__name__
