"""`dcgmi diag -r LEVEL -j` (github.com/NVIDIA/DCGM): NVIDIA's own diagnostic, as JSON from DCGM 2, 3 and 4.

A category has tests, and a test has results. A result is for one GPU or for all GPUs. The key for one GPU is "gpu_id"
("gpu_ids" before DCGM 3.1, "entity_group" and "entity_id" since DCGM 4). The key for all GPUs is "gpu_ids": "0,1,2". A
result's status is PASS, FAIL, WARN or SKIP, in upper or lower case.

The category Deployment ("software" since DCGM 4) checks persistence mode, permissions and libraries. A failure there is
about the node's configuration, not about broken hardware. It is reported, but does not count as a failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from healthd.common.text import printable, regex
from healthd.validation.measurement import Measurement, NotUnderstood

ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")  # root keys since DCGM 4, and before
# Time limit for each level. NVIDIA states "seconds" and 2, 30 and 90 minutes (DCGM User Guide, "DCGM Diagnostics").
SECONDS = {1: 60.0, 2: 600.0, 3: 3600.0, 4: 3 * 3600.0}
MAX_RESULTS = 4096
# errors because the GPU is in use, which prove nothing about the GPU
GPU_IN_USE = ("busy or unavailable", "out of memory")
_SIMPLE = regex(r"[^a-z0-9]+")


def command(program: str, level: int) -> tuple[str, ...]:
    return (program, "diag", "-r", str(level), "-j")


def parse(text: str) -> list[Measurement]:
    """Parse the output. Raises NotUnderstood. Text around the JSON, such as dcgmi's warnings, is skipped."""
    document = _document(text)
    root = next((document[key] for key in ROOTS if isinstance(document.get(key), dict)), None)
    if root is None:
        raise NotUnderstood("this is not JSON from dcgmi diag")
    source = f"DCGM {_version(document, root)}".strip()
    found: list[Measurement] = []
    for entry in _results(root):
        found.append(_measurement(*entry, source))
        if len(found) >= MAX_RESULTS:
            break
    if not found:
        error = root.get("runtime_error") or root.get("Warning") or "dcgmi diag has no results"
        raise NotUnderstood(printable(str(error))[:300])
    return found


def _document(text: str) -> dict[str, Any]:
    """Return the first JSON object with a known root."""
    document = first_object(text, lambda found: any(key in found for key in ROOTS))
    if document is None:
        raise NotUnderstood("this is not JSON from dcgmi diag")
    return document


def first_object(text: str, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Return the first JSON object in a text that is wanted, or None."""
    decoder, at, tries = json.JSONDecoder(), text.find("{"), 0
    while at >= 0 and tries < 20:
        try:
            document, _ = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict) and is_wanted(document):
            return document
        at, tries = text.find("{", at + 1), tries + 1
    return None


def _version(document: dict[str, Any], root: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    version = (metadata.get("version") if isinstance(metadata, dict) else None) or root.get("version") or ""
    return printable(str(version))[:16]


def _results(root: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (category, test, result)."""
    for category in tables(root.get("test_categories")):
        for test in tables(category.get("tests")):
            for result in tables(test.get("results")):
                yield str(category.get("category", "")), str(test.get("name", "")), result


def tables(value: object) -> list[dict[str, Any]]:
    """Return the objects in a list of JSON, or [] if it is not a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _measurement(category: str, test: str, result: dict[str, Any], source: str) -> Measurement:
    name = "dcgm_" + _SIMPLE.sub("_", test.lower()).strip("_")[:40]
    status = str(result.get("status", "")).strip().lower()
    text = details(result)
    is_setup = category.lower() == "deployment" or name == "dcgm_software"
    if status == "pass":
        return Measurement(name, _part(result), None, "", "passed", text or "passed", source)
    if status == "fail" and not is_setup and not any(phrase in text.lower() for phrase in GPU_IN_USE):
        return Measurement(name, _part(result), None, "", "failed", text or "failed", source)
    status_text = f"DCGM reports {status or 'nothing'}"
    status_text += ", about the node's configuration" if is_setup and status in ("fail", "warn") else ""
    return Measurement(
        name, _part(result), None, "", "not_measured", f"{status_text}{f': {text}' if text else ''}", source
    )


def _part(result: dict[str, Any]) -> str:
    """Return DCGM's own number of the GPU: DCGM does not report PCI addresses.

    If the result is for several GPUs or the node, return "".
    """
    for key in ("gpu_id", "gpu_ids"):
        if key in result:
            gpu_number = str(result[key])
            return f"DCGM {printable(gpu_number)[:8]}" if "," not in gpu_number and gpu_number else ""
    group, number = result.get("entity_group"), result.get("entity_id")
    if group is None or number is None:
        return ""
    return f"DCGM {printable(str(number))[:8]}" if group == "GPU" else f"DCGM {printable(f'{group} {number}')[:24]}"


def details(result: dict[str, Any]) -> str:
    """Return the details of a result. Warnings are strings or, since DCGM 3, objects with the key "warning"."""
    warnings = result.get("warnings") or result.get("info") or []
    items = warnings if isinstance(warnings, list) else [warnings]
    texts = [str(item.get("warning", "")) if isinstance(item, dict) else str(item) for item in items[:3]]
    return printable(" ".join(" ".join(texts).split()))[:300]
