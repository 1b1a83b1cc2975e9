"""A class of healthd.common.values is what Python's own dataclass() would have made of it, but for when."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, field
from pathlib import Path
from types import ModuleType

import pytest

from healthd import api
from healthd.agent.settings.config import CheckConfig
from healthd.common import values
from healthd.common.model import Finding, Observation, Severity

ROOT = Path(__file__).parents[2]
# client is copied into containers by itself, values defines the decorator, and api passes it on.
OWN = {"healthd.client", "healthd.common.values", "healthd.api"}
IMPORTS_IT = re.compile(r"\nfrom healthd\.(?:common\.values|api) import (?:\([^)]*|[^(\n]*)\bdataclass\b")


def sources() -> Iterator[tuple[str, str]]:
    """Module -> its text."""
    for path in sorted([*ROOT.glob("healthd/**/*.py"), *ROOT.glob("checks/*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == "healthd" else ("healthd", *parts)).removesuffix(".__init__")
        if "checks" not in path.parts[:-1] or parts[0] == "checks":
            yield name, path.read_text()


MODULES = [name for name, text in sources() if IMPORTS_IT.search(text) and name not in OWN]


def test_each_frozen_class_with_slots_is_one_of_these() -> None:
    frozen = re.compile(r"^@(dataclasses\.)?dataclass\(.*frozen=True.*slots=True", re.MULTILINE)
    by_python = [
        name for name, text in sources() if (found := frozen.search(text)) and (found[1] or not IMPORTS_IT.search(text))
    ]
    assert set(by_python) - OWN == set()


def by_python(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module once more, with Python's own dataclass()."""
    for module in (values, api):
        monkeypatch.setattr(module, "dataclass", dataclasses.dataclass)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    twin = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, twin)  # where dataclass() looks for what an annotation means
    spec.loader.exec_module(twin)
    return twin


def shape(cls: type) -> object:
    """All that can be seen of a class without a value of it."""
    fields = [
        (f.name, f.type, f.default_factory is dataclasses.MISSING, f.init, f.repr, f.hash, f.compare, f.kw_only)
        for f in dataclasses.fields(cls)
    ]
    defaults = [shown(f.default) for f in dataclasses.fields(cls)]
    parameters = [(p.name, p.kind, p.annotation) for p in inspect.signature(cls).parameters.values()]
    inherited = {name for base in cls.__mro__[1:] for name in getattr(base, "__slots__", ())}
    slots = [name for name in cls.__slots__ if name not in inherited]  # Python 3.10 gives these slots once more
    of_python = slots, cls.__match_args__, repr(cls.__dataclass_params__), cls.__bases__[1:], cls.__qualname__
    return (
        fields,
        defaults,
        parameters,
        of_python,
        sorted({*vars(cls)} - inherited - {"__doc__", "__dict__", "__weakref__"}),
    )


def some_values(late: type, real: type) -> Iterator[tuple[object, object]]:
    """The same value of both: each field has its name, and then those that have none their default."""
    for fields in (dataclasses.fields(late), [f for f in dataclasses.fields(late) if required(f)]):
        given = {f.name: f.name for f in fields if f.init}
        yield late(**given), real(**given)


def shown(value: object) -> str:
    """Without the places in memory of what has no text of its own."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def required(f: dataclasses.Field[object]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


# What answers the fleet's questions needs packages that only one Python here has.
EACH = [pytest.param(name, marks=pytest.mark.one_python) if ".fleet." in name else name for name in MODULES]


@pytest.mark.parametrize("name", EACH)
def test_a_class_is_what_python_would_have_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late = importlib.import_module(name)
    real = by_python(name, monkeypatch)
    of_values = [(word, one) for word, one in vars(late).items() if is_late(one) and one.__module__ == name]
    assert of_values
    for word, one in of_values:
        twin = getattr(real, word)
        assert shape(one) == shape(twin), word
        if hasattr(one, "__post_init__"):
            continue  # it would have to be a right one
        for left, right in some_values(one, twin):
            assert shown(left) == shown(right)
            assert left == copy.copy(left)
            assert left != right  # of another class
        left, right = next(some_values(one, twin))
        assert hash(left) == hash(right)


def is_late(one: object) -> bool:
    return isinstance(one, type) and vars(one).get("__setattr__") is values._no_set


# --- one class, in each way in which it can be touched first


def point() -> type:
    """A class of which nothing was asked yet."""

    @values.dataclass(frozen=True, slots=True)
    class Point:
        """Where."""

        x: int
        y: float = 0.5
        names: list[str] = field(default_factory=list)

        @property
        def sum(self) -> float:
            return self.x + self.y

    return Point


def test_a_value_compares_and_shows_its_fields() -> None:
    Point = point()
    assert Point(1) == Point(x=1, y=0.5, names=[])
    assert Point(1) != Point(2)
    assert Point(1) != (1, 0.5, [])
    assert repr(Point(1, names=["a"])).endswith("Point(x=1, y=0.5, names=['a'])")
    assert Point(1).sum == 1.5
    assert Point(1).names is not Point(1).names
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(1))


def test_a_wrong_call_says_what_is_missing() -> None:
    with pytest.raises(TypeError, match=r"Point\.__init__\(\) missing 1 required positional argument: 'x'"):
        point()()
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        point()(1, z=2)


def test_nothing_of_a_value_can_be_changed() -> None:
    value = point()(1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        value.x = 2
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'z'"):
        value.z = 2
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del value.x
    assert value.x == 1


@pytest.mark.parametrize(
    "ask",
    [
        dataclasses.fields,
        dataclasses.is_dataclass,
        inspect.signature,
        lambda cls: cls.__match_args__,
        lambda cls: cls.__hash__,
        lambda cls: cls(1) == cls(1),
        lambda cls: dataclasses.replace(cls(1), y=2.0),
        lambda cls: dataclasses.asdict(cls(1)),
    ],
)
def test_it_does_not_matter_what_is_asked_first(ask: object) -> None:
    Point = point()
    assert ask(Point)  # type: ignore[operator]
    assert [f.name for f in dataclasses.fields(Point)] == ["x", "y", "names"]
    assert dataclasses.asdict(dataclasses.replace(Point(1), y=2.0)) == {"x": 1, "y": 2.0, "names": []}
    assert str(inspect.signature(Point)).startswith("(x: 'int', y: 'float' = 0.5, names: 'list[str]' = ")
    match Point(3, 4.0):
        case Point(x, y):
            assert (x, y) == (3, 4.0)


def test_values_can_be_copied_and_pickled() -> None:
    found = Finding(Severity.WARNING, "open_files/many", "", "many", events=(1, 2))
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found
    assert hash(copy.copy(found)) == hash(found)


def test_a_class_of_a_site_is_derived_by_python_itself() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Config(CheckConfig):
        share: float = 0.9
        enforce: bool = False

    @dataclasses.dataclass(frozen=True)
    class Further(Config):
        more: tuple[str, ...] = ()

    assert [f.name for f in dataclasses.fields(Config)] == [*(f.name for f in dataclasses.fields(CheckConfig)), "share"]
    assert Config(share=0.5) == Config(share=0.5, enforce=False)
    assert CheckConfig().enforce
    assert Further(more=("a",)).share == 0.9
    with pytest.raises(FrozenInstanceError):
        Config().share = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Loose", (CheckConfig,), {"__annotations__": {"loose": "int"}}))


def test_a_class_is_derived_from_one_of_python() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Base:
        a: int
        b: int = 2

    @values.dataclass(frozen=True, slots=True)
    class Sub(Base):
        b: int = 3
        c: int = 4

    assert (Sub(1).a, Sub(1).b, Sub(1).c) == (1, 3, 4)
    assert Base(1).b == 2
    assert Sub.__slots__ == ("c",)
    assert repr(Sub(1)).endswith("Sub(a=1, b=3, c=4)")
    assert Sub(1) != Base(1)


def test_a_wrong_class_is_refused_where_it_is_used() -> None:
    @values.dataclass(frozen=True, slots=True)
    class Wrong:
        names: list[str] = []  # noqa: RUF012

    with pytest.raises(ValueError, match="mutable default"):
        Wrong()


def test_threads_that_come_at_once_get_the_same() -> None:
    for _ in range(20):
        Point, start, shown = point(), threading.Barrier(4), []

        def show(made: type = Point, at: threading.Barrier = start, said: list[str] = shown) -> None:
            at.wait()
            said.append(repr(made(1)) if made(1) == made(1) else "differs")

        threads = [threading.Thread(target=show) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [text.partition("Point")[2] for text in shown] == ["(x=1, y=0.5, names=[])"] * 4


def test_other_classes_are_python_s_own() -> None:
    @values.dataclass(slots=True)
    class Count:
        count: int = 0

    one = Count()
    one.count += 1
    assert one == Count(1)


def test_what_a_command_does_not_use_is_not_made() -> None:
    program = (
        "from healthd.common.model import Condition, Observation; Observation('a', 1.0);"
        "print(type(vars(Condition)['__init__']).__name__, type(vars(Observation)['__init__']).__name__,"
        " type(vars(Observation)['__hash__']).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["_Late", "function", "_Late"]


def test_an_observation_costs_no_more_to_compare_than_python_s_own() -> None:
    """They are compared and hashed thousands of times a round: by the same code."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Own:
        name: str
        value: float
        kind: str
        labels: tuple[str, ...]
        bits: int | None

    for name in ("__eq__", "__hash__"):
        assert getattr(Observation, name).__code__.co_code == getattr(Own, name).__code__.co_code
