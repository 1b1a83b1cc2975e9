"""Read settings files."""

from __future__ import annotations

from typing import Any

from healthd.agent.settings.config import ConfigError
from healthd.common import ownership, toml
from healthd.common.codec import ConvertError


def read_file(path: str, required: bool, setting: str = "") -> dict[str, Any]:
    """Return the table of a TOML file, or {} if the file is absent and not required.

    `setting` is the setting that names the file, for the error message. Raises ConfigError if the file is not TOML or
    cannot be read. The file determines what runs as root, so it is also an error if a user other than root and
    healthd's own user could have written the file.
    """
    try:
        return parse_toml(ownership.read(path), path)
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path}: no such file") from None
        return {}
    except ownership.Untrusted as error:
        raise ConfigError(str(error.with_context(path, setting))) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def parse_toml(text: str | bytes, source: str) -> dict[str, Any]:
    """Return the table in a TOML text. Raises ConfigError; the message names the source."""
    try:
        return toml.parse(text)
    except ConvertError as error:
        raise ConfigError(f"{source}: not TOML: {error}") from None
