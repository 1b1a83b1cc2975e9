"""What a node has, from a tree that a DGX has and from this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.host import PCI_ADDRESS, Host, upstream_of
from healthd.inventory import kind_of, pci_of, take
from healthd.model import Gpu, PciDevice
from tests.fakes import scenarios
from tests.trees import pci_device, write


@pytest.fixture
def dgx(tmp_path: Path) -> str:
    root = tmp_path / "tree"
    pci_device(root, "0000:1b:00.0", "0x030200", above="0000:1a:01.0", device="0x2330")
    pci_device(root, "0000:07:00.0", "0x068000", device="0x22a3")
    pci_device(root, "0000:18:00.0", "0x020700", vendor="0x15b3", device="0x1021")
    pci_device(root, "0000:29:00.0", "0x020000", vendor="0x15b3", device="0x101d")
    pci_device(root, "0000:ab:00.0", "0x010802", vendor="0x144d", device="0xa824")
    write(
        root,
        {
            "/sys/bus/pci/slots/1/address": "0000:1b:00\n",
            "/sys/bus/pci/slots/2/address": "0000:cc:00\n",
            "/sys/class/dmi/id/product_name": "DGXH100\n",
            "/sys/module/nvidia/version": "550.54.15\n",
        },
    )
    return str(root)


def test_devices_are_known_by_address_kind_port_and_slot(dgx: str) -> None:
    inventory = take(Host(dgx), gpus=False)
    assert {device.pci: device.kind for device in inventory.devices} == {
        "0000:07:00.0": "nvswitch",
        "0000:18:00.0": "nic",
        "0000:1b:00.0": "gpu",
        "0000:29:00.0": "nic",
        "0000:ab:00.0": "nvme",
    }
    gpu = next(device for device in inventory.devices if device.kind == "gpu")
    assert gpu == PciDevice("0000:1b:00.0", "0x10de", "0x2330", "0x030200", "gpu", "0000:1a:01.0", "1", "")
    assert inventory.dmi_product == "DGXH100"


def test_without_being_asked_for_gpus_nvml_is_not_opened(dgx: str) -> None:
    def refuse() -> None:
        raise AssertionError("NVML was opened")

    inventory = take(Host(dgx, refuse), gpus=False)  # type: ignore[arg-type]
    assert inventory.gpus == ()
    assert inventory.driver_version == "550.54.15"


def test_gpus_have_what_nvml_calls_them(dgx: str, tmp_path: Path) -> None:
    inventory = take(scenarios(tmp_path)(root=dgx), gpus=True)
    assert len(inventory.gpus) == 8
    assert all(isinstance(gpu, Gpu) and gpu.uuid.startswith("GPU-") and gpu.name for gpu in inventory.gpus)
    assert [gpu.minor for gpu in inventory.gpus] == list(range(8))
    assert inventory.driver_version


def test_one_gpu_that_does_not_tell_its_device_node_hides_no_other(dgx: str, tmp_path: Path) -> None:
    broken = '[gpu.3.errors]\nnvmlDeviceGetMinorNumber = "Unknown"\n'
    found = take(scenarios(tmp_path)(broken, root=dgx), gpus=True).gpus
    assert [gpu.minor for gpu in found] == [0, 1, 2, None, 4, 5, 6, 7]


def test_an_nvml_that_fails_leaves_no_gpus_and_the_rest(dgx: str, tmp_path: Path) -> None:
    host = scenarios(tmp_path)('library = "driver_not_loaded"', root=dgx)
    inventory = take(host, gpus=True)
    assert inventory.gpus == ()
    assert len(inventory.devices) == 5


def test_a_machine_without_anything_has_an_empty_inventory(tmp_path: Path) -> None:
    inventory = take(Host(str(tmp_path)), gpus=True)
    assert (inventory.gpus, inventory.devices, inventory.driver_version) == ((), (), "")


def test_this_machine_can_be_looked_at() -> None:
    inventory = take(Host("/"), gpus=True)
    assert all(PCI_ADDRESS.fullmatch(device.pci) for device in inventory.devices)


def test_a_device_that_vanishes_while_it_is_read_is_left_out(dgx: str) -> None:
    Path(dgx, "sys/bus/pci/devices/0000:29:00.0/class").unlink()
    assert "0000:29:00.0" not in {device.pci for device in take(Host(dgx), gpus=False).devices}


@pytest.mark.parametrize(
    ("link", "port"),
    [
        ("../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0", "0000:00:01.0"),
        ("../../../devices/pci0000:00/0000:00:01.0", ""),
        ("../../../devices/pci0000:64/0000:64:00.5/pci10000:01/10000:01:00.0/10000:02:00.0", "10000:01:00.0"),
        ("", ""),
    ],
)
def test_the_port_above_is_the_directory_above(link: str, port: str) -> None:
    assert upstream_of(link) == port


@pytest.mark.parametrize(
    ("path", "pci"),
    [
        ("/devices/pci0000:00/0000:00:01.0/0000:3b:00.0", "0000:3b:00.0"),
        ("/devices/pci0000:00/0000:00:01.0/0000:3b:00.0/net/ens1", "0000:3b:00.0"),
        ("/devices/pci0000:00/0000:00:03.0/virtio1/net/eth0", "0000:00:03.0"),
        ("/devices/virtual/net/veth1", ""),
    ],
)
def test_a_port_or_a_disk_belongs_to_its_card(path: str, pci: str) -> None:
    assert pci_of(path) == pci


@given(st.text(), st.text())
def test_any_text_of_sysfs_has_some_kind(vendor: str, pci_class: str) -> None:
    assert kind_of(vendor, pci_class) in ("gpu", "nvswitch", "nic", "nvme", "other")
