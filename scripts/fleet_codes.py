"""Write healthd/fleet/codes.csv: for each code of the built-in checks, its cause, whether it ends jobs, and whether it
is permanent.

The checks declare these values (CAUSES, ENDS_JOB, PERMANENT). `healthd fleet` imports no checks, so it reads this
table. Run the script after a check gets a new code; tests/fleet/answers/test_causes.py fails if the table differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from healthd.agent.settings.registry import Check, built_in_checks
from healthd.common.job_failures import EndsJob

TABLE = Path(__file__).resolve().parents[1] / "healthd/fleet/codes.csv"
UNUSED = 1000  # below this number, Xids that the catalogue lists as unused have no text
# an Xid number that no catalogue has; its row becomes CHECK/*, which applies to all numbers without a row
UNLISTED = 10**6


def table(checks: Mapping[str, Check]) -> str:
    """Return the text of the table, sorted by code."""
    rows = sorted({row for check in checks.values() for row in _rows(check)})
    return "".join(f"{','.join(row)}\n" for row in [("code", "cause", "ends_job", "permanent"), *rows])


def _rows(check: Check) -> Iterator[tuple[str, str, str, str]]:
    declares = check.declares
    for code in {*check.codes(), *declares.CAUSES, *declares.ENDS_JOB, *declares.PERMANENT}:
        yield code, *_meaning(check, code)
    if declares.explain is not None:  # the codes are numbers
        default_meaning = _meaning(check, f"{check.name}/{UNLISTED}")
        yield f"{check.name}/*", *default_meaning
        unused = {f"{check.name}/{number}" for number in range(UNUSED)} - {*check.codes()}
        yield from ((code, *meaning) for code in unused if (meaning := _meaning(check, code)) != default_meaning)


def _meaning(check: Check, code: str) -> tuple[str, str, str]:
    declares = check.declares
    cause = declares.CAUSES[code] if code in declares.CAUSES else declares.cause(code)
    by_number = declares.ends_job(code) if code.rpartition("/")[2].isdecimal() else EndsJob.IF_ISOLATES
    ends = declares.ENDS_JOB.get(code, by_number)
    return cause.value, ends.value, "permanent" if code in declares.PERMANENT else ""


def main() -> int:
    text = table(built_in_checks())
    changed = not TABLE.exists() or TABLE.read_text("utf-8") != text
    TABLE.write_text(text, "utf-8")
    print(f"{TABLE.name}: {'changed' if changed else 'unchanged'}, {len(text.splitlines()) - 1} codes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
