"""Groups that transfer long while others of their kind do not. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from healthd.failslow import windows
from healthd.failslow.model import Confidence, Suspect
from healthd.failslow.node_evidence import agreeing_evidence
from healthd.failslow.outliers import CLEAR, COMMUNICATION_LIMIT, EXPLAINS, FEWEST, duration, link
from healthd.failslow.steps import Observed, Step
from healthd.failslow.suspects import confidence_of
from healthd.failslow.windows import Change


def slow_groups(
    seen: Observed, step: Step, members: Sequence[int], transfer: Mapping[int, Change], lost: float
) -> list[Suspect]:
    """Groups that transfer long while others of the same role do not: of as many ranks, at about the same time
    at rest (the same volume). Their members in common, if there is one, is the suspect; else each of them."""
    groups: dict[str, list[int]] = defaultdict(list)
    for one in members:
        if seen.series[one].group and one in transfer:
            groups[seen.series[one].group].append(one)
    alike: list[list[str]] = []
    before = {name: statistics.median(transfer[one].before for one in some) for name, some in groups.items()}
    for name in sorted(groups, key=lambda name: (len(groups[name]), before[name], name)):
        last = alike[-1][-1] if alike else ""
        if last and len(groups[last]) == len(groups[name]) and before[name] <= 1.5 * before[last]:
            alike[-1].append(name)
        else:
            alike.append([name])
    suspects = []
    for names in alike:
        if len(names) < FEWEST:
            continue
        of_group = {name: statistics.median(transfer[one].ratio for one in groups[name]) for name in names}
        middle = statistics.median_high(of_group.values())
        scatter = windows.spread([math.log(ratio) for ratio in of_group.values()])
        slow = {
            name: math.log(ratio / middle) / math.hypot(scatter, 0.02)
            for name, ratio in of_group.items()
            if min(transfer[one].ratio for one in groups[name]) > COMMUNICATION_LIMIT
            and ratio > COMMUNICATION_LIMIT * middle
            and math.log(ratio / middle) > CLEAR * math.hypot(scatter, 0.02)
            and statistics.median(transfer[one].more for one in groups[name]) >= EXPLAINS * lost
        }
        if slow:
            suspects += _named(seen, step, groups, slow, of_group, middle, transfer)
    return suspects


def _named(
    seen: Observed,
    step: Step,
    groups: Mapping[str, Sequence[int]],
    slow: Mapping[str, float],
    of_group: Mapping[str, float],
    middle: float,
    transfer: Mapping[int, Change],
) -> list[Suspect]:
    def sentence(name: str) -> str:
        now = statistics.median(transfer[one].after for one in groups[name])
        before = statistics.median(transfer[one].before for one in groups[name])
        return (
            f"group {name} transfers {duration(now)} against {duration(before)} before; "
            f"{len(of_group) - len(slow)} other groups of its kind {_percent(middle - 1)}"
        )

    def confidence(names: Iterable[str], supported: bool) -> Confidence:
        some = list(names)
        excess = min(of_group[name] for name in some) / middle
        clear = min(slow[name] for name in some)
        return confidence_of(excess >= 1.4, clear > 2 * CLEAR, len(of_group) > 7, supported)

    sentences = tuple(sentence(name) for name in sorted(slow))
    if len(slow) > 1:
        ranks = set.intersection(*({seen.series[one].name for one in groups[name]} for name in slow))
        nodes = set.intersection(*({seen.series[one].node for one in groups[name]} for name in slow)) - {""}
        for common, kind in ((ranks, ""), (nodes, "node")):
            if len(common) == 1:
                (subject,) = common
                ones = [
                    one
                    for name in sorted(slow)
                    for one in groups[name]
                    if subject == (seen.series[one].node if kind else seen.series[one].name)
                ]
                agreeing = agreeing_evidence(seen, step, ones)
                found = Suspect(
                    subject,
                    kind or seen.series[ones[0]].kind_of or "series",
                    link(seen, [one for name in slow for one in groups[name]]),
                    confidence(slow, bool(agreeing)),
                    (*sentences, f"it is in each of the {len(slow)} slow groups", *agreeing),
                    tuple(sorted({seen.series[one].name for one in ones})),
                    seen.point(step, ones),
                )
                return [found]
    suspects = []
    for name in sorted(slow):
        ones = list(groups[name])
        agreeing = agreeing_evidence(seen, step, ones)
        suspects.append(
            Suspect(
                name,
                "group",
                link(seen, ones),
                confidence([name], bool(agreeing)),
                (sentence(name), *agreeing),
                tuple(sorted(seen.series[one].name for one in ones)),
                seen.point(step, ones),
            )
        )
    return suspects


def _percent(change: float) -> str:
    return f"{change:+.0%}"
