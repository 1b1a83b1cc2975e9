"""`healthd hooks run`, which the daemon requests, and `healthd hooks test`, for operators."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings, settings_errors_as_usage
from healthd.cli.terminal import OK, REFUSED, Stop, as_json, harmless, write_output

if TYPE_CHECKING:
    from healthd.agent.settings.config import Settings

BUSY_SECONDS = 2.0  # how long to wait while another process runs the hooks


def _run(args: argparse.Namespace) -> int:
    from functools import partial

    from healthd.agent.hooks.request import PROGRAM
    from healthd.agent.hooks.runner import serve_request
    from healthd.agent.reporting import systemd
    from healthd.common.errors import HealthdError
    from healthd.host.oom import raise_score
    from healthd.host.separate_program import serve

    systemd.set_up_logging()
    raise_score()
    runtime_dir = flags.runtime_dir(args)
    try:
        while not serve(runtime_dir, PROGRAM, partial(serve_request, runtime_dir=runtime_dir)):
            time.sleep(BUSY_SECONDS)
    except HealthdError as error:
        raise Stop(f"healthd hooks run: {error}", REFUSED) from None
    except OSError as error:
        raise Stop(f"healthd hooks run: {error.filename or runtime_dir}: {error.strerror}", REFUSED) from None
    return OK


def _test_arguments(parser: Parser) -> None:
    from healthd.agent.settings.config import HOOKS

    parser.add_argument("hook", metavar="|".join(HOOKS), choices=HOOKS, help="hook to run")
    parser.add_argument("--print", action="store_true", help="print the sample event and run nothing")
    parser.add_argument("--config", metavar="FILE", help=f"settings file (default: {flags.DEFAULT_FILE}, if it exists)")
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the daemon's runtime directory (default: from the settings)"
    )
    parser.add_argument("--state-dir", metavar="DIR", help="the daemon's state directory (default: from the settings)")


def _test(args: argparse.Namespace) -> int:
    from healthd.agent.hooks.payload import sample
    from healthd.agent.hooks.runner import run_hook
    from healthd.events.schema import format_time

    with settings_errors_as_usage():
        settings = load_settings(args)[0].settings
    payload = sample(args.hook, settings.cluster, settings.node_name, format_time(time.time()))
    if args.print:
        return write_output(as_json(payload))
    argv = settings.hooks.programs.get(args.hook)
    if argv is None:
        raise Stop(f"healthd hooks test: hooks.{args.hook} is not set in {flags.settings_file(args)[0]}")
    attempt = run_hook(args.hook, argv, payload, settings.hooks.timeout_seconds)
    if not attempt.error:
        _mark_working(args.hook, settings)
    output = "".join(f"  {line}\n" for line in harmless(attempt.output).split("\n") if line.strip())
    lines = [f"{args.hook}: {'failed' if attempt.error else 'works'} after {attempt.seconds:.1f} s"]
    lines += [attempt.error] if attempt.error else []
    return write_output("\n".join(lines) + "\n" + output, REFUSED if attempt.error else OK)


def _mark_working(hook: str, settings: Settings) -> None:
    """End the problem in `healthd status`, unless the hooks are running now."""
    import fcntl
    import os

    from healthd.agent.hooks.request import PROGRAM
    from healthd.agent.hooks.runner import mark_working
    from healthd.host.lock import lock_file

    with suppress(OSError):  # without a state directory there is nothing to end
        if not os.path.isdir(settings.runtime_dir):
            return
        descriptor = lock_file(settings.runtime_dir, f"{PROGRAM}.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mark_working(hook, settings.state_dir, settings.runtime_dir)
        finally:
            os.close(descriptor)


COMMANDS = {
    "hooks run": Command(
        flags.add_client_flags,
        _run,
        "Run the hooks for all events that have not been handled yet. healthd-hooks.service runs this command when the "
        "daemon requests it. Without a request, it does nothing.\n"
        "Exit status: 0 done, 1 the state directory or the runtime directory cannot be used.",
    ),
    "hooks test": Command(
        _test_arguments,
        _test,
        "Run a configured hook once with a sample event, and print its result, time and output. The event has "
        '"test": true. Run it as root, as the service does.\n'
        "Exit status: 0 the program succeeded, 1 it failed, 64 usage error.",
        "  healthd hooks test on_drain\n  healthd hooks test on_drain --print | jq .conditions\n",
    ),
}
