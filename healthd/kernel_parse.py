"""What a line of the kernel says: parse(text) -> KernelEvent, pure. The forms are in kernel_lines/, one file a family.

Every rule is anchored at the start of the kernel's message: process names and cgroup paths inside a message are
user text, and a program that quotes an Xid in its own log line is not the driver. A new form is a new row of its
family's RULES; among those that share a literal the first that matches counts.
"""

from __future__ import annotations

from healthd.kernel_lines import filesystems, host, memory, network, nvidia, nvidia_driver, pcie, storage
from healthd.kernel_lines.rule import Rule
from healthd.model import KernelEvent

RULES: tuple[Rule, ...] = (
    *nvidia.RULES,
    *nvidia_driver.RULES,
    *pcie.RULES,
    *network.RULES,
    *storage.RULES,
    *filesystems.RULES,
    *memory.RULES,
    *host.RULES,
)
LITERALS: dict[str, tuple[Rule, ...]] = {
    literal: tuple(rule for rule in RULES if literal in rule.needs) for rule in RULES for literal in rule.needs
}


def parse(text: str) -> KernelEvent | None:
    """The event that a kernel message (without any prefix) reports, None if it reports none that matters here."""
    for literal, rules in LITERALS.items():
        if literal in text:
            for rule in rules:
                match = rule.pattern.match(text)
                if match is not None and (found := rule.build(rule.kind, match)) is not None:
                    return found
    return None
