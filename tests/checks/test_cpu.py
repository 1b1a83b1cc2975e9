"""cpu: CPUs that are offline, slow or hot."""

from __future__ import annotations

import errno

import pytest
from fakes import codes, findings, observed, refusal, rounds, run_check, until_it_fails
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import write

from healthd.checks import cpu
from healthd.checks.cpu import Config, parse
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host
from healthd.host.system import Tree

CPUS = "/sys/devices/system/cpu"
GOVERNOR = f"{CPUS}/cpufreq/policy{{}}/scaling_governor"
COUNT = f"{CPUS}/cpu{{}}/thermal_throttle/package_throttle_count"
SIBLINGS = f"{CPUS}/cpu{{}}/topology/core_siblings_list"

ABSENT_IS_FINE = {
    f"{CPUS}/cpufreq": "virtual machines and kernels without cpufreq have no governors",
    f"{CPUS}/cpu[0-9]+/thermal_throttle/package_throttle_count": "AMD's CPUs and virtual machines do not count it",
}


def make(tmp_path, changed=None, online="0-7"):
    """Create two packages of four CPUs, numbered as Linux does with SMT. `changed`: path -> text."""
    files = {f"{CPUS}/online": f"{online}\n"}
    for first, siblings in ((0, "0-1,4-5"), (2, "2-3,6-7")):
        files |= {COUNT.format(first): "0\n", SIBLINGS.format(first): f"{siblings}\n"}
    files |= {GOVERNOR.format(number): "performance\n" for number in range(8)}
    return write(tmp_path, files | (changed or {}))


def healthy(tmp_path):
    return make(tmp_path), Config(expected=8)


def test_cpus_that_are_well_give_no_finding(node):
    given = run_check(cpu, node(), Config(expected=8))
    assert [item for item in given if isinstance(item, Finding)] == []
    assert next(observed(given, "cpu_online")).value == 8
    assert [item.labels for item in observed(given, "cpu_package_throttle_total")] == [(("cpu", "0"),), (("cpu", "2"),)]


def test_a_machine_that_tells_nothing_of_its_cpus_gives_nothing(tmp_path):
    assert run_check(cpu, Host(str(tmp_path))) == []


def test_a_virtual_machine_has_neither_governors_nor_counts(tmp_path):
    host = write(tmp_path, {f"{CPUS}/online": "0-1\n"})
    assert [item.name for item in run_check(cpu, host)] == ["cpu_online"]


def test_fewer_cpus_than_expected_are_degraded_and_more_are_fine(node):
    (finding,) = findings(cpu, node(online="0-2,4-7"), Config(expected=8))
    assert (finding.code, finding.severity, finding.clears) == ("cpu/missing", Severity.DEGRADED, Clears.PASS)
    assert (finding.expects, finding.message) == ("expected", "7 CPUs are online; expected 8")
    assert findings(cpu, node(), Config(expected=4)) == []


def test_without_an_expectation_no_number_is_too_few(node):
    assert findings(cpu, node(online="0")) == []


def test_another_governor_warns_once_for_the_node(node):
    host = node({GOVERNOR.format(n): "powersave\n" for n in range(3)} | {GOVERNOR.format(7): "schedutil\n"})
    (finding,) = findings(cpu, host)
    assert (finding.code, finding.severity) == ("cpu/governor", Severity.WARNING)
    assert finding.message == "of 8 CPU frequency policies, 3 have 'powersave', 1 have 'schedutil', not performance"


def test_governors_that_the_site_accepts_are_right(node):
    host = node({GOVERNOR.format(n): "powersave\n" for n in range(8)})
    assert findings(cpu, host, Config(governors=("performance", "powersave"))) == []
    assert findings(cpu, host, Config(governors=())) == []


def test_throttling_that_grows_warns_and_an_old_count_does_not(node):
    *_, count = observed(rounds(cpu, [node({COUNT.format(2): "7000\n"})]), "cpu_package_throttle_total")
    assert count.value == 7000
    given = rounds(cpu, [node({COUNT.format(2): "7000\n"})])
    assert [item for item in given if isinstance(item, Finding)] == []


def test_throttling_warns_for_its_package(node, tmp_path):
    story = Story(cpu).look(node()).look(node({COUNT.format(2): "3\n"}))
    ((code, subject),) = story.conditions
    assert (code, subject) == ("cpu/throttled", "cpu2")
    assert "3 times" in story.conditions[code, subject].message


def test_so_much_throttling_may_be_accepted(node):
    story = Story(cpu, Config(throttle_events=3)).look(node()).look(node({COUNT.format(0): "3\n"}))
    assert story.codes == []
    assert story.look(node({COUNT.format(0): "7\n"})).codes == ["cpu/throttled"]


def test_few_files_are_read(node):
    asked = []

    class Noting(Tree):
        def read(self, path: str) -> bytes:
            asked.append(path)
            return super().read(path)

    run_check(cpu, Host(node().root, system=Noting(node().root)))
    assert len(asked) == len(set(asked)) == 1 + 2 * 2 + 8


def test_a_policy_of_cpus_that_are_offline_is_no_matter(node):
    class Offline(Tree):
        number = errno.EBUSY

        def read(self, path: str) -> bytes:
            if "policy3" in path:
                raise OSError(self.number, "no", path)
            return super().read(path)

    root = node().root
    assert findings(cpu, Host(root, system=Offline(root))) == []
    Offline.number = errno.EIO
    assert "governor of policy3: no" in until_it_fails(cpu, Host(root, system=Offline(root)))[1]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (f"{CPUS}/online", "N/A"),
        (COUNT.format(0), "N/A"),
        (COUNT.format(0), str(2**64)),
        (COUNT.format(0), "-1"),
        (SIBLINGS.format(0), "Unknown"),
        (GOVERNOR.format(5), ""),
    ],
)
def test_what_cannot_be_read_is_unknown_and_hides_nothing_else(node, path, text):
    given, error = until_it_fails(cpu, node({GOVERNOR.format(1): "powersave", path: text}))
    assert ("governor of policy5: is empty" if "policy" in path else path) in error
    assert codes([item for item in given if isinstance(item, Finding)]) == ["cpu/governor"]


def test_a_list_of_cpus_that_is_away_is_unknown_where_a_number_is_expected(node, tmp_path):
    node()
    (tmp_path / CPUS[1:] / "online").unlink()
    assert "not a list of CPUs" in until_it_fails(cpu, Host(str(tmp_path)), Config(expected=8))[1]


def test_this_machine_gives_nothing():
    assert findings(cpu, Host()) == []


@given(st.sets(st.integers(0, 8191), min_size=1, max_size=60))
def test_every_list_of_cpus_is_read(cpus):
    assert parse(",".join(map(str, cpus)), "p") == cpus
    assert parse(f"{min(cpus)}-{max(cpus)}", "p") == set(range(min(cpus), max(cpus) + 1))


@given(st.one_of(st.text(max_size=20), st.sampled_from(["", "N/A", "0-", "-3", "3-1", "0,,1", f"{2**64}", "٣"])))
def test_garbage_is_no_list_of_cpus(text):
    found, said = refusal(parse, text, "p")
    assert said.startswith("p: not a list of CPUs") or found


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(
    path=st.sampled_from([f"{CPUS}/online", COUNT.format(2), GOVERNOR.format(2)]),
    content=st.binary(max_size=12).filter(lambda raw: not raw.strip().isdigit()),
)
def test_no_content_of_a_file_passes_silently(node, path, content):
    given_, error = until_it_fails(cpu, node({path: content}), Config(expected=8))
    assert error or any(isinstance(item, Finding) for item in given_) or content.strip() == b"performance"


# --- stories


def test_a_cpu_that_is_away_drains_until_it_is_back(node):
    away = node(online="0-6")
    story = Story(cpu, Config(expected=8)).look(away)
    assert (story.codes, story.drained, story.requeued) == (["cpu/missing"], True, False)
    assert story.wait(600).looks(away, 20).drained
    assert story.reboot().look(away).drained
    back = node(online="0-7")
    assert story.look(back).drained
    assert not story.look(back).drained


def test_a_cpu_count_that_a_profile_guessed_warns_and_never_drains(node):
    story = Story(cpu, Config(expected=8, guessed=("expected",))).looks(node(online="0-3"), 20)
    assert (story.codes, story.drained) == (["cpu/missing"], False)


def test_a_governor_warns_until_it_is_set_and_never_drains(node):
    slow = node({GOVERNOR.format(0): "powersave\n"})
    story = Story(cpu).looks(slow, 20)
    assert (story.codes, story.drained) == (["cpu/governor"], False)
    assert story.looks(node(), 2).codes == []


@pytest.mark.parametrize("wrong", range(8))
def test_where_all_were_right_a_look_reads_a_quarter_and_finds_a_wrong_governor_within_four(node, wrong):
    right = node({GOVERNOR.format(number): "performance\n" for number in range(8)})
    story = Story(cpu).looks(right, 3)
    slow = node({**{GOVERNOR.format(n): "performance\n" for n in range(8)}, GOVERNOR.format(wrong): "powersave\n"})
    looks = 0
    while not story.codes:
        story.look(slow)
        looks += 1
    assert looks <= 4
    assert story.looks(slow, 5).codes == ["cpu/governor"]


def test_throttling_warns_while_it_goes_on_and_never_drains(node):
    story = Story(cpu).look(node())
    for number in range(1, 20):
        story.look(node({COUNT.format(0): f"{number}\n"}))
        assert (story.codes, story.drained) == (["cpu/throttled"], False)
    assert story.looks(node({COUNT.format(0): "19\n"}), 2).codes == []
