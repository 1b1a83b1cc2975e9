"""Small trees of /sys and /proc, made from captured text (see the sources in tests/data)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from healthd.host.host import Host
from healthd.host.program import ProgramResult
from healthd.host.system import KernelClock, Tree

DATA = Path(__file__).parents[1] / "data"
PCI = "/sys/bus/pci/devices"

# Names as Linux 5.x and later have them: github.com/prometheus/procfs@3c943fd, testdata/fixtures.ttar
AER_NAMES = {
    "correctable": "RxErr BadTLP BadDLLP Rollover Timeout NonFatalErr CorrIntErr HeaderOF TOTAL_ERR_COR",
    "nonfatal": "Undefined DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP ECRC UnsupReq ACSViol UncorrIntErr "
    "BlockedTLP AtomicOpBlocked TLPBlockedErr PoisonTLPBlocked TOTAL_ERR_NONFATAL",
    "fatal": "Undefined DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP ECRC UnsupReq ACSViol UncorrIntErr "
    "BlockedTLP AtomicOpBlocked TLPBlockedErr PoisonTLPBlocked TOTAL_ERR_FATAL",
}


class FakeSystem(Tree):
    """A tree with a clock and programs: argv -> result; a TimeoutError or OSError is raised."""

    def __init__(
        self,
        root: str,
        programs: Mapping[tuple[str, ...], ProgramResult | OSError] | None = None,
        clock: KernelClock | OSError | None = None,
    ) -> None:
        super().__init__(root.rstrip("/"))
        self._programs = programs or {}
        self._clock = clock

    def run(
        self, argv: Sequence[str], seconds: float, environment: Mapping[str, str], anywhere: bool
    ) -> ProgramResult | None:
        answer = self._programs.get(tuple(argv))
        if isinstance(answer, OSError):
            raise answer
        return answer

    def clock(self) -> KernelClock | None:
        if isinstance(self._clock, OSError):
            raise self._clock
        return self._clock


class UnreadableTree(Tree):
    """A tree in which some files cannot be read: path -> errno. Drivers return EINVAL for unsupported values."""

    def __init__(self, root: Path, errors: Mapping[str, int]) -> None:
        super().__init__(str(root))
        self._refused = errors

    def read(self, path: str) -> bytes:
        if path in self._refused:
            raise OSError(self._refused[path], os.strerror(self._refused[path]))
        return super().read(path)


def write(root: Path, files: Mapping[str, str | bytes]) -> Host:
    """Write files (absolute paths as on the node) below root, each atomically, and return a Host on root.

    An existing file is replaced.
    """
    for path, text in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(root / ".new", file, text if isinstance(text, bytes) else text.encode())
    return Host(str(root))


def replace(temporary: Path, file: Path, text: bytes) -> None:
    """Replace a file atomically, so that a daemon reads either the old text or the new one."""
    temporary.write_bytes(text)
    temporary.replace(file)


def plain_machine(root: Path) -> Host:
    """Return a Linux without anything that a check could evaluate: one process, one disk."""
    mounts = "22 1 8:2 / / rw - ext4 /dev/sda2 rw\n"
    return write(root, {"/proc/self/mountinfo": mounts, "/proc/1/stat": f"1 (init) S 0 {'0 ' * 48}\n"})


def captured_text(name: str) -> str:
    """Return a file of tests/data without its first line, which names the source."""
    return (DATA / name).read_text("utf-8").partition("\n")[2]


def captured_files(name: str) -> dict[str, str]:
    """Return path -> text, from lines of path<TAB>text."""
    return dict(line.split("\t") for line in captured_text(name).splitlines())


def aer_file(kind: str, **counts: int) -> str:
    """Return an aer_dev_* file with zeros except for `counts`, whose sum is the total."""
    *names, total = AER_NAMES[kind].split()
    return "".join(f"{name} {counts.get(name, 0)}\n" for name in names) + f"{total} {sum(counts.values())}\n"


def add_pci_device(root: Path, pci: str, pci_class: str, port: str = "", vendor: str = "0x10de", **files: str) -> None:
    """Add a device below the port `above` (created if missing), with its link in /sys/bus/pci/devices."""
    bus = root / PCI.lstrip("/")
    bus.mkdir(parents=True, exist_ok=True)
    if port and not (bus / port).exists():
        add_pci_device(root, port, "0x060400", vendor="0x8086")
    parent = f"{port}/" if port else ""
    (root / f"sys/devices/pci0000:00/{parent}{pci}").mkdir(parents=True, exist_ok=True)
    link = bus / pci
    if not link.is_symlink():
        link.symlink_to(f"../../../devices/pci0000:00/{parent}{pci}")
    for name, text in {"vendor": vendor, "class": pci_class, **files}.items():
        (link / name).write_text(f"{text.rstrip()}\n")


def add_gpus(root: Path, addresses: list[str], **files: str) -> Host:
    """Add healthy NVIDIA GPUs: bound to their driver, 16 lanes."""
    for pci in addresses:
        add_pci_device(
            root, pci, "0x030200", **{"revision": "0xa1", "current_link_width": "16", "power_state": "D0", **files}
        )
        (root / PCI.lstrip("/") / pci / "driver").symlink_to("../../../../bus/pci/drivers/nvidia")
    return Host(str(root))
