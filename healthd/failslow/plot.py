"""`healthd failslow --plot FILE`: the series with onset, relief and peers, as SVG or as a page with a table.

Needs the extra healthd[failslow]. The page has no script and fetches nothing.
"""

from __future__ import annotations

import html
import importlib.util
import os
import stat
from collections.abc import Iterator, Sequence

from healthd.common.atomic_files import replace_file
from healthd.common.errors import HealthdError
from healthd.common.text import printable
from healthd.failslow.model import Judgement, Point, Series
from healthd.failslow.panels import called, panels, percent, where

ENDINGS = (".svg", ".html")
MOST_ROWS = 1000  # of the page's table; --json has all


class NoPlot(HealthdError):
    """The name of the file has no known ending, or the file that is there must not be replaced."""


class MissingExtra(HealthdError):
    """The packages that draw are not installed."""


def ending(path: str) -> str:
    """Return ".svg" or ".html". Raises NoPlot."""
    for one in ENDINGS:
        if path.lower().endswith(one):
            return one
    raise NoPlot(f"{path}: a plot is a file that ends in {' or '.join(ENDINGS)}")


def check(path: str, inputs: Sequence[str]) -> None:
    """Check before anything is computed whether a plot can be drawn and may replace the file at `path`.

    A link is refused, because it would be replaced, and not the file that it points to. Raises MissingExtra, NoPlot.
    """
    ending(path)
    if importlib.util.find_spec("vl_convert") is None:
        raise MissingExtra("a plot needs the extra: pip install 'healthd[failslow]'")
    try:
        there = os.lstat(path)
    except OSError:
        return  # nothing is there; whether something can be, writing it tells
    if stat.S_ISLNK(there.st_mode):
        raise NoPlot(f"{path}: is a link: name the file itself")
    if not stat.S_ISREG(there.st_mode) and not stat.S_ISDIR(there.st_mode):
        raise NoPlot(f"{path}: is no regular file")
    for one in inputs:
        if os.path.exists(one) and os.path.samestat(os.stat(one), there):
            raise NoPlot(f"{path}: is what is to be read")


def plot(series: Sequence[Series], judgement: Judgement, path: str) -> None:
    """Write the plot, whole or not at all. Raises NoPlot, ownership.Untrusted, OSError."""
    from healthd.failslow.chart import svg

    kind = ending(path)
    drawn, left = panels(series, judgement)
    picture = svg(drawn, headline(series, judgement), more(left))
    replace_file(path, _page(series, judgement, picture) if kind == ".html" else picture, mode=0o644)


def headline(series: Sequence[Series], judgement: Judgement) -> str:
    """Return the result in one line."""
    slow = sum(bool(points) for points in judgement.points)
    found = [_count(len(judgement.suspects), "suspect")] if judgement.suspects else []
    found += ["the job is slow"] if judgement.job_slow else []
    if not found and slow:
        found = [f"{slow:,} slow, nobody is suspected"]
    if judgement.slow_throughout:
        found += [f"{len(judgement.slow_throughout):,} slower than the peers throughout"]
    if not found:
        found = ["nothing became slow"]
    samples = sum(len(one.value) for one in series)
    return f"{len(series):,} series, {_count(samples, 'sample')}: {', '.join(found)}"


def more(left: int) -> str:
    return f"{_count(left, 'more panel')} would not be readable here: --json has all points." if left else ""


EXPLAINED = (
    "Grey is the median of the peers and four fifths of them, each brought to the level that this series had before "
    "its onset: what is compared is how much slower each became than itself."
)


def _count(number: int, one: str) -> str:
    return f"{number:,} {one if number == 1 else f'{one}s'}"


# --- the page

# The page may use its own style and nothing else (CSP Level 3: https://www.w3.org/TR/CSP3/).
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STYLE = """
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: #fff; color: #1b1f24;
  font: 1rem/1.5 system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } .wide:focus-visible { outline: 2px solid #0b5cad; }
table { border-collapse: collapse; font-size: .9rem; overflow-wrap: normal; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e3e7ec;
  vertical-align: top; white-space: nowrap; }
.soft { color: #59636e; }
"""


def _page(series: Sequence[Series], judgement: Judgement, picture: str) -> str:
    title = headline(series, judgement)
    body = "\n".join((*_found(judgement), *_pictures(picture), *_table(series, judgement)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="generator" content="healthd failslow">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{_text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>
{body}
<p class="soft">Made by healthd failslow. This file fetches nothing and runs nothing.</p>
</body>
</html>
"""


def _pictures(picture: str) -> Iterator[str]:
    yield f'<h2>Pictures</h2>\n<p class="soft">{EXPLAINED}</p>'
    yield f'<div class="wide" tabindex="0" role="region" aria-label="Pictures">\n{picture}\n</div>'


def _found(judgement: Judgement) -> Iterator[str]:
    for suspect in judgement.suspects:
        of = f"{suspect.subject_kind} {suspect.subject}".strip()
        evidence = "".join(f"<li>{_text(one)}</li>" for one in suspect.evidence)
        cause = suspect.cause.value.replace("_", " ")
        yield f"<p>Suspect: {cause} of <bdi>{_text(of)}</bdi>, {suspect.confidence.value} confidence.</p>"
        yield f"<ul>{evidence}</ul>" if evidence else ""
    for job in judgement.job_slow:
        of = f" of group {job.group}" if job.group else ""
        yield (
            f"<p>The job{_text(of)} is slow, {percent(job.point.slowdown)}, and nobody is named: {_text(job.why)} "
            f"({len(job.series):,} of {job.peers:,} series).</p>"
        )
    for slow in judgement.slow_throughout:
        of = f"{slow.series_kind} {slow.series}".strip()
        yield (
            f"<p><bdi>{_text(of)}</bdi> is slower than its {slow.peers:,} peers throughout ({slow.ratio:.2f} x): when "
            "it became slow is not known.</p>"
        )
    if not judgement.suspects and not judgement.job_slow:
        yield "<p>Nobody is suspected, and no job is slow as a whole.</p>"
    for note in judgement.notes:
        yield f'<p class="soft">{_text(note)}</p>'


COLUMNS = ("series", "group", "onset", "known at", "relief", "slowdown", "confidence")


def _table(series: Sequence[Series], judgement: Judgement) -> Iterator[str]:
    rows = [(one, point) for one, points in zip(series, judgement.points, strict=True) for point in points]
    if not rows:
        return
    yield '<h2>All that became slow</h2>\n<div class="wide" tabindex="0" role="region" aria-label="Points">\n<table>'
    yield f"<thead><tr>{''.join(f'<th scope=col>{name}</th>' for name in COLUMNS)}</tr></thead>\n<tbody>"
    for one, point in rows[:MOST_ROWS]:
        yield f"<tr>{''.join(f'<td><bdi>{_text(cell)}</bdi></td>' for cell in _cells(one, point))}</tr>"
    yield "</tbody>\n</table>\n</div>"
    if len(rows) > MOST_ROWS:
        yield f'<p class="soft">The first {MOST_ROWS:,} of {len(rows):,}; --json has all.</p>'


def _cells(one: Series, point: Point) -> tuple[str, ...]:
    return (
        called(one),
        one.group,
        where(one, point.onset_index),
        where(one, point.alarm_index),
        "it lasts" if point.relief_index is None else where(one, point.relief_index),
        percent(point.slowdown),
        f"{point.confidence:.2f}",
    )


def _text(text: str) -> str:
    return html.escape(printable(text), quote=True)
