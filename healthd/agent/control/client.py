"""Client for the control socket. All requests have a deadline."""

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

TIMEOUT_SECONDS = 5.0
RETRY_SECONDS = 0.1
MAX_ANSWER_BYTES = 64 << 20


class DaemonUnreachable(HealthdError):
    """Raised if the daemon does not answer. The message is one sentence."""


class RefusedByDaemon(HealthdError):
    """Raised if the daemon refused the request. The message is the sentence that the daemon sent."""


class Answer(NamedTuple):
    """The daemon's answer. `uid` is the daemon's user when it began to listen (SO_PEERCRED, unix(7))."""

    document: dict[str, Any]
    uid: int


def send_request(runtime_dir: str, request: dict[str, Any], timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """Return the daemon's answer to one request. Raises DaemonUnreachable or RefusedByDaemon."""
    return send_request_with_uid(runtime_dir, request, timeout_seconds).document


def send_request_with_uid(
    runtime_dir: str, request: dict[str, Any], timeout_seconds: float = TIMEOUT_SECONDS
) -> Answer:
    """Send one request, and retry while the daemon has too many connections.

    Raises DaemonUnreachable or RefusedByDaemon.
    """
    deadline = time.monotonic() + timeout_seconds
    answer, uid = dict[str, Any](), -1
    while True:
        try:
            answer, uid = _send_once(os.path.join(runtime_dir, SOCKET), request, deadline, timeout_seconds)
        except DaemonUnreachable:
            if not answer:
                raise
            break  # keep the earlier answer
        if not answer.get("again") or time.monotonic() + RETRY_SECONDS > deadline:
            break
        time.sleep(RETRY_SECONDS)
    if "error" in answer:
        raise RefusedByDaemon(str(answer["error"]))
    return Answer(answer, uid)


def _send_once(path: str, request: dict[str, Any], deadline: float, timeout_seconds: float) -> Answer:
    """Send the request once and return the answer, which may be a refusal. Raises DaemonUnreachable."""
    try:
        line, uid = _exchange(path, json.dumps(request).encode() + b"\n", deadline)
    except FileNotFoundError:
        raise DaemonUnreachable(f"healthd is not running (no {path})") from None
    except ConnectionRefusedError:
        raise DaemonUnreachable(f"healthd is not running (no listener at {path})") from None
    except BlockingIOError:
        raise DaemonUnreachable(
            f"healthd does not answer at {path} (no connection within {timeout_seconds:g} s)"
        ) from None
    except TimeoutError:
        raise DaemonUnreachable(f"healthd does not answer at {path} (no reply within {timeout_seconds:g} s)") from None
    except OSError as error:
        raise DaemonUnreachable(f"cannot connect to healthd at {path}: {error.strerror or error}") from None
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        problem = "an invalid answer" if line else "no answer: it may be stopping"
        raise DaemonUnreachable(f"healthd at {path} sent {problem}")
    return Answer(answer, uid)


def _exchange(path: str, request: bytes, deadline: float) -> tuple[bytes, int]:
    """Send `request` and read to the end of the stream. Return the answer and the listening process's uid.

    Raises BlockingIOError if the daemon's listen queue stays full until the deadline, TimeoutError at the deadline even
    if parts of the answer are still arriving, or another OSError.
    """
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        _connect(stream, path, deadline)
        _, uid, _ = struct.unpack("iII", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        stream.settimeout(_remaining_seconds(deadline))
        with suppress(ConnectionError):  # the daemon closed the connection early, but its reason can still be read
            stream.sendall(request)
        with suppress(ConnectionError):
            while len(answer) < MAX_ANSWER_BYTES:
                stream.settimeout(_remaining_seconds(deadline))
                chunk = stream.recv(1 << 16)
                if not chunk:
                    break
                answer += chunk
    return bytes(answer), int(uid)


def _connect(stream: socket.socket, path: str, deadline: float) -> None:
    """Connect with a blocking socket, so that the kernel queues this client while the daemon's queue is full.

    If the socket had a Python timeout, connect would fail at once instead (unix(7): EAGAIN). On kernels that do not
    wait (gVisor), retry.
    """
    while True:
        remaining = max(deadline - time.monotonic(), 0.0)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(remaining))
        try:
            stream.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(min(RETRY_SECONDS, remaining))
        else:
            return


def _timeval(seconds: float) -> bytes:
    """Return the struct timeval for setsockopt(2). The value is never 0, because 0 means no timeout."""
    return struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1_000_000)))


def _remaining_seconds(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
