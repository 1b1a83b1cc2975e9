"""TCP ports for programs that a test starts."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(20000, 32000)  # below the ephemeral ports, to avoid conflicts with outgoing connections


def free_ports(count: int, held: contextlib.ExitStack) -> int:
    """Return the first of `count` consecutive free ports. No other cluster gets one of them until `held` ends."""
    while True:
        first = random.SystemRandom().randrange(PORTS.start, PORTS.stop - count)
        with contextlib.ExitStack() as ours, contextlib.suppress(OSError):
            for port in range(first, first + count):
                ours.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0healthd-test-port-{port}")
            with contextlib.ExitStack() as tried:
                for port in range(first, first + count):
                    tried.enter_context(socket.socket()).bind(("0.0.0.0", port))
            held.push(ours.pop_all())
            return first
