"""Parser for kernel messages: parse(text) -> KernelEvent. The formats are in rules/, one file per family.

Every rule is anchored at the start of the kernel's message. Process names and cgroup paths inside a message are user
text, and a program may quote an Xid in its own log line. For a new format, add a row to its family's RULES. Among rows
that share a literal, the first match is used.

However, some of the kernel's own lines begin with a process name, which is user text ("NAME[PID]: segfault at").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from healthd.agent.kernel_log.rules import (
    filesystems,
    host,
    iommu,
    memory,
    network,
    nvidia,
    pcie,
    site,
    storage,
)
from healthd.agent.kernel_log.rules.rule import MAX_TEXT, Rule
from healthd.agent.settings.config import KernelPattern
from healthd.common.guard import KERNEL_LOG, drop
from healthd.common.model import KernelEvent
from healthd.common.text import regex

RULES: tuple[Rule, ...] = (
    *nvidia.RULES,
    *pcie.RULES,
    *iommu.RULES,
    *network.RULES,
    *storage.RULES,
    *filesystems.RULES,
    *memory.RULES,
    *host.RULES,
)


def _by_literal(rules: Sequence[Rule]) -> dict[str, tuple[Rule, ...]]:
    return {
        literal: tuple(rule for rule in rules if literal in rule.literals)
        for rule in rules
        for literal in rule.literals
    }


LITERALS = _by_literal(RULES)  # includes the site's patterns (use_patterns)
# A process may be called "Xid (0): 79, a" (any 15 characters). Lines that begin with a process name report at most a
# memory fault, or an access beyond the end of a device.
# arch/x86/mm/fault.c and pat/memtype.c, arch/x86/entry/vsyscall, arch/*/kernel/signal*.c and traps.c, mm/page_alloc.c,
# mm/oom_kill.c, kernel/signal.c, kernel/exit.c, fs/drop_caches.c, fs/proc/base.c (oom_adj), fs/hugetlbfs/inode.c (Using
# mlock), block/blk-core.c (beyond end); drivers/input/input.c: the name that a device reports for itself.
_USER_TEXT_FIRST = regex(
    r"[\s\S]{0,15}(?:\[\d{1,10}\](?::| (?:general protection|trap |bad frame|vsyscall |attempts ))"
    r"|/\d{1,10}: potentially | ?\(\d{1,10}\)(?:: drop_caches|: VmData|: /proc/|: Using mlock| used | uses )"
    r"|:\d{1,10} (?:map pfn |conflicting memory |freeing invalid )| uses |: page allocation | invoked oom-killer: "
    r"|(?P<block>: attempt to access beyond ))|Task in /|input: .* as /"
)


UNREAD = "unread"  # kind for a line that made a rule raise; the line may report any fault, so it is displayed


def use_patterns(patterns: Mapping[str, KernelPattern]) -> None:
    """Use the site's patterns from now on, replacing any earlier ones.

    Call this once, before any line is read, because lines are not parsed again. A pattern applies only to lines that no
    built-in rule matches. If several patterns match, the most severe one is used.
    """
    by_literal = _by_literal((*RULES, *site.rules(patterns)))
    LITERALS.clear()
    LITERALS.update(by_literal)


def parse(text: str, literals: Iterable[str] = LITERALS) -> KernelEvent | None:
    """Return the event for a kernel message without any prefix, or None if the message is irrelevant.

    A message longer than the kernel can print is truncated first. `literals` are the LITERALS that the caller has not
    ruled out, in their original order.
    """
    text = text[:MAX_TEXT]
    try:
        return _parse(text, literals)
    except Exception as error:
        drop(KERNEL_LOG, error, text)
        return unread(text)


def unread(text: str) -> KernelEvent:
    """Return the event for a line that made parse() fail."""
    return KernelEvent(UNREAD, text=text[:MAX_TEXT])


def as_unread(event: KernelEvent) -> KernelEvent:
    """Return an event's lines as an unread event, for a later step that fails on their content."""
    return replace(event, kind=UNREAD, code="", pci="", fields=())


def _parse(text: str, literals: Iterable[str]) -> KernelEvent | None:
    process_line: re.Match[str] | Literal[False] | None = None
    site_event: KernelEvent | None = None
    for literal in literals:
        if literal in text:
            if process_line is None:
                process_line = _USER_TEXT_FIRST.match(text) or False
            for rule in LITERALS[literal]:
                if process_line and rule.kind != (process_line.lastgroup or "oom"):
                    continue
                match = rule.pattern.match(text)
                if match is not None and (found := rule.build(rule.kind, match)) is not None:
                    if rule.kind != site.SITE:
                        return found
                    site_event = found if site_event is None else site.more_severe(site_event, found)
    return site_event
