"""The client's end of the control socket. `ask` never waits longer than it says."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from contextlib import suppress
from typing import Any, NamedTuple

from healthd.common.errors import HealthdError
from healthd.common.paths import SOCKET

PATIENCE_SECONDS = 5.0
AGAIN_SECONDS = 0.1
MAX_ANSWER_BYTES = 64 << 20


class NoAnswer(HealthdError):
    """One sentence: why there is no answer of a daemon."""


class RefusedByDaemon(HealthdError):
    """One sentence of the daemon: why it does not do what was asked."""


class Answer(NamedTuple):
    """uid: the user that the answering process ran as when it began to listen (SO_PEERCRED, unix(7))."""

    table: dict[str, Any]
    uid: int


def ask(runtime_dir: str, request: dict[str, Any], patience_seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """The daemon's answer to one request; who is turned away tries again. Raises NoAnswer, RefusedByDaemon."""
    return ask_with_uid(runtime_dir, request, patience_seconds).table


def ask_with_uid(runtime_dir: str, request: dict[str, Any], patience_seconds: float = PATIENCE_SECONDS) -> Answer:
    """Send one request, again if the daemon has no place for it yet. Raises NoAnswer, RefusedByDaemon."""
    deadline = time.monotonic() + patience_seconds
    answer, uid = dict[str, Any](), -1
    while True:
        try:
            answer, uid = _asked(os.path.join(runtime_dir, SOCKET), request, deadline, patience_seconds)
        except NoAnswer:
            if not answer:
                raise
            break  # it answers, and has no time for us: what it said before stands
        if not answer.get("again") or time.monotonic() + AGAIN_SECONDS > deadline:
            break
        time.sleep(AGAIN_SECONDS)
    if "error" in answer:
        raise RefusedByDaemon(str(answer["error"]))
    return Answer(answer, uid)


def _asked(path: str, request: dict[str, Any], deadline: float, patience_seconds: float) -> Answer:
    """One answer, a refusal too. Raises NoAnswer."""
    try:
        line, uid = _exchange(path, json.dumps(request).encode() + b"\n", deadline)
    except FileNotFoundError:
        raise NoAnswer(f"healthd is not running (no {path})") from None
    except ConnectionRefusedError:
        raise NoAnswer(f"healthd is not running (nothing listens at {path})") from None
    except BlockingIOError:
        raise NoAnswer(f"healthd does not answer at {path} (no connection within {patience_seconds:g} s)") from None
    except TimeoutError:
        raise NoAnswer(f"healthd does not answer at {path} (no reply within {patience_seconds:g} s)") from None
    except OSError as error:
        raise NoAnswer(f"healthd cannot be asked at {path}: {error.strerror or error}") from None
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        what = "nonsense" if line else "nothing: it may be stopping"
        raise NoAnswer(f"healthd at {path} answered {what}")
    return Answer(answer, uid)


def _exchange(path: str, request: bytes, deadline: float) -> tuple[bytes, int]:
    """Send `request` and read to the end of the stream. Return the answer and the uid of the listening process.

    Raises OSError; BlockingIOError if the daemon's queue is full until the deadline, TimeoutError at the deadline, even
    if the answer drips in.
    """
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        _connect(stream, path, deadline)
        _, uid, _ = struct.unpack("iII", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        stream.settimeout(_left(deadline))
        with suppress(ConnectionError):  # it hung up on us before we had said all; why, can be read all the same
            stream.sendall(request)
        with suppress(ConnectionError):
            while len(answer) < MAX_ANSWER_BYTES:
                stream.settimeout(_left(deadline))
                chunk = stream.recv(1 << 16)
                if not chunk:
                    break
                answer += chunk
    return bytes(answer), int(uid)


def _connect(stream: socket.socket, path: str, deadline: float) -> None:
    """Blocking, so that where the daemon's queue is full the kernel lets us wait for a place, in turn; a Python
    time-out makes it fail at once instead (unix(7): EAGAIN). A kernel that does not wait (gVisor's) is asked again."""
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(left))
        try:
            stream.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(min(AGAIN_SECONDS, left))
        else:
            return


def _timeval(seconds: float) -> bytes:
    """As setsockopt(2) wants it. 0 would mean: for ever."""
    return struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1_000_000)))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
