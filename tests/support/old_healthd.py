"""An older healthd, of which tests/data/7adda38 has the program and what it wrote."""

from __future__ import annotations

import tarfile
from pathlib import Path

OLD = Path(__file__).parents[1] / "data" / "7adda38"


def unpack(folder: Path) -> Path:
    """The old program below `folder`: healthd/, checks/ and conf/profiles/."""
    with tarfile.open(OLD / "healthd.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
        archive.extractall(folder)
    return folder
