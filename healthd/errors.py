"""The errors that healthd raises: each is one sentence for a person. Python's own errors (OSError) stay as they are.

HealthdError
├── ConvertError (ValueError)   convert.py                   plain data is not what it should be
├── ConfigError                 config.py                    a setting, or the file that it is in
├── NvmlError                   nvml.py                      a call of NVML has failed
├── LedgerError                 judge/ledger_file.py         what was remembered cannot be read
├── SlurmTrouble                slurm/output.py              Slurm is away, refuses, or prints what nobody expects
├── RecordingError              record/recording.py          a file is no recording
├── NotRecorded (ValueError)    record/recording.py          this was not asked when the recording was made
├── ReplayedError               record/nvml_recording.py     NVML failed when the recording was made
├── LogError                    scan/log_file.py             a log cannot be read, or not further
├── CommandRefused              say/commands.py              the daemon does not carry out what a person asks
├── RefusedByDaemon             cli/control.py               the same refusal, on the client's side
├── NoAnswer                    cli/control.py               no daemon answers
└── Stop                        cli/terminal.py              a command ends here, with this exit status
"""

from __future__ import annotations


class HealthdError(Exception):
    """The root of these errors."""
