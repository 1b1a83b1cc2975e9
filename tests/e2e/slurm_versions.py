"""Other versions of Slurm beside this machine's own: the packages of a newer Debian, unpacked and made to run here.

    programs("24.11")   the directory with its sinfo, scontrol, slurmctld, slurmd, ...; built once, about 10 s

apt fetches the packages with all that they need and checks them against the archive's signature; nothing is
installed. Their programs are then told to use the C library and Slurm plugins that were unpacked with them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from requirements import require_programs

CACHE = Path("/var/cache/healthd-tests")
# The archive that has it. sid moves on: when it has another version, there is no 26.05 to be had.
DEBIAN = {"24.11": "trixie", "26.05": "sid"}
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
COMMANDS = ("sinfo", "squeue", "scontrol", "sbatch", "srun", "salloc", "scancel", "sacct", "sacctmgr", "sdiag")
DAEMONS = ("slurmctld", "slurmd", "slurmstepd")


def programs(version: str) -> Path:
    """Its directory, made at the first use. Skips the test where Debian no longer has this version."""
    require_programs("mmdebstrap", "patchelf", packages="mmdebstrap patchelf debian-archive-keyring")
    CACHE.mkdir(parents=True, exist_ok=True)
    root = CACHE / f"slurm-{version}"
    with open(CACHE / "slurm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            _build(root, version)
    return root / "programs"


def _build(root: Path, version: str) -> None:
    building = root.with_name(root.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    release = DEBIAN[version]
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={','.join(PACKAGES)}", f"--keyring={keys}"]
    command += ["--aptopt=Acquire::Check-Valid-Until false", release, str(building), "http://deb.debian.org/debian"]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    if made.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {made.returncode}\n{made.stderr[-3000:]}")
    _patch(building, root)
    # Nothing but /programs of it is used by path, so it runs from its final place only.
    building.rename(root)
    said = subprocess.run([root / "programs/slurmctld", "-V"], capture_output=True, text=True, timeout=30)
    if not re.match(rf"slurm(-wlm)? {re.escape(version)}\.", said.stdout):
        shutil.rmtree(root)
        reason = f"Debian {release} has {said.stdout.strip() or said.stderr.strip()}, not Slurm {version}"
        pytest.skip(reason) if release == "sid" else pytest.fail(reason)


def _patch(building: Path, root: Path) -> None:
    """Programs in `building` that will run in `root`: their interpreter and libraries are those that came along."""
    libraries = next(building.glob("usr/lib/*/slurm-wlm")).parent
    interpreter = next(libraries.glob("ld-linux*.so.*"))
    there = root / libraries.relative_to(building)
    search = ("--force-rpath", "--set-rpath", f"{there}/slurm-wlm:{there}")
    folder = building / "programs"
    folder.mkdir()
    for name in (*COMMANDS, *DAEMONS):
        found = next(p for p in (building / f"usr/sbin/{name}-wlm", building / f"usr/bin/{name}") if p.exists())
        program = Path(os.path.realpath(found))
        subprocess.run(["patchelf", "--set-interpreter", there / interpreter.name, *search, program], check=True)
        (folder / name).symlink_to(os.path.relpath(program, folder))
    for library in (libraries / "slurm-wlm").glob("*.so"):  # their own search path would hide the programs'
        if not library.is_symlink():
            subprocess.run(["patchelf", "--remove-rpath", library], check=True)
    (folder / "plugins").symlink_to(os.path.relpath(libraries / "slurm-wlm", folder))
