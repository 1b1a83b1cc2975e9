"""Asks the running daemon over its control socket, and never waits longer than it says (the protocol: status.py)."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

SOCKET = "healthd.sock"  # as in status.py, which loads far more than a client needs
PATIENCE_SECONDS = 5.0
MAX_ANSWER_BYTES = 64 << 20


class NoAnswer(Exception):
    """One sentence: why there is no answer of a daemon."""


class Refused(Exception):
    """One sentence of the daemon: why it does not do what was asked."""


def ask(runtime_dir: str, request: dict[str, Any], patience_seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """The daemon's answer to one request. Raises NoAnswer, Refused."""
    path = os.path.join(runtime_dir, SOCKET)
    try:
        line = _exchange(path, json.dumps(request).encode() + b"\n", time.monotonic() + patience_seconds)
    except FileNotFoundError:
        raise NoAnswer(f"healthd does not answer: there is no {path}") from None
    except ConnectionRefusedError:
        raise NoAnswer(f"healthd does not answer: nobody listens at {path}") from None
    except (TimeoutError, BlockingIOError):
        raise NoAnswer(f"healthd does not answer: nothing came from {path} within {patience_seconds:g} s") from None
    except OSError as error:
        raise NoAnswer(f"healthd cannot be asked at {path}: {error.strerror or error}") from None
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        what = "nonsense" if line else "nothing: it may be stopping"
        raise NoAnswer(f"healthd at {path} answered {what}")
    if "error" in answer:
        raise Refused(str(answer["error"]))
    return answer


def _exchange(path: str, request: bytes, deadline: float) -> bytes:
    """Send, and read to the end of the stream. Raises OSError; TimeoutError at the deadline, even if it drips."""
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(_left(deadline))
        stream.connect(path)
        stream.sendall(request)
        while len(answer) < MAX_ANSWER_BYTES:
            stream.settimeout(_left(deadline))
            chunk = stream.recv(1 << 16)
            if not chunk:
                break
            answer += chunk
    return bytes(answer)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
