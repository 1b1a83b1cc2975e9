"""Which remedy is worth its cost, and when: ski rental (arXiv 2410.12588, algorithm 1). Pure.

Nobody knows how long a slowness will last. To act at once is dear if it ends by itself, to wait is dear if it does not.
So what was lost so far is held against what each remedy costs, the cheapest first: it is applied when the loss has
reached its cost, and then the next. A relief begins all anew.

Loss and cost are GPU-seconds of the whole gang: where one rank is slow all wait, and while a job moves micro-batches or
restarts none of its GPUs works.

What that guarantees, with C the loss and the costs together, k the remedies that were applied, and one iteration the
loss of the one in which the loss reached a cost:

- one remedy, which removes the slowness: C <= 2 x the least that anybody could have had + one iteration;
- several, of which none makes it worse: C <= (1 + k) x (the least + one iteration). When k were applied the loss had
  reached the cost of each, so that they cost at most k times the loss; and the loss before the one that the best plan
  takes is at most its cost and one iteration, and after it no more than the best plan has.

Where `settles` is more than 0 that many iterations are let pass after a remedy, to see what it did: then "one
iteration" is so many.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from healthd.failslow.model import Cause


class Action(enum.Enum):
    """FALCON's strategies, S1 to S4."""

    IGNORE = "s1"
    MICRO_BATCHES = "s2"
    TOPOLOGY = "s3"
    RESTART = "s4"


class Overheads(NamedTuple):
    """Seconds that the whole gang does not train while it is carried out. The paper says "low", "about a minute" and
    "high": what a site has measured is better."""

    s2: float = 5.0
    s3: float = 60.0
    s4: float = 600.0


class Look(NamedTuple):
    """One iteration of the gang. lost_seconds: its time less that of a healthy one, of all iterations that were not
    told of yet (a slowness is known some iterations after it began). gpus: of the whole gang. whole_stage: one node
    that runs a whole pipeline stage is slow."""

    slow: bool
    lost_seconds: float = 0.0
    gpus: int = 1
    cause: Cause = Cause.UNKNOWN
    whole_stage: bool = False


class State(NamedTuple):
    """What is known of the slowness that stands. lost: GPU-seconds since its onset; taken: in their order; since:
    iterations since the last of them; whole_stage: as of a Look."""

    cause: Cause = Cause.UNKNOWN
    lost: float = 0.0
    taken: tuple[Action, ...] = ()
    since: int = 0
    whole_stage: bool = False


class Due(NamedTuple):
    """The next remedy, and the loss in GPU-seconds at which it is worth its cost."""

    action: Action
    at: float


HEALTHY = State()

# By what the paper's table says of each: S2 mitigates slow compute only, S3 both, S4 removes both. Of what nobody knows
# the cause nobody knows which part to spare, so that only a new start is left. What the job does to itself (longer
# sequences, an unequal pipeline) it has again after a restart.
_COMPUTE = (Action.MICRO_BATCHES, Action.TOPOLOGY, Action.RESTART)
_COMMUNICATION = (Action.TOPOLOGY, Action.RESTART)
CANDIDATES = {
    Cause.COMPUTE: _COMPUTE,
    Cause.COMPUTE_GPU: _COMPUTE,
    Cause.COMPUTE_CPU: _COMPUTE,
    Cause.COMMUNICATION: _COMMUNICATION,
    Cause.COMMUNICATION_INTRA_NODE: _COMMUNICATION,
    Cause.COMMUNICATION_INTER_NODE: _COMMUNICATION,
    Cause.UNKNOWN: (Action.IGNORE, Action.RESTART),
    Cause.IMBALANCE: (Action.IGNORE,),
}


# Every data-parallel group passes through each stage, so no other group is quicker, and the stragglers are in the
# fewest stages already.
OF_NO_USE_FOR_A_WHOLE_STAGE = (Action.MICRO_BATCHES, Action.TOPOLOGY)


def overhead_seconds(action: Action, overheads: Overheads) -> float:
    costs = {Action.MICRO_BATCHES: overheads.s2, Action.TOPOLOGY: overheads.s3, Action.RESTART: overheads.s4}
    return costs.get(action, 0.0)


def due(state: State, gpus: int, overheads: Overheads) -> Due | None:
    """What comes next for this cause, and at which loss; None if nothing is left but to ignore it (S1)."""
    useless = OF_NO_USE_FOR_A_WHOLE_STAGE if state.whole_stage else ()
    left = [one for one in CANDIDATES[state.cause] if one not in (Action.IGNORE, *useless, *state.taken)]
    if not left:
        return None
    action = min(left, key=lambda one: overhead_seconds(one, overheads))
    return Due(action, overhead_seconds(action, overheads) * gpus)


def step(state: State, look: Look, overheads: Overheads, settles: int = 0) -> tuple[State, Action | None]:
    """The state after one more iteration, and the remedy to apply now. Before a loss reaches the cost of a remedy it is
    not applied, and each at most once in a slowness."""
    if not look.slow:
        return HEALTHY, None
    lost = state.lost + look.lost_seconds * look.gpus if math.isfinite(look.lost_seconds) else state.lost
    # A cause that is known later is a better word than "unknown", and is kept.
    cause = state.cause if look.cause is Cause.UNKNOWN else look.cause
    state = State(cause, max(lost, 0.0), state.taken, state.since + 1, look.whole_stage)
    following = due(state, look.gpus, overheads)
    waits = bool(state.taken) and state.since <= settles
    if following is None or state.lost < following.at or waits:
        return state, None
    return state._replace(taken=(*state.taken, following.action), since=0), following.action
