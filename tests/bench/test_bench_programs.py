"""The programs of bench/ run by hand and not in `make test`; this tests that their imports work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
PROGRAMS = sorted(file.stem for file in BENCH.glob("*.py") if '__name__ == "__main__"' in file.read_text())


@pytest.mark.one_python
@pytest.mark.parametrize("program", PROGRAMS)
def test_bench_program_imports_from_any_folder(program, tmp_path):
    argv = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(BENCH)!r}); import {program}"]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
