"""The files of the journal: the durable one in the state directory, and the daemon's copy in the runtime directory.

Only separate programs (`healthd repair run`, `healthd doctor`) use this module, because a write waits for the disk.
"""

from __future__ import annotations

import os
from contextlib import suppress

from healthd.agent.repair.journal import JOURNAL_FILE, Journal, parse_journal
from healthd.common import ownership
from healthd.common.atomic_files import replace_file
from healthd.common.values import DecodeError, encode
from healthd.host.host import Host

# Identities that a vendor left in all machines of a model.
NO_IDENTITY = ("", "uninitialized", "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff")


def read_journal(state_dir: str) -> Journal | None:
    """Return the journal, or None if there is none yet. Raises DecodeError, ownership.Untrusted or OSError."""
    try:
        text = ownership.read(os.path.join(state_dir, JOURNAL_FILE))
    except FileNotFoundError:
        return None
    return parse_journal(text.decode("utf-8", "replace"))


def read_copy(runtime_dir: str) -> Journal | None:
    """Return the daemon's copy, which an earlier run has published in this boot, or None if it cannot be read."""
    with suppress(OSError, DecodeError, ownership.Untrusted):
        return parse_journal(ownership.read(os.path.join(runtime_dir, JOURNAL_FILE)).decode("utf-8", "replace"))
    return None


def machine_identity(root: str) -> str:
    """Return the machine's DMI product UUID, or else systemd's machine id, or "". Only root can read the UUID."""
    host = Host(root)
    for kind, path in (("dmi", "/sys/class/dmi/id/product_uuid"), ("machine-id", "/etc/machine-id")):
        with suppress(OSError):
            found = (host.read(path) or "").strip().lower()
            if found not in NO_IDENTITY:
                return f"{kind} {found}"
    return ""


def write_journal(journal: Journal, state_dir: str) -> None:
    """Write the journal durably: it survives a power loss after this call. Raises ownership.Untrusted or OSError.

    The new file is durable only after its directory is synced too (fsync(2)).
    """
    with ownership.open_folder(state_dir, make_mode=0o755) as folder:
        replace_file(os.path.join(state_dir, JOURNAL_FILE), encode(journal), durable=True)
        os.fsync(folder)


def publish(journal: Journal, runtime_dir: str) -> None:
    """Write the daemon's copy. Raises ownership.Untrusted or OSError."""
    replace_file(os.path.join(runtime_dir, JOURNAL_FILE), encode(journal))
