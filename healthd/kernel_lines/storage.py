"""Disks: NVMe controllers, the block layer, SCSI, RAID."""

from __future__ import annotations

from healthd.kernel_lines.rule import Rule

RULES: tuple[Rule, ...] = ()
