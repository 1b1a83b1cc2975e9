"""`healthd explain nvlink5/149:4`: explains every row of NVIDIA's table offline."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.settings import registry
from healthd.cli.main import main
from healthd.common.model import Clears, Severity
from healthd.nvidia import codes
from healthd.nvidia.nvlink5_texts import all_names, explain, todo_text

pytestmark = pytest.mark.one_python

ROWS = codes.nvlink5_rows()
CHECKS = registry.built_in_checks()


def page(capsys, name):
    status = main(["explain", name])
    return status, capsys.readouterr()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.code}-{row.sub_code}-{row.units[0]}")
def test_every_row_of_the_table_is_on_the_page_of_its_sub_code(row):
    text = explain(f"nvlink5/{row.code}:{row.sub_code}")
    assert text is not None
    lines = [line for line in text.meaning.split("\n") if line.startswith(f"- {row.units[0]}")]
    assert lines
    for status in row.statuses:
        assert any(re.search(rf"\b{status:#x}\b", line) for line in lines)
    severity = row.severity.rstrip("*?").lower()
    assert any(f"{severity}; " in line for line in lines)
    if row.action == "RESET_GPU":
        assert any("reset the GPU" in line for line in lines)
        assert (text.severity, text.clears) == (Severity.CRITICAL, Clears.GPU_RESET)
    assert not re.search(r"\*|;;|_SI|CONTACT_|INVESTIGATE|IGNORE|PacketLoss", text.meaning), "no raw names of the table"


@pytest.mark.parametrize("xid", range(144, 151))
def test_the_page_of_an_xid_has_all_its_sub_codes_and_that_of_nvlink5_all_xids(xid):
    text, top = explain(f"nvlink5/{xid}"), explain("nvlink5")
    assert text is not None
    assert top is not None
    assert f"nvlink5/{xid}: " in top.meaning
    for row in ROWS:
        if row.code == xid:
            assert re.search(rf"\b{xid}:{row.sub_code}\b", text.meaning)
            assert row.units[0] in text.meaning


@pytest.mark.parametrize("name", all_names())
def test_every_name_is_explained_by_the_command(capsys, name):
    assert registry.explain(CHECKS, name) is not None
    status, said = page(capsys, name)
    assert (status, said.err) == (0, "")
    assert said.out.startswith(f"{name}  ")
    assert all(len(line) <= 100 for line in said.out.splitlines())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.code}-{row.sub_code}-{row.units[0]}-{row.statuses}")
def test_the_page_of_an_xid_has_every_row_under_its_action(row):
    starts = {
        "RESET_GPU": "- Reset the GPU",
        "IGNORE": "- No immediate",
        "XID_154_EVAL": "- Do the action that Xid 154",
    }
    (line,) = (line for line in todo_text(row.code).split("\n") if line.startswith(starts[row.action]))
    rows = line.partition("): ")[2] or line.partition(": ")[2]
    named = [each for each in rows.rstrip(".").split("; ") if each.startswith(f"{row.units[0]} ")]
    named = [each for each in named if re.search(rf"\b{row.code}:{row.sub_code}\b", each)]
    assert any(
        " with status " not in each or all(re.search(rf"\b{status:#x}\b", each) for status in row.statuses)
        for each in named
    )


@pytest.mark.parametrize("xid", range(144, 151))
def test_an_xid_without_a_row_gives_no_single_command(capsys, xid):
    resets = any(row.code == xid and row.action == "RESET_GPU" for row in ROWS)
    assert main(["explain", "--json", f"gpu_xid/{xid}"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["steps"] == []
    assert ("--gpu-reset" in document["todo"]) == resets
    assert document["severity"] == ("critical" if resets else "warning")


REGISTERS = "{:#010x} {:#010x} 0x00000000 0x00000000 0x00000000 0x00000000"
LINE = "NVRM: Xid (PCI:0000:1b:00.0): {}, {} {} XC0 i0 Link 0 (" + REGISTERS + ")"


@pytest.mark.parametrize(
    ("line", "severity", "has_reset"),
    [
        (LINE.format(144, "SAW_MVB", "Fatal", 0x1, 0x2), "critical", True),
        (LINE.format(144, "SAW_MVB", "Nonfatal", 0x1, 0x4), "info", False),
    ],
)
def test_the_line_of_an_xid_decides_the_commands(capsys, line, severity, has_reset):
    main(["explain", "--json", line])
    document = json.loads(capsys.readouterr().out)
    ((course,),) = ([run["timelines"][:1] for run in document["here"]],)
    assert course[0]["severity"] == severity
    assert any("--gpu-reset" in step["command"] for step in document["steps"]) == has_reset


@pytest.mark.parametrize("name", all_names())
def test_a_page_of_rows_names_no_condition_of_its_own(capsys, name):
    assert f"healthd repaired {name}" not in page(capsys, name)[1].out


def test_items_of_a_page_are_lines_of_their_own(capsys):
    said = page(capsys, "nvlink5/150:0")[1].out
    assert re.search(r"(?m)^  - MSE Degraded, status 0x0 or 0xffffffff: fatal; reset the GPU", said)
    assert re.search(r"(?m)^  - MSE_WATCHDOG, status 0x0: fatal; reset the GPU", said)


def test_a_sub_code_may_be_written_as_other_tools_do():
    assert explain("nvlink5/149.4") == explain("nvlink5/149:4")


def test_a_sub_code_in_no_row_is_unknown_to_this_version_and_warns():
    text = explain("nvlink5/149:63")
    assert text is not None
    assert (text.severity, "not in the table" in text.meaning) == (Severity.WARNING, True)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("nvlink5/149:64", "149:4"), ("nvlink5/151", "nvlink5/150"), ("nvlnik5/149:4", "nvlink5/149:4")],
)
def test_a_misspelt_name_gets_one_sentence(capsys, wrong, right):
    status, said = page(capsys, wrong)
    assert status != 0
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert f'unknown code "{wrong}"' in said.err
    assert right in said.err


def test_what_is_no_condition_has_no_severity_to_set():
    assert CHECKS["gpu_xid"].explain("nvlink5/149:4") is None
    assert not set(all_names()) & set(registry.all_codes(CHECKS))


@given(st.text() | st.from_regex(r"nvlink5/[0-9]{0,5}[:.]?[0-9]{0,5}", fullmatch=True))
def test_explain_takes_any_name(name):
    text = explain(name)
    assert text is None or text.meaning
