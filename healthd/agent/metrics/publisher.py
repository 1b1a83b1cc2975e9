"""What the daemon shows: the verdict file, the metrics page, the line in `systemctl status`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from healthd.agent.metrics.web_config import WebConfigError
from healthd.agent.reporting import systemd
from healthd.agent.reporting.status import Snapshot, decision_words, verdict_line
from healthd.agent.settings.config import Settings, listen_addresses
from healthd.common import ownership
from healthd.common.atomic_files import overwrite_file, replace_file
from healthd.common.paths import VERDICT_FILE
from healthd.host import shortage

if TYPE_CHECKING:
    from healthd.agent.metrics.http_server import Pages

log = logging.getLogger("healthd")

FILES_SECONDS = 10.0  # for so long the daemon waits once for certificates, which may lie on a mount that hangs


class _Served(NamedTuple):
    """What serving the metrics came to: the troubles of the addresses, that of the web configuration."""

    metrics_troubles: tuple[str, ...]
    web_trouble: str


class Publisher:
    """`settings`: the present ones; a reload replaces them.

    shown             what was published last; it is set before the metrics page is served
    verdict_word      the first word of the verdict file
    verdict_trouble   why the verdict file could not be written; "" = it was
    metrics_troubles  why the metrics are not served at an address where they are wanted
    web_trouble       what is wrong with the web configuration or its certificates; "" = nothing
    """

    shown: Snapshot

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.verdict_word = ""
        self.verdict_trouble = ""
        self.metrics_troubles: tuple[str, ...] = ()
        self.web_trouble = ""
        self._pages: Pages | None = None
        self._stop_metrics: dict[tuple[str, int], Callable[[], None]] = {}  # by address
        self._rests_on: object = None
        self._serving: threading.Thread | None = None
        self._served: _Served | Exception = _Served((), "")

    def has_news(self, rests_on: object) -> bool:
        """Whether something changed on which the published state rests."""
        before, self._rests_on = self._rests_on, rests_on
        return rests_on != before

    def publish(self, snapshot: Snapshot, drain: bool, until: float, round_ended: bool) -> bool:
        """Show this. The verdict file is written after each round, once an interval in a long one, and when its word
        changes. Returns whether it was.

        `drain`: the prolog shall keep jobs out; `until`: when the verdict expires (epoch).
        """
        self.shown = snapshot
        line = verdict_line(snapshot, drain, until)
        word = line.partition(" ")[0]
        if word == self.verdict_word and not round_ended and not self.verdict_trouble:
            return False
        self.verdict_word = word
        self._write_verdict(line)
        decision = decision_words(snapshot.decision, snapshot.slurm.owner)
        systemd.status(f"{snapshot.verdict.health.value}; {decision}")
        return True

    def _write_verdict(self, line: str) -> None:
        """Replace the verdict file. Where no new file can be made (no inode, no block, no descriptor) the old file is
        overwritten. If that fails too, a verdict that admits jobs is removed, so that nothing reads it for the three
        rounds until it expires; one that keeps jobs out stays and expires."""
        path = os.path.join(self.settings.runtime_dir, VERDICT_FILE)
        try:
            try:
                replace_file(path, line, mode=0o644)
            except ownership.Untrusted:
                raise
            except OSError:
                overwrite_file(path, line)
        except OSError as error:
            problem = f"{path}: the verdict cannot be written: {error.strerror}; the prolog does not know of new faults"
            if self.verdict_trouble != problem:
                log.error("%s", problem)
            self.verdict_trouble = problem
            self._withdraw_verdict(path)
        else:
            self.verdict_trouble = ""

    def _withdraw_verdict(self, path: str) -> None:
        with suppress(OSError), ownership.beside(path) as (folder, name):
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                keeps_jobs_out = os.read(descriptor, 6) == b"drain "
            finally:
                os.close(descriptor)
            if not keeps_jobs_out:
                os.unlink(name, dir_fd=folder)

    def serve_metrics(self) -> None:
        """Serve the metrics page on each address where it is wanted; its library is imported only then. What does not
        succeed (somebody else has the port, the certificate is missing) is shown, and each round tries again: a node
        without metrics is still watched.

        A thread does it, which is waited for FILES_SECONDS once: a file on a mount that hangs holds up it alone. No
        thread is started once all addresses are served and there is no web configuration to read again."""
        config = self.settings.metrics
        if not self._waiting() and (self._pages is None or self._pages.files is None):
            return
        import healthd.agent.metrics.http_server  # noqa: F401  here: it takes a moment, which is no hung mount's

        if self._serving is None or not self._serving.is_alive():
            thread = threading.Thread(target=self._serve, name="metrics files", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                shortage.record(shortage.THREADS)
                return  # the next round tries again
            self._serving = thread
            self._serving.join(FILES_SECONDS)
        served: _Served | Exception
        if self._serving.is_alive():
            problem = f"metrics page: {config.web_config}: no answer: does it, or a certificate, lie on a hung mount?"
            served = _Served(self.metrics_troubles, problem)
        else:
            served = self._served
        if isinstance(served, Exception):
            raise served
        for sentence in (*served.metrics_troubles, served.web_trouble):
            if sentence not in ("", *self.metrics_troubles, self.web_trouble):
                log.error("%s", sentence)
        self.metrics_troubles, self.web_trouble = served

    def _waiting(self) -> list[tuple[str, int]]:
        """The addresses that are not served yet."""
        wanted = listen_addresses(self.settings.metrics.listen, "metrics.listen")
        return [address for address in wanted if address not in self._stop_metrics]

    def _serve(self) -> None:
        try:
            self._served = self._try_to_serve()
        except Exception as error:  # the daemon's thread raises it
            self._served = error

    def _try_to_serve(self) -> _Served:
        from healthd.agent.metrics.http_server import Pages, serve

        config, waiting = self.settings.metrics, self._waiting()
        problems, web_trouble = [], ""
        try:
            if self._pages is None:  # asked from their own threads
                self._pages = Pages(lambda: self.shown, config.web_config)
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
                web_trouble = f"metrics page: {problem}"
        except WebConfigError as error:
            web_trouble = f"no metrics page: {error}"
        return _Served(tuple(problems), web_trouble)

    def close(self) -> None:
        for stop in list(self._stop_metrics.values()):
            stop()
