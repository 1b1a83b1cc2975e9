"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import re


def replace_file(path: str, content: str | bytes, mode: int = 0o600, durable: bool = False) -> None:
    """Write `content` to `path`, whole or not at all. `durable`: also after a power cut (never used in the daemon)."""
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    temporary = f"{path}.{os.getpid()}.new"
    descriptor = _make(temporary, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the umask is: others read the verdict and the metrics
            file.write(data)
            file.flush()
            if durable:
                os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _make(path: str, mode: int) -> int:
    """A new file, open for writing. A link of that name is not followed; the leftover of a killed writer that had our
    pid is removed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, mode)


def remove_leftovers(directory: str) -> None:
    """Remove the leftovers of writers that were killed in `replace_file`: NAME.PID.new where no process PID runs."""
    for name in os.listdir(directory):
        found = re.fullmatch(r".+\.(\d+)\.new", name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            os.unlink(os.path.join(directory, name))
