"""Parser for the web configuration file of Prometheus and its exporters: TLS, client certificates and headers.

The format is defined by prometheus/exporter-toolkit (docs/web-configuration.md). PyYAML (the extra healthd[web]) parses
it. Unknown and unsupported keys are refused, because ignoring them would leave the page less protected than the file
requires. Relative paths are relative to the file's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from msgspec import field
from msgspec.structs import replace

from healthd.common.codec import ConvertError, load
from healthd.common.errors import HealthdError
from healthd.common.values import Value

MAX_BYTES = 256 << 10
VERSIONS = ("TLS12", "TLS13")
VERIFIES = {"NoClientCert": "", "VerifyClientCertIfGiven": "optional", "RequireAndVerifyClientCert": "required"}
# Go's names (crypto/tls CipherSuites()) -> OpenSSL's (openssl-ciphers(1)). The TLS 1.3 suites are always on, as in Go.
CIPHERS = {
    "TLS_AES_128_GCM_SHA256": "",
    "TLS_AES_256_GCM_SHA384": "",
    "TLS_CHACHA20_POLY1305_SHA256": "",
    **{
        f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{openssl}"
        for key in ("ECDSA", "RSA")
        for go, openssl in (
            ("AES_128_CBC_SHA", "AES128-SHA"),
            ("AES_256_CBC_SHA", "AES256-SHA"),
            ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
            ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
            ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        )
    },
}
CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
HEADERS: dict[str, tuple[str, ...]] = {  # "" allows any value
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
UNSUPPORTED = {  # key -> the alternative
    "basic_auth_users": "put a proxy that checks passwords in front of the metrics page, or use metrics.textfile",
    "tls_server_config.cert": "name a file with cert_file",
    "tls_server_config.key": "name a file with key_file",
    "tls_server_config.client_ca": "name a file with client_ca_file",
    "rate_limit": "healthd renders the page at most once a second for all clients",
}


class WebConfigError(HealthdError):
    """Raised if the web configuration or one of its files is invalid. The message is one sentence that names the
    file."""


class Tls(Value, frozen=True):
    """`tls_server_config`, with the file's names and defaults."""

    cert_file: str
    key_file: str
    client_auth_type: str = "NoClientCert"
    client_ca_file: str = ""
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()


class Http(Value, frozen=True):
    """`http_server_config`. `http2` has no effect: the page is served over HTTP/1."""

    http2: bool = True
    headers: dict[str, str] = field(default_factory=dict)


class WebConfig(Value, frozen=True):
    tls_server_config: Tls | None = None
    http_server_config: Http = Http()


def parse(text: str, folder: str) -> WebConfig:
    """Parse the text of a file in `folder`. Raises WebConfigError; the message does not include the file's name."""
    table = _yaml(text)
    for key, alternative in UNSUPPORTED.items():
        outer, _, inner = key.partition(".")
        section = table.get(outer)
        if outer in table and (not inner or (isinstance(section, Mapping) and section.get(inner) is not None)):
            raise WebConfigError(f"{key} is not supported: {alternative}")
    for name, value in table.items():
        if value is None:
            raise WebConfigError(f"{name} is empty: fill it in or remove it")
    try:
        config = load(WebConfig, table)
    except ConvertError as error:
        raise WebConfigError(str(error)) from None
    if problem := _problem(config):
        raise WebConfigError(problem)
    tls = config.tls_server_config
    return config if tls is None else replace(config, tls_server_config=_in_folder(tls, folder))


def _yaml(text: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise WebConfigError("the file cannot be parsed without PyYAML (extra web): pip install PyYAML") from None

    def line(node: Any) -> int:
        return int(node.start_mark.line) + 1

    class Loader(yaml.SafeLoader):
        """Loader that refuses duplicate keys (PyYAML silently uses the last one) and keys that are not strings."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [self.construct_object(key, deep=True) for key, _ in node.value]
            for number, name in enumerate(names):
                if not isinstance(name, str):
                    raise WebConfigError(f"line {line(node)}: {str(name)[:40]} is not a string: put it in quotes")
                if name in names[:number]:
                    raise WebConfigError(f"line {line(node)}: duplicate key {name[:40]}")
            return dict(super().construct_mapping(node, deep=deep))

    try:
        found = yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise WebConfigError(f"not YAML: {where}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        lines = str(error).splitlines()
        raise WebConfigError(f"not YAML: {lines[0] if lines else type(error).__name__}") from None
    if found is None:
        raise WebConfigError("the file is empty; without TLS and headers, metrics.web_config is not needed")
    if not isinstance(found, dict):
        raise WebConfigError("must be a table with tls_server_config and http_server_config")
    return found


def _problem(config: WebConfig) -> str:
    """Return the first problem with the values as one sentence, or "" if all values are valid."""
    for name, value in config.http_server_config.headers.items():
        if name not in HEADERS:
            return f"http_server_config.headers: {name[:40]} cannot be set: only {', '.join(HEADERS)}"
        if not value.isprintable() or not value.isascii():
            return f"http_server_config.headers.{name}: contains characters that a header must not contain"
        if HEADERS[name] and value not in HEADERS[name]:
            return f"http_server_config.headers.{name}: must be {' or '.join(HEADERS[name])}, got {value[:40]}"
    return _tls_problem(config.tls_server_config) if config.tls_server_config else ""


def _tls_problem(tls: Tls) -> str:
    where = "tls_server_config"
    if not tls.cert_file or not tls.key_file:
        return f"{where}: {'key_file' if tls.cert_file else 'cert_file'} is missing"
    if tls.client_auth_type in ("RequestClientCert", "RequireAnyClientCert"):
        return f"{where}.client_auth_type: {tls.client_auth_type} is not supported: it does not verify certificates"
    if tls.client_auth_type not in VERIFIES:
        return f"{where}.client_auth_type: must be one of {', '.join(VERIFIES)}, got {tls.client_auth_type[:40]}"
    verifies = VERIFIES[tls.client_auth_type]
    if bool(verifies) != bool(tls.client_ca_file):
        return f"{where}: client_ca_file and a client_auth_type that verifies must be set together"
    if tls.client_allowed_sans and verifies != "required":
        return f"{where}.client_allowed_sans: needs client_auth_type RequireAndVerifyClientCert"
    for name in ("min_version", "max_version"):
        if (value := getattr(tls, name)) not in VERSIONS:
            return f"{where}.{name}: must be {' or '.join(VERSIONS)}, got {value[:40]}"
    if tls.min_version > tls.max_version:
        return f"{where}: min_version is above max_version"
    for suite in tls.cipher_suites:
        if suite not in CIPHERS:
            return f"{where}.cipher_suites: {suite[:60]} is not one of {', '.join(CIPHERS)}"
    if len(tls.curve_preferences) > 1:
        return f"{where}.curve_preferences: only one curve is supported"
    for curve in tls.curve_preferences:
        if curve not in CURVES:
            return f"{where}.curve_preferences: {curve[:40]} is not one of {', '.join(CURVES)}"
    return ""


def _in_folder(tls: Tls, folder: str) -> Tls:
    def at(path: str) -> str:
        return os.path.join(folder, path) if path else ""

    return replace(tls, cert_file=at(tls.cert_file), key_file=at(tls.key_file), client_ca_file=at(tls.client_ca_file))
