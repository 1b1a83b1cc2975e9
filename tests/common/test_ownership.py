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


def stat_result(mode: int, uid: int = 0, gid: int = 0, device: int = os.makedev(8, 1)) -> os.stat_result:
    return cast(os.stat_result, SimpleNamespace(st_mode=mode, st_uid=uid, st_gid=gid, st_dev=device))


# --- the rule for one stat result


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "reason"),
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
def test_untrusted_reason_names_owner_or_writers(mode: int, uid: int, gid: int, reason: str) -> None:
    assert untrusted_reason(stat_result(mode, uid, gid), {0, 1000}) == reason


def test_untrusted_reason_rejects_sticky_folder_for_new_files() -> None:
    assert "is writable by all users" in untrusted_reason(stat_result(stat.S_IFDIR | 0o1777), {0}, allow_sticky=False)


def test_untrusted_reason_reports_acl_from_group_bits() -> None:
    found = stat_result(stat.S_IFREG | 0o664)
    assert "by other users through an ACL (mode 664" in untrusted_reason(found, {0}, has_acl=lambda: True)
    assert (
        untrusted_reason(stat_result(stat.S_IFREG | 0o644), {0}, has_acl=lambda: True) == ""
    )  # the mask of the ACL denies writing


@pytest.mark.parametrize(("user", "reason"), [(None, ""), (0, ""), (1000, "is in a FUSE mount by user 1000")])
def test_untrusted_reason_rejects_fuse_mount_of_a_user(user: int | None, reason: str) -> None:
    found = stat_result(stat.S_IFREG | 0o644, device=os.makedev(0, 77))
    assert untrusted_reason(found, {0}, mounted_by=user) == reason


@given(st.integers(0, 0o7777), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans())
def test_untrusted_reason_rejects_everything_that_others_may_write(
    mode: int, uid: int, gid: int, acl: bool, link: bool
) -> None:
    kind = stat.S_IFLNK if link else stat.S_IFREG
    if untrusted_reason(stat_result(kind | mode, uid, gid), {0}, has_acl=lambda: acl) == "":
        assert uid == 0
        assert link or not mode & 0o002
        assert link or not mode & 0o020 or (gid == 0 and not acl)


# --- the path to a file


def test_read_checks_each_directory_up_to_the_root(tmp_path: Path) -> None:
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
def test_read_follows_trusted_link_and_checks_its_path(tmp_path: Path, target: str) -> None:
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


def test_read_reports_circular_links_and_missing_files_like_the_kernel(tmp_path: Path) -> None:
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


def test_read_follows_as_many_links_as_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("x")
    for number in range(1, ownership.MAX_LINKS + 2):
        (tmp_path / str(number)).symlink_to(str(number - 1))
    assert ownership.read(str(tmp_path / str(ownership.MAX_LINKS))) == b"x"
    with pytest.raises(OSError, match="symbolic links"):
        ownership.read(str(tmp_path / str(ownership.MAX_LINKS + 1)))


def test_read_rejects_fifo_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="Is not a file"):
        ownership.read(str(tmp_path / "fifo"))


def test_read_resolves_relative_path_from_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert ownership.read("./file") == b"x"
    replace_file("other", "y")
    assert (tmp_path / "other").read_text() == "y"


def test_open_folder_creates_parents_with_given_mode(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with ownership.open_folder(str(tmp_path / "a/b"), make_mode=0o755) as made:
            assert stat.S_IMODE(os.fstat(made).st_mode) == 0o755
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
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
def test_read_rejects_file_writable_through_acl(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("")
    try:
        os.setxattr(file, ownership.ACL, acl(NOBODY, 6))
    except OSError as error:
        pytest.skip(f"no ACLs on this file system: {error}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o664  # the mode bits show nothing else of the ACL
    with pytest.raises(Untrusted, match="is writable by other users through an ACL"):
        ownership.read(str(file))


def test_parse_fuse_user_reads_user_from_mountinfo() -> None:
    line = "300 36 0:77 / /scratch/alice rw,nosuid shared:1 - fuse.sshfs alice@x:/ rw,user_id=1000,group_id=1000"
    assert dict(ownership.parse_fuse_user(line)) == {os.makedev(0, 77): 1000}
    assert list(ownership.parse_fuse_user(line.replace("fuse.sshfs", "fuse"))) == [(os.makedev(0, 77), 1000)]
    for fstype in ("virtiofs", "fusectl", "tmpfs"):
        assert list(ownership.parse_fuse_user(line.replace("fuse.sshfs", fstype))) == []


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


def run_as_nobody(work: Callable[[], Any], wait: bool = True) -> int:
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
def user_folder(shared: Path) -> Path:
    """A folder of another user below `shared`."""
    folder = shared / "home"
    folder.mkdir(mode=0o755)
    os.chown(folder, NOBODY, NOBODY)
    return folder


@as_root
def test_replace_file_in_folder_of_user_overwrites_nothing(shared: Path, user_folder: Path) -> None:
    """The user creates links at the target name and at each temporary name that root may use."""
    precious = shared / "precious"
    precious.write_text("root's")

    def plant() -> None:
        (user_folder / "metrics").symlink_to(shared)
        for pid in range(os.getppid() - 3, os.getppid() + 3):
            (user_folder / f"healthd.prom.{pid}.new").symlink_to(precious)
        (user_folder / "healthd.prom").symlink_to(precious)

    run_as_nobody(plant)
    for path in (user_folder / "healthd.prom", user_folder / "metrics/healthd.prom"):
        with pytest.raises(Untrusted, match=f"^{user_folder} belongs to user {NOBODY}; it must belong to root$"):
            replace_file(str(path), "metrics")
    assert precious.read_text() == "root's"
    assert not (shared / "healthd.prom").exists()


@as_root
def test_lock_rejects_runtime_directory_of_another_user(shared: Path, user_folder: Path) -> None:
    precious = shared / "precious"
    precious.write_text("root's")

    def plant() -> None:
        (user_folder / "run").mkdir()
        for name in ("lock", "workers.json", "ledger.json", "verdict"):
            (user_folder / "run" / name).symlink_to(precious)

    run_as_nobody(plant)
    with pytest.raises(
        Untrusted, match=f"^{user_folder}/run \\(runtime_dir\\): refused: {user_folder} belongs to user {NOBODY}"
    ):
        lock(str(user_folder / "run"))
    (shared / "tmp").mkdir()
    (shared / "tmp").chmod(0o1777)
    run_as_nobody(lambda: (shared / "tmp/healthd").mkdir())
    with pytest.raises(Untrusted, match=f": refused: {shared}/tmp/healthd belongs to user {NOBODY}"):
        lock(str(shared / "tmp/healthd"))
    os.close(lock(str(shared / "tmp/own")))  # a sticky folder of root, in which no other user created the name first
    assert precious.read_text() == "root's"


@as_root
def test_lock_does_not_follow_link(shared: Path) -> None:
    (shared / "run").mkdir()
    (shared / "run/lock").symlink_to(shared / "made-by-root")
    with pytest.raises(OSError, match="symbolic links") as raised:
        lock(str(shared / "run"))
    assert raised.value.filename == f"{shared}/run/lock"
    assert not (shared / "made-by-root").exists()


@as_root
def test_settings_and_baseline_of_another_user_are_not_read(user_folder: Path) -> None:
    run_as_nobody(lambda: (user_folder / "healthd.toml").write_text("mode = 'act'\n"))
    with pytest.raises(ConfigError) as raised:
        read_file(str(user_folder / "healthd.toml"), required=True, setting="baseline_file")
    assert str(raised.value) == (
        f"{user_folder}/healthd.toml (baseline_file): refused: {user_folder} belongs to user {NOBODY}; "
        "it must belong to root"
    )


CHECK = "def run(host, config, past):\n    yield from ()\n"


def is_imported(directory: Path) -> bool:
    try:
        registry.find_checks(str(directory), bounded=False)
    except ConfigError:
        return False
    return True


@as_root
def test_find_checks_runs_no_code_of_a_directory_swapped_by_a_user(shared: Path, user_folder: Path) -> None:
    """A user repeatedly swaps checks.d of root and a folder with other code, below a folder of the user."""
    trace = shared / "it-ran"
    trace.mkdir()
    trace.chmod(0o777)
    checks_folder, other = user_folder / "checks.d", user_folder / "other"
    checks_folder.mkdir()
    (checks_folder / "fan.py").write_text(CHECK)
    hostile_code = f"open({str(trace / 'trace')!r}, 'w')\n{CHECK}"

    def create_other() -> None:
        other.mkdir()
        (other / "fan.py").write_text(hostile_code)

    run_as_nobody(create_other)

    def swap() -> None:
        while os.getppid() != 1:
            os.rename(checks_folder, user_folder / "away")
            os.rename(other, checks_folder)
            os.rename(checks_folder, other)
            os.rename(user_folder / "away", checks_folder)

    swapper = run_as_nobody(swap, wait=False)
    try:
        end, imports = time.monotonic() + 1.0, []
        while len(imports) < 20 or (len(imports) < 200 and time.monotonic() < end):
            imports.append(is_imported(checks_folder))
    finally:
        os.kill(swapper, signal.SIGKILL)
        os.waitpid(swapper, 0)
    assert not any(imports), "the folder sometimes contains root's files, but they cannot be trusted there"
    assert list(trace.iterdir()) == []


def test_load_site_imports_the_checked_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file takes the name after the check, and compiled files of yet another one exist."""
    import py_compile

    file, other_file = tmp_path / "fan.py", tmp_path / "other"
    file.write_text(f"NOTE = 'checked'\n{CHECK}")
    other_file.write_text(f"NOTE = 'swapped'\n{CHECK}")
    for hidden in (tmp_path / "__pycache__/fan.cpython-999.pyc", tmp_path / "fan.pyc"):
        py_compile.compile(str(other_file), cfile=str(hidden))
    py_compile.compile(str(other_file), cfile=str(Path(__import__("importlib.util").util.cache_from_source(str(file)))))
    content = ownership.read_all

    def read_then_swap(descriptor: int) -> bytes:
        os.replace(other_file, file)
        return content(descriptor)

    monkeypatch.setattr(ownership, "read_all", read_then_swap)
    assert vars(registry.load_site(str(file)).module)["NOTE"] == "checked"
