"""Parser for ranks' logs: PyTorch's NCCL watchdog, and NCCL's own NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=COLL.

All functions are pure.

PyTorch's lines (ProcessGroupNCCL.cpp), by version:

    [E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508,
        OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.          (1.13)
    [rank2]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 2] Timeout at NCCL work: 1, last enqueued NCCL work: 1, last
        completed NCCL work: 0.                                                                         (2.3)
    [rank1]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception
        (either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed
        NCCL work: 807.                                                                                 (2.5)
    ... failure detected by watchdog at work sequence id: 5 PG status: last enqueued work: 5, last completed work: 4
    ... Received a dump signal due to a collective timeout from  rank 7 and we will try our best to dump the debug
        info. Last enqueued NCCL work: 56116, last completed NCCL work: 56116.                          (2.6 on)

"[rank2]:" is the global rank, and "[Rank 2]" is the rank in the group. Before 2.3, only the latter is printed. NCCL
numbers the operations of a communicator (opCount, hexadecimal). It logs when an operation is entered, but not when it
completes.

From 2.2 on, a second PyTorch thread monitors the watchdog. If the watchdog hangs in a call to CUDA or NCCL, or waits
for Python's lock, it makes no progress, and the second thread ends the process:

    [rank1]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 1] ... ProcessGroupNCCL's watchdog got stuck for 600 seconds
        without making progress in monitoring enqueued collectives. ...
    [rank1]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 1] Heartbeat monitor timed out! Process will be terminated ...
    [rank7]:[E ...] [PG 3 Rank 7] First PG on this rank that detected no heartbeat of its watchdog.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from healthd.common.text import regex
from healthd.fleet.collectives import transport
from healthd.fleet.collectives.rank_view import Lane, Membership, Operation, Progress, RankView
from healthd.fleet.collectives.transport import FailedRequest

NO_COMPLETE_HISTORY_NS = 1 << 62  # a log does not show since when it is complete
_GLOBAL_RANK = regex(r"\[(?:default)?(?:rank|Rank)(\d{1,7})\]:")
_GROUP_RANK = regex(r"\[(?:PG [^\[\]]*? )?Rank (\d{1,7})\]")
_PG = regex(r"\[PG (?:ID )?(\d{1,7})(?: PG GUID ([^\s()\[\]]+)(?:\(([^()]*)\))?)? Rank \d")
_WORK = regex(
    r"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w+)(?:, NumelIn=(\d{1,18}), NumelOut=(\d{1,18}))?, Timeout\(ms\)=\d+\)"
)
_STATUS = regex(
    r"(?i)last enqueued (?:nccl )?work: (-?\d{1,18}),(?: last started work: [^,]*,)? "
    r"last completed (?:nccl )?work: (-?\d{1,18})"
)
_NCCL_LINE = regex(r"(?<![\w.-])([\w.-]+):(\d{1,10}):\d{1,10} \[\d{1,10}\] NCCL (?:INFO|TRACE) (.*)")
_ENTERED = regex(
    r"(\w+): opCount ([0-9a-f]{1,16}) .*?\bcount (\d{1,18}) datatype (\d{1,3}) "
    r".*?\bcomm (0x[0-9a-f]+)(?: \[nranks=(\d{1,7})\])?"
)
_COMM = regex(r"comm (0x[0-9a-f]+) rank (\d{1,7}) n[Rr]anks (\d{1,7}) .*?(?:commId (0x[0-9a-f]+).*)?$")
_PROCESS = regex(r"(?<![\w.-])([\w.-]{1,255}):(\d{1,10}):\d{1,10} \[\d{1,10}\] ")
_WATCHDOG_STUCK = regex(
    r"watchdog got stuck for (\d{1,9}) seconds|Heartbeat monitor timed out!|detected no heartbeat of its watchdog"
)
MAX_FAILURES = 4096  # maximum number of different failures per log
_TIMED_OUT = "Watchdog caught collective operation timeout"
_POINT_TO_POINT = frozenset(("SEND", "RECV", "Send", "Recv", "COALESCED"))


@dataclass(slots=True)
class _Group:
    description: str = ""
    progress: Progress | None = None
    work: dict[int, Operation] = field(default_factory=dict)


@dataclass(slots=True)
class _Communicator:
    """A communicator in one process.

    Attributes:
        rank: the process's rank in it.
        ranks: number of ranks. -1 means unknown.
    """

    rank: int = -1
    ranks: int = -1
    name: str = ""
    last_operation: Operation | None = None
    recent: dict[int, Operation] = field(default_factory=dict)


@dataclass(slots=True)
class Failure:
    """Failed requests of one kind on one rank.

    Attributes:
        rank: -1 if unknown.
        count: number of requests.
    """

    rank: int
    host: str
    source: str
    failed: FailedRequest
    count: int = 1


@dataclass(slots=True)
class Hang:
    """A rank whose watchdog made no progress. `seconds` is 0 if the log does not contain the duration."""

    rank: int
    host: str
    source: str
    seconds: int = 0


@dataclass(slots=True)
class RankLog:
    """Records of the ranks in one log."""

    views: list[RankView] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    hangs: list[Hang] = field(default_factory=list)


@dataclass(slots=True)
class _Process:
    rank: int | None
    host: str
    groups: dict[str, _Group] = field(default_factory=dict)
    comms: dict[str, _Communicator] = field(default_factory=dict)
    unplaced: list[Operation] = field(default_factory=list)


def parse_views(
    lines: Iterable[bytes], source: str, host: str, rank: int | None = None, number: int | None = None
) -> list[RankView]:
    """Return a view for each rank in one log. A rank whose lines are not in the log has no view.

    Args:
        rank: the rank in the log's name, used for lines that do not contain a rank.
        number: another number in the log's name, used as a last resort.
    """
    return parse_log(lines, source, host, rank, number).views


def parse_log(
    lines: Iterable[bytes], source: str, host: str, rank: int | None = None, number: int | None = None
) -> RankLog:
    """Parse a log.

    Args:
        rank, number: as in `parse_views`.
    """
    processes: dict[object, _Process] = {}
    failures: dict[tuple[object, FailedRequest], Failure] = {}
    hangs: dict[int, Hang] = {}
    for order, raw_line in enumerate(lines):
        if b"NCCL" not in raw_line and b"NET/IB" not in raw_line:
            continue
        line = raw_line.decode("utf-8", "replace")
        if "ProcessGroupNCCL" in line or _TIMED_OUT in line:
            _record_hang(hangs, line, source, host, rank)
            _parse_watchdog_line(processes, line, order, host, rank)
        elif (failed := transport.parse(line)) is not None:
            _record_failure(failures, line, failed, source, host)
        elif (nccl_line := _NCCL_LINE.search(line)) is not None:
            _parse_nccl_line(processes, nccl_line.group(1), nccl_line.group(2), nccl_line.group(3), order, rank)
    found = [_build_view(process, source, number) for process in processes.values()]
    for (key, _), failure in failures.items():
        failure.rank = _process_rank(processes.get(key), rank, number)
    return RankLog(
        [view for view in found if view.lanes and view.rank >= 0], list(failures.values()), list(hangs.values())
    )


def _process_rank(process: _Process | None, rank: int | None, number: int | None) -> int:
    """Return the rank of a process from its communicators or, failing that, from the log's name.

    Return -1 if neither contains the rank.
    """
    comms = process.comms.values() if process is not None else ()
    widest = max(comms, key=lambda comm: comm.ranks, default=_Communicator())
    candidates = (
        candidate for candidate in (rank, widest.rank if widest.rank >= 0 else None, number) if candidate is not None
    )
    return next(candidates, -1)


def _record_failure(
    failures: dict[tuple[object, FailedRequest], Failure], line: str, failed: FailedRequest, source: str, host: str
) -> None:
    process = _PROCESS.search(line)
    key = (process.groups() if process else None, failed)
    if key in failures:
        failures[key].count += 1
    elif len(failures) < MAX_FAILURES:
        failures[key] = Failure(-1, process.group(1) if process else host, source, failed)


def _record_hang(hangs: dict[int, Hang], line: str, source: str, host: str, rank: int | None) -> None:
    found = _WATCHDOG_STUCK.search(line)
    number = _rank_in(line, rank) if found is not None else None
    if found is None or number is None:
        return
    hang = hangs.setdefault(number, Hang(number, host, source))
    hang.seconds = max(hang.seconds, int(found.group(1) or 0))


def _rank_in(line: str, rank: int | None) -> int | None:
    """Return the rank for a watchdog line.

    The line's global rank is preferred, then the rank in the log's name, then the rank in the group.
    """
    global_rank, group_rank = _GLOBAL_RANK.search(line), _GROUP_RANK.search(line)
    if global_rank is not None:
        return int(global_rank.group(1))
    return rank if rank is not None or group_rank is None else int(group_rank.group(1))


def _parse_watchdog_line(processes: dict[object, _Process], line: str, order: int, host: str, rank: int | None) -> None:
    group_match, work, status = _PG.search(line), _WORK.search(line), _STATUS.search(line)
    number = _rank_in(line, rank)
    if number is None or (work is None and status is None):
        return
    process = processes.setdefault(("rank", number), _Process(number, host))
    operation = None
    if work is not None:
        sequence, name, *numel = work.groups()
        sizes = (int(numel[0]), int(numel[1])) if numel[0] else ()
        operation = Operation(int(sequence), order, name, sizes)
    if group_match is not None:
        name = group_match.group(2) or group_match.group(1)
        group = process.groups.setdefault(name, _Group())
        group.description = group_match.group(3) or group.description
        if status is not None:
            group.progress = Progress(int(status.group(1)), int(status.group(2)))
            for operation_in_doubt in [
                operation_in_doubt
                for operation_in_doubt in process.unplaced
                if group.progress.done < operation_in_doubt.sequence <= group.progress.entered
            ]:
                group.work.setdefault(operation_in_doubt.sequence, operation_in_doubt)
                process.unplaced.remove(operation_in_doubt)
        if operation is not None:
            group.work.setdefault(operation.sequence, operation)
    elif operation is not None and operation not in process.unplaced:
        process.unplaced.append(operation)


def _parse_nccl_line(
    processes: dict[object, _Process], host: str, pid: str, text: str, order: int, rank: int | None
) -> None:
    entered, created = _ENTERED.match(text), None
    if entered is None and "comm 0x" in text:
        created = _COMM.search(text)
    if entered is None and created is None:
        return
    process = processes.setdefault((host, pid), _Process(rank, host))
    if created is not None:
        address, comm_rank, ranks, name = created.groups()
        comm = process.comms.setdefault(address, _Communicator())
        comm.rank, comm.ranks, comm.name = int(comm_rank), int(ranks), name or comm.name
    elif entered is not None:
        kind, number, count, datatype, address, ranks = entered.groups()
        comm = process.comms.setdefault(address, _Communicator())
        comm.ranks = int(ranks) if ranks else comm.ranks
        if kind not in _POINT_TO_POINT:
            comm.last_operation = Operation(
                int(number, 16), order, kind, (int(count), int(count)), ((datatype,), (datatype,))
            )
            comm.recent[comm.last_operation.sequence] = comm.last_operation
            while len(comm.recent) > 32:
                del comm.recent[next(iter(comm.recent))]


def _build_view(process: _Process, source: str, number: int | None) -> RankView:
    if process.unplaced and not process.groups:  # before 2.3, no line names its group
        process.groups["default_pg"] = _Group(
            "default_pg",
            None,
            {unplaced_operation.sequence: unplaced_operation for unplaced_operation in process.unplaced},
        )
    elif process.unplaced and len(process.groups) == 1:
        (only,) = process.groups.values()
        only.work.update((unplaced_operation.sequence, unplaced_operation) for unplaced_operation in process.unplaced)
    widest = max(process.comms.values(), key=lambda comm: comm.ranks, default=_Communicator())
    rank = process.rank if process.rank is not None else widest.rank
    if rank < 0 and number is not None:
        rank = number
    result = RankView(rank, source, process.host, since_ns=NO_COMPLETE_HISTORY_NS)
    for name, group in process.groups.items():
        lane = _build_lane(group)
        if lane is not None:
            result.groups[name] = Membership(name, group.description, None)
            result.lanes[name] = lane
    for comm in process.comms.values():
        name = f"commId {comm.name}" if comm.name else f"communicator of {comm.ranks} ranks"
        if name in result.groups or (not comm.name and comm.ranks != widest.ranks) or comm.ranks < 2:
            continue  # without an id, communicators of two processes cannot be matched
        result.groups[name] = Membership(name, "", None)
        result.lanes[name] = Lane(
            comm.last_operation.sequence if comm.last_operation else -1,
            comm.last_operation,
            comm.recent,
            has_completions=False,
        )
    return result


def _build_lane(group: _Group) -> Lane | None:
    waiting = {number: work_item for number, work_item in group.work.items() if work_item.name not in _POINT_TO_POINT}
    if group.progress is None:
        if not waiting:
            return None
        first = waiting[min(waiting)]
        return Lane(max(waiting), first, waiting)
    entered, done = group.progress.entered, group.progress.done
    if entered <= done:
        return Lane(entered, None, waiting)
    first = waiting.get(done + 1, Operation(done + 1, -1, ""))
    return Lane(max([entered, *waiting]), first, waiting)
