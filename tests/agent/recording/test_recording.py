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
from tests.cli.test_cli import Done, run, settings

ROOT = Path(__file__).parents[3]
KEPT = Path(__file__).parents[2] / "data" / "recordings"
sys.path.insert(0, str(ROOT / "bench"))

import node_tree  # noqa: E402

PROFILES = ("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200")
# Each is a whole round in separate programs and takes seconds. A difference by Python version appears on any machine.
MOST_ON_ONE_PYTHON = (
    PROFILES[1],
    *(pytest.param(its, marks=pytest.mark.one_python) for its in PROFILES if its != PROFILES[1]),
)


def recorded(*runs: RecordedRun, **fields: Any) -> Recording:
    whole = {"healthd": "0", "node": "n1", "time": 1.0, "kernel": "", "boot_id": "b", "root": "/", "fake_nvml": False}
    return Recording(**{**whole, "checks": (), "runs": runs, **fields})


def a_run(asked: dict[str, list[Any]], check: str = "a", **fields: Any) -> RecordedRun:
    whole = {"instance": "", "outcome": Outcome.COMPLETED, "error": "", "ended": 9.0, "seconds": 1.0}
    return RecordedRun(check, **{**whole, "silent_seconds": 0.0, "answered": True, "asked": asked, **fields})


@pytest.fixture
def taped(tmp_path: Path) -> Iterator[Callable[[Callable[[Recorder], Any]], Player]]:
    """Return a function that records a function call and returns a player of the recording."""

    def tape(look: Callable[[Recorder], Any]) -> Player:
        place = tmp_path / f"notes{len(os.listdir(tmp_path))}"
        place.mkdir()
        recorder = Recorder(str(place))
        recorder.begin("a", "")
        look(recorder)
        notes = recording.read_notes(str(place))
        whole = recorded(a_run(notes["a", ""].answers))
        player = Player(recording.decode(recording.encode(whole), "file"))
        player.begin("a", "")
        return player

    return tape


def outcome(ask: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a call, or the type and text of its exception."""
    try:
        return ask(), ""
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
def test_an_answer_comes_back_as_it_was(value):
    text = json.dumps(recording.pack(value))
    back = recording.unpack(json.loads(text))
    assert back == value
    assert type(back) is type(value)


@given(ERRORS)
def test_an_error_comes_back_with_its_class_number_words_and_file(error):
    back = recording.unpack(json.loads(json.dumps(recording.pack(error))))
    assert (type(back), back.args, str(back)) == (type(error), error.args, str(error))
    assert getattr(back, "filename", None) == getattr(error, "filename", None)


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
def test_an_answer_that_was_tampered_with_is_a_value_error_or_harmless(data):
    player = Player(recorded(a_run({"q": [data]})))
    others = ReplayedLibrary(player)._unpackers
    for kinds in (None, others):
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
def test_nothing_is_made_but_answers(data):
    with pytest.raises(ValueError, match="the recording contains an answer"):
        recording.unpack(data)


# --- questions


def test_the_same_question_is_answered_in_the_order_of_then_and_the_last_answer_holds(taped):
    answers = iter([1, 1, 2, OSError(5, "I/O error", "/f"), 3, 3, 3])

    def answer() -> int:
        found = next(answers)
        if isinstance(found, OSError):
            raise found
        return found

    player = taped(lambda recorder: [outcome(lambda: recorder.record("q", answer)) for _ in range(7)])
    error = "OSError: [Errno 5] I/O error: '/f'"
    given = [outcome(lambda: player.answer("q")) for _ in range(8)]
    assert given == [(1, ""), (1, ""), (2, ""), (None, error), *[(3, "")] * 4]


def test_what_was_never_asked_is_no_answer_of_any_kind(taped):
    host = replaying_host(recorded(), Player(recorded()))
    for ask in (
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
            ask()


def test_a_run_has_its_own_answers_first_and_those_of_the_others_where_it_had_none():
    runs = (a_run({"q": [1], "only a": [2]}), a_run({"q": [3]}, check="b"))
    player = Player(recorded(*runs))
    player.begin("b", "")
    assert (player.answer("q"), player.answer("only a")) == (3, 2)
    player.begin("a", "")
    assert player.answer("q") == 1


def everything(host: Host) -> list[tuple[Any, str]]:
    """Return the result or exception of a host for each kind of question."""
    there = "/proc/sys/kernel/random/boot_id"
    return [
        outcome(ask)
        for ask in (
            lambda: host.read(there),
            lambda: host.read("/binary"),
            lambda: host.read("/none"),
            lambda: host.read("/proc"),
            lambda: host.read("/a\0b"),
            lambda: host.list("/sys/class/infiniband"),
            lambda: host.list("/none"),
            lambda: host.list(there),
            lambda: host.exists("/none"),
            lambda: host.link_target(f"/sys/bus/pci/devices/{node_tree.GPUS[0]}"),
            lambda: host.link_target(there),
            lambda: host.stat(there),
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


def test_a_host_of_a_recording_answers_as_the_host_of_then(node, taped):
    given: list[Any] = []
    player = taped(lambda recorder: given.extend(everything(recording_host(str(node), "dgx-h100", recorder))))
    host = replaying_host(recorded(root=str(node), fake_nvml=True), player)
    assert everything(host) == given
    assert len({str(item) for item in given}) > 15


def test_a_recording_names_no_environment_and_no_deadline(taped):
    def look(recorder: Recorder) -> None:
        host = recording_host("/", "", recorder)
        host.run(["/bin/true"], 5.0, {"TOKEN": "s3cret"}, anywhere=True)

    player = taped(look)
    assert "s3cret" not in str(player._any)
    host = replaying_host(recorded(), player)
    assert host.run(["/bin/true"], 7.0, {"TOKEN": "other"}, anywhere=True) == ProgramResult(0, "", "")


def test_whether_the_driver_is_held_is_asked_of_a_machine_that_is_recorded(tmp_path, taped):
    """The recorder changes nothing: only a fake NVML has no driver on this machine."""
    files = tmp_path / "tree/sys/module/nvidia"
    (files / "holders").mkdir(parents=True)
    (files / "refcnt").write_text("3\n")
    root = str(tmp_path / "tree")
    held: list[Any] = []
    taped(lambda recorder: held.append(recording_host(root, "", recorder).is_driver_in_use()))
    taped(lambda recorder: held.append(recording_host("/", "dgx-h100", recorder).is_driver_in_use()))
    assert held == [True, None]


# --- NVML


def all_of(nvml: Nvml) -> list[Any]:
    """Return the results of every method of every GPU."""
    given: list[Any] = [outcome(nvml.driver_version), outcome(lambda: [gpu.pci for gpu in nvml.gpus()])]
    given.append(outcome(lambda: [str(error) for error in nvml.unreachable]))
    for gpu in outcome(nvml.gpus)[0] or ():
        for name in sorted(set(dir(type(gpu))) - set(dir(object))):
            if name.startswith("_") or name in ("pci", "index", "uuid", "name"):
                continue
            method = getattr(gpu, name)
            for arguments in ((), (0,), (99,), ("sram", True, False), (True, False)):
                try:
                    found = method(*arguments)
                except TypeError:
                    continue
                except NvmlError as error:
                    found = (str(error), error.number)
                given.append((gpu.pci, name, arguments, found))
    return given


def both(taped: Any, fake: str) -> tuple[list[Any], list[Any]]:
    """Return the answers of the fake while it is recorded, and the answers of its recording."""
    first: list[Any] = []

    def look(recorder: Recorder) -> None:
        nvml = open_recorded(recorder, fake)
        first.extend(all_of(nvml))
        nvml.close()

    player = taped(look)
    again = open_replayed(player)
    given = all_of(again)
    again.close()
    return first, given


@pytest.mark.parametrize("profile", PROFILES)
def test_every_call_of_every_machine_is_answered_again(taped, profile):
    then, now = both(taped, profile)
    assert then == now
    assert len(then) > 100


@pytest.mark.parametrize("profile", PROFILES)
def test_a_recording_keeps_the_contract_of_every_nvml(taped, profile):
    player = taped(lambda recorder: assert_contract(open_recorded(recorder, profile)))
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
def test_every_fault_of_nvml_is_answered_again(taped, tmp_path, name):
    file = tmp_path / "scenario.toml"
    file.write_text(f'profile = "dgx-h100"\n{SCENARIOS[name]}\n')
    then, now = both(taped, str(file))
    assert then == now


@pytest.mark.parametrize("word", ["DriverNotLoaded", "LibRmVersionMismatch", "LibraryNotFound"])
def test_an_nvml_that_could_not_be_opened_cannot_be_opened_again(taped, word):
    class Closed:
        NVMLError = pynvml.NVMLError

        def nvmlInit(self) -> None:
            raise getattr(pynvml, f"NVMLError_{word}")

    def opened(any_library: Any) -> tuple[Any, str]:
        return outcome(lambda: Nvml.open(any_library))

    given: list[Any] = []
    player = taped(lambda recorder: given.append(opened(RecordedLibrary(recorder, Closed()))))
    assert opened(ReplayedLibrary(player)) == given[0]
    assert given[0][1].startswith("NvmlError: nvmlInit")


class Odd:
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


def odd(lib: Any) -> list[Any]:
    number, values = ctypes.c_ulonglong(), (pynvml.c_nvmlFieldValue_t * 3)()
    handles = [lib.nvmlNewHandle(1), lib.nvmlNewHandle(2)]
    found = lib.nvmlNewList(handles[0])
    unit = lib.nvmlNewUnit()
    given: list[Any] = [lib.NVML_NEW_CONSTANT, found[:5], vars(found[5])]
    for handle in handles:
        lib.nvmlNewNumber(handle, ctypes.byref(number))
        given.append(number.value)
    given += [outcome(lambda: unit.name), outcome(lambda: unit.id), unit.serial]
    given += [outcome(lib.nvmlNewText), outcome(lib.nvmlNewError)[1].partition(": ")[2]]
    lib.nvmlNewArray(ctypes.byref(values))
    given += [(value.fieldId, value.value.dVal) for value in values]
    given += [getattr(lib, "nvmlNotThere", None), getattr(lib, "c_notThere_t", None)]
    return given


def test_calls_that_nobody_thought_of_are_recorded_too(taped):
    given: list[Any] = []
    player = taped(lambda recorder: given.extend(odd(RecordedLibrary(recorder, Odd()))))
    assert odd(ReplayedLibrary(player)) == given
    assert given[:2] == [42, [1, 2.5, "text", (3, None), {"a": True}]]
    assert given[3:5] == [4097, 4098]


def test_a_call_that_is_not_in_the_recording_is_no_error_of_nvml(taped):
    player = taped(lambda recorder: open_recorded(recorder, "dgx-h100"))
    again = open_replayed(player)
    with pytest.raises(NotRecorded, match=r"not in the recording: nvmlDeviceGetCount\(\)"):
        again.gpus()
    with pytest.raises(NotRecorded, match="nor in the installed nvidia-ml-py: c_newer_t"):
        _ = ReplayedLibrary(player).c_newer_t


def test_a_structure_that_this_binding_does_not_have_is_said():
    for name, fields in (("c_none_t", {}), ("c_nvmlFieldValue_t", {"none": 1}), ("c_nvmlValue_t", "00")):
        with pytest.raises(ValueError, match="the installed nvidia-ml-py has"):
            _structure(name, fields)


def test_the_library_that_is_recorded_is_the_fake_as_it_is():
    assert library("dgx-h100").nvmlInit() is None


# --- notes of the workers


def test_a_worker_that_is_killed_has_noted_all_but_the_answer_it_waits_for(tmp_path):
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


def test_a_run_that_another_worker_did_again_is_that_ones(tmp_path):
    for answer in (1, 2):
        recorder = Recorder(str(tmp_path))
        recorder.begin("a", "")
        recorder.record("q", lambda answer=answer: answer)
    assert recording.read_notes(str(tmp_path))["a", ""].answers == {"q": [2]}


def test_what_does_not_fit_is_left_out_and_what_does_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_BYTES", 2000)
    recorder = Recorder(str(tmp_path))
    recorder.begin("a", "")
    recorder.record("large", lambda: b"x" * 3000)
    recorder.record("small", lambda: b"y")
    assert recording.read_notes(str(tmp_path))["a", ""].answers == {"small": [{"bytes": "y"}]}


def test_a_full_disk_is_no_answer_of_the_node(tmp_path):
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


def test_an_answer_of_a_kind_that_cannot_be_kept_is_unknown_at_the_replay(taped):
    player = taped(lambda recorder: recorder.record("q", lambda: object()))
    assert outcome(lambda: player.answer("q"))[1] == "ValueError: the answer could not be recorded: q"


# --- the file


def test_the_same_recording_is_the_same_bytes():
    whole = recorded(a_run({"b": [1], "a": [2]}), kernel_lines=(KernelLine(1.0, "NVRM", True),))
    assert recording.encode(whole) == recording.encode(recording.decode(recording.encode(whole), "f"))
    assert recording.decode(recording.encode(whole), "f") == whole


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # a fixed time, because the data is part of the test id


def zipped(document: Any) -> bytes:
    return packed(json.dumps(document).encode())


GOOD = recording.encode(recorded(a_run({"q": [1]})))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"hello", "is not a healthd recording, or is truncated"),
        (GOOD[:40], "truncated"),
        (GOOD[: len(GOOD) - 1], "the end is missing"),
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
def test_what_is_no_recording_is_one_sentence(tmp_path, data, words):
    file = tmp_path / "f.rec"
    file.write_bytes(data)
    with pytest.raises(RecordingError) as error:
        recording.read(str(file))
    assert words in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


@given(st.binary(max_size=60), st.integers(0, len(GOOD)), st.integers(0, len(GOOD)))
def test_a_damaged_file_is_a_sentence_or_a_recording(piece, start, end):
    data = GOOD[:start] + piece + GOOD[end:]
    with suppress(RecordingError):
        recording.decode(data, "f")


@given(st.dictionaries(st.sampled_from(sorted(json.loads(gzip.decompress(GOOD)))), JSON))
def test_a_document_that_was_tampered_with_is_a_sentence_or_a_recording(changes):
    with suppress(RecordingError):
        recording.decode(zipped({**json.loads(gzip.decompress(GOOD)), **changes}), "f")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: os.mkfifo(path), lambda path: None])
def test_only_a_file_is_read_and_nothing_is_waited_for(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(RecordingError, match=r"x: (is not a file|cannot be read: No such file)"):
        recording.read(str(tmp_path / "x"))


def test_a_file_is_for_its_owner_and_replaces_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.rec"
    old = os.umask(0)
    try:
        assert recording.write(str(file), recorded()) == file.stat().st_size
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(FileNotFoundError):
        recording.write(str(tmp_path / "none/a.rec"), recorded())
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.rec"]


# --- settings, the kernel log


def test_the_settings_of_then_are_kept_with_their_defaults(tmp_path):
    checks = registry.built_in_checks()
    config = checks["gpu_count"].config()
    table = replay._all_settings(config)
    assert table["timeout_seconds"] == 10.0
    loaded, lost = replay.recorded_settings(recorded(checks=(("gpu_count", "", table),), node="n7"), checks)
    assert (loaded.checks, lost, loaded.settings.node_name) == ({("gpu_count", ""): config}, [], "n7")


@pytest.mark.parametrize(
    ("check", "table", "why"),
    [
        ("fan", {}, 'cannot be replayed: this version has no check "fan"'),
        ("gpu_count", {"newer": 1}, 'its recorded settings: unknown setting "newer"'),
        ("gpu_count", {"expected": "eight"}, "its recorded settings.expected: must be a whole number"),
    ],
)
def test_a_check_that_cannot_be_judged_here_is_a_failed_run(check, table, why):
    loaded, (result,) = replay.recorded_settings(recorded(checks=((check, "", table),)), registry.built_in_checks())
    assert loaded.checks == {}
    assert (result.check, result.outcome) == (check, Outcome.FAILED)
    assert result.error.startswith(why)


def test_the_kernel_log_is_read_again_or_fails_again():
    assert replay.recorded_kernel_log(recorded()) is None
    log = replay.recorded_kernel_log(recorded(kernel_lines=(KernelLine(5.0, "NVRM: x", True),)))
    assert log is not None
    assert log() == [RawLine(5.0, "NVRM: x", True)]
    refused = PermissionError(errno.EPERM, "Operation not permitted", "/dev/kmsg")
    log = replay.recorded_kernel_log(recorded(kernel_error=recording.pack(refused)))
    assert log is not None
    with pytest.raises(PermissionError, match="/dev/kmsg"):
        log()
    with pytest.raises(RecordingError, match="kernel log"):
        replay.recorded_kernel_log(recorded(kernel_error={"error": ["ValueError", "x"]}))


# --- the commands


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("config") / "healthd.toml"
    file.write_text(f'node_name = "gpu-042"\n{node_tree.CONFIG}')
    return str(file)


def without_version(done: Done) -> Any:
    return {key: value for key, value in done.document.items() if key != "version"}


def without_date(replay) -> str:
    return re.sub(r", recorded on .*", "", replay.out).rstrip()


def round_trip(tmp_path: Path, *look: str) -> tuple[Any, Any]:
    """Return the results of `record` and of its replay. Both print the same table."""
    file = str(tmp_path / "round.rec")
    then = run("record", file, *look)
    assert then.status == 0, then
    again = run("check", "--replay", file)
    table = then.out.partition("\nRecorded\n")[0].rstrip()
    assert without_date(again) == table
    assert run("check", "--replay", file).out == again.out
    return then, again


@pytest.mark.parametrize("profile", MOST_ON_ONE_PYTHON)
def test_a_replay_prints_what_the_round_printed(node, config, tmp_path, profile):
    _, again = round_trip(tmp_path, "--root", str(node), "--fake-nvml", profile, "--config", config)
    assert again.out.startswith("gpu-042: ")


@pytest.mark.one_python
def test_a_replay_needs_nothing_of_the_machine_that_it_is_of(config, tmp_path):
    root = tmp_path / "tree"
    root.mkdir()
    node_tree.build(root)
    scenario = tmp_path / "lost.toml"
    scenario.write_text(FAULTS["lost"])
    file = str(tmp_path / "a.rec")
    run("record", file, "--root", str(root), "--fake-nvml", str(scenario), "--config", config)
    before = without_version(run("check", "--replay", file, "--json"))
    shutil.rmtree(root)
    scenario.unlink()
    done = run("check", "--replay", file, "--json")
    assert without_version(done) == before
    assert done.status == 2
    assert "gpu_access/lost" in [c["code"] for c in done.document["conditions"]]


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
def test_a_check_that_looked_twice_does_so_again(node, tmp_path, scenario, seconds, codes):
    fake = tmp_path / "fake.toml"
    fake.write_text(scenario)
    file = settings(tmp_path, f"[checks.gpu_ecc]\ntimeout_seconds = {seconds}\n")
    names = ("gpu_access", "gpu_count", "gpu_ecc", "gpu_nvlink")
    look = (*names, "--root", str(node), "--fake-nvml", str(fake), "--config", file)
    _, again = round_trip(tmp_path, *look)
    assert codes == {code for code in ("gpu_access/hang", "gpu_access/lost") if code in again.out}
    with_settings = run("check", "--replay", str(tmp_path / "round.rec"), "--config", file, *names, "--json").document
    assert codes <= {found["code"] for found in with_settings["conditions"]}


def test_what_hung_is_not_waited_for_again_and_means_the_same(node, tmp_path):
    scenario = tmp_path / "hang.toml"
    scenario.write_text(FAULTS["hang"])
    slow = '[checks.exec.slow]\ncommand = ["/bin/sleep", "90"]\ntimeout_seconds = 2.0\n'
    file = settings(tmp_path, f"[checks.gpu_access]\ntimeout_seconds = 0.5\n{slow}{node_tree.CONFIG}")
    rec = str(tmp_path / "hang.rec")
    done = run("record", rec, "--root", str(node), "--fake-nvml", str(scenario), "--config", file)
    assert done.status == 0, done
    assert "gpu_access had no answer to: nvmlInit()" in done.out
    began = time.monotonic()
    again = run("check", "--replay", rec)
    assert time.monotonic() - began < 60
    assert without_date(again) == done.out.partition("\nRecorded\n")[0].rstrip()
    assert "gpu_access/hang" in again.out
    assert again.status == 3


def test_a_worker_that_died_is_a_failed_run_again_and_the_others_are_judged(node, config, tmp_path):
    scenario = tmp_path / "crash.toml"
    scenario.write_text(FAULTS["crash"])
    look = ("--root", str(node), "--fake-nvml", str(scenario), "--config", config)
    then, again = round_trip(tmp_path, *look)
    assert "the worker died (signal 9)" in again.out
    assert "had no answer to: nvmlDeviceGetEccMode(nvmlDeviceGetHandleByIndex(2))" in " ".join(then.out.split())


@pytest.mark.one_python
def test_a_mount_that_is_missing_is_missing_again_on_a_machine_that_has_it(node, tmp_path):
    file = settings(tmp_path, f'{node_tree.CONFIG}[checks.mount."/scratch"]\n')
    _, again = round_trip(tmp_path, "mount", "--root", str(node), "--fake-nvml", "dgx-h100", "--config", file)
    assert "mount/missing /scratch" in again.out
    assert again.status == 2


def test_a_program_is_run_when_it_is_recorded_and_never_again(tmp_path):
    program, count = tmp_path / "program", tmp_path / "count"
    program.write_text(f"#!/bin/sh\necho run >> {count}\necho the fan is loud\nexit 2\n")
    program.chmod(0o755)
    file = settings(tmp_path, f'[checks.exec.fan]\ncommand = ["{program}"]\n')
    _, again = round_trip(tmp_path, "exec", "--config", file)
    assert "the fan is loud" in again.out
    assert count.read_text() == "run\n"


@pytest.mark.one_python
def test_a_replay_of_one_check_alone_needs_no_other(node, config, tmp_path):
    file = str(tmp_path / "a.rec")
    run("record", file, "--root", str(node), "--fake-nvml", "dgx-h100", "--config", config)
    everything = {r["check"]: r for r in run("check", "--replay", file, "--json").document["results"]}
    for name in ("gpu_nvlink", "pcie_aer", "gpu_count"):
        (alone,) = run("check", name, "--replay", file, "--json").document["results"]
        assert alone == everything[name]
    refused = run("check", "nonsense", "--replay", file)
    assert (refused.status, refused.out) == (64, "")


def test_other_settings_judge_a_recording_by_theirs(node, config, tmp_path):
    file = str(tmp_path / "a.rec")
    run("record", file, "--root", str(node), "--fake-nvml", "dgx-h100", "--config", config)
    other = settings(tmp_path, "[checks.gpu_count]\nexpected = 16\n")
    done = run("check", "gpu_count", "--replay", file, "--config", other, "--json")
    assert [c["code"] for c in done.document["conditions"]] == ["gpu_count/fewer_than_expected"]
    assert done.document["node"] == "gpu-042"


@pytest.mark.one_python
@pytest.mark.parametrize("below", ["profile", "baseline"])
def test_other_settings_lose_no_finding_of_the_nodes_profile_and_baseline(node, config, tmp_path, below):
    """Neither belongs to the replaying machine, nor to the settings file."""
    fake, file = tmp_path / "fake.toml", str(tmp_path / "a.rec")
    fake.write_text('profile = "dgx-h100"\ngpu.3.gone = true\n')
    layer = tmp_path / f"{below}.toml"
    layer.write_text("[checks.gpu_count]\nexpected = 8\n")
    look = ("--root", str(node), "--fake-nvml", str(fake), "--config", config)
    assert run("record", file, *look, f"--{below}", str(layer)).status == 0
    layer.unlink()
    other = settings(tmp_path, "[checks.gpu_ecc]\ntimeout_seconds = 9.0\n")
    then, again = (
        {(found["code"], found["severity"]) for found in document["conditions"]}
        for document in (
            run("check", "--replay", file, "--json").document,
            run("check", "--replay", file, "--config", other, "--json").document,
        )
    )
    severity = "warning" if below == "profile" else "degraded"
    assert ("gpu_count/fewer_than_expected", severity) in then & again
    none = settings(tmp_path, 'profile = "none"\nbaseline_file = ""\n')
    without = run("check", "--replay", file, "--config", none, "--json").document
    assert "gpu_count/fewer_than_expected" not in {found["code"] for found in without["conditions"]}


@pytest.mark.one_python
def test_other_settings_lose_no_check_that_was_recorded_by_its_name(node, config, tmp_path):
    fake, file = tmp_path / "fake.toml", str(tmp_path / "a.rec")
    fake.write_text('profile = "dgx-h100"\ngpu.3.processes = [4711]\n')
    run("record", file, "gpu_processes", "--root", str(node), "--fake-nvml", str(fake), "--config", config)
    codes = [
        [found["code"] for found in run("check", "--replay", file, "--json", *more).document["conditions"]]
        for more in ((), ("--config", config))
    ]
    assert codes[0] == codes[1] != []


def test_a_check_that_asks_more_than_was_recorded_is_unknown_and_only_it(node, config, tmp_path):
    file = tmp_path / "a.rec"
    look = ("--root", str(node), "--fake-nvml", "dgx-h100", "--config", config)
    run("record", str(file), "gpu_count", "pcie_aer", *look)
    whole = recording.read(str(file))
    device = f"/sys/bus/pci/devices/{node_tree.GPUS[0]}/aer_dev_fatal"
    for run_of_then in whole.runs:
        run_of_then.asked.pop(f"read {device}", None)
    file.unlink()
    recording.write(str(file), whole)
    done = run("check", "--replay", str(file), "--json")
    outcomes = {r["check"]: r["outcome"] for r in done.document["results"]}
    assert outcomes == {"gpu_count": "completed", "pcie_aer": "failed"}, done
    assert "not in the recording" in done.document["unknown"][0]
    assert (done.status, done.document["health"]) == (3, "unknown")


def test_a_check_of_a_site_that_is_not_here_is_unknown_with_a_sentence(tree_of_nothing, tmp_path):
    site = tmp_path / "checks.d"
    site.mkdir(mode=0o755)
    (site / "fan.py").write_text("def run(host, config, past):\n    yield from ()\n")
    (site / "fan.py").chmod(0o644)
    rec = str(tmp_path / "a.rec")
    file = settings(tmp_path, f'checks_dir = "{site}"\n')
    assert run("record", rec, "fan", "gpu_count", "--config", file, "--root", tree_of_nothing).status == 0
    done = run("check", "--replay", rec)
    assert done.status == 3
    assert 'fan failed: cannot be replayed: this version has no check "fan"' in done.out
    assert "gpu_count  completed" in done.out


XID = "NVRM: Xid (PCI:0000:61:00): 79, pid=4711, name=python3, GPU has fallen off the bus."


def look_with(setup: Setup, *arguments: Any) -> one_round.RoundResult:
    runner = WorkerClient(setup, "", time.monotonic)
    try:
        return one_round.run_round(*arguments[:2], runner, *arguments[2:])
    finally:
        runner.close(1.0)


def test_the_document_of_a_replay_is_that_of_the_round_to_the_last_digit(node, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    scenario, notes, file = tmp_path / "lost.toml", tmp_path / "notes", str(tmp_path / "a.rec")
    scenario.write_text(FAULTS["lost"])
    notes.mkdir()
    checks = registry.built_in_checks()
    table = {"root": str(node), "nvml": {"fake": str(scenario)}, "checks": {"mount": {"/data": {}, "/none": {}}}}
    loaded = resolve_settings(table, "file", {}, checks)
    lines = [RawLine(1000.0, XID, True), RawLine(2000.5, XID, False)]
    setup = Setup(str(node), str(scenario), record=str(notes))
    then = look_with(setup, loaded, checks, lambda: lines)
    recording.write(file, replay.record(loaded, then, recording.read_notes(str(notes))))

    whole = recording.read(file)
    of_then, lost = replay.recorded_settings(whole, checks)
    again = look_with(Setup(replay=file), of_then, checks, replay.recorded_kernel_log(whole), whole, lost)
    assert one_round.round_json(again) == one_round.round_json(then)
    assert {"gpu_xid", "gpu_access", "mount"} <= {c.check for c in again.verdict.conditions}


def test_the_real_binding_is_recorded_and_its_recording_needs_no_driver(tmp_path):
    """Use pynvml itself, with a libnvidia-ml.so.1 that fails for one GPU."""
    file, names = str(tmp_path / "a.rec"), ("gpu_access", "gpu_count", "gpu_ecc", "gpu_nvlink", "gpu_row_remap")
    env = stub_nvml.environment(tmp_path, STUB_ERRORS="*@1=15")
    argv = [sys.executable, "-m", "healthd", "record", file, *names]
    then = subprocess.run(argv, env={**env, "COLUMNS": "100"}, capture_output=True, text=True, timeout=240)
    assert then.returncode == 0, then
    again = run("check", "--replay", file)
    assert without_date(again) == then.stdout.partition("\nRecorded\n")[0].rstrip()
    assert "gpu_access/lost 0000:43:00.0" in again.out
    assert recording.read(file).fake_nvml is False


@pytest.fixture
def tree_of_nothing(tmp_path: Path) -> str:
    path = tmp_path / "nothing"
    path.mkdir()
    return str(path)


def test_this_machine_is_recorded_and_replayed(tmp_path):
    """Use the real hardware and user of the test run."""
    round_trip(tmp_path)


def test_a_file_that_is_there_is_not_replaced_unasked(tree_of_nothing, tmp_path):
    file = tmp_path / "a.rec"
    file.write_text("mine")
    look = ("gpu_count", "--root", tree_of_nothing)
    done = run("record", str(file), *look)
    assert (done.status, done.out) == (1, "")
    assert done.err == f"healthd record: {file}: already exists; --force replaces it\n"
    assert file.read_text() == "mine"
    assert run("record", str(file), "--force", *look).status == 0
    assert run("check", "--replay", str(file)).status == 0


def test_where_no_file_can_be_written_nothing_is_looked_at(tree_of_nothing, tmp_path):
    for place, why in (
        ("/dev/null", "/dev/null: exists and is not a file"),
        (str(tmp_path), f"{tmp_path}: exists and is not a file"),
        (f"{tmp_path}/none/a.rec", f"{tmp_path}/none: no such directory"),
    ):
        done = run("record", place, "--force", "--root", tree_of_nothing)
        assert (done.status, done.out, done.err) == (1, "", f"healthd record: {why}\n")


def test_a_file_that_is_no_recording_is_wrong_use(tmp_path):
    file = tmp_path / "a.rec"
    file.write_text("garbage")
    for path, words in ((file, "is not a healthd recording"), (tmp_path / "none", "cannot be read: No such file")):
        done = run("check", "--replay", str(path))
        assert (done.status, done.out, done.err.count("\n")) == (64, "", 1)
        assert words in done.err


def test_a_recording_says_what_is_looked_at_and_nothing_else_may(tmp_path):
    done = run("check", "--replay", "a.rec", "--root", "/")
    assert (done.status, done.err) == (
        64,
        "healthd check: --root cannot be used with --replay; the recording has its own\n",
    )
    done = run("check", "--replay", "a.rec", "--profile", "none")
    assert done.status == 64
    assert done.err.endswith("the recording has its own; use --config for other settings\n")


# --- stored recordings


KEPT_SCENARIOS = {
    "healthy": "",
    "lost_gpu": "gpu.3.lost = true\n",
    "worn_memory": "gpu.5.remap_failure = true\ngpu.1.nvlink_inactive = [4]\n",
}


def found_in(document: Any) -> dict[str, Any]:
    told = [f"{c['severity']} {c['code']} {c['subject']}".strip() for c in document["conditions"]]
    return {"health": document["health"], "conditions": sorted(told)}


@pytest.mark.parametrize("name", KEPT_SCENARIOS)
def test_a_recording_that_is_kept_gives_what_it_always_gave(name, tmp_path):
    file, expected = KEPT / f"{name}.rec", KEPT / "expected.json"
    if os.environ.get("HEALTHD_WRITE_RECORDINGS"):
        write_kept(name, tmp_path)
    done = run("check", "--replay", str(file), "--json")
    assert found_in(done.document) == json.loads(expected.read_text())[name], done
    assert file.stat().st_size < 100 << 10


def test_a_real_h100_after_a_program_crashed_on_it_is_well_and_its_kernel_log_is_history(tmp_path):
    """A virtual machine with one H100, driver 580.159.04. A program had crashed on the GPU. The UUID was replaced."""
    done = run("check", "--replay", str(KEPT / "h100_virtual.rec"), "--json")
    assert found_in(done.document) == {
        "health": "healthy",
        "conditions": ["info gpu_xid/31 0000:00:06.0", "info gpu_xid/43 0000:00:06.0"],
    }
    assert {result["outcome"] for result in done.document["results"]} == {"completed"}


def test_a_recording_with_fewer_checks_gives_the_verdict_of_then() -> None:
    """The recording of a fake DGX H100 has 30 of today's checks. Checks that it lacks do not run."""
    done = run("check", "--replay", str(KEPT / "fewer_checks/two_gpus.rec"), "--json")
    assert found_in(done.document) == {
        "health": "unhealthy",
        "conditions": ["critical gpu_access/lost 0000:61:00.0", "critical gpu_row_remap/failure 0000:c3:00.0"],
    }
    assert [result["outcome"] for result in done.document["results"]] == ["completed"] * 30


def write_kept(name: str, tmp_path: Path) -> None:
    KEPT.mkdir(exist_ok=True)
    root, scenario = tmp_path / "tree", tmp_path / "scenario.toml"
    root.mkdir()
    node_tree.build(root)
    scenario.write_text(f'profile = "dgx-h100"\n{KEPT_SCENARIOS[name]}')
    file = settings(tmp_path, f'node_name = "gpu-042"\n{node_tree.CONFIG}')
    path = str(KEPT / f"{name}.rec")
    look = ("--root", str(root), "--fake-nvml", str(scenario), "--config", file, "--profile", "none")
    done = run("record", path, "--force", *look)
    assert done.status == 0, done
    expected = KEPT / "expected.json"
    known = json.loads(expected.read_text()) if expected.exists() else {}
    known[name] = found_in(run("check", "--replay", path, "--json").document)
    expected.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def test_a_check_that_is_not_there_is_told_by_the_command_that_was_typed(tmp_path, monkeypatch, capsys):
    from healthd.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["record", "clock", "nosuch"]) == 64
    assert capsys.readouterr().err.startswith('healthd record: no check is called "nosuch"')
    assert list(tmp_path.iterdir()) == []
