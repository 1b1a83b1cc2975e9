"""Hosts for recordings: one records the checks' questions and the answers, the other answers from a recording.

NVML is recorded call by call, below nvml.py, which runs on a recording as it does on pynvml. This module contains no
NVML functions. A call is identified by its text: "nvmlDeviceGetName(nvmlDeviceGetHandleByIndex(0))", where a device is
represented by the call that returned it. Structures are stored field by field. Structures that a call fills (passed by
reference) are part of its answer. An error is stored as NVML's number and message.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from healthd.agent.recording.recording import NotRecorded, Player, Recorder, Recording, pack, unpack
from healthd.common.errors import HealthdError
from healthd.host.host import Host
from healthd.host.system import Tree

if TYPE_CHECKING:
    from healthd.nvidia.nvml import Nvml


_Reference: Any = type(ctypes.byref(ctypes.c_int()))
_Pointer: Any = ctypes.POINTER(ctypes.c_int).__mro__[1]
_Simple: Any = ctypes.c_int.__mro__[1]
# The question is the program or path, not the deadline or the position.
FIRST_ARGUMENT_ONLY = ("run", "stat", "readlink")


class RecordedSystem:
    """Replacement for a `Tree` that forwards to another `Tree` and records the answers."""

    def __init__(self, recorder: Recorder, tree: Tree) -> None:
        self._recorder = recorder
        self._tree = tree

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._tree, name)
        return lambda *arguments: self._recorder.record(question_text(name, arguments), lambda: function(*arguments))


class ReplayedSystem:
    """Replacement for a `Tree` that answers from a recording."""

    def __init__(self, player: Player) -> None:
        self._player = player

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._player.answer(question_text(name, arguments))


def recording_host(root: str, fake_nvml: str, recorder: Recorder) -> Host:
    tree = cast(Tree, RecordedSystem(recorder, Tree(root.rstrip("/"))))
    return Host(
        root,
        partial(open_recorded, recorder, fake_nvml),
        lambda: recorder.record("now", time.time),
        tree,
        is_nvml_substituted=bool(fake_nvml),
    )


def replaying_host(recording: Recording, player: Player) -> Host:
    tree = cast(Tree, ReplayedSystem(player))
    now = cast("Callable[[], float]", lambda: player.answer("now"))
    return Host(recording.root, partial(open_replayed, player), now, tree, is_nvml_substituted=recording.fake_nvml)


def question_text(name: str, arguments: Sequence[Any]) -> str:
    """Return a question as text, such as "read /proc/uptime" or 'run ["ipmitool", "sel"]'."""
    relevant = arguments[:1] if name in FIRST_ARGUMENT_ONLY else arguments
    return " ".join([name, *(item if isinstance(item, str) else json.dumps(item, default=list) for item in relevant)])


def open_recorded(recorder: Recorder, fake_nvml: str) -> Nvml:
    from healthd.nvidia.nvml import Nvml

    if fake_nvml:
        from healthd.nvidia.fake_nvml import library
    else:
        from healthd.nvidia.nvml_binding import pynvml
    nvml_library = library(fake_nvml) if fake_nvml else pynvml()
    return Nvml.open(RecordedLibrary(recorder, nvml_library))


def open_replayed(player: Player) -> Nvml:
    from healthd.nvidia.nvml import Nvml

    return Nvml.open(ReplayedLibrary(player))


class ReplayedError(HealthdError):
    """An error like pynvml's. `value` is NVML's number."""

    def __init__(self, number: int, message: str = "") -> None:
        self.value = number
        self._message = message

    def __str__(self) -> str:
        return self._message or _nvml_message(self.value)


def _nvml_message(number: int) -> str:
    import pynvml

    return str(pynvml.NVMLError(number))


class Handle:
    """Replacement for an NVML handle. `call` is the call that returned it."""

    def __init__(self, call: str) -> None:
        self.call = call


class RecordedLibrary:
    """Wrapper for pynvml or a compatible library that records each call."""

    def __init__(self, recorder: Recorder, library: Any) -> None:
        self._recorder = recorder
        self._library = library
        self._handles: dict[int, tuple[Any, str]] = {}  # by id(); the object is kept so that its id stays unique

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name, None)
        if found is None or isinstance(found, int | str):
            # The existence of a name in the binding and the value of a constant are recorded as answers, too.
            self._recorder.record(f"pynvml {name}", lambda: found)
            if found is None:
                raise AttributeError(name)
            return found
        return found if isinstance(found, type) or name == "nvmlShutdown" else self._recorded_function(name, found)

    def _recorded_function(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            call_text = describe_call(name, arguments, self._handle_call)
            answer: Any = None

            def perform() -> tuple[Any, list[Any]]:
                nonlocal answer
                answer = function(*arguments)
                return answer, [_referred(item) for item in arguments if isinstance(item, _Reference)]

            self._recorder.record(call_text, perform, lambda value: self._pack(value, call_text))
            return answer

        return call

    def _handle_call(self, handle: Any) -> str:
        return self._handles.get(id(handle), (None, f"<{type(handle).__name__}>"))[1]

    def _pack(self, value: Any, call_text: str) -> Any:
        def pack_inner(value: Any) -> Any:
            return self._pack(value, call_text)

        if isinstance(value, Exception):
            if not isinstance(value, self._library.NVMLError):
                raise TypeError
            return {"nvml": [getattr(value, "value", 0), str(value)]}
        if isinstance(value, ctypes.Structure | ctypes.Union):
            return {"struct": [type(value).__name__, structure_fields(value)]}
        if isinstance(value, ctypes.Array):
            return [pack(item, pack_inner) for item in value]
        if isinstance(value, _Simple):
            return pack(value.value, pack_inner)
        if not isinstance(value, _Pointer) and hasattr(value, "__dict__"):  # pynvml's "friendly objects"
            return {"object": {name: pack(item, pack_inner) for name, item in vars(value).items()}}
        return {"handle": self._handles.setdefault(id(value), (value, call_text))[1]}


class ReplayedLibrary:
    """A recording that can be called like pynvml."""

    NVMLError = ReplayedError

    def __init__(self, player: Player) -> None:
        self._player = player
        self._unpackers: dict[str, Callable[[Any], Any]] = {
            "nvml": lambda inner: ReplayedError(*inner),
            "struct": lambda inner: _structure(*inner),
            "object": self._object,
            "handle": Handle,
        }

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlShutdown":
            return lambda: None  # this function does not read anything
        if self._player.has(f"pynvml {name}"):
            found = self._player.answer(f"pynvml {name}")
            if found is None:
                raise AttributeError(name)
            return found
        if name.startswith("nvml") and not _is_type(name):
            return lambda *arguments: self._replay(name, arguments)
        import pynvml

        if not hasattr(pynvml, name):
            raise NotRecorded(f"not in the recording, nor in the installed nvidia-ml-py: {name}")
        return getattr(pynvml, name)

    def _object(self, inner: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: unpack(item, self._unpackers) for name, item in inner.items()})

    def _replay(self, name: str, arguments: Sequence[Any]) -> Any:
        call_text = describe_call(name, arguments, lambda handle: getattr(handle, "call", f"<{type(handle).__name__}>"))
        answer, filled = self._player.answer(call_text, self._unpackers)
        targets = [_referred(item) for item in arguments if isinstance(item, _Reference)]
        for target, source in zip(targets, filled, strict=True):
            _put(target, source)
        return answer


def _put(target: Any, source: Any) -> None:
    """Copy the recorded result into the target of byref()."""
    if isinstance(target, _Simple):
        target.value = source
    elif isinstance(target, ctypes.Array):
        for index, item in enumerate(source):
            target[index] = item
    else:
        ctypes.pointer(target)[0] = source


def _is_type(name: str) -> bool:
    import pynvml

    return isinstance(getattr(pynvml, name, None), type | int)


def _referred(reference: Any) -> Any:
    """Return the object that was passed to byref()."""
    return reference._obj


# --- text of a call


def describe_call(name: str, arguments: Sequence[Any], describe_handle: Callable[[Any], str]) -> str:
    return f"{name}({', '.join(_describe(item, describe_handle) for item in arguments)})"


def _describe(value: Any, describe_handle: Callable[[Any], str]) -> str:
    """Return an argument as text. For a structure, the text contains the non-zero fields: the version and the
    request.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe(item, describe_handle) for item in value)}]"
    if isinstance(value, _Reference):
        return _describe(_referred(value), describe_handle)
    if isinstance(value, _Simple):
        return repr(value.value)
    if isinstance(value, ctypes.Array):
        return _describe(list(value), describe_handle)
    if isinstance(value, ctypes.Structure):
        fields = [f"{name}={inner}" for name, inner in _members(value, describe_handle) if inner]
        return f"{type(value).__name__}({', '.join(fields)})"
    return describe_handle(value)


def _members(structure: Any, describe_handle: Callable[[Any], str]) -> Iterator[tuple[str, str]]:
    for name, _kind in _layout(type(structure)):
        value = _field(structure, name)
        plain = isinstance(value, int | float | bytes)
        yield name, repr(value) if plain and value else ""


# --- structures, field by field


def _layout(kind: Any) -> list[tuple[str, Any]]:
    """Return each field's name and type, including inherited fields."""
    return [(entry[0], entry[1]) for owner in reversed(kind.__mro__) for entry in vars(owner).get("_fields_", ())]


def _field(structure: Any, name: str) -> Any:
    """Return the field as ctypes reads it. pynvml's classes decode bytes, and fail if the bytes are not text."""
    return getattr(type(structure), name).__get__(structure)


def structure_fields(structure: Any) -> Any:
    """Return a structure's fields by name, or a union's bytes. Addresses are left out."""
    if isinstance(structure, ctypes.Union):
        return bytes(structure).hex()
    return {
        name: _packed(_field(structure, name))
        for name, kind in _layout(type(structure))
        if not issubclass(kind, _Pointer | ctypes.c_void_p | ctypes.c_char_p)
    }


def _packed(value: Any) -> Any:
    if isinstance(value, ctypes.Structure | ctypes.Union):
        return structure_fields(value)
    return [_packed(item) for item in value] if isinstance(value, ctypes.Array) else pack(value)


def _structure(name: str, fields: Any) -> Any:
    import pynvml

    kind = getattr(pynvml, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ctypes.Structure | ctypes.Union)):
        raise ValueError(f"the installed nvidia-ml-py has no {name}")
    made = kind.from_buffer_copy(bytes(ctypes.sizeof(kind)))
    _fill(made, fields)
    return made


def _fill(structure: Any, fields: Any) -> None:
    """Fill a structure. Raises ValueError if the structure differs in this binding."""
    if isinstance(structure, ctypes.Union):
        data = bytes.fromhex(fields)
        if len(data) != ctypes.sizeof(structure):
            raise ValueError(f"the installed nvidia-ml-py has a different {type(structure).__name__}")
        ctypes.memmove(ctypes.addressof(structure), data, len(data))
        return
    layout = dict(_layout(type(structure)))
    for name, value in fields.items():
        if name not in layout:
            raise ValueError(f"the installed nvidia-ml-py has no {type(structure).__name__}.{name}")
        current = _field(structure, name)
        if isinstance(current, ctypes.Structure | ctypes.Union):
            _fill(current, value)
        elif isinstance(current, ctypes.Array):
            for index, item in enumerate(value):
                if isinstance(current[index], ctypes.Structure | ctypes.Union):
                    _fill(current[index], item)
                else:
                    current[index] = unpack(item)
        else:
            getattr(type(structure), name).__set__(structure, unpack(value))
