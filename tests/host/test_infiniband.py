"""infiniband: names of ports and their counters."""

from __future__ import annotations

import errno

import pytest
from fakes import parse_or_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trees import UnreadableTree, captured_files, write

from healthd.host.host import Host
from healthd.host.infiniband import count, path, port_name_problem, ports

FILE = path("mlx5_0/1", "counters/symbol_error")


def test_ports_lists_every_port_of_every_device(tmp_path):
    host = write(tmp_path, captured_files("infiniband_procfs.tsv"))
    assert ports(host) == ["hfi1_0/1", "mlx4_0/1", "mlx4_0/2", "mlx5_0/1"]
    assert ports(Host("/nonexistent")) == []


def test_path_returns_file_of_a_port():
    assert path("rocep33s0f0/2", "state") == "/sys/class/infiniband/rocep33s0f0/ports/2/state"


@pytest.mark.parametrize("name", ["mlx5_0", "mlx5_0/", "/1", "mlx5_0/0", "mlx5_0/x", "a b/1", "mlx5_0/1/2"])
def test_port_name_problem_rejects_invalid_name_with_hint(name):
    expected = f'ports: "{name}" is not a port: write device/number, as in "mlx5_0/1"'
    assert port_name_problem("ports", ["mlx5_0/1", name]) == expected
    assert port_name_problem("ports", ["mlx5_0/1"]) is None


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT, errno.ENODEV])
def test_count_returns_none_for_missing_or_unsupported_counter(tmp_path, number):
    assert count(Host(str(tmp_path), system=UnreadableTree(tmp_path, {FILE: number})), FILE) is None


def test_count_raises_other_errors(tmp_path):
    with pytest.raises(OSError, match="Input/output error"):
        count(Host(str(tmp_path), system=UnreadableTree(tmp_path, {FILE: errno.EIO})), FILE)


@settings(max_examples=100, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(st.one_of(st.binary(max_size=24), st.integers(0, 2**70).map(lambda n: b"%d\n" % n)))
def test_count_is_exact_or_fails_with_an_error(tmp_path, content):
    counted, error = parse_or_error(count, write(tmp_path, {FILE: content}), FILE)
    if error:
        assert error.startswith(f"{FILE}: not a count: ")
    else:
        assert content.strip() == b"N/A (no PMA)" if counted is None else counted == int(content)
