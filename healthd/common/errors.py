"""The errors that healthd raises: each is one sentence for a person. Python's own errors (OSError) stay as they are.

HealthdError
├── ConvertError (ValueError)   convert.py                   plain data is not what it should be
├── Untrusted (PermissionError)  machine/ownership.py        others than root could have changed what would be used
├── ConfigError                 config.py                    a setting, or the file that it is in
├── NvmlError                   nvml.py                      a call of NVML has failed
├── LedgerError                 judge/kept_file.py           what was remembered cannot be read
├── SlurmTrouble                slurm/output.py              Slurm is away, refuses, or prints what nobody expects
├── NoSuchNode (SlurmTrouble)   slurm/output.py             ... or has no node of that name
├── Overtaken                   slurm/look.py                others changed the node meanwhile: it is decided anew
├── RecordingError              record/recording.py          a file is no recording
├── NotRecorded (ValueError)    record/recording.py          this was not asked when the recording was made
├── ReplayedError               record/nvml_recording.py     NVML failed when the recording was made
├── WebConfigError              say/web_config.py            the web configuration file, or a file that it names
├── TooBusy                     say/web_passwords.py         others' passwords are looked at
├── NotPlain                    unpickle.py                  a pickle of others is more than data, or damaged
├── NoPeriod                    failslow/period.py          a stream of operations has no rhythm
├── NothingCounts               live/counters.py            a node has nothing that counts what is to be sampled
├── StreamError                 failslow/stream.py          a record of operations cannot be read, or tells nothing
├── LogError                    scan/log_file.py             a log cannot be read, or not further
├── WrongQuestion               fleet/questions.py          this is no question to the store
├── NoSpark                     fleet/spark.py              there is no Spark here, or it does not start
├── Unanswerable                fleet/answers/document.py   the fleet's store lacks what an answer stands on
├── WrongChoice                 fleet/answers/document.py   nothing in the store is what was asked for
├── NotOurs                     fleet/report.py             what stands in the report's place is no report
├── NotAValidation              validation/document.py      a text is no validation's document
├── NotUnderstood               validation/measurement.py   what a tool that measures has printed is nothing known
├── Refused                     validation/run.py           a validation does not begin
├── NoFolder                    fleet/collectives/files.py  a stuck job's folder cannot be read
├── NoPlot                      failslow/plot.py             a file is to be no kind of plot that there is
├── NoDump                      fleet/collectives/dump.py   a file of it is no flight recorder's dump
├── NotAPass                    validation/pair.py           a text does not say who sends to whom
├── NoReservation               validation/reservation.py    Slurm gave no reservation to validate nodes in
├── Stopped                     validation/reservation.py    a person has had enough of a validation
├── WrongSplit                  failslow/mitigation/micro_batches.py  these times, or micro-batches, cannot be divided
├── WrongTopology               failslow/mitigation/stages.py  these places are no job, or what is named is not in it
├── Unreadable                  failslow/readers/chunks.py  a file is no table of samples
├── StoreError                  fleet/manifest.py           the fleet's store cannot be used, or not be written
├── NeedsMemory (StoreError)    fleet/store.py              ... or an answer takes more memory than it may
├── IngestError                 fleet/ingest.py             a source cannot be read into it
├── WrongCommand (IngestError)  fleet/ingest.py              ... nor any file of it, as it was asked
├── ServerError                 fleet/sources/prometheus_server.py  a Prometheus server cannot be asked
├── TooMuch (ServerError)       fleet/sources/prometheus_server.py  ... of so long a time
├── Refused                     control/protocol.py         a request is none that the daemon knows
├── CommandRefused              control/commands.py         the daemon does not carry out what a person asks
├── RefusedByDaemon             control/client.py           the same refusal, on the client's side
├── NoAnswer                    control/client.py           no daemon answers
├── HostListError (ValueError)  fleet/hostlist.py            a text is no host list, or of too many names
├── NotReadable                 fleet/sources/job_row.py     a source of jobs cannot be read at all
├── CutOff (NotReadable)        fleet/sources/job_row.py     ... to its end: it breaks off
├── TimeError (ValueError)      fleet/times.py               a text is no time, or not one time
├── NoTime (TimeError)          fleet/times.py              ... but none at all
└── Stop                        cli/terminal.py              a command ends here, with this exit status
"""

from __future__ import annotations


class HealthdError(Exception):
    """The root of these errors."""
