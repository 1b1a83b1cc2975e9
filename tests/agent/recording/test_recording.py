"""Tests of recordings: a replay gives the same answers, findings and texts on any machine."""

from __future__ import annotations

import ctypes
import errno
import gzip
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml
import pytest
import stub_nvml
from contract_nvml import assert_contract
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.kernel_log.source import RawLine
from healthd.agent.recording import recording
from healthd.agent.recording.host import (
    RecordedLibrary,
    ReplayedLibrary,
    _structure,
    open_recorded,
    open_replayed,
    recording_host,
    replaying_host,
)
from healthd.agent.recording.recording import (
    KernelLine,
    Notes,
    NotRecorded,
    Player,
    RecordedRun,
    Recorder,
    Recording,
    RecordingError,
)
from healthd.agent.scheduler import one_round
from healthd.agent.settings import registry
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.worker.client import WorkerClient
from healthd.agent.worker.process import Setup
from healthd.cli import replay
from healthd.common.model import Outcome
from healthd.host.host import Host
from healthd.host.program import ProgramResult
from healthd.host.system import FileStat, FileSystem, KernelClock
from healthd.nvidia.fake_nvml import library
from healthd.nvidia.nvml import Nvml, NvmlError
from tests.cli.test_cli import CommandResult, run, settings

ROOT = Path(__file__).parents[3]
RECORDINGS = Path(__file__).parents[2] / "data" / "recordings"
sys.path.insert(0, str(ROOT / "bench"))

import node_tree  # noqa: E402

PROFILES = ("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200")
# Each is a whole round in separate programs and takes seconds. A difference by Python version appears on any machine.
PROFILES_SINGLE_ON_ALL_PYTHONS = (
    PROFILES[1],
    *(pytest.param(profile, marks=pytest.mark.one_python) for profile in PROFILES if profile != PROFILES[1]),
)


def make_recording(*runs: RecordedRun, **fields: Any) -> Recording:
    defaults = {
        "healthd": "0",
        "node": "n1",
        "time": 1.0,
        "kernel": "",
        "boot_id": "b",
        "root": "/",
        "fake_nvml": False,
    }
    return Recording(**{**defaults, "checks": (), "runs": runs, **fields})


def make_run(answers: dict[str, list[Any]], check: str = "a", **fields: Any) -> RecordedRun:
    defaults = {"instance": "", "outcome": Outcome.COMPLETED, "error": "", "ended": 9.0, "seconds": 1.0}
    return RecordedRun(check, **{**defaults, "silent_seconds": 0.0, "answered": True, "asked": answers, **fields})


@pytest.fixture
def make_replay(tmp_path: Path) -> Iterator[Callable[[Callable[[Recorder], Any]], Player]]:
    """Return a function that records a function call and returns a player of the recording."""

    def tape(use_recorder: Callable[[Recorder], Any]) -> Player:
        folder = tmp_path / f"notes{len(os.listdir(tmp_path))}"
        folder.mkdir()
        recorder = Recorder(str(folder))
        recorder.begin("a", "")
        use_recorder(recorder)
        notes = recording.read_notes(str(folder))
        complete = make_recording(make_run(notes["a", ""].answers))
        player = Player(recording.decode(recording.encode(complete), "file"))
        player.begin("a", "")
        return player

    return tape


def outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a call, or the type and text of its exception."""
    try:
        return call(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


# --- answers


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
ERRORS = st.builds(OSError, st.sampled_from([2, 5, 13, 19, 110]), st.text(), st.text(min_size=1)) | st.builds(
    ValueError, st.text()
)
NAMED = (
    st.builds(FileStat, *[st.integers()] * 3, st.tuples(st.integers(), st.integers()))
    | st.builds(FileSystem, *[st.integers()] * 4)
    | st.builds(ProgramResult, st.integers(), st.text(), st.text())
    | st.builds(KernelClock, st.booleans(), st.floats(allow_nan=False), st.floats(allow_nan=False))
)
ANSWERS = st.recursive(
    PLAIN | NAMED, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner)
)


@given(ANSWERS)
def test_pack_unpack_returns_equal_answer(value):
    text = json.dumps(recording.pack(value))
    unpacked = recording.unpack(json.loads(text))
    assert unpacked == value
    assert type(unpacked) is type(value)


@given(ERRORS)
def test_pack_unpack_keeps_error(error):
    unpacked = recording.unpack(json.loads(json.dumps(recording.pack(error))))
    assert (type(unpacked), unpacked.args, str(unpacked)) == (type(error), error.args, str(error))
    assert getattr(unpacked, "filename", None) == getattr(error, "filename", None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "bytes",
                    "float",
                    "tuple",
                    "dict",
                    "error",
                    "ProgramResult",
                    "FileStat",
                    "os",
                    "Tree",
                    "struct",
                    "nvml",
                ]
            )
            | st.text(),
            inner,
            max_size=2,
        )
    ),
)


@given(JSON)
def test_unpack_raises_value_error_or_returns_data_if_answer_is_altered(data):
    player = Player(make_recording(make_run({"q": [data]})))
    unpackers = ReplayedLibrary(player)._unpackers
    for kinds in (None, unpackers):
        with suppress(ValueError):
            recording.unpack(data, kinds)


@pytest.mark.parametrize(
    "data",
    [
        {"error": ["SystemExit", 1]},
        {"error": ["eval", "1"]},
        {"os": []},
        {"Tree": ["/"]},
        {"run_program": [["/bin/true"], 1]},
        {"ProgramResult": [1]},
        {"a": 1, "b": 2},
    ],
)
def test_unpack_creates_only_answers(data):
    with pytest.raises(ValueError, match="the recording contains an answer"):
        recording.unpack(data)


# --- questions


def test_player_repeats_answers_in_order_and_then_the_last(make_replay):
    answers = iter([1, 1, 2, OSError(5, "I/O error", "/f"), 3, 3, 3])

    def answer() -> int:
        next_answer = next(answers)
        if isinstance(next_answer, OSError):
            raise next_answer
        return next_answer

    player = make_replay(lambda recorder: [outcome(lambda: recorder.record("q", answer)) for _ in range(7)])
    error = "OSError: [Errno 5] I/O error: '/f'"
    replayed = [outcome(lambda: player.answer("q")) for _ in range(8)]
    assert replayed == [(1, ""), (1, ""), (2, ""), (None, error), *[(3, "")] * 4]


def test_replaying_unrecorded_question_raises_not_recorded(make_replay):
    host = replaying_host(make_recording(), Player(make_recording()))
    for question in (
        lambda: host.read("/sys/x"),
        lambda: host.list("/sys/x"),
        lambda: host.exists("/sys/x"),
        lambda: host.link_target("/sys/x"),
        lambda: host.stat("/sys/x"),
        lambda: host.statvfs("/data"),
        lambda: host.run(["true"], 1.0),
        host.clock,
        host.now,
        host.pci_functions,
        host.gpus,
    ):
        with pytest.raises(NotRecorded, match="not in the recording: "):
            question()


def test_player_prefers_answers_from_current_run():
    runs = (make_run({"q": [1], "only a": [2]}), make_run({"q": [3]}, check="b"))
    player = Player(make_recording(*runs))
    player.begin("b", "")
    assert (player.answer("q"), player.answer("only a")) == (3, 2)
    player.begin("a", "")
    assert player.answer("q") == 1


def host_answers(host: Host) -> list[tuple[Any, str]]:
    """Return the result or exception of a host for each kind of question."""
    boot_id_path = "/proc/sys/kernel/random/boot_id"
    return [
        outcome(question)
        for question in (
            lambda: host.read(boot_id_path),
            lambda: host.read("/binary"),
            lambda: host.read("/none"),
            lambda: host.read("/proc"),
            lambda: host.read("/a\0b"),
            lambda: host.list("/sys/class/infiniband"),
            lambda: host.list("/none"),
            lambda: host.list(boot_id_path),
            lambda: host.exists("/none"),
            lambda: host.link_target(f"/sys/bus/pci/devices/{node_tree.GPUS[0]}"),
            lambda: host.link_target(boot_id_path),
            lambda: host.stat(boot_id_path),
            lambda: host.stat("/none"),
            lambda: host.statvfs("/data"),
            lambda: host.statvfs("/none"),
            lambda: host.run(["/bin/echo", "-n", "a b"], 5.0, {"X": "1"}, anywhere=True),
            lambda: host.run(["/none/program"], 5.0, anywhere=True),
            lambda: host.run(["/bin/sleep", "9"], 0.1, anywhere=True),
            lambda: host.run(["/bin/true"], 5.0),
            host.clock,
            host.now,
            host.pci_functions,
            lambda: [gpu.name for gpu in host.gpus()],
            host.is_driver_in_use,
            host.has_nvidia_hardware,
        )
    ]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the files of a DGX H100."""
    root = tmp_path_factory.mktemp("node")
    node_tree.build(root)
    (root / "binary").write_bytes(bytes(range(256)))
    return root


def test_replaying_host_gives_recorded_answers(node, make_replay):
    recorded_answers: list[Any] = []
    player = make_replay(
        lambda recorder: recorded_answers.extend(host_answers(recording_host(str(node), "dgx-h100", recorder)))
    )
    host = replaying_host(make_recording(root=str(node), fake_nvml=True), player)
    assert host_answers(host) == recorded_answers
    assert len({str(item) for item in recorded_answers}) > 15


def test_recording_contains_no_environment_and_no_deadline(make_replay):
    def run_program(recorder: Recorder) -> None:
        host = recording_host("/", "", recorder)
        host.run(["/bin/true"], 5.0, {"TOKEN": "s3cret"}, anywhere=True)

    player = make_replay(run_program)
    assert "s3cret" not in str(player._any)
    host = replaying_host(make_recording(), player)
    assert host.run(["/bin/true"], 7.0, {"TOKEN": "other"}, anywhere=True) == ProgramResult(0, "", "")


def test_is_driver_in_use_is_recorded_only_for_real_nvml(tmp_path, make_replay):
    """The recorder changes nothing: only a fake NVML has no driver on this machine."""
    files = tmp_path / "tree/sys/module/nvidia"
    (files / "holders").mkdir(parents=True)
    (files / "refcnt").write_text("3\n")
    root = str(tmp_path / "tree")
    results: list[Any] = []
    make_replay(lambda recorder: results.append(recording_host(root, "", recorder).is_driver_in_use()))
    make_replay(lambda recorder: results.append(recording_host("/", "dgx-h100", recorder).is_driver_in_use()))
    assert results == [True, None]


# --- NVML


def nvml_answers(nvml: Nvml) -> list[Any]:
    """Return the results of every method of every GPU."""
    answers: list[Any] = [outcome(nvml.driver_version), outcome(lambda: [gpu.pci for gpu in nvml.gpus()])]
    answers.append(outcome(lambda: [str(error) for error in nvml.unreachable]))
    for gpu in outcome(nvml.gpus)[0] or ():
        for name in sorted(set(dir(type(gpu))) - set(dir(object))):
            if name.startswith("_") or name in ("pci", "index", "uuid", "name"):
                continue
            method = getattr(gpu, name)
            for arguments in ((), (0,), (99,), ("sram", True, False), (True, False)):
                try:
                    answer = method(*arguments)
                except TypeError:
                    continue
                except NvmlError as error:
                    answer = (str(error), error.number)
                answers.append((gpu.pci, name, arguments, answer))
    return answers


def record_and_replay(make_replay: Any, fake: str) -> tuple[list[Any], list[Any]]:
    """Return the answers of the fake while it is recorded, and the answers of its recording."""
    recorded_answers: list[Any] = []

    def use_recorder(recorder: Recorder) -> None:
        nvml = open_recorded(recorder, fake)
        recorded_answers.extend(nvml_answers(nvml))
        nvml.close()

    player = make_replay(use_recorder)
    replayed_nvml = open_replayed(player)
    replayed = nvml_answers(replayed_nvml)
    replayed_nvml.close()
    return recorded_answers, replayed


@pytest.mark.parametrize("profile", [*PROFILES, "gb200-nvl72"])
def test_replay_gives_every_nvml_answer_for_profile(make_replay, profile):
    recorded_answers, replayed = record_and_replay(make_replay, profile)
    assert recorded_answers == replayed
    assert len(recorded_answers) > 100


@pytest.mark.parametrize("profile", [*PROFILES, "gb200-nvl72"])
def test_recorded_and_replayed_nvml_keep_contract(make_replay, profile):
    player = make_replay(lambda recorder: assert_contract(open_recorded(recorder, profile)))
    assert_contract(open_replayed(player))


SCENARIOS = {
    "lost": "gpu.3.lost = true",
    "requires a reset": "gpu.2.requires_reset = true",
    "unreachable": "gpu.1.unreachable = true",
    "mig": "gpu.0.mig = true",
    "old binding": 'missing_functions = ["nvmlDeviceGetFieldValues"]',
    "errors": 'gpu.0.errors = {nvmlDeviceGetTemperature = "Unknown", nvmlDeviceGetName = "NoPermission"}',
    "at random": "random_failures = 0.3",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_replay_gives_every_nvml_fault(make_replay, tmp_path, name):
    file = tmp_path / "scenario.toml"
    file.write_text(f'profile = "dgx-h100"\n{SCENARIOS[name]}\n')
    recorded_answers, replayed = record_and_replay(make_replay, str(file))
    assert recorded_answers == replayed


@pytest.mark.parametrize("error_name", ["DriverNotLoaded", "LibRmVersionMismatch", "LibraryNotFound"])
def test_replay_repeats_failed_nvml_open(make_replay, error_name):
    class Closed:
        NVMLError = pynvml.NVMLError

        def nvmlInit(self) -> None:
            raise getattr(pynvml, f"NVMLError_{error_name}")

    def open_outcome(any_library: Any) -> tuple[Any, str]:
        return outcome(lambda: Nvml.open(any_library))

    recorded_error: list[Any] = []
    player = make_replay(lambda recorder: recorded_error.append(open_outcome(RecordedLibrary(recorder, Closed()))))
    assert open_outcome(ReplayedLibrary(player)) == recorded_error[0]
    assert recorded_error[0][1].startswith("NvmlError: nvmlInit")


class UnknownLibrary:
    """A library with functions that the recorder has no special case for."""

    NVMLError = pynvml.NVMLError
    NVML_NEW_CONSTANT = 42

    def nvmlNewList(self, handle: Any) -> list[Any]:
        return [1, 2.5, "text", (3, None), {"a": True}, pynvml.nvmlFriendlyObject({"pid": 7, "usedGpuMemory": None})]

    def nvmlNewHandle(self, number: int) -> Any:
        return ctypes.cast(4096 + number, pynvml.c_nvmlDevice_t)

    def nvmlNewNumber(self, handle: Any, number: Any) -> int:
        number._obj.value = ctypes.cast(handle, ctypes.c_void_p).value
        return 0

    def nvmlNewUnit(self) -> Any:
        return pynvml.c_nvmlUnitInfo_t(name=b"caf\xc3\xa9", id=b"\xff\xfe", serial=b"1")

    def nvmlNewText(self) -> str:
        return b"\xff".decode()

    def nvmlNewError(self) -> None:
        raise pynvml.NVMLError(4242)

    def nvmlNewArray(self, values: Any) -> int:
        for place, value in enumerate(values._obj):
            value.fieldId, value.value.dVal = place, -1.5
        return 0


def call_all(lib: Any) -> list[Any]:
    number, values = ctypes.c_ulonglong(), (pynvml.c_nvmlFieldValue_t * 3)()
    handles = [lib.nvmlNewHandle(1), lib.nvmlNewHandle(2)]
    items = lib.nvmlNewList(handles[0])
    unit = lib.nvmlNewUnit()
    answers: list[Any] = [lib.NVML_NEW_CONSTANT, items[:5], vars(items[5])]
    for handle in handles:
        lib.nvmlNewNumber(handle, ctypes.byref(number))
        answers.append(number.value)
    answers += [outcome(lambda: unit.name), outcome(lambda: unit.id), unit.serial]
    answers += [outcome(lib.nvmlNewText), outcome(lib.nvmlNewError)[1].partition(": ")[2]]
    lib.nvmlNewArray(ctypes.byref(values))
    answers += [(value.fieldId, value.value.dVal) for value in values]
    answers += [getattr(lib, "nvmlNotThere", None), getattr(lib, "c_notThere_t", None)]
    return answers


def test_calls_to_unknown_functions_are_recorded(make_replay):
    answers: list[Any] = []
    player = make_replay(lambda recorder: answers.extend(call_all(RecordedLibrary(recorder, UnknownLibrary()))))
    assert call_all(ReplayedLibrary(player)) == answers
    assert answers[:2] == [42, [1, 2.5, "text", (3, None), {"a": True}]]
    assert answers[3:5] == [4097, 4098]


def test_unrecorded_nvml_call_raises_not_recorded(make_replay):
    player = make_replay(lambda recorder: open_recorded(recorder, "dgx-h100"))
    replayed_nvml = open_replayed(player)
    with pytest.raises(NotRecorded, match=r"not in the recording: nvmlDeviceGetCount\(\)"):
        replayed_nvml.gpus()
    with pytest.raises(NotRecorded, match="nor in the installed nvidia-ml-py: c_newer_t"):
        _ = ReplayedLibrary(player).c_newer_t


def test_unknown_structure_is_reported():
    for name, fields in (("c_none_t", {}), ("c_nvmlFieldValue_t", {"none": 1}), ("c_nvmlValue_t", "00")):
        with pytest.raises(ValueError, match="the installed nvidia-ml-py has"):
            _structure(name, fields)


def test_library_returns_fake_unchanged():
    assert library("dgx-h100").nvmlInit() is None


# --- notes of the workers


def test_notes_from_killed_worker_lack_only_pending_answer(tmp_path):
    recorder = Recorder(str(tmp_path))
    recorder.begin("mount", "/data")
    recorder.record("read /a", lambda: b"1")
    with pytest.raises(KeyboardInterrupt):
        recorder.record("statvfs /data", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    (file,) = tmp_path.iterdir()
    with file.open("ab") as notes:
        notes.write(b'["read /b",')  # killed while writing
    assert recording.read_notes(str(tmp_path)) == {
        ("mount", "/data"): Notes({"read /a": [{"bytes": "1"}]}, "statvfs /data")
    }


def test_notes_for_repeated_run_come_from_last_worker(tmp_path):
    for answer in (1, 2):
        recorder = Recorder(str(tmp_path))
        recorder.begin("a", "")
        recorder.record("q", lambda answer=answer: answer)
    assert recording.read_notes(str(tmp_path))["a", ""].answers == {"q": [2]}


def test_recorder_omits_answers_above_size_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_BYTES", 2000)
    recorder = Recorder(str(tmp_path))
    recorder.begin("a", "")
    recorder.record("large", lambda: b"x" * 3000)
    recorder.record("small", lambda: b"y")
    assert recording.read_notes(str(tmp_path))["a", ""].answers == {"small": [{"bytes": "y"}]}


def test_full_disk_raises_error_other_than_node_answer(tmp_path):
    recorder = Recorder(str(tmp_path))
    recorder.begin("a", "")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._file)
    os.close(full)
    with pytest.raises(RuntimeError, match="cannot write the recording: No space left on device"):
        recorder.record("read /x", lambda: b"1")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b'["read /x", {"byt\n["q",1]\n')
    assert recording.read_notes(str(tmp_path))["a", ""].answers == {"q": [1]}


def test_unrecordable_answer_raises_value_error_at_replay(make_replay):
    player = make_replay(lambda recorder: recorder.record("q", lambda: object()))
    assert outcome(lambda: player.answer("q"))[1] == "ValueError: the answer could not be recorded: q"


# --- the file


def test_encode_is_deterministic():
    original = make_recording(make_run({"b": [1], "a": [2]}), kernel_lines=(KernelLine(1.0, "NVRM", True),))
    assert recording.encode(original) == recording.encode(recording.decode(recording.encode(original), "f"))
    assert recording.decode(recording.encode(original), "f") == original


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # a fixed time, because the data is part of the test id


def zipped(document: Any) -> bytes:
    return packed(json.dumps(document).encode())


VALID = recording.encode(make_recording(make_run({"q": [1]})))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"hello", "is not a healthd recording, or is truncated"),
        (VALID[:40], "truncated"),
        (VALID[: len(VALID) - 1], "the end is missing"),
        (b"\x1f\x8b" + b"\0" * 40, "is not a healthd recording"),
        (packed(b"{"), "is not a healthd recording"),
        (packed(b"[" * 100_000), "is not a healthd recording"),
        (packed(b"\xff\xfe\xfd"), "is not a healthd recording"),
        (zipped([]), "it has no healthd header"),
        (zipped({"format": "another"}), "it has no healthd header"),
        (zipped({"format": "healthd recording", "version": 99}), "has version 99; this healthd reads version 1"),
        (zipped({"format": "healthd recording", "version": 1}), "missing healthd"),
        (packed(b"\0" * (recording.MAX_BYTES + 100)), "it contains more than 64 MiB"),
    ],
)
def test_read_error_for_invalid_file_is_single_sentence(tmp_path, data, message):
    file = tmp_path / "f.rec"
    file.write_bytes(data)
    with pytest.raises(RecordingError) as error:
        recording.read(str(file))
    assert message in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


@given(st.binary(max_size=60), st.integers(0, len(VALID)), st.integers(0, len(VALID)))
def test_decode_raises_recording_error_or_succeeds_for_damaged_file(piece, start, end):
    data = VALID[:start] + piece + VALID[end:]
    with suppress(RecordingError):
        recording.decode(data, "f")


@given(st.dictionaries(st.sampled_from(sorted(json.loads(gzip.decompress(VALID)))), JSON))
def test_decode_raises_recording_error_or_succeeds_for_altered_document(changes):
    with suppress(RecordingError):
        recording.decode(zipped({**json.loads(gzip.decompress(VALID)), **changes}), "f")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: os.mkfifo(path), lambda path: None])
def test_read_accepts_only_regular_file_without_waiting(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(RecordingError, match=r"x: (is not a file|cannot be read: No such file)"):
        recording.read(str(tmp_path / "x"))


def test_write_creates_private_file_atomically(tmp_path):
    file = tmp_path / "a.rec"
    old_umask = os.umask(0)
    try:
        assert recording.write(str(file), make_recording()) == file.stat().st_size
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(FileNotFoundError):
        recording.write(str(tmp_path / "none/a.rec"), make_recording())
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.rec"]


# --- settings, the kernel log


def test_recorded_settings_restores_checks_with_defaults(tmp_path):
    checks = registry.built_in_checks()
    config = checks["gpu_count"].config()
    table = replay._all_settings(config)
    assert table["timeout_seconds"] == 10.0
    loaded, failed_checks = replay.recorded_settings(
        make_recording(checks=(("gpu_count", "", table),), node="n7"), checks
    )
    assert (loaded.checks, failed_checks, loaded.settings.node_name) == ({("gpu_count", ""): config}, [], "n7")


@pytest.mark.parametrize(
    ("check", "table", "error"),
    [
        ("fan", {}, 'cannot be replayed: this version has no check "fan"'),
        ("gpu_count", {"newer": 1}, 'its recorded settings: unknown setting "newer"'),
        ("gpu_count", {"expected": "eight"}, "its recorded settings.expected: must be a whole number"),
    ],
)
def test_recorded_settings_returns_failed_run_for_unknown_check(check, table, error):
    loaded, (result,) = replay.recorded_settings(
        make_recording(checks=((check, "", table),)), registry.built_in_checks()
    )
    assert loaded.checks == {}
    assert (result.check, result.outcome) == (check, Outcome.FAILED)
    assert result.error.startswith(error)


def test_recorded_kernel_log_returns_lines_or_raises_recorded_error():
    assert replay.recorded_kernel_log(make_recording()) is None
    log = replay.recorded_kernel_log(make_recording(kernel_lines=(KernelLine(5.0, "NVRM: x", True),)))
    assert log is not None
    assert log() == [RawLine(5.0, "NVRM: x", True)]
    denied = PermissionError(errno.EPERM, "Operation not permitted", "/dev/kmsg")
    log = replay.recorded_kernel_log(make_recording(kernel_error=recording.pack(denied)))
    assert log is not None
    with pytest.raises(PermissionError, match="/dev/kmsg"):
        log()
    with pytest.raises(RecordingError, match="kernel log"):
        replay.recorded_kernel_log(make_recording(kernel_error={"error": ["ValueError", "x"]}))


# --- the commands


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("config") / "healthd.toml"
    file.write_text(f'node_name = "gpu-042"\n{node_tree.CONFIG}')
    return str(file)


def without_version(completed: CommandResult) -> Any:
    return {key: value for key, value in completed.document.items() if key != "version"}


def without_date(replay) -> str:
    return re.sub(r", recorded on .*", "", replay.out).rstrip()


def round_trip(tmp_path: Path, *arguments: str) -> tuple[Any, Any]:
    """Return the results of `record` and of its replay. Both print the same table."""
    file = str(tmp_path / "round.rec")
    recorded_run = run("record", file, *arguments)
    assert recorded_run.status == 0, recorded_run
    replayed_run = run("check", "--replay", file)
    table = recorded_run.out.partition("\nRecorded\n")[0].rstrip()
    assert without_date(replayed_run) == table
    assert run("check", "--replay", file).out == replayed_run.out
    return recorded_run, replayed_run


@pytest.mark.parametrize("profile", PROFILES_SINGLE_ON_ALL_PYTHONS)
def test_replay_prints_same_output(node, config, tmp_path, profile):
    _, replayed_run = round_trip(tmp_path, "--root", str(node), "--fake-nvml", profile, "--config", config)
    assert replayed_run.out.startswith("gpu-042: ")


@pytest.mark.one_python
def test_replay_needs_nothing_from_recorded_machine(config, tmp_path):
    root = tmp_path / "tree"
    root.mkdir()
    node_tree.build(root)
    scenario = tmp_path / "lost.toml"
    scenario.write_text(FAULTS["lost"])
    file = str(tmp_path / "a.rec")
    run("record", file, "--root", str(root), "--fake-nvml", str(scenario), "--config", config)
    recorded_document = without_version(run("check", "--replay", file, "--json"))
    shutil.rmtree(root)
    scenario.unlink()
    replayed_run = run("check", "--replay", file, "--json")
    assert without_version(replayed_run) == recorded_document
    assert replayed_run.status == 2
    assert "gpu_access/lost" in [c["code"] for c in replayed_run.document["conditions"]]


FAULTS = {
    "lost": 'profile = "dgx-h100"\ngpu.3.lost = true\n',
    "lost in the middle": 'profile = "dgx-h100"\ngpu.3.lost_after = 3\n',
    "hang": 'profile = "dgx-h100"\nhang = "nvmlInit"\nhang_seconds = 20\n',
    "crash": 'profile = "dgx-h100"\ngpu.2.crash = "nvmlDeviceGetEccMode"\n',
}


MIDDLE_HANG = 'profile = "dgx-h100"\nhang = "nvmlDeviceGetEccMode"\nhang_seconds = 20\n'


@pytest.mark.parametrize(
    ("scenario", "seconds", "codes"),
    [
        (FAULTS["lost in the middle"], 60.0, {"gpu_access/lost"}),
        pytest.param(
            *(f"{MIDDLE_HANG}gpu.3.lost = true\n", 1.0, {"gpu_access/hang", "gpu_access/lost"}),
            marks=pytest.mark.one_python,
        ),
    ],
)
def test_replay_repeats_check_that_ran_twice(node, tmp_path, scenario, seconds, codes):
    fake = tmp_path / "fake.toml"
    fake.write_text(scenario)
    file = settings(tmp_path, f"[checks.gpu_ecc]\ntimeout_seconds = {seconds}\n")
    names = ("gpu_access", "gpu_count", "gpu_ecc", "gpu_nvlink")
    arguments = (*names, "--root", str(node), "--fake-nvml", str(fake), "--config", file)
    _, replayed_run = round_trip(tmp_path, *arguments)
    assert codes == {code for code in ("gpu_access/hang", "gpu_access/lost") if code in replayed_run.out}
    with_settings = run("check", "--replay", str(tmp_path / "round.rec"), "--config", file, *names, "--json").document
    assert codes <= {found["code"] for found in with_settings["conditions"]}


def test_replay_does_not_wait_for_recorded_hang(node, tmp_path):
    scenario = tmp_path / "hang.toml"
    scenario.write_text(FAULTS["hang"])
    slow_check = '[checks.exec.slow]\ncommand = ["/bin/sleep", "90"]\ntimeout_seconds = 2.0\n'
    file = settings(tmp_path, f"[checks.gpu_access]\ntimeout_seconds = 0.5\n{slow_check}{node_tree.CONFIG}")
    rec = str(tmp_path / "hang.rec")
    recorded_run = run("record", rec, "--root", str(node), "--fake-nvml", str(scenario), "--config", file)
    assert recorded_run.status == 0, recorded_run
    assert "gpu_access had no answer to: nvmlInit()" in recorded_run.out
    started = time.monotonic()
    replayed_run = run("check", "--replay", rec)
    assert time.monotonic() - started < 60
    assert without_date(replayed_run) == recorded_run.out.partition("\nRecorded\n")[0].rstrip()
    assert "gpu_access/hang" in replayed_run.out
    assert replayed_run.status == 3


def test_replay_repeats_failed_run_if_worker_died(node, config, tmp_path):
    scenario = tmp_path / "crash.toml"
    scenario.write_text(FAULTS["crash"])
    arguments = ("--root", str(node), "--fake-nvml", str(scenario), "--config", config)
    recorded_run, replayed_run = round_trip(tmp_path, *arguments)
    assert "the worker died (signal 9)" in replayed_run.out
    assert "had no answer to: nvmlDeviceGetEccMode(nvmlDeviceGetHandleByIndex(2))" in " ".join(recorded_run.out.split())


@pytest.mark.one_python
def test_replay_for_missing_mount_ignores_replaying_machine(node, tmp_path):
    file = settings(tmp_path, f'{node_tree.CONFIG}[checks.mount."/scratch"]\n')
    _, replayed_run = round_trip(tmp_path, "mount", "--root", str(node), "--fake-nvml", "dgx-h100", "--config", file)
    assert "mount/missing /scratch" in replayed_run.out
    assert replayed_run.status == 2


def test_replay_runs_no_program(tmp_path):
    program, count = tmp_path / "program", tmp_path / "count"
    program.write_text(f"#!/bin/sh\necho run >> {count}\necho the fan is loud\nexit 2\n")
    program.chmod(0o755)
    file = settings(tmp_path, f'[checks.exec.fan]\ncommand = ["{program}"]\n')
    _, replayed_run = round_trip(tmp_path, "exec", "--config", file)
    assert "the fan is loud" in replayed_run.out
    assert count.read_text() == "run\n"


@pytest.mark.one_python
def test_replay_for_single_check_equals_part_from_whole(node, config, tmp_path):
    file = str(tmp_path / "a.rec")
    run("record", file, "--root", str(node), "--fake-nvml", "dgx-h100", "--config", config)
    all_results = {r["check"]: r for r in run("check", "--replay", file, "--json").document["results"]}
    for name in ("gpu_nvlink", "pcie_aer", "gpu_count"):
        (single_result,) = run("check", name, "--replay", file, "--json").document["results"]
        assert single_result == all_results[name]
    unknown_check = run("check", "nonsense", "--replay", file)
    assert (unknown_check.status, unknown_check.out) == (64, "")


def test_replay_with_other_settings_applies_them(node, config, tmp_path):
    file = str(tmp_path / "a.rec")
    run("record", file, "--root", str(node), "--fake-nvml", "dgx-h100", "--config", config)
    other_settings = settings(tmp_path, "[checks.gpu_count]\nexpected = 16\n")
    replayed_run = run("check", "gpu_count", "--replay", file, "--config", other_settings, "--json")
    assert [c["code"] for c in replayed_run.document["conditions"]] == ["gpu_count/fewer_than_expected"]
    assert replayed_run.document["node"] == "gpu-042"


@pytest.mark.one_python
@pytest.mark.parametrize("layer_kind", ["profile", "baseline"])
def test_replay_with_other_settings_keeps_profile_and_baseline(node, config, tmp_path, layer_kind):
    """Neither belongs to the replaying machine, nor to the settings file."""
    fake, file = tmp_path / "fake.toml", str(tmp_path / "a.rec")
    fake.write_text('profile = "dgx-h100"\ngpu.3.gone = true\n')
    layer = tmp_path / f"{layer_kind}.toml"
    layer.write_text("[checks.gpu_count]\nexpected = 8\n")
    arguments = ("--root", str(node), "--fake-nvml", str(fake), "--config", config)
    assert run("record", file, *arguments, f"--{layer_kind}", str(layer)).status == 0
    layer.unlink()
    other_settings = settings(tmp_path, "[checks.gpu_ecc]\ntimeout_seconds = 9.0\n")
    default_findings, other_findings = (
        {(found["code"], found["severity"]) for found in document["conditions"]}
        for document in (
            run("check", "--replay", file, "--json").document,
            run("check", "--replay", file, "--config", other_settings, "--json").document,
        )
    )
    severity = "warning" if layer_kind == "profile" else "degraded"
    assert ("gpu_count/fewer_than_expected", severity) in default_findings & other_findings
    no_layers = settings(tmp_path, 'profile = "none"\nbaseline_file = ""\n')
    without = run("check", "--replay", file, "--config", no_layers, "--json").document
    assert "gpu_count/fewer_than_expected" not in {found["code"] for found in without["conditions"]}


@pytest.mark.one_python
def test_replay_with_other_settings_keeps_named_check(node, config, tmp_path):
    fake, file = tmp_path / "fake.toml", str(tmp_path / "a.rec")
    fake.write_text('profile = "dgx-h100"\ngpu.3.processes = [4711]\n')
    run("record", file, "gpu_processes", "--root", str(node), "--fake-nvml", str(fake), "--config", config)
    codes = [
        [found["code"] for found in run("check", "--replay", file, "--json", *arguments).document["conditions"]]
        for arguments in ((), ("--config", config))
    ]
    assert codes[0] == codes[1] != []


def test_replay_with_missing_answer_makes_only_that_check_unknown(node, config, tmp_path):
    file = tmp_path / "a.rec"
    arguments = ("--root", str(node), "--fake-nvml", "dgx-h100", "--config", config)
    run("record", str(file), "gpu_count", "pcie_aer", *arguments)
    original = recording.read(str(file))
    device = f"/sys/bus/pci/devices/{node_tree.GPUS[0]}/aer_dev_fatal"
    for recorded_run in original.runs:
        recorded_run.asked.pop(f"read {device}", None)
    file.unlink()
    recording.write(str(file), original)
    replayed_run = run("check", "--replay", str(file), "--json")
    outcomes = {r["check"]: r["outcome"] for r in replayed_run.document["results"]}
    assert outcomes == {"gpu_count": "completed", "pcie_aer": "failed"}, replayed_run
    assert "not in the recording" in replayed_run.document["unknown"][0]
    assert (replayed_run.status, replayed_run.document["health"]) == (3, "unknown")


def test_replay_without_recorded_site_check_is_unknown(empty_tree, tmp_path):
    site = tmp_path / "checks.d"
    site.mkdir(mode=0o755)
    (site / "fan.py").write_text("def run(host, config, past):\n    yield from ()\n")
    (site / "fan.py").chmod(0o644)
    rec = str(tmp_path / "a.rec")
    file = settings(tmp_path, f'checks_dir = "{site}"\n')
    assert run("record", rec, "fan", "gpu_count", "--config", file, "--root", empty_tree).status == 0
    replayed_run = run("check", "--replay", rec)
    assert replayed_run.status == 3
    assert 'fan failed: cannot be replayed: this version has no check "fan"' in replayed_run.out
    assert "gpu_count  completed" in replayed_run.out


XID = "NVRM: Xid (PCI:0000:61:00): 79, pid=4711, name=python3, GPU has fallen off the bus."


def run_round_with(setup: Setup, *arguments: Any) -> one_round.RoundResult:
    runner = WorkerClient(setup, "", time.monotonic)
    try:
        return one_round.run_round(*arguments[:2], runner, *arguments[2:])
    finally:
        runner.close(1.0)


def test_replayed_document_equals_recorded_document(node, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    scenario, notes, file = tmp_path / "lost.toml", tmp_path / "notes", str(tmp_path / "a.rec")
    scenario.write_text(FAULTS["lost"])
    notes.mkdir()
    checks = registry.built_in_checks()
    table = {"root": str(node), "nvml": {"fake": str(scenario)}, "checks": {"mount": {"/data": {}, "/none": {}}}}
    loaded = resolve_settings(table, "file", {}, checks)
    lines = [RawLine(1000.0, XID, True), RawLine(2000.5, XID, False)]
    setup = Setup(str(node), str(scenario), record=str(notes))
    recorded_round = run_round_with(setup, loaded, checks, lambda: lines)
    recording.write(file, replay.record(loaded, recorded_round, recording.read_notes(str(notes))))

    read_recording = recording.read(file)
    recorded_settings, failed_checks = replay.recorded_settings(read_recording, checks)
    replayed_round = run_round_with(
        Setup(replay=file),
        recorded_settings,
        checks,
        replay.recorded_kernel_log(read_recording),
        read_recording,
        failed_checks,
    )
    assert one_round.round_json(replayed_round) == one_round.round_json(recorded_round)
    assert {"gpu_xid", "gpu_access", "mount"} <= {c.check for c in replayed_round.verdict.conditions}


def test_recording_with_real_binding_needs_no_driver(tmp_path):
    """Use pynvml itself, with a libnvidia-ml.so.1 that fails for one GPU."""
    file, names = str(tmp_path / "a.rec"), ("gpu_access", "gpu_count", "gpu_ecc", "gpu_nvlink", "gpu_row_remap")
    env = stub_nvml.environment(tmp_path, STUB_ERRORS="*@1=15")
    argv = [sys.executable, "-m", "healthd", "record", file, *names]
    completed = subprocess.run(argv, env={**env, "COLUMNS": "100"}, capture_output=True, text=True, timeout=240)
    assert completed.returncode == 0, completed
    replayed_run = run("check", "--replay", file)
    assert without_date(replayed_run) == completed.stdout.partition("\nRecorded\n")[0].rstrip()
    assert "gpu_access/lost 0000:43:00.0" in replayed_run.out
    assert recording.read(file).fake_nvml is False


@pytest.fixture
def empty_tree(tmp_path: Path) -> str:
    path = tmp_path / "nothing"
    path.mkdir()
    return str(path)


def test_record_and_replay_on_this_machine(tmp_path):
    """Use the real hardware and user of the test run."""
    round_trip(tmp_path)


def test_record_replaces_file_only_with_force(empty_tree, tmp_path):
    file = tmp_path / "a.rec"
    file.write_text("mine")
    arguments = ("gpu_count", "--root", empty_tree)
    completed = run("record", str(file), *arguments)
    assert (completed.status, completed.out) == (1, "")
    assert completed.err == f"healthd record: {file}: already exists; --force replaces it\n"
    assert file.read_text() == "mine"
    assert run("record", str(file), "--force", *arguments).status == 0
    assert run("check", "--replay", str(file)).status == 0


def test_record_to_unwritable_path_runs_nothing(empty_tree, tmp_path):
    for path, message in (
        ("/dev/null", "/dev/null: exists and is not a file"),
        (str(tmp_path), f"{tmp_path}: exists and is not a file"),
        (f"{tmp_path}/none/a.rec", f"{tmp_path}/none: no such directory"),
    ):
        completed = run("record", path, "--force", "--root", empty_tree)
        assert (completed.status, completed.out, completed.err) == (1, "", f"healthd record: {message}\n")


def test_replaying_invalid_file_is_usage_error(tmp_path):
    file = tmp_path / "a.rec"
    file.write_text("garbage")
    for path, message in ((file, "is not a healthd recording"), (tmp_path / "none", "cannot be read: No such file")):
        completed = run("check", "--replay", str(path))
        assert (completed.status, completed.out, completed.err.count("\n")) == (64, "", 1)
        assert message in completed.err


def test_replay_refuses_options_that_recording_defines(tmp_path):
    completed = run("check", "--replay", "a.rec", "--root", "/")
    assert (completed.status, completed.err) == (
        64,
        "healthd check: --root cannot be used with --replay; the recording has its own\n",
    )
    completed = run("check", "--replay", "a.rec", "--profile", "none")
    assert completed.status == 64
    assert completed.err.endswith("the recording has its own; use --config for other settings\n")


# --- stored recordings


STORED_SCENARIOS = {
    "healthy": "",
    "lost_gpu": "gpu.3.lost = true\n",
    "worn_memory": "gpu.5.remap_failure = true\ngpu.1.nvlink_inactive = [4]\n",
}


def summary(document: Any) -> dict[str, Any]:
    condition_texts = [f"{c['severity']} {c['code']} {c['subject']}".strip() for c in document["conditions"]]
    return {"health": document["health"], "conditions": sorted(condition_texts)}


@pytest.mark.parametrize("name", STORED_SCENARIOS)
def test_stored_recording_gives_expected_result(name, tmp_path):
    file, expected = RECORDINGS / f"{name}.rec", RECORDINGS / "expected.json"
    if os.environ.get("HEALTHD_WRITE_RECORDINGS"):
        write_stored_recording(name, tmp_path)
    replayed_run = run("check", "--replay", str(file), "--json")
    assert summary(replayed_run.document) == json.loads(expected.read_text())[name], replayed_run
    assert file.stat().st_size < 100 << 10


def test_stored_recording_from_real_h100_is_healthy(tmp_path):
    """A virtual machine with one H100, driver 580.159.04. A program had crashed on the GPU. The UUID was replaced."""
    replayed_run = run("check", "--replay", str(RECORDINGS / "h100_virtual.rec"), "--json")
    assert summary(replayed_run.document) == {
        "health": "healthy",
        "conditions": ["info gpu_xid/31 0000:00:06.0", "info gpu_xid/43 0000:00:06.0"],
    }
    assert {result["outcome"] for result in replayed_run.document["results"]} == {"completed"}


def test_stored_recording_with_fewer_checks_gives_same_verdict() -> None:
    """The recording of a fake DGX H100 has 30 of today's checks. Checks that it lacks do not run."""
    replayed_run = run("check", "--replay", str(RECORDINGS / "fewer_checks/two_gpus.rec"), "--json")
    assert summary(replayed_run.document) == {
        "health": "unhealthy",
        "conditions": ["critical gpu_access/lost 0000:61:00.0", "critical gpu_row_remap/failure 0000:c3:00.0"],
    }
    assert [result["outcome"] for result in replayed_run.document["results"]] == ["completed"] * 30


def write_stored_recording(name: str, tmp_path: Path) -> None:
    RECORDINGS.mkdir(exist_ok=True)
    root, scenario = tmp_path / "tree", tmp_path / "scenario.toml"
    root.mkdir()
    node_tree.build(root)
    scenario.write_text(f'profile = "dgx-h100"\n{STORED_SCENARIOS[name]}')
    file = settings(tmp_path, f'node_name = "gpu-042"\n{node_tree.CONFIG}')
    path = str(RECORDINGS / f"{name}.rec")
    arguments = ("--root", str(root), "--fake-nvml", str(scenario), "--config", file, "--profile", "none")
    completed = run("record", path, "--force", *arguments)
    assert completed.status == 0, completed
    expected = RECORDINGS / "expected.json"
    all_expected = json.loads(expected.read_text()) if expected.exists() else {}
    all_expected[name] = summary(run("check", "--replay", path, "--json").document)
    expected.write_text(json.dumps(all_expected, indent=2, sort_keys=True) + "\n")


def test_record_names_command_for_unknown_check(tmp_path, monkeypatch, capsys):
    from healthd.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["record", "clock", "nosuch"]) == 64
    assert capsys.readouterr().err.startswith('healthd record: no check is called "nosuch"')
    assert list(tmp_path.iterdir()) == []
