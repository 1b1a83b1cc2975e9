"""Other versions of Slurm besides the installed one: the packages of a newer Debian, unpacked and patched to run here.

    programs("24.11")   the directory with its sinfo, scontrol, slurmctld, slurmd, ...; built once, about 10 s

apt fetches the packages with their dependencies and checks the archive's signature; nothing is installed. The programs
are patched to use the C library and the Slurm plugins that were unpacked with them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from requirements import require_programs

CACHE = Path("/var/cache/healthd-tests")
# The Debian release with this version. sid changes: with another version in it, 26.05 is not available.
DEBIAN = {"24.11": "trixie", "26.05": "sid"}
MIRROR = "http://deb.debian.org/debian"
RETRY_SECONDS = 10.0
FETCH_SECONDS = 80.0  # three attempts within the 300 s that a test may take
PACKAGES = ("slurmctld", "slurmd", "slurmdbd", "slurm-client", "munge")
COMMANDS = ("sinfo", "squeue", "scontrol", "sbatch", "srun", "salloc", "scancel", "sacct", "sacctmgr", "sdiag")
DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "slurmdbd")


_build_errors: dict[str, str] = {}  # version -> error; built only once per run of the tests


class VersionUnavailable(Exception):
    """The reason why this version cannot be built here, one sentence or more."""


def programs(version: str) -> Path:
    """Return its directory, built at the first use.

    A failure with sid skips the test, because sid may be broken for a day and changes. Any other failure fails the
    test.
    """
    require_programs("mmdebstrap", "patchelf", packages="mmdebstrap patchelf debian-archive-keyring")
    CACHE.mkdir(parents=True, exist_ok=True)
    root = CACHE / f"slurm-{version}-with-slurmdbd"  # older caches lack slurmdbd
    with open(CACHE / "slurm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            try:
                _build(root, version)
            except VersionUnavailable as error:
                _build_errors[version] = str(error)
    if build_error := _build_errors.get(version):
        reason = f"no Slurm {version} to be had from Debian {DEBIAN[version]}: {build_error}"
        pytest.skip(reason) if DEBIAN[version] == "sid" else pytest.fail(reason)
    return root / "programs"


def _build(root: Path, version: str) -> None:
    """Build the version. Raise VersionUnavailable, immediately if a build failed before in this run."""
    if version in _build_errors:
        raise VersionUnavailable(_build_errors[version])
    building = root.with_name(root.name + ".building")
    _fetch(building, DEBIAN[version])
    try:
        _patch(building, root)
        # Only /programs is used by path, so it runs only from its final place.
        building.rename(root)
        _verify(root / "programs", version)
    except (VersionUnavailable, OSError, StopIteration) as error:  # a package with another layout
        shutil.rmtree(root, ignore_errors=True)
        raise VersionUnavailable(f"its packages do not run here: {error!r}") from error


def _fetch(into: Path, release: str) -> None:
    """Fetch the packages, with three attempts: mirrors time out, and change while they are read."""
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={','.join(PACKAGES)}", f"--keyring={keys}"]
    command += [
        "--aptopt=Acquire::Check-Valid-Until false",
        "--aptopt=Acquire::http::Timeout 30",
        "--aptopt=Acquire::Retries 0",
    ]
    for attempts_left in (2, 1, 0):
        shutil.rmtree(into, ignore_errors=True)
        try:
            _run(*command, release, str(into), MIRROR, seconds=FETCH_SECONDS)
            return
        except VersionUnavailable:
            if not attempts_left:
                raise
            time.sleep(RETRY_SECONDS)


def _verify(folder: Path, version: str) -> None:
    """Check that each program loads its libraries and has this version (slurmstepd and slurmdbd have no -V)."""
    conf = folder / "slurm.conf"
    lines = ("ClusterName=test", "SlurmctldHost=localhost", f"PluginDir={folder}/plugins", "NodeName=n1")
    conf.write_text("".join(f"{line}\n" for line in (*lines, "PartitionName=gpu Nodes=n1")))
    for name in (*COMMANDS, "slurmctld", "slurmd"):
        output = _run("env", f"SLURM_CONF={conf}", str(folder / name), "-V", seconds=240)
        if not re.match(rf"slurm(-wlm)? {re.escape(version)}\.", output):
            raise VersionUnavailable(f"{name} -V says {output.strip()}")


def _run(*command: str, seconds: float) -> str:
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VersionUnavailable(str(error)) from error
    if result.returncode != 0:
        raise VersionUnavailable(
            f"{' '.join(command)}: exit status {result.returncode}: {result.stderr.strip()[-1500:]}"
        )
    return result.stdout


def _patch(building: Path, root: Path) -> None:
    """Patch the programs in `building` for `root`: they use the interpreter and the libraries of their packages."""
    libraries = next(building.glob("usr/lib/*/slurm-wlm")).parent
    interpreter = next(libraries.glob("ld-linux*.so.*"))
    library_dir = root / libraries.relative_to(building)
    rpath_options = ("--force-rpath", "--set-rpath", f"{library_dir}/slurm-wlm:{library_dir}")
    folder = building / "programs"
    folder.mkdir()
    for name in (*COMMANDS, *DAEMONS):
        candidates = (f"usr/sbin/{name}-wlm", f"usr/sbin/{name}", f"usr/bin/{name}")
        found = next(building / place for place in candidates if (building / place).exists())
        program = Path(os.path.realpath(found))
        _run(
            "patchelf",
            "--set-interpreter",
            str(library_dir / interpreter.name),
            *rpath_options,
            str(program),
            seconds=240,
        )
        (folder / name).symlink_to(os.path.relpath(program, folder))
    for library in (libraries / "slurm-wlm").glob("*.so"):  # it would take precedence
        if not library.is_symlink():
            _run("patchelf", "--remove-rpath", str(library), seconds=240)
    (folder / "plugins").symlink_to(os.path.relpath(libraries / "slurm-wlm", folder))
