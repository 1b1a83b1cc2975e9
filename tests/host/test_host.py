"""Host: GPUs of NVIDIA's driver, and use of the driver by other processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import codes, findings, scenarios
from trees import PCI, add_gpus, add_pci_device, write

from healthd.checks import gpu_access, gpu_count, gpu_ecc, gpu_nvlink, gpu_recovery_action, gpu_row_remap
from healthd.host.host import Host

FIRST, SECOND = "0000:1b:00.0", "0000:43:00.0"
VGA, ACCELERATOR = "0x030000", "0x030200"


def card(root: Path, pci: str, pci_class: str, driver: str = "") -> None:
    add_pci_device(root, pci, pci_class)
    if driver:
        (root / PCI[1:] / pci / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")


@pytest.mark.parametrize("pci_class", [VGA, ACCELERATOR])
@pytest.mark.parametrize("driver", ["vfio-pci", "nouveau"])
def test_pci_gpus_excludes_gpu_of_another_driver(tmp_path, pci_class, driver):
    card(tmp_path, FIRST, pci_class, driver)
    host = Host(str(tmp_path))
    assert list(host.pci_gpus()) == []
    assert not host.has_nvidia_hardware()


def test_pci_gpus_includes_accelerator_without_driver(tmp_path):
    card(tmp_path, FIRST, ACCELERATOR)
    assert list(Host(str(tmp_path)).pci_gpus()) == [FIRST]


def test_vga_card_without_driver_is_no_nvidia_hardware(tmp_path):
    card(tmp_path, FIRST, VGA)
    assert not Host(str(tmp_path)).has_nvidia_hardware()


def test_pci_gpus_includes_vga_card_if_another_gpu_has_the_driver(tmp_path):
    card(tmp_path, FIRST, VGA)
    card(tmp_path, SECOND, VGA, "nvidia")
    assert list(Host(str(tmp_path)).pci_gpus()) == [FIRST, SECOND]


def test_pci_gpus_includes_vga_card_if_the_driver_is_loaded(tmp_path):
    card(tmp_path, FIRST, VGA)
    write(tmp_path, {"/proc/driver/nvidia/version": "NVRM version: ..."})
    assert list(Host(str(tmp_path)).pci_gpus()) == [FIRST]


@pytest.mark.parametrize("driver", ["vfio-pci", "nouveau"])
@pytest.mark.parametrize("check", [gpu_access, gpu_count, gpu_ecc, gpu_nvlink, gpu_recovery_action, gpu_row_remap])
@pytest.mark.parametrize("why", ["library_not_found", "driver_not_loaded"])
def test_node_with_gpus_of_another_driver_is_healthy_without_nvml(tmp_path, check, driver, why):
    card(tmp_path, FIRST, ACCELERATOR, driver)
    host = without_nvml(tmp_path, why)
    assert codes(findings(check, host)) == []


def without_nvml(root: Path, why: str) -> Host:
    """Return a host without the real NVML, even if this machine has one."""

    class Closed(Host):
        def has_nvidia_hardware(self) -> bool:
            return any(True for _ in self.pci_gpus())

    return Closed(str(root), scenarios(root)(f'library = "{why}"')._open_nvml)


@pytest.mark.parametrize(
    ("references", "above", "in_use"),
    [("0", [], False), ("2", ["nvidia_uvm", "nvidia_modeset"], False), ("3", ["nvidia_uvm"], True), ("1", [], True)],
)
def test_driver_was_in_use_counts_processes_not_modules(tmp_path, references, above, in_use):
    host = driver(tmp_path, references, above)
    assert host.driver_was_in_use is None, "not read before NVML is opened"
    host.gpus()
    assert host.driver_was_in_use is in_use


@pytest.mark.parametrize("references", ["", "many"])
def test_driver_was_in_use_is_none_if_unknown(tmp_path, references):
    host = driver(tmp_path, references)
    host.gpus()
    assert host.driver_was_in_use is None


def test_driver_was_in_use_ignores_healthd_and_is_read_at_each_open(tmp_path):
    host = driver(tmp_path, "0")
    host.gpus()
    driver(tmp_path, "9")
    host.gpus()
    assert host.driver_was_in_use is False
    host.close_nvml()
    host.gpus()
    assert host.driver_was_in_use is True


def driver(root: Path, references: str, above: list[str] | None = None) -> Host:
    files = {f"/sys/module/nvidia/holders/{name}/refcnt": "0" for name in above or []}
    write(root, {**files, "/sys/module/nvidia/refcnt": f"{references}\n"})
    return scenarios(root)(root=str(root))


def test_pci_gpus_includes_gpu_of_nvidia_driver(tmp_path):
    assert list(add_gpus(tmp_path, [FIRST]).pci_gpus()) == [FIRST]
