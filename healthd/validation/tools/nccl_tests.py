"""nccl-tests (github.com/NVIDIA/nccl-tests): all_reduce_perf and sendrecv_perf over all GPUs of this node.

Its table has had 12 columns ("error") and 13 ("root", "#wrong"); those of the out-of-place run are counted from
behind: time, algbw, busbw, wrong, twice. The largest size's bus bandwidth counts, the better one of both runs
(doc/PERFORMANCE.md there says what it is). "Out of bounds values : 50 FAILED" is a wrong result, "Test NCCL
failure" an error.
"""

from __future__ import annotations

from healthd.common.text import is_decimal, printable, regex
from healthd.validation.measurement import Measurement, NotUnderstood, is_excused

SIZE = "8G"  # of one message: at the limit of every link (AzNHC: 8G of A100 with 40 GB, 16G of larger ones)
MOST_LINES = 100_000
_NUMBER = regex(r"[0-9]{1,12}(\.[0-9]{1,6})?")
_BOUNDS = regex(r"Out of bounds values\s*:\s*([0-9]{1,12}) (OK|FAILED)")
_FAILURE = regex(r"[^\n]{0,200}(?:Test (?:NCCL|CUDA) failure|NCCL failure)[^\n]{0,300}")
_VERSION = regex(r"NCCL version ([0-9][0-9.]{0,15})")
_OWN_VERSION = regex(r"nccl-tests version ([0-9][0-9.]{0,15})")


def command(program: str, gpus: int) -> tuple[str, ...]:
    """One process with all GPUs; results are checked (-c 1)."""
    return (program, "-b", SIZE, "-e", SIZE, "-g", str(gpus), "-c", "1", "-n", "10", "-w", "3")


def parse(text: str, test: str) -> list[Measurement]:
    """test: nccl_all_reduce or nccl_sendrecv. Raises NotUnderstood."""
    found = _VERSION.search(text)
    own = _OWN_VERSION.search(text)
    source = f"nccl-tests {own[1]}" if own else "nccl-tests"
    source += f", NCCL {found[1].rstrip('.')}" if found else ""
    if failure := _FAILURE.search(text):
        message = printable(" ".join(failure[0].split()))[:300]
        # Newer ones have NCCL's last error behind it ("/ Cuda failure 2 'out of memory'"), which may be a line more.
        state = "not_measured" if is_excused(text[failure.start() : failure.end() + 300]) else "failed"
        return [Measurement(test, "", None, "GB/s", state, message, source)]
    best, largest, wrong = None, -1, 0
    for line in text.splitlines()[:MOST_LINES]:
        row = _row(line)
        if row is None:
            continue
        size, bandwidth, bad = row
        wrong += bad
        if size >= largest:
            best, largest = (max(bandwidth, best or 0.0) if size == largest else bandwidth), size
    bounds = _BOUNDS.search(text)
    if (bounds and bounds[2] == "FAILED") or wrong:
        count = bounds[1] if bounds and bounds[2] == "FAILED" else str(wrong)
        message = "1 result was wrong" if count == "1" else f"{count} results were wrong"
        return [Measurement(test, "", best or None, "GB/s", "failed", message, source)]
    if best is None:
        raise NotUnderstood("this is no output of nccl-tests")
    if bounds is None:
        return [Measurement(test, "", None, "GB/s", "not_measured", "it did not come to its end", source)]
    if best <= 0:
        return [Measurement(test, "", None, "GB/s", "not_measured", "one GPU alone has no bus bandwidth", source)]
    return [Measurement(test, "", best, "GB/s", "measured", "", source)]


def _row(line: str) -> tuple[int, float, int] | None:
    """Size in bytes, the better bus bandwidth in GB/s, how many results were wrong; None: no row of the table."""
    words = line.split()
    if len(words) not in (11, 12, 13) or not is_decimal(words[0]) or len(words[0]) > 15:
        return None
    rates = [words[-6], words[-2]]
    if not all(_NUMBER.fullmatch(word) for word in [*rates, words[-8], words[-4]]):
        return None
    bad = sum(int(word) for word in (words[-5], words[-1]) if is_decimal(word) and len(word) <= 12)
    return int(words[0]), max(map(float, rates)), bad
