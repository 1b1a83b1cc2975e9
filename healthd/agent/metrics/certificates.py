"""TLS for the metrics page: load the web configuration and its certificates, and reload them when a file changes.

A renewed certificate does not require a restart. If a changed file is invalid, the previous configuration stays in
force and `healthd status` reports the problem. All files must belong to root (common/ownership.py), and the key must
not be world-readable.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import NamedTuple

from healthd.agent.metrics.web_config import (
    CIPHERS,
    CURVES,
    MAX_BYTES,
    VERIFIES,
    Tls,
    WebConfig,
    WebConfigError,
    parse,
)
from healthd.common import ownership

HUNG_SECONDS = 1.0  # how long a client waits for another client's thread that checks the files
EXPIRY_WARNING_SECONDS = 7 * 86400.0  # report certificates that expire sooner; ACME clients renew a month before expiry
NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME in openssl/x509_vfy.h; the ssl module has no name for it
HANDSHAKE_ROUNDS = 3  # until the client has finished, client and server take two turns in TLS 1.2 and one in TLS 1.3

Stamp = tuple[int, int, int, int]


class Web(NamedTuple):
    """The current configuration.

    `context` is the TLS context, or None without TLS. `expires` is the certificate's expiry time in epoch seconds, or 0
    without TLS or if `rejected`. `rejected` is the reason why clients always reject the certificate, such as
    "unsuitable certificate purpose", or "".
    """

    config: WebConfig
    context: ssl.SSLContext | None = None
    expires: float = 0.0
    rejected: str = ""


class WebFiles:
    """The web configuration file at `path`, and the files that it names."""

    def __init__(self, path: str, now: Callable[[], float] = time.time) -> None:
        """Raises WebConfigError if a file is invalid. In that case, no page is served, because it would lack TLS."""
        self._path, self._now = path, now
        self._lock = threading.Lock()
        self._problem = ""
        self._stamps = self._read_stamps(())
        self._web = _read(path)
        self._stamps = self._read_stamps(self._files(self._web))

    def web(self) -> Web:
        """Return the current configuration, reloaded if a file has changed. Called for each connection.

        If a file is on a hung mount, one thread waits for the file. All other threads get the previous configuration.
        """
        if not self._lock.acquire(timeout=HUNG_SECONDS):
            return self._web
        try:
            stamps = self._read_stamps(self._files(self._web))
            if stamps != self._stamps:
                self._stamps = stamps
                try:
                    found = _read(self._path)
                    if (found.context is None) != (self._web.context is None):
                        raise WebConfigError(f"{self._path}: TLS can only be turned on or off by a restart")
                except WebConfigError as error:
                    self._problem = f"{error} (the previous configuration stays in force)"
                else:
                    self._web, self._problem = found, ""
                    self._stamps = self._read_stamps(self._files(found))
            return self._web
        finally:
            self._lock.release()

    def problem(self) -> str:
        """Return the reason why the files are not in force, or why clients reject the certificate now or soon, or
        "".
        """
        with self._lock:  # a client's thread may hang in the files; the caller then reports that this call hangs
            pass
        web, now = self.web(), self._now()
        if self._problem or web.config.tls_server_config is None:
            return self._problem
        path = web.config.tls_server_config.cert_file
        if web.rejected:
            return f"{path}: clients reject the certificate: {web.rejected}"
        if web.expires > now + EXPIRY_WARNING_SECONDS:
            return ""
        day = datetime.fromtimestamp(web.expires, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return f"{path}: the certificate {'expires' if web.expires > now else 'expired'} {day}"

    def _files(self, web: Web) -> tuple[str, ...]:
        tls = web.config.tls_server_config
        return tuple(path for path in (tls.cert_file, tls.key_file, tls.client_ca_file) if path) if tls else ()

    def _read_stamps(self, files: tuple[str, ...]) -> tuple[Stamp | None, ...]:
        return tuple(map(_stamp, (self._path, *files)))


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(path: str) -> Web:
    with _opened(path) as descriptor:
        content = os.read(descriptor, MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise WebConfigError(f"{path}: is larger than {MAX_BYTES >> 10} KiB")
    try:
        config = parse(content.decode("utf-8"), os.path.dirname(os.path.abspath(path)))
    except UnicodeDecodeError:
        raise WebConfigError(f"{path}: is not UTF-8 text") from None
    except WebConfigError as error:
        raise WebConfigError(f"{path}: {error}") from None
    return Web(config) if config.tls_server_config is None else _with_tls(config, config.tls_server_config)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a file that belongs to root for reading. Raises WebConfigError."""
    try:
        with ownership.open_file(path) as descriptor:
            yield descriptor
    except ownership.Untrusted as error:
        raise WebConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise WebConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def _with_tls(config: WebConfig, tls: Tls) -> Web:
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
    # OpenSSL opens the checked descriptors, because the paths may refer to other files by then.
    with _opened(tls.cert_file) as certificate, _opened(tls.key_file) as key:
        if os.fstat(key).st_mode & 0o007:
            raise WebConfigError(f"{tls.key_file}: every user may read the key: chmod 0640 {tls.key_file}")
        try:
            # Without `password`, OpenSSL would ask for an encrypted key's password on the terminal.
            context.load_cert_chain(f"/proc/self/fd/{certificate}", f"/proc/self/fd/{key}", password=lambda: "")
            expires, rejected = _validity(context, f"/proc/self/fd/{certificate}")
        except (OSError, ValueError) as error:
            raise WebConfigError(
                f"{tls.cert_file}, {tls.key_file}: not a certificate and its key: {_error_text(error)}"
            ) from None
    if verifies := VERIFIES[tls.client_auth_type]:
        context.verify_mode = ssl.CERT_REQUIRED if verifies == "required" else ssl.CERT_OPTIONAL
        with _opened(tls.client_ca_file) as authorities:
            try:
                context.load_verify_locations(f"/proc/self/fd/{authorities}")
            except OSError as error:
                raise WebConfigError(
                    f"{tls.client_ca_file}: contains no CA certificates: {_error_text(error)}"
                ) from None
    return Web(config, context, expires, rejected)


def _error_text(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _validity(server: ssl.SSLContext, certificate: str) -> tuple[float, str]:
    """Return the certificate's expiry time (epoch seconds) and "". If clients reject a certificate that they trust,
    return 0 and the reason.

    The ssl module only decodes the certificate of a verified peer. Therefore an in-memory client, which trusts exactly
    this certificate at any time, connects to `server`. `server` must not verify clients yet.

    Raises:
        ssl.SSLError: every handshake fails, for example because no cipher suite fits the key.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    client.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(HANDSHAKE_ROUNDS):
            for side in (client_side, server_side):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        ends = (client_side.getpeercert() or {}).get("notAfter")
    except ssl.SSLCertVerificationError as error:
        return 0.0, error.verify_message
    return float(ssl.cert_time_to_seconds(str(ends))), ""
