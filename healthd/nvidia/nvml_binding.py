"""Import of pynvml without ctypes.util, which would load shutil, tempfile, bz2 and lzma: 0.6 MiB, for months.

pynvml imports find_library() from there and does not call it: it passes the name libnvidia-ml.so.1 to the loader.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

UTIL = "ctypes.util"


def pynvml() -> Any:
    """Return the module. A version that needs more of ctypes.util gets the real one."""
    if "pynvml" not in sys.modules and UTIL not in sys.modules:
        _import_without_util()
    import pynvml

    return pynvml


def _import_without_util() -> None:
    """Import pynvml without other effects. If that fails, the next import raises the error."""
    stand_in: Any = ModuleType(UTIL)
    stand_in.find_library = _find_library
    sys.modules[UTIL] = stand_in
    try:
        import pynvml
    except (ImportError, AttributeError):
        return
    finally:
        sys.modules.pop(UTIL, None)
    if getattr(pynvml, "find_library", None) is not _find_library:  # it may use the name later
        import ctypes.util  # noqa: F401


def _find_library(name: str) -> str | None:
    """Call ctypes.util's function, which is imported only now."""
    from ctypes.util import find_library

    if find_library is _find_library:
        raise ImportError("pynvml calls it while it is imported")
    return find_library(name)
