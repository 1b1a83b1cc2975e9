"""text: only ASCII digits and letters count, and no pattern needs more than linear time for any text."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import LINES, messages
from pumped import repeating_texts, repeating_texts_for_search

from healthd.agent.kernel_log.parse import RULES, UNREAD, parse
from healthd.agent.kernel_log.rules.rule import MAX_TEXT
from healthd.common.text import LazyPattern, compile_patterns_eagerly, is_decimal, printable, regex

ROOT = Path(__file__).parents[2]
OTHER_DIGITS = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


def module_names() -> list[str]:
    """Return the names of healthd's modules that have patterns."""
    paths = [*(ROOT / "healthd").rglob("*.py"), *(ROOT / "checks").glob("*.py")]
    with_patterns = [path for path in paths if "regex(" in path.read_text("utf-8") and path.name != "text.py"]
    return sorted(
        ".".join(("healthd", *path.with_suffix("").relative_to(ROOT).parts)).replace("healthd.healthd.", "healthd.")
        for path in with_patterns
    )


def patterns(value: object) -> Iterator[re.Pattern[str]]:
    """Yield the patterns in a module's value, also inside tables."""
    if isinstance(value, re.Pattern | LazyPattern) and isinstance(value.pattern, str):
        yield value
    elif isinstance(value, dict | tuple | list | frozenset):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from patterns(inner)


def patterns_of(module: str) -> list[re.Pattern[str]]:
    values = vars(importlib.import_module(module)).values()
    return list({(p.pattern, p.flags): p for value in values for p in patterns(value)}.values())


SEARCHES = ("search", "sub", "subn", "finditer", "findall", "split")


def searched_patterns(module: str) -> list[re.Pattern[str]]:
    """Return the patterns that a module searches for anywhere in a text: by name, literally in the call, or, if a local
    name iterates over them, all patterns of its tables."""
    values = vars(importlib.import_module(module))
    found: list[re.Pattern[str]] = []
    for node in ast.walk(ast.parse(Path(values["__file__"]).read_text("utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES):
            continue
        on = node.func.value
        if isinstance(on, ast.Name) and on.id in values:
            found += patterns(values[on.id])
        elif isinstance(on, ast.Name) and node.func.attr != "split":  # str has this method too
            found += (
                pattern for value in values.values() if not hasattr(value, "pattern") for pattern in patterns(value)
            )
        elif isinstance(on, ast.Call):
            found += (regex(text, flags) for text, flags in literals(on))
    return list({(pattern.pattern, pattern.flags): pattern for pattern in found}.values())


def seconds(pattern: re.Pattern[str], text: str, search: bool = False) -> float:
    return cpu_seconds(lambda: use(pattern, text, search), QUICK_SECONDS)


def use(pattern: re.Pattern[str], text: str, search: bool) -> object:
    return [*pattern.finditer(text)] if search else pattern.match(text)


QUICK_SECONDS = 0.05  # linear time for 64 KiB is a tenth of this, quadratic time ten times as much
KIB = 1024


def is_linear(pattern: re.Pattern[str], text: str, search: bool = False) -> bool:
    """Four times the text takes about four times as long, not sixteen times. Both use the same reference
    measurement."""
    quarter = text[: len(text) // 4] + text[-1]
    if seconds(pattern, quarter, search) > 1:
        return False
    whole = seconds(pattern, text, search)
    return whole < QUICK_SECONDS or whole < 8 * cpu_seconds(lambda: use(pattern, quarter, search), limit=0.0)


def test_is_linear_detects_quadratic_match():
    quadratic = regex(r"md/raid:\w+: (?:[a-z]+\d*[a-z\d]*: )?read error")
    assert not all(is_linear(quadratic, text) for text in repeating_texts(quadratic, 16 * KIB))
    linear = regex(r"md/raid:\w+: (?:[a-z][a-z\d]{0,31}: )?read error")
    assert all(is_linear(linear, text) for text in repeating_texts(linear, 16 * KIB))


# The modules of the fleet import packages that only .venv has.
EACH_MODULE = pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=[pytest.mark.one_python] if name.startswith("healthd.fleet.") else [])
        for name in module_names()
    ],
)


@EACH_MODULE
def test_match_of_every_pattern_takes_linear_time(module):
    slow = [
        f"{pattern.pattern[:80]} at {text[:60]!r}"
        for pattern in patterns_of(module)
        for text in repeating_texts(pattern, 64 * KIB)
        if not is_linear(pattern, text)
    ]
    assert slow == []


def test_is_linear_detects_quadratic_search():
    quadratic = regex(r"\s*\[[a-z]{1,80}\]$")
    assert not all(is_linear(quadratic, text, search=True) for text in repeating_texts_for_search(quadratic, 16 * KIB))
    linear = regex(r"\[[a-z]{1,80}\]\s*$")
    assert all(is_linear(linear, text, search=True) for text in repeating_texts_for_search(linear, 16 * KIB))


@EACH_MODULE
def test_search_of_every_pattern_takes_linear_time(module):
    slow = [
        f"{pattern.pattern[:80]} at {text[:60]!r}"
        for pattern in searched_patterns(module)
        for text in repeating_texts_for_search(pattern, 16 * KIB)
        if not is_linear(pattern, text, search=True)
    ]
    assert slow == []


def test_every_rule_is_pumped_at_each_repeat():
    """The rules must also not fail on these texts."""
    patterns_of_rules = {p.pattern for module in module_names() if ".rules." in module for p in patterns_of(module)}
    assert {rule.pattern.pattern for rule in RULES} <= patterns_of_rules
    for rule in RULES:
        for text in repeating_texts(rule.pattern, MAX_TEXT):
            assert (found := parse(text)) is None or found.kind != UNREAD


@EACH_MODULE
def test_every_pattern_matches_only_ascii_digits(module):
    assert [p.pattern for p in patterns_of(module) if not p.flags & re.ASCII] == []


def literals(call: ast.Call) -> Iterator[tuple[str, int]]:
    """Yield (pattern, flags) if the call is regex("...") with a literal text. A text composed of parts is a module
    value, or contains only healthd's own text."""
    if isinstance(call.func, ast.Name) and call.func.id == "regex":
        with contextlib.suppress(ValueError):
            text = ast.literal_eval(call.args[0])
            flags = (each.attr for each in ast.walk(call) if isinstance(each, ast.Attribute) and each.attr.isupper())
            yield text, sum(getattr(re, flag) for flag in flags)


def literal_patterns() -> Iterator[tuple[str, str, int]]:
    """Yield (location, pattern, flags) of each regex("...") with a literal text."""
    for path in sorted([*(ROOT / "healthd").rglob("*.py"), *(ROOT / "checks").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for text, flags in literals(node) if isinstance(node, ast.Call) else ():
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text, flags


def test_every_literal_pattern_compiles():
    found = list(literal_patterns())
    assert len(found) > 200
    for where, text, flags in found:
        try:
            re.compile(text, flags | re.ASCII)
        except re.error as error:
            pytest.fail(f"{where}: {error}")


@EACH_MODULE
def test_every_pattern_of_a_module_compiles(module):
    assert all(re.compile(p.pattern, p.flags) for p in patterns_of(module))


def test_lazy_pattern_compiles_at_first_use():
    late = LazyPattern(r"(?P<word>b+)(\d)?", re.ASCII)
    assert late.pattern == r"(?P<word>b+)(\d)?"
    assert "compiled" not in vars(late)
    assert late.match("bb1")["word"] == "bb"
    assert "compiled" in vars(late)
    for same in (copy.copy(late), copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        assert (same.pattern, same.flags) == (late.pattern, late.flags)


def test_lazy_pattern_behaves_like_compiled_one():
    text, flags = r"(?P<word>b+)(\d)?", re.ASCII | re.IGNORECASE
    late, compiled = LazyPattern(text, flags), re.compile(text, flags)
    for name in ("match", "fullmatch", "search", "findall", "split"):
        for line in ("", "bB1", "abb2b"):
            actual, expected = getattr(late, name)(line), getattr(compiled, name)(line)
            assert (
                getattr(actual, "groups", lambda actual=actual: actual)()
                == getattr(expected, "groups", lambda expected=expected: expected)()
            )
    assert late.sub("x", "abb2b") == compiled.sub("x", "abb2b")
    assert (late.flags, late.groups, late.groupindex) == (compiled.flags, compiled.groups, compiled.groupindex)
    assert [each.span() for each in late.finditer("abb2b")] == [each.span() for each in compiled.finditer("abb2b")]


def test_invalid_lazy_pattern_raises_at_first_use_or_in_site_file():
    late = LazyPattern("(", 0)
    with pytest.raises(re.error):
        late.match("")
    with compile_patterns_eagerly(), pytest.raises(re.error):
        regex("(")


ONCE_COMPILED = """
import healthd.agent.daemon
from healthd.agent.settings import registry
from healthd.common.text import LazyPattern, compile_patterns, regex
registry.built_in_checks()
waited = compile_patterns()
print(waited, compile_patterns(), type(regex("a")).__name__)
"""


def test_daemon_compiles_all_patterns_before_it_is_ready():
    process = subprocess.run([sys.executable, "-c", ONCE_COMPILED], capture_output=True, text=True, timeout=120)
    waited, remaining, kind = process.stdout.split()
    assert int(waited) > 200, process.stderr
    assert (remaining, kind) == ("0", "Pattern")


def test_regex_matches_only_ascii_digits():
    assert regex(r"\d+").match("٣") is None
    assert regex("k", re.IGNORECASE).match("\u212a") is None


@pytest.mark.parametrize(
    ("text", "decimal"), [("0123456789", True), ("٣", False), ("²", False), ("", False), ("-1", False), ("1_0", False)]
)
def test_is_decimal_accepts_only_ascii_digits(text, decimal):
    assert is_decimal(text) is decimal


def test_parse_ignores_digits_of_other_scripts():
    for row in LINES:
        for message in messages(row["text"]):
            found = parse(message.translate(OTHER_DIGITS))
            assert found is None or (found.code.isascii() and found.pci.isascii() and found.pid is None), message
            assert found is None or found.kind not in ("xid", "sxid"), message


def test_parse_rejects_text_longer_than_kernel_lines():
    oom = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/a,task={},pid=1,uid=0"
    room = MAX_TEXT - len(oom.format(""))
    assert parse(oom.format("a" * room)).pid == 1
    assert parse(oom.format("a" * (room + 1))) is None
    assert parse("NVRM: Xid (PCI:0000:3b:00): 79, " + "a" * 100_000).code == "79"


def test_max_text_is_longer_than_every_captured_line():
    """Therefore no fault is truncated."""
    data = (ROOT / "tests/data").glob("kernel_lines*.jsonl")
    texts = [json.loads(row)["text"] for path in data for row in path.read_text("utf-8").splitlines()]
    assert max(len(message) for text in texts for message in messages(text)) <= MAX_TEXT


def test_printable_replaces_line_ends_and_control_characters() -> None:
    assert printable("a\nb\x1b[31mc\u2028d\x00") == "a?b?[31mc?d?"


@given(st.text())
def test_printable_of_any_text_is_printable_and_has_same_length(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text)) == len(text)
    assert printable(printable(text)) == printable(text)


def test_harmless_keeps_only_colours_of_healthd():
    from healthd.cli.terminal import harmless

    coloured = "\033[1;31mcritical\033[0m\tpart\nnext\n"
    assert harmless(coloured) == coloured
    assert harmless("a\x1b[2Jb\x1b]0;title\x07c\x9b1md\re\x1b") == "a?[2Jb?]0;title?c?1md?e?"
