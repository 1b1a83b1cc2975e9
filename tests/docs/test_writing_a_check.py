"""Tests of docs/writing-a-check.md: each block runs, and each sentence of its table is an output of healthd."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.one_python

TEXT = (Path(__file__).parents[2] / "docs/writing-a-check.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
SHORT, FULL, FOR_EACH = (block for kind, block in BLOCKS if kind == "python")
SCRIPT = next(block for kind, block in BLOCKS if kind == "sh")
TABLES = [block for kind, block in BLOCKS if kind == "toml" and "scratch" not in block]
FOLDERS = next(block for kind, block in BLOCKS if kind == "toml" and "scratch" in block)
CONSOLES = [block for kind, block in BLOCKS if kind == "console"]
SENTENCES = dict(re.findall(r"(?m)^\| (.*?) \| `(.*)` \|$", TEXT))
ENDLESS = "__import__('time').sleep(1e6)"  # without CPU load, because other tests run in parallel
SWAPS = "Filename\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/sda2       partition\t8388604\t\t{}\t\t-2\n"


class Site(NamedTuple):
    """A node's /etc/healthd, and the tree of the node."""

    folder: Path

    @property
    def swap(self) -> Path:
        return self.folder / "checks.d/swap.py"

    @property
    def program(self) -> Path:
        return self.folder / "reboot-pending"

    def put(self, path: Path, text: str, mode: int) -> None:
        path.write_text(text.replace("/etc/healthd", str(self.folder)))
        path.chmod(mode)

    def configure(self, table: str) -> None:
        text = f'node_name = "n1"\nchecks_dir = "/etc/healthd/checks.d"\n{table}'
        self.put(self.folder / "healthd.toml", text, 0o644)

    def swaps(self, used: object) -> None:
        (self.folder / "tree/proc/swaps").write_text(SWAPS.format(used))

    def healthd(self, *words: str) -> str:
        """Return the output, with the paths of the document."""
        options = [] if words[0] == "config" else ["--config", f"{self.folder}/healthd.toml"]
        options += ["--root", f"{self.folder}/tree"] if words == ("check", "swap") else []
        command = [sys.executable, "-m", "healthd", *words, *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert "Traceback" not in result.stderr
        return (result.stdout + result.stderr).replace(str(self.folder), "/etc/healthd")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    new_site = Site(tmp_path / "etc")
    for folder in (
        new_site.folder,
        new_site.folder / "checks.d",
        new_site.folder / "tree",
        new_site.folder / "tree/proc",
    ):
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
    new_site.put(new_site.swap, FULL, 0o644)
    new_site.put(new_site.program, SCRIPT, 0o755)
    new_site.swaps(2 << 20)
    new_site.configure("".join(TABLES))
    return new_site


def test_check_per_folder_runs_once_per_table(site: Site) -> None:
    site.put(site.folder / "checks.d/scratch.py", FOR_EACH, 0o644)
    (site.folder / "tree/data").mkdir()
    site.configure(FOLDERS)
    found = site.healthd("check", "scratch", "--root", f"{site.folder}/tree")
    assert "warning  scratch/missing /scratch" in found
    assert "scratch/missing /data" not in found
    site.configure(FOLDERS.replace("60.0", "-1"))
    assert 'checks.scratch."/data".settle_seconds: must be 0 to ' in site.healthd("check", "scratch")


def without_times(text: str) -> str:
    return re.sub(r"[0-9]+\.[0-9]{2} s", "TIME", text).strip()


def test_shortest_check_is_short():
    assert len(SHORT.splitlines()) < 20


@pytest.mark.parametrize("text", [SHORT, FULL])
@pytest.mark.skipif(os.path.exists("/run/reboot-required"), reason="a reboot of this machine is pending")
def test_console_blocks_show_current_output(site, text):
    site.put(site.swap, text, 0o644)
    site.configure(TABLES[1])
    for console in CONSOLES:
        command, _, shown = console.partition("\n")
        assert command.startswith("$ healthd ")
        assert without_times(site.healthd(*command.split()[2:])) == without_times(shown)


def test_shortest_check_finds_nothing_without_swap(site):
    site.put(site.swap, SHORT, 0o644)
    site.configure("")
    site.swaps(0)
    assert "n1: healthy" in site.healthd("check", "swap")
    (site.folder / "tree/proc/swaps").unlink()
    assert "n1: healthy" in site.healthd("check", "swap")


def test_setting_is_used_and_texts_are_shown(site):
    assert "swap/used" in site.healthd("check", "swap")
    site.swaps(512 << 10)
    assert "n1: healthy" in site.healthd("check", "swap")
    assert "The node swaps." in site.healthd("explain", "swap/used")
    assert "Swap usage of the node." in site.healthd("list")


def test_example_program_warns_of_pending_reboot(site):
    required = site.folder / "reboot-required"
    required.touch()
    site.put(site.program, SCRIPT.replace("/run/reboot-required", str(required)), 0o755)
    assert re.search("a reboot is pending since 20[0-9-]+ [0-9:]+\n", site.healthd("check", "exec"))


# --- mistakes


def write_check(text: str) -> Callable[[Site], None]:
    return lambda site: site.put(site.swap, text, 0o644)


def write_check_yielding(value: str) -> Callable[[Site], None]:
    """Return a step that writes a check whose run() yields this value."""
    return write_check(f"from healthd.api import Finding, Severity\ndef run(host, config, past):\n    yield {value}\n")


def exit_with_4(site: Site) -> None:
    site.put(site.program, "#!/bin/sh\necho what now\nexit 4\n", 0o755)


def link_to_file_of_other_user(site: Site) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    user_dir = site.folder / "site"
    user_dir.mkdir(mode=0o755)
    site.program.rename(user_dir / "reboot-pending")
    site.program.symlink_to(user_dir / "reboot-pending")
    os.chown(user_dir, 1000, -1)


def make_check_hang(site: Site) -> None:
    write_check(f"def run(host, config, past):\n    {ENDLESS}\n")(site)
    site.configure("[checks.swap]\ntimeout_seconds = 1.0\n")


LOADING_MISTAKES: dict[str, Callable[[Site], None]] = {
    "others may write the file": lambda site: site.swap.chmod(0o666),
    "the file does not parse": write_check("def run("),
    "the file has no `run`": write_check("pass"),
    "importing the file hangs": write_check(ENDLESS),
    "an unknown setting": lambda site: site.configure("[checks.swap]\nmax_mb = 1\n"),
    "`validate` rejects a setting": lambda site: site.configure("[checks.swap]\nmax_mib = -1\n"),
    "`validate` raises": write_check(FULL.replace("config.max_mib < 0", "config.max_mb < 0")),
    "`validate` hangs": write_check(FULL.replace("return ", f"{ENDLESS}\n    return ", 1)),
    "`Config` has `timeout_seconds: str`": write_check(
        FULL.replace("max_mib: int = 1024", 'timeout_seconds: str = "5s"')
    ),
}
RUN_MISTAKES: dict[str, tuple[str, Callable[[Site], object]]] = {
    "another check's code": ("swap", write_check_yielding("Finding(Severity.WARNING, 'swop/used', '', 'm')")),
    "a value that is not a finding": ("swap", write_check_yielding("'used'")),
    "the check raises an exception": ("swap", lambda site: site.swaps("N/A")),
    "the check takes longer than `timeout_seconds`": ("swap", make_check_hang),
    "others may write the program": ("exec", lambda site: site.program.chmod(0o777)),
    "the program is a link into another user's directory": ("exec", link_to_file_of_other_user),
    "the program does not exist": ("exec", lambda site: site.program.unlink()),
    "the program exits with another status": ("exec", exit_with_4),
}


@pytest.mark.parametrize("mistake", LOADING_MISTAKES)
def test_mistake_preventing_start_is_reported_as_documented(site, mistake):
    if not mistake.startswith(("an unknown setting", "`validate` rejects")):
        site.configure("")
    LOADING_MISTAKES[mistake](site)
    output = site.healthd("config", "check", f"{site.folder}/healthd.toml")
    assert SENTENCES[mistake] in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("mistake", RUN_MISTAKES)
def test_mistake_in_run_is_reported_as_documented(site, mistake):
    check, apply = RUN_MISTAKES[mistake]
    site.configure(TABLES[1] if check == "exec" else "")
    apply(site)
    output = " ".join(site.healthd("check", check).split())  # long lines are folded
    assert SENTENCES[mistake] in output
    assert "n1: unknown" in output


def test_every_documented_mistake_is_tested():
    assert {*LOADING_MISTAKES, *RUN_MISTAKES, "mistake"} == {*SENTENCES, "mistake"}
