"""Rules for the site's own kernel log lines, from [kernel_log.patterns.NAME].

A pattern is plain text in which each "*" matches any text. Like every rule, it must match from the beginning of the
kernel's message, because text inside the message may be a user's. Text after the end of the pattern is ignored. Regular
expressions are not supported. Matching takes time linear in the line's length, so no pattern can delay the daemon.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from healthd.agent.kernel_log.rules.rule import Rule, event
from healthd.agent.settings.config import KernelPattern
from healthd.agent.settings.limits import longest_literal
from healthd.common.model import KernelEvent, Severity
from healthd.common.text import regex

SITE = "site"
SEVERITY = "severity"  # a field of the event: the site's severity, as written in the settings


def rules(patterns: Mapping[str, KernelPattern]) -> tuple[Rule, ...]:
    """Return one rule for each pattern, in the order of the settings."""
    return tuple(_rule(name, pattern) for name, pattern in patterns.items())


def more_severe(first: KernelEvent, second: KernelEvent) -> KernelEvent:
    """Return the more severe of two events for one line. If both are equally severe, return the event whose name sorts
    first.
    """
    return min(first, second, key=lambda event: (-Severity[event.field(SEVERITY).upper()], event.code))


def _rule(name: str, pattern: KernelPattern) -> Rule:
    first, *pieces = pattern.pattern.split("*")
    build = functools.partial(_event, name, tuple(filter(None, pieces)), pattern.severity.name.lower())
    return Rule(SITE, (longest_literal(pattern.pattern),), regex(re.escape(first)), build)


def _event(name: str, pieces: tuple[str, ...], severity: str, kind: str, match: re.Match[str]) -> KernelEvent | None:
    """Return the event for a line that begins with the pattern's first piece.

    Return None if the other pieces do not follow in order.
    """
    offset = match.end()
    for piece in pieces:
        found = match.string.find(piece, offset)
        if found < 0:
            return None
        offset = found + len(piece)
    return event(kind, match, name, fields=((SEVERITY, severity),))
