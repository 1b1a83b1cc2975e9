"""Report a job's iteration times to healthd on this node, with one call at the end of each iteration.

    from healthd.client import step
    for batch in data:
        train(batch)
        step(busy=seconds_of_own_work)

`step` never waits, never raises, and does not require healthd on the node: without a listener it does almost nothing.
The module is a single file, uses only the standard library, and may be copied into a container without healthd. Mount
the node's /run/healthd into the container, or set HEALTHD_SOCKET to the socket's path.

It sends a message of fixed size (MESSAGE) at most every SEND_SECONDS, over a SOCK_SEQPACKET connection. A message
covers all steps since the last accepted message. healthd treats messages as user input, which can only cause a warning.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import SupportsFloat

SOCKET = "/run/healthd/failslow.sock"
SEND_SECONDS = 0.2
RETRY_SECONDS = 5.0  # minimum time between two attempts to connect, even after a success

# magic and version; rank and local rank (-1: unknown); number of the last step; number of steps in this message; mean
# seconds of one step, of its own work, and of waiting for other ranks (NaN: unknown). Later versions append fields.
MESSAGE = struct.Struct("<4siiqiddd")
MAGIC = b"hfs1"
NOT_MEASURED = float("nan")
MAX_ADVICE_BYTES = 1 << 16

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

_connection: socket.socket | None = None
_pid = 0  # process that owns the connection; a child process opens its own
_retry_at = 0.0
_rank = _local_rank = -1
_step = 0
_last: float | None = None  # end of the last step; None before the first
_sent_at = 0.0
_steps, _seconds = 0, 0.0  # totals since the last message
_busy, _busy_steps = 0.0, 0  # the sum of `busy`, and the number of steps with a `busy` value
_wait, _wait_steps = 0.0, 0


def step(busy: SupportsFloat | None = None, wait: SupportsFloat | None = None) -> None:
    """Report the end of an iteration. Its length is the time since the last call, so the first call reports nothing.

    Args, both optional, of any type that float() accepts:
        busy: seconds of this rank's own work in the iteration
        wait: seconds spent waiting for other ranks

    A tensor on a GPU is copied to the host, which waits for the GPU.
    """
    global _last, _step, _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps
    try:
        now = time.perf_counter()
        last, _last = _last, now
        if os.getpid() != _pid:
            _reset(now)
        elif last is not None:
            _step += 1
            _steps += 1
            _seconds += now - last
            _busy, _busy_steps = _added(_busy, _busy_steps, busy)
            _wait, _wait_steps = _added(_wait, _wait_steps, wait)
            if now - _sent_at >= SEND_SECONDS:
                _send(now)
    except Exception:
        try:
            _disconnect()
        except Exception:  # at exit, this module is already emptied when a loop's last __del__ calls step
            return


def _added(total: float, steps: int, value: SupportsFloat | None) -> tuple[float, int]:
    """Return the total and the number of steps, with `value` added.

    `value` may be anything that float() accepts (a NumPy scalar, a 0-d tensor). A missing, invalid, negative or
    infinite value is left out of the mean.
    """
    if value is None:
        return total, steps
    try:
        seconds = float(value)
    except Exception:  # raised by the value's __float__
        return total, steps
    return (total + seconds, steps + 1) if 0.0 <= seconds < math.inf else (total, steps)


def _mean(total: float, steps: int) -> float:
    return total / steps if steps else NOT_MEASURED


def advice() -> dict[str, object] | None:
    """Return healthd's advice for this job (docs/fail-slow-plan.md), or None if there is no readable advice.

    The value of `written` (epoch seconds) changes with each new advice. Each call reads one small file. One call every
    few seconds is enough.
    """
    try:
        import json

        folder = os.path.dirname(os.environ.get("HEALTHD_SOCKET") or SOCKET)
        job = os.environ["SLURM_JOB_ID"]
        with open(os.path.join(folder, "advice", f"{job}.json"), "rb") as file:
            document = json.loads(file.read(MAX_ADVICE_BYTES))
        return document if isinstance(document, dict) else None
    except Exception:
        return None


def _reset(now: float) -> None:
    """Start over in a new process. A child process does not touch its parent's connection."""
    global _pid, _step, _rank, _local_rank, _retry_at
    _disconnect()
    _pid, _step, _retry_at = os.getpid(), 0, 0.0
    _rank, _local_rank = _number(_RANK), _number(_LOCAL_RANK)
    _connect(now)


def _number(names: tuple[str, ...]) -> int:
    for name in names:
        text = os.environ.get(name, "")
        if 0 < len(text) <= 9 and set(text) <= set("0123456789"):
            return int(text)
    return -1


def _connect(now: float) -> None:
    global _connection, _retry_at
    if now < _retry_at:
        return
    _retry_at = now + RETRY_SECONDS
    connection = None
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        connection.connect(os.environ.get("HEALTHD_SOCKET") or SOCKET)
        if _connection is None:
            _connection = connection
        else:  # another thread connected first
            connection.close()
    except Exception:
        if connection is not None:
            if _connection is connection:
                _connection = None
            connection.close()


def _send(now: float) -> None:
    global _sent_at, _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps
    _sent_at = now  # also set if sending fails, so that a full queue does not cause an attempt at every step
    if _connection is None:
        _connect(now)
    n = _steps
    if not n:  # another thread has just sent these steps
        return
    if _connection is not None:
        try:
            _connection.send(
                MESSAGE.pack(
                    *(MAGIC, _rank, _local_rank, _step, n, _seconds / n),
                    *(_mean(_busy, _busy_steps), _mean(_wait, _wait_steps)),
                ),
                _FLAGS,
            )
        except BlockingIOError:  # healthd reads slowly; the next message will cover these steps too
            return
        except OSError:
            _disconnect()
            return
    _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps = 0, 0.0, 0.0, 0, 0.0, 0


def _disconnect() -> None:
    """Drop the connection and the unsent steps."""
    global _connection, _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps
    connection, _connection = _connection, None
    _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps = 0, 0.0, 0.0, 0, 0.0, 0
    if connection is not None:
        try:
            connection.close()
        except Exception:
            return
