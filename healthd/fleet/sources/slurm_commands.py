"""Runs Slurm commands. If the output is incomplete, an error is raised."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

from healthd.common.text import printable
from healthd.fleet.ingest import IngestError

OUTPUT_TIMEOUT_SECONDS = 300.0  # the commands print nothing until slurmdbd or slurmctld has answered
EXIT_TIMEOUT_SECONDS = 10.0
# Print times in epoch seconds, which have no time zone and no repeated hour. Do not use this setting for JSON, which
# does not need it: sacct 22.05 --json would format its own --starttime in this way and then could not parse it.
EPOCH_TIMES = {"SLURM_TIME_FORMAT": "%s"}
# Slurm's commands read formats, filters, clusters and times also from these environment variables. The variables are
# removed, because healthd passes all of these as arguments.
_REMOVED_VARIABLES = (
    *("SACCT", "SCONTROL_", "SINFO_", "SQUEUE_"),
    *("SLURM_BITSTR_LEN", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_TOPO_LEN"),
)


class _TimedPipe(io.RawIOBase):
    """A program's output. Reading fails if the program prints nothing for too long."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self.name = name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not select.select([self.descriptor], [], [], OUTPUT_TIMEOUT_SECONDS)[0]:
            raise IngestError(f"{self.name}: printed nothing for {OUTPUT_TIMEOUT_SECONDS:g} s and was killed")
        return os.readv(self.descriptor, [buffer])


@contextmanager
def command_output(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[BinaryIO]:
    """Yield the output of a Slurm command.

    If the command failed, its output is incomplete: IngestError is raised at the end. If the command hangs, it is
    killed, and IngestError is raised during reading. If it still does not end, it is abandoned.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_REMOVED_VARIABLES)}
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**inherited, "LC_ALL": "C.UTF-8", **(environment or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise IngestError(f"{argv[0]}: cannot be run: {error.strerror}") from None
        assert process.stdout is not None
        try:
            with io.BufferedReader(_TimedPipe(process.stdout.fileno(), argv[0]), 1 << 16) as stream:
                yield cast(BinaryIO, stream)
                while stream.read(1 << 16):
                    pass
            _await(process, argv[0])
        finally:
            _kill(process)
        if process.returncode:
            errors.seek(0)
            error_output = " ".join(errors.read(4096).decode("utf-8", "replace").split())
            message = printable(error_output)[:300] or f"status {process.returncode}"
            raise IngestError(f"{argv[0]} failed: {message}")


def _await(process: subprocess.Popen[bytes], name: str) -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT_SECONDS
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise IngestError(f"{name}: did not end and was killed")
        time.sleep(0.02)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_SECONDS / 10)
    assert process.stdout is not None
    process.stdout.close()
