"""Formats the output of `healthd failslow`: the document (docs/json.md) and its text. All functions are pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

from healthd.common.page import Page, plain, plural
from healthd.failslow import times
from healthd.failslow.always_slow import MIN_SAMPLES
from healthd.failslow.model import Cause, Confidence, Diagnosis, Point, Series, SlowJob, SlowThroughout, Suspect
from healthd.failslow.outliers import format_duration
from healthd.failslow.stream import FailStop

Document = dict[str, Any]

MAX_SHOWN = 20  # maximum number of suspects, and of other rows
MAX_NOTES = 8
MAX_NAMED = 8
MAX_DETAILED = 3  # maximum number of suspects with all details; further suspects have two lines each
MAX_NAME = 40
UNLIMITED_WIDTH = 1 << 30  # in columns; in a pipe, each sentence is one line
MAX_ONSET_DISTANCE = 20  # maximum number of samples between onsets that are reported together, as in peers.py
MIN_COMBINED = 4  # if there are at least this many series, series are reported together
MAX_SUBJECT_WIDTH = 24
_CONFIDENCE_ORDER = [confidence.value for confidence in (Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW)]
_CAUSES = {
    Cause.COMPUTE: "compute",
    Cause.COMPUTE_GPU: "the GPU",
    Cause.COMPUTE_CPU: "the CPU",
    Cause.COMMUNICATION: "communication",
    Cause.COMMUNICATION_INTRA_NODE: "communication within the node",
    Cause.COMMUNICATION_INTER_NODE: "communication between nodes",
    Cause.IMBALANCE: "imbalance in the job",
    Cause.UNKNOWN: "an unknown cause",
}


def build_document(
    files: Sequence[str],
    series: Sequence[Series],
    diagnosis: Diagnosis,
    notes: Sequence[str] = (),
    unread: Sequence[Mapping[str, str]] = (),
    fail_stops: Sequence[FailStop] = (),
) -> Document:
    """Return the document that --json prints.

    Args:
        files: file names as given.
        notes: notes from reading the files.
        unread: {file, why} for each file in a folder that could not be read.
    """
    by_name = {item.name: item for item in series}
    return {
        "files": list(files),
        "samples": sum(len(item.value) for item in series),
        "series": [_series_document(item, points) for item, points in zip(series, diagnosis.points, strict=True)],
        "suspects": [_suspect_document(item, by_name) for item in diagnosis.suspects],
        "job_slow": [_slow_job_document(item, by_name) for item in diagnosis.slow_jobs],
        "slow_throughout": [_slow_throughout_document(item) for item in diagnosis.slow_throughout],
        "compared": diagnosis.compared_count,
        "fail_stop": [item._asdict() for item in fail_stops],
        "notes": [*notes, *diagnosis.notes],
        "unread": [dict(item) for item in unread],
    }


def has_findings(document: Document) -> bool:
    """Return True if there is a suspect, a slow job, a series that is slow throughout, or a rank that has stopped."""
    return bool(document["suspects"] or document["job_slow"] or document["slow_throughout"] or document["fail_stop"])


def _series_document(series: Series, points: Sequence[Point]) -> Document:
    return {
        "series": series.name,
        "kind": series.label,
        "group": series.group,
        "node": series.node,
        "samples": len(series.value),
        "points": [_point_document(point, series) for point in points],
    }


def _point_document(point: Point, series: Series | None) -> Document:
    return {
        "onset": index_value(series, point.onset_index),
        "onset_index": row_number(series, point.onset_index),
        "slowdown": round(point.slowdown, 4),
        "confidence": round(point.confidence, 4),
        "relief": None if point.relief_index is None else index_value(series, point.relief_index),
        "relief_index": None if point.relief_index is None else row_number(series, point.relief_index),
        "alarm": index_value(series, point.alarm_index),
        "alarm_index": row_number(series, point.alarm_index),
    }


def row_number(series: Series | None, position: int) -> int:
    """Return a sample's position among its series's rows in the file."""
    return position if series is None or series.rows is None else int(series.rows[position])


def index_value(series: Series | None, position: int) -> float | str:
    """Return a sample's index: a number, or a time in the file's format."""
    if series is None:
        return position
    value = series.index[position]
    return value if series.times is None else times.format_time(value, series.times)


def _suspect_document(suspect: Suspect, by_name: Mapping[str, Series]) -> Document:
    series = next((by_name[name] for name in (suspect.subject, *suspect.series) if name in by_name), None)
    return {
        "subject": suspect.subject,
        "subject_kind": suspect.subject_kind,
        "cause": suspect.cause.value,
        "confidence": suspect.confidence.value,
        "evidence": list(suspect.evidence),
        "series": list(suspect.series),
        **({} if suspect.point is None else {"point": _point_document(suspect.point, series)}),
    }


def _slow_throughout_document(item: SlowThroughout) -> Document:
    return {
        "series": item.series,
        "kind": item.series_kind,
        "group": item.group,
        "node": item.node,
        "measure": item.measure,
        "ratio": round(item.ratio, 4),
        "time": item.time,
        "peers_time": item.peers_time,
        "peers": item.peers,
    }


def _slow_job_document(job: SlowJob, by_name: Mapping[str, Series]) -> Document:
    series = next((by_name[name] for name in job.series if name in by_name), None)
    return {
        "group": job.group,
        **_point_document(job.point, series),
        "cause": job.cause.value,
        "series": list(job.series),
        "peers": job.peers,
        "why": job.reason,
    }


# --- text


class _Slow(NamedTuple):
    """A point and its series. `kind` is the series's label, such as "rank"."""

    kind: str
    series: str
    point: Mapping[str, Any]


class _Row(NamedTuple):
    """A row of the text. If `is_brief` is True, at most two lines are printed."""

    subject: str
    text: str
    details: tuple[str, ...] = ()
    is_suspect: bool = False
    is_brief: bool = False


def format_text(document: Document, page: Page) -> str:
    """Return the document as text: suspects (the worst first), then slow jobs and other facts.

    Series that only waited for a suspect share one line.
    """
    page = page if page.fold else page._replace(width=UNLIMITED_WIDTH)
    lines = page.wrap(_heading(document))
    suspects = _suspect_rows(document)
    other_rows = _job_rows(document) + [_slow_throughout_row(item) for item in document["slow_throughout"]]
    other_rows += [_Row(_subject_name("rank", item["series"]), _fail_stop_text(item)) for item in document["fail_stop"]]
    other_rows += _unsuspected_rows(document)
    visible = [*suspects, *other_rows[:MAX_SHOWN]]
    subject_width = min(max((len(row.subject) for row in visible), default=0), MAX_SUBJECT_WIDTH)
    for row in suspects:
        lines += _render_row(row, subject_width, page)
    if more := len(document["suspects"]) - sum(row.is_suspect for row in suspects):
        lines += page.wrap(f"and {plural(more, 'suspect')} more (see --json)")
    for row in other_rows[:MAX_SHOWN]:
        lines += _render_row(row, subject_width, page)
    if more := len(other_rows) - MAX_SHOWN:
        lines += page.wrap(f"and {more:,} more (see --json)") if more > 0 else []
    lines += _limited_lines([f"note: {note}" for note in document["notes"]], "note", page)
    lines += _limited_lines([f"not read: {item['file']}: {item['why']}" for item in document["unread"]], "file", page)
    return "\n".join(lines) + "\n"


def _limited_lines(sentences: Sequence[str], noun: str, page: Page) -> list[str]:
    lines = [line for sentence in sentences[:MAX_NOTES] for line in page.wrap(sentence)]
    if more := len(sentences[MAX_NOTES:]):
        lines += page.wrap(f"and {plural(more, noun)} more (see --json)")
    return lines


def _heading(document: Document) -> str:
    """Return text like "job.csv: 10 series, 3,000 samples; 1 fail-slow".

    Suspects and slow jobs with the same onset count once.
    """
    files = document["files"]
    name = files[0] if len(files) == 1 else f"{len(files):,} files"
    suspects = {(item["subject_kind"], item["subject"], _onset(item.get("point"))) for item in document["suspects"]}
    count, stops = len(suspects) + len(_group_slow_jobs(document)), len(document["fail_stop"])
    # If no series was compared with peers, slowness that was present from the first sample cannot be seen.
    slow = "nothing is slow" if document["compared"] == len(document["series"]) else "nothing became slow"
    if document["series"] and all(item["samples"] < MIN_SAMPLES for item in document["series"]):
        slow = "too few samples to evaluate"
    if count:
        slow = f"{count:,} fail-slow"
    elif any(item["points"] for item in document["series"]):
        slow = f"{sum(bool(item['points']) for item in document['series']):,} slow, no suspect"
    if throughout := len(document["slow_throughout"]):
        before = f"{slow}, " if count or slow.endswith("no suspect") else ""
        slow = f"{before}{throughout:,} slower than the peers throughout"
    still = f", {stops:,} stopped" if stops else ""
    return f"{name}: {len(document['series']):,} series, {plural(document['samples'], 'sample')}; {slow}{still}"


# --- suspects, and series that waited for them


def _suspect_rows(document: Document) -> list[_Row]:
    """Return the suspects' rows, sorted by onset.

    For each onset, the suspects come first, worst first. Then comes evidence that several suspects share, and then
    other series that were slow at the same time. If there are too many suspects, only the worst are included.
    """
    unassigned = _group_episodes(_remaining_points(document))
    sort_key = partial(
        _suspect_sort_key, samples={suspect["series"]: suspect["samples"] for suspect in document["series"]}
    )
    worst = sorted(document["suspects"], key=sort_key)
    shown_ids = {id(suspect) for suspect in worst[:MAX_SHOWN]}
    simultaneous = sorted(_group_by_onset(document["suspects"]), key=lambda group: min(map(sort_key, group)))
    is_brief = len(worst) > MAX_DETAILED
    rows = []
    for suspects in simultaneous:
        common = _shared_evidence(suspects)
        for suspect in sorted(suspects, key=sort_key):
            if id(suspect) in shown_ids:
                own = tuple(sentence for sentence in suspect["evidence"] if sentence not in common)
                label, description = _brief_suspect_text(suspect) if is_brief else _suspect_text(suspect, document)
                rows.append(_Row(label, description, own, True, is_brief))
        rows += [_shared_row(statement, group) for statement, group in common.items()]
        matching = [group for group in unassigned if _is_simultaneous(group, suspects)]
        unassigned = [group for group in unassigned if not _is_simultaneous(group, suspects)]
        rows += [_waiting_row(group, suspects, len(document["series"])) for group in matching]
    return rows


def _suspect_sort_key(suspect: Mapping[str, Any], samples: Mapping[str, int]) -> tuple[int, float]:
    """Return a sort key. The highest confidence comes first, then the largest loss (slowdown times duration).

    Args:
        samples: number of samples in each series.
    """
    confidence_rank, point = _CONFIDENCE_ORDER.index(suspect["confidence"]), suspect.get("point")
    if point is None:
        return confidence_rank, 0.0
    end = point["relief_index"]
    if end is None:
        end = max((samples.get(name, 0) for name in suspect["series"]), default=0)
    return confidence_rank, -point["slowdown"] * (end - point["onset_index"])


def _group_by_onset(suspects: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    found: list[list[Mapping[str, Any]]] = []
    for suspect in suspects:
        if found and _is_near(found[-1][0].get("point"), suspect.get("point")):
            found[-1].append(suspect)
        else:
            found.append([suspect])
    return found


def _shared_evidence(suspects: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return each sentence of evidence that more than two suspects share, with these suspects."""
    suspects_by_sentence: dict[str, list[Mapping[str, Any]]] = {}
    for suspect in suspects:
        for sentence in suspect["evidence"]:
            suspects_by_sentence.setdefault(sentence, []).append(suspect)
    return {sentence: sharing for sentence, sharing in suspects_by_sentence.items() if len(sharing) > 2}


def _shared_row(sentence: str, suspects: Sequence[Mapping[str, Any]]) -> _Row:
    names = [_subject_name("", suspect["subject"]) for suspect in suspects]
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return _Row("together", f"{sentence} ({', '.join(names[:MAX_NAMED])}{more})")


def _is_simultaneous(slow: Sequence[_Slow], suspects: Iterable[Mapping[str, Any]]) -> bool:
    return any(_is_near(suspect.get("point"), slow[0].point) for suspect in suspects)


def _waiting_row(slow: Sequence[_Slow], suspects: Sequence[Mapping[str, Any]], series: int) -> _Row:
    """Return a row for series that were slow at the same time as suspects.

    If most series are slow at once, they waited for the suspects. (If they were independent workers, this would be
    reported as a slow job.)
    """
    involved = {name for item in suspects for name in item["series"]} | {item.series for item in slow}
    spans = _episode_text([item.point for item in slow])
    pronoun = "it" if len({item["subject"] for item in suspects}) == 1 else "them"
    text = f"waited for {pronoun}: {spans}" if 2 * len(involved) > series else f"{spans}; no suspect"
    return _Row(_series_text(slow, "other "), text)


def _suspect_text(suspect: Mapping[str, Any], document: Document) -> tuple[str, str]:
    label = _subject_name(suspect["subject_kind"], suspect["subject"])
    phrases = []
    if point := suspect.get("point"):
        phrases.append(_span_text(point))
        if not _were_others_slow(suspect, point, document):
            phrases.append("its peers were not slow")
    cause = _CAUSES[Cause(suspect["cause"])]
    before = f"{'; '.join(phrases)}: " if phrases else ""
    subject = _subject_name(suspect["subject_kind"] if "/" not in suspect["subject_kind"] else "", suspect["subject"])
    return label, f"{before}suspect {cause} on {subject} ({suspect['confidence']})"


def _brief_suspect_text(suspect: Mapping[str, Any]) -> tuple[str, str]:
    before = f"{_span_text(suspect['point'])}: " if suspect.get("point") else ""
    return _subject_name(
        suspect["subject_kind"], suspect["subject"]
    ), f"{before}{_CAUSES[Cause(suspect['cause'])]} ({suspect['confidence']})"


def _were_others_slow(suspect: Mapping[str, Any], point: Mapping[str, Any], document: Document) -> bool:
    """Return True if another series or the whole job was slow at that time."""
    own = {suspect["subject"], *suspect["series"]}
    other_points = [
        other_point for series in document["series"] if series["series"] not in own for other_point in series["points"]
    ]
    return any(_overlap(point, other_point) for other_point in (*other_points, *document["job_slow"]))


def _covers(point: Mapping[str, Any], at: int) -> bool:
    end = inf if point["relief_index"] is None else point["relief_index"]
    return bool(point["onset_index"] <= at < end)


def _overlap(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    ends = [inf if point["relief_index"] is None else point["relief_index"] for point in (first, second)]
    return bool(first["onset_index"] < ends[1] and second["onset_index"] < ends[0])


# --- slow jobs


def _group_slow_jobs(document: Document) -> list[list[Mapping[str, Any]]]:
    """Group slow jobs that have the same contents and time (for example three ranks that waited)."""
    found: list[list[Mapping[str, Any]]] = []
    for job in document["job_slow"]:
        for group in found:
            is_same = all(job[key] == group[0][key] for key in ("group", "cause", "why", "peers")) and _is_near(
                job, group[0]
            )
            slow = [name for member in (*group, job) for name in member["series"]]
            if is_same and len(slow) == len(set(slow)) <= job["peers"]:
                group.append(job)
                break
        else:
            found.append([job])
    return found


def _job_rows(document: Document) -> list[_Row]:
    kinds = {item["series"]: item["kind"] for item in document["series"]}
    rows = []
    for group in _group_slow_jobs(document):
        first, slow = group[0], [name for item in group for name in item["series"]]
        kind_text = _kind_text(kinds.get(name, "") for name in slow)
        subject = _subject_name("group", first["group"]) if first["group"] else "job"
        if len(slow) == 1 and first["peers"] > 1:
            subject = _subject_name(kinds.get(slow[0], ""), slow[0])
        count = f", {len(slow):,} of {first['peers']:,} {kind_text}" if len(slow) > 1 else ""
        cause = "" if first["cause"] == Cause.UNKNOWN.value else f"; {_CAUSES[Cause(first['cause'])]}"
        rows.append(_Row(subject, f"{_episode_text(group)}{count}{cause}; no suspect: {first['why']}"))
    return rows


_MEASURES = {"own": "its time without waiting", "busy": "busy", "iteration": "an iteration"}


def _slow_throughout_row(item: Mapping[str, Any]) -> _Row:
    peers = plural(item["peers"], "peer")
    description = (
        f"slower than its peers throughout ({item['ratio']:.2f} x): {_MEASURES[item['measure']]} "
        f"{format_duration(item['time'])}, its {peers} {format_duration(item['peers_time'])}; the onset is unknown"
    )
    caution = (
        () if item["group"] else ("no groups are declared, so this may also be a rank with more work than the others",)
    )
    return _Row(_subject_name(item["kind"], item["series"]), description, caution)


# --- points that belong to neither a suspect nor a slow job


def _remaining_points(document: Document) -> list[_Slow]:
    points_by_series: dict[str, list[Mapping[str, Any] | None]] = {}
    suspect_onsets: dict[str, list[int]] = {}  # series that became suspects while they waited for another suspect
    for item in document["suspects"]:
        for name in {item["subject"], *item["series"]}:
            points_by_series.setdefault(name, []).append(item.get("point"))
            suspect_onsets.setdefault(name, []).append(_onset(item.get("point")))
    for item in document["job_slow"]:
        for name in item["series"]:
            points_by_series.setdefault(name, []).append(item)
    return [
        _Slow(item["kind"], item["series"], point)
        for item in document["series"]
        for point in item["points"]
        if not any(_is_near(point, known_point) for known_point in points_by_series.get(item["series"], ()))
        if not any(_covers(point, onset) for onset in suspect_onsets.get(item["series"], ()))
    ]


def _group_episodes(slow: Sequence[_Slow]) -> list[list[_Slow]]:
    """Group points whose onsets are close together."""
    found: list[list[_Slow]] = []
    for item in sorted(slow, key=lambda item: _onset(item.point)):
        if found and _is_near(found[-1][0].point, item.point):
            found[-1].append(item)
        else:
            found.append([item])
    return found


def _unsuspected_rows(document: Document) -> list[_Row]:
    """Return a row for each group of series that became slow together, and a row for each other series."""
    rows, alone = [], []
    for episode in _group_episodes(_remaining_points(document)):
        if _is_simultaneous(episode, document["suspects"]):
            continue  # already reported with these suspects
        if len(episode) >= MIN_COMBINED:
            rows.append(_Row(_series_text(episode), f"{_episode_text([item.point for item in episode])}; no suspect"))
        else:
            alone += episode
    order = {item["series"]: at for at, item in enumerate(document["series"])}
    alone.sort(key=lambda item: (order[item.series], _onset(item.point)))
    for (kind, name), points in groupby(alone, key=lambda item: (item.kind, item.series)):
        rows.append(
            _Row(_subject_name(kind, name), "; ".join(_span_text(item.point) for item in points) + "; no suspect")
        )
    return rows


# --- phrases


def _onset(point: Mapping[str, Any] | None) -> int:
    return -1 if point is None else int(point["onset_index"])


def _is_near(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> bool:
    return first is not None and second is not None and abs(_onset(first) - _onset(second)) <= MAX_ONSET_DISTANCE


def _subject_name(kind: str, name: str) -> str:
    """Return text like "worker 6", or for several columns "gpu-1/3 (node/gpu)". A long name is truncated."""
    name = plain(name)
    name = f"{name[: MAX_NAME - 3]}..." if len(name) > MAX_NAME else name
    return f"{name} ({plain(kind)})" if "/" in kind else f"{plain(kind)} {name}".strip()


def _kind_text(kinds: Iterable[str]) -> str:
    """Return the plural of the kind, such as "ranks"."""
    (kind, *other_kinds) = set(kinds)
    return f"{kind}s" if kind and "/" not in kind and not other_kinds else "series"


def _series_text(slow: Sequence[_Slow], adjective: str = "") -> str:
    """Return text like "7 other ranks", or the name of a single series."""
    if len(slow) == 1:
        return _subject_name(slow[0].kind, slow[0].series)
    return plain(f"{len({item.series for item in slow}):,} {adjective}{_kind_text(item.kind for item in slow)}")


def _span_text(point: Mapping[str, Any], slowdown: str = "") -> str:
    """Return "slow from 180 to 195, +65 %, recovered"."""
    begin, end, slowdown = _format_index(point["onset"]), point["relief"], slowdown or _slowdown_text([point])
    return (
        f"slow since {begin}, {slowdown}"
        if end is None
        else f"slow from {begin} to {_format_index(end)}, {slowdown}, recovered"
    )


def _episode_text(points: Sequence[Mapping[str, Any]]) -> str:
    """Return the span of one of several points with about the same onset, the middle one."""
    middle = sorted(points, key=_onset)[(len(points) - 1) // 2]
    return _span_text(middle, _slowdown_text(points))


def _slowdown_text(points: Sequence[Mapping[str, Any]]) -> str:
    """Return text like "+65 %" or "+65 to +70 %"."""
    lowest, highest = (f"+{select(point['slowdown'] for point in points) * 100:.0f}" for select in (min, max))
    return f"{lowest} %" if lowest == highest else f"{lowest} to {highest} %"


def _format_index(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _fail_stop_text(item: Mapping[str, Any]) -> str:
    return f"stopped at {_format_index(item['since'])}: {item['evidence']}"


def _render_row(row: _Row, subject_width: int, page: Page) -> list[str]:
    """Return the lines of a row. The first column is the subject, the second the text."""
    label = row.subject.ljust(subject_width)
    painted = page.paint(label, "warning") if row.is_suspect else label
    if row.is_brief:
        return _render_brief(row, painted, label, page)
    indent = " " * (subject_width + 3)
    first, *other_lines = page.wrap(row.text, indent)
    begin = [f"{painted}   {first[len(indent) :]}"] if len(label) == subject_width else [painted, first]
    return [*begin, *other_lines, *(line for detail in row.details for line in page.item(detail, indent))]


def _render_brief(row: _Row, painted: str, label: str, page: Page) -> list[str]:
    """Return at most two lines: the subject with the text, and as much of the evidence as fits."""
    columns = max(page.width, 40)
    first, *other_lines = textwrap.wrap(f"{label}   {plain(row.text)}", columns, break_long_words=False)
    second = " ".join(other_lines) or plain("; ".join(row.details))
    return [first.replace(label, painted, 1), *([_truncate(f"  {second}", columns)] if second else [])]


def _truncate(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 3]}..."
