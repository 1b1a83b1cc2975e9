"""Tells healthd on this node how long the iterations of a job take: one call at the end of each.

    from healthd.client import step
    for batch in data:
        train(batch)
        step(busy=seconds_of_own_work)

`step` never waits, never raises and needs no healthd on the node: where nobody listens it does next to nothing. It is
one file of the standard library alone, and may be copied into a container that has no healthd; the folder /run/healthd
of the node is mounted into it, or HEALTHD_SOCKET names the socket.

What is sent: one message of a fixed size (MESSAGE) at most each TELL_SECONDS, over a connection of SOCK_SEQPACKET; it
stands for all steps since the last that was taken. healthd reads it as any text of a user: it can only warn of it.
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
TELL_SECONDS = 0.2
RETRY_SECONDS = 5.0  # between two attempts to connect, whatever the reason

# magic and version; rank and local rank (-1: not told); the number of the last step; how many steps this stands for;
# seconds of one step, of its own work, and waiting for other ranks, in the mean (NaN: not told). Later versions add
# fields behind.
MESSAGE = struct.Struct("<4siiqiddd")
MAGIC = b"hfs1"
NOT_TOLD = float("nan")
MOST_ADVICE_BYTES = 1 << 16

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

_connection: socket.socket | None = None
_pid = 0  # whose connection it is: a child has its own
_retry_at = 0.0
_rank = _local_rank = -1
_step = 0
_last: float | None = None  # when the last step ended; None before the first
_told_at = 0.0
_steps, _seconds = 0, 0.0  # since what was sent last
_busy, _busy_steps = 0.0, 0  # the sum of `busy`, and of how many steps
_wait, _wait_steps = 0.0, 0


def step(busy: SupportsFloat | None = None, wait: SupportsFloat | None = None) -> None:
    """Report the end of one iteration. Its length is the time since the last call; the first call reports nothing.

    Args, both optional, of any type that float() accepts:
        busy: seconds of own work of this rank in the iteration
        wait: seconds in which it waited for other ranks

    A tensor on a GPU is copied to the host, which waits for the GPU.
    """
    global _last, _step, _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps
    try:
        now = time.perf_counter()
        last, _last = _last, now
        if os.getpid() != _pid:
            _begin_anew(now)
        elif last is not None:
            _step += 1
            _steps += 1
            _seconds += now - last
            _busy, _busy_steps = _added(_busy, _busy_steps, busy)
            _wait, _wait_steps = _added(_wait, _wait_steps, wait)
            if now - _told_at >= TELL_SECONDS:
                _tell(now)
    except Exception:
        try:
            _forget()
        except Exception:  # the interpreter ends, and has emptied this module: a loop's last __del__ may still step
            return


def _added(total: float, steps: int, value: SupportsFloat | None) -> tuple[float, int]:
    """Add `value`, anything that float() accepts (a NumPy scalar, a 0-d tensor). A value that is missing, no number,
    negative or not finite is left out of the mean."""
    if value is None:
        return total, steps
    try:
        seconds = float(value)
    except Exception:  # of a foreign type's __float__
        return total, steps
    return (total + seconds, steps + 1) if 0.0 <= seconds < math.inf else (total, steps)


def _mean(total: float, steps: int) -> float:
    return total / steps if steps else NOT_TOLD


def advice() -> dict[str, object] | None:
    """Return healthd's advice for this job (docs/fail-slow-plan.md), or None if there is none or it cannot be read.

    Its `written` (epoch seconds) changes with each new advice. A call reads one small file; once every few seconds is
    enough.
    """
    try:
        import json

        folder = os.path.dirname(os.environ.get("HEALTHD_SOCKET") or SOCKET)
        job = os.environ["SLURM_JOB_ID"]
        with open(os.path.join(folder, "advice", f"{job}.json"), "rb") as file:
            document = json.loads(file.read(MOST_ADVICE_BYTES))
        return document if isinstance(document, dict) else None
    except Exception:
        return None


def _begin_anew(now: float) -> None:
    """Start in a new process. A child leaves its parent's connection to the parent."""
    global _pid, _step, _rank, _local_rank, _retry_at
    _forget()
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
    made = None
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        made.connect(os.environ.get("HEALTHD_SOCKET") or SOCKET)
        if _connection is None:
            _connection = made
        else:  # another thread was quicker
            made.close()
    except Exception:
        if made is not None:
            if _connection is made:
                _connection = None
            made.close()


def _tell(now: float) -> None:
    global _told_at, _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps
    _told_at = now  # also if it fails: a queue that is full costs one attempt, not one a step
    if _connection is None:
        _connect(now)
    n = _steps
    if not n:  # another thread told of them just now
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
        except BlockingIOError:  # healthd is slow to read: the next message stands for these steps too
            return
        except OSError:
            _forget()
            return
    _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps = 0, 0.0, 0.0, 0, 0.0, 0


def _forget() -> None:
    """The connection, and what was not sent."""
    global _connection, _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps
    gone, _connection = _connection, None
    _steps, _seconds, _busy, _busy_steps, _wait, _wait_steps = 0, 0.0, 0.0, 0, 0.0, 0
    if gone is not None:
        try:
            gone.close()
        except Exception:
            return
