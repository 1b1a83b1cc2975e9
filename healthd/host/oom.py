"""Whom the kernel ends first when memory is short. The unit spares the daemon (OOMScoreAdjust=), not its children: a
worker is started anew, and a program of the site is as any other.

Source: proc_pid_oom_score_adj(5). Everybody may raise their own; a child inherits it.
"""

from __future__ import annotations

from contextlib import suppress

SCORE = "/proc/self/oom_score_adj"
OF_ANY_OTHER = 0


def raise_score(at_least: int = OF_ANY_OTHER) -> None:
    """Called first by a process that the daemon starts. A higher score, which a site may have chosen, stays."""
    with suppress(OSError, ValueError):  # no /proc: then nothing spares it either
        with open(SCORE, encoding="ascii") as file:
            score = int(file.read())
        if score < at_least:
            with open(SCORE, "w", encoding="ascii") as file:
                file.write(str(at_least))


def then_become(at_least: int = OF_ANY_OTHER) -> tuple[str, ...]:
    """What stands before the argv of a program of others, so that it begins with such a score: a shell that becomes
    env, which says in its usual words where there is no such program. Status 127 = there is none."""
    lower = f'{{ read -r score && [ "$score" -ge {at_least} ] || echo {at_least} >{SCORE}; }} <{SCORE} 2>/dev/null'
    return ("/bin/sh", "-c", f'{lower}; exec /usr/bin/env -- "$@"', "sh")
