"""cluster_name: reading the cluster's name from slurm.conf."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.slurm.slurm_conf import cluster_name, parse_cluster_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ClusterName=tux\nSlurmctldHost=a\n", "tux"),
        ("# ClusterName=old\nSlurmctldHost=a\n  clustername = Prod_1.hpc # site name\n", "prod_1.hpc"),
        ('SlurmctldHost=a ClusterName="tux"', "tux"),
        ("ClusterName=\n", ""),
        ("MyClusterName=tux\n", ""),
        ("Include /etc/slurm/name.conf\n", ""),
        ("", ""),
    ],
)
def test_parse_cluster_name_reads_name_in_lower_case(text, name):
    assert parse_cluster_name(text) == name


@given(st.text())
def test_parse_cluster_name_accepts_any_text(text):
    name = parse_cluster_name(text)
    assert not name or (name.isascii() and name.isprintable() and " " not in name)


def test_cluster_name_prefers_slurm_conf_variable_to_default_paths(tmp_path: Path):
    assert cluster_name(str(tmp_path), {}) == ""
    (tmp_path / "run/slurm/conf").mkdir(parents=True)
    (tmp_path / "run/slurm/conf/slurm.conf").write_text("ClusterName=sent\n")
    assert cluster_name(str(tmp_path), {}) == "sent"
    (tmp_path / "etc/slurm").mkdir(parents=True)
    (tmp_path / "etc/slurm/slurm.conf").write_text("ClusterName=own\n")
    assert cluster_name(str(tmp_path), {}) == "own"
    (tmp_path / "named.conf").write_text("ClusterName=named\n")
    assert cluster_name(str(tmp_path), {"SLURM_CONF": str(tmp_path / "named.conf")}) == "named"
    assert cluster_name(str(tmp_path), {"SLURM_CONF": str(tmp_path / "none.conf")}) == ""
