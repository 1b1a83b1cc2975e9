"""The times at which the prolog refused jobs, as it wrote them down."""

from __future__ import annotations

from pathlib import Path

from healthd.agent.slurm.prolog_refusals import FILE, LINES, told_by_prolog


def test_told_by_prolog_returns_the_time_of_each_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("1800000000 12\n1800000060 13\nnonsense\n\n")
    assert told_by_prolog(str(tmp_path)) == (1800000000.0, 1800000060.0)


def test_told_by_prolog_returns_the_last_lines_of_a_long_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("".join(f"{1800000000 + n} {n}\n" for n in range(2 * LINES)))
    assert told_by_prolog(str(tmp_path))[-1] == 1800000000.0 + 2 * LINES - 1
    assert len(told_by_prolog(str(tmp_path))) < LINES + 1


def test_told_by_prolog_returns_nothing_without_a_line(tmp_path: Path) -> None:
    assert told_by_prolog(str(tmp_path)) == ()
    (tmp_path / FILE).touch()
    assert told_by_prolog(str(tmp_path)) == ()
