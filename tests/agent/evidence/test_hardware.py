"""Serial numbers and firmware versions, from the programs' output and from sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import write

from healthd.agent.evidence.hardware import (
    Bmc,
    GpuPart,
    device_serial,
    merge_gpus,
    parse_ipmi,
    parse_nvidia_smi,
    parse_vpd,
)
from healthd.agent.evidence.identify import read_hardware

CAPTURES = sorted((Path(__file__).parents[2] / "data/nvidia_smi").glob("*.xml"))

# Layout: "PCI Local Bus Specification 3.0", appendix I. An identifier string, then read-only fields.
VPD = b"\x82\x04\x00ABCD\x90\x17\x00PN\x06MCX755SN\x08MT2301X1RV\x00\x78"


def smi(serial: str = "1650123456789") -> str:
    return f"""<?xml version="1.0" ?>
<nvidia_smi_log>
 <driver_version>570.86.15</driver_version>
 <gpu id="00000000:1B:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <serial>{serial}</serial>
  <uuid>GPU-1</uuid>
  <vbios_version>96.00.99.00.01</vbios_version>
  <board_part_number>692-2G520-0200-000</board_part_number>
  <inforom_version><img_version>G520.0200.00.05</img_version></inforom_version>
  <platformInfo><chassis_serial_number>N/A</chassis_serial_number></platformInfo>
  <processes><process_info><process_name>python</process_name></process_info></processes>
 </gpu>
 <gpu id="00000000:C3:00.0"><serial>N/A</serial></gpu>
</nvidia_smi_log>"""


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
def test_parse_nvidia_smi_reads_every_capture(capture: Path) -> None:
    text = capture.read_text()
    report = parse_nvidia_smi(text)
    assert len(report.gpus) == text.count("<gpu id=")
    assert report.driver or "<driver_version>" not in text
    assert all(gpu.pci.count(":") == 2 and gpu.name for gpu in report.gpus)


def test_parse_nvidia_smi_reads_identity() -> None:
    report = parse_nvidia_smi(smi())
    first, second = report.gpus
    assert (report.driver, report.chassis_serial) == ("570.86.15", "")
    assert (first.pci, first.serial, first.vbios) == ("0000:1b:00.0", "1650123456789", "96.00.99.00.01")
    assert (first.uuid, first.board_part_number, first.inforom) == ("GPU-1", "692-2G520-0200-000", "G520.0200.00.05")
    assert (second.pci, second.serial) == ("0000:c3:00.0", "")


@pytest.mark.parametrize("error", ["GPU is lost", "[GPU requires reset]", "Unknown Error", "[N/A]"])
def test_parse_nvidia_smi_takes_no_error_for_a_serial_number(error: str) -> None:
    assert parse_nvidia_smi(smi(error)).gpus[0].serial == ""


def test_merge_gpus_keeps_what_nvidia_smi_no_longer_shows() -> None:
    lost, other = GpuPart("0000:1b:00.0", "H100", "GPU-1", "165"), GpuPart("0000:1c:00.0", "H100", "GPU-2", "166")
    found = GpuPart("0000:1c:00.0", uuid="GPU-2", vbios="96")
    assert merge_gpus([lost, other], [found]) == (lost, GpuPart("0000:1c:00.0", "H100", "GPU-2", "166", vbios="96"))
    assert merge_gpus([lost], [GpuPart("0000:1b:00.0")]) == (lost,)
    assert merge_gpus([], [found, lost]) == (lost, found)


def test_merge_gpus_does_not_mix_two_boards() -> None:
    replaced = GpuPart("0000:1b:00.0", uuid="GPU-9")
    assert merge_gpus([GpuPart("0000:1b:00.0", "H100", "GPU-1", "165")], [replaced]) == (replaced,)


@given(st.integers(0, len(smi())))
def test_parse_nvidia_smi_survives_truncation(length: int) -> None:
    for gpu in parse_nvidia_smi(smi()[:length]).gpus:
        assert gpu.serial in ("", "1650123456789"[: len(gpu.serial)])


@given(st.text() | st.lists(st.sampled_from(["<a>", "</a>", "<gpu id='1'>", '<gpu id="0:1:2.0">', "</gpu>", "x"])))
def test_parse_nvidia_smi_survives_any_text(text: str | list[str]) -> None:
    parse_nvidia_smi(text if isinstance(text, str) else "".join(text))


def test_parse_ipmi() -> None:
    info = "Device ID                 : 32\nFirmware Revision         : 13.06\n"
    fru = " Board Serial          : B1\n Product Name          : DGX H100\n Product Serial        : S123\n"
    assert parse_ipmi(info, fru) == Bmc("S123", "13.06", "DGX H100")


@given(st.text(), st.text())
def test_parse_ipmi_survives_any_text(info: str, fru: str) -> None:
    parse_ipmi(info, fru)


def test_parse_vpd() -> None:
    assert parse_vpd(VPD) == {"PN": "MCX755", "SN": "MT2301X1"}


@given(st.binary() | st.integers(0, len(VPD)).map(lambda length: VPD[:length]))
def test_parse_vpd_survives_any_data(data: bytes) -> None:
    assert all(text.isprintable() for text in parse_vpd(data).values())


def config_space(*capabilities: tuple[int, bytes]) -> bytes:
    space, offset = bytearray(4096), 0x100
    for number, (kind, body) in enumerate(capabilities):
        following = offset + 0x40 if number + 1 < len(capabilities) else 0
        space[offset : offset + 4] = (kind | 1 << 16 | following << 20).to_bytes(4, "little")
        space[offset + 4 : offset + 4 + len(body)] = body
        offset = following
    return bytes(space)


def test_device_serial_follows_the_list_of_capabilities() -> None:
    serial = bytes.fromhex("0807060504030201")
    assert device_serial(config_space((0x0001, b""), (0x0003, serial))) == "01-02-03-04-05-06-07-08"
    assert device_serial(config_space((0x0001, b""))) == ""
    assert device_serial(config_space((0x0003, b"\xff" * 8))) == ""


@given(st.binary(max_size=600) | st.binary(min_size=400, max_size=600).map(lambda data: bytes(0x100) + data))
def test_device_serial_survives_any_data(config: bytes) -> None:
    device_serial(config)


def test_read_hardware(tmp_path: Path) -> None:
    nic, function = "/sys/bus/pci/devices/0000:18:00.0", "/sys/bus/pci/devices/0000:18:00.1"
    write(
        tmp_path,
        {
            "/sys/class/dmi/id/sys_vendor": "NVIDIA\n",
            "/sys/class/dmi/id/product_name": "DGXH100\n",
            "/sys/class/dmi/id/product_serial": "165\n",
            "/sys/class/dmi/id/board_serial": "B17\n",
            "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n",
            "/proc/sys/kernel/osrelease": "6.8.0\n",
            "/proc/driver/nvidia-nvswitch/devices/0000:07:00.0/information": "BIOS Version: 96.10.57.00.01\n",
            f"{nic}/class": "0x020700\n",
            f"{nic}/infiniband/mlx5_0/fw_ver": "28.39.1002\n",
            f"{nic}/net/ib0/address": "00\n",
            f"{function}/class": "0x020000\n",
            f"{function}/physfn/x": "a virtual function\n",
        },
    )
    (tmp_path / nic.lstrip("/") / "vpd").write_bytes(VPD)
    found = read_hardware(str(tmp_path))
    assert (found.kernel, found.driver) == ("6.8.0", "570.86.15")
    assert (found.system.serial, found.system.board_serial) == ("165", "B17")
    (switch,) = found.nvswitches
    assert (switch.pci, switch.firmware) == ("0000:07:00.0", "96.10.57.00.01")
    (card,) = found.nics
    assert (card.name, card.serial, card.part_number, card.firmware) == (
        "mlx5_0 ib0",
        "MT2301X1",
        "MCX755",
        "28.39.1002",
    )
    assert read_hardware(str(tmp_path), system_only=True).nics == ()


def test_read_hardware_of_empty_machine(tmp_path: Path) -> None:
    assert read_hardware(str(tmp_path)).system.serial == ""
