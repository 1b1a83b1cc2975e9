"""The expected content of a healthd wheel: the package, the files that set up a node, and the metadata of pip.

.venv/bin/python tests/support/wheel_files.py dist/healthd-0.1.0-py3-none-any.whl     compares it with this checkout
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 1_850_000  # checks, GPU events and fleet rules for the NVL72 took it above 1.8 MB
# File or folder of the tree -> its place below PREFIX of `pip install` (docs/deploy.md, docs/prolog-epilog.md).
SHARE = {
    "man/healthd.toml.5": "share/man/man5/healthd.toml.5",
    "man/healthd.8": "share/man/man8/healthd.8",
    "conf/healthd.toml": "share/healthd/healthd.toml",
    "conf/profiles": "share/healthd/profiles",
    "packaging/systemd/healthd.service": "share/healthd/healthd.service",
    "packaging/systemd/healthd-hooks.path": "share/healthd/healthd-hooks.path",
    "packaging/systemd/healthd-hooks.service": "share/healthd/healthd-hooks.service",
    "packaging/hooks": "share/healthd/hooks",
    "packaging/systemd/healthd-evidence.path": "share/healthd/healthd-evidence.path",
    "packaging/systemd/healthd-evidence.service": "share/healthd/healthd-evidence.service",
    "packaging/systemd/healthd-repair.path": "share/healthd/healthd-repair.path",
    "packaging/systemd/healthd-repair.service": "share/healthd/healthd-repair.service",
    "packaging/prometheus": "share/healthd/prometheus",
    "packaging/systemd/healthd-exec-checks.conf": "share/healthd/healthd-exec-checks.conf",
    "packaging/slurm": "share/healthd/slurm",
    "packaging/transport": "share/healthd/transport",
}
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "LICENSE"}


def find_differences(wheel: Path, tree: Path = ROOT) -> list[str]:
    """Return a message for each difference between a wheel and `tree`, from which it was built."""
    expected, found, size = dict(_expected_files(tree)), dict(_wheel_files(wheel)), wheel.stat().st_size
    different = [name for name in expected.keys() & found.keys() if expected[name] != found[name]]
    return [
        *(f"not in the wheel: {name}" for name in sorted(expected.keys() - found.keys())),
        *(f"unexpected in the wheel: {name}" for name in sorted(found.keys() - expected.keys())),
        *(f"differs from the tree: {name}" for name in sorted(different)),
        *([f"{size} bytes, above {LIMIT_BYTES}"] if size > LIMIT_BYTES else []),
    ]


def _expected_files(tree: Path) -> Iterator[tuple[str, bytes | None]]:
    """Yield (name in the wheel, content) of the package, following symbolic links and without compiled files."""
    for path in _files(tree / "healthd"):
        if "__pycache__" not in path.parts:
            yield str(path.relative_to(tree)), path.read_bytes()
    for source, target in SHARE.items():
        for path in _files(tree / source):
            yield str(Path("data") / target / path.relative_to(tree / source)), path.read_bytes()
    for name in METADATA:
        yield f"metadata/{name}", None


def _wheel_files(wheel: Path) -> Iterator[tuple[str, bytes | None]]:
    """Yield the same for a wheel: "healthd-0.1.0.data/data/share/..." is "data/share/..."; metadata has its base
    name only."""
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            top, _, below = name.partition("/")
            if top.startswith("healthd-") and top.endswith(".dist-info"):
                yield f"metadata/{below.removeprefix('licenses/')}", None
            elif top.startswith("healthd-") and top.endswith(".data"):
                yield below, archive.read(name)
            else:
                yield name, archive.read(name)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path, followlinks=True):
        yield from (Path(folder, name) for name in names)


if __name__ == "__main__":
    wrong = find_differences(Path(sys.argv[1]))
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)
