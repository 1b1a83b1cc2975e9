"""nvml_binding: pynvml is imported without ctypes.util, without side effects, for possible future versions too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from healthd.nvidia.nvml_binding import pynvml
pynvml = pynvml()
loaded = "ctypes.util" in sys.modules
import ctypes.util
assert ctypes.util.__file__ and sys.modules["ctypes.util"] is ctypes.util
print(loaded, "shutil" in sys.modules and loaded, pynvml.found())
"""
# The present and possible future texts of pynvml -> whether ctypes.util must be imported.
VERSIONS = {
    "from ctypes.util import find_library\ndef found(): return find_library('c')": False,
    "from ctypes.util import find_library\nC = find_library('c')\ndef found(): return C": True,
    "from ctypes.util import find_library, test\ndef found(): return find_library('c')": True,
    "import ctypes.util\ndef found(): return ctypes.util.find_library('c')": True,
    "import ctypes.util\nC = ctypes.util.find_library('c')\ndef found(): return C": True,
    "import ctypes\ndef found():\n import ctypes.util\n return ctypes.util.find_library('c')": True,
}


def run_python(program: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", f"import sys; sys.path[:0] = {[*map(str, paths), str(ROOT)]}\n{program}"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("text", VERSIONS)
def test_each_version_of_pynvml_finds_its_library(text: str, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(text)
    done = run_python(PROGRAM, tmp_path)
    assert done.stdout.split()[0] == str(VERSIONS[text]), done.stderr
    assert done.stdout.split()[2] == "libc.so.6"


def test_installed_pynvml_is_imported_without_ctypes_util() -> None:
    done = run_python(
        "from healthd.nvidia.nvml_binding import pynvml; found = pynvml()\n"
        "assert not {'ctypes.util', 'shutil', 'tempfile', 'bz2', 'lzma'} & {*sys.modules}\n"
        "print(found.nvmlInit.__name__, found.find_library('c'))"
    )
    assert done.stdout.split() == ["nvmlInit", "libc.so.6"], done.stderr


def test_failed_import_of_pynvml_is_raised(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("from ctypes.util import find_library\nimport there_is_no_such\n")
    done = run_python("from healthd.nvidia.nvml_binding import pynvml; pynvml()", tmp_path)
    assert "No module named 'there_is_no_such'" in done.stderr
    assert "Traceback" in done.stderr
