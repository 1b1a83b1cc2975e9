"""Answers RUNTIME_DIR/healthd.sock without ever waiting for a client. The protocol is in status.py."""

from __future__ import annotations

import json
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from healthd.guard import SOCKET, drop, words

MAX_REQUEST_BYTES = 64 << 10
MAX_CLIENTS = 32
PATIENCE_SECONDS = 5.0


@dataclass(slots=True)
class _Client:
    stream: socket.socket
    since: float
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytes = b""


class ControlServer:
    """`answer(command, who, may_command)` gives the reply to one request; `who` is "root (uid 0)" of the peer."""

    def __init__(
        self, path: str, answer: Callable[[dict[str, Any], str, bool], dict[str, Any]], monotonic: Callable[[], float]
    ) -> None:
        self._path = path
        self._answer = answer
        self._monotonic = monotonic
        self._clients: list[_Client] = []
        if os.path.exists(path):
            os.unlink(path)  # left by a daemon that was killed: the lock says that we are the only one
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o666)  # anyone may ask; the kernel says who may command (SO_PEERCRED)
        self._listener.listen(MAX_CLIENTS)
        self._listener.setblocking(False)

    def waits(self) -> Iterator[tuple[int, bool]]:
        if len(self._clients) < MAX_CLIENTS:
            yield self._listener.fileno(), False
        for client in self._clients:
            yield client.stream.fileno(), bool(client.outgoing)

    @property
    def deadline(self) -> float:
        return min((client.since for client in self._clients), default=float("inf")) + PATIENCE_SECONDS

    def step(self) -> None:
        self._accept()
        for client in list(self._clients):
            try:
                over = self._serve(client)
            except OSError:
                over = True  # the client went away
            if over or self._monotonic() - client.since > PATIENCE_SECONDS:
                client.stream.close()
                self._clients.remove(client)

    def close(self) -> None:
        for client in self._clients:
            client.stream.close()
        self._listener.close()
        if os.path.exists(self._path):
            os.unlink(self._path)

    def _accept(self) -> None:
        while len(self._clients) < MAX_CLIENTS:
            try:
                stream, _ = self._listener.accept()
            except OSError:  # nobody is there any more
                return
            stream.setblocking(False)
            self._clients.append(_Client(stream, self._monotonic()))

    def _serve(self, client: _Client) -> bool:
        """Serve a client. True when it has its whole answer, or left."""
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
            return json.dumps(self._answered(client)).encode() + b"\n"
        except OSError:
            raise  # the client went away
        except Exception as error:
            drop(SOCKET, error, bytes(client.incoming[:200]))
            return json.dumps({"error": f"healthd makes a mistake with this request: {words(error)}"}).encode() + b"\n"

    def _answered(self, client: _Client) -> dict[str, Any]:
        try:
            request = json.loads(bytes(client.incoming).partition(b"\n")[0])
        except (ValueError, RecursionError):
            return {"error": "the request is not JSON"}
        if not isinstance(request, dict):
            return {"error": "the request is not a JSON object"}
        _, uid, _ = struct.unpack("3i", client.stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return self._answer(request, _who(uid), uid in (0, os.geteuid()))


def _who(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
