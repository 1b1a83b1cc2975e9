"""ownership: files that healthd uses must belong to root, up to "/". Some tests attack as a real second user."""

from __future__ import annotations

import os
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.settings import registry
from healthd.agent.settings.config import ConfigError
from healthd.agent.settings.settings_file import read_file
from healthd.common import ownership
from healthd.common.atomic_files import replace_file
from healthd.common.ownership import Untrusted, untrusted_reason
from healthd.host.lock import lock

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def about(mode: int, uid: int = 0, gid: int = 0, device: int = os.makedev(8, 1)) -> os.stat_result:
    return cast(os.stat_result, SimpleNamespace(st_mode=mode, st_uid=uid, st_gid=gid, st_dev=device))


# --- the rule for one stat result


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "who"),
    [
        (stat.S_IFREG | 0o600, 0, 4711, ""),
        (stat.S_IFREG | 0o644, 1000, 4711, ""),  # the user that healthd runs as
        (stat.S_IFREG | 0o600, 1001, 0, "belongs to user 1001; it must belong to root"),
        (stat.S_IFREG | 0o664, 0, 0, ""),
        (stat.S_IFREG | 0o664, 0, 50, "is writable by group 50 (mode 664)"),
        (stat.S_IFREG | 0o602, 0, 0, "is writable by all users (mode 602)"),
        (stat.S_IFDIR | 0o1777, 0, 0, ""),
        (stat.S_IFDIR | 0o1775, 0, 50, ""),
        (stat.S_IFDIR | 0o1777, 1001, 0, "belongs to user 1001; it must belong to root"),  # owner can replace its files
        (stat.S_IFREG | 0o1666, 0, 0, "is writable by all users (mode 1666)"),  # the sticky bit has no effect on a file
        (stat.S_IFLNK | 0o777, 0, 0, ""),
        (stat.S_IFLNK | 0o777, 1001, 0, "belongs to user 1001; it must belong to root"),
    ],
)
def test_who_else_could_change_it(mode: int, uid: int, gid: int, who: str) -> None:
    assert untrusted_reason(about(mode, uid, gid), {0, 1000}) == who


def test_a_folder_in_which_files_are_made_may_not_be_sticky() -> None:
    assert "is writable by all users" in untrusted_reason(about(stat.S_IFDIR | 0o1777), {0}, allow_sticky=False)


def test_what_an_acl_allows_hides_in_the_bits_of_the_group() -> None:
    found = about(stat.S_IFREG | 0o664)
    assert "by other users through an ACL (mode 664" in untrusted_reason(found, {0}, has_acl=lambda: True)
    assert (
        untrusted_reason(about(stat.S_IFREG | 0o644), {0}, has_acl=lambda: True) == ""
    )  # the mask of the ACL denies writing


@pytest.mark.parametrize(("user", "who"), [(None, ""), (0, ""), (1000, "is in a FUSE mount by user 1000")])
def test_a_users_fuse_mount_says_what_it_likes(user: int | None, who: str) -> None:
    found = about(stat.S_IFREG | 0o644, device=os.makedev(0, 77))
    assert untrusted_reason(found, {0}, mounted_by=user) == who


@given(st.integers(0, 0o7777), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans())
def test_nothing_that_another_may_write_is_ever_taken(mode: int, uid: int, gid: int, acl: bool, link: bool) -> None:
    kind = stat.S_IFLNK if link else stat.S_IFREG
    if untrusted_reason(about(kind | mode, uid, gid), {0}, has_acl=lambda: acl) == "":
        assert uid == 0
        assert link or not mode & 0o002
        assert link or not mode & 0o020 or (gid == 0 and not acl)


# --- the path to a file


def test_each_step_up_to_the_root_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "a/b/settings.toml"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    assert ownership.read(str(file)) == b"x = 1\n"
    for step in (file, file.parent, file.parent.parent):
        before = step.stat().st_mode
        step.chmod(0o777)
        with pytest.raises(Untrusted, match=rf"^{step} is writable by all users \(mode 777\)$"):
            ownership.read(str(file))
        step.chmod(before)


@pytest.mark.parametrize("target", ["real/file", "{}/real/file", "real/../real/./file", "./through/../real/file"])
def test_a_link_of_ours_is_followed_and_what_it_leads_through_is_looked_at(tmp_path: Path, target: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_text("ours")
    (tmp_path / "real/below").mkdir()
    (tmp_path / "through").symlink_to("real/below")
    (tmp_path / "link").symlink_to(target.format(tmp_path))
    if target.startswith("./through"):  # through/.. is real, as the kernel resolves it
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("through/../file")
    assert ownership.read(str(tmp_path / "link")) == b"ours"
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(Untrusted, match=f"^{tmp_path}/real is writable by all users"):
        ownership.read(str(tmp_path / "link"))


def test_links_in_a_circle_and_what_is_missing_are_the_kernels_words(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links") as raised:
        ownership.read(str(tmp_path / "a"))
    assert raised.value.filename == str(tmp_path / "a")
    with pytest.raises(FileNotFoundError) as missing:
        ownership.read(str(tmp_path / "none/file"))
    assert missing.value.filename == str(tmp_path / "none/file")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        ownership.read(str(tmp_path / "file/below"))


def test_a_chain_of_links_is_followed_as_far_as_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("x")
    for number in range(1, ownership.MAX_LINKS + 2):
        (tmp_path / str(number)).symlink_to(str(number - 1))
    assert ownership.read(str(tmp_path / str(ownership.MAX_LINKS))) == b"x"
    with pytest.raises(OSError, match="symbolic links"):
        ownership.read(str(tmp_path / str(ownership.MAX_LINKS + 1)))


def test_a_fifo_is_no_file_and_nobody_waits_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="Is not a file"):
        ownership.read(str(tmp_path / "fifo"))


def test_a_relative_path_begins_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert ownership.read("./file") == b"x"
    replace_file("other", "y")
    assert (tmp_path / "other").read_text() == "y"


def test_a_folder_is_made_with_those_above_it_and_is_ours_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with ownership.open_folder(str(tmp_path / "a/b"), make_mode=0o755) as made:
            assert stat.S_IMODE(os.fstat(made).st_mode) == 0o755
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    before = count()
    for path in ("link/x", "there/../link", "none/x", "link"):
        with pytest.raises(OSError, match=r"Is a directory|No such file"):
            ownership.read(str(tmp_path / path))
    (tmp_path / "there").chmod(0o777)
    with pytest.raises(Untrusted), ownership.open_folder(str(tmp_path / "there")):
        pass
    replace_file(str(tmp_path / "file"), "x")
    ownership.stat_program("/bin/sh")
    assert count() <= before


def acl(user: int, rights: int) -> bytes:
    """Return an access ACL that grants rights to one more user (acl(5), linux/posix_acl_xattr.h)."""
    undefined = 0xFFFFFFFF
    entries = [(1, 6, undefined), (2, rights, user), (4, 4, undefined), (0x10, 6, undefined), (0x20, 4, undefined)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@as_root
def test_a_file_that_an_acl_lets_another_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("")
    try:
        os.setxattr(file, ownership.ACL, acl(NOBODY, 6))
    except OSError as error:
        pytest.skip(f"no ACLs on this file system: {error}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o664  # the mode bits show nothing else of the ACL
    with pytest.raises(Untrusted, match="is writable by other users through an ACL"):
        ownership.read(str(file))


def test_whose_a_fuse_mount_is_stands_in_mountinfo() -> None:
    line = "300 36 0:77 / /scratch/alice rw,nosuid shared:1 - fuse.sshfs alice@x:/ rw,user_id=1000,group_id=1000"
    assert dict(ownership.parse_fuse_user(line)) == {os.makedev(0, 77): 1000}
    assert list(ownership.parse_fuse_user(line.replace("fuse.sshfs", "fuse"))) == [(os.makedev(0, 77), 1000)]
    for other in ("virtiofs", "fusectl", "tmpfs"):
        assert list(ownership.parse_fuse_user(line.replace("fuse.sshfs", other))) == []


# --- a second user


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can access, like /srv of a node."""
    import shutil
    import tempfile

    made = Path(tempfile.mkdtemp(prefix="healthd-owner."))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def as_nobody(work: Callable[[], Any], wait: bool = True) -> int:
    """Run a function as the user nobody in a new process and return its pid. With `wait`, check that it succeeded."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
            status = 0
        finally:
            os._exit(status)
    if wait:
        assert os.waitpid(pid, 0)[1] == 0
    return pid


@pytest.fixture
def users(shared: Path) -> Path:
    """A folder of another user below `shared`."""
    folder = shared / "home"
    folder.mkdir(mode=0o755)
    os.chown(folder, NOBODY, NOBODY)
    return folder


@as_root
def test_a_textfile_in_a_users_folder_overwrites_nothing(shared: Path, users: Path) -> None:
    """The user creates links at the target name and at each temporary name that root may use."""
    precious = shared / "precious"
    precious.write_text("root's")

    def plant() -> None:
        (users / "metrics").symlink_to(shared)
        for pid in range(os.getppid() - 3, os.getppid() + 3):
            (users / f"healthd.prom.{pid}.new").symlink_to(precious)
        (users / "healthd.prom").symlink_to(precious)

    as_nobody(plant)
    for path in (users / "healthd.prom", users / "metrics/healthd.prom"):
        with pytest.raises(Untrusted, match=f"^{users} belongs to user {NOBODY}; it must belong to root$"):
            replace_file(str(path), "metrics")
    assert precious.read_text() == "root's"
    assert not (shared / "healthd.prom").exists()


@as_root
def test_a_runtime_directory_of_somebody_else_is_not_taken(shared: Path, users: Path) -> None:
    precious = shared / "precious"
    precious.write_text("root's")

    def plant() -> None:
        (users / "run").mkdir()
        for name in ("lock", "workers.json", "ledger.json", "verdict"):
            (users / "run" / name).symlink_to(precious)

    as_nobody(plant)
    with pytest.raises(Untrusted, match=f"^{users}/run \\(runtime_dir\\): refused: {users} belongs to user {NOBODY}"):
        lock(str(users / "run"))
    (shared / "tmp").mkdir()
    (shared / "tmp").chmod(0o1777)
    as_nobody(lambda: (shared / "tmp/healthd").mkdir())
    with pytest.raises(Untrusted, match=f": refused: {shared}/tmp/healthd belongs to user {NOBODY}"):
        lock(str(shared / "tmp/healthd"))
    os.close(lock(str(shared / "tmp/own")))  # a sticky folder of root, in which no other user created the name first
    assert precious.read_text() == "root's"


@as_root
def test_a_link_that_lies_where_the_lock_should_is_not_followed(shared: Path) -> None:
    (shared / "run").mkdir()
    (shared / "run/lock").symlink_to(shared / "made-by-root")
    with pytest.raises(OSError, match="symbolic links") as raised:
        lock(str(shared / "run"))
    assert raised.value.filename == f"{shared}/run/lock"
    assert not (shared / "made-by-root").exists()


@as_root
def test_settings_and_baseline_of_another_user_are_not_read(users: Path) -> None:
    as_nobody(lambda: (users / "healthd.toml").write_text("mode = 'act'\n"))
    with pytest.raises(ConfigError) as raised:
        read_file(str(users / "healthd.toml"), required=True, setting="baseline_file")
    assert str(raised.value) == (
        f"{users}/healthd.toml (baseline_file): refused: {users} belongs to user {NOBODY}; it must belong to root"
    )


CHECK = "def run(host, config, past):\n    yield from ()\n"


def imported(directory: Path) -> bool:
    try:
        registry.find_checks(str(directory), bounded=False)
    except ConfigError:
        return False
    return True


@as_root
def test_a_checks_directory_that_is_swapped_between_look_and_import_runs_no_code_of_its_swapper(
    shared: Path, users: Path
) -> None:
    """A user repeatedly swaps checks.d of root and a folder with other code, below a folder of the user."""
    trace = shared / "it-ran"
    trace.mkdir()
    trace.chmod(0o777)
    good, bad = users / "checks.d", users / "other"
    good.mkdir()
    (good / "fan.py").write_text(CHECK)
    evil = f"open({str(trace / 'trace')!r}, 'w')\n{CHECK}"

    def make() -> None:
        bad.mkdir()
        (bad / "fan.py").write_text(evil)

    as_nobody(make)

    def swap() -> None:
        while os.getppid() != 1:
            os.rename(good, users / "away")
            os.rename(bad, good)
            os.rename(good, bad)
            os.rename(users / "away", good)

    swapper = as_nobody(swap, wait=False)
    try:
        end, taken = time.monotonic() + 1.0, []
        while len(taken) < 20 or (len(taken) < 200 and time.monotonic() < end):
            taken.append(imported(good))
    finally:
        os.kill(swapper, signal.SIGKILL)
        os.waitpid(swapper, 0)
    assert not any(taken), "the folder sometimes contains root's files, but they cannot be trusted there"
    assert list(trace.iterdir()) == []


def test_what_was_looked_at_is_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file takes the name after the check, and compiled files of yet another one exist."""
    import py_compile

    file, other = tmp_path / "fan.py", tmp_path / "other"
    file.write_text(f"NOTE = 'checked'\n{CHECK}")
    other.write_text(f"NOTE = 'swapped'\n{CHECK}")
    for hidden in (tmp_path / "__pycache__/fan.cpython-999.pyc", tmp_path / "fan.pyc"):
        py_compile.compile(str(other), cfile=str(hidden))
    py_compile.compile(str(other), cfile=str(Path(__import__("importlib.util").util.cache_from_source(str(file)))))
    content = ownership.read_all

    def looked_at(descriptor: int) -> bytes:
        os.replace(other, file)
        return content(descriptor)

    monkeypatch.setattr(ownership, "read_all", looked_at)
    assert vars(registry.load_site(str(file)).module)["NOTE"] == "checked"
