"""Safe reader for pickles that contain plain data: dicts, lists, tuples, text, numbers. No class is loaded or called.

The opcodes are validated first. Only those that PyTorch (torch/csrc/jit/serialization/pickler.cpp) and Python use to
write plain data are allowed. Python's pickletools describes each opcode. Any other opcode is rejected before Python's
unpickler reads the file, so no class or function is ever looked up. The sizes of the memo and the containers are
limited, because a small file could make them large.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, NoReturn

from healthd.common.errors import HealthdError

MAX_CONTAINERS = 8_000_000  # lists, dicts, tuples and memo entries; one byte can create 40 bytes or more
_CONTAINER_OPCODES = b"]}tl\x85\x86\x87\x94"

# Opcodes with arguments of fixed length. The memo is an array in memory; at most 2^20 entries are allowed.
_FIXED = re.compile(
    rb"(?:"
    rb"[(\]})tlsuaeN\x85-\x89\x94]"  # containers, tuples, None, True, False, memoize
    rb"|[Kqh]."  # a byte; the memo
    rb"|M.."
    rb"|J...."
    rb"|[rj]..[\x00-\x0f]\x00"
    rb"|G.{8}"  # a float
    rb"|\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"  # a whole number
    rb"|\x95.{8}"  # a frame: number of bytes to read ahead
    rb"|\x80[\x02-\x05]"
    rb"){1,1000}",
    re.DOTALL,
)
# Opcodes that name a class or function, call one, or set an object's attributes.
_UNSAFE_OPCODES = frozenset(b"ciobRPQ\x81\x82\x83\x84\x92\x93\x97\x98")
_LENGTH_SIZES = {ord("X"): 4, 0x8C: 1, 0x8D: 8}  # number of bytes in the length before a text
_STOP = ord(".")


class UnsafePickle(HealthdError):
    """Raised if a pickle is damaged or contains more than plain data. The message completes a sentence that begins with
    the file's name.
    """


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that refuses every class, in case validation missed one."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"names {module_name}.{global_name}")


def load_plain(data: bytes) -> Any:
    """Load the plain data from a pickle. Raises UnsafePickle."""
    validate(data)
    try:
        return _PlainUnpickler(io.BytesIO(data), fix_imports=False, encoding="utf-8", errors="strict").load()
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError, IndexError, KeyError, AttributeError) as error:
        raise UnsafePickle(f"is a damaged pickle ({type(error).__name__})") from None
    except (MemoryError, RecursionError, OverflowError):
        raise UnsafePickle("is a pickle that would take too much memory") from None


def validate(data: bytes) -> None:
    """Raise UnsafePickle if a pickle contains more than plain data, is truncated, or would use too much memory."""
    # This also counts bytes in text and numbers. The opcodes are counted exactly only beyond the limit.
    counting = _containers(data) > MAX_CONTAINERS
    offset, end, containers = 0, len(data), 0
    while offset < end:
        match = _FIXED.match(data, offset)
        if match is not None:
            offset = match.end()
            if counting:
                containers += _containers(match.group())
                if containers > MAX_CONTAINERS:
                    raise UnsafePickle("is a pickle that would take too much memory")
            continue
        opcode = data[offset]
        if opcode == _STOP:
            return
        if opcode in _UNSAFE_OPCODES:
            raise UnsafePickle("is a pickle that names or calls a class or function; nothing was loaded")
        size = _LENGTH_SIZES.get(opcode)
        if size is None:
            is_truncatable = opcode in b"(]})tlsuaeN\x85\x86\x87\x88\x89\x94KqhMJrjG\x8a\x95\x80"
            if is_truncatable and end - offset <= 9:
                break
            raise UnsafePickle(f"is not a pickle of plain data (opcode {opcode:#04x} at byte {offset:,})")
        offset += 1 + size + int.from_bytes(data[offset + 1 : offset + 1 + size], "little")
    raise UnsafePickle("is a truncated pickle")


def _containers(opcodes: bytes) -> int:
    return len(opcodes) - len(opcodes.translate(None, _CONTAINER_OPCODES))
