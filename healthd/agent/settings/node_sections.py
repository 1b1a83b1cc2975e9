"""[[node]] sections, which allow one settings file for several kinds of nodes.

    [[node]]
    match = ["gpu-[001-128]", "!gpu-042"]
    mode = "drain"
    [node.checks.gpu_count]
    expected = 8

A section applies to a node if one of its host lists contains the node's name and no list that begins with "!" does.
Host lists have Slurm's format: "rack[1-2]n[01-16]". If all lists begin with "!", the section applies to all other
nodes. Each setting in a section takes precedence over the same setting outside the sections, and over the same setting
in an earlier section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from healthd.agent.settings.limits import is_node_name
from healthd.common.codec import ConvertError, raise_mistakes, show
from healthd.common.slurm.hostlist import HostListError, expand

SECTIONS = "node"
# These settings are needed before the node's name is known, or define it.
FORBIDDEN_SETTINGS = ("node_name", "runtime_dir", "state_dir", "checks_dir", SECTIONS)


class Section(NamedTuple):
    """One [[node]] section.

    name      "[[node]] 2" for the second section in the file
    match     host lists, as written; () if `match` is not a list
    settings  top-level settings
    checks    [node.checks.*], as written
    """

    name: str
    match: tuple[str, ...]
    settings: Mapping[str, Any]
    checks: Any


def sections(table: Mapping[str, Any]) -> list[Section]:
    """Return a settings file's sections, in order. Raises one ConvertError that lists the mistakes in all sections."""
    found = read_sections(table)
    raise_mistakes([mistake for section in found for mistake in _mistakes(section)])
    return found


def read_sections(table: Mapping[str, Any]) -> list[Section]:
    """Return a settings file's sections without validating them.

    Raises ConvertError if `node` does not consist of [[node]] sections.
    """
    found = table.get(SECTIONS, [])
    if (
        not isinstance(found, Sequence)
        or isinstance(found, str)
        or not all(isinstance(each, Mapping) for each in found)
    ):
        raise ConvertError(f"{SECTIONS}: must be [[{SECTIONS}]] sections, got {show(found)}")
    return [_section(f"[[{SECTIONS}]] {number}", each) for number, each in enumerate(found, 1)]


def _section(name: str, table: Mapping[str, Any]) -> Section:
    match = table.get("match")
    settings = {key: value for key, value in table.items() if key not in ("match", "checks")}
    return Section(name, tuple(match) if isinstance(match, list) else (), settings, table.get("checks", {}))


def _mistakes(section: Section) -> list[str]:
    """Return the mistakes in `match`, and the settings that are not allowed in a section."""
    found = []
    if not section.match or not all(isinstance(hosts, str) for hosts in section.match):
        found.append('match: must be a list of host lists, such as match = ["gpu-[001-128]", "!gpu-042"]')
    else:
        found += [f"match: {problem}" for hosts in section.match if (problem := _host_list_problem(hosts))]
    refusal = "cannot be set for individual nodes; set it outside the sections"
    found += [f"{key}: {refusal}" for key in FORBIDDEN_SETTINGS if key in section.settings]
    kernel_log = section.settings.get("kernel_log")
    if isinstance(kernel_log, Mapping) and "patterns" in kernel_log:  # `healthd scan` reads logs of any node
        found.append(f"kernel_log.patterns: {refusal}")
    return [f"{section.name}: {mistake}" for mistake in found]


def _host_list_problem(hosts: str) -> str:
    try:
        nodes = expand(hosts.removeprefix("!"))
    except HostListError as error:
        return f"{show(hosts)}: {error}"
    if not nodes:
        return f"{show(hosts)} names no node"
    invalid = next((node for node in nodes if not is_node_name(node)), None)
    if invalid is None:
        return ""
    return f'{show(invalid)} is not the name of a node; write a host list without wildcards, such as "gpu-[001-128]"'


def applies_to(section: Section, node: str) -> bool:
    """Return True if the section applies to this node."""
    excluded = [hosts[1:] for hosts in section.match if hosts.startswith("!")]
    included = [hosts for hosts in section.match if not hosts.startswith("!")]
    return not _is_in(node, excluded) and (not included or _is_in(node, included))


def _is_in(node: str, host_lists: Sequence[str]) -> bool:
    return any(node in expand(hosts) for hosts in host_lists)
