"""journald's native protocol: entries with custom fields.

Sources: "Native Journal Protocol" (https://systemd.io/JOURNAL_NATIVE_PROTOCOL/), JOURNAL_STREAM in systemd.exec(5).
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Mapping

from healthd.common.text import regex

SOCKET = "/run/systemd/journal/socket"
_FIELD_NAME = regex("[A-Z][A-Z0-9_]{0,63}")


def stderr_is_the_journal() -> bool:
    """Return True if stderr is the stream in JOURNAL_STREAM, by device and inode, and has not been redirected."""
    device_inode = os.environ.get("JOURNAL_STREAM")
    if not device_inode:
        return False
    try:
        stderr = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        return False
    return device_inode == f"{stderr.st_dev}:{stderr.st_ino}"


def journal_entry(fields: Mapping[str, object]) -> bytes:
    """Return the fields in journald's native format: NAME=VALUE, or length-prefixed if a value has line breaks.

    Names that journald would refuse, such as a log record's lower-case attributes, are left out.
    """
    lines = []
    for name, value in fields.items():
        if not _FIELD_NAME.fullmatch(name):
            continue
        data = str(value).encode("utf-8", "replace")
        if b"\n" in data:
            lines.append(name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            lines.append(name.encode() + b"=" + data + b"\n")
    return b"".join(lines)
