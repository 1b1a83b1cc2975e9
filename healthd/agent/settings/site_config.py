"""`healthd.api.CheckConfig`, the base class of a site's Config. It contains the common settings of checks as a
dataclass.

A site's check declares a standard library dataclass. A built-in check's Config is a Struct, because defining a Struct
is 50 times as fast.
"""

from __future__ import annotations

import dataclasses

from msgspec import NODEFAULT

from healthd.agent.settings import config
from healthd.common.codec import fields_of
from healthd.common.values import type_hints

_HINTS = type_hints(config.CheckConfig)

CheckConfig = dataclasses.make_dataclass(
    "CheckConfig",
    [
        (f.name, _HINTS[f.name], dataclasses.field(default_factory=dict) if f.default is NODEFAULT else f.default)
        for f in fields_of(config.CheckConfig)
    ],
    frozen=True,
    slots=True,
)
