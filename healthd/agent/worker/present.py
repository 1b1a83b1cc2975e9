"""What this node has now, as settings of a check; the check itself says it: the worker's side of `healthd baseline`.

What looks broken (a port that is down, a GPU that does not answer) is left out with a reason, never taken as normal.
What comes and goes (mounts of containers and users, virtual functions, ports that nobody uses) is left out silently.
"""

from __future__ import annotations

from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.registry import Check
from healthd.common.codec import dump, load
from healthd.common.model import Entry, LeftOut
from healthd.host.host import Host
from healthd.nvidia.nvml import NvmlError


def look(host: Host, check: Check, config: CheckConfig) -> list[Entry | LeftOut]:
    """Ask one check. If it raises, the whole check is left out."""
    found: list[Entry | LeftOut] = []
    try:
        for item in check.baseline(host, config):
            found.append(_said(check, item))
    except NvmlError as error:
        if not host.nvml_is_open:
            raise
        found.append(LeftOut(check.name, str(error)))
    return found


def _said(check: Check, item: object) -> Entry | LeftOut:
    """The item as it is sent. Raises TypeError if the check may not say it, ConvertError if it is not plain data."""
    settings = check.wants.settings if check.wants else ()
    if isinstance(item, Entry) and (item.check, item.setting in settings) == (check.name, True):
        return load(Entry, dump(item))
    if isinstance(item, LeftOut) and (item.check, item.setting in ("", *settings)) == (check.name, True):
        return load(LeftOut, dump(item))
    raise TypeError(f'the check "{check.name}" gave {item!r:.100}: neither an Entry nor a LeftOut of its BASELINE')
