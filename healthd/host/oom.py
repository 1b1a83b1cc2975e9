"""OOM scores. The unit protects the daemon (OOMScoreAdjust=), but not its children, because a worker can be restarted
and a site's program is like any other process.

Source: proc_pid_oom_score_adj(5). Every process may raise its own score, and a child inherits it.
"""

from __future__ import annotations

from contextlib import suppress

SCORE = "/proc/self/oom_score_adj"
DEFAULT_SCORE = 0


def raise_score(minimum: int = DEFAULT_SCORE) -> None:
    """Raise the OOM score of a process that the daemon starts. Keep a higher score, which a site may have set."""
    with suppress(OSError, ValueError):  # without /proc, there is no protection either
        with open(SCORE, encoding="ascii") as file:
            score = int(file.read())
        if score < minimum:
            with open(SCORE, "w", encoding="ascii") as file:
                file.write(str(minimum))


def trampoline_argv(minimum: int = DEFAULT_SCORE) -> tuple[str, ...]:
    """Return the words to put before another program's argv, so that it starts with this score. They run a shell that
    becomes env, which prints its usual message if there is no such program. The exit status is then 127."""
    lower = f'{{ read -r score && [ "$score" -ge {minimum} ] || echo {minimum} >{SCORE}; }} <{SCORE} 2>/dev/null'
    return ("/bin/sh", "-c", f'{lower}; exec /usr/bin/env -- "$@"', "sh")
