"""The Ansible role reads the status document: its keys and its sentence must be the daemon's."""

from __future__ import annotations

import re
from pathlib import Path

import healthd.agent.daemon
from tests.docs.test_json_doc import STATUS_DOCUMENT

ROLE = Path(__file__).parents[2] / "packaging/ansible"
TEXT = "".join(path.read_text("utf-8") for path in sorted(ROLE.rglob("*.yml")))


def test_role_reads_only_keys_of_the_status():
    keys = set(re.findall(r"\(healthd_status\.stdout \| from_json\)\.(\w+)", TEXT))
    assert keys == {"mode", "problems"}
    assert keys <= set(STATUS_DOCUMENT)


def test_role_matches_the_sentence_of_a_rejected_reload():
    (sentence,) = set(re.findall(r"select\('match', '([^']+)'\)", TEXT))
    assert f'labelled("{sentence}", ' in Path(healthd.agent.daemon.__file__).read_text("utf-8")
