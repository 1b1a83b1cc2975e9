"""HTTP client for a Prometheus server. The message of each error is one sentence.

The token is sent only to the given address: redirects are not followed, proxies are not used, and certificates are
verified.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from healthd.common.errors import HealthdError
from healthd.common.text import printable

MAX_RESPONSE_BYTES = 16 << 20  # maximum bytes per response; the parsed data takes six times that
DEFAULT_TIMEOUT_SECONDS = 120.0  # per response


class ServerError(HealthdError):
    """The server cannot be queried. The message continues a sentence that begins with the server's address."""


class ResponseTooLarge(ServerError):
    """The response is too large for healthd or the server. A shorter period may work."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address and credentials.

    Attributes:
        url: address before /api/v1: "http://prometheus:9090", "https://mimir.example/prometheus".
        headers: headers for each query: authorization, X-Scope-OrgID.
        ca_file: file with certificates to trust; "" for the system's.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: str = ""


def parse_server(url: str, tenant: str = "", token_file: str = "", basic_file: str = "", ca_file: str = "") -> Server:
    """Check the address and load the credentials. Raises ServerError if the address or a file is wrong.

    Args:
        token_file: file with a bearer token.
        basic_file: file with "user:password".
    """
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isascii()
    except ValueError:  # an unclosed bracket, an invalid port
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ServerError(
            "is not a server address; use http://HOST:PORT or https://HOST:PORT, followed by the path before /api/v1"
        )
    if parts.username is not None:
        raise ServerError("a password in the address is visible to all users of this machine; put it into a file")
    headers = {}
    if tenant:
        headers["X-Scope-OrgID"] = _header(tenant, "the tenant")
    if token_file:
        headers["Authorization"] = f"Bearer {_header(_secret(token_file), token_file)}"
    if basic_file:
        text = _secret(basic_file)
        if ":" not in text:
            raise ServerError(f'{basic_file} does not contain "user:password"')
        headers["Authorization"] = f"Basic {base64.b64encode(text.encode()).decode()}"
    return Server(url.rstrip("/"), headers, ca_file)


def _secret(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None


def _header(text: str, description: str) -> str:
    if not text or not text.isascii() or not text.isprintable():
        raise ServerError(f"{description} is empty or contains characters that are invalid in an HTTP header")
    return text


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, so that the token is not sent to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def query_server(server: Server, path: str, parameters: Mapping[str, str], timeout_seconds: float | None = None) -> Any:
    """Return the `data` in a response from /api/v1. Raises ServerError.

    Args:
        timeout_seconds: default SECONDS.
    """
    timeout_seconds = DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
    try:
        context = ssl.create_default_context(cafile=server.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ServerError(f"the certificates in {server.ca_file} cannot be read: {_error_text(error)}") from None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect()
    )
    url = f"{server.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    request = urllib.request.Request(url, headers={"Accept": "application/json", **server.headers})
    try:
        with opener.open(request, timeout=timeout_seconds) as response:
            body = _read_body(response, timeout_seconds)
    except urllib.error.HTTPError as error:
        with error:
            raise _http_error(error) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            raise ServerError(f"did not answer within {timeout_seconds:g} s") from None
        raise ServerError(f"cannot be reached: {_error_text(reason)}") from None
    except ValueError as error:  # a redirect to an invalid address
        raise ServerError(f"redirects to an invalid address: {_error_text(error)}") from None
    return _parse_data(body)


def _read_body(response: Any, seconds: float) -> bytes:
    deadline, parts, size = time.monotonic() + seconds, [], 0
    while part := response.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_RESPONSE_BYTES:
            raise ResponseTooLarge(f"returns more than {MAX_RESPONSE_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise ServerError(f"did not answer completely within {seconds:g} s")
    return b"".join(parts)


def _http_error(error: urllib.error.HTTPError) -> ServerError:
    if 300 <= error.code < 400:
        where = printable(str(error.headers.get("Location", "elsewhere")))[:200]
        return ServerError(f"redirects to {where}, which was not followed; use that address if it is correct")
    try:
        server_message = json.loads(error.read(1 << 16)).get("error", "")
    except (ValueError, AttributeError, OSError, http.client.HTTPException, RecursionError):
        server_message = ""
    message = printable(str(server_message))[:300]
    # All three servers respond with 422. Prometheus responds with 503 if a query takes too long, and proxies respond
    # with 413, 502 or 504.
    is_too_large = error.code in (413, 422, 502, 504) or (error.code == 503 and "timed out" in message)
    kind = ResponseTooLarge if is_too_large else ServerError
    return kind(f"returned status {error.code}" + (f": {message}" if message else ""))


def _parse_data(body: bytes) -> Any:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError("does not respond with JSON: is this the address of a Prometheus server?") from None
    if not isinstance(answer, dict) or answer.get("status") != "success" or "data" not in answer:
        raise ServerError("does not respond like Prometheus: is this the address of a Prometheus server?")
    return answer["data"]


def _error_text(error: object) -> str:
    return printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]
