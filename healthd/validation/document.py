"""The last validation of a node, as a value and as the text of STATE_DIR/validation.json.

It is written by root and read by the daemon: what does not fit is refused as a whole, in one sentence.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from healthd.common.errors import HealthdError
from healthd.common.text import printable

SCHEMA = 1
YEAR_9999 = 253_402_300_799  # no date is later
FILE = "validation.json"  # in the state directory
LOCK = "validation.lock"  # in the runtime directory; it holds the pid of who validates now, and a line feed
WHY = ("hand", "idle", "epilog", "nodes")
STOPPED_BY = ("", "a job", "time", "a signal")
VERDICTS = ("ok", "slow", "failed", "not_looked")
AGAINST = ("", "floor", "peers", "own")
MOST_RESULTS = 20_000  # 72 GPUs of an NVL72 in a ring, each with all tests, are some 1,000
MOST_CHARACTERS = 400  # of a text in it


class NotAValidation(HealthdError):
    """A text is no validation's document: one sentence."""


class Result(NamedTuple):
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

    test: str
    part: str
    value: float | None
    unit: str
    verdict: str
    against: str
    expected: float | None
    says: str
    source: str


class Validation(NamedTuple):
    """began, ended: epoch seconds. not_seen: sentences on what nobody looked at."""

    node: str
    boot_id: str
    began: float
    ended: float
    why: str
    stopped_by: str
    results: tuple[Result, ...]
    not_seen: tuple[str, ...]


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
        **validation._asdict(),
        "results": [
            {key: value[:MOST_CHARACTERS] if isinstance(value, str) else value for key, value in one._asdict().items()}
            for one in validation.results
        ],
        "not_seen": [sentence[:MOST_CHARACTERS] for sentence in validation.not_seen],
        "verdict": worst(validation),
    }


def as_text(validation: Validation) -> str:
    return json.dumps(as_document(validation), indent=1, allow_nan=False) + "\n"


def parse(text: str) -> Validation:
    """Raises NotAValidation. Keys that are not known here are passed over: a later version may write more."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise NotAValidation("is no JSON") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or isinstance(data["schema"], bool):
        raise NotAValidation(f'is no validation of schema {SCHEMA}: "schema" is missing or another')
    results, not_seen = data.get("results"), data.get("not_seen")
    if not isinstance(results, list) or len(results) > MOST_RESULTS:
        raise NotAValidation(f'"results" must be a list of at most {MOST_RESULTS} results')
    if not isinstance(not_seen, list) or len(not_seen) > MOST_RESULTS:
        raise NotAValidation(f'"not_seen" must be a list of at most {MOST_RESULTS} sentences')
    began, ended = _number(data, "began"), _number(data, "ended")
    if began is None or ended is None or not (0 <= began <= YEAR_9999 and 0 <= ended <= YEAR_9999):
        raise NotAValidation('"began" and "ended" must be seconds since the epoch')
    return Validation(
        _text(data, "node"),
        _text(data, "boot_id"),
        began,
        ended,
        _word(data, "why", WHY),
        _word(data, "stopped_by", STOPPED_BY),
        tuple(_result(one) for one in results),
        tuple(_bounded(one, "not_seen") for one in not_seen),
    )


def _result(data: Any) -> Result:
    if not isinstance(data, dict):
        raise NotAValidation('a result of "results" must be a table')
    return Result(
        _text(data, "test"),
        _text(data, "part"),
        _number(data, "value"),
        _text(data, "unit"),
        _word(data, "verdict", VERDICTS),
        _word(data, "against", AGAINST),
        _number(data, "expected"),
        _text(data, "says"),
        _text(data, "source"),
    )


def _text(data: dict[str, Any], key: str) -> str:
    return _bounded(data.get(key), key)


def _bounded(value: Any, key: str) -> str:
    if not isinstance(value, str) or len(value) > MOST_CHARACTERS:
        raise NotAValidation(f'"{key}" must be a text of at most {MOST_CHARACTERS} characters')
    return printable(value)


def _word(data: dict[str, Any], key: str, words: tuple[str, ...]) -> str:
    value = data.get(key)
    if value not in words:
        raise NotAValidation(f'"{key}" must be one of: {", ".join(word or "(empty)" for word in words)}')
    return str(value)


def _number(data: dict[str, Any], key: str) -> float | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotAValidation(f'"{key}" must be a number')
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NotAValidation(f'"{key}" must be a finite number')
    return number
