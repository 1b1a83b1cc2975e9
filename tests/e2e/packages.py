"""The package of this checkout and an older version of it, and nodes to install them on.

    with package_node("bookworm", built_package("bookworm")) as box:
        box.exec("apt-get", "install", "-y", "/debs/new.deb")

A package is built once per content of the tree (scripts/package.sh: a minute, and two more if the build root must be
created) and stored in CACHE. Needs root, Debian's archive and PyPI.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from requirements import require_network, require_programs, require_root
from systemd_container import CACHE, CHECKOUT, FRESH, SystemdContainer

PYTHONS = {"bookworm": "python3.11", "trixie": "python3.13"}
RELEASES = tuple(PYTHONS)
# procps is for the tests. All other dependencies must be in every Debian, because these nodes have no network.
NODE_PACKAGES = (*FRESH, "procps")
OLD_VERSION = "0.0.9"
ARCHIVE, PYPI = "http://deb.debian.org/debian", os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
BUILD_SECONDS = 900.0
MAX_CACHED = 4  # number of packages of other trees in CACHE
NOT_IN_PACKAGE = re.compile(r"^(tests|bench|\.ci)/")
CODE_PATH = "opt/healthd/lib/{python}/site-packages/healthd"


def built_package(release: str) -> Path:
    """Return the .deb of the current content of the checkout, committed or not."""
    require_root()
    require_programs("git", "mmdebstrap", "systemd-nspawn", packages="git mmdebstrap systemd-container")
    folder = CACHE / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"lock-{release}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = folder / f"{release}-{_tree_digest()}"
        if not built.exists():
            require_network(f"{ARCHIVE}/dists/{release}/InRelease", f"{PYPI}/pip/")
            _build(release, built)
            others = sorted(folder.glob(f"{release}-*"), key=lambda path: path.stat().st_mtime)
            for other in others[:-MAX_CACHED]:
                shutil.rmtree(other)
        os.utime(built)
        (package,) = built.glob("*.deb")
        return package


def _tree_digest() -> str:
    """Return a digest of everything that goes into a package."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240, check=True).stdout
    digest = hashlib.sha256()
    for name in sorted(filter(None, listed.split("\0"))):
        path = CHECKOUT / name
        if not NOT_IN_PACKAGE.match(name) and os.path.lexists(path):
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
            digest.update(repr((name, hashlib.sha256(content).digest())).encode())
    return digest.hexdigest()[:16]


def _build(release: str, into: Path) -> None:
    building = into.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)
    result = subprocess.run(
        [CHECKOUT / "scripts/package.sh", release],
        env={**os.environ, "OUT": str(building)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    building.rename(into)


def older_package(package: Path, release: str, folder: Path) -> Path:
    """Return the same package with version OLD_VERSION."""
    tree = folder / "older"
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True, timeout=120)
    set_old_version(tree, release)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: [^-]*", f"Version: {OLD_VERSION}", control.read_text()))
    older = folder / "older.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", tree, older]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return older


def set_old_version(tree: Path, release: str) -> None:
    """Make the program in `tree`, which has the folders of the package, report OLD_VERSION."""
    code = tree / CODE_PATH.format(python=PYTHONS[release])
    (code / "__init__.py").write_text(f'"""An older version."""\n\n__version__ = "{OLD_VERSION}"\n')


def package_node(release: str, folder: Path, *, kmsg: bool = False) -> SystemdContainer:
    """Return a node of that release without network, with the dependencies of the package. `folder` is visible
    there."""
    options = ["--system-call-filter=clock_adjtime"]  # to query the clock; only nspawn forbids it
    packages = (*NODE_PACKAGES, PYTHONS[release])
    return SystemdContainer(fresh=release, packages=packages, binds=[folder], options=options, kmsg=kmsg)
