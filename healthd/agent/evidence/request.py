"""The request that the daemon writes for the collector, and the files that both use."""

from __future__ import annotations

from healthd.agent.evidence.case import Cause, Result
from healthd.agent.settings.config import EvidenceConfig
from healthd.common.model import Gpu
from healthd.common.text import regex
from healthd.common.values import DecodeError, Value, decode

NAME = "evidence"  # of the request file, the lock and the systemd units
RESULT_FILE = "evidence.result"  # in the runtime directory: the last part's result
ATTEMPTS_FILE = "evidence.attempts"  # in the runtime directory: how often the collector began the current request
FOLDER = "evidence"  # in the state directory: the evidence
STOP = "stop"  # the part of a request that stops the collector

ID = regex(r"[0-9]{8}T[0-9]{6}Z-[a-z0-9_-]{1,40}")
_PARTS = ("first", "full", STOP)


class Request(Value, frozen=True):
    """A part of a case to save.

    part       "first", "full" or "stop"
    attempt    number of the request for this part, which the result repeats
    began      when the case began; `fault_at` is the time of the first fault (epoch seconds)
    gpus       GPUs before the fault: nvidia-smi no longer shows a GPU that fell off the bus
    flags      flags for `healthd record`, so that it inspects the machine that the daemon monitors
    root       where Slurm's cgroups are, to detect a job
    """

    id: str
    part: str
    state_dir: str
    attempt: int = 1
    node: str = ""
    cluster: str = ""
    mode: str = ""
    began: float = 0.0
    fault_at: float = 0.0
    reason: str = ""
    causes: tuple[Cause, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    flags: tuple[str, ...] = ()
    root: str = "/"
    settings: EvidenceConfig = EvidenceConfig()


def parse_request(text: str) -> Request:
    """Parse a request. Raises DecodeError."""
    request = decode(Request, text)
    if not ID.fullmatch(request.id) or request.part not in _PARTS or not request.state_dir.startswith("/"):
        raise DecodeError("not a request for evidence")
    return request


def parse_result(text: str) -> Result | None:
    """Parse a result, or return None if the text is not one."""
    try:
        return decode(Result, text)
    except DecodeError:
        return None
