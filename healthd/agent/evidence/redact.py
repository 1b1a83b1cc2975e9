"""A copy of the evidence for a vendor: without user names, command lines, job names and other data of the site.

Only known content is kept. The journal keeps lines of the kernel and of NVIDIA's services; the bug report keeps the
sections about the hardware and the driver. `healthd record` is left out: it contains the settings, process names and
mount points. All functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from healthd.agent.evidence.manifest import Manifest
from healthd.agent.evidence.sources import Entry
from healthd.common.text import is_decimal, regex

REMOVED = "[removed]"
OMITTED = ("record.rec",)  # files that are left out

# Journal lines as `journalctl --output short-iso-precise` prints them: TIME HOST IDENTIFIER[PID]: MESSAGE.
_JOURNAL_LINE = regex(r"(\S+) (\S+) ([^\s:\[]+)(\[[0-9]+\])?: (.*)")
_JOURNAL_KEEPS = regex(r"kernel|nvidia-[a-z0-9-]+|nv-[a-z0-9-]+|nvlsm|dcgm[a-z-]*")

# Names of processes, users, jobs and files in messages of the kernel and NVIDIA's driver.
_FOLDERS = "home|users|root|scratch|lustre|gpfs|data|work|project|projects|mnt|nfs|tmp|var/spool/slurm[a-z]*"
# Each repeat is bounded, so that the time for a line grows linearly with its length.
_PATTERNS = (
    (regex(r"(\bname=)[^,\n]*"), rf"\1{REMOVED}"),  # NVRM: Xid (PCI:...): 31, pid=4242, name=python3
    (regex(r"(?i)(\bcomm[=:] ?)(\"[^\"\n]{0,300}\"|[^\s,\n]+)"), rf"\1{REMOVED}"),
    (regex(r"(\b(?:exe|cmd|cmdline|proctitle|acct|cwd|path)=)(\"[^\"\n]{0,300}\"|\S+)"), rf"\1{REMOVED}"),
    (regex(r"(\b(?:[Tt]ask|[Pp]rocess|Killed process [0-9]{1,10}) )\([^)\n]{0,100}\)"), rf"\1{REMOVED}"),
    (regex(r"(\b[Pp]rocess )([^\s,\n]{1,100})(?= \(?pid)"), rf"\1{REMOVED}"),
    (regex(r"(\btask )([^\s\n]{1,100})(:[0-9]{1,10} blocked)"), rf"\1{REMOVED}\3"),
    (regex(r"(^|\s)([^\s\[\]:=]{1,100})(\[[0-9]{1,10}\]:? (?:segfault|trap|general protection))"), rf"\1{REMOVED}\3"),
    (regex(r"(?i)(\b[a-z]?uid[=:] ?)[0-9]+"), rf"\1{REMOVED}"),
    (regex(rf"(?<![\w.])/(?:{_FOLDERS})(?:/[^\s,;:\"')\]]*)?(?![\w-])"), REMOVED),
    (regex(r"(\bjob_|/slurm/uid_)[^\s,;/]+"), rf"\1{REMOVED}"),
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
            line = regex(rf"(?<![\w-]){re.escape(name)}(?![\w-])").sub(REMOVED, line)
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
            yield redact_line(f"{found[1]} node {found[3]}{found[4] or ''}: {found[5]}", names)


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
    known = [found for found in names if len(found) > 2]  # shorter names are words of many messages
    if base.startswith("journal"):
        return redact_journal(text, known)
    if base.startswith("nvidia-smi"):
        return redact_smi(text, known)
    if base.startswith("nvidia-bug-report"):
        return redact_bug_report(text, known)
    if base.startswith(("kernel", "sel", "bmc", "fru", "hardware")):
        return redact_kernel_log(text, known)
    return None


def redact_manifest(manifest: Manifest) -> Manifest:
    """Return the manifest without the node's and the cluster's name, and without texts that may contain site data."""
    causes = tuple(replace(cause, text=redact_line(cause.text)) for cause in manifest.causes)
    parts = tuple(replace(part, entries=tuple(map(_redact_entry, part.entries))) for part in manifest.parts)
    return replace(manifest, node="", cluster="", reason="", causes=causes, parts=parts, redacted=True)


def _redact_entry(entry: Entry) -> Entry:
    """Return an entry with the program's name instead of its command line."""
    return replace(entry, argv=entry.argv[:1], problem=redact_line(entry.problem))
