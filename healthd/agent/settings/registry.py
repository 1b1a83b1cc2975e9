"""Registry of checks: the built-in ones (healthd/checks/NAME.py) and the site's (Python files in `checks_dir`).

A site's Python file is code that healthd runs as root. The file, every directory above it and every symbolic link on
the path must belong to root, and no other user may write to them (ownership.py). healthd imports exactly the file that
it verified. The daemon imports the file at startup, for its Config. The file's run() is called only in the worker.
Exceptions in its other functions (validate, overdue, explain) are logged in one sentence and never stop the daemon.
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

from healthd.agent.settings.config import CheckConfig, ConfigError, Loaded, configured_severity, is_capped
from healthd.agent.settings.contract import NAMES, Contract, read_contract
from healthd.common import ownership
from healthd.common.codec import ConvertError, dump, fields_of, load, raise_mistakes
from healthd.common.guard import KERNEL_LOG, describe_error, drop, log
from healthd.common.history import History
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
from healthd.common.text import compile_patterns_eagerly, regex
from healthd.common.values import Value
from healthd.host.host import Host

T = TypeVar("T")


# CHECK/others, which any check may have: the condition that counts further problems (agent/conditions/bounds.py).
OTHERS_EXPLAIN = Explain(
    Severity.WARNING,
    Clears.OPERATOR,
    "All checks together report more than 128 problems. The worst ones have their own conditions; this one counts "
    "the other problems of this check.",
    "This condition has the severity of the worst problem that it counts, and drains if that problem would drain.",
    "Run healthd status and dmesg, and fix the named conditions first. This condition ends when the last problem that "
    "it counts ends, which may require a reboot. It also ends with healthd repaired CHECK/others others.",
)


class Check(Value, frozen=True):
    """A check module with its declarations (contract.py).

    `path` and `version` are "" for a built-in check; for a site's file, `version` is its checksum.
    """

    name: str
    module: ModuleType
    path: str = ""
    version: str = ""
    declares: Contract[Any] = field(default_factory=Contract)

    def __post_init__(self) -> None:
        force_setattr(self, "declares", read_contract(self.module))

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
    def has_run(self) -> bool:
        return self.declares.run is not None

    @property
    def reads_kernel_log(self) -> bool:
        """True if the check evaluates kernel events."""
        return not self.path and self.declares.correlate is not None

    def may_block_resume(self, config: CheckConfig) -> bool:
        """Return True if a drained node waits for this check when it fails to run.

        The node does not wait if the check declares HOLDS_RESUME = False, or if the check can only warn, because of the
        site's settings or because none of its codes drains. A check that explains none of its codes may drain for any
        code.
        """
        if is_capped(config, "") or not self.declares.HOLDS_RESUME:
            return False
        explanations = ((code, self.explain(code)) for code in {*self.codes(), *config.severity})
        explained = {code: text for code, text in explanations if text is not None}
        other_severities = (severity for code, severity in config.severity.items() if code not in explained)
        worst = (_worst(code, text, config) for code, text in explained.items())
        return not explained or any(severity >= Severity.DEGRADED for severity in (*other_severities, *worst))

    def resource(self, instance: str) -> str:
        """Return the resource that a hung run blocks for other runs: NVML as a whole, or this run's own resource."""
        return self.uses if self.uses == "nvml" else f"{self.name} {instance}".strip()

    def run(
        self, host: Host, config: CheckConfig, past: History
    ) -> Iterable[Finding | Observation | Repair | NothingToCheck]:
        """Run the check once. Its exceptions are passed on."""
        if self.declares.run is None:
            raise TypeError(f"the check {self.name} only reads the kernel log")
        return self.declares.run(host, config, past)

    def correlate(
        self,
        events: Sequence[KernelEvent],
        node: Inventory,
        config: CheckConfig,
    ) -> tuple[list[Finding], Failures]:
        """Return (the findings for a window of kernel events, the events for which the check raises an exception).

        Both are empty for site checks, and for checks that do not evaluate kernel events. The daemon calls this method
        for each line. If the check raises an exception, each event is evaluated separately. The other checks and the
        daemon continue; otherwise the daemon would fail on the same line at each start.
        """
        correlate = None if self.path else self.declares.correlate
        if correlate is None:
            return [], ()
        try:
            return list(correlate(events, node, config)), ()
        except Exception as error:
            failure = error
        if len(events) == 1:
            return [], ((events[0], failure),)
        single_results = [self.correlate([event], node, config) for event in events]
        failed = tuple(item for _, failures in single_results for item in failures)
        return [finding for found, _ in single_results for finding in found], failed or ((None, failure),)

    @property
    def baseline_settings(self) -> Baseline | None:
        """The check's settings in the node's baseline. A site's BASELINE may have another type."""
        declared = self.declares.BASELINE
        return declared if isinstance(declared, Baseline) else None

    def baseline(self, host: Host, config: CheckConfig) -> Iterable[Entry | LeftOut]:
        """Return the current values of these settings. The check's exceptions are passed on."""
        read_baseline = self.declares.baseline if self.baseline_settings else None
        return read_baseline(host, config) if read_baseline else ()

    def repairs(self, events: Sequence[KernelEvent]) -> list[Repair]:
        """Return the repairs that kernel events prove. Only built-in checks return any."""
        find_repairs = None if self.path else self.declares.repairs
        if find_repairs is None:
            return []
        try:
            return list(find_repairs(events))
        except Exception as error:
            drop(KERNEL_LOG, error, f"check {self.name}")
            return []

    def overdue(self, config: CheckConfig, seconds: float) -> Iterator[Finding]:
        """Return the findings for a run that has not answered for `seconds`."""
        nothing: list[Finding] = []
        describe_overdue = self.declares.overdue
        return iter(
            self._call_safely(
                "overdue", lambda: [self._finding(item) for item in describe_overdue(config, seconds)], nothing
            )
        )

    def _finding(self, item: object) -> Finding:
        if not isinstance(item, Finding) or item.code.partition("/")[0] != self.name:
            raise TypeError(f'{item!r:.100} is not a Finding with a code "{self.name}/..."')
        return load(Finding, dump(item))

    def explain(self, code: str) -> Explain | None:
        declares = self.declares
        return self._call_safely("explain", lambda: _as_explain((declares.explain or declares.EXPLAIN.get)(code)), None)

    def explain_more(self, code: str) -> Explain | None:
        """Return the text for a name that is not a code but occurs in a finding's message ("nvlink5/149:4")."""
        return self._call_safely("explain_more", lambda: _as_explain(self.declares.explain_more(code)), None)

    def extra_names(self) -> list[str]:
        """Return the names for explain_more()."""
        return self._call_safely("known_more", lambda: list(self.declares.known_more()), [])

    def codes(self) -> list[str]:
        """Return the codes that the check can explain. For codes with numbers (Xids), these are the codes in the
        catalogue."""
        list_codes = self.declares.known_codes or partial(sorted, self.declares.EXPLAIN)
        return self._call_safely("explain", lambda: list(map(str, list_codes())), [])

    @property
    def meanings(self) -> dict[str, str]:
        """Description of each observation's value."""
        return {name: meaning.text for name, meaning in self.declares.OBSERVATIONS.items()}

    @property
    def judges_settings(self) -> bool:
        """Return True if reading the settings executes code from a site's file: a validate(), or the Config's own
        code."""
        own = getattr(self.config, "__post_init__", None) is not getattr(CheckConfig, "__post_init__", None)
        return bool(self.path) and (own or hasattr(self.module, "validate"))

    def make_config(self, values: Mapping[str, object], where: str) -> CheckConfig:
        """Return the check's Config from plain data. If a site's Config raises anything, this raises ConvertError."""
        with self._naming_errors("Config", where):
            config = load(self.config, values, where)
            if self.path:
                require_common(config, where)
                for name, value in dump(config).items():
                    with self._naming_errors("Config", f"{where}.{name}"):
                        json.dumps(value)  # the format for the worker
            return config

    def check_config(self, config: CheckConfig, where: str) -> None:
        """Validate the Config. Codes in `severity` must exist, and the module's `validate` may refuse the Config.

        Raises one ConvertError with all mistakes.
        """
        found = []
        for code in config.severity:
            if not self.path and self.explain(code) is None:
                written = code if "/" in code else f"{self.name}/{code}"
                found.append(f'{where}.severity: unknown code "{code}"{self._code_hint(written)}')
        with self._naming_errors("validate()", where):
            if problem := self.declares.validate(config):
                found.append(f"{where}: {problem}")
        raise_mistakes(found)

    def _code_hint(self, written: str) -> str:
        """Return a hint for an unknown code: the most similar code, or all codes if there are few."""
        import difflib

        codes = [code.partition("/")[2] for code in self.codes()]
        if close := difflib.get_close_matches(written.partition("/")[2], codes, n=1, cutoff=0.6):
            return f'; did you mean "{self.name}/{close[0]}"?'
        return f"; {self.name} has: {', '.join(codes)}" if len(codes) <= MAX_LISTED_CODES else ""

    @contextmanager
    def _naming_errors(self, name: str, where: str) -> Iterator[None]:
        """Convert an error in the check's module into a one-sentence ConvertError, as for an invalid setting."""
        try:
            yield
        except (ConvertError, KeyboardInterrupt):
            raise
        except BaseException as error:
            file = f" ({self.path})" if self.path else ""
            raise ConvertError(f"{where}: its {name} raised {describe_error(error)}{file}") from None

    def _call_safely(self, name: str, call: Callable[[], T], default: T) -> T:
        """Return the result of `call`. If it raises, log one sentence and return `default`."""
        try:
            return call()
        except BaseException as error:  # a site's file may raise anything
            log().error("check %s: %s: %s", self.name, name, describe_error(error))
            return default


def _as_explain(found: Explain | None) -> Explain | None:
    """Return the explanation with validated types, because a site's check may return values of any type."""
    return None if found is None else load(Explain, dump(found))


def _worst(code: str, explain: Explain, config: CheckConfig) -> Severity:
    """Return the worst severity that a finding with this code may have, now or later, under these settings."""
    if is_capped(config, explain.expects):
        return Severity.WARNING
    if code in config.severity:
        return config.severity[code]
    severities = [configured_severity(explain, config), *explain.also]
    if explain.worsens:
        severities.append(explain.worsens.severity)
    return max(severities)


def require_common(config: CheckConfig, where: str) -> None:
    """Raise ConvertError unless the common settings have CheckConfig's types.

    A site's Config may redeclare these settings, and the daemon reads them.
    """
    load(CheckConfig, {f.name: dump(getattr(config, f.name)) for f in fields_of(CheckConfig)}, where)


MAX_LISTED_CODES = 16  # more codes do not fit into a sentence


def built_in_checks(only: Collection[str] | None = None) -> dict[str, Check]:
    """Return the built-in checks, or only those with the names in `only`."""
    from healthd import checks

    files = map(os.path.splitext, os.listdir(checks.__path__[0]))
    names = sorted(name for name, ending in files if ending == ".py" and name.isidentifier() and name != "__init__")
    chosen = names if only is None else [name for name in names if name in only]
    return {name: Check(name, importlib.import_module(f"healthd.checks.{name}")) for name in chosen}


def site_files(directory: str) -> list[str]:
    """Return the site's check files. Raises ConfigError if a user other than root could have written a file."""
    if not directory:
        return []
    try:
        with ownership.open_folder(directory) as listed:
            names = sorted(name for name in os.listdir(listed) if name.endswith(".py") and not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except ownership.Untrusted as error:
        raise ConfigError(str(error.with_context(directory, "checks_dir"))) from None
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read: {error.strerror}") from None
    for name in names:
        if not name.isprintable():  # the file's name becomes the check's name in settings, codes and drains
            raise ConfigError(f"{directory}: {name!a} is not a valid name for a check")
    paths = [os.path.join(directory, name) for name in names]
    for path in paths:
        with _opened(path):
            pass
    return paths


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a site's file for reading. Raises ConfigError."""
    try:
        with ownership.open_file(path) as descriptor:
            yield descriptor
    except ownership.Untrusted as error:
        raise ConfigError(str(error.with_context(path, "checks_dir"))) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is not a file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


_loaded_site_files: list[str] = []


def has_loaded_site_file() -> bool:
    """Return True if this process has executed code from a site's file, which may have loaded or started anything."""
    return bool(_loaded_site_files)


def load_site(path: str) -> Check:
    """Import a site file through the verified descriptor. Raises ConfigError; the message is a sentence that names the
    file.

    An import by name would allow another user to swap the file, or to forge a compiled file in the same folder.
    """
    from importlib.util import module_from_spec, spec_from_file_location

    name = os.path.basename(path)[: -len(".py")]
    spec = spec_from_file_location(f"healthd_site_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with _opened(path) as descriptor:
        source = ownership.read_all(descriptor)
    _loaded_site_files.append(path)
    sys.modules[module.__name__] = module  # classes resolve their type names there
    try:
        with compile_patterns_eagerly():
            exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        check = Check(name, module, path, f"{zlib.crc32(source):08x}")
        problem = _misdeclared(check)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an import may raise anything; the message is for the file's author
        sys.modules.pop(module.__name__, None)
        raise ConfigError(f"{path}: cannot be loaded: {describe_error(error)}") from None
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return check


def _misdeclared(check: Check) -> str:
    """Return the problem with a site module's declarations, or "" if they are valid."""
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
        return "AFTER_EVENTS must be a tuple of strings"
    if not isinstance(declares.HOLDS_RESUME, bool):
        return "HOLDS_RESUME must be True or False"
    table = declares.OBSERVATIONS
    if not isinstance(table, Mapping) or not all(isinstance(meaning, Meaning) for meaning in table.values()):
        return "OBSERVATIONS must map the name of each observation to a Meaning"
    if not all(isinstance(text, str) for text, _ in table.values()):
        return "OBSERVATIONS: the first field of a Meaning must be text"
    if baseline := check.baseline_settings:
        own = {f.name for f in fields_of(config)}
        if not callable(declares.baseline):
            return "has BASELINE but no baseline(host, config)"
        for setting in baseline.settings:
            if setting not in own:
                return f'BASELINE names "{setting}", which Config does not have'
    return _redeclared(config)


def _misspelt_names(check: Check) -> Iterator[tuple[str, str]]:
    """Yield unused names in a site's module (AFTER_EVENT), each with a similar name that the contract allows."""
    from difflib import get_close_matches

    with open(check.path, encoding="utf-8", errors="replace") as file:
        counts = Counter(regex(r"\w+").findall(file.read()))
    for name in vars(check.module):
        if name.isupper() and name not in NAMES and counts[name] == 1:
            for suggestion in get_close_matches(name, NAMES, n=1, cutoff=0.9):
                yield name, suggestion


def _redeclared(config: type[CheckConfig]) -> str:
    """Return the problem if a site's Config redeclares a common setting with an invalid default, or ""."""
    common = {f.name for f in fields_of(CheckConfig)}
    fields = [f for f in fields_of(config) if f.name in common and f.default is not NODEFAULT]
    try:
        load(CheckConfig, {f.name: dump(f.default) for f in fields}, "Config")
    except ConvertError as error:
        return str(error)
    return ""


def find_checks(directory: str, bounded: bool = True) -> dict[str, Check]:
    """Return all checks by name, both built-in and the site's. Raises ConfigError; the message is one sentence.

    If `bounded`, each site file is first imported in another process, because the import may hang. The worker does not
    need this, because it has a deadline.
    """
    checks = built_in_checks()
    paths = site_files(directory)
    if bounded and paths:
        from healthd.agent.settings.trial import require_loadable

        require_loadable(paths)
    for path in paths:
        check = load_site(path)
        if check.name in checks:
            raise ConfigError(f'{path}: a built-in check is already called "{check.name}"; rename the file')
        for name, suggestion in _misspelt_names(check) if bounded else ():
            log().warning("%s: healthd ignores %s; did you mean %s?", path, name, suggestion)
        checks[check.name] = check
    return checks


def baseline_checks(checks: Mapping[str, Check]) -> dict[str, Baseline]:
    """Return the baseline settings of the checks that have a table in a node's baseline, in the file's order."""
    settings = {name: check.baseline_settings for name, check in checks.items() if check.baseline_settings}
    return dict(sorted(settings.items(), key=lambda item: (item[1].place, item[0])))


def explain(checks: Mapping[str, Check], code: str) -> Explain | None:
    name, _, subcode = code.partition("/")
    check = checks.get(name)
    if check is not None:
        return check.explain(code) or (OTHERS_EXPLAIN if subcode == "others" else None)
    return next((found for check in checks.values() if (found := check.explain_more(code)) is not None), None)


def remedies(checks: Mapping[str, Check], codes: Iterable[str]) -> dict[str, Remedy]:
    """Return the remedies that these codes declare, as a dict with the codes as keys."""
    found = ((code, explain(checks, code)) for code in codes)
    return {code: text.remedy for code, text in found if text is not None and text.remedy is not None}


def without_result(checks: Mapping[str, Check], loaded: Loaded) -> dict[str, list[str]]:
    """Return the checks that do not run in a round, as a dict with these reasons as keys:

    kernel_log_only  the check only reads the kernel log
    idle        it only runs while the node is drained and idle
    off         enabled = false
    not_set_up  the settings have no table for it
    """
    found: dict[str, list[str]] = {"kernel_log_only": [], "idle": [], "off": [], "not_set_up": []}
    on = {name.check for name in loaded.checks}
    off = {name.check for name in loaded.disabled}
    for name, check in checks.items():
        if name not in on:
            found["off" if name in off else "not_set_up"].append(name)
        elif not check.has_run:
            found["kernel_log_only"].append(name)
        elif check.when:
            found["idle"].append(name)
    return found


def count_summary(checks: Mapping[str, Check], loaded: Loaded) -> str:
    """Return text about the number of checks, such as "45 checks: 36 run, 7 only read the kernel log, 2 not set up"."""
    not_run = without_result(checks, loaded)
    labels = {
        "kernel_log_only": "only read the kernel log",
        "idle": "run only while idle",
        "off": "off",
        "not_set_up": "not set up",
    }
    parts = [f"{len(not_run[why])} {text}" for why, text in labels.items() if not_run[why]]
    run = len(checks) - sum(map(len, not_run.values()))
    return f"{len(checks)} checks: {', '.join([f'{run} run', *parts])}"


def all_codes(checks: Mapping[str, Check]) -> list[str]:
    return [code for check in checks.values() for code in check.codes()]


def all_names(checks: Mapping[str, Check]) -> list[str]:
    """Return all names for `healthd explain`: codes, and names that only occur in messages."""
    return [*all_codes(checks), *(name for check in checks.values() for name in check.extra_names())]


def explained(checks: Mapping[str, Check]) -> dict[str, Explain]:
    """Return a dict that maps every code to its explanation."""
    return {code: found for code in all_codes(checks) if (found := explain(checks, code)) is not None}
