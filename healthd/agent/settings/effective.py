"""The effective settings, and where each came from. A wrong key, type or unknown check stops the start with one
sentence.

Setting by setting: defaults < profile of the machine's type < baseline of this node < healthd.toml < its [[node]]
sections for this node < flags. What lies below the file: layers.py. The sections: node_sections.py. What a setting may
be: config.py, and the checks for their own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from healthd.agent.settings.config import Below, CheckConfig, ConfigError, FleetLimits, Layer, Loaded, Settings
from healthd.agent.settings.registry import Check
from healthd.common.codec import ConvertError, dump, fields_of, load, nearest, number, refuse, show
from healthd.common.model import RunName
from healthd.common.text import printable
from healthd.common.toml import names_in
from healthd.nvidia import fake_machines

if TYPE_CHECKING:
    from healthd.agent.settings.node_sections import Section

SECTIONS = "node"  # [[node]]: settings for single nodes (node_sections.py)


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
    plain = _top_level(table)
    origins = dict.fromkeys(_flat(plain), source)
    of_sections: list[Layer] = []
    if SECTIONS in table:
        node = flags["node_name"][1] if "node_name" in flags else plain.get("node_name") or _host_name()
        for name, section in _sections_for(str(node), table, source):
            with _named(name, {}):
                _known_top_level(dict(section.settings), known)
            _overlay(plain, section.settings)
            origins.update(dict.fromkeys(_flat(section.settings), name))
            of_sections.append(Layer(name, section.checks))
    for name, (flag, value) in flags.items():
        origins[name] = flag
        _put(plain, name, value)
    with _named(source, origins):
        if plain.get("node_name", "") == "":
            plain["node_name"] = _host_name()
        settings = load(Settings, _known_top_level(plain, known), "")
        if problem := _contradiction(settings.fleet):
            raise ConvertError(f"fleet.{problem}")
        layers = [*below(settings), Layer(source, table.get("checks", {})), *of_sections]
    first_section = len(layers) - len(of_sections)
    for height, layer in enumerate(layers):  # each layer by itself, so that the error names the right layer
        with _named(layer.source, {}):
            if height >= first_section:  # a section may set one setting of a check: complete over the layers below
                _check_section(layers[:height], layer, known)
            else:
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


def _check_section(below: Sequence[Layer], section: Layer, known: Mapping[str, Check]) -> dict[str, Any]:
    """Check names and types in the checks of a [[node]] section and return its checks laid over the layers below.

    validate() is left to the caller, for the complete tables. Raises ConvertError.
    """
    _require_known(section.checks, known)
    for name, table in section.checks.items():
        if not isinstance(table, Mapping):
            raise ConvertError(f"checks.{name}: must be a table, got {show(table)}")
        _require_tables(name, table, known[name])
    tables, _ = _laid([*below, section], known)
    changed = {name: tables[name] for name in section.checks}
    _check_configs(changed, {name: known[name] for name in changed}, {}, complete=False)
    return changed


def _top_level(table: Mapping[str, Any]) -> dict[str, Any]:
    """What stands neither in [checks] nor in a [[node]] section."""
    return {key: value for key, value in table.items() if key not in ("checks", SECTIONS)}


def _sections_for(node: str, table: Mapping[str, Any], source: str) -> list[tuple[str, Section]]:
    """The [[node]] sections that hold for a node, each with its name: "healthd.toml [[node]] 2". Raises ConfigError."""
    from healthd.agent.settings import node_sections  # few files have sections

    with _named(source, {}):
        sections = node_sections.sections(table)
    return [(f"{source} {section.name}", section) for section in sections if node_sections.holds_for(section, node)]


def _host_name() -> str:
    return os.uname().nodename.partition(".")[0]


def mistakes(table: Mapping[str, Any], source: str, known: Mapping[str, Check]) -> list[str]:
    """Return everything that is wrong with one settings file, a sentence each, for `healthd config check`.

    Each table is judged by itself, the checks of a [[node]] section over those of the file. What only shows in all
    layers together (a baseline that contradicts the file) is left to settle().
    """
    names = {f.name for f in fields_of(Settings)}
    top = _top_level(table)
    found = [wrong for key in top for wrong in _wrong(functools.partial(_known_top_level, {key: None}, known))]
    plain = {"node_name": "node", **{key: value for key, value in top.items() if key in names}}
    found += _wrong(functools.partial(load, Settings, plain, ""))
    tables = table.get("checks", {})
    if not isinstance(tables, Mapping):
        found.append("checks: must be a table")
        tables = {}
    wrong_checks = set()
    for name, own in tables.items():
        wrong = [
            mistake
            for alone in _each_alone(name, own, known)
            for mistake in _wrong(functools.partial(_judge_alone, name, alone, known))
        ]
        found += wrong
        wrong_checks |= {name} if wrong else set()
    of_sections: list[str] = []
    if SECTIONS in table:
        from healthd.agent.settings import node_sections

        found += _wrong(functools.partial(node_sections.sections, table))
        sections: list[Section] = []
        with suppress(ConvertError):  # is in `found`
            sections = node_sections.as_written(table)
        for section in sections:
            source_of_section = f"{source} {section.name}"
            allowed = {k: v for k, v in section.settings.items() if k not in node_sections.NOT_IN_A_SECTION}
            of_sections += mistakes(allowed, source_of_section, known)
            apart = [section.checks]
            if isinstance(section.checks, Mapping):  # judged over those of the file, which must be right
                apart = [{name: own} for name, own in section.checks.items() if name not in wrong_checks]
            for checks in apart:
                judge = functools.partial(_judge_section, tables, checks, known)
                of_sections += [f"{source_of_section}: {printable(mistake)}" for mistake in _wrong(judge)]
    return [*(f"{source}: {printable(mistake)}" for mistake in found), *of_sections]


def _each_alone(name: str, table: Any, known: Mapping[str, Check]) -> list[Any]:
    """Return the table of a check once for each of its named tables, so that the mistakes of all of them are found."""
    if name not in known or not known[name].per or not isinstance(table, Mapping):
        return [table]
    own = {f.name for f in fields_of(known[name].config)}
    named = [key for key, value in table.items() if key not in own and isinstance(value, Mapping)]
    shared = {key: value for key, value in table.items() if key not in named}
    if not named or _wrong(functools.partial(_judge_alone, name, shared, known)):
        return [table]
    return [{**shared, key: table[key]} for key in named]


def _judge_alone(name: str, table: Any, known: Mapping[str, Check]) -> None:
    """Raises ConvertError if the table of one check is wrong."""
    _require_known({name: table}, known)
    _check_configs({name: table}, {name: known[name]}, {})


def _judge_section(file: Mapping[str, Any], checks: Any, known: Mapping[str, Check]) -> None:
    """Raise ConvertError if the checks of a [[node]] section, laid over those of the file, are wrong."""
    below = {name: file[name] for name in checks if name in file} if isinstance(checks, Mapping) else {}
    tables = _check_section([Layer("", below)], Layer("", checks), known)
    _check_configs(tables, {name: known[name] for name in tables}, {})


def _wrong(judge: Callable[[], object]) -> tuple[str, ...]:
    """Return what `judge` refuses, a sentence each."""
    try:
        judge()
    except ConvertError as error:
        return error.every
    return ()


@contextmanager
def _named(source: str, origins: Mapping[str, str]) -> Iterator[None]:
    """An error names the file or the flag that the wrong value came from."""
    try:
        yield
    except ConvertError as error:
        where = origins.get(str(error).partition(": ")[0], source)
        raise ConfigError(f"{where}: {printable(str(error))}") from None  # a key may contain a line end


def _laid(layers: Sequence[Layer], known: Mapping[str, Check]) -> tuple[dict[str, Any], dict[str, Layer]]:
    """The layers as one, setting by setting (a list or table that is a setting's value is replaced whole), and the
    layer that each setting is from."""
    tables: dict[str, Any] = {}
    layer_of: dict[str, Layer] = {}
    for layer in layers:
        for name, table in layer.checks.items():
            own = {f.name for f in fields_of(known[name].config)}
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
    """The settings of one run that a profile guessed. The instance's own table goes before the check's."""
    found: list[str] = []
    if not any(layer.guessed for layer in layer_of.values()):
        return ()
    for f in fields_of(check.config):
        places = [place_of(check.name, i, f.name) for i in (instance, "")]
        layer = next((layer_of[place] for place in places if place in layer_of), None)
        if layer is not None and layer.guessed:
            found.append(f.name)
    return tuple(found)


def require_what_is_named(loaded: Loaded) -> None:
    """Raises ConfigError if the settings name a root or a fake NVML that does not exist: no check could look."""
    settings, origins = loaded.settings, loaded.origins
    if not os.path.isdir(settings.root):
        raise ConfigError(f"{origins['root']}: root: there is no directory {settings.root}")
    fake = settings.nvml.fake
    profiles = names_in(fake_machines.FOLDER)
    if fake and fake not in profiles and not os.path.isfile(fake):
        hint = nearest(fake, profiles)
        raise ConfigError(f'{origins["nvml.fake"]}: nvml.fake: there is no profile and no file "{fake}"{hint}')


def _known_top_level(plain: dict[str, Any], known: Mapping[str, Check]) -> dict[str, Any]:
    names = {f.name for f in fields_of(Settings)} | {"checks"}
    for key in plain:
        if key not in names:
            from difflib import get_close_matches

            near = get_close_matches(key, [*names, *known], n=1)
            is_check = bool(near) and near[0] not in names  # whose table stands below "checks"
            hint = f'; did you mean "checks.{near[0]}"?' if is_check else nearest(key, names)
            raise ConvertError(f'unknown setting "{key}"{hint}')
    return plain


def _require_known(tables: Any, known: Mapping[str, Check]) -> None:
    if not isinstance(tables, Mapping):
        raise ConvertError("checks: must be a table")
    for name in tables:
        if name not in known:
            raise ConvertError(f'checks.{name}: there is no check "{name}"{nearest(name, known)}')


def _check_configs(
    tables: Mapping[str, Any], known: Mapping[str, Check], layer_of: Mapping[str, Layer], complete: bool = True
) -> dict[RunName, CheckConfig]:
    """Every run of the `known` checks. complete: False = names and types only, no validate()."""
    wanted: list[tuple[Check, str, dict[str, Any]]] = []
    for name, check in known.items():
        table = tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConvertError(f"checks.{name}: must be a table, got {show(table)}")
        for instance, values in _instances(name, table, check):
            where = f"checks.{name}" + (f'."{instance}"' if instance else "")
            if "name" in values:
                raise ConvertError(f"{where}.name: is set by the name of the table")
            if "guessed" in values:
                raise ConvertError(f'{where}: unknown setting "guessed"')
            guessed = _guessed(check, instance, layer_of)
            wanted.append((check, where, {**values, "name": instance, "guessed": guessed}))
    if complete:
        _require_judged([(check.path, where, values) for check, where, values in wanted if check.judges_settings])
    configs = {}
    for check, where, values in wanted:
        config = check.make_config(values, where)
        if complete:
            check.check_config(config, where)
        configs[RunName(check.name, values["name"])] = config
    return configs


def _require_judged(runs: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
    """What a site's file says of its settings must end, as its import must. Raises ConfigError."""
    if runs:
        from healthd.agent.settings.trial import require_judged

        require_judged(runs)


def _instances(name: str, table: Mapping[str, Any], check: Check) -> list[tuple[str, Mapping[str, Any]]]:
    """One run each: the check itself, or its named sub-tables, which inherit the settings beside them."""
    if not check.per:
        return [("", table)]
    own = {f.name for f in fields_of(check.config)}
    shared = {key: value for key, value in table.items() if key in own}
    named = {key: value for key, value in table.items() if key not in own}
    _require_tables(name, table, check)
    if not named:  # a wrong setting is refused also if no instance inherits it
        check.make_config(shared, f"checks.{name}")
    return [(key, {**shared, **value}) for key, value in named.items()]


def _require_tables(name: str, table: Mapping[str, Any], check: Check) -> None:
    """Raise ConvertError if a check with named tables has something else that is no setting of it."""
    if not check.per:
        return
    own = {f.name for f in fields_of(check.config)}
    found = []
    for key, value in table.items():
        if key in own:
            continue
        if not isinstance(value, Mapping):
            found.append(f'checks.{name}: unknown setting "{key}"{nearest(key, own - {"name", "guessed"})}')
        elif not key.strip() or not key.isprintable():
            found.append(f"checks.{name}: the name of a table must be words, got {show(key)}")
    refuse(found)


def _overlay(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    """Put settings over others, setting by setting: the tables [slurm], [fleet] ... are joined."""
    for key, value in above.items():
        old = below.get(key)
        below[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value


def _put(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one setting in nested tables. A value where a table should be stays, so that it is refused later."""
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
    for f in fields_of(type(config)):
        value = getattr(config, f.name)
        out[f.name] = _all_fields(value) if fields_of(type(value)) else dump(value)
    return out


def _contradiction(limits: FleetLimits) -> str:
    """Which limits contradict each other, "" = none: the one for a shared cause may not be the higher one."""
    for name, own, shared in (
        ("limit_percent", limits.own_hardware_limit_percent, limits.limit_percent),
        ("limit_min_nodes", limits.own_hardware_limit_min_nodes, limits.limit_min_nodes),
    ):
        if own < shared:
            return f"own_hardware_{name}: must be at least fleet.{name} ({number(shared)}), got {number(own)}"
    return ""
