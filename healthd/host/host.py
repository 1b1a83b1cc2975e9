"""Host: the checks' access to the node. The same class serves this machine, a captured tree and a fake NVML."""

from __future__ import annotations

import builtins
import errno
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from healthd.common.model import NO_GPU, NothingToCheck
from healthd.common.paths import RUNTIME_DIR, STATE_DIR
from healthd.common.text import is_decimal, regex
from healthd.host.program import ProgramResult
from healthd.host.system import FileStat, FileSystem, KernelClock, Tree

if TYPE_CHECKING:
    from healthd.nvidia.nvml import Nvml, NvmlGpu

T = TypeVar("T")

MISSING_ERRNOS = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENODEV,
)  # ENODEV: a sysfs file's device disappeared while the file was read
INFOROM_SECONDS = 3600.0
PCI_DEVICES = "/sys/bus/pci/devices"
PCI_NUMBER = regex(r"0x[0-9a-f]{4,6}")
PCI_ADDRESS = regex(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class PciFunction(NamedTuple):
    """Facts about a PCI function that never change while the function is present. `upstream` is the port above it, or
    "" on a root bus. `virtual` is True for an SR-IOV function, which has no link of its own."""

    pci: str
    vendor: str
    device: str
    pci_class: str
    upstream: str
    virtual: bool


def fake_nvml_opener(profile_or_file: str) -> Callable[[], Nvml]:
    """Return a function that opens a fake NVML, which is imported at that time."""

    def opened() -> Nvml:
        from healthd.nvidia.fake_nvml import open_fake

        return open_fake(profile_or_file)

    return opened


class Host:
    """The node under `root`. NVML is opened on first use and closed by `close_nvml`. It is never kept open between
    rounds.

    state_dir, runtime_dir   directories of this node's daemon; set by the creator of the Host
    driver_was_in_use        True if another process had the driver open when NVML was opened; None if unknown

    A file's error is the kernel's OSError. `read` returns None for a missing file.

    Args:
        system: object with the methods of `Tree`, used instead of the files below `root`.
        is_nvml_substituted: True if `open_nvml` opens a different NVML than the machine's own (None: it always does).
        shared_seconds: maximum age of a reading that several checks share.
    """

    def __init__(
        self,
        root: str = "/",
        open_nvml: Callable[[], Nvml] | None = None,
        now: Callable[[], float] = time.time,
        system: Tree | None = None,
        is_nvml_substituted: bool | None = None,
        shared_seconds: float = 0.0,
    ) -> None:
        self.root = root.rstrip("/")
        self.now = now
        self._system = system or Tree(self.root)
        self._open_nvml = open_nvml
        self._is_nvml_substituted = open_nvml is not None if is_nvml_substituted is None else is_nvml_substituted
        self._nvml: Nvml | None = None
        self._pci: dict[tuple[str, int], PciFunction] = {}
        self._pci_functions: tuple[PciFunction, ...] = ()
        self._pci_listed: builtins.list[tuple[str, int]] = []
        self._pci_at = -math.inf
        self._shared: dict[str, tuple[float, object]] = {}
        self._shared_seconds = shared_seconds
        self._inforom_valid_at: dict[str, float] = {}
        self.nvml_is_outdated = False
        self.before_nvml_call: Callable[[], None] | None = None
        self.driver_was_in_use: bool | None = None
        self.state_dir, self.runtime_dir = STATE_DIR, RUNTIME_DIR

    # files: paths are absolute, as on the node ("/sys/bus/pci/devices")

    def path(self, path: str) -> str:
        return self.root + path

    def read(self, path: str, strip: bool = True) -> str | None:
        """Return a file's text, stripped, or None if there is no such file. Undecodable bytes become U+FFFD."""
        data = _none_if_missing(self._system.read, path)
        return None if data is None else (data.strip() if strip else data).decode("utf-8", "replace")

    def read_shared(self, path: str) -> str | None:
        """Read a file that several checks need. The file is read only once in a round."""
        return self.shared(path, lambda: self.read(path))

    def shared(self, name: str, fetch: Callable[[], T]) -> T:
        """Return the result of `fetch`, which is called only once in a round. Callers must not modify the result."""
        at, answer = self._shared.get(name, (-math.inf, None))
        now = time.monotonic()
        if now - at >= self._shared_seconds:
            answer = fetch()
            self._shared[name] = (now, answer)
        return cast(T, answer)

    def read_or_empty(self, path: str) -> str:
        """Read a file for text that is only displayed or optional. Return "" if the file is missing or unreadable."""
        try:
            return self.read(path) or ""
        except OSError:
            return ""

    def list(self, path: str) -> list[str]:
        """Return the sorted names in a directory, or [] if there is no such directory."""
        return sorted(self.names(path))

    def names(self, path: str) -> builtins.list[str]:
        """Return the names in a directory, in no particular order."""
        return _none_if_missing(self._system.names, path) or []

    def exists(self, path: str) -> bool:
        """Return True if a file exists or, for a symbolic link, if its target exists."""
        try:
            return self.stat(path) is not None
        except OSError:
            return False

    def stat(self, path: str) -> FileStat | None:
        """Return a file's stat, or None if there is no such file."""
        return _none_if_missing(self._system.stat, path)

    def link_target(self, path: str) -> str | None:
        """Return the target of a symbolic link (as written), or None if the path is not a link."""
        try:
            return self._system.readlink(path)
        except OSError:
            return None

    def statvfs(self, path: str) -> FileSystem:
        return self._system.statvfs(path)

    # programs and the clock

    def run(
        self, argv: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None, anywhere: bool = False
    ) -> ProgramResult | None:
        """Run a program that reads this machine. Return None if it is not installed, or if a tree or recording replaces
        the machine. With `anywhere`, the program runs even in those cases. Raises TimeoutError or OSError.
        """
        return self._system.run(argv, seconds, environment or {}, anywhere)

    def clock(self) -> KernelClock | None:
        """Return the kernel's clock, or None if a tree replaces the machine."""
        return self._system.clock()

    # PCI

    def pci_functions(self) -> tuple[PciFunction, ...]:
        """Return all PCI functions, by address. The tuple stays the same until a function is added or removed. A
        function is read once while it is present. A function that comes back has a new inode number in sysfs.
        """
        now = time.monotonic()
        if now - self._pci_at >= self._shared_seconds:
            entries = _none_if_missing(self._system.scan, PCI_DEVICES) or []
            if entries != self._pci_listed and self._pci.keys() != set(entries):
                self._pci = {entry: self._pci.get(entry) or self._pci_function(entry[0]) for entry in sorted(entries)}
                self._pci_functions = tuple(self._pci.values())
            self._pci_listed, self._pci_at = entries, now
        return self._pci_functions

    def _pci_function(self, pci: str) -> PciFunction:
        device = f"{PCI_DEVICES}/{pci}"
        vendor, model, pci_class = (self._pci_number(f"{device}/{name}") for name in ("vendor", "device", "class"))
        virtual = self.link_target(f"{device}/physfn") is not None
        return PciFunction(pci, vendor, model, pci_class, upstream_port(self.link_target(device) or ""), virtual)

    def _pci_number(self, path: str) -> str:
        """Return a number such as "0x10de", or "" if the function is being removed. Raises ValueError for other
        text."""
        text = self.read(path)
        if text is not None and not PCI_NUMBER.fullmatch(text):
            raise ValueError(f"{path}: not a number as in 0x10de: {text[:40]!r}")
        return text or ""

    # NVML

    @property
    def nvml(self) -> Nvml:
        """Return this node's NVML, after opening it if necessary. Raises NvmlError if it cannot be opened."""
        if self._nvml is None:
            from healthd.nvidia import nvml
            from healthd.nvidia.nvml import NvmlError, NvmlErrorKind, open_real

            if self.before_nvml_call is not None:
                nvml.before_call = self.before_nvml_call
            self.driver_was_in_use = self.is_driver_in_use()
            try:
                self._nvml = (self._open_nvml or open_real)()
            except NvmlError as error:
                # The library stays loaded until this process exits, even if the driver changes.
                self.nvml_is_outdated = error.kind is NvmlErrorKind.MISMATCH
                raise
        return self._nvml

    def close_nvml(self) -> None:
        if self._nvml is not None:
            nvml, self._nvml = self._nvml, None
            nvml.close()

    @property
    def nvml_is_open(self) -> bool:
        return self._nvml is not None

    @property
    def gpus_lost_since_open(self) -> int:
        """Return the number of GPUs that answered when NVML was opened but were lost in later queries."""
        return 0 if self._nvml is None else self._nvml.lost_since_open

    def is_driver_in_use(self) -> bool | None:
        """Return True if a process uses the nvidia module. References from dependent modules (nvidia_uvm) are
        ignored.
        """
        if self._is_nvml_substituted and not self.root:
            return None  # the substitute NVML is not this machine's
        references = self.read("/sys/module/nvidia/refcnt") or ""
        if not is_decimal(references.lstrip("-")):
            return None
        return int(references) > len(self.list("/sys/module/nvidia/holders"))

    def gpus(self) -> tuple[NvmlGpu, ...]:
        """Return the GPUs that answer NVML, or () without NVIDIA hardware or driver. Raises NvmlError."""
        from healthd.nvidia.nvml import NO_DRIVER, NvmlError

        try:
            return self.nvml.gpus()
        except NvmlError as error:
            if error.kind in NO_DRIVER and not self.has_nvidia_hardware():
                return ()
            raise

    def each_gpu(
        self, check_gpu: Callable[[NvmlGpu], Iterable[T]], unsupported: NothingToCheck | None = None
    ) -> Iterator[T | NothingToCheck]:
        """Yield the results of `check_gpu` for each GPU that answers, or NO_GPU. If a GPU failed, its error is raised
        afterwards.

        If `check_gpu` yields nothing for all GPUs, yield `unsupported`. Use this if `check_gpu` always yields something
        for a GPU with the feature.
        """
        from healthd.nvidia.nvml import NvmlError

        failed: list[NvmlError | ValueError] = []
        gpus = self.gpus()
        if not gpus:
            yield NO_GPU
        found_nothing = bool(gpus)
        for gpu in gpus:
            try:
                for item in check_gpu(gpu):
                    found_nothing = False
                    yield item
            except (NvmlError, ValueError) as error:
                failed.append(error)
        if failed:
            raise failed[0]
        if found_nothing and unsupported is not None:
            yield unsupported

    def inforom_valid(self, gpu: NvmlGpu) -> bool | None:
        """Return `gpu.inforom_valid()`. While a GPU's InfoROM is valid, query it at most once an hour per Host.

        The driver reads the whole InfoROM, which takes 67 ms of CPU time for each GPU (H100, driver 580), nine tenths
        of a round. DCGM also checks it at most once an hour (NVIDIA/DCGM, modules/health/DcgmHealthWatch.cpp,
        SetInforom).
        """
        now = time.monotonic()
        if gpu.uuid and now - self._inforom_valid_at.get(gpu.uuid, -math.inf) < INFOROM_SECONDS:
            return True
        valid = gpu.inforom_valid()
        if valid:
            self._inforom_valid_at[gpu.uuid] = now
        return valid

    def has_nvidia_hardware(self) -> bool:
        """Return True if PCI shows a GPU for NVIDIA's driver, the driver is loaded, or a substitute NVML is used."""
        return (
            self._is_nvml_substituted
            or any(True for _ in self.pci_gpus())
            or self.exists("/proc/driver/nvidia/version")
        )

    def pci_gpus(self) -> Iterator[str]:
        """Yield the PCI addresses of the GPUs that NVML should show, in sysfs format.

        GPUs that use vfio-pci or nouveau are left out. A GPU without any driver is included, because the driver is
        missing or refused the GPU. The exception is a VGA card (class 0300) on a machine without other signs of
        NVIDIA's driver.
        """
        found = list(self._nvidia_devices())
        has_nvidia_driver = self.exists("/proc/driver/nvidia") or any(
            driver == "nvidia" for _pci, _class, driver in found
        )
        for pci, pci_class, driver in found:
            if driver == "nvidia" or (driver is None and (has_nvidia_driver or pci_class.startswith("0x0302"))):
                yield pci

    def _nvidia_devices(self) -> Iterator[tuple[str, str, str | None]]:
        """Yield (PCI address, class, driver) of each NVIDIA device of class 0300 (VGA) or 0302 (3D controller).

        SR-IOV functions that a GPU creates for virtual machines are left out, because NVML on the host does not show
        them.
        """
        for function in self.pci_functions():
            is_gpu = function.vendor == "0x10de" and function.pci_class.startswith(("0x0300", "0x0302"))
            if is_gpu and not function.virtual:
                driver = self.link_target(f"{PCI_DEVICES}/{function.pci}/driver")
                yield function.pci, function.pci_class, driver and driver.rpartition("/")[2]

    def boot_id(self) -> str:
        return self.read("/proc/sys/kernel/random/boot_id") or ""


def _none_if_missing(read: Callable[[str], T], path: str) -> T | None:
    """Return the result of `read` for a path, or None if the path does not exist."""
    try:
        return read(path)
    except OSError as error:
        if error.errno in MISSING_ERRNOS:
            return None
        raise


def upstream_port(link: str) -> str:
    """Return the port above a device, or "" on a root bus. `link` is
    ".../devices/pci0000:00/0000:00:01.0/0000:01:00.0"."""
    above = link.rpartition("/")[0].rpartition("/")[2]
    return above if PCI_ADDRESS.fullmatch(above) else ""
