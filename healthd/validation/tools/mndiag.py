"""`dcgmi mndiag` (DCGM 4.3 and later): NVIDIA's diagnostic over several nodes of an NVLink domain, as JSON.

It runs on trays of GB200 and GB300 (github.com/NVIDIA/DCGM@72fa3fe, dcgmi/MnDiag.cpp;
docs.nvidia.com/datacenter/dcgm/latest/reference/multi-node-diagnostics/mnubergemm.html). The only test is mnubergemm,
which computes and communicates on all GPUs at the same time. The node that runs dcgmi connects to the DCGM host engine
of each host, and starts the test there with MPI and SSH.

The exit status does not distinguish a failed test: dcgmi returns 0 once it has printed a result. Therefore only the
JSON counts. "Fail" without a failed GPU is an error of MPI or SSH, which proves nothing about the hardware.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from healthd.common.text import printable
from healthd.validation.measurement import Measurement, NotUnderstood, is_excused
from healthd.validation.tools.dcgmi import GPU_IN_USE, details, first_object, tables

NAME_KEY, NAME = "DCGM Diagnostic", "DCGM Multi-Node Diagnostic"
TEST = "dcgm_mnubergemm"
MAX_HOSTS = 72  # DCGM_MAX_NUM_HOSTS in dcgmlib/dcgm_structs.h
MAX_RESULTS = 4096
# Part of the time limit that is left for connections and the start of MPI. The test itself gets the rest.
SETUP_SECONDS = 60.0
MIN_SECONDS = 2 * SETUP_SECONDS


def command(program: str, hosts: Sequence[str], seconds: float) -> tuple[str, ...]:
    """Return the command for at most `seconds` in total. Without a time, mnubergemm runs for an hour."""
    duration = f"mnubergemm.time_to_run={max(seconds - SETUP_SECONDS, SETUP_SECONDS):.0f}"
    return (program, "mndiag", "--hostList", ";".join(hosts), "--run", "mnubergemm", "--parameters", duration, "--json")


def parse(text: str, hosts: Sequence[str]) -> list[Measurement]:
    """Parse the output into one measurement for each GPU. The part is "HOST DCGM 3". Raises NotUnderstood.

    A GPU or a requested host without a result is reported as not measured.
    """
    document = first_object(text, lambda found: found.get(NAME_KEY) == NAME)
    if document is None:
        raise NotUnderstood("this is not JSON from dcgmi mndiag")
    reported = tables(document.get("hosts"))
    hosts_by_number = _hosts_by_number(reported)
    names = {number: printable(str(host.get("hostname", "")))[:64] for number, host in hosts_by_number.items()}
    source = f"DCGM {_version(reported)}".strip()
    tests = [test for category in tables(document.get("test_categories")) for test in tables(category.get("tests"))]
    results = [result for test in tests for result in tables(test.get("results"))][:MAX_RESULTS]
    found = [_measurement(result, names, source) for result in results]
    error = _error(document, tests)
    if not found:
        raise NotUnderstood(error or "dcgmi mndiag has no results")
    has_failed = any(str(test.get("status", "")).lower() == "fail" for test in tests) or "runtime_error" in document
    if has_failed and not any(measurement.state == "failed" for measurement in found):
        message = error or "DCGM reports a failure of the test, but no GPU that failed"
        # The GPUs may have passed only because the test ended early.
        found = [
            measurement._replace(state="not_measured", message=message)
            if measurement.state == "passed"
            else measurement
            for measurement in found
        ]
    measured_gpus = _measured_gpus(results)
    measured_hosts = {_short(names.get(number, "")) for number in measured_gpus}
    for number, host in hosts_by_number.items():
        found += _unmeasured(host, names[number] or f"host {_shown(number)}", measured_gpus.get(number, set()), source)
    found += [
        Measurement(TEST, host, None, "", "not_measured", "DCGM reports no result for a GPU of this host", source)
        for host in hosts
        if _short(host) not in measured_hosts
    ]
    return found


def _measured_gpus(results: Sequence[dict[str, Any]]) -> dict[int, set[str]]:
    """Return the GPUs that have a result, by the `host_id` of their host."""
    found: dict[int, set[str]] = defaultdict(set)
    for result in results:
        number = result.get("host_id")
        if type(number) is int and result.get("entity_group") == "GPU":
            found[number].add(_entity(result))
    return found


def _unmeasured(host: dict[str, Any], name: str, measured: set[str], source: str) -> list[Measurement]:
    """Return one measurement for each GPU in the host's `entities` that has no result.

    GPUs that are only counted in `num_entities` have one measurement together, because their numbers are unknown. It
    is left out if no GPU has a result, because the whole host is then reported.
    """
    entities = tables(host.get("entities"))
    gpus = [_entity(entity) for entity in entities if entity.get("entity_group") == "GPU"]
    listed = dict.fromkeys(gpus[:MAX_RESULTS])
    message = "DCGM lists this GPU, but has no result for it"
    found = [
        Measurement(TEST, f"{name} DCGM {gpu}", None, "", "not_measured", message, source)
        for gpu in listed
        if gpu not in measured
    ]
    number = host.get("num_entities")
    count = number - (len(entities) - len(gpus)) if type(number) is int else 0
    if measured and count > len(measured | listed.keys()):
        message = f"DCGM counts {_shown(count)} GPUs of this host, but has results for {len(measured)}"
        found.append(Measurement(TEST, name, None, "", "not_measured", message, source))
    return found


def _entity(entity: dict[str, Any]) -> str:
    return printable(str(entity.get("entity_id", "")))[:8]


def _hosts_by_number(hosts: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the hosts by the `host_id` that the results refer to, which is the position of a host without one.

    Raises NotUnderstood if a `host_id` is not an integer of at least 0 or occurs twice, because the results could then
    belong to another host.
    """
    found: dict[int, dict[str, Any]] = {}
    for position, host in enumerate(hosts):
        number = host.get("host_id", position)
        if type(number) is not int or number < 0:
            raise NotUnderstood(f"dcgmi mndiag's hosts cannot be read: host_id {_shown(number)} is not an integer >= 0")
        if number in found:
            raise NotUnderstood(f"dcgmi mndiag's hosts cannot be read: two hosts have the host_id {_shown(number)}")
        found[number] = host
    return found


def _shown(value: object) -> str:
    return printable(str(value))[:16]


def _measurement(result: dict[str, Any], names: Mapping[int, str], source: str) -> Measurement:
    number = result.get("host_id")
    host = names.get(number, "") if type(number) is int else ""
    kind = "" if result.get("entity_group") == "GPU" else f"{printable(str(result.get('entity_group', '')))[:16]} "
    part = f"{host or f'host {printable(str(number))[:8]}'} DCGM {kind}{_entity(result)}".strip()
    status = str(result.get("status", "")).strip().lower()
    text = details(result)
    if status == "pass":
        return Measurement(TEST, part, None, "", "passed", text or "passed", source)
    is_use = any(phrase in text.lower() for phrase in GPU_IN_USE) or is_excused(text)
    if status == "fail" and not is_use:
        return Measurement(TEST, part, None, "", "failed", text or "failed", source)
    message = f"DCGM reports {printable(status)[:32] or 'nothing'}{f': {text}' if text else ''}"
    return Measurement(TEST, part, None, "", "not_measured", message, source)


def _error(document: dict[str, Any], tests: Sequence[dict[str, Any]]) -> str:
    """Return DCGM's message about an error that belongs to no GPU, or ""."""
    errors = [test["mpi_error"] for test in tests if isinstance(test.get("mpi_error"), dict)]
    errors += tables(document.get("global_errors"))
    messages = [document.get("runtime_error"), *(error.get("warning") for error in errors)]
    # An empty MPI error has only the prefix "Error: ".
    texts = [" ".join(str(message).split()) for message in messages if message]
    return printable(next((text for text in texts if text not in ("", "Error:")), ""))[:300]


def _version(hosts: Sequence[dict[str, Any]]) -> str:
    versions = (printable(str(host.get("dcgm_version", "")))[:16] for host in hosts)
    return next((version for version in versions if version not in ("", "unknown")), "")


def _short(host: str) -> str:
    return host.partition(".")[0].lower()
