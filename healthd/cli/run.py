"""`healthd run`: run the daemon in the foreground."""

from __future__ import annotations

import argparse

from healthd.cli import flags
from healthd.cli.flags import Command, load_settings, settings_errors_as_usage
from healthd.cli.terminal import REFUSED, Stop


def _run(args: argparse.Namespace) -> int:
    from healthd.agent import daemon

    with settings_errors_as_usage():
        try:
            file = args.config or flags.DEFAULT_FILE
            return daemon.run(lambda checks_dir: load_settings(args, checks_dir=checks_dir), file)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise Stop(f"healthd run: {why}", REFUSED) from None


COMMANDS = {
    "run": Command(
        flags.add_daemon_flags,
        _run,
        "Run the daemon in the foreground until SIGTERM. SIGHUP reloads the settings. Flags override the file.",
        "  healthd run                        # as systemd does\n"
        "  # a second daemon alongside it, to try things out:\n"
        "  healthd run --fake-nvml dgx-h100 --kernel-log /tmp/log --listen off \\\n"
        "              --runtime-dir /tmp/h --state-dir /tmp/h/state\n",
    ),
}
