"""The device files that programs open to use GPUs and InfiniBand.

Rules: only files that are named in the settings or a baseline are checked. The right set of files depends on the
driver, on MIG and on the permissions that a site grants. NVIDIA's driver creates /dev/nvidia* late, with the mode of
its module parameter NVreg_DeviceFileMode; udev creates /dev/infiniband/*. A container gets the files that exist when it
starts. While a driver is reloaded or a card is reset, its files are briefly missing or have another mode. A problem is
therefore reported only after confirm_seconds.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from msgspec import field

from healthd.api import (
    NOT_IN_BASELINE,
    Baseline,
    CheckSettings,
    Clears,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    LeftOut,
    NothingToCheck,
    Seconds,
    Severity,
    regex,
)

USES = ""
BASELINE = Baseline(("expected",), place=60)

MODE = regex(r"0?[0-7]{3}")


class Config(CheckSettings, frozen=True):
    """expected         mode of each device file: {"/dev/nvidia0" = "0666"}; other files are not checked
    confirm_seconds  a problem must last this long before it is reported
    """

    expected: dict[str, str] = field(default_factory=dict)
    confirm_seconds: Seconds = 60.0


def validate(config: Config) -> str | None:
    for path, mode in config.expected.items():
        if not path.startswith("/dev/"):
            return f'expected: "{path}" is not below /dev'
        if not MODE.fullmatch(mode):
            return f'expected: the mode of {path} must be octal as in "0666", got "{mode}"'
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | NothingToCheck]:
    if "expected" in config.guessed and not host.exists("/dev/null"):
        yield NothingToCheck("no device files in this tree")  # a profile's files are only a guess
        return
    if not config.expected:
        yield NOT_IN_BASELINE
    unreadable = []
    for path, expected_mode in config.expected.items():
        try:
            found = host.stat(path)
        except OSError as error:  # this error must not hide the other files
            unreadable.append(f"{path}: {error.strerror}")
            continue
        if found is None:
            yield _finding("missing", path, f"{path} is missing", config)
        elif not stat.S_ISCHR(found.mode):
            yield _finding("missing", path, f"{path} is not a character device", config)
        elif stat.S_IMODE(found.mode) != int(expected_mode, 8):
            message = f"{path} has the mode {stat.S_IMODE(found.mode):04o}, not {int(expected_mode, 8):04o}"
            yield _finding("wrong_mode", path, message, config)
    if unreadable:
        raise ValueError("; ".join(unreadable))


def _finding(name: str, path: str, message: str, config: Config) -> Finding:
    confirm = config.confirm_seconds
    return Finding(
        Severity.DEGRADED, f"device_nodes/{name}", path, message, confirm_seconds=confirm, expects="expected"
    )


# /dev/nvidia-uvm and /dev/nvidia-uvm-tools are omitted because nvidia-modprobe may not load nvidia_uvm before the first
# CUDA program. If a baseline listed them, a node would be drained after a reboot. It would then run no CUDA program and
# stay drained.
NVIDIA_NODE = r"nvidia([0-9]+|ctl|-nvswitchctl|-nvswitch[0-9]+)"
INFINIBAND_NODE = r"uverbs[0-9]+|umad[0-9]+|rdma_cm"


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    for directory, names in (("/dev", NVIDIA_NODE), ("/dev/infiniband", INFINIBAND_NODE)):
        for name in host.list(directory):
            found = host.stat(f"{directory}/{name}") if regex(names).fullmatch(name) else None
            if found is None:
                continue
            path, mode = f"{directory}/{name}", stat.S_IMODE(found.mode)
            if stat.S_ISCHR(found.mode) and mode <= 0o777:
                yield Entry("device_nodes", "expected", f"{mode:04o}", path)
            else:
                yield LeftOut("device_nodes", "is not a character device", "expected", path)


EXPLAIN = {
    "device_nodes/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A device file that this node should have is missing, or is not a character device.",
        "CUDA may find too few GPUs, NCCL may find no network card, and containers start without the device.",
        "Run ls -l PATH. For GPUs, check that the driver is loaded; nvidia-modprobe -c 0 -u creates the files. For "
        "InfiniBand, run udevadm trigger, and check systemctl status openibd. If PATH is a plain file, a program "
        "wrote it before the driver was loaded; remove the file.",
        confirm="confirm_seconds",
        expects="expected",
    ),
    "device_nodes/wrong_mode": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A device file's permissions differ from those in the settings.",
        "If the permissions are too strict, users' programs cannot open the device. If they are too wide, every user "
        "can open it.",
        "For GPUs, check NVreg_DeviceFileMode in /etc/modprobe.d. For InfiniBand, check the rules in "
        "/etc/udev/rules.d. Then correct the mode with chmod.",
        confirm="confirm_seconds",
        expects="expected",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DRIVER)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.ALWAYS)
