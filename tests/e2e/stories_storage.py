"""Rows of disks and of what the kernel says of file systems."""

from __future__ import annotations

from stories import NOT_YET, Row

ROWS: list[Row] = []

# Codes that drain and are not told here, and why.
LEFT = {
    "block_device/io_error": NOT_YET,
    "block_device/medium_error": NOT_YET,
    "block_device/missing": NOT_YET,
    "block_device/nvme": NOT_YET,
    "block_device/raid_failed": NOT_YET,
    "block_device/root_stopped": NOT_YET,
    "block_device/stopped": NOT_YET,
}
