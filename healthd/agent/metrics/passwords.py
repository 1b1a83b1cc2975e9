"""Passwords against bcrypt hashes, by the C library's libcrypt (libxcrypt, crypt(5)): every Linux since 2018 has it, so
that no compiled package comes to a node for it (docs/adr/0027).

A guess costs CPU time: one is worked on at a time, so that guessing takes at most one core, and what was found right or
wrong is remembered, right ones apart: no number of guesses keeps out who is known.

Who is not known yet waits: WAITING passwords at most, in the order that they came, those of an address that guessed
wrong a while ago behind all others, whose place a better one takes. So a right password that is new passes guesses from
other addresses. From the address of the guesses themselves (users of the node, and a Prometheus there), or where they
come from many addresses, it needs luck at its first scrape, and no more of it once it is known.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import hmac
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from healthd.agent.metrics.web_config import WebConfigError
from healthd.common.errors import HealthdError

CRYPT_DATA_BYTES = 32768  # sizeof(struct crypt_data), crypt.h
REMEMBERED = 100  # of each kind, as exporter-toolkit (web/cache.go)
WAITING = 4  # passwords; at bcrypt's cost 14 they take some seconds
WRONG_SECONDS = 600.0  # for so long an address that guessed wrong waits behind others
LOOK_SECONDS = 0.1  # who waits looks so often whether its client is still there
NOBODYS_SALT = "ShouldNeverFitAnyHash."  # any 22 characters of bcrypt's alphabet


class TooBusy(HealthdError):
    """Others' guesses are worked on."""


@dataclass(slots=True, eq=False)
class _Guess:
    address: str
    key: bytes


@functools.cache
def _crypt() -> ctypes.CDLL:
    """Raises WebConfigError: the C library has no bcrypt."""
    known = ("U*U", "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW")  # of crypt_blowfish's own tests
    for name in ("libcrypt.so.1", "libcrypt.so.2"):
        try:
            library = ctypes.CDLL(name)
            library.crypt_rn.restype = ctypes.c_char_p
        except (OSError, AttributeError):
            continue
        if _hashed(library, known[0].encode(), known[1]) == known[1]:
            return library
    raise WebConfigError("basic_auth_users: this system's libcrypt knows no bcrypt: install libxcrypt (libcrypt1)")


def _hashed(library: ctypes.CDLL, password: bytes, setting: str) -> str:
    """The hash of this password with the setting of that hash; "" = libcrypt refuses. ctypes lets other threads run."""
    data = ctypes.create_string_buffer(CRYPT_DATA_BYTES)
    found = library.crypt_rn(password, setting.encode("ascii"), data, CRYPT_DATA_BYTES)
    return found.decode("ascii", "replace") if found else ""


def must_be_there() -> None:
    """Raises WebConfigError."""
    _crypt()


class Passwords:
    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._guessed_at: OrderedDict[str, float] = OrderedDict()  # wrong, by address: monotonic
        self._turns = threading.Condition()
        self._waiting: list[_Guess] = []  # in the order that they came
        self._working = False  # one bcrypt at a time

    def fit(
        self,
        hashes: Mapping[str, str],
        user: str,
        password: bytes,
        wait_seconds: float,
        address: str = "",
        is_gone: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Whether this user has this password. Raises TooBusy: after the wait, at once where too many wait, and when
        the client `is_gone`."""
        if b"\0" in password:  # the C library would see what stands before it
            return False
        # A user that is not there costs as much time as one that is: else names could be guessed.
        hashed = hashes.get(user) or f"{next(iter(hashes.values()))[:7]}{NOBODYS_SALT}{'.' * 31}"
        words = b"\0".join((user.encode(errors="replace"), hashed.encode(), password))
        key = hashlib.blake2b(words, key=self._secret).digest()
        fits = self._remembered(key)
        if fits is None:
            with self._turn(_Guess(address, key), wait_seconds, is_gone):
                fits = self._remembered(key)  # another client may have had the same
                if fits is None:
                    fits = hmac.compare_digest(_hashed(_crypt(), password, hashed), hashed) and user in hashes
                    _remember(self._right if fits else self._wrong, key, None)
                    if not fits:
                        self._guessed_at.pop(address, None)
                        _remember(self._guessed_at, address, time.monotonic())
        return fits

    def _remembered(self, key: bytes) -> bool | None:
        return True if key in self._right else False if key in self._wrong else None

    @contextmanager
    def _turn(self, guess: _Guess, wait_seconds: float, is_gone: Callable[[], bool]) -> Iterator[None]:
        until = time.monotonic() + wait_seconds
        with self._turns:
            others = {one.key for one in self._waiting} - {guess.key}
            self._waiting.append(guess)
            try:
                if len(others) >= WAITING:
                    self._waiting.remove(self._in_turn()[-1])
                while guess in self._waiting and not is_gone():
                    if not self._working and self._in_turn()[0] is guess:
                        break
                    left = until - time.monotonic()
                    if left <= 0:
                        raise TooBusy
                    self._turns.wait(min(left, LOOK_SECONDS))
                else:
                    raise TooBusy
                self._working = True
            finally:
                if guess in self._waiting:
                    self._waiting.remove(guess)
                self._turns.notify_all()
        try:
            yield
        finally:
            with self._turns:
                self._working = False
                self._turns.notify_all()

    def _in_turn(self) -> list[_Guess]:
        since = time.monotonic() - WRONG_SECONDS
        return sorted(self._waiting, key=lambda one: self._guessed_at.get(one.address, since) > since)


def _remember(known: OrderedDict[Any, Any], key: object, value: object) -> None:
    known[key] = value
    while len(known) > REMEMBERED:
        known.popitem(last=False)
