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


def test_user_is_kept_dropped_or_hashed():
    assert Privacy(KEEP_USERS, KEY).user("alice") == "alice"
    assert Privacy(DROP_USERS, KEY).user("alice") is None
    expected = hmac.new(KEY, b"user\0alice", hashlib.sha256).hexdigest()[:32]
    assert Privacy(HASH_USERS, KEY).user("alice") == expected


@pytest.mark.parametrize("users", [KEEP_USERS, DROP_USERS, HASH_USERS])
def test_missing_user_stays_none(users):
    assert Privacy(users, KEY).user(None) is None
    assert Privacy(users, KEY).user("") is None


@pytest.mark.parametrize("users", [KEEP_USERS, DROP_USERS, HASH_USERS])
def test_run_key_is_same_for_name_and_directory_without_naming_them(users):
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
def test_run_key_needs_name_and_directory(names):
    assert Privacy(HASH_USERS, KEY).run_key(*names) is None


def test_different_keys_give_different_hashes():
    first, second = Privacy(HASH_USERS, KEY), Privacy(HASH_USERS, KEY[::-1])
    assert first.user("alice") != second.user("alice")
    assert first.run_key("a", "/a") != second.run_key("a", "/a")
    assert first.fingerprint != second.fingerprint


def test_user_hashes_non_utf8_name():
    assert Privacy(HASH_USERS, KEY).user(os.fsdecode(b"\xff")) is not None


def test_repr_hides_key():
    assert KEY.decode() not in repr(Privacy(HASH_USERS, KEY))


def test_site_key_is_created_once_with_mode_600(tmp_path):
    key = site_key(str(tmp_path), None)
    assert (len(key), site_key(str(tmp_path), None)) == (64, key)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_site_key_reads_given_file(tmp_path):
    file = tmp_path / "site.key"
    file.write_bytes(KEY + b"\n")
    file.chmod(0o400)
    assert site_key(str(tmp_path / "db"), str(file)) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_site_key_rejects_key_readable_or_writable_by_others(tmp_path, mode):
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(mode)
    with pytest.raises(StoreError, match=f"{file}: other users can read or change the key: chmod 600"):
        site_key(str(tmp_path), None)


@pytest.mark.parametrize("size", [0, MIN_KEY_BYTES - 1, 4097])
def test_site_key_rejects_invalid_size(tmp_path, size):
    file = tmp_path / "key"
    file.write_bytes(b"k" * size)
    file.chmod(0o600)
    with pytest.raises(StoreError, match="a key must have 16 to 4096 bytes"):
        site_key(str(tmp_path), None)


def test_site_key_does_not_create_given_file(tmp_path):
    with pytest.raises(StoreError, match="the key cannot be read: No such file"):
        site_key(str(tmp_path), str(tmp_path / "site.key"))
    assert os.listdir(tmp_path) == []


def test_site_key_does_not_wait_for_fifo(tmp_path):
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(StoreError, match="the key cannot be read: not a regular file"):
        site_key(str(tmp_path), None)
