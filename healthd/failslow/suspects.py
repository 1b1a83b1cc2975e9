"""From who stands out to suspects, and how sure that is (peers.py says by what). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from healthd.failslow.groups import identity
from healthd.failslow.model import Confidence, Suspect
from healthd.failslow.node_evidence import MOST_NAMED, agreeing_evidence, one_cause
from healthd.failslow.outliers import CLEAR, PAUSING, Found, pausing, until_the_end
from healthd.failslow.steps import Observed, Step


def named(
    seen: Observed, step: Step, members: Sequence[int], found: Sequence[Found], slack: bool = False
) -> list[Suspect]:
    """Their node, if all who stand out are on one of several; else each of them."""
    found = [pausing(until_the_end(seen, step, one)) for one in found]
    nodes = {seen.series[one.member].node for one in found}
    all_nodes = {seen.series[one].node for one in members}
    slow = len({one.member for one in found})
    several = slow > 2
    (node,) = nodes if len(nodes) == 1 else ("",)
    if slow > 1 and node and len(all_nodes) > 1:
        ones = sorted({one.member for one in found}, key=lambda one: identity(seen.series[one]))
        causes = {one.cause for one in found}
        agreeing = agreeing_evidence(seen, step, ones)
        kind = seen.series[ones[0]].kind_of or "series"
        said = tuple(f"{kind} {seen.series[one.member].name}: {one.sentence}" for one in found[:MOST_NAMED])
        left = len(found) - len(said)
        return [
            Suspect(
                node,
                "node",
                one_cause(causes),
                _sure(seen, step, found, bool(agreeing), slack),
                (*said, *((f"and {left} more of its ranks",) if left > 0 else ()), *agreeing),
                tuple(seen.series[one].name for one in ones),
                seen.point(step, ones),
            )
        ]
    suspects = []
    for one in found:
        series = seen.series[one.member]
        agreeing = agreeing_evidence(seen, step, [one.member])
        said = (one.sentence,)
        if several:
            said += (f"{slow} became slow at about the same time: they may have something in common",)
        if slack:
            said += ("no iteration became slower: it has slack",)
        sure = _sure(seen, step, [one], bool(agreeing), slack)
        if several and sure is Confidence.HIGH and not agreeing:
            sure = Confidence.MEDIUM
        suspects.append(
            Suspect(
                series.name,
                series.kind_of or "series",
                one.cause,
                sure,
                (*said, *agreeing),
                (series.name,),
                seen.point(step, [one.member]),
            )
        )
    return suspects


def _sure(seen: Observed, step: Step, found: Sequence[Found], agreeing: bool, slack: bool) -> Confidence:
    if slack or (not agreeing and any(one.resting > PAUSING for one in found)):
        return Confidence.LOW
    return confidence_of(
        all(one.excess - 1 >= 2 * (one.limit - 1) for one in found),
        all(one.clear > 2 * CLEAR for one in found),
        all(one.peers >= 7 for one in found),
        agreeing,
    )


def confidence_of(*counts: bool) -> Confidence:
    """Of the four that count (peers.py): three are high, two medium."""
    yes = sum(counts)
    return Confidence.HIGH if yes >= 3 else Confidence.MEDIUM if yes == 2 else Confidence.LOW
