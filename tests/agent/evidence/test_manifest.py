"""Parts of a manifest: which files of a second attempt replace earlier ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.evidence.manifest import SavedPart, merge_part
from healthd.agent.evidence.sources import Entry

COMPLETE = Entry("a", ("x",), 0, 1.0, 10)
PARTIAL = replace(COMPLETE, bytes=20, problem="x did not end", status=None)
ABSENT = Entry("a", ("x",), missing=True)
ENTRIES = st.sampled_from([COMPLETE, PARTIAL, ABSENT, replace(COMPLETE, bytes=0), replace(PARTIAL, bytes=5)])


def part(*entries: Entry, stopped: str = "") -> SavedPart:
    return SavedPart("full", 1.0, 2.0, entries, stopped)


def test_complete_file_is_kept() -> None:
    for new in (COMPLETE, PARTIAL, ABSENT):
        assert merge_part(part(COMPLETE), replace(part(new), began=9.0))[1] == ()


def test_better_file_is_taken() -> None:
    for old in (PARTIAL, ABSENT, replace(COMPLETE, bytes=0)):
        merged, taken = merge_part(part(old), part(COMPLETE))
        assert (merged.entries, taken) == ((COMPLETE,), ("a",))
    assert merge_part(part(replace(PARTIAL, bytes=5)), part(PARTIAL))[1] == ("a",)


def test_stopped_attempt_keeps_files_of_the_earlier_one() -> None:
    other = replace(COMPLETE, file="b")
    merged, taken = merge_part(part(COMPLETE, other), part(replace(COMPLETE, bytes=11), stopped="a job"))
    assert (merged.entries, merged.stopped, taken) == ((COMPLETE, other), "", ())


@given(st.lists(ENTRIES, max_size=1), st.lists(ENTRIES, max_size=1), st.sampled_from(["", "a job"]))
def test_merge_part_has_the_entry_of_each_taken_file(old: list[Entry], new: list[Entry], stopped: str) -> None:
    merged, taken = merge_part(part(*old, stopped=stopped), part(*new))
    assert {entry.file for entry in merged.entries} == {entry.file for entry in (*old, *new)}
    assert merged.entries == (tuple(new) if taken else tuple(old))
    assert merge_part(None, part(*new))[0].entries == tuple(new)
