"""Test of the memory that remains after many simultaneous clients of the metrics page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Many simultaneous clients, one thread each. Then count the thread heaps of this process: 64 MiB of addresses each,
# aligned to 64 MiB, with a writable first part (glibc's arena.c).
CROWD = """
import socket, sys
from healthd.agent.metrics import http_server
from healthd.agent.metrics.http_server import CLIENTS, Pages, serve
if "no limit" in sys.argv:
    http_server.use_single_heap = lambda: None
port, stop = serve(("127.0.0.1", 0), Pages(lambda: None))
crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS)]
for stream in crowd:
    stream.sendall(b"GET /nothing HTTP/1.1\\r\\n")
for stream in crowd:
    stream.sendall(b"X: " + b"x" * 8192 + b"\\r\\n\\r\\n")
answers = [stream.makefile("rb").read() for stream in crowd]
assert all(answer.startswith(b"HTTP/1.0 404") for answer in answers), answers
ends = {}
count = 0
for line in open("/proc/self/maps"):
    addresses, rights = line.split()[:2]
    begin, end = (int(address, 16) for address in addresses.split("-"))
    if rights == "rw-p" and begin % (64 << 20) == 0:
        ends[end] = begin
    elif rights == "---p" and ends.get(begin, -1) + (64 << 20) == end:
        count += 1
stop()
print(count)
"""


def count_heaps(*arguments: str) -> int:
    completed = subprocess.run(
        [sys.executable, "-c", CROWD, *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT, check=True
    )
    return int(completed.stdout)


@pytest.mark.one_python
def test_metrics_server_leaves_no_thread_heaps() -> None:
    assert count_heaps("no limit") > 0, "the malloc of this Python creates no thread heaps"
    assert count_heaps() == 0
