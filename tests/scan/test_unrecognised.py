"""`healthd scan` counts the lines of known drivers that no rule recognises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.agent.kernel_log.rules import network
from healthd.cli.main import main
from healthd.scan import lines as scan_lines
from healthd.scan.lines import Block, Tally
from healthd.scan.messages import messages, unrecognised_driver

DATA = sorted((Path(__file__).parents[1] / "data").glob("kernel_lines*.jsonl"))
ROWS = [json.loads(line) for data in DATA for line in data.read_text("utf-8").splitlines()]
UNKNOWN = "NVRM: krcFrobnicate_IMPL: the frobnicator is gone"
CARD = "mlx5_core 0000:5c:00.0: frobnication failed"
CUT = "EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Ch"
IOMMU = "iommu ivhd0: AMD-Vi: Event logged [FROBNICATION_ERROR address=0x10014a0a0]"
XID = "NVRM: Xid (PCI:0000:18:00): 79, pid=1, name=a, GPU has fallen off the bus."


def tally_of(*lines: str) -> Tally:
    tally = Tally()
    list(messages([Block.from_lines(1, [line.encode() for line in lines])], 1_795_000_000.0, tally))
    return tally


# No rule reads these lines and no GPU is faulty, but the driver does not work: no GPU was found, its client or its
# kernel module has another version, or another driver uses the GPU.
NOT_WORKING = {"m0065", "m0066", "m0148", "m0155", "m0171", "m0172"}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row["id"]) for row in ROWS if row["kind"] == "benign" and row["id"] not in NOT_WORKING],
)
def test_harmless_captured_line_is_not_counted(row):
    assert tally_of(*row["text"].split("\n")).drivers == {}


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: NVIDIA init module failed!",
        "NVRM: API mismatch: the client has the version 535.54.03, but",
        "NVRM: No NVIDIA GPU found.",
        "NVRM: No NVIDIA graphics adapter found!",
        "NVRM: GPU 0000:01:00.0 is already bound to nouveau.",
    ],
)
def test_message_of_failing_driver_is_counted(line):
    assert tally_of(f"[   12.000000] {line}").drivers == {"NVRM": 1}


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in ROWS if row["id"] in NOT_WORKING])
def test_captured_message_of_failing_driver_is_counted_once(row):
    assert tally_of(*row["text"].split("\n")).drivers == {"NVRM": 1}


@pytest.mark.parametrize(("line", "driver"), [(UNKNOWN, "NVRM"), (CARD, "mlx5"), (CUT, "EDAC"), (IOMMU, "IOMMU")])
@pytest.mark.parametrize("prefix", ["", "[   12.000000] ", "Mar 29 15:38:59 gpu-1 kernel: [   12.000000] "])
def test_line_of_a_known_driver_without_rule_is_counted(line, driver, prefix):
    tally = tally_of(prefix + line)
    assert (tally.drivers, tally.texts) == ({driver: 1}, {(driver, line): (1, 1)})


@pytest.mark.parametrize("driver", [*network.CARD_DRIVERS, "efa"])
def test_unread_line_of_every_card_with_rules_is_counted(driver):
    assert tally_of(f"[   12.000000] {driver} 0000:5c:00.0: frobnication failed").drivers == {"network": 1}


@pytest.mark.parametrize(
    "line",
    [
        XID,
        "mlx5_core 0000:5c:00.0: firmware version: 28.39.1002",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.144.03  Mon Dec 30 17:44:08 UTC 2024",
        "Mar 29 15:38:59 gpu-1 python3[77]: NVRM: krcFrobnicate_IMPL: the frobnicator is gone",
        "usb 1-1: device descriptor read/64, error -110",
    ],
)
def test_read_harmless_or_foreign_line_is_not_counted(line):
    assert tally_of(f"[   12.000000] {line}" if "gpu-1" not in line else line).drivers == {}


def test_every_repetition_is_counted_and_the_text_is_kept_once():
    prefix = "Mar 29 15:38:59 gpu-1 kernel: "
    tally = tally_of(*[f"{prefix}[   12.{number:06}] {UNKNOWN}" for number in range(500)], CARD)
    assert tally.drivers == {"NVRM": 500, "mlx5": 1}
    assert tally.texts["NVRM", UNKNOWN] == (1, 500)


def test_kept_texts_are_limited_and_all_lines_are_counted():
    tally = tally_of(*(f"NVRM: unheard of {number} {'x' * 2000}" for number in range(scan_lines.MAX_TEXTS + 50)))
    assert tally.drivers == {"NVRM": scan_lines.MAX_TEXTS + 50}
    assert len(tally.texts) == scan_lines.MAX_TEXTS
    assert max(len(text) for _, text in tally.texts) == scan_lines.TEXT_LENGTH


def scan(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    log = tmp_path / "kern.log"
    log.write_text("".join(f"[   1{number}.000000] {line}\n" for number, line in enumerate((UNKNOWN, CARD, UNKNOWN))))
    status = main(["scan", *options, str(log)])
    return status, capsys.readouterr().out


def test_table_counts_unrecognised_lines_and_lists_them_on_request(tmp_path, capsys):
    status, out = scan(tmp_path, capsys)
    assert (status, UNKNOWN in out) == (0, False)
    assert "2 NVRM lines and 1 mlx5 line not recognised; list them with --unknown" in " ".join(out.split())
    status, out = scan(tmp_path, capsys, "--unknown")
    assert (status, UNKNOWN in out, CARD in out) == (0, True, True)


def test_json_has_an_object_per_driver_and_on_request_per_text(tmp_path, capsys):
    _, out = scan(tmp_path, capsys, "--json")
    objects = [json.loads(line) for line in out.splitlines()]
    assert [(each["kind"], each["code"], each["count"], each["line"]) for each in objects] == [
        ("unrecognised", "unrecognised/NVRM", 2, 1),
        ("unrecognised", "unrecognised/mlx5", 1, 2),
    ]
    _, out = scan(tmp_path, capsys, "--json", "--unknown")
    assert [json.loads(line)["text"] for line in out.splitlines()] == [UNKNOWN, CARD]


def test_object_of_unrecognised_lines_has_keys_of_an_event(tmp_path, capsys):
    log = tmp_path / "kern.log"
    log.write_text(f"[   10.000000] {CARD}\n[   11.000000] mlx5_core 0000:5c:00.0: Link down\n")
    main(["scan", "--json", str(log)])
    event, unrecognised = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert list(event) == list(unrecognised)


@given(st.text(max_size=200), st.sampled_from(["NVRM: ", "mlx5_core 0000:5c:00.0: ", "EDAC ", ""]))
def test_no_line_is_both_read_and_unrecognised(text, start):
    found = strip_prefix(start + text, 0.0)
    tally = tally_of((start + text).replace("\n", " "))
    if found is not None and "\n" not in text and parse(found.text) is not None:
        assert tally.drivers == {}
    assert unrecognised_driver(start + text) in ("", "NVRM", "mlx5", "EDAC") or not start
