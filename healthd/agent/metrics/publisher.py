"""Publish the daemon's state: the verdict file, the metrics page and the line in `systemctl status`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from healthd.agent.metrics.web_config import WebConfigError
from healthd.agent.reporting import systemd
from healthd.agent.reporting.status import Snapshot, decision_text, verdict_line
from healthd.agent.settings.config import Settings, listen_addresses
from healthd.common import ownership
from healthd.common.atomic_files import overwrite_file, replace_file
from healthd.common.paths import VERDICT_FILE
from healthd.host import shortage

if TYPE_CHECKING:
    from healthd.agent.metrics.http_server import Pages

log = logging.getLogger("healthd")

FILES_TIMEOUT_SECONDS = 10.0  # how long the daemon waits, once, for certificates, which may be on a hung mount


class _Served(NamedTuple):
    """Result of serving the metrics: problems with the addresses and with the web configuration."""

    metrics_problems: tuple[str, ...]
    web_problem: str


class Publisher:
    """Publishes snapshots. A reload replaces `settings`.

    snapshot          the last published snapshot; must be set before the metrics page is served
    verdict_word      the first word of the verdict file
    verdict_problem   why the verdict file could not be written, or "" if it was
    metrics_problems  why the metrics are not served at a configured address
    web_problem       the problem with the web configuration or its certificates, or ""
    """

    snapshot: Snapshot

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.verdict_word = ""
        self.verdict_problem = ""
        self.metrics_problems: tuple[str, ...] = ()
        self.web_problem = ""
        self._pages: Pages | None = None
        self._stop_metrics: dict[tuple[str, int], Callable[[], None]] = {}  # by address
        self._inputs: object = None
        self._serving: threading.Thread | None = None
        self._served: _Served | Exception = _Served((), "")

    def has_changed(self, inputs: object) -> bool:
        """Return True if an input of the published state has changed."""
        before, self._inputs = self._inputs, inputs
        return inputs != before

    def publish(self, snapshot: Snapshot, drain: bool, until: float, round_ended: bool) -> bool:
        """Publish a snapshot. Return True if the verdict file was written.

        The file is written after each round, once per interval in a long round, and whenever the verdict's word
        changes.

            drain  the prolog must keep jobs out
            until  when the verdict expires (epoch seconds)
        """
        self.snapshot = snapshot
        line = verdict_line(snapshot, drain, until)
        word = line.partition(" ")[0]
        if word == self.verdict_word and not round_ended and not self.verdict_problem:
            return False
        self.verdict_word = word
        self._write_verdict(line)
        decision = decision_text(snapshot.decision, snapshot.slurm.owner)
        systemd.status(f"{snapshot.verdict.health.value}; {decision}")
        return True

    def _write_verdict(self, line: str) -> None:
        """Replace the verdict file.

        If no new file can be created (no inode, block or descriptor is left), the old file is overwritten. If that
        fails too, a verdict that admits jobs is removed. Otherwise the prolog would use it until it expires after three
        rounds. A verdict that keeps jobs out stays until it expires.
        """
        path = os.path.join(self.settings.runtime_dir, VERDICT_FILE)
        try:
            try:
                replace_file(path, line, mode=0o644)
            except ownership.Untrusted:
                raise
            except OSError:
                overwrite_file(path, line)
        except OSError as error:
            problem = f"{path}: the verdict cannot be written: {error.strerror}; the prolog does not see new faults"
            if self.verdict_problem != problem:
                log.error("%s", problem)
            self.verdict_problem = problem
            self._withdraw_verdict(path)
        else:
            self.verdict_problem = ""

    def _withdraw_verdict(self, path: str) -> None:
        with suppress(OSError), ownership.open_parent(path) as (folder, name):
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                keeps_jobs_out = os.read(descriptor, 6) == b"drain "
            finally:
                os.close(descriptor)
            if not keeps_jobs_out:
                os.unlink(name, dir_fd=folder)

    def serve_metrics(self) -> None:
        """Serve the metrics page on each configured address. The page's library is imported only here.

        A failure (the port is in use, the certificate is missing) is reported, and each round retries. The node is
        still monitored without metrics.

        A thread does the work. The daemon waits for it once, for FILES_TIMEOUT_SECONDS, so a file on a hung mount
        blocks only the thread. Once all addresses are served, a thread is only started if there is a web configuration
        to reload.
        """
        config = self.settings.metrics
        if not self._unserved_addresses() and (self._pages is None or self._pages.files is None):
            return
        import healthd.agent.metrics.http_server  # noqa: F401  not in the thread, where the import would look like a hung mount

        if self._serving is None or not self._serving.is_alive():
            thread = threading.Thread(target=self._serve, name="metrics files", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                shortage.record(shortage.THREADS)
                return  # the next round tries again
            self._serving = thread
            self._serving.join(FILES_TIMEOUT_SECONDS)
        served: _Served | Exception
        if self._serving.is_alive():
            problem = f"metrics page: {config.web_config}: no answer; the file or a certificate may be on a hung mount"
            served = _Served(self.metrics_problems, problem)
        else:
            served = self._served
        if isinstance(served, Exception):
            raise served
        for sentence in (*served.metrics_problems, served.web_problem):
            if sentence not in ("", *self.metrics_problems, self.web_problem):
                log.error("%s", sentence)
        self.metrics_problems, self.web_problem = served

    def _unserved_addresses(self) -> list[tuple[str, int]]:
        """Return the configured addresses that are not served yet."""
        addresses = listen_addresses(self.settings.metrics.listen, "metrics.listen")
        return [address for address in addresses if address not in self._stop_metrics]

    def _serve(self) -> None:
        try:
            self._served = self._try_to_serve()
        except Exception as error:  # raised in the daemon's thread
            self._served = error

    def _try_to_serve(self) -> _Served:
        from healthd.agent.metrics.http_server import Pages, serve

        config, waiting = self.settings.metrics, self._unserved_addresses()
        problems, web_problem = [], ""
        try:
            if self._pages is None:  # called from clients' threads
                self._pages = Pages(lambda: self.snapshot, config.web_config)
            for address in waiting:
                try:
                    port, self._stop_metrics[address] = serve(address, self._pages)
                except OSError as error:
                    problems.append(f"no metrics page: {error}")
                else:
                    is_tls = self._pages.files is not None and self._pages.files.web().context is not None
                    host = f"[{address[0]}]" if ":" in address[0] else address[0]
                    log.info("metrics on http%s://%s:%d/metrics", "s" if is_tls else "", host, port)
            if self._pages.files and (problem := self._pages.files.problem()):
                web_problem = f"metrics page: {problem}"
        except WebConfigError as error:
            web_problem = f"no metrics page: {error}"
        return _Served(tuple(problems), web_problem)

    def close(self) -> None:
        for stop in list(self._stop_metrics.values()):
            stop()
