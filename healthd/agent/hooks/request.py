"""The daemon's request to the program that runs the hooks.

The request has the daemon's own settings. A mistake in healthd.toml thus does not delay a hook, and the daemon and the
program always agree.
"""

from __future__ import annotations

from healthd.agent.settings.config import HooksConfig
from healthd.common.errors import HealthdError
from healthd.common.values import DecodeError, Value, decode, encode

PROGRAM = "hooks"


class HooksRequest(Value, frozen=True):
    """A request.

    since  for each hook, the time in epoch seconds from which it gets events if the program has no record of the hook
    """

    state_dir: str
    since: dict[str, float]
    hooks: HooksConfig


class UnreadableRequest(HealthdError):
    """Raised if a newer version of healthd may have written the request."""


def render_request(request: HooksRequest) -> str:
    return encode(request).decode()


def parse_request(text: str) -> HooksRequest | None:
    """Return the request, or None if another version of healthd wrote it or it is damaged."""
    try:
        request = decode(HooksRequest, text)
    except DecodeError:
        return None
    return request if request.since.keys() >= request.hooks.programs.keys() else None
