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
        where = [] if words[0] == "config" else ["--config", f"{self.folder}/healthd.toml"]
        where += ["--root", f"{self.folder}/tree"] if words == ("check", "swap") else []
        command = [sys.executable, "-m", "healthd", *words, *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert "Traceback" not in done.stderr
        return (done.stdout + done.stderr).replace(str(self.folder), "/etc/healthd")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path / "etc")
    for folder in (made.folder, made.folder / "checks.d", made.folder / "tree", made.folder / "tree/proc"):
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
    made.put(made.swap, FULL, 0o644)
    made.put(made.program, SCRIPT, 0o755)
    made.swaps(2 << 20)
    made.configure("".join(TABLES))
    return made


def test_a_check_for_each_folder_runs_once_for_each_table(site: Site) -> None:
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


def test_the_shortest_check_is_short():
    assert len(SHORT.splitlines()) < 20


@pytest.mark.parametrize("text", [SHORT, FULL])
@pytest.mark.skipif(os.path.exists("/run/reboot-required"), reason="a reboot of this machine is pending")
def test_what_the_document_types_gives_what_it_shows(site, text):
    site.put(site.swap, text, 0o644)
    site.configure(TABLES[1])
    for console in CONSOLES:
        command, _, shown = console.partition("\n")
        assert command.startswith("$ healthd ")
        assert without_times(site.healthd(*command.split()[2:])) == without_times(shown)


def test_the_shortest_check_finds_nothing_where_nothing_swaps(site):
    site.put(site.swap, SHORT, 0o644)
    site.configure("")
    site.swaps(0)
    assert "n1: healthy" in site.healthd("check", "swap")
    (site.folder / "tree/proc/swaps").unlink()
    assert "n1: healthy" in site.healthd("check", "swap")


def test_its_setting_is_taken_and_its_words_are_shown(site):
    assert "swap/used" in site.healthd("check", "swap")
    site.swaps(512 << 10)
    assert "n1: healthy" in site.healthd("check", "swap")
    assert "The node swaps." in site.healthd("explain", "swap/used")
    assert "Swap usage of the node." in site.healthd("list")


def test_the_program_warns_when_it_should(site):
    required = site.folder / "reboot-required"
    required.touch()
    site.put(site.program, SCRIPT.replace("/run/reboot-required", str(required)), 0o755)
    assert re.search("a reboot is pending since 20[0-9-]+ [0-9:]+\n", site.healthd("check", "exec"))


# --- mistakes


def writes(text: str) -> Callable[[Site], None]:
    return lambda site: site.put(site.swap, text, 0o644)


def gives(what: str) -> Callable[[Site], None]:
    """Return a step that writes a check whose run() yields this value."""
    return writes(f"from healthd.api import Finding, Severity\ndef run(host, config, past):\n    yield {what}\n")


def ends_with_4(site: Site) -> None:
    site.put(site.program, "#!/bin/sh\necho what now\nexit 4\n", 0o755)


def another_users(site: Site) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    own = site.folder / "site"
    own.mkdir(mode=0o755)
    site.program.rename(own / "reboot-pending")
    site.program.symlink_to(own / "reboot-pending")
    os.chown(own, 1000, -1)


def hangs(site: Site) -> None:
    writes(f"def run(host, config, past):\n    {ENDLESS}\n")(site)
    site.configure("[checks.swap]\ntimeout_seconds = 1.0\n")


LOADING: dict[str, Callable[[Site], None]] = {
    "others may write the file": lambda site: site.swap.chmod(0o666),
    "it does not parse": writes("def run("),
    "it has no `run`": writes("pass"),
    "its import does not end": writes(ENDLESS),
    "a setting that it does not have": lambda site: site.configure("[checks.swap]\nmax_mb = 1\n"),
    "`validate` refuses a setting": lambda site: site.configure("[checks.swap]\nmax_mib = -1\n"),
    "`validate` raises": writes(FULL.replace("config.max_mib < 0", "config.max_mb < 0")),
    "`validate` does not end": writes(FULL.replace("return ", f"{ENDLESS}\n    return ", 1)),
    "`Config` has `timeout_seconds: str`": writes(FULL.replace("max_mib: int = 1024", 'timeout_seconds: str = "5s"')),
}
RUNNING: dict[str, tuple[str, Callable[[Site], object]]] = {
    "a code of another check": ("swap", gives("Finding(Severity.WARNING, 'swop/used', '', 'm')")),
    "a value that is not a finding": ("swap", gives("'used'")),
    "it raises": ("swap", lambda site: site.swaps("N/A")),
    "it takes longer than `timeout_seconds`": ("swap", hangs),
    "others may write the program": ("exec", lambda site: site.program.chmod(0o777)),
    "it is a link into another user's directory": ("exec", another_users),
    "the program is not there": ("exec", lambda site: site.program.unlink()),
    "it ends with another status": ("exec", ends_with_4),
}


@pytest.mark.parametrize("mistake", LOADING)
def test_a_mistake_that_stops_the_start_is_said_as_the_document_shows(site, mistake):
    if not mistake.startswith(("a setting", "`validate` refuses")):
        site.configure("")
    LOADING[mistake](site)
    said = site.healthd("config", "check", f"{site.folder}/healthd.toml")
    assert SENTENCES[mistake] in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("mistake", RUNNING)
def test_a_mistake_in_a_run_is_said_as_the_document_shows(site, mistake):
    check, make = RUNNING[mistake]
    site.configure(TABLES[1] if check == "exec" else "")
    make(site)
    said = " ".join(site.healthd("check", check).split())  # long lines are folded
    assert SENTENCES[mistake] in said
    assert "n1: unknown" in said


def test_every_mistake_of_the_document_is_made_here():
    assert {*LOADING, *RUNNING, "mistake"} == {*SENTENCES, "mistake"}
