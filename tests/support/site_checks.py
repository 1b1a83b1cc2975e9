"""Checks of a site that use everything a check may declare: tests/data/site_checks."""

from __future__ import annotations

import shutil
from pathlib import Path

SITE_CHECKS = Path(__file__).parents[1] / "data" / "site_checks"


def install_checks(folder: Path) -> str:
    """Copy the checks into `folder`/checks.d and return settings that use them."""
    checks_dir = folder / "checks.d"
    checks_dir.mkdir()
    checks_dir.chmod(0o755)
    for source in SITE_CHECKS.glob("*.py"):
        shutil.copyfile(source, checks_dir / source.name)
        (checks_dir / source.name).chmod(0o644)
    return (SITE_CHECKS / "healthd.toml").read_text().replace("CHECKS_DIR", str(checks_dir))
