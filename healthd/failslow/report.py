"""Output of `healthd failslow`: the document (docs/json.md) and its text. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

from healthd.common.page import Page, plain, plural
from healthd.failslow import times
from healthd.failslow.always_slow import FEWEST_SAMPLES
from healthd.failslow.model import Cause, Confidence, JobSlow, Judgement, Point, Series, SlowThroughout, Suspect
from healthd.failslow.outliers import duration
from healthd.failslow.stream import FailStop

Document = dict[str, Any]

MOST_SHOWN = 20  # of suspects, and of other rows
MOST_NOTES = 8
MOST_NAMED = 8
FEW = 3  # suspects with all details; more suspects have two lines each
LONGEST_NAME = 40
WHOLE_LINE = 1 << 30  # columns: in a pipe each sentence is one line
TOGETHER = 20  # maximum distance of onsets that are reported together, as in peers.py
SEVERAL = 4  # from this number on, series are reported together
WIDEST_SUBJECT = 24
_SURE = [one.value for one in (Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW)]
_CAUSES = {
    Cause.COMPUTE: "compute",
    Cause.COMPUTE_GPU: "the GPU",
    Cause.COMPUTE_CPU: "the CPU",
    Cause.COMMUNICATION: "communication",
    Cause.COMMUNICATION_INTRA_NODE: "communication within the node",
    Cause.COMMUNICATION_INTER_NODE: "communication between nodes",
    Cause.IMBALANCE: "imbalance of the job",
    Cause.UNKNOWN: "an unknown cause",
}


def document(
    files: Sequence[str],
    series: Sequence[Series],
    judgement: Judgement,
    notes: Sequence[str] = (),
    unread: Sequence[Mapping[str, str]] = (),
    fail_stops: Sequence[FailStop] = (),
) -> Document:
    """Return the content of --json.

    Args:
        files: as given.
        notes: from reading the files.
        unread: {file, why} of files in a folder that could not be read.
    """
    by_name = {one.name: one for one in series}
    return {
        "files": list(files),
        "samples": sum(len(one.value) for one in series),
        "series": [_series(one, points) for one, points in zip(series, judgement.points, strict=True)],
        "suspects": [_suspect(one, by_name) for one in judgement.suspects],
        "job_slow": [_job_slow(one, by_name) for one in judgement.job_slow],
        "slow_throughout": [_slow_throughout(one) for one in judgement.slow_throughout],
        "compared": judgement.compared,
        "fail_stop": [one._asdict() for one in fail_stops],
        "notes": [*notes, *judgement.notes],
        "unread": [dict(one) for one in unread],
    }


def found(told: Document) -> bool:
    """Return True for a suspect, a slow job, a series that is slow throughout, or a rank that has stopped."""
    return bool(told["suspects"] or told["job_slow"] or told["slow_throughout"] or told["fail_stop"])


def _series(one: Series, points: Sequence[Point]) -> Document:
    return {
        "series": one.name,
        "kind": one.kind_of,
        "group": one.group,
        "node": one.node,
        "samples": len(one.value),
        "points": [_point(point, one) for point in points],
    }


def _point(point: Point, of: Series | None) -> Document:
    return {
        "onset": place(of, point.onset_index),
        "onset_index": row(of, point.onset_index),
        "slowdown": round(point.slowdown, 4),
        "confidence": round(point.confidence, 4),
        "relief": None if point.relief_index is None else place(of, point.relief_index),
        "relief_index": None if point.relief_index is None else row(of, point.relief_index),
        "alarm": place(of, point.alarm_index),
        "alarm_index": row(of, point.alarm_index),
    }


def row(of: Series | None, position: int) -> int:
    """Return the position of a sample among the rows of its series in the file."""
    return position if of is None or of.rows is None else int(of.rows[position])


def place(of: Series | None, position: int) -> float | str:
    """Return the index of a sample: a number, or a time in the format of the file."""
    if of is None:
        return position
    there = of.index[position]
    return there if of.times is None else times.text(there, of.times)


def _suspect(one: Suspect, by_name: Mapping[str, Series]) -> Document:
    of = next((by_name[name] for name in (one.subject, *one.series) if name in by_name), None)
    return {
        "subject": one.subject,
        "subject_kind": one.subject_kind,
        "cause": one.cause.value,
        "confidence": one.confidence.value,
        "evidence": list(one.evidence),
        "series": list(one.series),
        **({} if one.point is None else {"point": _point(one.point, of)}),
    }


def _slow_throughout(one: SlowThroughout) -> Document:
    return {
        "series": one.series,
        "kind": one.series_kind,
        "group": one.group,
        "node": one.node,
        "measure": one.measure,
        "ratio": round(one.ratio, 4),
        "time": one.time,
        "peers_time": one.peers_time,
        "peers": one.peers,
    }


def _job_slow(one: JobSlow, by_name: Mapping[str, Series]) -> Document:
    of = next((by_name[name] for name in one.series if name in by_name), None)
    return {
        "group": one.group,
        **_point(one.point, of),
        "cause": one.cause.value,
        "series": list(one.series),
        "peers": one.peers,
        "why": one.why,
    }


# --- text


class _Slow(NamedTuple):
    """A point and its series. kind: "rank"."""

    kind: str
    series: str
    point: Mapping[str, Any]


class _Row(NamedTuple):
    """A row of the text. is_brief: at most two lines."""

    subject: str
    what: str
    below: tuple[str, ...] = ()
    suspect: bool = False
    brief: bool = False


def text(told: Document, page: Page) -> str:
    """Return the document as text: suspects first, the worst first, then slow jobs and other facts.

    Series that only waited for a suspect are one line.
    """
    page = page if page.fold else page._replace(width=WHOLE_LINE)
    lines = page.wrap(_heading(told))
    suspects = _suspects(told)
    others = _jobs(told) + [_of_throughout(one) for one in told["slow_throughout"]]
    others += [_Row(_name("rank", one["series"]), _of_stop(one)) for one in told["fail_stop"]]
    others += _unsuspected(told)
    shown = [*suspects, *others[:MOST_SHOWN]]
    wide = min(max((len(row.subject) for row in shown), default=0), WIDEST_SUBJECT)
    for row in suspects:
        lines += _written(row, wide, page)
    if more := len(told["suspects"]) - sum(row.suspect for row in suspects):
        lines += page.wrap(f"and {plural(more, 'suspect')} more: --json has them")
    for row in others[:MOST_SHOWN]:
        lines += _written(row, wide, page)
    if more := len(others) - MOST_SHOWN:
        lines += page.wrap(f"and {more:,} more: --json has them") if more > 0 else []
    lines += _some([f"note: {note}" for note in told["notes"]], "note", page)
    lines += _some([f"not read: {one['file']}: {one['why']}" for one in told["unread"]], "file", page)
    return "\n".join(lines) + "\n"


def _some(sentences: Sequence[str], what: str, page: Page) -> list[str]:
    lines = [line for one in sentences[:MOST_NOTES] for line in page.wrap(one)]
    if more := len(sentences[MOST_NOTES:]):
        lines += page.wrap(f"and {plural(more, what)} more: --json has them")
    return lines


def _heading(told: Document) -> str:
    """Return "job.csv: 10 series, 3,000 samples; 1 fail-slow". A suspect or slow job counts once per onset."""
    files = told["files"]
    name = files[0] if len(files) == 1 else f"{len(files):,} files"
    suspects = {(one["subject_kind"], one["subject"], _onset(one.get("point"))) for one in told["suspects"]}
    count, stops = len(suspects) + len(_slow_jobs(told)), len(told["fail_stop"])
    # Without peers, slowness from the first sample on is not visible.
    slow = "nothing is slow" if told["compared"] == len(told["series"]) else "nothing became slow"
    if told["series"] and all(one["samples"] < FEWEST_SAMPLES for one in told["series"]):
        slow = "too few samples to evaluate"
    if count:
        slow = f"{count:,} fail-slow"
    elif any(one["points"] for one in told["series"]):
        slow = f"{sum(bool(one['points']) for one in told['series']):,} slow, no suspect"
    if throughout := len(told["slow_throughout"]):
        before = f"{slow}, " if count or slow.endswith("no suspect") else ""
        slow = f"{before}{throughout:,} slower than the peers throughout"
    still = f", {stops:,} stopped" if stops else ""
    return f"{name}: {len(told['series']):,} series, {plural(told['samples'], 'sample')}; {slow}{still}"


# --- suspects, and series that waited for them


def _suspects(told: Document) -> list[_Row]:
    """Return the rows of the suspects by onset.

    For each onset: suspects, the worst first; then evidence that several of them share; then other series that were
    slow with them. If there are too many suspects, only the worst are included.
    """
    left = _episodes(_others(told))
    badness = partial(_badness, samples={one["series"]: one["samples"] for one in told["series"]})
    worst = sorted(told["suspects"], key=badness)
    shown = {id(one) for one in worst[:MOST_SHOWN]}
    together = sorted(_at_one_time(told["suspects"]), key=lambda some: min(map(badness, some)))
    brief = len(worst) > FEW
    rows = []
    for suspects in together:
        common = _common(suspects)
        for one in sorted(suspects, key=badness):
            if id(one) in shown:
                own = tuple(sentence for sentence in one["evidence"] if sentence not in common)
                label, what = _of_suspect_in_brief(one) if brief else _of_suspect(one, told)
                rows.append(_Row(label, what, own, True, brief))
        rows += [_of_several(said, some) for said, some in common.items()]
        with_them = [some for some in left if _is_with(some, suspects)]
        left = [some for some in left if not _is_with(some, suspects)]
        rows += [_with_suspects(some, suspects, len(told["series"])) for some in with_them]
    return rows


def _badness(suspect: Mapping[str, Any], samples: Mapping[str, int]) -> tuple[int, float]:
    """Return a sort key: highest confidence first, then largest loss (slowdown times duration).

    Args:
        samples: number of samples of each series.
    """
    sure, point = _SURE.index(suspect["confidence"]), suspect.get("point")
    if point is None:
        return sure, 0.0
    end = point["relief_index"]
    if end is None:
        end = max((samples.get(name, 0) for name in suspect["series"]), default=0)
    return sure, -point["slowdown"] * (end - point["onset_index"])


def _at_one_time(suspects: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    found: list[list[Mapping[str, Any]]] = []
    for one in suspects:
        if found and _near(found[-1][0].get("point"), one.get("point")):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _common(suspects: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the sentences that more than two suspects share, with these suspects."""
    said: dict[str, list[Mapping[str, Any]]] = {}
    for one in suspects:
        for sentence in one["evidence"]:
            said.setdefault(sentence, []).append(one)
    return {sentence: some for sentence, some in said.items() if len(some) > 2}


def _of_several(said: str, some: Sequence[Mapping[str, Any]]) -> _Row:
    names = [_name("", one["subject"]) for one in some]
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return _Row("together", f"{said} ({', '.join(names[:MOST_NAMED])}{more})")


def _is_with(others: Sequence[_Slow], suspects: Iterable[Mapping[str, Any]]) -> bool:
    return any(_near(one.get("point"), others[0].point) for one in suspects)


def _with_suspects(others: Sequence[_Slow], suspects: Sequence[Mapping[str, Any]], series: int) -> _Row:
    """Return a row for series that were slow at the same time as suspects.

    If most series are slow at once, they wait for each other. For independent workers this would be a slow job.
    """
    involved = {name for one in suspects for name in one["series"]} | {one.series for one in others}
    spans = _spans([one.point for one in others])
    whom = "it" if len({one["subject"] for one in suspects}) == 1 else "them"
    waited = f"waited for {whom}: {spans}" if 2 * len(involved) > series else f"{spans}; no suspect"
    return _Row(_those(others, "other "), waited)


def _of_suspect(one: Mapping[str, Any], told: Document) -> tuple[str, str]:
    label = _name(one["subject_kind"], one["subject"])
    words = []
    if point := one.get("point"):
        words.append(_span(point))
        if not _others_slow(one, point, told):
            words.append("its peers were not")
    cause = _CAUSES[Cause(one["cause"])]
    before = f"{'; '.join(words)}: " if words else ""
    again = _name(one["subject_kind"] if "/" not in one["subject_kind"] else "", one["subject"])
    return label, f"{before}suspect {cause} on {again} ({one['confidence']})"


def _of_suspect_in_brief(one: Mapping[str, Any]) -> tuple[str, str]:
    before = f"{_span(one['point'])}: " if one.get("point") else ""
    return _name(one["subject_kind"], one["subject"]), f"{before}{_CAUSES[Cause(one['cause'])]} ({one['confidence']})"


def _others_slow(suspect: Mapping[str, Any], point: Mapping[str, Any], told: Document) -> bool:
    """Return True if another series, or the job, was slow at that time."""
    own = {suspect["subject"], *suspect["series"]}
    others = [one for series in told["series"] if series["series"] not in own for one in series["points"]]
    return any(_overlap(point, one) for one in (*others, *told["job_slow"]))


def _covers(point: Mapping[str, Any], at: int) -> bool:
    end = inf if point["relief_index"] is None else point["relief_index"]
    return bool(point["onset_index"] <= at < end)


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    ends = [inf if point["relief_index"] is None else point["relief_index"] for point in (one, other)]
    return bool(one["onset_index"] < ends[1] and other["onset_index"] < ends[0])


# --- slow jobs


def _slow_jobs(told: Document) -> list[list[Mapping[str, Any]]]:
    """Group slow jobs with the same content and time (for example three waiting ranks)."""
    found: list[list[Mapping[str, Any]]] = []
    for one in told["job_slow"]:
        for same in found:
            alike = all(one[key] == same[0][key] for key in ("group", "cause", "why", "peers")) and _near(one, same[0])
            slow = [name for each in (*same, one) for name in each["series"]]
            if alike and len(slow) == len(set(slow)) <= one["peers"]:
                same.append(one)
                break
        else:
            found.append([one])
    return found


def _jobs(told: Document) -> list[_Row]:
    kinds = {one["series"]: one["kind"] for one in told["series"]}
    rows = []
    for some in _slow_jobs(told):
        first, slow = some[0], [name for one in some for name in one["series"]]
        whose = _kinds(kinds.get(name, "") for name in slow)
        subject = _name("group", first["group"]) if first["group"] else "job"
        if len(slow) == 1 and first["peers"] > 1:
            subject = _name(kinds.get(slow[0], ""), slow[0])
        count = f", {len(slow):,} of {first['peers']:,} {whose}" if len(slow) > 1 else ""
        cause = "" if first["cause"] == Cause.UNKNOWN.value else f"; {_CAUSES[Cause(first['cause'])]}"
        rows.append(_Row(subject, f"{_spans(some)}{count}{cause}; no suspect: {first['why']}"))
    return rows


_MEASURES = {"own": "its time without waiting", "busy": "busy", "iteration": "an iteration"}


def _of_throughout(one: Mapping[str, Any]) -> _Row:
    peers = plural(one["peers"], "peer")
    what = (
        f"slower than its peers throughout ({one['ratio']:.2f} x): {_MEASURES[one['measure']]} "
        f"{duration(one['time'])}, its {peers} {duration(one['peers_time'])}; the onset is unknown"
    )
    caution = () if one["group"] else ("no groups are declared: a rank with more work looks the same",)
    return _Row(_name(one["kind"], one["series"]), what, caution)


# --- points that belong to neither a suspect nor a slow job


def _others(told: Document) -> list[_Slow]:
    about: dict[str, list[Mapping[str, Any] | None]] = {}
    later: dict[str, list[int]] = {}  # series that became suspects while they waited for another one
    for one in told["suspects"]:
        for name in {one["subject"], *one["series"]}:
            about.setdefault(name, []).append(one.get("point"))
            later.setdefault(name, []).append(_onset(one.get("point")))
    for one in told["job_slow"]:
        for name in one["series"]:
            about.setdefault(name, []).append(one)
    return [
        _Slow(one["kind"], one["series"], point)
        for one in told["series"]
        for point in one["points"]
        if not any(_near(point, known) for known in about.get(one["series"], ()))
        if not any(_covers(point, onset) for onset in later.get(one["series"], ()))
    ]


def _episodes(slow: Sequence[_Slow]) -> list[list[_Slow]]:
    """Group points with about the same onset."""
    found: list[list[_Slow]] = []
    for one in sorted(slow, key=lambda one: _onset(one.point)):
        if found and _near(found[-1][0].point, one.point):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _unsuspected(told: Document) -> list[_Row]:
    """Return a row for each group of series that became slow together, and one for each other series."""
    rows, alone = [], []
    for some in _episodes(_others(told)):
        if _is_with(some, told["suspects"]):
            continue  # reported with these suspects
        if len(some) >= SEVERAL:
            rows.append(_Row(_those(some), f"{_spans([one.point for one in some])}; no suspect"))
        else:
            alone += some
    order = {one["series"]: at for at, one in enumerate(told["series"])}
    alone.sort(key=lambda one: (order[one.series], _onset(one.point)))
    for (kind, name), points in groupby(alone, key=lambda one: (one.kind, one.series)):
        rows.append(_Row(_name(kind, name), "; ".join(_span(one.point) for one in points) + "; no suspect"))
    return rows


# --- phrases


def _onset(point: Mapping[str, Any] | None) -> int:
    return -1 if point is None else int(point["onset_index"])


def _near(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    return one is not None and other is not None and abs(_onset(one) - _onset(other)) <= TOGETHER


def _name(kind: str, name: str) -> str:
    """Return "worker 6", or for several columns "gpu-1/3 (node/gpu)". A long name is truncated."""
    name = plain(name)
    name = f"{name[: LONGEST_NAME - 3]}..." if len(name) > LONGEST_NAME else name
    return f"{name} ({plain(kind)})" if "/" in kind else f"{plain(kind)} {name}".strip()


def _kinds(kinds: Iterable[str]) -> str:
    """Return the plural of the kind: "ranks"."""
    (kind, *others) = set(kinds)
    return f"{kind}s" if kind and "/" not in kind and not others else "series"


def _those(some: Sequence[_Slow], other: str = "") -> str:
    """Return "7 other ranks", or the name of a single series."""
    if len(some) == 1:
        return _name(some[0].kind, some[0].series)
    return plain(f"{len({one.series for one in some}):,} {other}{_kinds(one.kind for one in some)}")


def _span(point: Mapping[str, Any], height: str = "") -> str:
    """Return "slow from 180 to 195, +65 %, recovered"."""
    begin, end, height = _shown(point["onset"]), point["relief"], height or _height([point])
    return (
        f"slow since {begin}, {height}" if end is None else f"slow from {begin} to {_shown(end)}, {height}, recovered"
    )


def _spans(points: Sequence[Mapping[str, Any]]) -> str:
    """Return the span of the middle one of several points with about the same onset."""
    middle = sorted(points, key=_onset)[(len(points) - 1) // 2]
    return _span(middle, _height(points))


def _height(points: Sequence[Mapping[str, Any]]) -> str:
    """Return "+65 %", or "+65 to +70 %"."""
    least, most = (f"+{some(one['slowdown'] for one in points) * 100:.0f}" for some in (min, max))
    return f"{least} %" if least == most else f"{least} to {most} %"


def _shown(place: float | str) -> str:
    if isinstance(place, str):
        return place
    return f"{place:.6f}".rstrip("0").rstrip(".") if isinstance(place, float) else str(place)


def _of_stop(one: Mapping[str, Any]) -> str:
    return f"stopped at {_shown(one['since'])}: {one['evidence']}"


def _written(row: _Row, wide: int, page: Page) -> list[str]:
    """Return the lines of a row: the subject, and its text in the next column."""
    label = row.subject.ljust(wide)
    painted = page.paint(label, "warning") if row.suspect else label
    if row.brief:
        return _in_brief(row, painted, label, page)
    indent = " " * (wide + 3)
    first, *rest = page.wrap(row.what, indent)
    begin = [f"{painted}   {first[len(indent) :]}"] if len(label) == wide else [painted, first]
    return [*begin, *rest, *(line for one in row.below for line in page.item(one, indent))]


def _in_brief(row: _Row, painted: str, label: str, page: Page) -> list[str]:
    """Return at most two lines: subject and text, then the evidence as far as it fits."""
    columns = max(page.width, 40)
    first, *rest = textwrap.wrap(f"{label}   {plain(row.what)}", columns, break_long_words=False)
    second = " ".join(rest) or plain("; ".join(row.below))
    return [first.replace(label, painted, 1), *([_cut(f"  {second}", columns)] if second else [])]


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 3]}..."
