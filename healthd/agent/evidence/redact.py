"""A copy of the evidence for a vendor: without user names, command lines, job names and other data of the site.

Only known content is kept. Of the journal, only the file with the entries of the kernel and of NVIDIA's services is
kept: in the other file, a user can write lines under any identifier (`logger -t kernel`). The bug report keeps the
sections about the hardware and the driver. `healthd record` is left out: it contains the settings, process names and
mount points. All functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from healthd.agent.evidence.manifest import Manifest
from healthd.agent.evidence.sources import VENDOR_JOURNAL, Entry
from healthd.common.text import is_decimal, regex

REMOVED = "[removed]"
OMITTED = ("record.rec",)  # files that are left out

# Journal lines as `journalctl --output short-iso-precise` prints them: TIME HOST IDENTIFIER[PID]: MESSAGE.
_JOURNAL_LINE = regex(r"(\S+) (\S+) ([^\s:\[]+)(\[[0-9]+\])?: (.*)")
_JOURNAL_KEEPS = regex(r"kernel|nvidia-[a-z0-9-]+|nv-[a-z0-9-]+|nvlsm|dcgm[a-z-]*")

# The beginning of a kernel message in dmesg's formats: facility and level, then the time.
_PREFIX = (
    r"^((?:[a-z]{1,10} {0,8}:[a-z]{1,10} {0,8}: {0,8})?"
    r"(?:\[ {0,12}[0-9.]{1,24}\] {0,4}|[0-9]{4}-[0-9-]{1,8}T\S{1,40} )?(?:traps: |watchdog: |INFO: )?)"
)
# Beginnings of the driver's text after the name of a process. Anything else belongs to the name, which may have commas.
_XID_TEXT = (
    r"Ch [0-9a-f]|[Cc]hannel |GPU (?:has|is|lost)\b|Timeout |NVLink|Contained|Uncontained|An uncorrectable|Row Remap"
    r"|Graphics |MMU |GSP |errorString |CTX SWITCH|intr |Class |DBE|[A-Z][A-Z0-9_]* (?:Nonfatal|Fatal)"
)
# Folders of the system. A path outside of them may have names of users, jobs and projects.
_SYSTEM_FOLDERS = (
    r"(?:proc|sys|dev(?!/shm)|usr(?!/home|/local/home)|lib(?:32|64)?|bin|sbin|etc/nvidia[\w-]*|run(?!/user)|boot)"
)
_PATH_CHARACTERS = r"(?:[^\s,;:\"')\]<>]|[,;:](?!\s|$|\w+=))*"

# Names of processes, users, jobs and files in messages of the kernel and NVIDIA's driver. The name of a process may
# have blanks, commas and brackets. Each repeat is bounded or ends the line, so that the time for a line grows linearly.
_PATTERNS = (
    (regex(rf"(\bname=)[^\n]*?(?=, (?:{_XID_TEXT})|$)"), rf"\1{REMOVED}"),  # NVRM: Xid (PCI:...): 31, pid=4, name=a, Ch
    (regex(r"(?i)(\bcomm: ?)[^\n]*?(?= (?:not )?tainted|$)"), rf"\1{REMOVED}"),
    (regex(r"(?i)(\bcomm=)(?:\"[^\"\n]{0,300}\"|[^\n]*?(?=[ ,]\w{1,30}=|$))"), rf"\1{REMOVED}"),
    (regex(r"(\b(?:exe|cmd|cmdline|proctitle|acct|cwd|path)=)(\"[^\"\n]{0,300}\"|\S+)"), rf"\1{REMOVED}"),
    (regex(r"(\btask=)[^\n]*?(?=,pid=[0-9]|$)"), rf"\1{REMOVED}"),
    (regex(r"(\b(?:[Kk]illed|reaped) process [0-9]{1,10},? )\([^\n]{0,100}?\)(?= total-vm|,|\s*$)"), rf"\1{REMOVED}"),
    (regex(r"(\b(?:[Tt]ask|[Pp]rocess) )\([^)\n]{0,100}\)"), rf"\1{REMOVED}"),
    (regex(r"(\b[Pp]rocess )'[^\n]{0,100}?'"), rf"\1{REMOVED}"),
    (regex(r"(\b[Pp]rocess )([^\n]{1,100}?)(?= \(?pid)"), rf"\1{REMOVED}"),
    (regex(r"(\bclient )'[^\n]{0,100}?'"), rf"\1{REMOVED}"),  # NVRM: API mismatch: the client 'a' (pid 4)
    (regex(r"(\btask )([^\n]{1,100}?)(:[0-9]{1,10} (?:is )?blocked)"), rf"\1{REMOVED}\3"),
    (regex(r"(\bowned by task )([^\n]{1,100}?)(:[0-9]{1,10}\b)"), rf"\1{REMOVED}\3"),
    (regex(r"(\btask:)[^\n]{1,100}?( +state:)"), rf"\1{REMOVED}\2"),
    (regex(r"(lockup\b[^\n\[]{0,100}\[)[^\n]{1,100}(:[0-9]{1,10}\])"), rf"\1{REMOVED}\2"),
    (regex(r"(#(?:AC|DB): )[^\n]{1,100}?(/[0-9]{1,10} took a )"), rf"\1{REMOVED}\2"),
    (regex(rf"{_PREFIX}[^\n]*?( invoked oom-killer|: page allocation (?:failure|stalls))"), rf"\1{REMOVED}\2"),
    (regex(rf"{_PREFIX}[^\n]*?(\[[0-9]{{1,10}}\]:? (?:segfault|trap|general protection))"), rf"\1{REMOVED}\2"),
    (regex(rf"{_PREFIX}[^\n]*?([/(][0-9]{{1,10}}\)?: (?:potentially unexpected|drop_caches))"), rf"\1{REMOVED}\2"),
    (regex(r"(\[ *[0-9]{1,10}\]) +[0-9]{1,10} +[0-9]{1,10} +[0-9]{1,15} +[0-9]{1,15} [^\n]*"), rf"\1 {REMOVED}"),
    (regex(r"(?i)(\b[a-z]?uid[=:] ?)[0-9]+"), rf"\1{REMOVED}"),
    (regex(r"(\bjob_|/slurm/uid_)[^\s,;/]+"), rf"\1{REMOVED}"),
    (regex(rf"(?<![\w.<])/{{1,8}}(?!{_SYSTEM_FOLDERS}(?![\w.-]))[\w.~]{_PATH_CHARACTERS}"), REMOVED),
    (regex(r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,100}\.[A-Za-z]{2,24}\b"), REMOVED),
)
_PROCESS_KINDS = ("C", "G", "C+G", "M", "M+C", "M+G", "M+C+G")
_SMI_PROCESS_NAME = regex(r"^(\s+Name\s*: ).*")
_SMI_XML_NAME = regex(r"(<process_name>)[^<]*")

# nvidia-bug-report.sh separates its sections by this line.
_SECTION = "____________________________________________"
_PRIVATE_SECTION = regex(
    r"(?i)(\bps\b|journalctl|xorg|\benv\b|printenv|\bwho\b|\blast\b|lsof|fuser|/etc/(?!os-release)|/var/log|systemctl"
    r"|/proc/cmdline|/home|mounts?\b|\bdf\b)"
)
_HARDWARE_SECTION = regex(
    r"(?i)(nvidia-smi|nvlink|/proc/driver/nvidia|/proc/(cpuinfo|meminfo|interrupts|iomem|ioports|modules|version|mtrr"
    r"|pci)|lspci|dmesg|uname|/sys/bus/pci|nvidia-debugdump|\bmst\b|mlxlink|ibstat|ibv_|\brdma\b|fabric|lsmod"
    r"|os-release|dmidecode|numactl|lscpu|start of nvidia bug report)"
)
_HEADER_LINES = 2  # lines at the beginning of a section that name its content


def redact_line(line: str, names: Iterable[str] = ()) -> str:
    """Return a line without names of processes, users, jobs and their files."""
    for pattern, replacement in _PATTERNS:
        line = pattern.sub(replacement, line)
    for name in names:
        if name in line:
            line = regex(rf"(?<![\w-]){re.escape(name)}(?!\w)").sub(REMOVED, line)
    return line


def redact_kernel_log(text: str, names: Iterable[str] = ()) -> str:
    return "\n".join(redact_line(line, names) for line in text.split("\n"))


def redact_journal(text: str, names: Iterable[str] = ()) -> str:
    """Return the journal's lines of the kernel and of NVIDIA's services."""
    return "".join(f"{line}\n" for line in _journal_lines(text, list(names)))


def _journal_lines(text: str, names: list[str]) -> Iterator[str]:
    for line in text.split("\n"):
        found = _JOURNAL_LINE.fullmatch(line)
        if found and _JOURNAL_KEEPS.fullmatch(found[3]):
            yield f"{found[1]} node {found[3]}{found[4] or ''}: {redact_line(found[5], names)}"


def redact_smi(text: str, names: Iterable[str] = ()) -> str:
    """Return `nvidia-smi` or `nvidia-smi -q`, as text or XML, without the names of processes."""
    lines = (_SMI_XML_NAME.sub(rf"\1{REMOVED}", _redact_smi_row(line)) for line in text.split("\n"))
    known = list(names)
    return "\n".join(redact_line(_SMI_PROCESS_NAME.sub(rf"\1{REMOVED}", line), known) for line in lines)


def _redact_smi_row(line: str) -> str:
    """Return a row of nvidia-smi's table of processes without the name: "| 0 N/A N/A 812 C python3 1000MiB |"."""
    words = line.split()
    if len(words) < 6 or words[0] != "|" or words[-1] != "|" or not words[-2].endswith("MiB"):
        return line
    kinds = [i for i in range(2, len(words) - 2) if words[i] in _PROCESS_KINDS and is_decimal(words[i - 1])]
    return " ".join((*words[: kinds[0] + 1], REMOVED, *words[-2:])) if kinds else line


def redact_bug_report(text: str, names: Iterable[str] = ()) -> str:
    """Return the sections about hardware and driver of nvidia-bug-report.log. Other sections keep only their number."""
    known = list(names)
    sections = []
    for section in text.split(_SECTION):
        header = " ".join(section.strip("\n").split("\n")[:_HEADER_LINES])
        kept = _HARDWARE_SECTION.search(header) and not _PRIVATE_SECTION.search(header)
        sections.append(redact_smi(section, known) if kept else f"\n\n{REMOVED}\n\n")
    return _SECTION.join(sections)


def redact_file(name: str, text: str, names: Iterable[str] = ()) -> str | None:
    """Return the redacted text of a file in an archive, or None if the file is left out."""
    base = name.rpartition("/")[2]
    if base in OMITTED:
        return None
    known = known_names(names)
    if base == VENDOR_JOURNAL:
        return redact_journal(text, known)
    if base.startswith("nvidia-smi"):
        return redact_smi(text, known)
    if base.startswith("nvidia-bug-report"):
        return redact_bug_report(text, known)
    if base.startswith(("kernel", "sel", "bmc", "fru", "hardware")):
        return redact_kernel_log(text, known)
    return None


def known_names(names: Iterable[str]) -> list[str]:
    """Return the names to remove, longest first. Names of one or two letters are words of many messages."""
    return sorted({name for name in names if len(name) > 2}, key=lambda name: (-len(name), name))


def redact_manifest(manifest: Manifest, names: Iterable[str] = ()) -> Manifest:
    """Return the manifest without the node's and the cluster's name, and without texts that may contain site data."""
    known = known_names((*names, manifest.node, manifest.cluster))
    causes = tuple(replace(cause, text=redact_line(cause.text, known)) for cause in manifest.causes)
    parts = tuple(
        replace(part, entries=tuple(_redact_entry(entry, known) for entry in part.entries)) for part in manifest.parts
    )
    return replace(manifest, node="", cluster="", reason="", causes=causes, parts=parts, redacted=True)


def _redact_entry(entry: Entry, names: list[str]) -> Entry:
    """Return an entry with the program's name instead of its command line."""
    return replace(entry, argv=entry.argv[:1], problem=redact_line(entry.problem, names))
