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
NOTHING = "no"  # the last column gives the reason


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


def exists(name: str) -> bool:
    """Return True for a code, a check, a setting as in "ib_flap.links_downed", or a command as in "healthd record"."""
    if name.startswith("healthd "):
        return name.removeprefix("healthd ") in FAMILIES
    check, _, setting = name.partition(".")
    if not setting:
        return name in CODES or name in CHECKS
    return check in CHECKS and setting in {field.name for field in fields_of(CHECKS[check].config)}


@pytest.mark.parametrize(("heads", "row"), ROWS, ids=lambda value: value[0][:40])
def test_no_cell_is_empty(heads, row):
    assert len(row) == len(heads)
    assert all(row)


@pytest.mark.parametrize("row", [row[heads.index("healthd")] for heads, row in ROWS if "healthd" in heads])
def test_named_features_of_healthd_exist(row):
    names = re.findall(r"`([^`]+)`", row)
    assert names or row == NOTHING
    assert [name for name in names if not exists(name)] == []
    assert re.sub(r"`[^`]+`", "", row).strip(", ") in ("", NOTHING)


def test_page_has_no_outdated_not_yet():
    """Two sentences once called disk and file system lines "not yet" read, while the tables listed them."""
    assert "not yet" not in PAGE.lower()
    assert {"block_device/command_error", "filesystem/errors", "mlx5/slot_power"} <= set(re.findall(r"`([^`]+)`", PAGE))


@pytest.mark.parametrize("row", PEERS.values(), ids=list(PEERS))
def test_peer_has_row_for_each_check_at_its_commit(row):
    name, repository, commit, checks = row
    assert re.fullmatch(r"github\.com/[\w.-]+/[\w.-]+", repository)
    assert re.fullmatch(r"[0-9a-f]{12}", commit)
    ((_, rows),) = tables(SECTIONS[name])
    peer_checks = [check for row in rows for check in row[0].split("; ")]
    assert len(peer_checks) >= int(checks)
    assert len(set(peer_checks)) == len(peer_checks)


def test_each_section_with_checks_belongs_to_listed_peer():
    assert [name for name, text in SECTIONS.items() if "| their check |" in text] == list(PEERS)


def test_each_feature_to_consider_names_existing_places():
    _, rows = tables(SECTIONS["Not in healthd"])[-1]
    for _, _, location in rows:
        assert all(exists(name) for name in re.findall(r"`([^`]+)`", location))


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_of_healthd_is_on_page(name):
    assert re.search(rf"`{name}[`/.]", PAGE)


@pytest.mark.parametrize("name", ["gpu_ecc/nothing", "nothing", "ib_flap.nothing", "nothing.expected", "healthd no"])
def test_unknown_name_is_detected(name):
    assert not exists(name)
