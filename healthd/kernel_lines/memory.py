"""Memory and processors: machine checks, EDAC, what the firmware reports (APEI)."""

from __future__ import annotations

from healthd.kernel_lines.rule import Rule

RULES: tuple[Rule, ...] = ()
