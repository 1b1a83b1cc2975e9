"""Host: all that a check may touch. The same class on this machine, on a captured tree, and with a fake NVML."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthd.nvml import Nvml, NvmlGpu

MAX_FILE_BYTES = 16 << 20
READ_BYTES = 64 << 10
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV)  # ENODEV: a sysfs file whose device goes away while it is read


class Host:
    """The node under `root`. `nvml` is opened on first use and closed by `close_nvml` (never held between rounds).
    `driver_was_held`: whether somebody else held the driver when NVML was opened; None where nothing says so.

    Errors of files are the OSError that the kernel gave; a file that is not there is None from `read`.
    """

    def __init__(
        self,
        root: str = "/",
        open_nvml: Callable[[], Nvml] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.root = root.rstrip("/")
        self.now = now
        self._open_nvml = open_nvml
        self._nvml: Nvml | None = None
        self.nvml_is_outdated = False
        self.driver_was_held: bool | None = None

    # files: paths are absolute as on the node ("/sys/bus/pci/devices")

    def path(self, path: str) -> str:
        return self.root + path

    def read(self, path: str) -> str | None:
        """The text of a file, stripped; None if there is no such file. Undecodable bytes become U+FFFD."""
        try:
            # Not open(): a round reads a thousand small files, and making an object for each costs more than the read.
            file = os.open(self.root + path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # In pieces: for one read of 4 MiB or more /proc/sys answers ENOMEM.
                data = bytearray()
                while (piece := os.read(file, READ_BYTES)) and len(data) < MAX_FILE_BYTES:
                    data += piece
                    if len(piece) < READ_BYTES and path.startswith("/sys/"):
                        break  # sysfs gives an attribute whole, and there are a thousand of them
            finally:
                os.close(file)
            return data.decode("utf-8", "replace").strip()
        except OSError as error:
            if error.errno in GONE:
                return None
            raise

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; [] if there is none."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError as error:
            if error.errno in GONE:
                return []
            raise

    def exists(self, path: str) -> bool:
        return os.path.exists(self.path(path))

    def link_target(self, path: str) -> str | None:
        """Where a symbolic link points (as written), None if it is none."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return None

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs(self.path(path))

    # NVML

    @property
    def nvml(self) -> Nvml:
        """The NVML of this node, opened now if it is not open. Raises NvmlError where it cannot be opened."""
        if self._nvml is None:
            from healthd.nvml import NvmlError, NvmlErrorKind, open_real

            self.driver_was_held = self.driver_is_held()
            try:
                self._nvml = (self._open_nvml or open_real)()
            except NvmlError as error:
                # The library stays loaded for as long as this process lives, whatever driver comes.
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

    def driver_is_held(self) -> bool | None:
        """Whether a process uses the nvidia module. Modules above it (nvidia_uvm) count as one reference each."""
        if self._open_nvml is not None and not self.root:
            return None  # the NVML that stands in is not this machine's
        references = self.read("/sys/module/nvidia/refcnt") or ""
        if not references.lstrip("-").isdecimal():
            return None
        return int(references) > len(self.list("/sys/module/nvidia/holders"))

    def gpus(self) -> tuple[NvmlGpu, ...]:
        """The GPUs that answer NVML; none where there is neither NVIDIA hardware nor a driver. Raises NvmlError."""
        from healthd.nvml import NO_DRIVER, NvmlError

        try:
            return self.nvml.gpus()
        except NvmlError as error:
            if error.kind in NO_DRIVER and not self.has_nvidia_hardware():
                return ()
            raise

    def has_nvidia_hardware(self) -> bool:
        """Whether PCI shows a GPU for NVIDIA's driver, the driver is loaded, or an NVML stands in for both."""
        return (
            self._open_nvml is not None
            or any(True for _ in self.pci_gpus())
            or self.exists("/proc/driver/nvidia/version")
        )

    def pci_gpus(self) -> Iterator[str]:
        """PCI addresses of the GPUs that NVML should show, as sysfs has them.

        Not those that vfio-pci or nouveau have. One without any driver is a fault (the driver is missing, or refused
        it), but for a VGA card (class 0300) on a machine where nothing else says that NVIDIA's driver belongs on it.
        """
        found = list(self._nvidia_devices())
        wanted = self.exists("/proc/driver/nvidia") or any(driver == "nvidia" for _pci, _class, driver in found)
        for pci, pci_class, driver in found:
            if driver == "nvidia" or (driver is None and (wanted or pci_class.startswith("0x0302"))):
                yield pci

    def _nvidia_devices(self) -> Iterator[tuple[str, str, str | None]]:
        """(PCI address, class, driver) of each NVIDIA device of class 0300 (VGA) or 0302 (3D controller)."""
        for pci in self.list("/sys/bus/pci/devices"):
            device = f"/sys/bus/pci/devices/{pci}"
            if self.read(f"{device}/vendor") == "0x10de":
                pci_class = self.read(f"{device}/class") or ""
                if pci_class.startswith(("0x0300", "0x0302")):
                    driver = self.link_target(f"{device}/driver")
                    yield pci, pci_class, driver and driver.rpartition("/")[2]

    def boot_id(self) -> str:
        return self.read("/proc/sys/kernel/random/boot_id") or ""
