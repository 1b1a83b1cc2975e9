"""What a crowd at the metrics page leaves in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Clients that are there at the same time, each with a thread; then how many heaps of threads this process has: 64 MiB
# of addresses each, at a multiple of that, the first part of which can be written (glibc's arena.c).
CROWD = """
import socket, sys
from healthd.agent.metrics import http_server
from healthd.agent.metrics.http_server import CLIENTS, Pages, serve
if "no limit" in sys.argv:
    http_server.use_single_heap = lambda: None
port, stop = serve(("127.0.0.1", 0), Pages(lambda: None))
crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS)]
for one in crowd:
    one.sendall(b"GET /nothing HTTP/1.1\\r\\n")
for one in crowd:
    one.sendall(b"X: " + b"x" * 8192 + b"\\r\\n\\r\\n")
said = [one.makefile("rb").read() for one in crowd]
assert all(text.startswith(b"HTTP/1.0 404") for text in said), said
ends = {}
count = 0
for line in open("/proc/self/maps"):
    places, rights = line.split()[:2]
    begin, end = (int(place, 16) for place in places.split("-"))
    if rights == "rw-p" and begin % (64 << 20) == 0:
        ends[end] = begin
    elif rights == "---p" and ends.get(begin, -1) + (64 << 20) == end:
        count += 1
stop()
print(count)
"""


def heaps(*words: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CROWD, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, check=True
    )
    return int(done.stdout)


@pytest.mark.one_python
def test_a_crowd_at_the_page_leaves_no_heaps_of_its_threads() -> None:
    assert heaps("no limit") > 0, "this Python's malloc makes none"
    assert heaps() == 0
