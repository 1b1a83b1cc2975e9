"""Parses NCCL's log lines about failed InfiniBand and RoCE requests, and explains their status. All functions are pure.

NCCL (src/transport/net_ib*, also in its plugins) prints one line for a work completion with an error:

    NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129                               (to 2.7)
    NET/IB : Got completion from peer 192.0.2.9<44206> with error 12, opcode 0, len 0, vendor err 129    (2.8 on)
    ... vendor err 129 (Recv) localGid ::ffff:192.0.2.8 remoteGid ::ffff:192.0.2.9                       (2.18)
    ... with status=12 opcode=129 len=65536 vendor err 129 (Recv) localGid A remoteGidsB                 (2.19 on)
    NET/IB: ... remoteGidsB hca mlx5_2                                                                   (2.24 on)
    NET/IB: ... with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) vendor_err=129 localGid A ... (2.29 on)

GIDs are printed only on Ethernet. For a failed request, the status and the vendor's error are defined, but the opcode
and the length are not (ibv_poll_cq(3)). Numbers and names are those of `enum ibv_wc_status` in libibverbs' verbs.h.
"""

from __future__ import annotations

from typing import NamedTuple

from healthd.common.text import regex

NETWORK, MEMORY, REMOTE, ADAPTER, FLUSHED, OTHER_SOURCE = "network", "memory", "remote", "adapter", "flushed", "other"


class Status(NamedTuple):
    """Meaning of a completion status.

    Attributes:
        meaning: a sentence without a full stop.
        source: NETWORK, MEMORY, REMOTE, ADAPTER, FLUSHED or OTHER_SOURCE.
    """

    name: str
    meaning: str
    source: str


# Meanings: InfiniBand specification, volume 1, 11.6.2 (completion return status), and ibv_poll_cq(3).
STATUSES = {
    1: Status("LOC_LEN_ERR", "the data is longer than the buffer that was posted for it", OTHER_SOURCE),
    2: Status("LOC_QP_OP_ERR", "the local adapter could not execute the request", ADAPTER),
    4: Status("LOC_PROT_ERR", "the local adapter may not access the request's memory", MEMORY),
    5: Status("WR_FLUSH_ERR", "an earlier request of the connection failed, and this one was discarded", FLUSHED),
    6: Status("MW_BIND_ERR", "a memory window could not be bound", MEMORY),
    7: Status("BAD_RESP_ERR", "the other end sent an unexpected response", OTHER_SOURCE),
    8: Status("LOC_ACCESS_ERR", "the local adapter refused the other end access to its memory", MEMORY),
    9: Status("REM_INV_REQ_ERR", "the other end received an invalid request", REMOTE),
    10: Status("REM_ACCESS_ERR", "the other end refused access to its memory", MEMORY),
    11: Status("REM_OP_ERR", "the other end could not complete the request", REMOTE),
    12: Status(
        "RETRY_EXC_ERR", "the transport's retries are exhausted because the other end did not acknowledge", NETWORK
    ),
    13: Status("RNR_RETRY_EXC_ERR", "the other end had no buffer ready for too long", REMOTE),
    16: Status("REM_ABORT_ERR", "the other end aborted the operation", REMOTE),
    19: Status("FATAL_ERR", "the local adapter failed", ADAPTER),
    20: Status("RESP_TIMEOUT_ERR", "the other end did not respond in time", NETWORK),
    21: Status("GENERAL_ERR", "the transport failed", OTHER_SOURCE),
}
_LINE = regex(
    r"NET/IB\w*(?:/\w+)? ?: ?Got completion (?:from peer (\S{1,300}?)(?:<(\d{1,40})>?)? )?"
    r"with (?:error (\d{1,5})|status=(?:(\d{1,5})|(\w{1,64})\((\d{1,5})\)))[ ,]"
)
_VENDOR = regex(r"\bvendor[ _]err[ =](\d{1,12})\b")
_REQUEST = regex(r"vendor err \d{1,12} \((\w{1,16})\)|\breq_type=(\w{1,16})")
_LOCAL = regex(r"\blocalGid ([0-9A-Fa-f:.]{2,64})")
_REMOTE = regex(r"\bremoteGids? ?([0-9A-Fa-f:.]{2,64})")
_ADAPTER = regex(r"\bhca ([\w.-]{1,64})")


class FailedRequest(NamedTuple):
    """One failed request. Missing values are "", or None for vendor_error.

    Attributes:
        peer: the other end's address, as in NCCL's sockets.
        local, remote: GIDs.
        adapter: the local device.
        request: Send, Recv, Flush, ...
    """

    status: int
    peer: str
    local: str
    remote: str
    adapter: str
    request: str
    vendor_error: int | None


def parse(line: str) -> FailedRequest | None:
    """Return the failed request that a line reports, or None if it reports none."""
    found = _LINE.search(line)
    if found is None:
        return None
    remainder = line[found.end() - 1 :]
    peer, _, error, number, _, status_number = found.groups()
    status = int(error or number or status_number)
    if not status:
        return None
    vendor, request = _VENDOR.search(remainder), _REQUEST.search(remainder)
    local, remote, adapter = (pattern.search(remainder) for pattern in (_LOCAL, _REMOTE, _ADAPTER))
    return FailedRequest(
        status,
        peer or "",
        local.group(1) if local else "",
        remote.group(1) if remote else "",
        adapter.group(1) if adapter else "",
        (request.group(1) or request.group(2)) if request else "",
        int(vendor.group(1)) if vendor else None,
    )


def lookup_status(number: int) -> Status:
    """Return the meaning of a status. An unknown number has the source OTHER_SOURCE."""
    return STATUSES.get(number, Status(f"status {number}", "an unknown error", OTHER_SOURCE))
