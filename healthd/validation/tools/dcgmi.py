"""`dcgmi diag -r LEVEL -j` (github.com/NVIDIA/DCGM): NVIDIA's own diagnostic, as JSON of DCGM 2, 3 and 4.

Categories have tests, a test has results: of one GPU ("gpu_id", before DCGM 3.1 "gpu_ids", since DCGM 4
"entity_group" and "entity_id") or of all ("gpu_ids": "0,1,2"). A status is PASS, FAIL, WARN or SKIP, in any case.

What fails in the category Deployment ("software" since DCGM 4: persistence mode, permissions, libraries) says how
the node is set up, not that a part is broken: it is told and does not count as a failure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from healthd.common.text import printable, regex
from healthd.validation.measurement import Measurement, NotUnderstood

ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")  # DCGM 4, and before
# How long a level may take: NVIDIA says seconds, 2, 30 and 90 minutes (DCGM User Guide, "DCGM Diagnostics").
SECONDS = {1: 60.0, 2: 600.0, 3: 3600.0, 4: 3 * 3600.0}
MOST_RESULTS = 4096
SOMEBODY_ELSE = ("busy or unavailable", "out of memory")  # has the GPU, or its memory: says nothing of it
_SIMPLE = regex(r"[^a-z0-9]+")


def command(program: str, level: int) -> tuple[str, ...]:
    return (program, "diag", "-r", str(level), "-j")


def parse(text: str) -> list[Measurement]:
    """Raises NotUnderstood. What stands before and behind the JSON is passed over: dcgmi prints warnings there."""
    told = _document(text)
    root = next((told[key] for key in ROOTS if isinstance(told.get(key), dict)), None)
    if root is None:
        raise NotUnderstood("this is no JSON of dcgmi diag")
    source = f"DCGM {_version(told, root)}".strip()
    found: list[Measurement] = []
    for one in _results(root):
        found.append(_measurement(*one, source))
        if len(found) >= MOST_RESULTS:
            break
    if not found:
        error = root.get("runtime_error") or root.get("Warning") or "dcgmi diag has no results"
        raise NotUnderstood(printable(str(error))[:300])
    return found


def _document(text: str) -> dict[str, Any]:
    """The first JSON table that is one of ours."""
    decoder, at, tries = json.JSONDecoder(), text.find("{"), 0
    while at >= 0 and tries < 20:
        try:
            told, _ = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            told = None
        if isinstance(told, dict) and any(key in told for key in ROOTS):
            return told
        at, tries = text.find("{", at + 1), tries + 1
    raise NotUnderstood("this is no JSON of dcgmi diag")


def _version(told: dict[str, Any], root: dict[str, Any]) -> str:
    metadata = told.get("metadata")
    version = (metadata.get("version") if isinstance(metadata, dict) else None) or root.get("version") or ""
    return printable(str(version))[:16]


def _results(root: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Category, test, result."""
    for category in _tables(root.get("test_categories")):
        for test in _tables(category.get("tests")):
            for result in _tables(test.get("results")):
                yield str(category.get("category", "")), str(test.get("name", "")), result


def _tables(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _measurement(category: str, test: str, result: dict[str, Any], source: str) -> Measurement:
    name = "dcgm_" + _SIMPLE.sub("_", test.lower()).strip("_")[:40]
    status = str(result.get("status", "")).strip().lower()
    words = _words(result)
    is_setup = category.lower() == "deployment" or name == "dcgm_software"
    if status == "pass":
        return Measurement(name, _part(result), None, "", "passed", words or "passed", source)
    if status == "fail" and not is_setup and not any(one in words.lower() for one in SOMEBODY_ELSE):
        return Measurement(name, _part(result), None, "", "failed", words or "failed", source)
    about = f"DCGM says {status or 'nothing'}"
    about += ", of how the node is set up" if is_setup and status in ("fail", "warn") else ""
    return Measurement(name, _part(result), None, "", "not_measured", f"{about}{f': {words}' if words else ''}", source)


def _part(result: dict[str, Any]) -> str:
    """DCGM's own number of a GPU: it is not told which PCI address that is. "" = several, or the node."""
    for key in ("gpu_id", "gpu_ids"):
        if key in result:
            told = str(result[key])
            return f"DCGM {printable(told)[:8]}" if "," not in told and told else ""
    group, number = result.get("entity_group"), result.get("entity_id")
    if group is None or number is None:
        return ""
    return f"DCGM {printable(str(number))[:8]}" if group == "GPU" else f"DCGM {printable(f'{group} {number}')[:24]}"


def _words(result: dict[str, Any]) -> str:
    """What it says of it: warnings are texts, or since DCGM 3 tables with "warning"."""
    told = result.get("warnings") or result.get("info") or []
    some = told if isinstance(told, list) else [told]
    texts = [str(one.get("warning", "")) if isinstance(one, dict) else str(one) for one in some[:3]]
    return printable(" ".join(" ".join(texts).split()))[:300]
