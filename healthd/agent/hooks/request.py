"""The daemon's request to the program that runs the hooks.

The request has the daemon's own settings. A mistake in healthd.toml thus does not delay a hook, and the daemon and the
program always agree.
"""

from __future__ import annotations

from healthd.agent.settings.config import HooksConfig
from healthd.common.values import DecodeError, Value, decode, encode

PROGRAM = "hooks"


class HooksRequest(Value, frozen=True):
    """A request. `since` is the time in epoch seconds from which the daemon has had these hooks."""

    state_dir: str
    since: float
    hooks: HooksConfig


def render_request(request: HooksRequest) -> str:
    return encode(request).decode()


def parse_request(text: str) -> HooksRequest | None:
    """Return the request, or None if another version of healthd wrote it or it is damaged."""
    try:
        return decode(HooksRequest, text)
    except DecodeError:
        return None
