"""Open the source of kernel lines that `--kernel-log` names."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable

from healthd.agent.kernel_log.kmsg import Kmsg
from healthd.agent.kernel_log.source import Cursor, Source
from healthd.host.host import Host


def open_source(
    spec: str,
    root: str = "/",
    cursor: Cursor = None,
    accept_injected: bool = False,
    now: Callable[[], float] = time.time,
) -> Source:
    """Open the source that `--kernel-log` names: "kmsg", "journal", or the path of a file or FIFO to follow.

    `cursor` comes from an earlier source of any kind, and is ignored if it does not fit. The file need not exist yet,
    but its directory must. Raises OSError if the source cannot be opened (not root, no such directory).
    """
    boot_id = Host(root).boot_id()
    if spec == "kmsg":
        return Kmsg(root.rstrip("/") + "/dev/kmsg", boot_id, cursor, accept_injected, now)
    # These imports are late, because reading /dev/kmsg requires neither ctypes nor the journal.
    if spec == "journal":
        from healthd.agent.kernel_log.journal import JournalSource

        return JournalSource(boot_id, cursor, accept_injected)
    from healthd.agent.kernel_log.file import Fifo, FollowedFile

    if os.path.exists(spec) and stat.S_ISFIFO(os.stat(spec).st_mode):
        return Fifo(spec, accept_injected, now)
    return FollowedFile(spec, cursor, accept_injected, now, boot_id)
