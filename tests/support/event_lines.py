"""Lines of event streams, as a node writes them."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

STREAM = "a" * 16
NOON = 1763812800.0  # 2025-11-22 12:00:00 UTC


def line(seq: Any = 1, event: Any = "alive", *, at: float = NOON, **fields: Any) -> bytes:
    """Return one line without its newline. `fields` override or add fields."""
    time = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields_of_line = {
        "schema": 1,
        "cluster": "c1",
        "node": "n1",
        "boot_id": "b1",
        "stream_id": STREAM,
        "seq": seq,
        "time": time,
        "mono": 1.5,
        "event": event,
        **fields,
    }
    return json.dumps(fields_of_line, separators=(",", ":"), ensure_ascii=False).encode()


def lines(first: int, last: int, **fields: Any) -> bytes:
    """Return complete lines with these sequence numbers, one second apart."""
    return b"".join(line(seq, at=NOON + seq, **fields) + b"\n" for seq in range(first, last + 1))
