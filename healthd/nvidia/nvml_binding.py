"""pynvml without what only ctypes.util needs of it: shutil, tempfile, bz2 and lzma are 0.6 MiB, for months.

pynvml takes find_library() from there and does not call it: it names libnvidia-ml.so.1 to the loader.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

UTIL = "ctypes.util"


def pynvml() -> Any:
    """The module. A version of it that wants more of ctypes.util has it as it is."""
    if "pynvml" not in sys.modules and UTIL not in sys.modules:
        _import_without_util()
    import pynvml

    return pynvml


def _import_without_util() -> None:
    """Leaves no trace but pynvml; not even that where it fails, which whoever imports it next is told."""
    stand_in: Any = ModuleType(UTIL)
    stand_in.find_library = _find_library
    sys.modules[UTIL] = stand_in
    try:
        import pynvml
    except (ImportError, AttributeError):
        return
    finally:
        sys.modules.pop(UTIL, None)
    if getattr(pynvml, "find_library", None) is not _find_library:  # it may look there later
        import ctypes.util  # noqa: F401


def _find_library(name: str) -> str | None:
    """As ctypes.util's, which is imported for who calls it."""
    from ctypes.util import find_library

    if find_library is _find_library:
        raise ImportError("pynvml calls it while it is imported")
    return find_library(name)
