"""The metrics page over HTTP, or HTTPS (certificates.py). This module is imported only if a page is configured.

Any client that can reach the port may connect and stay silent, send its request byte by byte, send garbage, or leave a
TLS handshake unfinished. None of this delays the page for other clients. For each address, healthd uses at most CLIENTS
threads, and at most MAX_HEAD_BYTES of memory per client.
"""

from __future__ import annotations

import ctypes
import html
import http.server
import io
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.exposition import choose_encoder, gzip_accepted

from healthd.agent.metrics import families
from healthd.agent.metrics.exposition import OPENMETRICS, Deflated, TextCache, content_type, deflated, gzipped
from healthd.agent.reporting.status import Snapshot, snapshot_health, snapshot_limits
from healthd.common.guard import METRICS, drop
from healthd.common.text import printable
from healthd.host import shortage

if TYPE_CHECKING:
    from healthd.agent.metrics.certificates import Web, WebFiles

log = logging.getLogger("healthd")

CLIENT_SECONDS = 10.0  # maximum time until the last byte of the answer; Prometheus' default timeout for a scrape
CLIENTS = 16  # maximum number of concurrent clients
MAX_HEAD_BYTES = 16 << 10  # maximum size of the request line and the headers
CACHE_SECONDS = 1.0  # how long a page is reused for all clients, because rendering a page delays the daemon
MAX_CONDITIONS = 20  # maximum number of conditions on the landing page
METHODS = ("GET", "HEAD")
ARENA_MAX = -8  # M_ARENA_MAX in malloc.h: mallopt(3)
TEXT = "text/plain; charset=utf-8"
LANDING = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>healthd on {node}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; margin: 3em auto; max-width: 38em; }}
body {{ padding: 0 1em; }} h1 {{ font-size: 1.4em; margin-bottom: 0; }} h1 + p {{ margin-top: 0; color: #57606a; }}
a {{ color: #0550ae; }} @media (prefers-color-scheme: dark) {{ body {{ color: #e6edf3; background: #0d1117; }}
h1 + p {{ color: #9198a1; }} a {{ color: #79c0ff; }} }}
</style></head><body>
<h1>healthd on {node}</h1>
<p>The node health daemon for GPU clusters run by Slurm, version {version}, mode {mode}.</p>
<p>Health of this node: <strong>{health}</strong></p>
<ul>{conditions}</ul>
<ul>
<li><a href="metrics">metrics</a>: the node's health and the readings of the checks, for Prometheus</li>
<li><a href="-/healthy">-/healthy</a>: status 200 if the daemon is running, whether or not the node is healthy</li>
</ul>
<p>For details, run <code>healthd status</code> on the node.</p>
</body></html>
"""


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Pages:
    """Pages for all clients on all addresses, rendered at most once a second. The clients' threads call the methods.

    `files` is the web configuration, or None if all clients are served over plain HTTP.
    """

    def __init__(self, get_snapshot: Callable[[], Snapshot], web_config: str = "") -> None:
        """Create the pages. Raises WebConfigError."""
        self._get_snapshot = get_snapshot
        self._pages: dict[tuple[bool, bool], _CachedPage] = {}
        self._written: dict[bool, tuple[TextCache, TextCache]] = {False: ({}, {}), True: ({}, {})}  # for both parts
        self._making = threading.Lock()
        self._bad_accept_logged = False
        self.files: WebFiles | None = None
        if web_config:  # PyYAML is needed only here
            from healthd.agent.metrics.certificates import WebFiles

            self.files = WebFiles(web_config)

    def answer(self, path: str, accept: str, zipped: bool) -> Answer:
        path = path.partition("?")[0]
        if path == "/metrics":
            openmetrics = self._accepts_openmetrics(accept)
            zip_header = (("Content-Encoding", "gzip"),) if zipped else ()
            return Answer(200, content_type(openmetrics), self._metrics(openmetrics, zipped), zip_header)
        if path == "/":
            snapshot = self._get_snapshot()
            fields = {
                "node": snapshot.node_name,
                "version": snapshot.version,
                "mode": snapshot.mode,
                "health": snapshot_health(snapshot).value,
            }
            shown = snapshot.verdict.conditions[:MAX_CONDITIONS]
            lines = [*snapshot_limits(snapshot), *(f"{c.severity.name.lower()}: {c.key}: {c.message}" for c in shown)]
            rows = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
            page = LANDING.format(**{name: html.escape(text) for name, text in fields.items()}, conditions=rows)
            return Answer(200, "text/html; charset=utf-8", page.encode("utf-8", "replace"))
        if path == "/-/healthy":
            health = snapshot_health(self._get_snapshot()).value
            return Answer(200, TEXT, f"healthd is running. Health of the node: {health} (see /metrics).\n".encode())
        return Answer(404, TEXT, b"Not found. Pages: / and /metrics and /-/healthy.\n")

    def _metrics(self, openmetrics: bool, zipped: bool) -> bytes:
        with self._making:
            snapshot, page = self._get_snapshot(), self._pages.get((openmetrics, zipped))
            is_same_snapshot = page is not None and page.snapshot is snapshot
            if page is None or not is_same_snapshot or time.monotonic() - page.rendered_at >= CACHE_SECONDS:
                stable = (
                    page.stable if page and is_same_snapshot else self._render_stable(snapshot, openmetrics, zipped)
                )
                volatile = families.render_volatile(snapshot, openmetrics, self._written[openmetrics][1])
                body = gzipped(stable, volatile) if isinstance(stable, Deflated) else stable + volatile
                page = _CachedPage(snapshot, stable, body, time.monotonic())
                self._pages[openmetrics, zipped] = page
        return page.body

    def _render_stable(self, snapshot: Snapshot, openmetrics: bool, zipped: bool) -> bytes | Deflated:
        text = families.render_stable(snapshot, openmetrics, self._written[openmetrics][0])
        return deflated(text) if zipped else text

    def _accepts_openmetrics(self, accept: str) -> bool:
        try:
            return choose_encoder(accept)[1].startswith(OPENMETRICS)
        except Exception:  # the library does not validate it
            if not self._bad_accept_logged:
                self._bad_accept_logged = True
                header = printable(accept[:80])
                log.warning("metrics page: a client sent an invalid Accept header and received plain text: %s", header)
            return False


def serve(address: tuple[str, int], pages: Pages) -> tuple[int, Callable[[], None]]:
    """Serve `address` from a thread. Port 0 means any free port.

    Return the port and a function that stops the thread. Raises OSError; the message is one sentence.
    """
    use_single_heap()
    try:
        server = _Server(address, pages)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OSError(f"metrics.listen: cannot listen on {address[0]}:{address[1]}: {why}") from None
    stopping = threading.Event()

    def listen() -> None:
        while not stopping.is_set():
            server.timeout = server.end_overdue()
            server.handle_request()

    thread = threading.Thread(target=listen, name="metrics", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        server.server_close()
        shortage.record(shortage.THREADS)
        raise OSError(f"metrics.listen: no thread can be started for {address[0]}:{address[1]}") from None

    def stop() -> None:
        stopping.set()
        server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread without closing a descriptor in use
        thread.join(1.0)
        server.server_close()

    return int(server.server_address[1]), stop


@dataclass(slots=True)
class _Client:
    """A connected client. `stream` is its connection, possibly wrapped in TLS."""

    stream: socket.socket
    since: float  # monotonic
    has_requested: bool = False


class _CachedPage(NamedTuple):
    """A rendered page. `stable` is the part that stays the same until the next snapshot."""

    snapshot: Snapshot
    stable: bytes | Deflated
    body: bytes
    rendered_at: float  # monotonic


class _Server(socketserver.ThreadingTCPServer):
    # Not http.server.HTTPServer, which resolves the host name when it starts, and can hang.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128  # the kernel queues bursts of clients

    def __init__(self, address: tuple[str, int], pages: Pages) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.pages = pages
        self._clients: dict[object, _Client] = {}  # by connection
        self._running = 0
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._spare: shortage.SpareDescriptor | None = None  # super() calls server_close() if it cannot bind
        super().__init__(address, _Handler)
        try:
            self._spare = shortage.SpareDescriptor()
        except OSError:
            super().server_close()
            raise

    def server_close(self) -> None:
        super().server_close()
        if self._spare is not None:
            self._spare.close()

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection. If no descriptor is free, close the waiting connections and pause; otherwise poll(2)
        would return at once.
        """
        try:
            return super().get_request()
        except OSError as error:
            if shortage.has_no_descriptor(error) and self._spare is not None:
                self.socket.setblocking(False)
                try:
                    self._spare.shed(self.socket)
                finally:
                    self.socket.setblocking(True)
                time.sleep(shortage.ACCEPT_PAUSE_SECONDS)
            raise

    def end_overdue(self) -> float | None:
        """Disconnect clients whose time is up. Return the seconds until the next client is due, or None if there are no
        clients.
        """
        now = time.monotonic()
        with self._lock:
            for client in self._clients.values():
                if now - client.since >= CLIENT_SECONDS:
                    _disconnect(client)
            ends = [client.since + CLIENT_SECONDS for client in self._clients.values()]
        return max(0.1, min(ends) - now) if ends else None

    def verify_request(self, stream: object, _address: object) -> bool:
        assert isinstance(stream, socket.socket)
        with self._lock:
            if len(self._clients) >= CLIENTS:  # a scrape sends its request at once, so disconnect the others first
                oldest = min(
                    self._clients,
                    key=lambda connection: (self._clients[connection].has_requested, self._clients[connection].since),
                )
                _disconnect(self._clients.pop(oldest))
            self._clients[stream] = _Client(stream, time.monotonic())
            # Disconnected clients take a moment to finish. The new client waits for them instead of being rejected.
            return self._ended.wait_for(lambda: self._running < 2 * CLIENTS, CLIENT_SECONDS / 2)

    def process_request(self, stream: object, address: object) -> None:
        with self._lock:
            self._running += 1
        try:
            super().process_request(stream, address)  # type: ignore[arg-type]
        except RuntimeError:  # no thread can be started for this client
            with self._lock:
                self._running -= 1
            shortage.record(shortage.THREADS)
            self.shutdown_request(stream)

    def process_request_thread(self, stream: object, address: object) -> None:
        try:
            super().process_request_thread(stream, address)  # type: ignore[arg-type]
        finally:
            with self._lock:
                self._running -= 1
                self._ended.notify()

    def shutdown_request(self, stream: object) -> None:
        with self._lock:
            client = self._clients.pop(stream, None)
        super().shutdown_request(stream if client is None else client.stream)  # type: ignore[arg-type]

    def wrap_tls(self, stream: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Wrap the stream in TLS before the handshake, so that a later disconnect closes the wrapped stream. Raises
        OSError."""
        with self._lock:
            if stream not in self._clients:
                raise ConnectionAbortedError
            tls_stream = context.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)
            self._clients[stream].stream = tls_stream
        return tls_stream

    def mark_requested(self, stream: object) -> None:
        """Record that this client has sent a whole request. Clients without a whole request are disconnected first."""
        with self._lock:
            if stream in self._clients:
                self._clients[stream].has_requested = True

    def handle_error(self, _request: object, client: object) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, OSError):  # OSError: the client disconnected
            drop(METRICS, error, client)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_SECONDS

    def log_message(self, _format: str, *_args: object) -> None:
        """Do not log requests."""

    def version_string(self) -> str:
        """Return no version, because a version would help attackers more than users."""
        return "healthd"

    def setup(self) -> None:
        """Do the handshake and read the head, within limits. http.server itself would keep up to a hundred headers of
        64 KiB.
        """
        stream, files = self.request, self.server.pages.files
        self.web = files.web() if files else None
        if self.web and self.web.context:
            self.request = self.server.wrap_tls(stream, self.web.context)
            self.request.settimeout(self.timeout)
            self.request.do_handshake()
            _require_allowed_name(self.request, self.web)
        super().setup()
        head = bytearray()
        while b"\n\r\n" not in head and b"\n\n" not in head:
            chunk = self.connection.recv(4096)
            if not chunk:
                break
            head += chunk
            if len(head) > MAX_HEAD_BYTES:
                raise ConnectionAbortedError
        self.server.mark_requested(stream)
        self.rfile = io.BytesIO(head)

    def handle(self) -> None:
        self.raw_requestline = self.rfile.readline(MAX_HEAD_BYTES)
        if self.raw_requestline and self.parse_request():
            self._send(self._answer())

    def _answer(self) -> Answer:
        if self.command not in METHODS:
            return Answer(405, TEXT, b"Only GET and HEAD.\n", (("Allow", ", ".join(METHODS)),))
        zipped = gzip_accepted(self.headers.get("Accept-Encoding", ""))
        return self.server.pages.answer(self.path, self.headers.get("Accept", ""), zipped)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        for name, value in answer.headers:
            self.send_header(name, value)
        for name, value in self.web.config.http_server_config.headers.items() if self.web else ():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


def _require_allowed_name(stream: ssl.SSLSocket, web: Web) -> None:
    """Require that client_allowed_sans lists a name in the client's certificate. Raises ConnectionAbortedError."""
    tls = web.config.tls_server_config
    if tls and tls.client_allowed_sans:
        names = (stream.getpeercert() or {}).get("subjectAltName", ())
        if not {name[1] for name in names if isinstance(name, tuple)} & set(tls.client_allowed_sans):
            raise ConnectionAbortedError


def _disconnect(client: _Client) -> None:
    with suppress(OSError):  # the client's thread has already closed the connection
        # Use the connection below TLS, because the client's thread may be reading. The thread must then read an end of
        # file.
        socket.socket.shutdown(client.stream, socket.SHUT_RDWR)


def use_single_heap() -> None:
    """Make malloc use a single heap. Call this before a second thread is started.

    glibc gives concurrent threads their own heaps, up to eight per core, and never frees them: 3 MiB after many clients
    of the metrics page. Python's threads take turns, so they need only one heap. Other C libraries have no such
    function.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(ARENA_MAX, 1)
