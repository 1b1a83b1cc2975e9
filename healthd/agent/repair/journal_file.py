"""The files of the journal: the durable one in the state directory, and the daemon's copy in the runtime directory.

Only the program `healthd repair run` uses this module, because a write waits for the disk.
"""

from __future__ import annotations

import os

from healthd.agent.repair.journal import JOURNAL_FILE, Journal, parse_journal
from healthd.common import ownership
from healthd.common.atomic_files import replace_file
from healthd.common.values import encode


def read_journal(state_dir: str) -> Journal | None:
    """Return the journal, or None if there is none yet. Raises DecodeError, ownership.Untrusted or OSError."""
    try:
        text = ownership.read(os.path.join(state_dir, JOURNAL_FILE))
    except FileNotFoundError:
        return None
    return parse_journal(text.decode("utf-8", "replace"))


def write_journal(journal: Journal, state_dir: str) -> None:
    """Write the journal, so that it survives a power cut right after this call. Raises ownership.Untrusted or OSError.

    The new file's name is durable only once the directory is, too (fsync(2)).
    """
    with ownership.open_folder(state_dir, make_mode=0o755) as folder:
        replace_file(os.path.join(state_dir, JOURNAL_FILE), encode(journal), durable=True)
        os.fsync(folder)


def publish(journal: Journal, runtime_dir: str) -> None:
    """Write the daemon's copy. Raises ownership.Untrusted or OSError."""
    replace_file(os.path.join(runtime_dir, JOURNAL_FILE), encode(journal))
