"""Who owns a file that healthd runs as root. It must belong to root or to the user that healthd runs as, and nobody
else may write to it; so must its directory, along every symbolic link."""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Iterator

from healthd.host import Host

MOST_LINKS = 40  # as the kernel follows


def problem(host: Host, path: str) -> tuple[str, str] | None:
    """The first file or directory that others could have written, and why; None = there is none. It looks at this
    machine, whatever tree the host has: the file is run here. A missing file is no problem. Raises OSError.
    """
    myself = host.stat("/proc/self", anywhere=True)
    owners = {0, myself.uid if myself else 0}
    for file in _files(host, path):
        found = host.stat(file, anywhere=True)
        if found and found.uid not in owners:
            return file, f"belongs to user {found.uid}, it must belong to root"
        if found and found.mode & (stat.S_IWGRP | stat.S_IWOTH):
            return file, f"is writable by others than its owner (mode {stat.S_IMODE(found.mode):o})"
    return None


def _files(host: Host, path: str) -> Iterator[str]:
    """The file and its directory; then those of the file that it links to. ".." stays in a name: the kernel knows
    where it leads if the directory is itself a link."""
    for _ in range(MOST_LINKS):
        yield path
        yield posixpath.dirname(path)
        target = host.link_target(path, anywhere=True)
        if target is None:
            return
        path = posixpath.join(posixpath.dirname(path), target)
