"""Finds the checks: built in (healthd/checks/NAME.py), and those of the site (a Python file in its directory).

A site's Python file is code that healthd runs as root: it, every directory above it and every symbolic link on the way
must belong to root and be writable by nobody else (ownership.py); what was looked at is what is imported. The daemon
imports it at its start, for its Config; its run() is called in the worker only. Its other functions (validate, overdue,
explain) may raise: that costs one sentence, never the daemon.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from msgspec import NODEFAULT, field
from msgspec.structs import force_setattr

from healthd.agent.settings.config import CheckConfig, ConfigError, Loaded, only_warns, severity_with
from healthd.agent.settings.contract import NAMES, Contract, declared
from healthd.common import ownership
from healthd.common.codec import ConvertError, dump, fields_of, load, refuse
from healthd.common.guard import KERNEL_LOG, drop, log, words
from healthd.common.history import Past
from healthd.common.model import (
    Baseline,
    Clears,
    Entry,
    Explain,
    Failures,
    Finding,
    Inventory,
    KernelEvent,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
    Remedy,
    Repair,
    Severity,
)
from healthd.common.text import patterns_compiled_where_made, regex
from healthd.common.values import Value
from healthd.host.host import Host

T = TypeVar("T")


# CHECK/others of any check: the condition that counts the rest (agent/conditions/bounds.py).
OF_OTHERS = Explain(
    Severity.WARNING,
    Clears.OPERATOR,
    "All checks together report more than 128 problems: the worst have conditions of their own, and this one counts "
    "the rest of this check.",
    "It is as bad as the worst that it counts, and drains where that would.",
    "healthd status and dmesg: look first at the conditions that have a name. It ends when the last that it counts "
    "would end, which may need a reboot, or by healthd repaired CHECK/others others.",
)


class Check(Value, frozen=True):
    """A check module and what it declares (contract.py). `path` is "" for a built-in one, and so is `version`, of
    which it is the checksum."""

    name: str
    module: ModuleType
    path: str = ""
    version: str = ""
    declares: Contract[Any] = field(default_factory=Contract)

    def __post_init__(self) -> None:
        force_setattr(self, "declares", declared(self.module))

    @property
    def config(self) -> type[CheckConfig]:
        return self.declares.Config

    @property
    def per(self) -> str:
        return self.declares.PER

    @property
    def uses(self) -> str:
        return self.declares.USES

    @property
    def when(self) -> str:
        return self.declares.WHEN

    @property
    def after_events(self) -> tuple[str, ...]:
        return tuple(self.declares.AFTER_EVENTS)

    @property
    def summary(self) -> str:
        return (self.module.__doc__ or "").strip().partition("\n")[0]

    @property
    def runs(self) -> bool:
        return self.declares.run is not None

    @property
    def listens(self) -> bool:
        """Whether it judges kernel events."""
        return not self.path and self.declares.correlate is not None

    def holds_resume(self, config: CheckConfig) -> bool:
        """Whether a drained node waits for this check while it cannot look. It does not if the check can only warn: by
        the site's settings, or since none of its codes drains; nor if the check declares so. One that explains none of
        its codes may drain for any."""
        if only_warns(config, "") or not self.declares.HOLDS_RESUME:
            return False
        asked = ((code, self.explain(code)) for code in {*self.codes(), *config.severity})
        explained = {code: known for code, known in asked if known is not None}
        others = (severity for code, severity in config.severity.items() if code not in explained)
        worst = (_worst(code, known, config) for code, known in explained.items())
        return not explained or any(severity >= Severity.DEGRADED for severity in (*others, *worst))

    def resource(self, instance: str) -> str:
        """What a hung run puts into quarantine: NVML as a whole, otherwise this run's own."""
        return self.uses if self.uses == "nvml" else f"{self.name} {instance}".strip()

    def run(
        self, host: Host, config: CheckConfig, past: Past
    ) -> Iterable[Finding | Observation | Repair | NothingToCheck]:
        """One run. Raises what the check raises."""
        if self.declares.run is None:
            raise TypeError(f"the check {self.name} only listens")
        return self.declares.run(host, config, past)

    def correlate(
        self,
        events: Sequence[KernelEvent],
        node: Inventory,
        config: CheckConfig,
    ) -> tuple[list[Finding], Failures]:
        """(the findings in a window of kernel events, the events that the check fails on); neither if it does not
        listen to the log.

        Built-in checks only: it runs in the daemon, at each line. If it raises, the other checks and the daemon go on
        (the daemon would meet the same line again at each start): each event is then judged by itself.
        """
        listen = None if self.path else self.declares.correlate
        if listen is None:
            return [], ()
        try:
            return list(listen(events, node, config)), ()
        except Exception as error:
            mistake = error
        if len(events) == 1:
            return [], ((events[0], mistake),)
        alone = [self.correlate([event], node, config) for event in events]
        failed = tuple(one for _, failures in alone for one in failures)
        return [finding for found, _ in alone for finding in found], failed or ((None, mistake),)

    @property
    def wants(self) -> Baseline | None:
        """The settings that it wants in the node's baseline. A site's BASELINE may be something else."""
        wants = self.declares.BASELINE
        return wants if isinstance(wants, Baseline) else None

    def baseline(self, host: Host, config: CheckConfig) -> Iterable[Entry | LeftOut]:
        """What the node has of these now. Raises what the check raises."""
        say = self.declares.baseline if self.wants else None
        return say(host, config) if say else ()

    def repairs(self, events: Sequence[KernelEvent]) -> list[Repair]:
        """The repairs that kernel events are evidence of. Built-in checks only."""
        listen = None if self.path else self.declares.repairs
        if listen is None:
            return []
        try:
            return list(listen(events))
        except Exception as error:
            drop(KERNEL_LOG, error, f"check {self.name}")
            return []

    def overdue(self, config: CheckConfig, seconds: float) -> Iterator[Finding]:
        """What it means that a run did not answer for `seconds`."""
        nothing: list[Finding] = []
        say = self.declares.overdue
        return iter(self._asked("overdue", lambda: [self._finding(item) for item in say(config, seconds)], nothing))

    def _finding(self, item: object) -> Finding:
        if not isinstance(item, Finding) or item.code.partition("/")[0] != self.name:
            raise TypeError(f'{item!r:.100} is no Finding with a code "{self.name}/..."')
        return load(Finding, dump(item))

    def explain(self, code: str) -> Explain | None:
        declares = self.declares
        return self._asked("explain", lambda: _as_explain((declares.explain or declares.EXPLAIN.get)(code)), None)

    def explain_more(self, code: str) -> Explain | None:
        """The text for a name that is no code, but stands in a finding's message: "nvlink5/149:4"."""
        return self._asked("explain_more", lambda: _as_explain(self.declares.explain_more(code)), None)

    def known_more(self) -> list[str]:
        """Names that explain_more() knows."""
        return self._asked("known_more", lambda: list(self.declares.known_more()), [])

    def codes(self) -> list[str]:
        """The codes that it can explain; of codes that are numbers (Xids), those in the catalogue."""
        known = self.declares.known_codes or partial(sorted, self.declares.EXPLAIN)
        return self._asked("explain", lambda: list(map(str, known())), [])

    @property
    def meanings(self) -> dict[str, str]:
        """Observation -> what its value says."""
        return {name: meaning.text for name, meaning in self.declares.OBSERVATIONS.items()}

    @property
    def judges_settings(self) -> bool:
        """Whether code of a site's file runs when its settings are read: a validate(), or what a Config does."""
        own = getattr(self.config, "__post_init__", None) is not getattr(CheckConfig, "__post_init__", None)
        return bool(self.path) and (own or hasattr(self.module, "validate"))

    def make_config(self, values: Mapping[str, object], where: str) -> CheckConfig:
        """Its Config from plain data. Raises ConvertError, also for whatever a site's Config raises."""
        with self._mistakes_of("Config", where):
            config = load(self.config, values, where)
            if self.path:
                require_common(config, where)
                for name, value in dump(config).items():
                    with self._mistakes_of("Config", f"{where}.{name}"):
                        json.dumps(value)  # as which the worker gets it
            return config

    def check_config(self, config: CheckConfig, where: str) -> None:
        """Codes in `severity` must exist, and the module may refuse its Config by a sentence (`validate`).

        Raises one ConvertError for all mistakes.
        """
        found = []
        for code in config.severity:
            if not self.path and self.explain(code) is None:
                written = code if "/" in code else f"{self.name}/{code}"
                found.append(f'{where}.severity: there is no code "{code}"{self._its_codes(written)}')
        with self._mistakes_of("validate()", where):
            if problem := self.declares.validate(config):
                found.append(f"{where}: {problem}")
        refuse(found)

    def _its_codes(self, written: str) -> str:
        """Return the hint for a code that does not exist: the one that was meant, else all codes if they are few."""
        import difflib

        codes = [code.partition("/")[2] for code in self.codes()]
        if close := difflib.get_close_matches(written.partition("/")[2], codes, n=1, cutoff=0.6):
            return f'; did you mean "{self.name}/{close[0]}"?'
        return f"; {self.name} has: {', '.join(codes)}" if len(codes) <= FEW_CODES else ""

    @contextmanager
    def _mistakes_of(self, what: str, where: str) -> Iterator[None]:
        """An error in the check's module becomes one sentence, a ConvertError, as for a wrong setting."""
        try:
            yield
        except (ConvertError, KeyboardInterrupt):
            raise
        except BaseException as error:
            file = f" ({self.path})" if self.path else ""
            raise ConvertError(f"{where}: its {what} raised {words(error)}{file}") from None

    def _asked(self, what: str, ask: Callable[[], T], otherwise: T) -> T:
        """What `ask` answers. If it raises, the log gets one sentence, and `otherwise` is the answer."""
        try:
            return ask()
        except BaseException as error:  # a site's file may raise what it likes
            log().error("check %s: %s: %s", self.name, what, words(error))
            return otherwise


def _as_explain(found: Explain | None) -> Explain | None:
    """Return the explanation with its types checked: a site's check may give values of any type."""
    return None if found is None else load(Explain, dump(found))


def _worst(code: str, explain: Explain, config: CheckConfig) -> Severity:
    """The worst that a finding of this code may be, or become, under these settings."""
    if only_warns(config, explain.expects):
        return Severity.WARNING
    if code in config.severity:
        return config.severity[code]
    severities = [severity_with(explain, config), *explain.also]
    if explain.worsens:
        severities.append(explain.worsens.severity)
    return max(severities)


def require_common(config: CheckConfig, where: str) -> None:
    """The common settings have CheckConfig's types, also where a site's Config declares them anew: the daemon reads
    them. Raises ConvertError."""
    load(CheckConfig, {f.name: dump(getattr(config, f.name)) for f in fields_of(CheckConfig)}, where)


FEW_CODES = 16  # all of them fit into a sentence


def built_in(only: Collection[str] | None = None) -> dict[str, Check]:
    """The checks that come with healthd; `only`: those of them that have one of these names."""
    from healthd import checks

    files = map(os.path.splitext, os.listdir(checks.__path__[0]))
    names = sorted(name for name, ending in files if ending == ".py" and name.isidentifier() and name != "__init__")
    wanted = names if only is None else [name for name in names if name in only]
    return {name: Check(name, importlib.import_module(f"healthd.checks.{name}")) for name in wanted}


def site_files(directory: str) -> list[str]:
    """The site's check files. Raises ConfigError for one that others than root could have written."""
    if not directory:
        return []
    try:
        with ownership.folder(directory) as listed:
            names = sorted(name for name in os.listdir(listed) if name.endswith(".py") and not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except ownership.Untrusted as error:
        raise ConfigError(str(error.at(directory, "checks_dir"))) from None
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read: {error.strerror}") from None
    for name in names:
        if not name.isprintable():  # it becomes the check's, in settings, codes and drains
            raise ConfigError(f"{directory}: {name!a} is no name for a check")
    paths = [os.path.join(directory, name) for name in names]
    for path in paths:
        with _opened(path):
            pass
    return paths


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A site's file, open for reading. Raises ConfigError."""
    try:
        with ownership.opened(path) as descriptor:
            yield descriptor
    except ownership.Untrusted as error:
        raise ConfigError(str(error.at(path, "checks_dir"))) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is not a file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


_site_files_run: list[str] = []


def has_run_a_site_file() -> bool:
    """Whether this process has run anything of a site's file: it may have loaded or started whatever it likes."""
    return bool(_site_files_run)


def load_site(path: str) -> Check:
    """Import one site file, by the descriptor that was looked at: its name may mean another file a moment later, and a
    compiled form beside it may be anybody's. Raises ConfigError with a sentence that names it."""
    from importlib.util import module_from_spec, spec_from_file_location

    name = os.path.basename(path)[: -len(".py")]
    spec = spec_from_file_location(f"healthd_site_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with _opened(path) as descriptor:
        source = ownership.content(descriptor)
    _site_files_run.append(path)
    sys.modules[module.__name__] = module  # where a class of it looks for what its types are called
    try:
        with patterns_compiled_where_made():
            exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        check = Check(name, module, path, f"{zlib.crc32(source):08x}")
        problem = _misdeclared(check)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a site's file may raise anything while it is imported: its author reads it
        sys.modules.pop(module.__name__, None)
        raise ConfigError(f"{path}: cannot be loaded: {words(error)}") from None
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return check


def _misdeclared(check: Check) -> str:
    """What is wrong with what a site's module declares, "" if nothing."""
    declares = check.declares
    if not callable(declares.run):
        return "has no run(host, config, past)"
    from healthd.agent.settings import site_config

    config = check.config
    if not isinstance(config, type) or not issubclass(config, (CheckConfig, site_config.CheckConfig)):
        return "Config must be a dataclass and a CheckConfig"
    for name in ("USES", "PER"):
        if not isinstance(getattr(declares, name), str):
            return f"{name} must be text"
    if declares.WHEN not in ("", "idle"):
        return 'WHEN must be "idle" or ""'
    events = declares.AFTER_EVENTS
    if not isinstance(events, tuple | list) or not all(isinstance(kind, str) for kind in events):
        return "AFTER_EVENTS must be a tuple of texts"
    if not isinstance(declares.HOLDS_RESUME, bool):
        return "HOLDS_RESUME must be True or False"
    table = declares.OBSERVATIONS
    if not isinstance(table, Mapping) or not all(isinstance(one, Meaning) for one in table.values()):
        return "OBSERVATIONS must be a table: name of an observation -> Meaning"
    if not all(isinstance(text, str) for text, _ in table.values()):
        return "OBSERVATIONS: a Meaning begins with a text"
    if wants := check.wants:
        own = {f.name for f in fields_of(config)}
        if not callable(declares.baseline):
            return "has BASELINE and no baseline(host, config)"
        for setting in wants.settings:
            if setting not in own:
                return f'BASELINE names "{setting}", which Config has not'
    return _redeclared(config)


def _misspelt(check: Check) -> Iterator[tuple[str, str]]:
    """Names in a site's module that neither healthd nor the module itself reads, and the known ones that they resemble:
    AFTER_EVENT."""
    from difflib import get_close_matches

    with open(check.path, encoding="utf-8", errors="replace") as file:
        words = Counter(regex(r"\w+").findall(file.read()))
    for name in vars(check.module):
        if name.isupper() and name not in NAMES and words[name] == 1:
            for meant in get_close_matches(name, NAMES, n=1, cutoff=0.9):
                yield name, meant


def _redeclared(config: type[CheckConfig]) -> str:
    """A site's Config may give a common setting another default, but only a valid one: what is wrong, "" if nothing."""
    common = {f.name for f in fields_of(CheckConfig)}
    fields = [f for f in fields_of(config) if f.name in common and f.default is not NODEFAULT]
    try:
        load(CheckConfig, {f.name: dump(f.default) for f in fields}, "Config")
    except ConvertError as error:
        return str(error)
    return ""


def find(directory: str, bounded: bool = True) -> dict[str, Check]:
    """Every check by name, built in and the site's. Raises ConfigError with one sentence.

    `bounded`: each site file is imported in another process first, since it may hang there. The worker does not need
    that: it has a deadline.
    """
    checks = built_in()
    paths = site_files(directory)
    if bounded and paths:
        from healthd.agent.settings.trial import require_loadable

        require_loadable(paths)
    for path in paths:
        check = load_site(path)
        if check.name in checks:
            raise ConfigError(f'{path}: there is a built-in check "{check.name}" already')
        for name, meant in _misspelt(check) if bounded else ():
            log().warning("%s: %s says nothing to healthd: is %s meant?", path, name, meant)
        checks[check.name] = check
    return checks


def with_baseline(checks: Mapping[str, Check]) -> dict[str, Baseline]:
    """The checks that a node's baseline has a table of, in the order of the file, and the settings in each."""
    wants = {name: check.wants for name, check in checks.items() if check.wants}
    return dict(sorted(wants.items(), key=lambda item: (item[1].place, item[0])))


def explain(checks: Mapping[str, Check], code: str) -> Explain | None:
    name, _, rest = code.partition("/")
    check = checks.get(name)
    if check is not None:
        return check.explain(code) or (OF_OTHERS if rest == "others" else None)
    return next((found for check in checks.values() if (found := check.explain_more(code)) is not None), None)


def remedies(checks: Mapping[str, Check], codes: Iterable[str]) -> dict[str, Remedy]:
    """Return the remedies that these codes declare, by code."""
    found = ((code, explain(checks, code)) for code in codes)
    return {code: text.remedy for code, text in found if text is not None and text.remedy is not None}


def without_result(checks: Mapping[str, Check], loaded: Loaded) -> dict[str, list[str]]:
    """Return the checks that a round of `loaded` does not run, by the reason.

    kernel_log_only  it only reads the kernel log
    idle        it runs only while the node is drained and idle
    off         enabled = false
    not_set_up  the settings have no table of it
    """
    found: dict[str, list[str]] = {"kernel_log_only": [], "idle": [], "off": [], "not_set_up": []}
    on = {name.check for name in loaded.checks}
    off = {name.check for name in loaded.disabled}
    for name, check in checks.items():
        if name not in on:
            found["off" if name in off else "not_set_up"].append(name)
        elif not check.runs:
            found["kernel_log_only"].append(name)
        elif check.when:
            found["idle"].append(name)
    return found


def counted(checks: Mapping[str, Check], loaded: Loaded) -> str:
    """Return the number of checks as one phrase: "45 checks: 36 run, 7 listen to the kernel log, 2 not set up"."""
    left = without_result(checks, loaded)
    words = {
        "kernel_log_only": "listen to the kernel log",
        "idle": "run only while idle",
        "off": "off",
        "not_set_up": "not set up",
    }
    others = [f"{len(left[why])} {text}" for why, text in words.items() if left[why]]
    run = len(checks) - sum(map(len, left.values()))
    return f"{len(checks)} checks: {', '.join([f'{run} run', *others])}"


def all_codes(checks: Mapping[str, Check]) -> list[str]:
    return [code for check in checks.values() for code in check.codes()]


def all_names(checks: Mapping[str, Check]) -> list[str]:
    """What `healthd explain` knows: all codes, and what is named in messages only."""
    return [*all_codes(checks), *(name for check in checks.values() for name in check.known_more())]


def explained(checks: Mapping[str, Check]) -> dict[str, Explain]:
    """Every code that is known, and what it means."""
    return {code: found for code in all_codes(checks) if (found := explain(checks, code)) is not None}
