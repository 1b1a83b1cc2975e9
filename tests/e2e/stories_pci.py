"""Rows of PCI Express."""

from __future__ import annotations

from stories import NOT_YET, Row

ROWS: list[Row] = []

# Codes that drain and are not told here, and why.
LEFT = {
    "pcie_aer/fatal": NOT_YET,
    "pcie_aer/nonfatal_repeated": NOT_YET,
    "pcie_aer/not_recovered": NOT_YET,
    "pcie_devices/another": NOT_YET,
    "pcie_devices/gone": NOT_YET,
    "pcie_hotplug/link_down": NOT_YET,
    "pcie_hotplug/power_fault": NOT_YET,
    "pcie_link/narrow": NOT_YET,
    "pcie_link/no_answer": NOT_YET,
    "pcie_link/slow": NOT_YET,
}
