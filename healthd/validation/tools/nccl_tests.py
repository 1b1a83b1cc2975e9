"""nccl-tests (github.com/NVIDIA/nccl-tests): all_reduce_perf and sendrecv_perf over all GPUs in this node.

Depending on the version, the printed table has 12 columns ("error") or 13 ("root", "#wrong"). Columns are therefore
counted from the end: time, algbw, busbw and wrong, for each of two runs. The result is the bus bandwidth for the
largest size, in the better run (see doc/PERFORMANCE.md in that repository). "Out of bounds values : 50 FAILED" means a
wrong result, "Test NCCL failure" means an error.
"""

from __future__ import annotations

from healthd.common.text import is_decimal, printable, regex
from healthd.validation.measurement import Measurement, NotUnderstood, is_excused

SIZE = "8G"  # message size that saturates every link (AzNHC: 8G for A100 with 40 GB, 16G for larger GPUs)
MAX_LINES = 100_000
_NUMBER = regex(r"[0-9]{1,12}(\.[0-9]{1,6})?")
_BOUNDS = regex(r"Out of bounds values\s*:\s*([0-9]{1,12}) (OK|FAILED)")
_FAILURE = regex(r"[^\n]{0,200}(?:Test (?:NCCL|CUDA) failure|NCCL failure)[^\n]{0,300}")
_VERSION = regex(r"NCCL version ([0-9][0-9.]{0,15})")
_OWN_VERSION = regex(r"nccl-tests version ([0-9][0-9.]{0,15})")


def command(program: str, gpus: int) -> tuple[str, ...]:
    """Return the command for one process with all GPUs. The tool checks the results (-c 1)."""
    return (program, "-b", SIZE, "-e", SIZE, "-g", str(gpus), "-c", "1", "-n", "10", "-w", "3")


def parse(text: str, test: str) -> list[Measurement]:
    """Parse the output. Raises NotUnderstood.

    Args:
        test: nccl_all_reduce or nccl_sendrecv.
    """
    found = _VERSION.search(text)
    tool_version = _OWN_VERSION.search(text)
    source = f"nccl-tests {tool_version[1]}" if tool_version else "nccl-tests"
    source += f", NCCL {found[1].rstrip('.')}" if found else ""
    if failure := _FAILURE.search(text):
        message = printable(" ".join(failure[0].split()))[:300]
        # Newer versions append NCCL's last error ("/ Cuda failure 2 'out of memory'"), possibly on the next line.
        state = "not_measured" if is_excused(text[failure.start() : failure.end() + 300]) else "failed"
        return [Measurement(test, "", None, "GB/s", state, message, source)]
    best, largest, wrong_results = None, -1, 0
    for line in text.splitlines()[:MAX_LINES]:
        row = _row(line)
        if row is None:
            continue
        size, bandwidth, wrong_in_row = row
        wrong_results += wrong_in_row
        if size >= largest:
            best, largest = (max(bandwidth, best or 0.0) if size == largest else bandwidth), size
    bounds = _BOUNDS.search(text)
    if (bounds and bounds[2] == "FAILED") or wrong_results:
        count = bounds[1] if bounds and bounds[2] == "FAILED" else str(wrong_results)
        message = "1 result was wrong" if count == "1" else f"{count} results were wrong"
        return [Measurement(test, "", best or None, "GB/s", "failed", message, source)]
    if best is None:
        raise NotUnderstood("this is not output from nccl-tests")
    if bounds is None:
        return [Measurement(test, "", None, "GB/s", "not_measured", "the test did not complete", source)]
    if best <= 0:
        return [Measurement(test, "", None, "GB/s", "not_measured", "a single GPU has no bus bandwidth", source)]
    return [Measurement(test, "", best, "GB/s", "measured", "", source)]


def _row(line: str) -> tuple[int, float, int] | None:
    """Parse a line into size in bytes, better bus bandwidth in GB/s and number of wrong results, or None."""
    columns = line.split()
    if len(columns) not in (11, 12, 13) or not is_decimal(columns[0]) or len(columns[0]) > 15:
        return None
    rates = [columns[-6], columns[-2]]
    if not all(_NUMBER.fullmatch(word) for word in [*rates, columns[-8], columns[-4]]):
        return None
    wrong_results = sum(int(word) for word in (columns[-5], columns[-1]) if is_decimal(word) and len(word) <= 12)
    return int(columns[0]), max(map(float, rates)), wrong_results
