"""Who may write what healthd reads and runs as root (healthd.common.ownership has the rule)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

import healthd
from healthd.agent.doctor.result import Line, fails, limited, works
from healthd.agent.settings.config import Loaded
from healthd.common import ownership

MEND = ("chown root:root {path}", "chmod go-w {path}")


def lines(loaded: Loaded | None, settings_file: str) -> Iterator[Line]:
    """loaded: None if the settings cannot be read, which is said elsewhere."""
    said = list(_wrong(loaded, settings_file))
    if not said:
        yield works("files", "nobody but root can write what healthd reads and runs as root")
    for place, why in said:
        yield fails("files", why, *(mend.format(path=place) for mend in MEND))


def _wrong(loaded: Loaded | None, settings_file: str) -> Iterator[tuple[str, str]]:
    """Each step of a path that others could write, and the sentence that says who."""
    wanted: dict[str, str] = {settings_file: "the settings", sys.executable: "the interpreter"}
    folders = {os.path.dirname(healthd.__file__): "the program"}
    if loaded is not None:
        settings = loaded.settings
        if settings.checks_dir:
            folders[settings.checks_dir] = "checks_dir"
        folders |= {settings.state_dir: "state_dir", settings.runtime_dir: "runtime_dir"}
        if settings.baseline_file:
            wanted[settings.baseline_file] = "baseline_file"
        if settings.metrics.textfile:
            folders[os.path.dirname(settings.metrics.textfile)] = "metrics.textfile"
    yield from _looked(wanted, is_folder=False)
    yield from _looked(folders, is_folder=True)


def _looked(paths: Mapping[str, str], is_folder: bool) -> Iterator[tuple[str, str]]:
    for path, what in paths.items():
        try:
            if is_folder:
                with ownership.folder(path):
                    pass
            else:
                ownership.program(path)
        except ownership.Untrusted as error:
            yield error.place, f"{path} ({what}): {error}"
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # what is not there nobody writes; what we may not see, root asks for


def room(settings_state_dir: str, settings_runtime_dir: str, most_bytes_wanted: int = 64 << 20) -> Iterator[Line]:
    """Whether there is room for what is remembered, and memory for the daemon."""
    import psutil

    short = []
    for path, name in ((settings_state_dir, "state_dir"), (settings_runtime_dir, "runtime_dir")):
        there = _existing(path)
        free = psutil.disk_usage(there).free
        if free < most_bytes_wanted:
            short.append((f"{path} ({name}) has {free >> 20} MiB left", f"df -h {there}"))
    available = psutil.virtual_memory().available
    if available < 2 * most_bytes_wanted:
        short.append(
            (f"the node has {available >> 20} MiB of memory left", "ps -eo pid,user,rss,comm --sort=-rss | head")
        )
    for says, mend in short:
        yield limited("room", says, mend)
    if not short:
        yield works("room", f"disk for state_dir and runtime_dir, {available >> 20:,} MiB of memory")


def _existing(path: str) -> str:
    """The path, or the nearest folder above it that is there."""
    while path != "/" and not os.path.isdir(path):
        path = os.path.dirname(path)
    return path
