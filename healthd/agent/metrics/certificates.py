"""The web configuration file and the certificates that it names, as they are now: read again when one of them changes,
so that a renewed certificate needs no restart. What is wrong then changes nothing, and is a trouble.

They are root's (common/ownership.py); the key, and a file that has hashes of passwords, nobody else may read.
"""

from __future__ import annotations

import os
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import NamedTuple

from healthd.agent.metrics.web_config import (
    CIPHERS,
    CURVES,
    MOST_BYTES,
    VERIFIES,
    Tls,
    WebConfig,
    WebConfigError,
    parse,
)
from healthd.common import ownership

HUNG_SECONDS = 1.0  # for so long a client waits while another's thread looks at the files
SOON_SECONDS = 7 * 86400.0  # before its end a certificate is a trouble; ACME clients renew a month before

Stamp = tuple[int, int, int, int]


class Web(NamedTuple):
    """config; context: None = no TLS; expires: when the certificate ends, epoch seconds, 0 = none."""

    config: WebConfig
    context: ssl.SSLContext | None
    expires: float


class WebFiles:
    """`trouble`: why what is on the disk is not in force, or that the certificate ends; "" = none."""

    def __init__(self, path: str, now: Callable[[], float] = time.time) -> None:
        """Raises WebConfigError: then there is no page, rather than one in the clear."""
        self._path, self._now = path, now
        self._lock = threading.Lock()
        self._problem = ""
        self._stamps = self._stamped(())
        self._web = _read(path)
        self._stamps = self._stamped(self._files(self._web))

    def web(self) -> Web:
        """What is in force. Called for each connection. On a mount that hangs one thread waits for it: others have what
        was read before."""
        if not self._lock.acquire(timeout=HUNG_SECONDS):
            return self._web
        try:
            stamps = self._stamped(self._files(self._web))
            if stamps != self._stamps:
                self._stamps = stamps
                try:
                    found = _read(self._path)
                    if (found.context is None) != (self._web.context is None):
                        raise WebConfigError(f"{self._path}: with or without TLS: that changes at the next start only")
                except WebConfigError as error:
                    self._problem = f"{error} (what was read before still holds)"
                else:
                    self._web, self._problem = found, ""
                    self._stamps = self._stamped(self._files(found))
            return self._web
        finally:
            self._lock.release()

    def trouble(self) -> str:
        with self._lock:  # Else a client's thread that hangs in them would be told by nobody.
            pass
        web, now = self.web(), self._now()
        if self._problem or not web.expires or web.expires > now + SOON_SECONDS:
            return self._problem
        day = datetime.fromtimestamp(web.expires, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        tls = web.config.tls_server_config
        return f"{tls.cert_file if tls else ''}: the certificate {'ends' if web.expires > now else 'ended'} {day}"

    def _files(self, web: Web) -> tuple[str, ...]:
        tls = web.config.tls_server_config
        return tuple(path for path in (tls.cert_file, tls.key_file, tls.client_ca_file) if path) if tls else ()

    def _stamped(self, files: tuple[str, ...]) -> tuple[Stamp | None, ...]:
        return tuple(map(_stamp, (self._path, *files)))


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(path: str) -> Web:
    try:
        with _opened(path) as (descriptor, mode):
            text = os.read(descriptor, MOST_BYTES + 1)
            if len(text) > MOST_BYTES:
                raise WebConfigError(f"is longer than {MOST_BYTES >> 10} KiB")
            config = parse(text.decode("utf-8"), os.path.dirname(os.path.abspath(path)))
            if config.basic_auth_users and mode & 0o004:
                raise WebConfigError(f"has hashes of passwords, and everybody may read it: chmod 0640 {path}")
    except UnicodeDecodeError:
        raise WebConfigError(f"{path}: is no UTF-8 text") from None
    except WebConfigError as error:
        raise WebConfigError(f"{path}: {error}") from None
    tls = config.tls_server_config
    if tls is None:
        return Web(config, None, 0.0)
    return Web(config, *_context(tls))


@contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """(descriptor, mode). WebConfigError, with the path."""
    try:
        with ownership.opened(path) as descriptor:
            yield descriptor, os.fstat(descriptor).st_mode
    except ownership.Untrusted as error:
        raise WebConfigError(str(error)) from None
    except OSError as error:
        raise WebConfigError(f"cannot be read: {error.strerror or error}") from None


def _context(tls: Tls) -> tuple[ssl.SSLContext, float]:
    """And when the certificate ends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    versions = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
    context.minimum_version, context.maximum_version = versions[tls.min_version], versions[tls.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    if tls.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    if suites := [CIPHERS[name] for name in tls.cipher_suites if CIPHERS[name]]:
        context.set_ciphers(":".join(suites))
    for curve in tls.curve_preferences:
        context.set_ecdh_curve(CURVES[curve])
    # Through the descriptors that were looked at: a name may mean another file a moment later.
    with _named(tls.cert_file) as (certificate, _), _named(tls.key_file) as (key, mode):
        if stat.S_IMODE(mode) & 0o007:
            raise WebConfigError(f"{tls.key_file}: everybody may read the key: chmod 0640 {tls.key_file}")
        text = ownership.content(certificate)
        try:
            # Else OpenSSL would ask the terminal for the password of a key.
            context.load_cert_chain(f"/proc/self/fd/{certificate}", f"/proc/self/fd/{key}", password=lambda: "")
            expires = not_after(ssl.PEM_cert_to_DER_cert(_first(text)))
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            raise WebConfigError(f"{tls.cert_file}, {tls.key_file}: no certificate with its key: {why}") from None
    if verifies := VERIFIES[tls.client_auth_type]:
        context.verify_mode = ssl.CERT_REQUIRED if verifies == "required" else ssl.CERT_OPTIONAL
        with _named(tls.client_ca_file) as (authorities, _):
            try:
                context.load_verify_locations(f"/proc/self/fd/{authorities}")
            except OSError as error:
                why = getattr(error, "reason", None) or error.strerror
                raise WebConfigError(f"{tls.client_ca_file}: no certificates of an authority: {why}") from None
    return context, expires


@contextmanager
def _named(path: str) -> Iterator[tuple[int, int]]:
    opened = _opened(path)
    try:
        found = opened.__enter__()
    except WebConfigError as error:
        raise WebConfigError(f"{path}: {error}") from None
    try:
        yield found
    finally:
        opened.__exit__(None, None, None)


# --- when a certificate ends


def _first(text: bytes) -> str:
    """The server's own certificate comes first in its file (OpenSSL, SSL_CTX_use_certificate_chain_file)."""
    begin, end = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
    found = text[text.find(begin) : text.find(end) + len(end)]
    return found.decode("ascii", "replace")


def not_after(certificate: bytes) -> float:
    """notAfter of a certificate in DER (RFC 5280, 4.1): epoch seconds. The ssl module tells it of the other side's
    certificates only. ValueError: it is none."""
    _, body, _ = _element(_element(certificate)[1])  # Certificate -> tbsCertificate
    tag, _, rest = _element(body)
    if tag == 0xA0:  # version
        _, _, rest = _element(rest)
    for _ in range(2):  # signature, issuer
        _, _, rest = _element(rest)
    _, validity, _ = _element(rest)
    _, _, rest = _element(validity)  # notBefore
    tag, words, _ = _element(rest)
    text = words.decode("ascii")
    if tag == 0x17:  # UTCTime: years from 1950 to 2049
        text = f"{'19' if text[:2] >= '50' else '20'}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """(tag, content, what follows) of the first element. ValueError."""
    if len(der) < 2:
        raise ValueError("the certificate is cut off")
    length, start = der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    if start + length > len(der):
        raise ValueError("the certificate is cut off")
    return der[0], der[start : start + length], der[start + length :]
