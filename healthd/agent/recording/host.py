"""A Host that notes what it is asked, and one that answers from a recording: the same in Tree and NVML."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from healthd.agent.recording.recording import Player, Recorder, Recording
from healthd.host.host import Host
from healthd.host.system import Tree

FIRST_ONLY = ("run", "stat", "readlink")  # only the program or path is the question, not the deadline or the place


class RecordedSystem:
    """Stands for a `Tree`: it asks another one, and notes its answers."""

    def __init__(self, recorder: Recorder, asked: Tree) -> None:
        self._recorder = recorder
        self._asked = asked

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._asked, name)
        return lambda *arguments: self._recorder.ask(question(name, arguments), lambda: function(*arguments))


class ReplayedSystem:
    """Stands for a `Tree`: it answers from a recording."""

    def __init__(self, player: Player) -> None:
        self._player = player

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._player.answer(question(name, arguments))


def recording_host(root: str, fake_nvml: str, recorder: Recorder) -> Host:
    def open_nvml() -> Any:
        from healthd.agent.recording.nvml import open_recorded

        return open_recorded(recorder, fake_nvml)

    asked = cast(Tree, RecordedSystem(recorder, Tree(root.rstrip("/"))))
    return Host(root, open_nvml, lambda: recorder.ask("now", time.time), asked, nvml_stands_in=bool(fake_nvml))


def replaying_host(recording: Recording, player: Player) -> Host:
    def open_nvml() -> Any:
        from healthd.agent.recording.nvml import open_replayed

        return open_replayed(player)

    system_of_then = cast(Tree, ReplayedSystem(player))
    now = cast("Callable[[], float]", lambda: player.answer("now"))
    return Host(recording.root, open_nvml, now, system_of_then, nvml_stands_in=recording.fake_nvml)


def question(name: str, arguments: Sequence[Any]) -> str:
    """ "read /proc/uptime", 'run ["ipmitool", "sel"]'."""
    asked = arguments[:1] if name in FIRST_ONLY else arguments
    return " ".join([name, *(item if isinstance(item, str) else json.dumps(item, default=list) for item in asked)])
