"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import re


def replace_file(path: str, text: str, mode: int = 0o600, durable: bool = False) -> None:
    """Put `text` at `path` whole or not at all. `durable`: also after a power cut (never on the daemon's side)."""
    temporary = f"{path}.{os.getpid()}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            os.fchmod(descriptor, mode)  # whatever the umask: others read the verdict and the metrics
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def remove_leftovers(directory: str) -> None:
    """Remove what writers that were killed in `replace_file` left there: NAME.PID.new without such a process."""
    for name in os.listdir(directory):
        found = re.fullmatch(r".+\.(\d+)\.new", name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            os.unlink(os.path.join(directory, name))
