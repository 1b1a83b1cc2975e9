"""TCP ports for programs that a test starts."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(20000, 32000)  # below the ephemeral ports, to avoid conflicts with outgoing connections


def free_ports(count: int, reservations: contextlib.ExitStack) -> int:
    """Return the first of `count` consecutive free ports. No other cluster gets one of them until `held` ends."""
    while True:
        first = random.SystemRandom().randrange(PORTS.start, PORTS.stop - count)
        with contextlib.ExitStack() as own_reservations, contextlib.suppress(OSError):
            for port in range(first, first + count):
                own_reservations.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0healthd-test-port-{port}")
            with contextlib.ExitStack() as test_binds:
                for port in range(first, first + count):
                    test_binds.enter_context(socket.socket()).bind(("0.0.0.0", port))
            reservations.push(own_reservations.pop_all())
            return first
