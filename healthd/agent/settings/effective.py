"""Effective settings and their sources. An invalid key, type or check name stops the start with a one-sentence error.

Sources in order of priority, lowest first: defaults, the profile for the machine's type, this node's baseline,
healthd.toml, its [[node]] sections for this node, flags. layers.py handles the layers below the file, and
node_sections.py the sections. config.py and, for their own settings, the checks define the allowed values.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from healthd.agent.settings.config import (
    CheckConfig,
    ConfigError,
    FleetLimits,
    Layer,
    LayerLoader,
    Loaded,
    RepairConfig,
    Settings,
)
from healthd.agent.settings.registry import Check
from healthd.common.codec import ConvertError, dump, fields_of, load, number, raise_mistakes, show, spelling_hint
from healthd.common.model import RunName
from healthd.common.text import printable
from healthd.common.toml import names_in
from healthd.nvidia import fake_machines

if TYPE_CHECKING:
    from healthd.agent.settings.node_sections import Section

SECTIONS = "node"  # [[node]]: settings for single nodes (node_sections.py)


def resolve_settings(
    table: Mapping[str, Any],
    source: str,
    flags: Mapping[str, tuple[str, Any]],
    available: Mapping[str, Check],
    lower_layers: LayerLoader = lambda _settings: (),
) -> Loaded:
    """Return the effective settings.

    `flags` maps a dotted setting to (flag as written, value). `available` contains all checks. `lower_layers` returns
    the layers below the table, lowest first. Raises ConfigError if the settings are invalid; the message is one
    sentence.
    """
    plain = _top_level(table)
    origins = dict.fromkeys(_flat(plain), source)
    section_layers: list[Layer] = []
    if SECTIONS in table:
        node = flags["node_name"][1] if "node_name" in flags else plain.get("node_name") or _host_name()
        for name, section in _sections_for(str(node), table, source):
            with _naming_source(name, {}):
                _require_top_level(dict(section.settings), available)
            _overlay(plain, section.settings)
            origins.update(dict.fromkeys(_flat(section.settings), name))
            section_layers.append(Layer(name, section.checks))
    for name, (flag, value) in flags.items():
        origins[name] = flag
        _put(plain, name, value)
    with _naming_source(source, origins):
        if plain.get("node_name", "") == "":
            plain["node_name"] = _host_name()
        settings = load(Settings, _require_top_level(plain, available), "")
        if problem := _contradiction(settings.fleet):
            raise ConvertError(f"fleet.{problem}")
        if problem := _unknown_repair_code(settings.repair, available):
            raise ConvertError(f"repair.first_step: {problem}")
        layers = [*lower_layers(settings), Layer(source, table.get("checks", {})), *section_layers]
    first_section = len(layers) - len(section_layers)
    for height, layer in enumerate(layers):  # validate each layer separately, so that the error names the right layer
        with _naming_source(layer.source, {}):
            if height >= first_section:  # a section is complete only with the layers below it
                _check_section(layers[:height], layer, available)
            else:
                _require_existing(layer.checks, available)
                _check_configs(layer.checks, {name: available[name] for name in layer.checks}, {})
    tables, layer_by_path = _merge_layers(layers, available)
    origins.update({path: layer.source for path, layer in layer_by_path.items()})
    with _naming_source(source, origins):
        checks = _check_configs(tables, available, layer_by_path)
    enabled = {name: config for name, config in checks.items() if config.enabled}
    plain_tables = {name: {**dump(config), "name": name.instance} for name, config in enabled.items()}
    disabled = {name: config for name, config in checks.items() if not config.enabled}
    profile = next((layer.source for layer in layers if layer.guessed), "")
    return Loaded(settings, enabled, plain_tables, origins, disabled, profile)


def _check_section(lower_layers: Sequence[Layer], section: Layer, available: Mapping[str, Check]) -> dict[str, Any]:
    """Validate names and types in a [[node]] section's checks. Return them merged with the layers below.

    The caller runs validate() on the complete tables. Raises ConvertError.
    """
    _require_existing(section.checks, available)
    for name, table in section.checks.items():
        if not isinstance(table, Mapping):
            raise ConvertError(f"checks.{name}: must be a table, got {show(table)}")
        _require_tables(name, table, available[name])
    tables, _ = _merge_layers([*lower_layers, section], available)
    changed = {name: tables[name] for name in section.checks}
    _check_configs(changed, {name: available[name] for name in changed}, {}, complete=False)
    return changed


def _top_level(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings outside [checks] and the [[node]] sections."""
    return {key: value for key, value in table.items() if key not in ("checks", SECTIONS)}


def _sections_for(node: str, table: Mapping[str, Any], source: str) -> list[tuple[str, Section]]:
    """Return the [[node]] sections for a node, each with a name such as "healthd.toml [[node]] 2". Raises
    ConfigError."""
    from healthd.agent.settings import node_sections  # few files have sections

    with _naming_source(source, {}):
        sections = node_sections.sections(table)
    return [(f"{source} {section.name}", section) for section in sections if node_sections.applies_to(section, node)]


def _host_name() -> str:
    return os.uname().nodename.partition(".")[0]


def find_mistakes(table: Mapping[str, Any], source: str, available: Mapping[str, Check]) -> list[str]:
    """Return all mistakes in one settings file, one sentence each, for `healthd config check`.

    Each table is validated separately; the checks in a [[node]] section are validated together with those of the file.
    Mistakes that appear only when all layers are combined (a baseline that contradicts the file) are left to
    resolve_settings().
    """
    names = {f.name for f in fields_of(Settings)}
    top = _top_level(table)
    found = [
        check_mistakes
        for key in top
        for check_mistakes in _mistakes_of_call(functools.partial(_require_top_level, {key: None}, available))
    ]
    plain = {"node_name": "node", **{key: value for key, value in top.items() if key in names}}
    found += _mistakes_of_call(functools.partial(load, Settings, plain, ""))
    tables = table.get("checks", {})
    if not isinstance(tables, Mapping):
        found.append("checks: must be a table")
        tables = {}
    failed_checks = set()
    for name, own in tables.items():
        check_mistakes = [
            mistake
            for single in _split_tables(name, own, available)
            for mistake in _mistakes_of_call(functools.partial(_validate_check, name, single, available))
        ]
        found += check_mistakes
        failed_checks |= {name} if check_mistakes else set()
    section_mistakes: list[str] = []
    if SECTIONS in table:
        from healthd.agent.settings import node_sections

        found += _mistakes_of_call(functools.partial(node_sections.sections, table))
        sections: list[Section] = []
        with suppress(ConvertError):  # already in `found`
            sections = node_sections.read_sections(table)
        for section in sections:
            section_source = f"{source} {section.name}"
            allowed = {k: v for k, v in section.settings.items() if k not in node_sections.FORBIDDEN_SETTINGS}
            section_mistakes += find_mistakes(allowed, section_source, available)
            parts = [section.checks]
            if isinstance(section.checks, Mapping):  # validated together with the file's checks, which must be valid
                parts = [{name: own} for name, own in section.checks.items() if name not in failed_checks]
            for checks in parts:
                judge = functools.partial(_validate_section, tables, checks, available)
                section_mistakes += [f"{section_source}: {printable(mistake)}" for mistake in _mistakes_of_call(judge)]
    return [*(f"{source}: {printable(mistake)}" for mistake in found), *section_mistakes]


def _split_tables(name: str, table: Any, available: Mapping[str, Check]) -> list[Any]:
    """Return a copy of the check's table for each of its named tables, so that mistakes in all tables are found."""
    if name not in available or not available[name].per or not isinstance(table, Mapping):
        return [table]
    own = {f.name for f in fields_of(available[name].config)}
    named = [key for key, value in table.items() if key not in own and isinstance(value, Mapping)]
    shared = {key: value for key, value in table.items() if key not in named}
    if not named or _mistakes_of_call(functools.partial(_validate_check, name, shared, available)):
        return [table]
    return [{**shared, key: table[key]} for key in named]


def _validate_check(name: str, table: Any, available: Mapping[str, Check]) -> None:
    """Raise ConvertError if a check's table is invalid."""
    _require_existing({name: table}, available)
    _check_configs({name: table}, {name: available[name]}, {})


def _validate_section(file: Mapping[str, Any], checks: Any, available: Mapping[str, Check]) -> None:
    """Raise ConvertError if the checks in a [[node]] section are invalid when merged with the file's checks."""
    lower_layer = {name: file[name] for name in checks if name in file} if isinstance(checks, Mapping) else {}
    tables = _check_section([Layer("", lower_layer)], Layer("", checks), available)
    _check_configs(tables, {name: available[name] for name in tables}, {})


def _mistakes_of_call(call: Callable[[], object]) -> tuple[str, ...]:
    """Return the mistakes that a call raises, as sentences."""
    try:
        call()
    except ConvertError as error:
        return error.mistakes
    return ()


@contextmanager
def _naming_source(source: str, origins: Mapping[str, str]) -> Iterator[None]:
    """Convert ConvertError into a ConfigError that names the file or flag with the invalid value."""
    try:
        yield
    except ConvertError as error:
        where = origins.get(str(error).partition(": ")[0], source)
        raise ConfigError(f"{where}: {printable(str(error))}") from None  # a key may contain a line end


def _merge_layers(layers: Sequence[Layer], available: Mapping[str, Check]) -> tuple[dict[str, Any], dict[str, Layer]]:
    """Merge the layers setting by setting. A list or table that is a setting's value is replaced as a whole.

    Return the result, and a dict that maps each setting to its layer.
    """
    tables: dict[str, Any] = {}
    layer_by_path: dict[str, Layer] = {}
    for layer in layers:
        for name, table in layer.checks.items():
            own = {f.name for f in fields_of(available[name].config)}
            merged = tables.setdefault(name, {})
            for key, value in table.items():
                if available[name].per and key not in own:
                    merged[key] = {**merged.get(key, {}), **value}
                    layer_by_path.update({setting_path(name, key, setting): layer for setting in ("name", *value)})
                else:
                    merged[key] = value
                    layer_by_path[setting_path(name, "", key)] = layer
    return tables, layer_by_path


def setting_path(check: str, instance: str, setting: str) -> str:
    return f'checks.{check}."{instance}".{setting}' if instance else f"checks.{check}.{setting}"


def _guessed(check: Check, instance: str, layer_by_path: Mapping[str, Layer]) -> tuple[str, ...]:
    """Return the names of a run's settings whose values come from a profile.

    An instance's own table takes precedence over the check's.
    """
    found: list[str] = []
    if not any(layer.guessed for layer in layer_by_path.values()):
        return ()
    for f in fields_of(check.config):
        paths = [setting_path(check.name, i, f.name) for i in (instance, "")]
        layer = next((layer_by_path[path] for path in paths if path in layer_by_path), None)
        if layer is not None and layer.guessed:
            found.append(f.name)
    return tuple(found)


def require_named_files(loaded: Loaded) -> None:
    """Raise ConfigError if the settings name a root or a fake NVML that does not exist, because every check would
    fail."""
    settings, origins = loaded.settings, loaded.origins
    if not os.path.isdir(settings.root):
        raise ConfigError(f"{origins['root']}: root: directory {settings.root} does not exist")
    fake = settings.nvml.fake
    profiles = names_in(fake_machines.FOLDER)
    if fake and fake not in profiles and not os.path.isfile(fake):
        hint = spelling_hint(fake, profiles)
        raise ConfigError(f'{origins["nvml.fake"]}: nvml.fake: no profile or file is called "{fake}"{hint}')


def _require_top_level(plain: dict[str, Any], available: Mapping[str, Check]) -> dict[str, Any]:
    names = {f.name for f in fields_of(Settings)} | {"checks"}
    for key in plain:
        if key not in names:
            from difflib import get_close_matches

            near = get_close_matches(key, [*names, *available], n=1)
            is_check = bool(near) and near[0] not in names  # the check's table belongs below "checks"
            hint = f'; did you mean "checks.{near[0]}"?' if is_check else spelling_hint(key, names)
            raise ConvertError(f'unknown setting "{key}"{hint}')
    return plain


def _require_existing(tables: Any, available: Mapping[str, Check]) -> None:
    if not isinstance(tables, Mapping):
        raise ConvertError("checks: must be a table")
    for name in tables:
        if name not in available:
            raise ConvertError(f'checks.{name}: there is no check "{name}"{spelling_hint(name, available)}')


def _check_configs(
    tables: Mapping[str, Any], available: Mapping[str, Check], layer_by_path: Mapping[str, Layer], complete: bool = True
) -> dict[RunName, CheckConfig]:
    """Return the Config of every run. If `complete` is False, validate only names and types, without validate()."""
    runs: list[tuple[Check, str, dict[str, Any]]] = []
    for name, check in available.items():
        table = tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConvertError(f"checks.{name}: must be a table, got {show(table)}")
        for instance, values in _instances(name, table, check):
            where = f"checks.{name}" + (f'."{instance}"' if instance else "")
            if "name" in values:
                raise ConvertError(f"{where}.name: is set by the table's name")
            if "guessed" in values:
                raise ConvertError(f'{where}: unknown setting "guessed"')
            guessed = _guessed(check, instance, layer_by_path)
            runs.append((check, where, {**values, "name": instance, "guessed": guessed}))
    if complete:
        _require_judged([(check.path, where, values) for check, where, values in runs if check.judges_settings])
    configs = {}
    for check, where, values in runs:
        config = check.make_config(values, where)
        if complete:
            check.check_config(config, where)
        configs[RunName(check.name, values["name"])] = config
    return configs


def _require_judged(runs: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
    """Raise ConfigError if a site file's code hangs or crashes while it validates its settings."""
    if runs:
        from healthd.agent.settings.trial import require_validated

        require_validated(runs)


def _instances(name: str, table: Mapping[str, Any], check: Check) -> list[tuple[str, Mapping[str, Any]]]:
    """Return a check's runs: the check itself, or its named sub-tables, which inherit the check's other settings."""
    if not check.per:
        return [("", table)]
    own = {f.name for f in fields_of(check.config)}
    shared = {key: value for key, value in table.items() if key in own}
    named = {key: value for key, value in table.items() if key not in own}
    _require_tables(name, table, check)
    if not named:  # an invalid setting is refused even if no instance inherits it
        check.make_config(shared, f"checks.{name}")
    return [(key, {**shared, **value}) for key, value in named.items()]


def _require_tables(name: str, table: Mapping[str, Any], check: Check) -> None:
    """Raise ConvertError if a check that has named tables contains a key that is neither a table nor a setting."""
    if not check.per:
        return
    own = {f.name for f in fields_of(check.config)}
    found = []
    for key, value in table.items():
        if key in own:
            continue
        if not isinstance(value, Mapping):
            found.append(f'checks.{name}: unknown setting "{key}"{spelling_hint(key, own - {"name", "guessed"})}')
        elif not key.strip() or not key.isprintable():
            found.append(f"checks.{name}: the name of a table must be printable text, got {show(key)}")
    raise_mistakes(found)


def _overlay(lower: dict[str, Any], upper: Mapping[str, Any]) -> None:
    """Merge `upper` into `lower`, setting by setting. Tables such as [slurm] and [fleet] are merged."""
    for key, value in upper.items():
        current = lower.get(key)
        lower[key] = {**current, **value} if isinstance(current, Mapping) and isinstance(value, Mapping) else value


def _put(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one setting in nested tables. A value in the place of a table is left there, so that it is refused later."""
    *path, last = dotted.split(".")
    for name in path:
        subtable = table.get(name, {})
        if not isinstance(subtable, Mapping):
            return
        table[name] = dict(subtable)
        table = table[name]
    table[last] = value


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to {"kernel_log.source": "kmsg", ...}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def setting_rows(loaded: Loaded) -> list[tuple[str, Any, str]]:
    """Return (setting, value, origin) for every setting, for `healthd config show`."""
    origins = dict(loaded.origins)
    if loaded.profile:
        origins["profile"] = f"{origins.get('profile', 'default')}: {loaded.profile}"
    rows = [(name, value, origins.get(name, "default")) for name, value in _flat(_all_fields(loaded.settings)).items()]
    for (check, instance), config in sorted({**loaded.checks, **loaded.disabled}.items()):
        for setting, value in _all_fields(config).items():
            origin = origins.get(setting_path(check, instance, setting)) or origins.get(
                setting_path(check, "", setting)
            )
            if setting not in ("name", "guessed") and value is not None:
                for name, item in _flat({setting: value}).items():
                    rows.append((setting_path(check, instance, name), item, origin or "default"))
    return rows


def _all_fields(config: Any) -> dict[str, Any]:
    out = {}
    for f in fields_of(type(config)):
        value = getattr(config, f.name)
        out[f.name] = _all_fields(value) if fields_of(type(value)) else dump(value)
    return out


def _contradiction(limits: FleetLimits) -> str:
    """Return a sentence if the limit for shared causes is higher than the other limit, which is a contradiction, or
    "".
    """
    for name, own, shared in (
        ("limit_percent", limits.own_hardware_limit_percent, limits.limit_percent),
        ("limit_min_nodes", limits.own_hardware_limit_min_nodes, limits.limit_min_nodes),
    ):
        if own < shared:
            return f"own_hardware_{name}: must be at least fleet.{name} ({number(shared)}), got {number(own)}"
    return ""


def _unknown_repair_code(repair: RepairConfig, available: Mapping[str, Check]) -> str:
    """Return a sentence about a code in repair.first_step that no check reports, or ""."""
    for code in repair.first_step:
        check = available.get(code.partition("/")[0])
        if check is None or (not check.path and check.explain(code) is None):
            return f'unknown code "{code}"; healthd list --codes prints all codes'
    return ""
