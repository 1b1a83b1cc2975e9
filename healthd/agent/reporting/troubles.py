"""What is wrong with healthd itself, one sentence each, and the command with which a person begins to mend it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import NamedTuple

from healthd.common.model import KernelLogStatus, SlurmStatus, StreamStatus


class Trouble(NamedTuple):
    """`next`: what to type, ready to be pasted into a shell; "" = there is nothing to type."""

    sentence: str
    next: str = ""


def troubles(
    *,
    runtime_dir: str,
    state_dir: str,
    settings_file: str,
    reload: str,
    reload_trouble: str,
    metrics_troubles: Iterable[str],
    web_trouble: str,
    textfile_trouble: str,
    files_trouble: str,
    save_failed: bool,
    verdict_trouble: str,
    copy_trouble: str,
    stream: StreamStatus,
    lost_events: int,
    kernel_log: KernelLogStatus,
    slurm: SlurmStatus,
    failslow_trouble: str,
    before_resume: str,
    shortages: Iterable[str],
    mistakes: Iterable[str],
) -> tuple[Trouble, ...]:
    """What a person should do something about comes first.

    reload         the command that makes the daemon read its settings again
    before_resume  why what was to run before a resume told nothing
    files_trouble  healthd's own files are gone, or others
    shortages      of threads, processes and descriptors (host/shortage.py)
    mistakes       of healthd's own (guard.troubles)
    """
    there, here = (f"ls -ld {shlex.quote(folder)}; df -h {shlex.quote(folder)}" for folder in (state_dir, runtime_dir))
    look_at = _command_of(kernel_log)
    again = f"healthd config check {shlex.quote(settings_file)} && {reload}"
    found = (
        Trouble(files_trouble, "systemctl restart healthd"),
        Trouble(f"the settings were not read again: {reload_trouble}" if reload_trouble else "", again),
        Trouble(f"slurm: {slurm.trouble}" if slurm.trouble else "", "scontrol ping"),
        Trouble(f"{runtime_dir}: the ledger cannot be saved" if save_failed else "", here),
        Trouble(verdict_trouble, here),
        Trouble(f"before a resume: {before_resume}" if before_resume else "", "healthd validate"),
        Trouble(
            f"{state_dir}: a reboot would lose what healthd knows: no copy of it: {copy_trouble}"
            if copy_trouble
            else "",
            there,
        ),
        Trouble(f"{state_dir}: {stream.waiting} events wait: {stream.trouble}" if stream.trouble else "", there),
        Trouble(f"{lost_events} events are lost to the stream: too many wait for the disk" if lost_events else ""),
        Trouble(f"kernel log: {kernel_log.trouble}" if kernel_log.trouble or not kernel_log.alive else "", look_at),
        Trouble(failslow_trouble, "journalctl -u healthd -n 50"),
        *(Trouble(sentence, "ss -ltnp") for sentence in metrics_troubles),
        Trouble(web_trouble, f"healthd config check {shlex.quote(settings_file)}"),
        Trouble(textfile_trouble, "healthd doctor"),
        *(Trouble(sentence, "systemctl status healthd; cat /proc/loadavg") for sentence in shortages),
        *(Trouble(sentence, "journalctl -u healthd -p err -n 50") for sentence in mistakes),
    )
    return tuple(trouble for trouble in found if trouble.sentence)


def _command_of(log: KernelLogStatus) -> str:
    """Where a log that is read is the trouble (switched off, or only observed), it is a matter of the settings."""
    if log.source == "off" or (log.alive and log.observed):
        return "healthd config show | grep kernel_log"
    known = {"kmsg": "ls -l /dev/kmsg; dmesg | tail -1", "journal": "journalctl -k -n 1"}
    return known.get(log.source) or f"ls -l {shlex.quote(log.source)}"
