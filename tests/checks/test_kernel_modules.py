"""kernel_modules: modules that should be loaded."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from fakes import codes, findings, parse_or_error, run_check, run_until_error
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import UnreadableTree, write

from healthd.checks import kernel_modules
from healthd.checks.kernel_modules import MODULES, Config, problem, validate
from healthd.common.model import Clears, Severity
from healthd.host.host import Host

EXPECTED = Config(expected=("nvidia", "nvidia_uvm", "nvidia-peermem", "ib_umad"))


def make(root: Path, **states: str | None) -> Host:
    """A node with all expected modules, ib_umad built in. nvidia=None: not loaded; nvidia="going": its state."""
    for name in ("nvidia", "nvidia_uvm", "nvidia_peermem"):
        state = states.get(name, "live")
        write(root, {f"{MODULES}/{name}/initstate": f"{state}\n"})
        if state is None:
            shutil.rmtree(root / MODULES[1:] / name)
    write(root, {f"{MODULES}/ib_umad/parameters/x": "1\n"})
    return Host(str(root))


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    return make(tmp_path), EXPECTED


ABSENT_IS_FINE = {r".*/initstate": "a module that is built in has none"}


def test_loaded_or_built_in_modules_give_nothing(node):
    assert run_check(kernel_modules, node(), EXPECTED) == []


def test_kernel_modules_reports_nothing_without_expectation(tmp_path):
    assert run_check(kernel_modules, Host(str(tmp_path))) == []
    assert run_check(kernel_modules, Host()) == []


@pytest.mark.parametrize(
    ("state", "problem_text"),
    [(None, "is not loaded"), ("coming", "has not finished loading"), ("going", "is being unloaded")],
)
def test_missing_or_unready_module_is_degraded_after_a_minute(node, state, problem_text):
    (finding,) = findings(kernel_modules, node(nvidia_peermem=state), EXPECTED)
    assert (finding.code, finding.subject) == ("kernel_modules/not_loaded", "nvidia_peermem")
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.DEGRADED, Clears.PASS, 60.0)
    assert (finding.expects, finding.shared_cause) == ("expected", True)
    assert finding.message == f"the kernel module nvidia_peermem {problem_text}"


def test_name_with_dashes_is_the_same_module(node):
    config = Config(expected=("nvidia-peermem", "nvidia_peermem"))
    assert len(findings(kernel_modules, node(nvidia_peermem=None), config)) == 1
    assert findings(kernel_modules, node(), config) == []


@pytest.mark.parametrize("state", ["", "N/A", "Unknown", "live coming", str(2**64)])
def test_invalid_state_fails_run_and_hides_no_other_finding(node, state):
    results, error = run_until_error(kernel_modules, node(nvidia=state, nvidia_uvm=None), EXPECTED)
    assert error.startswith("nvidia: /sys/module/nvidia/initstate: not a state")
    assert [finding.subject for finding in results] == ["nvidia_uvm"]


def test_unreadable_module_fails_run_and_hides_no_other_finding(node, tmp_path):
    node(nvidia_uvm=None)
    host = Host(str(tmp_path), system=UnreadableTree(tmp_path, {f"{MODULES}/nvidia/initstate": errno.EIO}))
    results, error = run_until_error(kernel_modules, host, EXPECTED)
    assert error == "nvidia: [Errno 5] Input/output error"
    assert [finding.subject for finding in results] == ["nvidia_uvm"]


def test_module_of_this_machine_is_found():
    loaded = next((path.parent.name for path in Path(MODULES).glob("*/initstate")), "")
    built_in = next(path.parent.name for path in Path(MODULES).glob("*/parameters"))
    expected = tuple(name for name in (loaded, built_in) if name)
    assert findings(kernel_modules, Host(), Config(expected=expected)) == []
    assert len(findings(kernel_modules, Host(), Config(expected=("no_such_module",)))) == 1


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "nvidia uvm", "nvidia.ko", "x" * 64])
def test_validate_rejects_invalid_module_name(name):
    assert "is not a module name" in (validate(Config(expected=(name,))) or "")
    assert validate(EXPECTED) is None


@given(st.one_of(st.text(max_size=12), st.sampled_from(["live", "coming", "going", "LIVE", "live\n"])))
def test_problem_accepts_only_live(tmp_path_factory, state):
    host = write(tmp_path_factory.mktemp("n"), {f"{MODULES}/nvidia/initstate": state.encode("utf-8", "replace")})
    problem_text, error = parse_or_error(problem, host, "nvidia")
    assert error.count("not a state") or (problem_text == "") == (state.strip() == "live")


# --- stories


def test_missing_module_drains_without_requeue_until_loaded(node):
    without_module = node(nvidia_peermem=None)
    story = Story(kernel_modules, EXPECTED).run_check(without_module)
    assert not story.drained, "it may be loading"
    story.run_check(without_module, minutes=1.5)
    assert (story.codes, story.drained, story.requeued) == (["kernel_modules/not_loaded"], True, False)
    assert story.run_checks(without_module, 300).reboot().run_checks(without_module, 3).drained
    story.run_checks(node(), 2)
    assert (story.codes, story.drained) == ([], False)


def test_driver_upgrade_within_a_minute_does_not_drain(node):
    story = (
        Story(kernel_modules, EXPECTED).run_check(node(nvidia="coming", nvidia_uvm=None)).run_check(node(), minutes=0.5)
    )
    assert (story.codes, story.drained) == ([], False)


def test_module_guessed_by_profile_never_drains(node):
    guessed = Config(expected=("nvidia_uvm",), guessed=("expected",))
    story = Story(kernel_modules, guessed).run_checks(node(nvidia_uvm=None), 20)
    assert (story.codes, story.drained) == (["kernel_modules/not_loaded"], False)


def test_guessed_module_is_not_missed_in_tree_without_modules(tmp_path):
    host = write(tmp_path, {"/proc/uptime": "1.00 1.00\n"})
    assert findings(kernel_modules, host, Config(expected=("nvidia",), guessed=("expected",))) == []
    assert codes(findings(kernel_modules, host, Config(expected=("nvidia",)))) == ["kernel_modules/not_loaded"]


def test_codes_are_explained():
    assert codes(findings(kernel_modules, Host("/nonexistent"), EXPECTED)) == [*kernel_modules.EXPLAIN] * 4
