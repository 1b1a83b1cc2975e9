"""Tests of docs/peers.md: everything that it attributes to healthd exists, and each check of a peer has a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from healthd.agent.settings import registry
from healthd.cli.main import FAMILIES
from healthd.common.codec import fields_of

pytestmark = pytest.mark.one_python

PAGE = (Path(__file__).parents[2] / "docs/peers.md").read_text("utf-8")
CHECKS = registry.built_in_checks()
CODES = set(registry.explained(CHECKS))
WITHOUT = "no"  # the last column gives the reason


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Return (column heads, rows) of each table."""
    found = []
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text):
        rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines()]
        found.append((rows[0], rows[2:]))
    return found


SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"(?m)^## ", PAGE)[1:]}
PEERS = {row[0]: row for row in tables(PAGE)[0][1]}
ROWS = [(heads, row) for heads, rows in tables(PAGE) for row in rows]


def resolves(name: str) -> bool:
    """Return True for a code, a check, a setting as in "ib_flap.links_downed", or a command as in "healthd record"."""
    if name.startswith("healthd "):
        return name.removeprefix("healthd ") in FAMILIES
    check, _, setting = name.partition(".")
    if not setting:
        return name in CODES or name in CHECKS
    return check in CHECKS and setting in {field.name for field in fields_of(CHECKS[check].config)}


@pytest.mark.parametrize(("heads", "row"), ROWS, ids=lambda value: value[0][:40])
def test_no_cell_of_a_row_is_empty(heads, row):
    assert len(row) == len(heads)
    assert all(row)


@pytest.mark.parametrize("row", [row[heads.index("healthd")] for heads, row in ROWS if "healthd" in heads])
def test_what_healthd_is_said_to_have_exists(row):
    names = re.findall(r"`([^`]+)`", row)
    assert names or row == WITHOUT
    assert [name for name in names if not resolves(name)] == []
    assert re.sub(r"`[^`]+`", "", row).strip(", ") in ("", WITHOUT)


def test_nothing_is_said_to_come_later_that_is_there():
    """Two sentences once called disk and file system lines "not yet" read, while the tables listed them."""
    assert "not yet" not in PAGE.lower()
    assert {"block_device/command_error", "filesystem/errors", "mlx5/slot_power"} <= set(re.findall(r"`([^`]+)`", PAGE))


@pytest.mark.parametrize("row", PEERS.values(), ids=list(PEERS))
def test_a_peer_has_a_row_for_each_check_that_was_found_at_a_commit(row):
    name, repository, commit, checks = row
    assert re.fullmatch(r"github\.com/[\w.-]+/[\w.-]+", repository)
    assert re.fullmatch(r"[0-9a-f]{12}", commit)
    ((_, rows),) = tables(SECTIONS[name])
    theirs = [check for row in rows for check in row[0].split("; ")]
    assert len(theirs) >= int(checks)
    assert len(set(theirs)) == len(theirs)


def test_each_section_with_a_table_of_checks_is_of_a_peer_in_the_list():
    assert [name for name, text in SECTIONS.items() if "| their check |" in text] == list(PEERS)


def test_what_is_to_be_considered_goes_somewhere():
    _, rows = tables(SECTIONS["Not in healthd"])[-1]
    for _, _, where in rows:
        assert all(resolves(name) for name in re.findall(r"`([^`]+)`", where))


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_of_healthd_stands_beside_a_peers_or_is_said_not_to(name):
    assert re.search(rf"`{name}[`/.]", PAGE)


@pytest.mark.parametrize("name", ["gpu_ecc/nothing", "nothing", "ib_flap.nothing", "nothing.expected", "healthd no"])
def test_a_name_that_does_not_exist_is_seen(name):
    assert not resolves(name)
