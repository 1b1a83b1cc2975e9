"""Tests of the settings: each mistake is one sentence with the file, the setting and the nearest existing name."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.settings import config
from healthd.agent.settings.config import (
    ConfigError,
    FleetLimits,
    Loaded,
    Settings,
    SlurmConfig,
    listen_addresses,
)
from healthd.agent.settings.effective import require_named_files, resolve_settings, setting_rows
from healthd.agent.settings.registry import built_in_checks
from healthd.agent.settings.settings_file import read_file
from healthd.common.codec import ConvertError, fields_of
from healthd.common.model import Mode, Severity
from healthd.common.paths import RUNTIME_DIR

FILE = "/etc/healthd/healthd.toml"
CHECKS = built_in_checks()


def load_text(text: str, flags: dict[str, tuple[str, Any]] | None = None) -> Loaded:
    return resolve_settings(tomllib().loads(text), FILE, flags or {}, CHECKS)


def tomllib() -> Any:
    try:
        import tomllib as module
    except ImportError:
        import tomli as module
    return module


def config_error(text: str, flags: dict[str, tuple[str, Any]] | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        load_text(text, flags)
    return str(raised.value)


# --- one sentence each


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("intervall_seconds = 60", 'unknown setting "intervall_seconds"; did you mean "interval_seconds"?'),
        (
            'interval_seconds = "300"',
            'interval_seconds: must be a number, got "300"; write a plain number of seconds, like 300',
        ),
        (
            'interval_seconds = "5m"',
            'interval_seconds: must be a number, got "5m"; write a plain number of seconds, like 300',
        ),
        ("interval_seconds = true", "interval_seconds: must be a number, got true"),
        ("interval_seconds = nan", "interval_seconds: must be a finite number, got nan"),
        ("interval_seconds = 0", "interval_seconds: must be 0.1 to 604800 seconds (a week), got 0"),
        ("interval_seconds = -5", "interval_seconds: must be 0.1 to 604800 seconds (a week), got -5"),
        ('mode = "acts"', 'mode: "acts" is not one of observe, drain, act; did you mean "act"?'),
        ('node_name = "n[1-9]"', 'node_name: must be the name of one node, got "n[1-9]"'),
        ('node_name = "ALL"', 'node_name: must be the name of one node, got "ALL"'),
        ('node_name = "-n"', 'node_name: must be the name of one node, got "-n"'),
        ('state_dir = "state"', 'state_dir: must be an absolute path, got "state"'),
        (
            "[fleet]\nlimit_percent = 40",
            "fleet.own_hardware_limit_percent: must be at least fleet.limit_percent (40), got 30",
        ),
        (
            "[fleet]\nown_hardware_limit_min_nodes = 1",
            "fleet.own_hardware_limit_min_nodes: must be at least fleet.limit_min_nodes (2), got 1",
        ),
        (
            '[repair]\nmode = "fix"',
            'repair.mode: "fix" is not one of off, advise, act',
        ),
        (
            '[repair]\norder = ["reboot", "gpu_reset"]',
            "repair.order: must list each step once, in this order: gpu_reset, reboot, power_cycle",
        ),
        (
            '[repair]\norder = ["person"]',
            "repair.order: must list each step once, in this order: gpu_reset, reboot, power_cycle",
        ),
        (
            '[repair]\norder = ["gpu_reset", "power_cycle"]',
            'repair.order: must contain "reboot" before "power_cycle"',
        ),
        (
            '[repair.first_step]\n"gpu_xid/79" = "power_cycle"',
            'repair.first_step: "gpu_xid/79": must not be "power_cycle", which only follows a failed reboot',
        ),
        (
            '[repair.first_step]\n"gpu_xid/nothing" = "reboot"',
            'repair.first_step: unknown code "gpu_xid/nothing"; healthd list --codes prints all codes',
        ),
        ('profile = "/x\\u0000"', 'profile: must not contain a NUL, got "/x?"'),
        *(
            (
                f'[kernel_log]\nsource = "{source}"',
                f'kernel_log.source: must be "kmsg", "journal", "off" or an absolute path, got "{shown}"',
            )
            for source, shown in (("", ""), ("kmesg", "kmesg"), ("log/kern.log", "log/kern.log"), ("/x\\u0000", "/x?"))
        ),
        ('[metrics]\ntextfile = "healthd.prom"', 'metrics.textfile: must be an absolute path, got "healthd.prom"'),
        ("nvml = 3", "nvml: must be a table, got 3"),
        ('[kernel_log]\nsourse = "off"', 'kernel_log: unknown setting "sourse"; did you mean "source"?'),
        ('[metrics]\nlisten = "9478"', 'metrics.listen: must be ADDRESS:PORT or "off", got "9478"'),
        ('[metrics]\nlisten = "127.0.0.1:²"', 'metrics.listen: must be ADDRESS:PORT or "off", got "127.0.0.1:²"'),
        ("checks = 3", "checks: must be a table"),
        ("[gpu_count]\nexpected = 8", 'unknown setting "gpu_count"; did you mean "checks.gpu_count"?'),
        ("[validate]\nbefore_resume = true", 'unknown setting "validate"; did you mean "checks.validation"?'),
        ("[checks.gpu_eccc]", 'checks.gpu_eccc: there is no check "gpu_eccc"; did you mean "gpu_ecc"?'),
        ("[checks]\ngpu_ecc = false", "checks.gpu_ecc: must be a table, got false"),
        (
            "[checks.gpu_ecc]\nmax_corected_sram = 1",
            'checks.gpu_ecc: unknown setting "max_corected_sram"; did you mean "max_corrected_sram"?',
        ),
        ('[checks.gpu_ecc]\nenabled = "no"', 'checks.gpu_ecc.enabled: must be true or false, got "no"'),
        ("[checks.gpu_ecc]\nclear_after = 0", "checks.gpu_ecc.clear_after: must be 1 to 1000, got 0"),
        ("[checks.gpu_ecc]\nclear_after = 1.5", "checks.gpu_ecc.clear_after: must be a whole number, got 1.5"),
        ('[checks.gpu_ecc]\nname = "x"', "checks.gpu_ecc.name: is set by the table's name"),
        (
            '[checks.gpu_ecc.severity]\n"gpu_ecc/disabled" = "inf"',
            "checks.gpu_ecc.severity.gpu_ecc/disabled: "
            '"inf" is not one of info, warning, degraded, critical; did you mean "info"?',
        ),
        (
            '[checks.gpu_ecc.severity]\n"gpu_ecc/disable" = "info"',
            'checks.gpu_ecc.severity: unknown code "gpu_ecc/disable"; did you mean "gpu_ecc/disabled"?',
        ),
        (
            '[checks.gpu_xid.severity]\n79 = "info"',
            'checks.gpu_xid.severity: unknown code "79"; did you mean "gpu_xid/79"?',
        ),
        (
            '[checks.gpu_xid.severity]\n"the bus is gone" = "info"',
            'checks.gpu_xid.severity: unknown code "the bus is gone"',
        ),
        ("[checks.mount]\nfstyp = 1", 'checks.mount: unknown setting "fstyp"; did you mean "fstype"?'),
        (
            '[checks.mount."/data"]\nfstyp = "nfs"',
            'checks.mount."/data": unknown setting "fstyp"; did you mean "fstype"?',
        ),
        (
            "[checks.mount]\ntimeout_seconds = 0",
            "checks.mount.timeout_seconds: must be 0.1 to 604800 seconds (a week), got 0",
        ),
        ('[checks.mount."/data"]\nname = "/home"', 'checks.mount."/data".name: is set by the table\'s name'),
        (
            '[checks.mount."/data"]\nmissing_confirm_seconds = -1',
            'checks.mount."/data".missing_confirm_seconds: must be 0 to 31622400 seconds (a year), got -1',
        ),
    ],
)
def test_mistake_is_single_sentence_with_file_setting_and_nearest_name(text, sentence):
    assert config_error(text) == f"{FILE}: {sentence}"


@pytest.mark.parametrize("text", ['[checks.mount."  "]', '[checks.mount."a\\u0007b"]', '[checks.mount."data"]'])
def test_instance_name_must_be_valid_for_check(text):
    assert config_error(text).startswith(f"{FILE}: checks.mount")


def test_invalid_flag_is_named_and_not_file():
    assert config_error("", {"mode": ("--mode", "drian")}) == (
        '--mode: mode: "drian" is not one of observe, drain, act; did you mean "drain"?'
    )


def test_flag_does_not_hide_invalid_table_in_file():
    assert (
        config_error("nvml = 3", {"nvml.fake": ("--fake-nvml", "dgx-h100")}) == f"{FILE}: nvml: must be a table, got 3"
    )


# --- files


def test_toml_error_names_file_and_line(tmp_path):
    file = tmp_path / "healthd.toml"
    file.write_text("mode = 'act'\ninterval_seconds = \n")
    with pytest.raises(ConfigError, match=r"healthd\.toml: not TOML: .*line 2"):
        read_file(str(file), required=True)


NOT_TOML = {
    "bytes": b"\xff\xfe",
    "deep": b"a = [" + b"[" * 5000,
    "deep tables": b"a." * 5000 + b"b = 1",
    "deep in a list": b"a = [{" + b"b." * 51 + b"c = 1}]",
    "big": b"a = " + b"9" * 5000,
    "65 bits": b"a = 0x1_ffff_ffff_ffff_ffff",
    "hexadecimal": b"[[a]]\nb = [1, 0x" + b"f" * 5000 + b"]",
}


@pytest.mark.parametrize("data", NOT_TOML.values(), ids=NOT_TOML)
def test_invalid_toml_is_single_sentence(tmp_path, data):
    file = tmp_path / "healthd.toml"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"healthd\.toml: not TOML: "):
        read_file(str(file), required=True)


def test_missing_file_is_error_only_if_required(tmp_path):
    missing = str(tmp_path / "none.toml")
    assert read_file(missing, required=False) == {}
    with pytest.raises(ConfigError, match=f"^{missing}: no such file$"):
        read_file(missing, required=True)


def test_directory_is_no_settings_file(tmp_path):
    with pytest.raises(ConfigError, match=f"^{tmp_path}: cannot be read: Is a directory$"):
        read_file(str(tmp_path), required=True)


def test_unreadable_file_is_named():
    with pytest.raises(ConfigError, match=r"^/proc/self/mem: cannot be read: Input/output error$"):
        read_file("/proc/self/mem", required=False)  # root can read any other file


def test_root_and_fake_nvml_must_exist(tmp_path):
    options = {"root": ("--root", str(tmp_path / "none")), "nvml.fake": ("--fake-nvml", "dgx-h10")}
    with pytest.raises(ConfigError, match=r"^--root: root: directory "):
        require_named_files(load_text("", options))
    options["root"] = ("--root", str(tmp_path))
    with pytest.raises(ConfigError, match=r'no profile or file is called "dgx-h10"; did you mean "dgx-h100"'):
        require_named_files(load_text("", options))
    options["nvml.fake"] = ("--fake-nvml", "dgx-h100")
    require_named_files(load_text("", options))


# --- precedence


def test_settings_without_file_are_defaults():
    loaded = load_text("")
    assert replace(loaded.settings, node_name="") == Settings()
    assert loaded.settings.node_name == os.uname().nodename.partition(".")[0]
    assert {origin for _, _, origin in setting_rows(loaded)} == {"default"}


def test_flag_overrides_file_and_file_overrides_default():
    loaded = load_text('mode = "drain"\ninterval_seconds = 60', {"mode": ("--mode", "act")})
    assert (loaded.settings.mode, loaded.settings.interval_seconds) == (Mode.ACT, 60)
    origins = {name: origin for name, _, origin in setting_rows(loaded)}
    assert (origins["mode"], origins["interval_seconds"], origins["state_dir"]) == ("--mode", FILE, "default")


def test_named_tables_inherit_check_settings():
    loaded = load_text('[checks.mount]\nfstype = "nfs"\n[checks.mount."/data"]\n[checks.mount."/home"]\nfstype = "xfs"')
    mounts = {
        instance: check_config.fstype for (check, instance), check_config in loaded.checks.items() if check == "mount"
    }  # type: ignore[attr-defined]
    assert mounts == {"/data": "nfs", "/home": "xfs"}
    origins = {name: origin for name, _, origin in setting_rows(loaded)}
    assert origins['checks.mount."/data".fstype'] == FILE
    assert origins['checks.mount."/data".read_only'] == "default"


def test_disabled_check_does_not_run_and_is_shown():
    loaded = load_text("[checks.gpu_ecc]\nenabled = false")
    assert ("gpu_ecc", "") not in loaded.checks
    assert ("gpu_ecc", "") not in loaded.tables
    assert ("checks.gpu_ecc.enabled", False, FILE) in setting_rows(loaded)


def test_severity_can_be_set_per_code():
    loaded = load_text('[checks.gpu_ecc.severity]\n"gpu_ecc/disabled" = "info"')
    assert loaded.checks["gpu_ecc", ""].severity == {"gpu_ecc/disabled": Severity.INFO}


def test_severity_can_be_set_for_unlisted_xid():
    assert load_text('[checks.gpu_xid.severity]\n"gpu_xid/999" = "info"').checks["gpu_xid", ""].severity


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("off", None),
        ("127.0.0.1:9478", ("127.0.0.1", 9478)),
        ("[::1]:0", ("::1", 0)),
        ("node1:65535", ("node1", 65535)),
    ],
)
def test_listen_addresses_parses_address(text, address):
    assert listen_addresses(text, "metrics.listen") == ([address] if address else [])


def test_listen_addresses_accepts_list():
    listen = load_text('[metrics]\nlisten = ["127.0.0.1:9478", "[::1]:9478"]').settings.metrics.listen
    assert listen_addresses(listen, "metrics.listen") == [("127.0.0.1", 9478), ("::1", 9478)]


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ('["off"]', '"off" must not be in a list'),
        ('["127.0.0.1:1", "off"]', '"off" must not be in a list'),
        ('["127.0.0.1:1", "127.0.0.1:1"]', '"127.0.0.1:1" is listed twice'),
        ("[]", 'must be ADDRESS:PORT, or "off" for none'),
        ('["127.0.0.1:1", "9478"]', r'listen\[1\]: must be ADDRESS:PORT or "off", got "9478"'),
        ("[1]", r"listen\[0\]: must be text"),
        ("1", "metrics.listen: must be text"),
    ],
)
def test_invalid_listen_list_is_refused(listen, message):
    with pytest.raises(ConfigError, match=message):
        load_text(f"[metrics]\nlisten = {listen}")


@pytest.mark.parametrize("text", ["", ":9478", "host:", "host:65536", "host:-1", "host:1e3", "host:" + "9" * 5000])
def test_listen_addresses_rejects_invalid_address(text):
    with pytest.raises(ConvertError, match=r"^metrics\.listen: must be ADDRESS:PORT"):
        listen_addresses(text, "metrics.listen")


def test_read_directory_ignores_other_mistakes():
    assert config.read_directory({"runtime_dir": "/run/h", "mode": 3}, FILE, "runtime_dir") == "/run/h"
    with pytest.raises(ConfigError, match=f"^{FILE}: runtime_dir: must be text, got 3$"):
        config.read_directory({"runtime_dir": 3}, FILE, "runtime_dir")


def test_default_runtime_dir_matches_settings():
    assert Settings().runtime_dir == RUNTIME_DIR


# --- any content

KEYS = st.sampled_from(
    [
        *(f.name for settings_class in (Settings, FleetLimits, SlurmConfig) for f in fields_of(settings_class)),
        *("checks", "gpu_ecc", "mount", "exec", "ib_link", "/data", "severity", "gpu_ecc/disabled", "enabled", "name"),
        *("source", "fake", "listen", "timeout_seconds", "clear_after", "command", "expected_gbps", "fstype"),
    ]
) | st.text(max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=12)
    | st.dates()
    | st.sampled_from(["act", "off", "/", "info", "/tmp", "1:1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def refusal(table: dict[str, Any]) -> str:
    """Return the error for a table, or "" if it is accepted."""
    try:
        loaded = resolve_settings(table, FILE, {}, CHECKS)
    except ConfigError as error:
        return str(error)
    assert resolve_settings(table, FILE, {}, CHECKS) == loaded
    assert setting_rows(loaded)
    return ""


@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_table_yields_settings_or_single_sentence(table):
    sentence = refusal(table)
    assert sentence == "" or (sentence.startswith(f"{FILE}: ") and sentence.isprintable())


def table_strategy(settings: type) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([f.name for f in fields_of(settings)]), VALUES, max_size=4)


SUBTABLES = {f.name: kind for f in fields_of(Settings) if fields_of(kind := type(getattr(Settings(), f.name)))}


@given(st.fixed_dictionaries({}, optional={name: table_strategy(kind) for name, kind in SUBTABLES.items()}))
def test_any_known_subtables_yield_settings_or_single_sentence(table):
    sentence = refusal(table)
    assert sentence == "" or (sentence.startswith(f"{FILE}: ") and sentence.isprintable())


@given(st.dictionaries(st.sampled_from(sorted(CHECKS)), st.dictionaries(KEYS, VALUES, max_size=4), max_size=3))
def test_any_check_table_yields_config_or_single_sentence(tables):
    sentence = refusal({"checks": tables})
    assert sentence == "" or (sentence.startswith(f"{FILE}: checks.") and sentence.isprintable())


@pytest.mark.parametrize("number", [10**400, 16**6000], ids=["400 digits", "6000 digits"])
def test_huge_number_is_refused(number):
    assert "finite" in refusal({"interval_seconds": number})
    assert "must be text" in refusal({"node_name": number})


SECONDS = [
    (name, f.name)
    for name, check in CHECKS.items()
    for f in fields_of(check.config)
    if "_seconds" in f.name and f.name != "before_resume_seconds"  # it has its own limit
]


PERIODS = ("interval", "timeout", "sample", "epilog")  # intervals and durations cannot be 0


@pytest.mark.parametrize(("check", "setting"), SECONDS, ids=[" ".join(names) for names in SECONDS])
def test_built_in_check_times_are_not_negative(check, setting):
    values = {setting: -0.5}
    sentence = refusal({"checks": {check: {"/data": values} if check == "mount" else values}})
    expected = "must be 0.1 to" if setting.startswith(PERIODS) else "must be 0 to"
    assert f"{setting}: {expected}" in sentence


@pytest.mark.parametrize("name", ["checks", "checks/\0", 3])
def test_invalid_checks_dir_is_not_searched(tmp_path, monkeypatch, name):
    from healthd.agent.settings import registry

    monkeypatch.chdir(tmp_path)
    (tmp_path / "checks").mkdir()
    write_check(tmp_path / "checks", "fan.py", "raise RuntimeError('imported')")
    found_checks = registry.find_checks(config.checks_dir({"checks_dir": name}))
    with pytest.raises(ConfigError, match=f"^{FILE}: checks_dir: must be "):
        resolve_settings({"checks_dir": name}, FILE, {}, found_checks)


# --- the site's own checks


def test_site_check_is_found_and_configured(tmp_path):
    from healthd.agent.settings import registry

    write_check(tmp_path, "site_fan.py", "def run(host, config, past):\n    yield from ()\n")
    checks = registry.find_checks(str(tmp_path))
    assert ("site_fan", "") in resolve_settings({}, FILE, {}, checks).checks


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("fan.py", "raise RuntimeError('no')", "cannot be loaded: RuntimeError: no"),
        ("fan.py", "import sys; sys.exit(3)", "cannot be loaded: SystemExit: 3"),
        ("fan.py", "x = 1", "has no run(host, config, past)"),
        ("mount.py", "def run(host, config, past): ...", 'a built-in check is already called "mount"; rename the file'),
    ],
)
def test_unusable_site_check_is_named(tmp_path, name, text, sentence):
    from healthd.agent.settings import registry

    write_check(tmp_path, name, text)
    with pytest.raises(ConfigError) as raised:
        registry.find_checks(str(tmp_path))
    assert str(raised.value) == f"{tmp_path}/{name}: {sentence}"


def test_site_check_writable_by_others_is_refused(tmp_path):
    from healthd.agent.settings import registry

    file = write_check(tmp_path, "fan.py", "def run(host, config, past): ...")
    file.chmod(0o666)
    with pytest.raises(ConfigError) as raised:
        registry.find_checks(str(tmp_path))
    assert str(raised.value) == f"{file} (checks_dir): refused: {file} is writable by all users (mode 666)"
    file.chmod(0o644)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError) as raised:
        registry.find_checks(str(tmp_path))
    assert str(raised.value) == f"{tmp_path} (checks_dir): refused: {tmp_path} is writable by all users (mode 777)"


@pytest.mark.parametrize("target", ["{}/real/fan.py", "../real/fan.py", "../also", "../through/fan.py"])
def test_linked_site_check_is_refused_if_target_is_writable(tmp_path, target):
    from healthd.agent.settings import registry

    for name in ("real", "checks.d"):
        (tmp_path / name).mkdir(mode=0o755)
    file = write_check(tmp_path / "real", "fan.py", "def run(host, config, past):\n    yield from ()\n")
    (tmp_path / "also").symlink_to("real/fan.py")
    (tmp_path / "through").symlink_to("real")
    link = tmp_path / "checks.d/fan.py"
    link.symlink_to(target.format(tmp_path))
    assert registry.site_files(str(tmp_path / "checks.d")) == [str(link)]
    for writable in (file, file.parent):
        mode = writable.stat().st_mode
        writable.chmod(0o777)
        with pytest.raises(ConfigError, match=r"is writable by all users \(mode 777\)") as raised:
            registry.site_files(str(tmp_path / "checks.d"))
        assert str(raised.value).startswith(f"{link} (checks_dir): refused: ")
        writable.chmod(mode)


def test_link_upwards_from_linked_directory_is_followed(tmp_path):
    """checks.d -> srv/site/checks.d, and in it fan.py -> ../fan.py, which is srv/site/fan.py."""
    from healthd.agent.settings import registry

    inside = tmp_path / "srv/site/checks.d"
    inside.mkdir(parents=True)
    (tmp_path / "checks.d").symlink_to(inside)
    file = write_check(inside.parent, "fan.py", "def run(host, config, past): ...")
    (inside / "fan.py").symlink_to("../fan.py")
    assert registry.site_files(str(tmp_path / "checks.d")) == [f"{tmp_path}/checks.d/fan.py"]
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="is writable by all users"):
        registry.site_files(str(tmp_path / "checks.d"))


def test_broken_or_circular_link_is_refused(tmp_path):
    from healthd.agent.settings import registry

    (tmp_path / "fan.py").symlink_to("none")
    with pytest.raises(ConfigError, match=r"fan\.py: cannot be read: No such file"):
        registry.site_files(str(tmp_path))
    (tmp_path / "none").symlink_to("fan.py")
    with pytest.raises(ConfigError, match=r"fan\.py: cannot be read: Too many levels"):
        registry.site_files(str(tmp_path))


def test_non_utf8_file_name_is_refused(tmp_path):
    from healthd.agent.settings import registry

    write_check(tmp_path, os.fsdecode(b"fan\xff.py"), "def run(host, config, past): ...")
    with pytest.raises(ConfigError) as raised:
        registry.site_files(str(tmp_path))
    assert str(raised.value) == f"{tmp_path}: 'fan\\udcff.py' is not a valid name for a check"


def test_missing_checks_dir_yields_no_files(tmp_path):
    from healthd.agent.settings import registry

    assert registry.site_files(str(tmp_path / "none")) == []


def write_check(path: Path, name: str, text: str) -> Path:
    path.chmod(stat.S_IRWXU)
    file = path / name
    file.write_text(text)
    file.chmod(0o644)
    return file
