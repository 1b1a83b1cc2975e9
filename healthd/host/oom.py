"""OOM scores. The unit protects the daemon (OOMScoreAdjust=), but not its children, because workers can be restarted
and a site's programs need no protection.

Source: proc_pid_oom_score_adj(5). Every process may raise its own score, and a child inherits it.
"""

from __future__ import annotations

from contextlib import suppress

SCORE = "/proc/self/oom_score_adj"
DEFAULT_SCORE = 0


def raise_score(minimum: int = DEFAULT_SCORE) -> None:
    """Raise the OOM score of a process that the daemon starts. Keep a higher score, which a site may have set."""
    with suppress(OSError, ValueError):  # without /proc, there is no protection to adjust
        with open(SCORE, encoding="ascii") as file:
            score = int(file.read())
        if score < minimum:
            with open(SCORE, "w", encoding="ascii") as file:
                file.write(str(minimum))


def trampoline_argv(minimum: int = DEFAULT_SCORE) -> tuple[str, ...]:
    """Return the words to put before another program's argv, so that the program starts with this score. The words run
    a shell that becomes env. If there is no such program, env prints its usual message and exits with 127.
    """
    lower = f'{{ read -r score && [ "$score" -ge {minimum} ] || echo {minimum} >{SCORE}; }} <{SCORE} 2>/dev/null'
    return ("/bin/sh", "-c", f'{lower}; exec /usr/bin/env -- "$@"', "sh")
