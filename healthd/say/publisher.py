"""What the daemon shows: the verdict file, the metrics page, the line in `systemctl status`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from healthd.config import Settings, listen_address
from healthd.machine.files import replace_file
from healthd.say import service
from healthd.say.status import VERDICT_FILE, Snapshot, decision_words, verdict_line

log = logging.getLogger("healthd")


class Publisher:
    """`settings`: the present ones; a reload replaces them.

    shown            what was published last; it is set before the metrics page is served
    verdict_word     the first word of the verdict file
    metrics_trouble  why there is no metrics page, though one is wanted; "" = no trouble
    """

    shown: Snapshot

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.verdict_word = ""
        self.metrics_trouble = ""
        self._stop_metrics: Callable[[], None] | None = None
        self._rests_on: object = None

    def has_news(self, rests_on: object) -> bool:
        """Whether something changed on which the published state rests."""
        before, self._rests_on = self._rests_on, rests_on
        return rests_on != before

    def publish(self, snapshot: Snapshot, drain: bool, until: float, round_ended: bool) -> bool:
        """Show this. The verdict file is written after each round, and when its word changes. Returns whether it was.

        `drain`: the prolog shall keep jobs out; `until`: when the verdict expires (epoch).
        """
        self.shown = snapshot
        line = verdict_line(snapshot, drain, until)
        word = line.partition(" ")[0]
        if word == self.verdict_word and not round_ended:
            return False
        self.verdict_word = word
        self._write_verdict(line)
        decision = decision_words(snapshot.decision, snapshot.slurm.owner)
        service.status(f"{snapshot.verdict.health.value}; {decision}")
        return True

    def _write_verdict(self, line: str) -> None:
        path = os.path.join(self.settings.runtime_dir, VERDICT_FILE)
        try:
            replace_file(path, line, mode=0o644)
        except OSError as error:  # the old verdict expires
            log.error("%s: cannot be written: %s", path, error.strerror)

    def serve_metrics(self) -> None:
        """Serve the metrics page if it is wanted; its library is imported only then. If somebody else has the port,
        that is shown, and each round tries again: a node without metrics is still watched."""
        address = listen_address(self.settings.metrics.listen, "metrics.listen")
        if address is None or self._stop_metrics is not None:
            return
        from healthd.say.metrics import serve

        try:
            port, self._stop_metrics = serve(address, lambda: self.shown)  # asked from its own threads
        except OSError as error:
            if not self.metrics_trouble:
                log.error("no metrics page: %s", error)
            self.metrics_trouble = f"no metrics page: {error}"
            return
        self.metrics_trouble = ""
        log.info("metrics on http://%s:%d/metrics", address[0], port)

    def close(self) -> None:
        if self._stop_metrics is not None:
            self._stop_metrics()
