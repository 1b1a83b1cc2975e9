"""Import of pynvml without ctypes.util, which would load shutil, tempfile, bz2 and lzma and occupy 0.6 MiB for months.

pynvml imports find_library() from ctypes.util but does not call it, because it passes the name libnvidia-ml.so.1 to the
loader.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

UTIL = "ctypes.util"
UPTIME = "nvmlDeviceGetGpuUptime_v1"


def pynvml() -> Any:
    """Return the pynvml module. A version that needs more of ctypes.util gets the real module."""
    if "pynvml" not in sys.modules and UTIL not in sys.modules:
        _import_without_util()
    import pynvml

    if not hasattr(pynvml, UPTIME):
        setattr(pynvml, UPTIME, _device_get_gpu_uptime)
    return pynvml


def _device_get_gpu_uptime(device: Any, uptime: Any) -> int:
    """Call nvmlDeviceGetGpuUptime_v1, which nvml.h has since CUDA 13.5 and nvidia-ml-py 13.615 lacks. Raises NVMLError.

    `uptime` points to a structure with one unsigned int.
    """
    import pynvml

    status: int = pynvml._nvmlGetFunctionPointer(UPTIME)(device, uptime)
    pynvml._nvmlCheckReturn(status)
    return status


def _import_without_util() -> None:
    """Try to import pynvml with a stand-in for ctypes.util. If that fails, the next import raises the error."""
    stand_in: Any = ModuleType(UTIL)
    stand_in.find_library = _find_library
    sys.modules[UTIL] = stand_in
    try:
        import pynvml
    except (ImportError, AttributeError):
        return
    finally:
        sys.modules.pop(UTIL, None)
    if getattr(pynvml, "find_library", None) is not _find_library:  # pynvml may use the name later
        import ctypes.util  # noqa: F401


def _find_library(name: str) -> str | None:
    """Call ctypes.util.find_library, and import the module only then."""
    from ctypes.util import find_library

    if find_library is _find_library:
        raise ImportError("pynvml calls find_library() while it is being imported")
    return find_library(name)
