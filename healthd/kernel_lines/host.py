"""The kernel itself: lockups, hung tasks, oops, panic, out of memory, heat."""

from __future__ import annotations

from healthd.kernel_lines.rule import Rule

RULES: tuple[Rule, ...] = ()
