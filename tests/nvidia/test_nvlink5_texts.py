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


def explain_page(capsys, name):
    status = main(["explain", name])
    return status, capsys.readouterr()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.code}-{row.sub_code}-{row.units[0]}")
def test_explain_has_every_table_row_on_page_of_its_sub_code(row):
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
def test_explain_of_xid_lists_sub_codes_and_nvlink5_lists_xids(xid):
    text, top = explain(f"nvlink5/{xid}"), explain("nvlink5")
    assert text is not None
    assert top is not None
    assert f"nvlink5/{xid}: " in top.meaning
    for row in ROWS:
        if row.code == xid:
            assert re.search(rf"\b{xid}:{row.sub_code}\b", text.meaning)
            assert row.units[0] in text.meaning


@pytest.mark.parametrize("name", all_names())
def test_explain_command_knows_every_name(capsys, name):
    assert registry.explain(CHECKS, name) is not None
    status, output = explain_page(capsys, name)
    assert (status, output.err) == (0, "")
    assert output.out.startswith(f"{name}  ")
    assert all(len(line) <= 100 for line in output.out.splitlines())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.code}-{row.sub_code}-{row.units[0]}-{row.statuses}")
def test_todo_text_lists_every_row_under_its_action(row):
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
def test_explain_of_xid_without_row_has_no_single_command(capsys, xid):
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
def test_explain_of_line_chooses_commands(capsys, line, severity, has_reset):
    main(["explain", "--json", line])
    document = json.loads(capsys.readouterr().out)
    ((course,),) = ([run["timelines"][:1] for run in document["here"]],)
    assert course[0]["severity"] == severity
    assert any("--gpu-reset" in step["command"] for step in document["steps"]) == has_reset


@pytest.mark.parametrize("name", all_names())
def test_explain_of_rows_names_no_own_condition(capsys, name):
    assert f"healthd repaired {name}" not in explain_page(capsys, name)[1].out


def test_explain_puts_items_on_separate_lines(capsys):
    text = explain_page(capsys, "nvlink5/150:0")[1].out
    assert re.search(r"(?m)^  - MSE Degraded, status 0x0 or 0xffffffff: fatal; reset the GPU", text)
    assert re.search(r"(?m)^  - MSE_WATCHDOG, status 0x0: fatal; reset the GPU", text)


def test_explain_accepts_sub_code_format_of_other_tools():
    assert explain("nvlink5/149.4") == explain("nvlink5/149:4")


def test_explain_of_unlisted_sub_code_is_unknown_and_warns():
    text = explain("nvlink5/149:63")
    assert text is not None
    assert (text.severity, "not in the table" in text.meaning) == (Severity.WARNING, True)


@pytest.mark.parametrize(
    ("misspelt", "suggestion"),
    [("nvlink5/149:64", "149:4"), ("nvlink5/151", "nvlink5/150"), ("nvlnik5/149:4", "nvlink5/149:4")],
)
def test_explain_of_misspelt_name_gives_one_sentence(capsys, misspelt, suggestion):
    status, output = explain_page(capsys, misspelt)
    assert status != 0
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert f'unknown code "{misspelt}"' in output.err
    assert suggestion in output.err


def test_pages_without_condition_have_no_severity_setting():
    assert CHECKS["gpu_xid"].explain("nvlink5/149:4") is None
    assert not set(all_names()) & set(registry.all_codes(CHECKS))


@given(st.text() | st.from_regex(r"nvlink5/[0-9]{0,5}[:.]?[0-9]{0,5}", fullmatch=True))
def test_explain_accepts_any_name(name):
    text = explain(name)
    assert text is None or text.meaning
