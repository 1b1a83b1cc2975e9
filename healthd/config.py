"""The settings: TOML -> frozen dataclasses. A wrong key, type or unknown check stops the start with one sentence.

Setting by setting: defaults < profile of the machine's type < baseline of this node < healthd.toml < flags. The file is
/etc/healthd/healthd.toml (conf/healthd.toml lists every setting at its default); what lies below it: layers.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from healthd import toml
from healthd.convert import (
    ConvertError,
    dump,
    load,
    nearest,
    number,
    show,
)
from healthd.data import data_folder
from healthd.errors import HealthdError
from healthd.model import (
    Mode,
    RunName,
    Severity,
)
from healthd.plausible import (
    AbsolutePath,
    AbsolutePathOrNone,
    Address,
    Count,
    FileOrName,
    NodeName,
    Percent,
    at_least,
    no_absolute_path,
    no_address,
)
from healthd.plausible import Period as Period  # what checks declare theirs with
from healthd.plausible import Seconds as Seconds
from healthd.text import printable

if TYPE_CHECKING:
    from healthd.settings.registry import Check

_FAKE_MACHINES = data_folder("nvidia/fake_machines")


class ConfigError(HealthdError):
    """One sentence for the person who wrote the file: file, setting, what is wrong."""


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """What every check can be told in its table [checks.NAME].

    name              the instance ("/data" in [checks.mount."/data"]), set by the table's name
    interval_seconds  None: the daemon's
    clear_after       completed runs in a row without the finding that end a condition which clears by PASS
    enforce           false caps everything the check finds at WARNING
    severity          another severity for one code: {"gpu_ecc/disabled": "info"}
    guessed           the settings that a profile of the machine's type gave, not a person ("name": there is such an
                      instance at all); set when settings are read
    """

    name: str = ""
    enabled: bool = True
    interval_seconds: Period | None = None
    timeout_seconds: Period = 10.0
    clear_after: Annotated[int, at_least(1)] = 2
    enforce: bool = True
    severity: dict[str, Severity] = field(default_factory=dict)
    guessed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NvmlConfig:
    """fake: a profile or a scenario file instead of the driver. unheld_interval_seconds: how far apart the rounds of
    GPU checks are where nobody else holds the driver (opening it costs seconds a GPU, closing it wipes volatile ECC).
    """

    fake: FileOrName = ""
    unheld_interval_seconds: Seconds = 3600.0


@dataclass(frozen=True, slots=True)
class KernelLogConfig:
    """source: kmsg, journal, off, or a file or fifo to follow. accept_injected: what root wrote counts (drills)."""

    source: FileOrName = "kmsg"
    accept_injected: bool = False


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """command_seconds: a Slurm command's own deadline. requeue_again_seconds: how long an unconfirmed requeue may still
    be under way. max_restarts: a job that was restarted so often is held when it is requeued. admin_comment: the jobs
    that a CRITICAL fault hit are told so in theirs."""

    command_seconds: Period = 30.0
    requeue_again_seconds: Seconds = 90.0
    max_restarts: Count = 5
    admin_comment: bool = True


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """How many nodes of a partition healthd may hold drained: so many percent of them, and so many at least.

    limit_*         for causes that nodes share
    own_hardware_*  for a fault of the node itself
    jitter_seconds  the longest first wait for a shared cause; in a small partition it is shorter (fleet_limit.py)
    """

    limit_percent: Percent = 10.0
    limit_at_least: Count = 2
    own_hardware_limit_percent: Percent = 30.0
    own_hardware_limit_at_least: Count = 5
    jitter_seconds: Seconds = 1800.0


def _contradiction(limits: FleetLimits) -> str:
    """Which limit contradicts which, "" = none: for a fault of the node's own no fewer than for a shared cause."""
    for name, own, shared in (
        ("limit_percent", limits.own_hardware_limit_percent, limits.limit_percent),
        ("limit_at_least", limits.own_hardware_limit_at_least, limits.limit_at_least),
    ):
        if own < shared:
            return f"own_hardware_{name}: must not be below fleet.{name}, is {number(own)} and that is {number(shared)}"
    return ""


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """listen: ADDRESS:PORT or "off". textfile: a *.prom file for node_exporter's textfile collector, "" for none."""

    listen: Address = "127.0.0.1:9478"
    textfile: FileOrName = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """profile: "auto", "none", a name of conf/profiles or a path. baseline_file: "" for none."""

    mode: Mode = Mode.OBSERVE
    node_name: NodeName = ""
    interval_seconds: Period = 300.0
    round_timeout_seconds: Period = 120.0
    root: AbsolutePath = "/"
    state_dir: AbsolutePath = "/var/lib/healthd"
    runtime_dir: AbsolutePath = "/run/healthd"
    checks_dir: AbsolutePath = "/etc/healthd/checks.d"
    profile: FileOrName = "auto"
    baseline_file: AbsolutePathOrNone = "/etc/healthd/baseline.toml"
    nvml: NvmlConfig = NvmlConfig()
    kernel_log: KernelLogConfig = KernelLogConfig()
    slurm: SlurmConfig = SlurmConfig()
    fleet: FleetLimits = FleetLimits()
    metrics: MetricsConfig = MetricsConfig()


@dataclass(frozen=True, slots=True)
class Layer:
    """[checks.*] from one place. `guessed`: it says what such a machine usually has, not what this one has."""

    source: str
    checks: Any
    guessed: bool = False


Below = Callable[[Settings], Sequence[Layer]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and where each came from: `origins` maps "kernel_log.source" and 'checks.mount."/data".fstype' to the
    file, flag or profile; absent: default.

    checks: the Configs of those that are enabled. tables: the plain tables, for the worker.
    disabled: the Configs of the others. profile: the source of what was guessed, "" = none.
    """

    settings: Settings
    checks: dict[RunName, CheckConfig]
    tables: dict[RunName, dict[str, Any]]
    origins: dict[str, str]
    disabled: dict[RunName, CheckConfig] = field(default_factory=dict)
    profile: str = ""


def read_file(path: str, required: bool) -> dict[str, Any]:
    """The plain table of a TOML file; {} where there is none and none is required."""
    try:
        with open(path, "rb") as file:
            return parse_toml(file.read(), path)
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path}: there is no such file") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def parse_toml(text: str | bytes, source: str) -> dict[str, Any]:
    """Raises ConfigError with one sentence that names the source."""
    try:
        return toml.parse(text)
    except ConvertError as error:
        raise ConfigError(f"{source}: not TOML: {error}") from None


def runtime_dir(table: Mapping[str, Any], source: str) -> str:
    """Where the daemon with these settings has its socket; whatever else is wrong in them does not matter here."""
    found = table.get("runtime_dir", Settings().runtime_dir)
    if not isinstance(found, str):
        raise ConfigError(f"{source}: runtime_dir: must be text, is {show(found)}")
    return found


def checks_dir(table: Mapping[str, Any]) -> str:
    """Where the site's checks are: they must be known before the table can be judged. "" where that is wrong."""
    found = table.get("checks_dir", Settings().checks_dir)
    return found if isinstance(found, str) and not no_absolute_path(found) else ""


def settle(
    table: Mapping[str, Any],
    source: str,
    flags: Mapping[str, tuple[str, Any]],
    known: Mapping[str, Check],
    below: Below = lambda _settings: (),
) -> Loaded:
    """The effective settings. `flags`: dotted setting -> (flag as written, value). `known`: the checks there are.
    `below`: the layers under the table, the lowest first.

    Raises ConfigError with one sentence.
    """
    plain = {key: value for key, value in table.items() if key != "checks"}
    origins = dict.fromkeys(_flat(plain), source)
    for name, (flag, value) in flags.items():
        origins[name] = flag
        _put(plain, name, value)
    with _named(source, origins):
        if plain.get("node_name", "") == "":
            plain["node_name"] = os.uname().nodename.partition(".")[0]
        settings = load(Settings, _known_top_level(plain), "")
        if problem := _contradiction(settings.fleet):
            raise ConvertError(f"fleet.{problem}")
        layers = [*below(settings), Layer(source, table.get("checks", {}))]
    for layer in layers:  # what each says must be right by itself, so that the sentence names the right one
        with _named(layer.source, {}):
            _require_known(layer.checks, known)
            _check_configs(layer.checks, {name: known[name] for name in layer.checks}, {})
    tables, layer_of = _laid(layers, known)
    origins.update({place: layer.source for place, layer in layer_of.items()})
    with _named(source, origins):
        checks = _check_configs(tables, known, layer_of)
    enabled = {name: config for name, config in checks.items() if config.enabled}
    plain_tables = {name: {**dump(config), "name": name.instance} for name, config in enabled.items()}
    disabled = {name: config for name, config in checks.items() if not config.enabled}
    profile = next((layer.source for layer in layers if layer.guessed), "")
    return Loaded(settings, enabled, plain_tables, origins, disabled, profile)


@contextmanager
def _named(source: str, origins: Mapping[str, str]) -> Iterator[None]:
    """What is wrong is said with the place that it came from."""
    try:
        yield
    except ConvertError as error:
        where = origins.get(str(error).partition(": ")[0], source)
        sentence = printable(str(error))  # a key may hold a line end
        raise ConfigError(f"{where}: {sentence}") from None


def _laid(layers: Sequence[Layer], known: Mapping[str, Check]) -> tuple[dict[str, Any], dict[str, Layer]]:
    """The layers as one, setting by setting (a list or table that is a setting's value is replaced whole), and the
    layer that each setting is from."""
    tables: dict[str, Any] = {}
    layer_of: dict[str, Layer] = {}
    for layer in layers:
        for name, table in layer.checks.items():
            own = {f.name for f in dataclasses.fields(known[name].config)}
            merged = tables.setdefault(name, {})
            for key, value in table.items():
                if known[name].per and key not in own:
                    merged[key] = {**merged.get(key, {}), **value}
                    layer_of.update({place_of(name, key, setting): layer for setting in ("name", *value)})
                else:
                    merged[key] = value
                    layer_of[place_of(name, "", key)] = layer
    return tables, layer_of


def place_of(check: str, instance: str, setting: str) -> str:
    return f'checks.{check}."{instance}".{setting}' if instance else f"checks.{check}.{setting}"


def _guessed(check: Check, instance: str, layer_of: Mapping[str, Layer]) -> tuple[str, ...]:
    """The settings of one run that nobody wrote down. What its own table says goes before what stands beside it."""
    found = []
    for f in dataclasses.fields(check.config):
        places = [place_of(check.name, i, f.name) for i in (instance, "")]
        layer = next((layer_of[place] for place in places if place in layer_of), None)
        if layer is not None and layer.guessed:
            found.append(f.name)
    return tuple(found)


def require_what_is_named(loaded: Loaded) -> None:
    """Files that the settings name and without which nothing can be looked at. Raises ConfigError."""
    settings, origins = loaded.settings, loaded.origins
    if not os.path.isdir(settings.root):
        raise ConfigError(f"{origins['root']}: root: there is no directory {settings.root}")
    fake = settings.nvml.fake
    profiles = [name[:-5] for name in os.listdir(_FAKE_MACHINES) if name.endswith(".toml")]
    if fake and fake not in profiles and not os.path.isfile(fake):
        hint = nearest(fake, profiles)
        raise ConfigError(f'{origins["nvml.fake"]}: nvml.fake: there is no profile and no file "{fake}"{hint}')


def _known_top_level(plain: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(Settings)} | {"checks"}
    for key in plain:
        if key not in names:
            raise ConvertError(f'unknown setting "{key}"{nearest(key, names)}')
    return plain


def _require_known(tables: Any, known: Mapping[str, Check]) -> None:
    if not isinstance(tables, Mapping):
        raise ConvertError("checks: must be a table")
    for name in tables:
        if name not in known:
            raise ConvertError(f'checks.{name}: there is no check "{name}"{nearest(name, known)}')


def _check_configs(
    tables: Mapping[str, Any], known: Mapping[str, Check], layer_of: Mapping[str, Layer]
) -> dict[RunName, CheckConfig]:
    """Every run of the `known` checks."""
    configs = {}
    for name, check in known.items():
        table = tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConvertError(f"checks.{name}: must be a table, is {show(table)}")
        for instance, values in _instances(name, table, check):
            where = f"checks.{name}" + (f'."{instance}"' if instance else "")
            if "name" in values:
                raise ConvertError(f"{where}.name: is set by the name of the table")
            if "guessed" in values:
                raise ConvertError(f'{where}: unknown setting "guessed"')
            guessed = _guessed(check, instance, layer_of)
            config = check.make_config({**values, "name": instance, "guessed": guessed}, where)
            check.check_config(config, where)
            configs[RunName(name, instance)] = config
    return configs


def _instances(name: str, table: Mapping[str, Any], check: Check) -> list[tuple[str, Mapping[str, Any]]]:
    """One run each: the check itself, or its named sub-tables, which inherit what stands beside them."""
    if not check.per:
        return [("", table)]
    own = {f.name for f in dataclasses.fields(check.config)}
    shared = {key: value for key, value in table.items() if key in own}
    named = {key: value for key, value in table.items() if key not in own}
    for key, value in named.items():
        if not isinstance(value, Mapping):
            raise ConvertError(f'checks.{name}: unknown setting "{key}"{nearest(key, own - {"name", "guessed"})}')
        if not key.strip() or not key.isprintable():
            raise ConvertError(f"checks.{name}: the name of a table must be words, is {show(key)}")
    if not named:  # what no instance inherits is wrong all the same
        check.make_config(shared, f"checks.{name}")
    return [(key, {**shared, **value}) for key, value in named.items()]


def listen_address(text: str, where: str) -> tuple[str, int] | None:
    """("127.0.0.1", 9478) of "127.0.0.1:9478", ("::1", 9478) of "[::1]:9478"; None of "off"."""
    if problem := no_address(text):
        raise ConvertError(f"{where}: {problem}")
    address, _, port = text.rpartition(":")
    return (address.strip("[]"), int(port)) if address else None


def _put(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one setting in nested tables. What stands where a table should be stays, for the error that it deserves."""
    *path, last = dotted.split(".")
    for name in path:
        below = table.get(name, {})
        if not isinstance(below, Mapping):
            return
        table[name] = dict(below)
        table = table[name]
    table[last] = value


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"kernel_log.source": "kmsg", ...} of nested tables."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def effective(loaded: Loaded) -> list[tuple[str, Any, str]]:
    """(setting, value, origin) of every setting, for `healthd config show`."""
    origins = dict(loaded.origins)
    if loaded.profile:
        origins["profile"] = f"{origins.get('profile', 'default')}: {loaded.profile}"
    rows = [(name, value, origins.get(name, "default")) for name, value in _flat(_all_fields(loaded.settings)).items()]
    for (check, instance), config in sorted({**loaded.checks, **loaded.disabled}.items()):
        for setting, value in _all_fields(config).items():
            origin = origins.get(place_of(check, instance, setting)) or origins.get(place_of(check, "", setting))
            if setting not in ("name", "guessed") and value is not None:
                for name, one in _flat({setting: value}).items():
                    rows.append((place_of(check, instance, name), one, origin or "default"))
    return rows


def _all_fields(config: Any) -> dict[str, Any]:
    out = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        out[f.name] = _all_fields(value) if dataclasses.is_dataclass(value) else dump(value)
    return out
