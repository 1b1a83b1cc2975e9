"""`healthd failslow plan|split`: when to apply which remedy to a slow job, and how to divide micro-batches."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from healthd.cli.failslow.analyse import column_flags, failslow_errors, requested_columns
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, as_json, write_output
from healthd.common.text import is_decimal, printable

if TYPE_CHECKING:
    from healthd.failslow.mitigation.planner import AppliedAction, Overheads, SlowSpan
    from healthd.failslow.mitigation.stages import RankPosition
    from healthd.failslow.model import Series

Document = dict[str, Any]

MAX_FILE_BYTES = 1 << 20  # maximum size of the file in --times FILE
MAX_GPUS = 1_000_000
MAX_OVERHEAD_SECONDS = 7 * 86400.0
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
MAX_SHOWN = 12  # maximum number of slow spans, and of groups, to print
ACTION_TEXTS = {
    "s1": "ignore it",
    "s2": "move micro-batches",
    "s3": "change the topology",
    "s4": "checkpoint and restart",
}


def _parse_number(text: str) -> float:
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


# --- split


def _split_flags(parser: Parser) -> None:
    parser.add_argument(
        "--micro-batches", metavar="M", required=True, help="micro-batches per iteration, all groups together"
    )
    parser.add_argument(
        "--times", metavar="T,T,...|FILE", required=True, help="time of one micro-batch in each data-parallel group"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: {micro_batches, makespan, even, saved}")


def _parse_times(text: str) -> list[float]:
    """Return the times from a list or a file. Raises Stop."""
    source = "--times"
    if os.path.exists(text):
        source = f"--times {printable(text)}"
        try:
            with open(text, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise Stop(f"healthd failslow split: {source}: cannot be read: {error.strerror}", UNKNOWN) from None
        if len(data) > MAX_FILE_BYTES:
            raise Stop(f"healthd failslow split: {source}: is longer than {MAX_FILE_BYTES:,} bytes", UNKNOWN)
        text = data.decode("utf-8", "replace")
    tokens = text.replace(",", " ").split()
    if not tokens:
        raise Stop(f"healthd failslow split: {source}: contains no numbers; give one time per group")
    for token in tokens:
        if not _parse_number(token) > 0 or math.isinf(_parse_number(token)):
            raise Stop(
                f'healthd failslow split: {source}: must be numbers above 0 like 1.0,1.3, or a file, got "'
                f'{printable(token)[:40]}"'
            )
    return [_parse_number(token) for token in tokens]


def _split(args: argparse.Namespace) -> int:
    from healthd.failslow.mitigation.micro_batches import InvalidSplit, split

    if not (is_decimal(args.micro_batches) and len(args.micro_batches) <= 12):
        text = printable(args.micro_batches)[:40]
        raise Stop(f'healthd failslow split: --micro-batches: must be a whole number above 0, got "{text}"')
    times = _parse_times(args.times)
    try:
        found = split(times, int(args.micro_batches))
    except InvalidSplit as error:
        raise Stop(f"healthd failslow split: {error}") from None
    if args.json:
        return write_output(
            as_json(
                {
                    "micro_batches": list(found.micro_batches),
                    "makespan": found.makespan,
                    "even": found.even,
                    "saved": 1 - found.makespan / found.even,
                }
            )
        )
    rows = [
        f"  group {at}: {share} x {time:g} = {share * time:g}\n"
        for at, (share, time) in enumerate(zip(found.micro_batches, times, strict=True))
    ]
    hidden = len(rows) - MAX_SHOWN
    more = f"  and {hidden:,} more groups (--json has all)\n" if hidden > 0 else ""
    head = (
        f"the slowest group takes {found.makespan:g}, {1 - found.makespan / found.even:.0%} less than "
        f"the {found.even:g} of an even division\n"
    )
    return write_output(head + "".join(rows[:MAX_SHOWN]) + more)


# --- plan


def _plan_flags(parser: Parser) -> None:
    column_flags(parser)
    parser.add_argument("--gpus", metavar="N", required=True, help="GPUs in the whole job: all wait for the slowest")
    parser.add_argument(
        "--overhead", metavar="S2=5,S3=60,S4=600", help="cost of each remedy in seconds (default: s2=5,s3=60,s4=600)"
    )
    parser.add_argument(
        "--layout",
        metavar="PPxDPxTP",
        help="stages x data-parallel groups x tensor-parallel ranks; prints swaps for S3",
    )
    parser.add_argument("--slow-links", metavar="A-B,...", help="pairs of ranks with a slow link, for --layout")
    parser.add_argument("--unit", choices=sorted(UNITS), default="s", help="unit for the times (default: s)")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")


def _parse_overheads(text: str | None) -> Overheads:
    """Parse --overhead. Raises Stop."""
    from healthd.failslow.mitigation.planner import Overheads

    parsed: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, _, value = part.strip().lower().partition("=")
        seconds = _parse_number(value)
        if name not in Overheads._fields or name in parsed or not 0 <= seconds <= MAX_OVERHEAD_SECONDS:
            raise Stop(
                f"healthd failslow plan: --overhead: must be seconds from 0 to {MAX_OVERHEAD_SECONDS:,.0f} like "
                f's2=5,s3=60,s4=600, each once, got "{printable(part)[:40]}"'
            )
        parsed[name] = seconds
    return Overheads(**parsed)


def _parse_gpus(text: str) -> int:
    """Parse --gpus. Raises Stop."""
    if is_decimal(text) and len(text) < 10 and 1 <= int(text) <= MAX_GPUS:
        return int(text)
    raise Stop(
        f'healthd failslow plan: --gpus: must be a whole number from 1 to {MAX_GPUS:,}, got "{printable(text)[:40]}"'
    )


def _parse_layout(text: str) -> dict[int, RankPosition]:
    """Return each rank's position. Tensor-parallel ranks vary fastest, then data-parallel groups, then stages.

    This is Megatron-LM's default order (tp-cp-ep-dp-pp). Raises Stop.
    """
    from healthd.failslow.mitigation.stages import MAX_RANKS, RankPosition

    numbers = [int(token) if is_decimal(token) and len(token) < 6 else 0 for token in text.split("x")]
    if len(numbers) != 3 or not 1 <= math.prod(numbers) <= MAX_RANKS:
        raise Stop(
            "healthd failslow plan: --layout: must be stages x data-parallel groups x tensor-parallel ranks like "
            f'4x8x2, at most {MAX_RANKS:,} ranks, got "{printable(text)[:40]}"'
        )
    _, width, depth = numbers
    return {
        rank: RankPosition(rank // (width * depth), rank // depth % width, rank % depth)
        for rank in range(math.prod(numbers))
    }


def _parse_slow_links(text: str | None) -> list[tuple[int, int]]:
    """Parse --slow-links. Raises Stop."""
    links = []
    for token in text.split(",") if text is not None else ():
        ends = token.strip().split("-")
        if len(ends) != 2 or not all(is_decimal(end) and len(end) < 10 for end in ends):
            raise Stop(
                "healthd failslow plan: --slow-links: must be pairs of ranks like 0-4,1-5, got "
                f'"{printable(token)[:40]}"'
            )
        links.append((int(ends[0]), int(ends[1])))
    return links


def _topology(layout: str | None, links: str | None, slow: Sequence[Document]) -> Document | None:
    """Return the swaps for remedy S3, for ranks that are still slow at the end, or None without --layout. Raises
    Stop.
    """
    from healthd.failslow.mitigation.stages import InvalidTopology, rearrange

    if layout is None:
        if links is not None:
            raise Stop("healthd failslow plan: --slow-links requires --layout")
        return None
    names = sorted({name for span in slow if span["lasts"] for name in span["series"]})
    for name in names:
        if not is_decimal(name) or len(name) > 9:
            raise Stop(f'healthd failslow plan: --layout: the slow series "{printable(name)[:40]}" is not a rank')
    try:
        found = rearrange(_parse_layout(layout), [int(name) for name in names], _parse_slow_links(links))
    except InvalidTopology as error:
        raise Stop(f"healthd failslow plan: --layout: {error}") from None
    return {
        "stages": list(found.stages),
        "swaps": [{"a": list(swap.a), "b": list(swap.b), "why": swap.reason} for swap in found.swaps],
        "remains": list(found.limitations),
    }


def _plan(args: argparse.Namespace) -> int:
    columns = requested_columns(args, "failslow plan")
    if "" in args.files:
        raise Stop("healthd failslow plan: FILE is an empty string; name a file")
    gpus, overheads = _parse_gpus(args.gpus), _parse_overheads(args.overhead)
    with failslow_errors("failslow plan"):
        from healthd.failslow.analysis import diagnose
        from healthd.failslow.detect import MIN_SLOW_SAMPLES
        from healthd.failslow.mitigation.planner import replay
        from healthd.failslow.readers.folder import read_files

        series, notes, unread, _ = read_files(args.files, columns)
        diagnosis = diagnose(series)
        # After a remedy, the detector needs this many iterations to see the effect.
        spans = replay(series, diagnosis, gpus, overheads, UNITS[args.unit], 2 * MIN_SLOW_SAMPLES)
        document = _document(args.files, series, spans, gpus, overheads)
        notes += [
            f"{f'{item.series_kind} {item.series}'.strip()} is slower than its peers throughout ({item.ratio:.2f} x): "
            "no plan, because its healthy iteration time is unknown"
            for item in diagnosis.slow_throughout
        ]
        document["topology"] = _topology(args.layout, args.slow_links, document["slow"])
        document |= {"notes": [*notes, *diagnosis.notes], "unread": [dict(item) for item in unread]}
    status = REFUSED if document["now"]["action"] != "s1" else OK
    return write_output(as_json(document) if args.json else "".join(_text(document)), status)


def _document(
    files: Sequence[str], series: Sequence[Series], spans: Sequence[SlowSpan], gpus: int, overheads: Overheads
) -> Document:
    active = [item for item in spans if item.relief is None]
    return {
        "files": list(files),
        "samples": sum(len(item.value) for item in series),
        "gpus": gpus,
        "overhead_seconds": overheads._asdict(),
        "slow": [_span_document(item) for item in spans],
        "lost_gpu_seconds": sum(item.lost for item in spans),
        "now": _current_advice(active[-1] if active else None),
    }


def _span_document(span: SlowSpan) -> Document:
    from healthd.failslow.report import index_value, row_number

    return {
        "series": list(span.suspects),
        "cause": span.cause.value,
        "onset": index_value(span.series, span.onset),
        "onset_index": row_number(span.series, span.onset),
        "relief": None
        if span.relief is None or span.relief >= len(span.series.value)
        else index_value(span.series, span.relief),
        "lasts": span.relief is None,
        "lost_gpu_seconds": span.lost,
        "actions": [_action_document(span.series, action) for action in span.actions],
    }


def _action_document(series: Series, applied: AppliedAction) -> Document:
    from healthd.failslow.report import index_value, row_number

    return {
        "action": applied.action.value,
        "at": index_value(series, applied.position),
        "at_index": row_number(series, applied.position),
        "lost_gpu_seconds": applied.lost,
        "overhead_gpu_seconds": applied.overhead,
        "saved_gpu_seconds": applied.saved,
    }


def _current_advice(span: SlowSpan | None) -> Document:
    """Return the advice that applies at the end of the file."""
    if span is None:
        return {"action": "s1", "slow": False, "lost_gpu_seconds": 0.0, "next": None}
    return {
        "action": span.actions[-1].action.value if span.actions else "s1",
        "slow": True,
        "lost_gpu_seconds": span.state.lost,
        "next": span.next_action
        and {"action": span.next_action.action.value, "at_gpu_seconds": span.next_action.lost_gpu_seconds},
    }


def _text(document: Document) -> Iterator[str]:
    if not document["slow"]:
        yield f"nothing became slow in {document['samples']:,} samples, so no remedy is needed\n"
    for span in document["slow"][:MAX_SHOWN]:
        subjects = ", ".join(printable(name) for name in span["series"][:4]) + (
            ", ..." if len(span["series"]) > 4 else ""
        )
        until = (
            "until now" if span["lasts"] else "until it ended" if span["relief"] is None else f"until {span['relief']}"
        )
        yield (
            f"slow from {span['onset']} {until}: {subjects or 'the job'} ({span['cause']}), "
            f"{_hours(span['lost_gpu_seconds'])} lost\n"
        )
        for action in span["actions"]:
            saved = action["saved_gpu_seconds"]
            loss_text = (
                "so far it costs {} more than it saves" if span["lasts"] else "too late: it costs {} more than it saves"
            )
            outcome = f"it could have saved {_hours(saved)}" if saved > 0 else loss_text.format(_hours(-saved))
            lost, costs = _hours(action["lost_gpu_seconds"]), _hours(action["overhead_gpu_seconds"])
            head = f"  at {action['at']}: {action['action'].upper()}, {ACTION_TEXTS[action['action']]}"
            yield f"{head}: {lost} lost so far, cost {costs}; {outcome}\n"
        if not span["actions"]:
            yield "  no remedy was worth its cost\n"
    hidden = len(document["slow"]) - MAX_SHOWN
    if hidden > 0:
        yield f"and {hidden:,} more (--json has all)\n"
    current, following = document["now"], document["now"]["next"]
    if current["slow"]:
        next_text = ""
        if following:
            more = following["at_gpu_seconds"] - current["lost_gpu_seconds"]
            when = f"after another {_hours(more)} lost" if more > 0 else "if that does not help"
            next_text = f"; then {following['action'].upper()}, {ACTION_TEXTS[following['action']]}, {when}"
        yield f"now: {current['action'].upper()}, {ACTION_TEXTS[current['action']]}{next_text}\n"
    if document["topology"]:
        yield from _topology_text(document["topology"])
    yield from (f"note: {printable(note)}\n" for note in document["notes"][:MAX_SHOWN])


def _topology_text(topology: Document) -> Iterator[str]:
    if not topology["swaps"]:
        yield "S3: no swap of ranks helps\n"
    for swap in topology["swaps"][:MAX_SHOWN]:
        yield f"S3: swap ranks {_ranks(swap['a'])} and {_ranks(swap['b'])} ({swap['why']})\n"
    hidden = len(topology["swaps"]) - MAX_SHOWN
    if hidden > 0:
        yield f"S3: and {hidden:,} more swaps (--json has all)\n"
    yield from (f"S3: {sentence}\n" for sentence in topology["remains"][:MAX_SHOWN])


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _hours(gpu_seconds: float) -> str:
    return f"{gpu_seconds / 3600:,.1f} GPU-hours" if gpu_seconds >= 3600 else f"{gpu_seconds:,.0f} GPU-seconds"


COMMANDS = {
    "failslow plan": Command(
        _plan_flags,
        _plan,
        "Find out from a slow job's iteration times which remedy is worth its cost, and when. The order is S2 "
        "(micro-batches), S3 (topology), S4 (checkpoint and restart). Each remedy is due as soon as the job has lost "
        "as much time as the remedy costs.\n"
        "The possible saving assumes that the remedy makes the job as fast as before.\n"
        "Exit status: 0 nothing to do now, 1 apply a remedy, 3 a file cannot be read, 64 usage error.",
        "  healthd failslow plan job.csv --series worker --value step_time --gpus 64\n"
        "  healthd failslow plan ranks/ --gpus 1024 --overhead s3=90,s4=1200 --json\n"
        "  healthd failslow plan ranks/ --gpus 64 --layout 4x8x2 --slow-links 3-19\n",
    ),
    "failslow split": Command(
        _split_flags,
        _split,
        "Divide micro-batches among the data-parallel groups so that the slowest group finishes as early as possible. "
        "Each group gets at least one.\nExit status: 0 success, 3 the file cannot be read, 64 usage error.",
        "  healthd failslow split --micro-batches 32 --times 1.0,1.0,1.3,1.0\n"
        "  healthd failslow split --micro-batches 512 --times times.txt --json\n",
    ),
}
