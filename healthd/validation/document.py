"""A node's validations as objects, and the two files in STATE_DIR that contain them.

validation.json contains the last validation. Root writes the file and the daemon reads it. An invalid file is rejected
completely, with one sentence as the error message.

validations.jsonl contains the history, one line for each good value. Slow values are not recorded, because a GPU or
port that stays slow would then be compared with its own slow values. Only the newest `MAX_VALUES` values for each test,
part and tool are kept. A new tool version starts a new history.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from healthd.common.errors import HealthdError
from healthd.common.text import printable
from healthd.common.values import DecodeError, decode

T = TypeVar("T", bound=Struct)

SCHEMA = 1
YEAR_9999 = 253_402_300_799  # the latest valid date
FILE = "validation.json"  # in the state directory
HISTORY_FILE = "validations.jsonl"  # in the state directory
LOCK = "validation.lock"  # in the runtime directory; contains the running validation's pid and a line feed
Why = Literal["manual", "before_resume", "epilog", "nodes", "repair"]
StoppedBy = Literal["", "a job", "time", "a signal"]
Verdict = Literal["ok", "slow", "failed", "not_measured"]
Against = Literal["", "floor", "peers", "own"]
MAX_RESULTS = 20_000  # maximum number of results; 72 GPUs in a ring (NVL72), each with all tests, have about 1,000
MAX_CHARACTERS = 400  # maximum characters per text

Text = Annotated[str, Meta(max_length=MAX_CHARACTERS)]
Moment = Annotated[float, Meta(ge=0, le=YEAR_9999)]
Key = tuple[str, str, str]  # test, part, source
History = dict[Key, list[float]]


class NotAValidation(HealthdError):
    """The validation document is invalid. The message is one sentence."""


class Result(Struct, frozen=True):
    """Result of one test on one part.

    Attributes:
        test: gemm_bf16, memory, pcie_h2d, ... (docs/validation.md).
        part: a PCI address, "ADDRESS>ADDRESS" for a pair, a port like mlx5_0/1, or "" for the node.
        value: in `unit`, or None if there is no value or it was not measured.
        verdict: one of VERDICTS.
        against: the reference for the verdict: floor, peers or own (the part's history), or "" if there is none.
        expected: the required minimum, in `unit`, or None if there is none.
        message: one sentence with the numbers.
        source: the tool and its version, or "" if no tool ran.
    """

    test: Text
    part: Text
    value: float | None
    unit: Text
    verdict: Verdict
    against: Against
    expected: float | None
    message: Text
    source: Text


class Validation(Struct, frozen=True):
    """A validation of one node.

    Attributes:
        began, ended: epoch seconds.
        unmeasured: sentences about parts without a measurement.
    """

    node: Text
    boot_id: Text
    began: Moment
    ended: Moment
    why: Why
    stopped_by: StoppedBy
    results: Annotated[tuple[Result, ...], Meta(max_length=MAX_RESULTS)]
    unmeasured: Annotated[tuple[Text, ...], Meta(max_length=MAX_RESULTS)]


class _Schema(Struct):
    schema: int


def worst(validation: Validation) -> str:
    """Return the verdict of the whole validation: failed, slow, ok or not_measured.

    It is not_measured if no test ran, or only the CPU test, which proves nothing about a GPU.
    """
    verdicts = {result.verdict for result in validation.results}
    for verdict in ("failed", "slow"):
        if verdict in verdicts:
            return verdict
    tested = {result.test for result in validation.results if result.verdict == "ok"}
    return "ok" if tested and not ("not_measured" in verdicts and tested == {"cpu_gemm"}) else "not_measured"


def as_document(validation: Validation) -> dict[str, Any]:
    """Return the content for the file and for `--json`. Long texts are truncated."""
    return {
        "schema": SCHEMA,
        **asdict(validation),
        "results": [
            {key: value[:MAX_CHARACTERS] if isinstance(value, str) else value for key, value in asdict(result).items()}
            for result in validation.results
        ],
        "unmeasured": [sentence[:MAX_CHARACTERS] for sentence in validation.unmeasured],
        "verdict": worst(validation),
    }


def as_text(validation: Validation) -> str:
    return json.dumps(as_document(validation), indent=1, allow_nan=False) + "\n"


def parse(text: str) -> Validation:
    """Parse a validation. Raises NotAValidation.

    Unknown fields are ignored, because a later version may write more fields.
    """
    try:
        if (schema := decode(_Schema, text).schema) != SCHEMA:
            raise NotAValidation(f"is a validation with schema {schema}, not {SCHEMA}")
        validation = _printable(decode(Validation, text))
    except DecodeError as error:
        raise NotAValidation(f"is not a validation: {error}") from None
    return replace(
        validation,
        results=tuple(_printable(result) for result in validation.results),
        unmeasured=tuple(printable(sentence) for sentence in validation.unmeasured),
    )


def _printable(value: T) -> T:
    texts = {name: text for name, text in asdict(value).items() if isinstance(text, str)}
    return replace(value, **{name: printable(text) for name, text in texts.items()})


# --- the history

MAX_VALUES = 10
MAX_LINES = 20_000
MAX_LINE_CHARACTERS = 1000


class _Line(Struct):
    test: str
    part: str
    source: str
    value: Annotated[float, Meta(gt=0, lt=1e300)]


def parse_history(text: str) -> History:
    """Return the values for each test, part and tool, oldest first. Invalid lines are skipped."""
    history: History = {}
    for line in text.splitlines()[-MAX_LINES:]:
        if len(line) <= MAX_LINE_CHARACTERS:
            with suppress(DecodeError):
                found = decode(_Line, line)
                key = (printable(found.test), printable(found.part), printable(found.source))
                history.setdefault(key, []).append(found.value)
    return {key: values[-MAX_VALUES:] for key, values in history.items()}


def with_new_values(history: Mapping[Key, Sequence[float]], results: Iterable[Result]) -> History:
    """Return the history with the good values from a completed validation added."""
    new = {key: list(values) for key, values in history.items()}
    for result in results:
        if result.verdict == "ok" and result.value is not None and result.value > 0:
            new.setdefault((result.test, result.part, result.source), []).append(result.value)
    return {key: values[-MAX_VALUES:] for key, values in new.items()}


def history_as_text(history: Mapping[Key, Sequence[float]]) -> str:
    lines = [
        json.dumps({"test": test, "part": part, "source": source, "value": value})
        for (test, part, source), values in history.items()
        for value in values
    ]
    return "".join(f"{line}\n" for line in lines[-MAX_LINES:])


# --- earlier faults

BAD_VERDICTS = ("failed", "slow")
TESTED_VERDICTS = ("ok", *BAD_VERDICTS)


def with_untested(new: Validation, before: Validation | None) -> Validation:
    """Return `new`, with the bad results from `before` that were not tested again.

    A stopped or partial validation replaces the whole document. Without the earlier bad results, a failed GPU would
    then appear healthy. An earlier result is dropped if its part no longer exists and the same test completed on other
    parts.
    """
    if before is None:
        return new
    tested = {(result.test, result.part) for result in new.results if result.verdict in TESTED_VERDICTS}
    elsewhere = {test for test, _ in tested} if not new.stopped_by else set()
    reported = {(result.test, result.part) for result in new.results}
    carried_over = tuple(
        result
        for result in before.results
        if result.verdict in BAD_VERDICTS
        and (result.test, result.part) not in tested
        and not _is_part_gone(result, reported, elsewhere)
    )
    if not carried_over:
        return new
    carried_keys = {(result.test, result.part) for result in carried_over}
    results = tuple(result for result in new.results if (result.test, result.part) not in carried_keys)
    sentences = tuple(
        f"{result.test} {result.part}: found {result.verdict} earlier and not tested again" for result in carried_over
    )
    return replace(
        new, results=(*results, *carried_over), unmeasured=tuple(dict.fromkeys((*new.unmeasured, *sentences)))
    )


def _is_part_gone(result: Result, reported: Collection[tuple[str, str]], elsewhere: Collection[str]) -> bool:
    return result.test in elsewhere and (result.test, result.part) not in reported and bool(result.part)
