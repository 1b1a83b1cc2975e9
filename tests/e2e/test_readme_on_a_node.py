"""Run each command of README.md ("Install on a node") and docs/deploy.md (all headings) as printed.

They run on machines that have only systemd, and on nodes without a network. A newer program then serves as an upgrade,
and Ansible runs on the node itself. This takes a minute for each Debian release and method, longer the first time
(mmdebstrap builds the root) and on a busy machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from packages import PYPI, built_package
from requirements import require_network, require_programs
from systemd_container import CHECKOUT, FRESH, SystemdContainer, built_root
from wheel_files import strangers

STEP_SECONDS = 300.0
SETTINGS = '[metrics]\nlisten = "127.0.0.1:9479"\n'
DROP_IN = "[Service]\nEnvironment=SITE=its-own\n"
RELEASES = ["bookworm", "trixie"]
CLOCK = ["--system-call-filter=clock_adjtime"]  # nspawn denies what a normal node allows everybody
RECAP = re.compile(r"(?m)^gpu-001 +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=0 ")
SCONTROL = "#!/bin/sh\ncat /root/slurm.conf\n"  # the output of `scontrol show config`, as remove.yml reads it


def fenced(heading: str, page: str = "docs/deploy.md") -> list[list[str]]:
    """Return the commands of each block of that section, in order."""
    text = (CHECKOUT / page).read_text("utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [block.strip().split("\n") for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)]


def require_archives(release: str) -> None:
    require_programs("git", packages="git")
    archive = re.findall(r"https?://\S+", (built_root(release, FRESH) / "etc/apt/sources.list").read_text())[0]
    require_network(f"{archive.rstrip('/')}/dists/{release}/InRelease", f"{PYPI}/pip/")


def clone(into: Path) -> None:
    """Copy the files that a clone of this checkout would have, including uncommitted ones."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(CHECKOUT / name):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, into / name, follow_symlinks=False)


def follow(box: SystemdContainer, folder: Path, commands: Sequence[str]) -> None:
    """Run the commands. The last one, `healthd status`, must report a healthy node or at most a warning."""
    *steps, status = commands
    do(box, folder, steps)
    said = box.exec("bash", "-c", status, check=False)
    assert said.returncode in (0, 1), said.stdout + said.stderr


def do(box: SystemdContainer, folder: Path, commands: Sequence[str], check: bool = True) -> str:
    """Return the output of one block. With `check` it must succeed, otherwise it must fail."""
    script = "\n".join(commands)
    done = box.exec("env", f"--chdir={folder}", "bash", "-ec", script, check=False, timeout=STEP_SECONDS)
    said = f"{script}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    assert (done.returncode == 0) is check, said
    return said


def changed(said: str) -> list[int]:
    """Return the number of changes that each playbook of a block made on the node."""
    return [int(count) for count in RECAP.findall(said)]


def with_one_node(tree: Path) -> Path:
    """Return a clone whose inventory has one node: the machine on which Ansible runs."""
    clone(tree)
    ansible = tree / "packaging/ansible"
    (ansible / "inventory.ini").write_text("[gpu]\ngpu-001 ansible_connection=local\n")
    site = (ansible / "group_vars/gpu.yml").read_text()
    example = 'healthd_settings: |\n  [metrics]\n  listen = "0.0.0.0:9478"\n  [checks.mount."/scratch"]\n'
    assert "# " + example.rstrip().replace("\n", "\n# ") in site
    assert example in (tree / "docs/deploy.md").read_text(), "the example of the page is the one tested here"
    (ansible / "group_vars/gpu.yml").write_text(f"healthd_mode: observe\n{example.replace('/scratch', '/')}")
    return tree


def next_revision(deb: Path, into: Path) -> None:
    """Build the same package as `make package REVISION=2` does."""
    tree = into / "deb"
    subprocess.run(["dpkg-deb", "--raw-extract", str(deb), str(tree)], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(control.read_text().replace("-1~deb", "-2~deb"))
    newer = deb.name.replace("-1~deb", "-2~deb")
    subprocess.run(
        ["dpkg-deb", "--build", "-Znone", str(tree), str(into / newer)], check=True, stdout=subprocess.DEVNULL
    )
    shutil.rmtree(tree)


def test_every_command_of_the_two_pages_is_done_by_a_test_of_this_file() -> None:
    text = (CHECKOUT / "docs/deploy.md").read_text("utf-8")
    source = Path(__file__).read_text("utf-8")
    for heading, section in re.findall(r"(?ms)^## (.*?)\n(.*?)(?=^## |\Z)", text):
        if "```sh" in section:
            assert f'fenced("{heading}")' in source, heading
    make, node = fenced("Install on a node", "README.md")
    assert [make, node] == fenced("One node")[:2]
    assert make == ["make package"], "scripts/package.sh, as packages.py runs it"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("release", RELEASES)
def test_what_is_said_of_packages_makes_nodes_watched_drained_stopped_upgraded_and_clean(
    release: str, tmp_path: Path
) -> None:
    require_archives(release)
    deb = built_package(release)
    _make, install, baseline = fenced("One node")
    ansible, roll_out, look = fenced("Ten nodes, then all")
    (drain,) = fenced("Drain, then act")
    pause, observe = fenced("Stop it everywhere")
    upgrade, rollback = fenced("Upgrade, rollback")
    (remove,) = fenced("Removal")
    (depends,) = fenced("Without a network")
    tree, node = with_one_node(tmp_path / "healthd"), tmp_path / "node"
    for folder in (tree / "dist", node):
        folder.mkdir()
        shutil.copy(deb, folder)
    prepare = ["apt-get update", *ansible, "apt-get install -y --no-install-recommends procps"]
    with SystemdContainer(fresh=release, binds=[tmp_path], options=CLOCK, prepare="\n".join(prepare)) as box:
        assert "default" not in box.exec("cat", "/proc/net/route").stdout
        follow(box, node, install)
        assert "python3." in do(box, node, depends)
        do(box, node, baseline)
        assert box.path("/etc/healthd/baseline.toml").exists()

        first, *again = changed(do(box, tree, roll_out))
        assert first > 0
        assert again == [0, 0]
        assert re.search(r"gpu-001 .*: (healthy|warning|degraded|unhealthy|unknown)", do(box, tree, look))
        for script in ("prolog", "epilog", "healthcheck"):
            box.exec("test", "-x", f"/etc/slurm/healthd-{script}")
        assert box.status()["mode"] == "observe"
        box.exec("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9478")
        running = box.show("healthd", "MainPID")

        assert changed(do(box, tree, drain)) == [2], "the settings and a reload"
        assert box.status()["mode"] == "drain"
        do(box, tree, pause)
        assert "we look at its drains" in str(box.status()["pause"])
        do(box, tree, observe)
        assert (box.status()["mode"], box.status()["pause"]) == ("observe", None)
        assert box.show("healthd", "MainPID") == running, "none of these steps restarts the daemon"

        settings = box.path("/etc/healthd/healthd.toml").read_text()
        next_revision(deb, tree / "dist")
        for block, revision in ((upgrade, "-2~"), (rollback, "-1~")):
            assert changed(do(box, tree, block)) == [2], "the file and its installation"
            assert revision in box.exec("dpkg-query", "-W", "healthd").stdout
            assert box.path("/etc/healthd/healthd.toml").read_text() == settings
            box.wait("healthd", "ActiveState", "active")
        if release == "trixie":  # only with the newer Ansible: a run takes seconds
            refuse(box, tree, roll_out, remove)

        box.write("/root/slurm.conf", "Prolog = (null)\n")
        assert changed(do(box, tree, remove)) == [1]
        assert box.path("/etc/healthd/healthd.toml").read_text() == settings
        assert list(box.path("/etc/slurm").iterdir()) == []
        assert not box.path("/opt/healthd").exists()
        if release == "trixie":
            assert changed(do(box, tree, remove)) == [0]
            do(box, tree, [*remove[:-1], f"{remove[-1]} -e healthd_purge=true"])
            assert not box.path("/etc/healthd").exists()
            assert not box.path("/var/lib/healthd").exists()


def refuse(box: SystemdContainer, tree: Path, roll_out: Sequence[str], remove: Sequence[str]) -> None:
    """Check that harmful calls change nothing and print the reason."""
    settings = box.path("/etc/healthd/healthd.toml").read_text()
    assert "select one with -e healthd_version" in do(box, tree, [*roll_out[:1], roll_out[-1]], check=False)
    wrong = [*roll_out[:1], f"{roll_out[-1]} -e healthd_version=0.1.0-1 -e healthd_settings=nonsense=1"]
    assert "nonsense" in do(box, tree, wrong, check=False)
    assert box.path("/etc/healthd/healthd.toml").read_text() == settings
    box.write("/usr/bin/scontrol", SCONTROL, 0o755)
    box.write("/root/slurm.conf", "Prolog = /etc/slurm/healthd-prolog\n")
    assert "slurm.conf still names a healthd script" in do(box, tree, remove, check=False)
    assert box.show("healthd", "ActiveState") == "active"


def test_every_boolean_of_the_role_is_made_one_wherever_it_is_asked() -> None:
    """`-e healthd_purge=false` passes the word "false", which Jinja takes for true."""
    role = CHECKOUT / "packaging/ansible/roles/healthd"
    booleans = re.findall(r"(?m)^(healthd_\w+): (?:true|false)$", (role / "defaults/main.yml").read_text())
    assert booleans == ["healthd_restart", "healthd_slurm_scripts", "healthd_purge"]
    text = "".join(path.read_text() for path in sorted(role.glob("tasks/*.yml")))
    for name in booleans:
        uses = re.findall(rf"\b{name}\b(.{{7}})", text)
        assert set(uses) == {" | bool"}, name


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("release", RELEASES)
def test_the_role_keeps_what_is_the_nodes_own_ends_what_was_cut_off_and_goes_past_the_dead(
    release: str, tmp_path: Path
) -> None:
    require_archives(release)
    deb = built_package(release)
    ansible, *_ = fenced("Ten nodes, then all")
    _pause, (folder, observe, _resume) = fenced("Stop it everywhere")
    (remove,) = fenced("Removal")
    tree = with_one_node(tmp_path / "healthd")
    (tree / "dist").mkdir()
    shutil.copy(deb, tree / "dist")
    shutil.copy(deb, tree / "dist" / deb.name.replace("_amd64.", "_riscv64."))  # for another architecture, not used
    role = "ansible-playbook healthd.yml"
    prepare = ["apt-get update", *ansible, "apt-get install -y --no-install-recommends procps python3"]
    with SystemdContainer(fresh=release, binds=[tmp_path], options=CLOCK, prepare="\n".join(prepare)) as box:
        assert changed(do(box, tree, [folder, f"{role} --check"])) != [], "a check of a fresh node succeeds"
        box.exec("test", "!", "-e", "/usr/bin/healthd")

        own = "# ours\nmode = 'observe'\n"
        box.exec("apt-get", "install", "-y", str(tree / "dist" / deb.name), timeout=STEP_SECONDS)
        box.write("/etc/healthd/healthd.toml", own)
        said = do(box, tree, [folder, f"{role} -e healthd_slurm_scripts=false"])
        (copy,) = box.path("/etc/healthd").glob("healthd.toml.*")
        assert copy.read_text() == own
        assert copy.name in said
        assert not box.path("/etc/slurm/healthd-prolog").exists()

        running = box.show("healthd", "MainPID")
        assert changed(do(box, tree, [folder, f"{role} -e healthd_restart=false"])) == [1], "Slurm's scripts"
        assert box.show("healthd", "MainPID") == running
        do(box, tree, [folder, f"{role} -e healthd_restart=true"])
        assert box.show("healthd", "MainPID") != running
        running = box.show("healthd", "MainPID")

        drop_in = "[Service]\nExecReload=\nExecReload=/bin/false\n"
        box.write("/etc/systemd/system/healthd.service.d/site.conf", drop_in)
        box.systemctl("daemon-reload")
        other = [folder, f"{role} -e healthd_settings=interval_seconds=77"]
        do(box, tree, other, check=False)
        box.path("/etc/systemd/system/healthd.service.d/site.conf").unlink()
        box.systemctl("daemon-reload")
        assert changed(do(box, tree, other)) == [1], "the file is right, but the daemon had not read it"
        assert changed(do(box, tree, other)) == [0]
        assert box.show("healthd", "MainPID") == running

        do(box, tree, [folder, f"{role} -e healthd_mode=drain"])
        nodes = "[gpu]\ngpu-000 ansible_host=192.0.2.1\ngpu-001 ansible_connection=local\n"
        (tree / "packaging/ansible/inventory.ini").write_text(nodes)
        do(box, tree, [folder, role], check=False)
        assert box.status()["mode"] == "drain", "the roll-out stops at a dead first node"
        do(box, tree, [folder, observe], check=False)
        assert box.status()["mode"] == "observe"

        do(box, tree, [folder, f"{remove[-1]} -e healthd_purge=false --limit gpu-001"])
        assert box.path("/etc/healthd/healthd.toml").exists()
        assert not box.path("/opt/healthd").exists()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("release", RELEASES)
def test_what_is_said_of_images_and_of_wheels_makes_a_node_watched_and_upgraded(release: str, tmp_path: Path) -> None:
    require_archives(release)
    (into_image,) = fenced("Nodes without a disk")
    build, image, node, role = fenced("From wheels")
    (ansible, *_) = fenced("Ten nodes, then all")
    tree, old, new = with_one_node(tmp_path / "healthd"), tmp_path / "old", tmp_path / "new"
    (tree / "healthd/leftover.py").write_text("")
    shutil.copytree(tree, old / "tree", symlinks=True)
    make = [f"cd {tree}", *build, f"cp -r wheels {old}", "rm healthd/leftover.py", *build]
    shutil.copy(built_package(release), tmp_path)
    make += [f"cd {tmp_path}", *into_image]
    with SystemdContainer(fresh=release, binds=[tmp_path], options=CLOCK, prepare="\n".join(make)) as box:
        box.wait("healthd", "ActiveState", "active")  # the wheels are built, and an image with the package boots
        assert box.status()["mode"] == "observe"
    shutil.copytree(tree / "wheels", new / "wheels")
    for folder, source in ((old, old / "tree"), (new, tree)):
        (wheel,) = folder.glob("wheels/healthd-*.whl")
        assert strangers(wheel, source) == []

    prepare = "\n".join([*image, *ansible, "apt-get install -y --no-install-recommends man-db"])
    with SystemdContainer(fresh=release, binds=[tmp_path], options=CLOCK, prepare=prepare) as box:
        assert "default" not in box.exec("cat", "/proc/net/route").stdout
        follow(box, old, node)
        box.exec("/opt/healthd/bin/python", "-c", "import healthd.leftover")
        first = box.show("healthd", "MainPID")
        pages = box.exec("man", "-w", "healthd", "healthd.toml").stdout.split()
        assert pages == ["/opt/healthd/share/man/man8/healthd.8", "/opt/healthd/share/man/man5/healthd.toml.5"]

        box.write("/etc/healthd/healthd.toml", SETTINGS)
        box.write("/etc/systemd/system/healthd.service.d/site.conf", DROP_IN)
        follow(box, new, node)
        assert box.path("/etc/healthd/healthd.toml").read_text() == SETTINGS
        assert box.show("healthd", "Environment") == "SITE=its-own"
        assert box.show("healthd", "MainPID") != first
        gone = box.exec("/opt/healthd/bin/python", "-c", "import healthd.leftover", check=False)
        assert "No module named 'healthd.leftover'" in gone.stderr
        assert box.systemctl("is-enabled", "healthd") == "enabled"

        assert changed(do(box, tree, role))[0] > 0
        assert changed(do(box, tree, role)) == [0]
        assert box.status()["mode"] == "observe"


@pytest.mark.timeout(1200)
def test_what_the_readme_says_makes_a_centre_that_can_be_asked(tmp_path: Path) -> None:
    require_programs("git", packages="git")
    build, install = fenced("Central host")
    require_network(f"{PYPI}/pip/")
    tree, jobs = tmp_path / "healthd", tmp_path / "jobs.csv"
    clone(tree)
    jobs.write_text("job_id,nodes,gpus,submit,start,end,state\n7,gpu-042,8,1795300000,1795300060,1795303660,FAILED\n")
    healthd = "/opt/healthd-fleet/bin/healthd fleet"
    ask = [
        f"{healthd} ingest --out {tmp_path}/db --cluster c1 --jobs {jobs}",
        f"{healthd} query states --db {tmp_path}/db --csv > {tmp_path}/states",
    ]
    with SystemdContainer(
        fresh="bookworm", binds=[tmp_path], prepare="\n".join([f"cd {tree}", *build, *install, *ask])
    ):
        pass  # no boot is needed: all commands ran in `prepare`
    assert "FAILED" in (tmp_path / "states").read_text()
