"""Tests of how users are stored, and of the key for their hashes."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat

import pytest

from healthd.fleet.manifest import StoreError
from healthd.fleet.privacy import DROP_USERS, HASH_USERS, KEEP_USERS, MIN_KEY_BYTES, Privacy, site_key

KEY = b"0123456789abcdef"


def test_users_are_kept_dropped_or_hashed():
    assert Privacy(KEEP_USERS, KEY).user("alice") == "alice"
    assert Privacy(DROP_USERS, KEY).user("alice") is None
    expected = hmac.new(KEY, b"user\0alice", hashlib.sha256).hexdigest()[:32]
    assert Privacy(HASH_USERS, KEY).user("alice") == expected


@pytest.mark.parametrize("users", [KEEP_USERS, DROP_USERS, HASH_USERS])
def test_no_user_stays_none(users):
    assert Privacy(users, KEY).user(None) is None
    assert Privacy(users, KEY).user("") is None


@pytest.mark.parametrize("users", [KEEP_USERS, DROP_USERS, HASH_USERS])
def test_jobs_of_one_name_and_work_directory_have_one_run_key_without_the_names(users):
    private = Privacy(users, KEY)
    assert private.run_key("train", "/home/alice/llm") == private.run_key("train", "/home/alice/llm")
    different = {
        private.run_key(*names)
        for names in (
            ("train", "/a"),
            ("train", "/b"),
            ("tune", "/a"),
        )
    }
    assert len(different) == 3
    assert all(key is not None and len(key) == 32 and "train" not in key for key in different)


@pytest.mark.parametrize("names", [(None, None), ("", ""), ("train", ""), ("bash", None), ("", "/a"), (None, "/a")])
def test_jobs_of_which_the_name_or_the_work_directory_is_not_known_are_of_no_run(names):
    assert Privacy(HASH_USERS, KEY).run_key(*names) is None


def test_another_key_gives_other_hashes():
    one, other = Privacy(HASH_USERS, KEY), Privacy(HASH_USERS, KEY[::-1])
    assert one.user("alice") != other.user("alice")
    assert one.run_key("a", "/a") != other.run_key("a", "/a")
    assert one.fingerprint != other.fingerprint


def test_a_name_that_is_no_utf8_has_a_hash():
    assert Privacy(HASH_USERS, KEY).user(os.fsdecode(b"\xff")) is not None


def test_the_key_is_not_shown():
    assert KEY.decode() not in repr(Privacy(HASH_USERS, KEY))


def test_the_key_is_made_once_for_its_owner_alone(tmp_path):
    key = site_key(str(tmp_path), None)
    assert (len(key), site_key(str(tmp_path), None)) == (64, key)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_key_can_lie_elsewhere(tmp_path):
    file = tmp_path / "site.key"
    file.write_bytes(KEY + b"\n")
    file.chmod(0o400)
    assert site_key(str(tmp_path / "db"), str(file)) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_read_or_change_is_refused(tmp_path, mode):
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(mode)
    with pytest.raises(StoreError, match=f"{file}: other users can read or change the key: chmod 600"):
        site_key(str(tmp_path), None)


@pytest.mark.parametrize("size", [0, MIN_KEY_BYTES - 1, 4097])
def test_a_key_of_another_size_is_refused(tmp_path, size):
    file = tmp_path / "key"
    file.write_bytes(b"k" * size)
    file.chmod(0o600)
    with pytest.raises(StoreError, match="a key must have 16 to 4096 bytes"):
        site_key(str(tmp_path), None)


def test_a_key_that_is_not_there_is_not_made_elsewhere(tmp_path):
    with pytest.raises(StoreError, match="the key cannot be read: No such file"):
        site_key(str(tmp_path), str(tmp_path / "site.key"))
    assert os.listdir(tmp_path) == []


def test_a_key_that_is_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(StoreError, match="the key cannot be read: not a regular file"):
        site_key(str(tmp_path), None)
