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
from wheel_files import find_differences

STEP_SECONDS = 300.0
SETTINGS = '[metrics]\nlisten = "127.0.0.1:9479"\n'
SITE_DROP_IN = "[Service]\nEnvironment=SITE=its-own\n"
RELEASES = ["bookworm", "trixie"]
ALLOW_CLOCK_READ = ["--system-call-filter=clock_adjtime"]  # nspawn denies what a normal node allows everybody
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
    file_list = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240, check=True).stdout
    for name in filter(None, file_list.split("\0")):
        if os.path.lexists(CHECKOUT / name):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, into / name, follow_symlinks=False)


def run_install(box: SystemdContainer, folder: Path, commands: Sequence[str]) -> None:
    """Run the commands. The last one, `healthd status`, must report a healthy node or at most a warning."""
    *steps, status = commands
    run_block(box, folder, steps)
    result = box.exec("bash", "-c", status, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr


def run_block(box: SystemdContainer, folder: Path, commands: Sequence[str], check: bool = True) -> str:
    """Return the output of one block. With `check` it must succeed, otherwise it must fail."""
    script = "\n".join(commands)
    completed = box.exec("env", f"--chdir={folder}", "bash", "-ec", script, check=False, timeout=STEP_SECONDS)
    report = f"{script}: exit status {completed.returncode}\n{completed.stdout}{completed.stderr}"
    assert (completed.returncode == 0) is check, report
    return report


def changed_counts(output: str) -> list[int]:
    """Return the number of changes that each playbook of a block made on the node."""
    return [int(count) for count in RECAP.findall(output)]


def clone_with_one_node(tree: Path) -> Path:
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


def test_every_command_of_both_pages_is_run_by_this_file() -> None:
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
def test_package_pages_install_drain_stop_upgrade_and_remove(release: str, tmp_path: Path) -> None:
    require_archives(release)
    deb = built_package(release)
    _make, install, baseline = fenced("One node")
    ansible, roll_out, show_health = fenced("Ten nodes, then all")
    (drain,) = fenced("Drain, then act")
    pause, observe = fenced("Stop it everywhere")
    upgrade, rollback = fenced("Upgrade, rollback")
    (remove,) = fenced("Removal")
    (depends,) = fenced("Without a network")
    tree, node = clone_with_one_node(tmp_path / "healthd"), tmp_path / "node"
    for folder in (tree / "dist", node):
        folder.mkdir()
        shutil.copy(deb, folder)
    prepare = ["apt-get update", *ansible, "apt-get install -y --no-install-recommends procps"]
    with SystemdContainer(fresh=release, binds=[tmp_path], options=ALLOW_CLOCK_READ, prepare="\n".join(prepare)) as box:
        assert "default" not in box.exec("cat", "/proc/net/route").stdout
        run_install(box, node, install)
        assert "python3." in run_block(box, node, depends)
        run_block(box, node, baseline)
        assert box.path("/etc/healthd/baseline.toml").exists()

        first, *again = changed_counts(run_block(box, tree, roll_out))
        assert first > 0
        assert again == [0, 0]
        assert re.search(r"gpu-001 .*: (healthy|warning|degraded|unhealthy|unknown)", run_block(box, tree, show_health))
        for script in ("prolog", "epilog", "healthcheck"):
            box.exec("test", "-x", f"/etc/slurm/healthd-{script}")
        assert box.status()["mode"] == "observe"
        box.exec("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9478")
        daemon_pid = box.show("healthd", "MainPID")

        assert changed_counts(run_block(box, tree, drain)) == [2], "the settings and a reload"
        assert box.status()["mode"] == "drain"
        run_block(box, tree, pause)
        assert "we look at its drains" in str(box.status()["pause"])
        run_block(box, tree, observe)
        assert (box.status()["mode"], box.status()["pause"]) == ("observe", None)
        assert box.show("healthd", "MainPID") == daemon_pid, "none of these steps restarts the daemon"

        settings = box.path("/etc/healthd/healthd.toml").read_text()
        next_revision(deb, tree / "dist")
        for block, revision in ((upgrade, "-2~"), (rollback, "-1~")):
            assert changed_counts(run_block(box, tree, block)) == [2], "the file and its installation"
            assert revision in box.exec("dpkg-query", "-W", "healthd").stdout
            assert box.path("/etc/healthd/healthd.toml").read_text() == settings
            box.wait_for_property("healthd", "ActiveState", "active")
        if release == "trixie":  # only with the newer Ansible: a run takes seconds
            check_refusals(box, tree, roll_out, remove)

        box.write("/root/slurm.conf", "Prolog = (null)\n")
        assert changed_counts(run_block(box, tree, remove)) == [1]
        assert box.path("/etc/healthd/healthd.toml").read_text() == settings
        assert list(box.path("/etc/slurm").iterdir()) == []
        assert not box.path("/opt/healthd").exists()
        if release == "trixie":
            assert changed_counts(run_block(box, tree, remove)) == [0]
            run_block(box, tree, [*remove[:-1], f"{remove[-1]} -e healthd_purge=true"])
            assert not box.path("/etc/healthd").exists()
            assert not box.path("/var/lib/healthd").exists()


def check_refusals(box: SystemdContainer, tree: Path, roll_out: Sequence[str], remove: Sequence[str]) -> None:
    """Check that harmful calls change nothing and print the reason."""
    settings = box.path("/etc/healthd/healthd.toml").read_text()
    assert "select one with -e healthd_version" in run_block(box, tree, [*roll_out[:1], roll_out[-1]], check=False)
    invalid_roll_out = [*roll_out[:1], f"{roll_out[-1]} -e healthd_version=0.1.0-1 -e healthd_settings=nonsense=1"]
    assert "nonsense" in run_block(box, tree, invalid_roll_out, check=False)
    assert box.path("/etc/healthd/healthd.toml").read_text() == settings
    box.write("/usr/bin/scontrol", SCONTROL, 0o755)
    box.write("/root/slurm.conf", "Prolog = /etc/slurm/healthd-prolog\n")
    assert "slurm.conf still names a healthd script" in run_block(box, tree, remove, check=False)
    assert box.show("healthd", "ActiveState") == "active"


def test_role_converts_every_boolean_at_each_use() -> None:
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
def test_role_keeps_own_settings_finishes_broken_run_and_skips_dead_nodes(release: str, tmp_path: Path) -> None:
    require_archives(release)
    deb = built_package(release)
    ansible, *_ = fenced("Ten nodes, then all")
    _pause, (folder, observe, _resume) = fenced("Stop it everywhere")
    (remove,) = fenced("Removal")
    tree = clone_with_one_node(tmp_path / "healthd")
    (tree / "dist").mkdir()
    shutil.copy(deb, tree / "dist")
    shutil.copy(deb, tree / "dist" / deb.name.replace("_amd64.", "_riscv64."))  # for another architecture, not used
    role = "ansible-playbook healthd.yml"
    prepare = ["apt-get update", *ansible, "apt-get install -y --no-install-recommends procps python3"]
    with SystemdContainer(fresh=release, binds=[tmp_path], options=ALLOW_CLOCK_READ, prepare="\n".join(prepare)) as box:
        assert changed_counts(run_block(box, tree, [folder, f"{role} --check"])) != [], (
            "a check of a fresh node succeeds"
        )
        box.exec("test", "!", "-e", "/usr/bin/healthd")

        own_settings = "# ours\nmode = 'observe'\n"
        box.exec("apt-get", "install", "-y", str(tree / "dist" / deb.name), timeout=STEP_SECONDS)
        box.write("/etc/healthd/healthd.toml", own_settings)
        output = run_block(box, tree, [folder, f"{role} -e healthd_slurm_scripts=false"])
        (copy,) = box.path("/etc/healthd").glob("healthd.toml.*")
        assert copy.read_text() == own_settings
        assert copy.name in output
        assert not box.path("/etc/slurm/healthd-prolog").exists()

        daemon_pid = box.show("healthd", "MainPID")
        assert changed_counts(run_block(box, tree, [folder, f"{role} -e healthd_restart=false"])) == [1], (
            "Slurm's scripts"
        )
        assert box.show("healthd", "MainPID") == daemon_pid
        run_block(box, tree, [folder, f"{role} -e healthd_restart=true"])
        assert box.show("healthd", "MainPID") != daemon_pid
        daemon_pid = box.show("healthd", "MainPID")

        drop_in = "[Service]\nExecReload=\nExecReload=/bin/false\n"
        box.write("/etc/systemd/system/healthd.service.d/site.conf", drop_in)
        box.systemctl("daemon-reload")
        other_settings = [folder, f"{role} -e healthd_settings=interval_seconds=77"]
        run_block(box, tree, other_settings, check=False)
        box.path("/etc/systemd/system/healthd.service.d/site.conf").unlink()
        box.systemctl("daemon-reload")
        assert changed_counts(run_block(box, tree, other_settings)) == [1], (
            "the file is right, but the daemon had not read it"
        )
        assert changed_counts(run_block(box, tree, other_settings)) == [0]
        assert box.show("healthd", "MainPID") == daemon_pid

        run_block(box, tree, [folder, f"{role} -e healthd_mode=drain"])
        nodes = "[gpu]\ngpu-000 ansible_host=192.0.2.1\ngpu-001 ansible_connection=local\n"
        (tree / "packaging/ansible/inventory.ini").write_text(nodes)
        run_block(box, tree, [folder, role], check=False)
        assert box.status()["mode"] == "drain", "the roll-out stops at a dead first node"
        run_block(box, tree, [folder, observe], check=False)
        assert box.status()["mode"] == "observe"

        run_block(box, tree, [folder, f"{remove[-1]} -e healthd_purge=false --limit gpu-001"])
        assert box.path("/etc/healthd/healthd.toml").exists()
        assert not box.path("/opt/healthd").exists()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("release", RELEASES)
def test_image_and_wheel_pages_install_and_upgrade(release: str, tmp_path: Path) -> None:
    require_archives(release)
    (into_image,) = fenced("Nodes without a disk")
    build, image, node, role = fenced("From wheels")
    (ansible, *_) = fenced("Ten nodes, then all")
    tree, old, new = clone_with_one_node(tmp_path / "healthd"), tmp_path / "old", tmp_path / "new"
    (tree / "healthd/leftover.py").write_text("")
    shutil.copytree(tree, old / "tree", symlinks=True)
    make = [f"cd {tree}", *build, f"cp -r wheels {old}", "rm healthd/leftover.py", *build]
    shutil.copy(built_package(release), tmp_path)
    make += [f"cd {tmp_path}", *into_image]
    with SystemdContainer(fresh=release, binds=[tmp_path], options=ALLOW_CLOCK_READ, prepare="\n".join(make)) as box:
        box.wait_for_property(
            "healthd", "ActiveState", "active"
        )  # the wheels are built, and an image with the package boots
        assert box.status()["mode"] == "observe"
    shutil.copytree(tree / "wheels", new / "wheels")
    for folder, source in ((old, old / "tree"), (new, tree)):
        (wheel,) = folder.glob("wheels/healthd-*.whl")
        assert find_differences(wheel, source) == []

    prepare = "\n".join([*image, *ansible, "apt-get install -y --no-install-recommends man-db"])
    with SystemdContainer(fresh=release, binds=[tmp_path], options=ALLOW_CLOCK_READ, prepare=prepare) as box:
        assert "default" not in box.exec("cat", "/proc/net/route").stdout
        run_install(box, old, node)
        box.exec("/opt/healthd/bin/python", "-c", "import healthd.leftover")
        first_pid = box.show("healthd", "MainPID")
        pages = box.exec("man", "-w", "healthd", "healthd.toml").stdout.split()
        assert pages == ["/opt/healthd/share/man/man8/healthd.8", "/opt/healthd/share/man/man5/healthd.toml.5"]

        box.write("/etc/healthd/healthd.toml", SETTINGS)
        box.write("/etc/systemd/system/healthd.service.d/site.conf", SITE_DROP_IN)
        run_install(box, new, node)
        assert box.path("/etc/healthd/healthd.toml").read_text() == SETTINGS
        assert box.show("healthd", "Environment") == "SITE=its-own"
        assert box.show("healthd", "MainPID") != first_pid
        import_result = box.exec("/opt/healthd/bin/python", "-c", "import healthd.leftover", check=False)
        assert "No module named 'healthd.leftover'" in import_result.stderr
        assert box.systemctl("is-enabled", "healthd") == "enabled"

        assert changed_counts(run_block(box, tree, role))[0] > 0
        assert changed_counts(run_block(box, tree, role)) == [0]
        assert box.status()["mode"] == "observe"


@pytest.mark.timeout(1200)
def test_readme_installs_central_host_and_query_works(tmp_path: Path) -> None:
    require_programs("git", packages="git")
    build, install = fenced("Central host")
    require_network(f"{PYPI}/pip/")
    tree, jobs = tmp_path / "healthd", tmp_path / "jobs.csv"
    clone(tree)
    jobs.write_text("job_id,nodes,gpus,submit,start,end,state\n7,gpu-042,8,1795300000,1795300060,1795303660,FAILED\n")
    healthd = "/opt/healthd-fleet/bin/healthd fleet"
    fleet_commands = [
        f"{healthd} ingest --out {tmp_path}/db --cluster c1 --jobs {jobs}",
        f"{healthd} query states --db {tmp_path}/db --csv > {tmp_path}/states",
    ]
    with SystemdContainer(
        fresh="bookworm", binds=[tmp_path], prepare="\n".join([f"cd {tree}", *build, *install, *fleet_commands])
    ):
        pass  # no boot is needed: all commands ran in `prepare`
    assert "FAILED" in (tmp_path / "states").read_text()
