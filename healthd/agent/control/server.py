"""Server for RUNTIME_DIR/healthd.sock, which never waits for a client. agent/control/protocol.py defines the protocol.

Every user may connect, and may stay silent after connecting. The kernel reports which user made a connection
(SO_PEERCRED, unix(7)). Each user may have a few connections. Some connections are reserved for root. Connections beyond
these limits are rejected at once. Each step accepts all waiting connections, so that the listen queue is never full for
long.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from msgspec import Struct, field

from healthd.common.guard import SOCKET, describe_error, drop
from healthd.host import shortage
from healthd.host.passed_descriptor import refuse_descriptors

MAX_REQUEST_BYTES = 64 << 10
MAX_CLIENTS = 32
MAX_UNPRIVILEGED_CLIENTS = 24  # the rest is reserved for root and the daemon's own user
MAX_CLIENTS_PER_USER = 8
CLIENT_TIMEOUT_SECONDS = 5.0
MAX_ACCEPTS = 128  # maximum per step, so that a client that connects in a loop does not block the daemon
TOO_MANY_CONNECTIONS = b'{"error": "too many connections of this user are open", "again": true}\n'
ACCEPT_PAUSE_SECONDS = 0.02  # accept no connections for this time after a rejection, to limit the cost of such a loop
NO_DESCRIPTOR = b'{"error": "healthd has no file descriptor left for this connection", "again": true}\n'


class _Client(Struct, eq=False):
    stream: socket.socket
    uid: int
    since: float
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytes = b""


class ControlServer:
    """Server for the control socket. No client can connect before `open()`.

    `answer(command, user, may_command)` returns the reply to a request. `user` names the peer, as in "root (uid 0)".
    """

    def __init__(
        self, path: str, answer: Callable[[dict[str, Any], str, bool], dict[str, Any]], monotonic: Callable[[], float]
    ) -> None:
        self._path = path
        self._answer = answer
        self._monotonic = monotonic
        self._clients: list[_Client] = []
        self._paused_until = 0.0  # 0 = connections are accepted
        self._spare: shortage.SpareDescriptor | None = None

    def open(self) -> None:
        """Create the socket. Raises OSError."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._brief = refuse_descriptors(self._listener)
        if os.path.lexists(self._path):
            os.unlink(self._path)  # the socket of a killed daemon; the lock proves that no other daemon is running
        try:
            self._listener.bind(self._path)
        except OSError:
            self._listener.close()
            raise
        os.chmod(self._path, 0o666)  # every user may query; commands are authorised by SO_PEERCRED
        self._listener.listen(MAX_ACCEPTS)
        self._listener.setblocking(False)
        self._spare = shortage.SpareDescriptor()

    def waits(self) -> Iterator[tuple[int, bool]]:
        if self._may_accept():
            yield self._listener.fileno(), False
        for client in self._clients:
            yield client.stream.fileno(), bool(client.outgoing)

    @property
    def deadline(self) -> float:
        oldest = min((client.since for client in self._clients), default=float("inf"))
        return min(oldest + CLIENT_TIMEOUT_SECONDS, self._paused_until or float("inf"))

    def step(self) -> None:
        with self._brief():
            self._serve_all()

    def close(self, owns_socket: bool = True) -> None:
        """Close the socket. Pass `owns_socket=False` if the path may now belong to another daemon."""
        with self._brief():
            for client in self._clients:
                client.stream.close()
            self._listener.close()
        if self._spare is not None:
            self._spare.close()
        if owns_socket and os.path.exists(self._path):
            os.unlink(self._path)

    def _serve_all(self) -> None:
        self._accept()
        for client in list(self._clients):
            try:
                is_done = self._serve(client)
            except OSError:
                is_done = True  # the client disconnected
            if is_done or self._monotonic() - client.since > CLIENT_TIMEOUT_SECONDS:
                client.stream.close()
                self._clients.remove(client)

    def _may_accept(self) -> bool:
        return len(self._clients) < MAX_CLIENTS and self._monotonic() >= self._paused_until

    def _accept(self) -> None:
        if self._monotonic() >= self._paused_until:
            self._paused_until = 0.0
        was_rejected = False
        for _ in range(MAX_ACCEPTS):
            if not self._may_accept():
                break
            try:
                stream, _ = self._listener.accept()
            except OSError as error:
                if shortage.has_no_descriptor(error) and self._spare is not None:
                    self._spare.shed(self._listener, NO_DESCRIPTOR)
                    self._paused_until = self._monotonic() + shortage.ACCEPT_PAUSE_SECONDS
                    return
                break  # the client has disconnected
            stream.setblocking(False)
            uid = _peer_uid(stream)
            if self._has_room(uid):
                self._clients.append(_Client(stream, uid, self._monotonic()))
            else:
                was_rejected = True
                _reject(stream)
        if was_rejected:
            self._paused_until = self._monotonic() + ACCEPT_PAUSE_SECONDS

    def _has_room(self, uid: int) -> bool:
        if may_command(uid):
            return True
        unprivileged_uids = [client.uid for client in self._clients if not may_command(client.uid)]
        return len(unprivileged_uids) < MAX_UNPRIVILEGED_CLIENTS and unprivileged_uids.count(uid) < MAX_CLIENTS_PER_USER

    def _serve(self, client: _Client) -> bool:
        """Serve a client. Return True once the client has received its whole answer or has disconnected."""
        if not client.outgoing:
            try:
                chunk = client.stream.recv(1 << 16)
            except BlockingIOError:
                return False
            client.incoming += chunk
            if b"\n" not in client.incoming and chunk and len(client.incoming) < MAX_REQUEST_BYTES:
                return False
            client.outgoing = self._reply(client)
        try:
            while client.outgoing:
                client.outgoing = client.outgoing[client.stream.send(client.outgoing) :]
        except BlockingIOError:
            return False
        return True

    def _reply(self, client: _Client) -> bytes:
        try:
            return json.dumps(self._handle_request(client)).encode() + b"\n"
        except OSError:
            raise  # the client disconnected
        except Exception as error:
            drop(SOCKET, error, bytes(client.incoming[:200]))
            return (
                json.dumps({"error": f"internal error in healthd with this request: {describe_error(error)}"}).encode()
                + b"\n"
            )

    def _handle_request(self, client: _Client) -> dict[str, Any]:
        try:
            request = json.loads(bytes(client.incoming).partition(b"\n")[0])
        except (ValueError, RecursionError):
            return {"error": "the request is not JSON"}
        if not isinstance(request, dict):
            return {"error": "the request is not a JSON object"}
        return self._answer(request, _user_name(client.uid), may_command(client.uid))


def may_command(uid: int) -> bool:
    """Return True if this user may send commands. Other users may only query."""
    return uid in (0, os.geteuid())


def _reject(stream: socket.socket) -> None:
    """Reject a client, after reading its request. Closing a stream with unread data would reset the connection."""
    with stream, suppress(OSError):
        stream.send(TOO_MANY_CONNECTIONS)
        stream.shutdown(socket.SHUT_WR)
        stream.recv(MAX_REQUEST_BYTES)


def _peer_uid(stream: socket.socket) -> int:
    """Return the uid that the peer process had when it connected."""
    _, uid, _ = struct.unpack("iII", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except (KeyError, OSError):  # OSError: no file descriptor is left for reading the password file
        return f"uid {uid}"
