"""What README.md says under "On a node" is done, each command as it stands: on a machine of which only systemd is there
yet, and on a node that has no network. Then again with a newer program, as an upgrade.

40 s for each Debian, 60 s the first time, when its root is made (mmdebstrap); twice that on a busy machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from requirements import require_network, require_programs
from systemd_container import CHECKOUT, FRESH, SystemdContainer, built_root
from wheel_files import strangers

PYPI = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
STEP_SECONDS = 300.0
SETTINGS = '[metrics]\nlisten = "127.0.0.1:9479"\n'
DROP_IN = "[Service]\nEnvironment=SITE=its-own\n"


def fenced() -> list[list[str]]:
    """The commands of each block of that section, in their order."""
    section = (CHECKOUT / "README.md").read_text("utf-8").partition("\n## On a node\n")[2].partition("\n## ")[0]
    return [block.strip().split("\n") for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)]


def clone(into: Path) -> None:
    """What a clone of this checkout would have, with what is not committed yet."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(CHECKOUT / name):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, into / name, follow_symlinks=False)


def follow(box: SystemdContainer, folder: Path, commands: Sequence[str]) -> None:
    """Each is done, and the last, `healthd status`, says that the node is healthy or at most warns."""
    *steps, status = commands
    for step in steps:
        box.exec("env", f"--chdir={folder}", "bash", "-c", step, timeout=STEP_SECONDS)
    said = box.exec("bash", "-c", status, check=False)
    assert said.returncode in (0, 1), said.stdout + said.stderr


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_what_the_readme_says_makes_a_node_watched_and_upgraded(release: str, tmp_path: Path) -> None:
    require_programs("git", packages="git")
    build, image, node = fenced()
    root = built_root(release, FRESH)
    archive = re.findall(r"https?://\S+", (root / "etc/apt/sources.list").read_text())[0]
    require_network(f"{archive.rstrip('/')}/dists/{release}/InRelease", f"{PYPI}/pip/")

    tree, old, new = tmp_path / "healthd", tmp_path / "old", tmp_path / "new"
    clone(tree)
    (tree / "healthd/leftover.py").write_text("")
    shutil.copytree(tree, old / "tree", symlinks=True)
    make = [f"cd {tree}", *build, f"cp -r wheels {old}", "rm healthd/leftover.py", *build]
    with SystemdContainer(fresh=release, binds=[tmp_path], prepare="\n".join(make)):
        pass  # it need not boot: everything was done
    shutil.copytree(tree / "wheels", new / "wheels")
    for folder, source in ((old, old / "tree"), (new, tree)):
        (wheel,) = folder.glob("wheels/healthd-*.whl")
        assert strangers(wheel, source) == []

    options = ["--system-call-filter=clock_adjtime"]  # to ask how right the clock is, as everybody may but in nspawn
    binds = [old, new]
    with SystemdContainer(fresh=release, binds=binds, options=options, prepare="\n".join(image)) as box:
        assert "default" not in box.exec("cat", "/proc/net/route").stdout
        follow(box, old, node)
        box.exec("/opt/healthd/bin/python", "-c", "import healthd.leftover")
        first = box.show("healthd", "MainPID")

        box.write("/etc/healthd/healthd.toml", SETTINGS)
        box.write("/etc/systemd/system/healthd.service.d/site.conf", DROP_IN)
        follow(box, new, node)
        assert box.path("/etc/healthd/healthd.toml").read_text() == SETTINGS
        assert box.show("healthd", "Environment") == "SITE=its-own"
        assert box.show("healthd", "MainPID") != first
        gone = box.exec("/opt/healthd/bin/python", "-c", "import healthd.leftover", check=False)
        assert "No module named 'healthd.leftover'" in gone.stderr
        assert box.systemctl("is-enabled", "healthd") == "enabled"
