"""Network cards: mlx5, InfiniBand, Ethernet bonds."""

from __future__ import annotations

from healthd.kernel_lines.rule import Rule

RULES: tuple[Rule, ...] = ()
