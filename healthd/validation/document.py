"""The last validation of a node, as a value and as the text of STATE_DIR/validation.json.

It is written by root and read by the daemon: what does not fit is refused as a whole, in one sentence.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from healthd.common.errors import HealthdError
from healthd.common.text import printable
from healthd.common.values import DecodeError, decode

T = TypeVar("T", bound=Struct)

SCHEMA = 1
YEAR_9999 = 253_402_300_799  # no date is later
FILE = "validation.json"  # in the state directory
LOCK = "validation.lock"  # in the runtime directory; it holds the pid of who validates now, and a line feed
Why = Literal["hand", "idle", "epilog", "nodes"]
StoppedBy = Literal["", "a job", "time", "a signal"]
Verdict = Literal["ok", "slow", "failed", "not_looked"]
Against = Literal["", "floor", "peers", "own"]
MOST_RESULTS = 20_000  # 72 GPUs of an NVL72 in a ring, each with all tests, are some 1,000
MOST_CHARACTERS = 400  # of a text in it

Text = Annotated[str, Meta(max_length=MOST_CHARACTERS)]
Moment = Annotated[float, Meta(ge=0, le=YEAR_9999)]


class NotAValidation(HealthdError):
    """A text is no validation's document: one sentence."""


class Result(Struct, frozen=True):
    """What came of one test of one part.

    test      gemm_bf16, memory, pcie_h2d, ... (docs/validation.md)
    part      a PCI address, "ADDRESS>ADDRESS" of a pair, a port like mlx5_0/1; "" = the node
    value     in `unit`; None: it has none, or was not measured
    verdict   one of VERDICTS
    against   what decided: floor, peers, own (history); "" = nothing to compare with, or nothing to compare
    expected  at least this was wanted, in `unit`; None: nothing was
    says      one sentence with the numbers
    source    the tool and its version; "" = no tool looked
    """

    test: Text
    part: Text
    value: float | None
    unit: Text
    verdict: Verdict
    against: Against
    expected: float | None
    says: Text
    source: Text


class Validation(Struct, frozen=True):
    """began, ended: epoch seconds. not_seen: sentences on what nobody looked at."""

    node: Text
    boot_id: Text
    began: Moment
    ended: Moment
    why: Why
    stopped_by: StoppedBy
    results: Annotated[tuple[Result, ...], Meta(max_length=MOST_RESULTS)]
    not_seen: Annotated[tuple[Text, ...], Meta(max_length=MOST_RESULTS)]


class _Schema(Struct):
    schema: int


def worst(validation: Validation) -> str:
    """failed, slow or ok; not_looked where nothing could be looked at, or the CPU alone, which says nothing of a
    GPU."""
    verdicts = {result.verdict for result in validation.results}
    for verdict in ("failed", "slow"):
        if verdict in verdicts:
            return verdict
    looked = {result.test for result in validation.results if result.verdict == "ok"}
    return "ok" if looked and not ("not_looked" in verdicts and looked == {"cpu_gemm"}) else "not_looked"


def as_document(validation: Validation) -> dict[str, Any]:
    """What the file holds, and `--json` prints; a text that is too long is cut."""
    return {
        "schema": SCHEMA,
        **asdict(validation),
        "results": [
            {key: value[:MOST_CHARACTERS] if isinstance(value, str) else value for key, value in asdict(one).items()}
            for one in validation.results
        ],
        "not_seen": [sentence[:MOST_CHARACTERS] for sentence in validation.not_seen],
        "verdict": worst(validation),
    }


def as_text(validation: Validation) -> str:
    return json.dumps(as_document(validation), indent=1, allow_nan=False) + "\n"


def parse(text: str) -> Validation:
    """Raises NotAValidation. Unknown fields are ignored: a later version may write more."""
    try:
        if (schema := decode(_Schema, text).schema) != SCHEMA:
            raise NotAValidation(f"is a validation of schema {schema}, not {SCHEMA}")
        validation = _printable(decode(Validation, text))
    except DecodeError as error:
        raise NotAValidation(f"is not a validation: {error}") from None
    return replace(
        validation,
        results=tuple(_printable(result) for result in validation.results),
        not_seen=tuple(printable(sentence) for sentence in validation.not_seen),
    )


def _printable(value: T) -> T:
    texts = {name: text for name, text in asdict(value).items() if isinstance(text, str)}
    return replace(value, **{name: printable(text) for name, text in texts.items()})
