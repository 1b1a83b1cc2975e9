"""`healthd failslow plan|split`: when to apply which remedy for a slow job, and how to divide micro-batches."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from healthd.cli.failslow.analyse import column_flags, columns_of, told_as_sentence
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, as_json, say
from healthd.common.text import is_decimal, printable

if TYPE_CHECKING:
    from healthd.failslow.mitigation.planner import Overheads, Stretch, Taken
    from healthd.failslow.mitigation.stages import Place
    from healthd.failslow.model import Series

Document = dict[str, Any]

MOST_TEXT = 1 << 20  # bytes of --times FILE
MOST_GPUS = 1_000_000
LONGEST_SECONDS = 7 * 86400.0  # of an overhead
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
MOST_SHOWN = 12  # slow spans, groups
WORDS = {
    "s1": "ignore it",
    "s2": "move micro-batches",
    "s3": "change the topology",
    "s4": "checkpoint and restart",
}


def _number(text: str) -> float:
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


# --- split


def _split_flags(parser: Parser) -> None:
    parser.add_argument(
        "--micro-batches", metavar="M", required=True, help="micro-batches of an iteration, in all groups together"
    )
    parser.add_argument(
        "--times", metavar="T,T,...|FILE", required=True, help="time of one micro-batch in each data-parallel group"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: {micro_batches, makespan, even, saved}")


def _times(text: str) -> list[float]:
    """Return the times of a list or a file. Raises Stop."""
    where = "--times"
    if os.path.exists(text):
        where = f"--times {printable(text)}"
        try:
            with open(text, "rb") as file:
                read = file.read(MOST_TEXT + 1)
        except OSError as error:
            raise Stop(f"healthd failslow split: {where}: cannot be read: {error.strerror}", UNKNOWN) from None
        if len(read) > MOST_TEXT:
            raise Stop(f"healthd failslow split: {where}: is longer than {MOST_TEXT:,} bytes", UNKNOWN)
        text = read.decode("utf-8", "replace")
    words = text.replace(",", " ").split()
    if not words:
        raise Stop(f"healthd failslow split: {where}: has no number; one time per group is required")
    for word in words:
        if not _number(word) > 0 or math.isinf(_number(word)):
            raise Stop(
                f'healthd failslow split: {where}: must be numbers above 0 like 1.0,1.3, or a file, has "'
                f'{printable(word)[:40]}"'
            )
    return [_number(word) for word in words]


def _split(args: argparse.Namespace) -> int:
    from healthd.failslow.mitigation.micro_batches import WrongSplit, split

    if not (is_decimal(args.micro_batches) and len(args.micro_batches) <= 12):
        given = printable(args.micro_batches)[:40]
        raise Stop(f'healthd failslow split: --micro-batches: must be a whole number above 0, got "{given}"')
    times = _times(args.times)
    try:
        found = split(times, int(args.micro_batches))
    except WrongSplit as why:
        raise Stop(f"healthd failslow split: {why}") from None
    if args.json:
        return say(
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
    left = len(rows) - MOST_SHOWN
    more = f"  and {left:,} more groups (--json has all)\n" if left > 0 else ""
    head = (
        f"the slowest group takes {found.makespan:g}, {found.even:g} if evenly divided: "
        f"{1 - found.makespan / found.even:.0%} less\n"
    )
    return say(head + "".join(rows[:MOST_SHOWN]) + more)


# --- plan


def _plan_flags(parser: Parser) -> None:
    column_flags(parser)
    parser.add_argument("--gpus", metavar="N", required=True, help="GPUs of the whole job: all wait for the slowest")
    parser.add_argument(
        "--overhead", metavar="S2=5,S3=60,S4=600", help="cost of each remedy in seconds (default: s2=5,s3=60,s4=600)"
    )
    parser.add_argument(
        "--layout", metavar="PPxDPxTP", help="stages x data-parallel groups x tensor-parallel ranks: print swaps for S3"
    )
    parser.add_argument("--slow-links", metavar="A-B,...", help="pairs of ranks with a slow link, for --layout")
    parser.add_argument("--unit", choices=sorted(UNITS), default="s", help="unit of the times (default: s)")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")


def _overheads(text: str | None) -> Overheads:
    """Parse --overhead. Raises Stop."""
    from healthd.failslow.mitigation.planner import Overheads

    given: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, _, value = part.strip().lower().partition("=")
        seconds = _number(value)
        if name not in Overheads._fields or name in given or not 0 <= seconds <= LONGEST_SECONDS:
            raise Stop(
                f"healthd failslow plan: --overhead: must be seconds from 0 to {LONGEST_SECONDS:,.0f} like s2=5,s3=60,"
                f's4=600, each once, has "{printable(part)[:40]}"'
            )
        given[name] = seconds
    return Overheads(**given)


def _gpus(text: str) -> int:
    """Parse --gpus. Raises Stop."""
    if is_decimal(text) and len(text) < 10 and 1 <= int(text) <= MOST_GPUS:
        return int(text)
    raise Stop(
        f'healthd failslow plan: --gpus: must be a whole number from 1 to {MOST_GPUS:,}, got "{printable(text)[:40]}"'
    )


def _places(text: str) -> dict[int, Place]:
    """Return the position of each rank: tensor-parallel ranks are consecutive, then data-parallel groups, then stages.

    This is Megatron-LM's default order (tp-cp-ep-dp-pp). Raises Stop.
    """
    from healthd.failslow.mitigation.stages import MOST_RANKS, Place

    numbers = [int(word) if is_decimal(word) and len(word) < 6 else 0 for word in text.split("x")]
    if len(numbers) != 3 or not 1 <= math.prod(numbers) <= MOST_RANKS:
        raise Stop(
            "healthd failslow plan: --layout: must be stages x data-parallel groups x tensor-parallel ranks like "
            f'4x8x2, at most {MOST_RANKS:,} ranks, got "{printable(text)[:40]}"'
        )
    _, width, depth = numbers
    return {
        rank: Place(rank // (width * depth), rank // depth % width, rank % depth) for rank in range(math.prod(numbers))
    }


def _slow_links(text: str | None) -> list[tuple[int, int]]:
    """Parse --slow-links. Raises Stop."""
    links = []
    for word in text.split(",") if text is not None else ():
        ends = word.strip().split("-")
        if len(ends) != 2 or not all(is_decimal(end) and len(end) < 10 for end in ends):
            raise Stop(
                "healthd failslow plan: --slow-links: must be pairs of ranks like 0-4,1-5, has "
                f'"{printable(word)[:40]}"'
            )
        links.append((int(ends[0]), int(ends[1])))
    return links


def _topology(layout: str | None, links: str | None, slow: Sequence[Document]) -> Document | None:
    """Return the swaps of S3 for ranks that are slow at the end, or None without --layout. Raises Stop."""
    from healthd.failslow.mitigation.stages import WrongTopology, rearranged

    if layout is None:
        if links is not None:
            raise Stop("healthd failslow plan: --slow-links needs --layout")
        return None
    names = sorted({name for stretch in slow if stretch["lasts"] for name in stretch["series"]})
    for name in names:
        if not is_decimal(name) or len(name) > 9:
            raise Stop(f'healthd failslow plan: --layout: the slow series "{printable(name)[:40]}" is not a rank')
    try:
        found = rearranged(_places(layout), [int(name) for name in names], _slow_links(links))
    except WrongTopology as error:
        raise Stop(f"healthd failslow plan: --layout: {error}") from None
    return {
        "stages": list(found.stages),
        "swaps": [{"a": list(swap.a), "b": list(swap.b), "why": swap.why} for swap in found.swaps],
        "remains": list(found.remains),
    }


def _plan(args: argparse.Namespace) -> int:
    columns = columns_of(args, "failslow plan")
    if "" in args.files:
        raise Stop("healthd failslow plan: FILE is empty; name a file")
    gpus, overheads = _gpus(args.gpus), _overheads(args.overhead)
    with told_as_sentence("failslow plan"):
        from healthd.failslow.analysis import judged
        from healthd.failslow.detect import LASTS
        from healthd.failslow.mitigation.planner import replayed
        from healthd.failslow.readers.folder import read

        series, notes, unread, _ = read(args.files, columns)
        judgement = judged(series)
        # After a remedy, the detector needs this many iterations to see the effect.
        stretches = replayed(series, judgement, gpus, overheads, UNITS[args.unit], 2 * LASTS)
        told = _document(args.files, series, stretches, gpus, overheads)
        notes += [
            f"{f'{one.series_kind} {one.series}'.strip()} is slower than its peers throughout ({one.ratio:.2f} x): no "
            "plan, because its healthy time is unknown"
            for one in judgement.slow_throughout
        ]
        told["topology"] = _topology(args.layout, args.slow_links, told["slow"])
        told |= {"notes": [*notes, *judgement.notes], "unread": [dict(one) for one in unread]}
    status = REFUSED if told["now"]["action"] != "s1" else OK
    return say(as_json(told) if args.json else "".join(_text(told)), status)


def _document(
    files: Sequence[str], series: Sequence[Series], stretches: Sequence[Stretch], gpus: int, overheads: Overheads
) -> Document:
    standing = [one for one in stretches if one.relief is None]
    return {
        "files": list(files),
        "samples": sum(len(one.value) for one in series),
        "gpus": gpus,
        "overhead_seconds": overheads._asdict(),
        "slow": [_stretch(one) for one in stretches],
        "lost_gpu_seconds": sum(one.lost for one in stretches),
        "now": _now(standing[-1] if standing else None),
    }


def _stretch(one: Stretch) -> Document:
    from healthd.failslow.report import place, row

    return {
        "series": list(one.who),
        "cause": one.cause.value,
        "onset": place(one.series, one.onset),
        "onset_index": row(one.series, one.onset),
        "relief": None if one.relief is None or one.relief >= len(one.series.value) else place(one.series, one.relief),
        "lasts": one.relief is None,
        "lost_gpu_seconds": one.lost,
        "actions": [_taken(one.series, taken) for taken in one.taken],
    }


def _taken(series: Series, one: Taken) -> Document:
    from healthd.failslow.report import place, row

    return {
        "action": one.action.value,
        "at": place(series, one.at),
        "at_index": row(series, one.at),
        "lost_gpu_seconds": one.lost,
        "overhead_gpu_seconds": one.overhead,
        "saved_gpu_seconds": one.saved,
    }


def _now(one: Stretch | None) -> Document:
    """Return the advice at the end of the file."""
    if one is None:
        return {"action": "s1", "slow": False, "lost_gpu_seconds": 0.0, "next": None}
    return {
        "action": one.taken[-1].action.value if one.taken else "s1",
        "slow": True,
        "lost_gpu_seconds": one.state.lost,
        "next": one.due and {"action": one.due.action.value, "at_gpu_seconds": one.due.at},
    }


def _text(told: Document) -> Iterator[str]:
    if not told["slow"]:
        yield f"nothing became slow in {told['samples']:,} samples: there is no remedy to plan\n"
    for one in told["slow"][:MOST_SHOWN]:
        who = ", ".join(printable(name) for name in one["series"][:4]) + (", ..." if len(one["series"]) > 4 else "")
        until = "until now" if one["lasts"] else "until its end" if one["relief"] is None else f"until {one['relief']}"
        yield (
            f"slow from {one['onset']} {until}: {who or 'the job'} ({one['cause']}), "
            f"{_hours(one['lost_gpu_seconds'])} lost\n"
        )
        for taken in one["actions"]:
            saved = taken["saved_gpu_seconds"]
            less = "so far {} more than it saves" if one["lasts"] else "too late: it costs {} more than it saves"
            what = f"it could have saved {_hours(saved)}" if saved > 0 else less.format(_hours(-saved))
            lost, costs = _hours(taken["lost_gpu_seconds"]), _hours(taken["overhead_gpu_seconds"])
            head = f"  at {taken['at']}: {taken['action'].upper()}, {WORDS[taken['action']]}"
            yield f"{head}: {lost} lost so far, cost {costs}; {what}\n"
        if not one["actions"]:
            yield "  no remedy was worth its cost\n"
    left = len(told["slow"]) - MOST_SHOWN
    if left > 0:
        yield f"and {left:,} more (--json has all)\n"
    now, following = told["now"], told["now"]["next"]
    if now["slow"]:
        then = ""
        if following:
            more = following["at_gpu_seconds"] - now["lost_gpu_seconds"]
            when = f"after a further loss of {_hours(more)}" if more > 0 else "if it does not help"
            then = f"; then {following['action'].upper()}, {WORDS[following['action']]}, {when}"
        yield f"now: {now['action'].upper()}, {WORDS[now['action']]}{then}\n"
    if told["topology"]:
        yield from _topology_text(told["topology"])
    yield from (f"note: {printable(note)}\n" for note in told["notes"][:MOST_SHOWN])


def _topology_text(topology: Document) -> Iterator[str]:
    if not topology["swaps"]:
        yield "S3: no swap of ranks helps\n"
    for swap in topology["swaps"][:MOST_SHOWN]:
        yield f"S3: swap ranks {_ranks(swap['a'])} and {_ranks(swap['b'])} ({swap['why']})\n"
    left = len(topology["swaps"]) - MOST_SHOWN
    if left > 0:
        yield f"S3: and {left:,} more swaps (--json has all)\n"
    yield from (f"S3: {sentence}\n" for sentence in topology["remains"][:MOST_SHOWN])


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _hours(gpu_seconds: float) -> str:
    return f"{gpu_seconds / 3600:,.1f} GPU-hours" if gpu_seconds >= 3600 else f"{gpu_seconds:,.0f} GPU-seconds"


COMMANDS = {
    "failslow plan": Command(
        _plan_flags,
        _plan,
        "Find which remedy for a slow job is worth its cost, and when, from its iteration times. The order is S2 "
        "(micro-batches), S3 (topology), S4 (checkpoint and restart): each once the job has lost as much time as the "
        "remedy costs.\n"
        "The possible saving of a remedy assumes that it removes the slowness completely.\n"
        "Exit status: 0 nothing to do now, 1 apply a remedy, 3 a file cannot be read, 64 usage error.",
        "  healthd failslow plan job.csv --series worker --value step_time --gpus 64\n"
        "  healthd failslow plan ranks/ --gpus 1024 --overhead s3=90,s4=1200 --json\n"
        "  healthd failslow plan ranks/ --gpus 64 --layout 4x8x2 --slow-links 3-19\n",
    ),
    "failslow split": Command(
        _split_flags,
        _split,
        "Divide micro-batches among the data-parallel groups so that the slowest group finishes as early as possible. "
        "Every group gets at least one.\nExit status: 0 divided, 3 the file cannot be read, 64 usage error.",
        "  healthd failslow split --micro-batches 32 --times 1.0,1.0,1.3,1.0\n"
        "  healthd failslow split --micro-batches 512 --times times.txt --json\n",
    ),
}
