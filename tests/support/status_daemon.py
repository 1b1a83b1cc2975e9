"""A server that answers `{"command": "status"}` on a control socket with a document of the test."""

from __future__ import annotations

import copy
import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from healthd.common.paths import SOCKET
from tests.docs.test_json_doc import STATUS_DOCUMENT


class StatusDaemon:
    """`document` is the answer and may change at any time. `asked` counts the requests."""

    def __init__(self, runtime_dir: Path, **changes: Any) -> None:
        self.document: dict[str, Any] = {**copy.deepcopy(STATUS_DOCUMENT), **changes}
        self.requests = 0
        self._path = runtime_dir / SOCKET
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> StatusDaemon:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            with stream, suppress(OSError):  # the client may have disconnected
                stream.recv(4096)
                self.requests += 1
                stream.sendall(json.dumps({"status": self.document}).encode() + b"\n")
