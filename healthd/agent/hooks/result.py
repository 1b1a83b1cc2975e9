"""Results of the hooks. The runner writes them to the runtime directory, and the daemon reads them from there.

The runner's own record is in the state directory. The daemon only tests whether it exists.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from healthd.common import ownership
from healthd.common.values import DecodeError, Value, Whole, decode, encode

NAME = "hooks.result"
MAX_ERROR = 200


class HookResult(Value, frozen=True):
    """Result of one hook.

    failures  number of events for which all runs failed
    error     last line of the last run's error if the last event failed, otherwise ""
    """

    failures: Whole = 0
    error: str = ""


def state_path(state_dir: str) -> str:
    """Return the path of the program's record, which exists if hooks were configured before."""
    return os.path.join(state_dir, "hooks.json")


def result_path(runtime_dir: str) -> str:
    return os.path.join(runtime_dir, NAME)


def render_results(results: Mapping[str, HookResult]) -> bytes:
    return encode(dict(results))


def parse_results(text: bytes) -> dict[str, HookResult]:
    """Return the results by hook. Raises DecodeError."""
    return decode(dict[str, HookResult], text)


def read_results(runtime_dir: str) -> dict[str, HookResult]:
    """Return the results by hook, or {} if there are none that can be read."""
    try:
        return parse_results(ownership.read(result_path(runtime_dir)))
    except (OSError, DecodeError):
        return {}
