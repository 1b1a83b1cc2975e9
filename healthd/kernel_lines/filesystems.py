"""File systems: local ones that stop after errors, and servers that do not answer."""

from __future__ import annotations

from healthd.kernel_lines.rule import Rule

RULES: tuple[Rule, ...] = ()
