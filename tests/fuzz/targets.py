"""The targets of the fuzz tests, one per boundary: their seeds, and the promises that hold for any input.

A target has seeds (valid inputs, if possible captured on real machines) and takes one input. It fails with any
exception; an AssertionError names the broken promise. An exception that a guard caught (healthd/common/guard.py) also
counts as a failure, because a reader failed.
"""

from __future__ import annotations

import atexit
import functools
import json
import select
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fakes import BOOT, NOW
from kernel_lines import LINES
from slurm_text import listpids, sinfo, squeue

from healthd.agent.conditions import intake, store, verdict
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.conditions.state_files import LedgerError
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.control import commands, protocol
from healthd.agent.control.server import ControlServer
from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.prefix import parse_record, strip_prefix
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.recording import recording
from healthd.agent.recording.recording import RecordingError
from healthd.agent.reporting.status import condition_json
from healthd.agent.settings import registry
from healthd.agent.settings.config import ConfigError
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.settings_file import parse_toml
from healthd.agent.worker.requests import Response, RunAnswer
from healthd.cli.scan import correlate_all
from healthd.common import guard, history, mountinfo, values
from healthd.common.model import Condition, Finding, Mode, Observation, ObservationKind, Severity
from healthd.common.page import Page
from healthd.common.slurm.drain_reason import parse_reason, reason
from healthd.common.slurm.output import SlurmError
from healthd.common.text import printable
from healthd.common.values import DecodeError, decode, encode
from healthd.host import cgroup
from healthd.host.program import ProgramResult
from healthd.nvidia.nvml import NvmlError
from healthd.scan import events as scan
from healthd.scan import findings as scan_judged
from healthd.scan import table
from healthd.scan.lines import Block, Tally
from healthd.validation import document as validation_document
from healthd.validation import measurement as validation_measurement
from healthd.validation.measurement import Measurement, NotUnderstood
from healthd.validation.tools import cpu, dcgmi, nccl_tests, nvbandwidth, perftest, pytorch
from tests.agent.conditions.test_ledger import FULL_LEDGER
from tests.checks.test_mutations import CHECKS, RecordingSystem, check_test_module, run
from tests.common.slurm.test_output import PARSERS

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
FILE = "/etc/healthd/healthd.toml"
KNOWN = registry.built_in_checks()
EVENT_CHECKS = [(check, check.config()) for check in KNOWN.values() if check.reads_kernel_log]


class Target(NamedTuple):
    """`make` returns (seeds, function that takes one input). It is called once per process."""

    make: Callable[[], tuple[Sequence[bytes], Callable[[bytes], None]]]
    cost: int = 1  # CPU time relative to a line; divides the number of inputs


def assert_nothing_dropped() -> None:
    assert not guard.dropped, f"a reader failed and its guard caught it: {guard._last_drops}"


def assert_one_line(text: str) -> None:
    assert text.isprintable(), f"not one printable line: {text!r:.300}"


def temporary_folder() -> str:
    """Create a folder that exists until this process ends."""
    folder = tempfile.mkdtemp(prefix="healthd.")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def refusal_text(refusal: type[Exception], read: Callable[..., object], *data: object) -> str:
    """Return the text of the one exception that this reader may raise, or "" if it accepts the data."""
    try:
        read(*data)
    except refusal as error:
        return str(error)
    return ""


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def captured_lines() -> list[bytes]:
    files = [path.read_text("utf-8") for path in sorted(DATA.glob("kernel_lines*.jsonl"))]
    return [json.loads(line)["text"].encode("utf-8", "replace") for text in files for line in text.split("\n") if line]


# --- kernel log


def kernel_message() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    seeds = [
        stripped.text.encode()
        for row in LINES
        for line in row["text"].split("\n")
        if (stripped := strip_prefix(line, NOW)) is not None
    ]

    def take(data: bytes) -> None:
        event = parse(_text(data))
        assert_nothing_dropped()
        if event is not None:
            assert_one_line(event.kind)
            assert_one_line(event.code)

    return seeds, take


def kmsg_record() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    seeds = [
        b"4,%d,%d,-;%s\n SUBSYSTEM=pci\n" % (number, number * 1000, line)
        for number, line in enumerate(kernel_message()[0])
    ]

    def take(data: bytes) -> None:
        record = parse_record(data)
        assert_nothing_dropped()
        assert record is None or "\n" not in record.text or b"\\x0a" in data, "only an escape is a newline in a record"

    return seeds, take


def log_line() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    seeds = [line for text in captured_lines() for line in text.split(b"\n")]

    def take(data: bytes) -> None:
        strip_prefix(_text(data), NOW)
        assert_nothing_dropped()

    return seeds, take


def log_file() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    """healthd scan: turns any bytes into events that fit into a table and into JSON lines."""
    correlate = correlate_all()

    def take(data: bytes) -> None:
        blocks = [Block.from_lines(number, [line]) for number, line in enumerate(data.split(b"\n"), 1)]
        tally = Tally()
        events_found = list(scan_judged.judge(scan.events(blocks, NOW, tally), correlate))
        assert_nothing_dropped()
        for item in events_found:
            assert json.loads(scan_judged.event_line(item)) == scan_judged.event_json(item)
        for line in table.table(table.summary(events_found), "x", tally, Page()).split("\n"):
            assert_one_line(line)

    return captured_lines(), take


def whole_daemon() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    """The path through the daemon: lines become events, conditions, a verdict, a Slurm reason and status; the ledger
    is saved."""

    def take(data: bytes) -> None:
        lines = [RawLine(NOW + number, _text(line), False) for number, line in enumerate(data.split(b"\n")[:200])]
        events = [event for line in lines if (event := make_event(line, BOOT)) is not None]
        applied = intake.take_kernel_events(Ledger(boot_id=BOOT), events, EVENT_CHECKS, NOW)
        assert_nothing_dropped()
        assert not applied.failures, f"a check failed: {applied.failures}"
        assert store.decode(values.encode(applied.ledger), "x") == applied.ledger
        assert_reportable(applied.ledger.conditions)

    seeds = [b"\n".join(filter(None, (stripped_text(line) for line in text.split(b"\n")))) for text in captured_lines()]
    return [seed for seed in seeds if seed], take


def stripped_text(line: bytes) -> bytes:
    stripped = strip_prefix(_text(line), NOW)
    return stripped.text.encode() if stripped else b""


def assert_reportable(conditions: Iterable[Condition]) -> None:
    node_verdict = verdict.judge({c.key: c for c in conditions}, {}, (), 0.0)
    for condition in node_verdict.conditions:
        assert_one_line(f"{condition.code} {condition.subject}")
        json.dumps(condition_json(condition, {}))
    if node_verdict.causes:
        drain_reason = reason(node_verdict.causes)
        assert_one_line(drain_reason)
        assert parse_reason(drain_reason) is not None, "healthd must recognise its own drain"


# --- control socket and Slurm


def control_request() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    """The control socket: each line gets an answer or one error sentence, and so does the next client."""
    folder = temporary_folder()
    condition_store = ConditionStore(folder, lambda: NOW)
    condition_store.load(dict, BOOT, Mode.ACT)
    event = make_event(RawLine(NOW, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", False), BOOT)
    assert event is not None
    conditions = intake.take_kernel_events(Ledger(boot_id=BOOT), [event], EVENT_CHECKS, NOW).ledger.conditions

    def answer(request: dict[str, Any], user: str, may_command: bool) -> dict[str, Any]:
        condition_store.set_conditions({condition.key: condition for condition in conditions})
        try:
            name = protocol.parse_command(request, user, may_command)
            if name in commands.COMMANDS:
                return {"done": commands.COMMANDS[name](condition_store, request, user, NOW)}
            requested_at = protocol.parse_requested_at(request) if name == protocol.PENDING_RUNS else 0.0
        except (protocol.RequestRefused, commands.CommandRefused) as refusal:
            return {"error": printable(str(refusal))}
        return {
            "left": [str(requested_at)],
            "status": [condition_json(condition, {}) for condition in condition_store.ledger.conditions],
        }

    path = f"{folder}/healthd.sock"
    server = ControlServer(path, answer, time.monotonic)
    server.open()
    atexit.register(server.close)

    def take(data: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.setblocking(False)
            with suppress(BlockingIOError, BrokenPipeError):
                client.send(data + b"\n")
            server.step()
            server.step()
            assert select.select([client], [], [], 60)[0], "no answer"
            reply = json.loads(client.recv(1 << 20))
        assert_nothing_dropped()
        assert reply.keys() & {"error", "done", "status", "left"}, reply
        if "error" in reply:
            assert "\n" not in reply["error"]
        if "done" in reply:
            assert_one_line(reply["done"])
        condition_store.save()

    named_commands = [
        {"command": name, "code": "gpu_xid/79", "part": None, "seconds": 60, "why": "x"} for name in commands.COMMANDS
    ]
    other_requests = [
        {"command": "status"},
        {"command": "looks-left", "asked": NOW},
        {"command": "job-ended", "job": "12"},
    ]
    return [json.dumps(request_document).encode() for request_document in (*named_commands, *other_requests)], take


def slurm_output() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    def take(data: bytes) -> None:
        for parser in PARSERS.values():
            assert "\n" not in refusal_text(SlurmError, parser, data)
        if parsed := parse_reason(_text(data)):
            assert all(isinstance(part, str) for part in parsed)

    seeds = [
        sinfo("idle"),
        sinfo("mixed+drain", "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"),
        squeue(),
        listpids("12"),
    ]
    return [b"BOOT_TIME = 2026-11-20T20:48:09\n", *(result.stdout for result in seeds)], take


# --- files


def settings_file() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    sample = (ROOT / "conf/healthd.toml").read_text("utf-8")
    active = "\n".join(line.removeprefix("#") if " = " in line else line for line in sample.splitlines())
    tables = [f"[{table}" for table in active.split("\n[")][1:]
    seeds = [
        sample,
        *tables,
        *(
            path.read_text("utf-8")
            for path in sorted([*DATA.glob("site_checks/*.toml"), *(ROOT / "conf/profiles").glob("*.toml")])
        ),
    ]

    def take(data: bytes) -> None:
        refused = refusal_text(ConfigError, lambda: resolve_settings(parse_toml(data, FILE), FILE, {}, KNOWN))
        assert_one_line(refused)
        assert refused.startswith(FILE) or not refused

    return [seed.encode() for seed in seeds], take


def ledger_file() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    def take(data: bytes) -> None:
        for decode_file in (store.decode, store.decode_past):
            refused = refusal_text(LedgerError, decode_file, _text(data), "/run/healthd/ledger.json")
            assert refused.startswith("/run/healthd/ledger.json: is") or not refused

    reading = Observation("errors_total", 5.0, ObservationKind.COUNTER, (("port", "1"),))
    past = {"ib_errors": history.encode(history.update({}, [reading], NOW, BOOT))}
    return [values.encode(FULL_LEDGER), values.encode(past)], take


def recording_file() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    import gzip

    def take(data: bytes) -> None:
        for text in (data, gzip.compress(data, 1)):
            refusal_text(RecordingError, recording.decode, text, "f")

    raw = [(DATA / "recordings/fewer_checks/two_gpus.rec").read_bytes()]
    return [*raw, gzip.decompress(raw[0])[:20_000]], take


def proc_text() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    def take(data: bytes) -> None:
        assert cgroup.job_in(_text(data)).isascii()
        mounts, _ = mountinfo.parse_all(_text(data))
        for mount in mounts:
            assert mount.point is not None

    seeds = [path.read_bytes()[:4000] for path in sorted(DATA.glob("mountinfo*.txt"))]
    return [*seeds, b"0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0\n"], take


# --- worker and inputs of checks


def worker_reply() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    finding = Finding(Severity.CRITICAL, "gpu_xid/79", "0000:1b:00.0", "m")
    observation = Observation("a_total", 1.0, ObservationKind.COUNTER, (("pci", "x"),))
    answer = encode(RunAnswer(findings=(finding,), observations=(observation,), past="{}"))

    def take(data: bytes) -> None:
        for kind in (RunAnswer, Response):
            with suppress(DecodeError):
                value = decode(kind, data)
                assert decode(kind, encode(value)) == value

    return [answer, encode(Response(1, "no way", outdated=True))], take


def check_input() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    """Each file that a check reads and each program that it runs gets other content: a finding or one error must
    follow."""
    folder = Path(temporary_folder())
    sources: dict[bytes, tuple[str, Any, Any, Any]] = {}
    seeds = []
    for name, check in CHECKS.items():
        (folder / name).mkdir()
        host, config = check_test_module(name).healthy(folder / name)
        system = RecordingSystem(host._system)
        run(check, host, config, system, {})
        for query, original in system.questions.items():
            text = {
                "read": lambda original=original: original,
                "run": lambda original=original: original.stdout.encode(),
            }.get(query[0])
            if text is not None and original is not None:
                key = f"{name} {query[0]} {query[1]}".encode()
                sources[key] = (name, host, config, query)
                seeds.append(key + b"\0" + text())

    keys = sorted(sources)

    def take(data: bytes) -> None:
        key, _, text = data.partition(b"\0")
        if key not in sources:
            key = keys[zlib.crc32(key) % len(keys)]
        name, host, config, query = sources[key]
        wrong = (lambda _true: text) if query[0] == "read" else (lambda _true: ProgramResult(0, _text(text), ""))
        try:
            items = run(CHECKS[name], host, config, RecordingSystem(host._system, query, wrong), {})
        except (OSError, ValueError, RuntimeError, NvmlError):
            return  # the worker reports it in one sentence
        for item in items:
            json.dumps(item.value if hasattr(item, "value") else item.subject)
            assert getattr(item, "severity", Severity.INFO) in Severity

    return seeds, take


def validation_output() -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    """healthd validate: the output of third-party tools, and the two files that it saves."""
    seeds = [path.read_bytes() for path in sorted((DATA / "validation").iterdir()) if path.name != "README.md"]
    measured = [entry for seed in seeds for entry in measurements_or_none(nvbandwidth.parse, seed)]
    results = tuple(validation_measurement.judge(measured, {}, {}, lambda part: ""))
    last = validation_document.Validation("n1", "b", 1.0, 2.0, "manual", "", results[:50], ("heat",))
    seeds += [validation_document.as_text(last).encode()]
    seeds += [validation_document.history_as_text(validation_document.with_new_values({}, results[:50])).encode()]
    parsers = (nvbandwidth.parse, dcgmi.parse, pytorch.parse, cpu.parse)
    parsers_with_argument = (
        lambda text: nccl_tests.parse(text, "nccl_sendrecv"),
        lambda text: perftest.parse(text, "mlx5_0/1"),
    )

    def take(data: bytes) -> None:
        for parse_one in (*parsers, *parsers_with_argument):
            for entry in measurements_or_none(parse_one, data):
                assert_one_line(entry.part)
                assert_one_line(entry.message)
        validation_document.parse_history(_text(data))
        with suppress(validation_document.NotAValidation):
            validation_document.as_text(validation_document.parse(_text(data)))

    return seeds, take


def measurements_or_none(parse_one: Callable[[str], list[Measurement]], data: bytes) -> list[Measurement]:
    try:
        return parse_one(_text(data))
    except NotUnderstood:
        return []


TARGETS = {
    "kernel-message": Target(kernel_message),
    "kmsg-record": Target(kmsg_record),
    "log-line": Target(log_line),
    "log-file": Target(log_file, cost=8),
    "life": Target(whole_daemon, cost=8),
    "request": Target(control_request, cost=4),
    "slurm-text": Target(slurm_output),
    "settings": Target(settings_file, cost=16),
    "ledger": Target(ledger_file, cost=4),
    "recording": Target(recording_file, cost=4),
    "machine-text": Target(proc_text),
    "worker-answer": Target(worker_reply),
    "check-input": Target(check_input, cost=8),
    "tool-output": Target(validation_output, cost=4),
}


@functools.cache
def make_target(name: str) -> tuple[Sequence[bytes], Callable[[bytes], None]]:
    return TARGETS[name].make()
