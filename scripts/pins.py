"""Write constraints.txt: for each supported Python, the newest versions of all packages in healthd's environments.

Run it with `make pins`. Nothing else changes the versions that tests, wheel and packages use. Each supported Python
must be installed. The optional dependencies `spark` are left out: pyspark is a source package of 456 MB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
# Build requirements of source packages that declare none: setuptools (listed in `dev`) and, before pip 24.1, also
# these:
BUILD_TOOLS = ("wheel",)
HEAD = """\
# Written by `make pins`. The versions used for .venv, .venv-3.X, the wheel and the packages, builds included. An
# installation of healthd is bound only to pyproject.toml.
"""


def main() -> int:
    interpreters = subprocess.run(
        ["scripts/setup.sh", "interpreters"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    pythons = dict(line.split(" ", 1) for line in interpreters.stdout.splitlines())
    if missing := [version for version in SUPPORTED if version not in pythons]:
        print(f"pins: no usable Python {', '.join(missing)} on this machine", file=sys.stderr)
        return 1
    found = {}
    for version in SUPPORTED:
        print(f"pins: resolving the newest versions on Python {version}", flush=True)
        found[version] = newest(pythons[version])
    (ROOT / "constraints.txt").write_text(HEAD + "".join(f"{line}\n" for line in pins(found)))
    return 0


def newest(python: str) -> dict[str, str]:
    """Return name and version of all packages that pip would install into an empty environment of this Python."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys() - {"spark"}
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_CONSTRAINT")}
    with tempfile.TemporaryDirectory(prefix="healthd-pins-") as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        options = ["--dry-run", "--ignore-installed", "--report", f"{folder}/report", f".[{','.join(sorted(extras))}]"]
        subprocess.run([*pip, *options, *BUILD_TOOLS], cwd=ROOT, env=environment, check=True)
        installed = json.loads(Path(folder, "report").read_text())["install"]
    return {
        package["metadata"]["name"]: package["metadata"]["version"] for package in installed if not package["is_direct"]
    }


def pins(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return one line for each package, or one line for each version if the Pythons (oldest first) have different
    versions."""
    names = sorted({name for versions in found.values() for name in versions}, key=str.lower)
    return [line for name in names for line in lines(name, {python: found[python].get(name) for python in found})]


def lines(name: str, versions: Mapping[str, str | None]) -> list[str]:
    """Return the lines of one package.

    The line may also apply to a Python that does not need the package, because a constraint installs nothing.
    """
    needed = {python: version for python, version in versions.items() if version}
    runs = [(version, [*pythons]) for version, pythons in groupby(needed, key=needed.__getitem__)]
    pin_lines = []
    for index, (version, pythons) in enumerate(runs):
        since = [f'python_version >= "{pythons[0]}"'] if index else []
        until = [f'python_version < "{runs[index + 1][1][0]}"'] if index + 1 < len(runs) else []
        marker = " and ".join(since + until)
        pin_lines.append(f"{name}=={version}{'; ' if marker else ''}{marker}")
    return pin_lines


if __name__ == "__main__":
    sys.exit(main())
