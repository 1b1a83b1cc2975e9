"""cpu: CPUs that are offline, slow or hot."""

from __future__ import annotations

import errno

import pytest
from fakes import codes, findings, observations_named, parse_or_error, run_check, run_rounds, run_until_error
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
NODES = "/sys/devices/system/node/has_cpu"
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
    files[NODES] = "0-1\n"
    files |= {GOVERNOR.format(number): "performance\n" for number in range(8)}
    return write(tmp_path, files | (changed or {}))


def healthy(tmp_path):
    return make(tmp_path), Config(expected=8, numa_nodes=2)


def test_cpu_reports_nothing_for_healthy_cpus(node):
    results = run_check(cpu, node(), Config(expected=8))
    assert [item for item in results if isinstance(item, Finding)] == []
    assert next(observations_named(results, "cpu_online")).value == 8
    assert [item.labels for item in observations_named(results, "cpu_package_throttle_total")] == [
        (("cpu", "0"),),
        (("cpu", "2"),),
    ]


def test_cpu_reports_nothing_without_cpu_files(tmp_path):
    assert run_check(cpu, Host(str(tmp_path))) == []


def test_guest_without_governors_and_counts_gives_no_finding(tmp_path):
    host = write(tmp_path, {f"{CPUS}/online": "0-1\n"})
    assert [item.name for item in run_check(cpu, host)] == ["cpu_online"]


def test_fewer_cpus_than_expected_are_degraded_and_more_are_fine(node):
    (finding,) = findings(cpu, node(online="0-2,4-7"), Config(expected=8))
    assert (finding.code, finding.severity, finding.clears) == ("cpu/missing", Severity.DEGRADED, Clears.PASS)
    assert (finding.expects, finding.message) == ("expected", "7 CPUs are online; expected 8")
    assert findings(cpu, node(), Config(expected=4)) == []


def test_cpu_count_without_expectation_is_ignored(node):
    assert findings(cpu, node(online="0")) == []


@pytest.mark.parametrize(
    ("nodes", "message"), [("0", "1 NUMA node with CPUs; expected 2"), ("0-7", "8 NUMA nodes with CPUs; expected 2")]
)
def test_other_number_of_numa_nodes_warns(node, nodes, message):
    (finding,) = findings(cpu, node({NODES: f"{nodes}\n"}), Config(numa_nodes=2))
    assert (finding.code, finding.severity, finding.clears) == ("cpu/numa_nodes", Severity.WARNING, Clears.PASS)
    assert (finding.expects, finding.message) == ("numa_nodes", message)


def test_expected_number_of_numa_nodes_gives_no_finding(node):
    results = run_check(cpu, node(), Config(numa_nodes=2))
    assert [item.value for item in observations_named(results, "cpu_numa_nodes")] == [2]
    assert [item for item in results if isinstance(item, Finding)] == []
    assert findings(cpu, node({NODES: "0-7\n"})) == []


def test_baseline_has_numa_nodes_if_kernel_reports_them(node, tmp_path):
    entries = {entry.setting: entry.value for entry in cpu.baseline(node(), Config())}
    assert entries == {"expected": 8, "numa_nodes": 2}
    without = write(tmp_path / "without", {f"{CPUS}/online": "0-1\n"})
    assert {entry.setting for entry in cpu.baseline(without, Config())} == {"expected"}


def test_wrong_governor_warns_once_for_the_node(node):
    host = node({GOVERNOR.format(n): "powersave\n" for n in range(3)} | {GOVERNOR.format(7): "schedutil\n"})
    (finding,) = findings(cpu, host)
    assert (finding.code, finding.severity) == ("cpu/governor", Severity.WARNING)
    assert finding.message == "of 8 CPU frequency policies, 3 have 'powersave', 1 have 'schedutil', not performance"


def test_governors_setting_accepts_other_governors(node):
    host = node({GOVERNOR.format(n): "powersave\n" for n in range(8)})
    assert findings(cpu, host, Config(governors=("performance", "powersave"))) == []
    assert findings(cpu, host, Config(governors=())) == []


def test_old_throttle_count_does_not_warn(node):
    *_, count = observations_named(run_rounds(cpu, [node({COUNT.format(2): "7000\n"})]), "cpu_package_throttle_total")
    assert count.value == 7000
    results = run_rounds(cpu, [node({COUNT.format(2): "7000\n"})])
    assert [item for item in results if isinstance(item, Finding)] == []


def test_throttling_warns_for_its_package(node, tmp_path):
    story = Story(cpu).run_check(node()).run_check(node({COUNT.format(2): "3\n"}))
    ((code, subject),) = story.conditions
    assert (code, subject) == ("cpu/throttled", "cpu2")
    assert "3 times" in story.conditions[code, subject].message


def test_throttle_events_setting_accepts_some_throttling(node):
    story = Story(cpu, Config(throttle_events=3)).run_check(node()).run_check(node({COUNT.format(0): "3\n"}))
    assert story.codes == []
    assert story.run_check(node({COUNT.format(0): "7\n"})).codes == ["cpu/throttled"]


def test_cpu_reads_each_file_once(node):
    paths = []

    class RecordingTree(Tree):
        def read(self, path: str) -> bytes:
            paths.append(path)
            return super().read(path)

    run_check(cpu, Host(node().root, system=RecordingTree(node().root)))
    assert len(paths) == len(set(paths)) == 2 + 2 * 2 + 8


def test_governor_of_offline_cpus_is_ignored(node):
    class Offline(Tree):
        number = errno.EBUSY

        def read(self, path: str) -> bytes:
            if "policy3" in path:
                raise OSError(self.number, "no", path)
            return super().read(path)

    root = node().root
    assert findings(cpu, Host(root, system=Offline(root))) == []
    Offline.number = errno.EIO
    assert "governor of policy3: no" in run_until_error(cpu, Host(root, system=Offline(root)))[1]


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
def test_garbled_file_fails_run_and_hides_no_other_finding(node, path, text):
    results, error = run_until_error(cpu, node({GOVERNOR.format(1): "powersave", path: text}))
    assert ("governor of policy5: is empty" if "policy" in path else path) in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["cpu/governor"]


def test_missing_online_list_fails_run_if_count_is_expected(node, tmp_path):
    node()
    (tmp_path / CPUS[1:] / "online").unlink()
    assert "not a list of CPUs" in run_until_error(cpu, Host(str(tmp_path)), Config(expected=8))[1]


def test_cpu_reports_nothing_on_this_machine():
    assert findings(cpu, Host()) == []


@given(st.sets(st.integers(0, 8191), min_size=1, max_size=60))
def test_parse_reads_every_cpu_list(cpus):
    assert parse(",".join(map(str, cpus)), "p") == cpus
    assert parse(f"{min(cpus)}-{max(cpus)}", "p") == set(range(min(cpus), max(cpus) + 1))


@given(st.one_of(st.text(max_size=20), st.sampled_from(["", "N/A", "0-", "-3", "3-1", "0,,1", f"{2**64}", "٣"])))
def test_parse_rejects_garbage(text):
    found, error = parse_or_error(parse, text, "p")
    assert error.startswith("p: not a list of CPUs") or found


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(
    path=st.sampled_from([f"{CPUS}/online", COUNT.format(2), GOVERNOR.format(2)]),
    content=st.binary(max_size=12).filter(lambda raw: not raw.strip().isdigit()),
)
def test_any_file_content_gives_finding_or_failure(node, path, content):
    results, error = run_until_error(cpu, node({path: content}), Config(expected=8))
    assert error or any(isinstance(item, Finding) for item in results) or content.strip() == b"performance"


# --- stories


def test_offline_cpu_drains_until_it_is_online(node):
    away = node(online="0-6")
    story = Story(cpu, Config(expected=8)).run_check(away)
    assert (story.codes, story.drained, story.requeued) == (["cpu/missing"], True, False)
    assert story.wait(600).run_checks(away, 20).drained
    assert story.reboot().run_check(away).drained
    back = node(online="0-7")
    assert story.run_check(back).drained
    assert not story.run_check(back).drained


def test_cpu_count_guessed_by_profile_never_drains(node):
    story = Story(cpu, Config(expected=8, guessed=("expected",))).run_checks(node(online="0-3"), 20)
    assert (story.codes, story.drained) == (["cpu/missing"], False)


def test_wrong_governor_warns_until_fixed_and_never_drains(node):
    slow = node({GOVERNOR.format(0): "powersave\n"})
    story = Story(cpu).run_checks(slow, 20)
    assert (story.codes, story.drained) == (["cpu/governor"], False)
    assert story.run_checks(node(), 2).codes == []


@pytest.mark.parametrize("wrong_policy", range(8))
def test_governor_scan_in_quarters_finds_wrong_one_within_four_runs(node, wrong_policy):
    all_right = node({GOVERNOR.format(number): "performance\n" for number in range(8)})
    story = Story(cpu).run_checks(all_right, 3)
    slow = node(
        {**{GOVERNOR.format(n): "performance\n" for n in range(8)}, GOVERNOR.format(wrong_policy): "powersave\n"}
    )
    runs = 0
    while not story.codes:
        story.run_check(slow)
        runs += 1
    assert runs <= 4
    assert story.run_checks(slow, 5).codes == ["cpu/governor"]


def test_throttling_warns_while_count_grows_and_never_drains(node):
    story = Story(cpu).run_check(node())
    for number in range(1, 20):
        story.run_check(node({COUNT.format(0): f"{number}\n"}))
        assert (story.codes, story.drained) == (["cpu/throttled"], False)
    assert story.run_checks(node({COUNT.format(0): "19\n"}), 2).codes == []


# --- Grace: the files of two sockets (NVIDIA/DCGM 4.6.0, modules/sysmon/tests/DcgmSystemMonitorTests.cpp and
# DcgmModuleSysmonTests.cpp)

SOC = {"/sys/devices/soc0/soc_id": "jep106:036b:0241\n"}
ZONE = "/sys/class/thermal/thermal_zone{}"


def grace(celsius=(45.5, 46.0), critical=104.5):
    files = dict(SOC)
    parts = [f"{part} Power Socket {socket}" for socket in (0, 1) for part in ("Module", "Grace", "CPU", "SysIO")]
    for number, part in enumerate([*parts, "Power meter of another device"]):
        meter = f"/sys/class/hwmon/hwmon{number}/device/power1"
        files |= {f"{meter}_oem_info": f"{part}\n", f"{meter}_average": f"{(number + 1) * 25_000_000}\n"}
    for socket, degrees in enumerate(celsius):
        zone = ZONE.format(socket)
        files |= {
            f"{zone}/device/description": f"Thermal Zone Skt{socket} TJMax\n",
            f"{zone}/temp": f"{degrees * 1000:.0f}\n",
            f"{zone}/trip_point_{socket}_type": "critical\n",
            f"{zone}/trip_point_{socket}_temp": f"{critical * 1000:.0f}\n",
            f"{zone}/trip_point_{1 - socket}_type": "passive\n",
            f"{zone}/trip_point_{1 - socket}_temp": "40000\n",
        }
    files |= {f"{ZONE.format(7)}/device/description": "Thermal Zone Skt0 BMC\n", f"{ZONE.format(7)}/temp": "200000\n"}
    return files


def test_power_and_temperature_of_grace_are_metrics(node):
    results = run_check(cpu, node(grace()))
    watts = {item.labels: item.value for item in observations_named(results, "cpu_power_watts")}
    assert len(watts) == 8
    assert watts[("socket", "0"), ("part", "module")] == 25.0
    assert watts[("socket", "1"), ("part", "cpu")] == 175.0
    celsius = [(item.labels, item.value) for item in observations_named(results, "cpu_temperature_celsius")]
    assert celsius == [((("socket", "0"),), 45.5), ((("socket", "1"),), 46.0)]
    assert [item for item in results if isinstance(item, Finding)] == [], "a passive trip point is no fault"


def test_critical_trip_point_warns_and_never_drains(node):
    hot = node(grace((45.5, 104.5)))
    (finding,) = findings(cpu, hot)
    assert (finding.code, finding.subject, finding.severity) == (
        "cpu/critical_temperature",
        "socket1",
        Severity.WARNING,
    )
    assert not Story(cpu).run_checks(hot, 20).drained


@pytest.mark.parametrize("critical", [0, -1])
def test_trip_point_without_temperature_is_ignored(node, critical):
    assert findings(cpu, node(grace(critical=critical))) == []


def test_files_of_other_cpus_are_not_read(node):
    files = {**grace((200.0, 200.0)), "/sys/devices/soc0/soc_id": "jep106:0a16:0001\n"}
    assert findings(cpu, node(files)) == []


def test_power_meter_without_value_is_left_out(node):
    meter = "/sys/class/hwmon/hwmon0/device/power1_average"
    results = run_check(cpu, node({**grace(), meter: "N/A\n"}))
    assert len([*observations_named(results, "cpu_power_watts")]) == 7


@given(st.one_of(st.text(max_size=12), st.integers(-(10**9), 10**9).map(str)))
@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
def test_any_temperature_is_a_number_or_an_error(node, text):
    changed = {f"{ZONE.format(0)}/temp": text.encode("utf-8", "replace").decode("utf-8")}
    results, error = run_until_error(cpu, node({**grace(), **changed}))
    read = [item.value for item in observations_named(results, "cpu_temperature_celsius") if item.labels[0][1] == "0"]
    assert read or f"{ZONE.format(0)}/temp: not a temperature" in error
