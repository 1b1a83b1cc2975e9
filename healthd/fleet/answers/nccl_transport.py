"""Describes failed InfiniBand requests and hanging watchdogs from the ranks' logs. All functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from healthd.fleet.answers.document import Document
from healthd.fleet.collectives import transport
from healthd.fleet.collectives.rank_log import Failure, Hang
from healthd.fleet.collectives.rank_view import file_name

MAX_SHOWN = 16
# Causes come before consequences. When a connection breaks, requests at the other end are flushed or exhaust their
# retries; these are consequences.
_ORDER = (
    transport.MEMORY,
    transport.ADAPTER,
    transport.NETWORK,
    transport.REMOTE,
    transport.OTHER_SOURCE,
    transport.FLUSHED,
)

FAILURE_KINDS = (transport.MEMORY, transport.ADAPTER, transport.NETWORK, transport.REMOTE)


def failure_rows(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """Return a row for each kind of failed request. Causes come before consequences."""
    rows = [_failure_row(failure) for failure in failures]
    return sorted(rows, key=lambda row: _ORDER.index(row["source"]))


def hang_rows(hangs: Sequence[Hang]) -> list[dict[str, Any]]:
    """Return a row for each rank whose watchdog made no progress."""
    longest: dict[int, Hang] = {}
    for hang in hangs:
        if hang.rank not in longest or hang.seconds > longest[hang.rank].seconds:
            longest[hang.rank] = hang
    return [
        {"rank": rank, "host": hang.host, "file": file_name(hang.source), "seconds": hang.seconds or None}
        for rank, hang in sorted(longest.items())
    ]


def _failure_row(failure: Failure) -> dict[str, Any]:
    failed, status = failure.failed, transport.lookup_status(failure.failed.status)
    return {
        "rank": failure.rank if failure.rank >= 0 else None,
        "host": failure.host,
        "file": file_name(failure.source),
        "status": failed.status,
        "name": status.name,
        "meaning": status.meaning,
        "source": status.source,
        "vendor_error": failed.vendor_error,
        "request": failed.request,
        "local": failed.local,
        "remote": failed.remote,
        "peer": failed.peer,
        "adapter": failed.adapter,
        "count": failure.count,
    }


def failure_kind(failures: Sequence[dict[str, Any]]) -> str:
    """Return the source of the first failed request, one of FAILURE_KINDS, or "" if there is none.

    A flushed request counts as "network", and so does a request without a more specific source.
    """
    if not failures:
        return ""
    source: str = failures[0]["source"]
    return source if source in FAILURE_KINDS else transport.NETWORK


def hang_suspects(hangs: Sequence[dict[str, Any]], ranks: int) -> list[int]:
    """Return the hanging ranks that are suspects.

    If there are several ranks and all of them hang, none is a suspect, because all may be waiting.
    """
    hanging = [row["rank"] for row in hangs]
    return [] if len(hanging) > 1 and len(hanging) >= ranks else hanging


def failures_verdict(nccl: Document) -> str:
    """Describe, in one or two sentences, what failed and between which two ends."""
    first = nccl["failures"][0]
    ends = f"{_local_end(first)} and {_remote_end(first)}"
    if first["source"] == transport.MEMORY:
        return (
            f"The network did not fail; memory registration with the network adapter "
            f"failed: between {ends} {first['meaning']} "
            f"({_status(first)})."
        )
    if first["source"] == transport.FLUSHED:
        return (
            f"The connection between {ends} broke earlier: {first['meaning']} ({_status(first)}). The first error is "
            "in the log of another rank."
        )
    subject = {
        transport.NETWORK: "The network, or the process at the other end",
        transport.REMOTE: "The other end",
        transport.ADAPTER: "The local adapter",
    }.get(first["source"], "The transport")
    return f"{subject}: between {ends} {first['meaning']} ({_status(first)})."


def hangs_verdict(nccl: Document) -> str:
    """Return one or two sentences that name the hanging ranks."""
    hanging = [row["rank"] for row in nccl["hangs"]]
    names = ", ".join(map(str, hanging[:MAX_SHOWN])) + (", ..." if len(hanging) > MAX_SHOWN else "")
    if not nccl["suspects"]:
        return (
            f"All {len(hanging)} ranks hang in calls to CUDA or NCCL, according to their monitors (ranks {names}); "
            "the rank for which they wait is unknown."
        )
    is_single = len(hanging) == 1
    return (
        f"{'Rank' if is_single else 'Ranks'} {names} {'hangs' if is_single else 'hang'} in a call to CUDA or NCCL, or "
        f"{'waits' if is_single else 'wait'} for Python's lock: the watchdog made no progress."
    )


def failure_sentence(row: Document) -> str:
    """Return a sentence that describes a failed request and both ends."""
    times = f" ({row['count']:,} times)" if row["count"] > 1 else ""
    request = f"{row['request']}: " if row["request"] else ""
    vendor = f", vendor error {row['vendor_error']}" if row["vendor_error"] is not None else ""
    return f"{_local_end(row)} to {_remote_end(row)}: {request}{row['meaning']} ({_status(row)}{vendor}){times}."


def hang_sentence(row: Document) -> str:
    """Return a sentence with the hanging rank and the duration of the hang."""
    where = f" on {row['host']}" if row["host"] else ""
    since = f" for {row['seconds']:,} s" if row["seconds"] else ""
    stuck = f"PyTorch's NCCL watchdog made no progress{since}, and its monitor ended the process"
    return f"rank {row['rank']}{where}: {stuck}."


def failures_advice(nccl: Document) -> str:
    source = nccl["failures"][0]["source"]
    if source == transport.MEMORY:
        return (
            "Next: run the job once with NCCL_NET_GDR_LEVEL=LOC. If that helps, check GPUDirect RDMA on both ends: "
            "the module nvidia_peermem or DMA-BUF, PCIe ACS, the IOMMU, and the locked-memory limit."
        )
    if source == transport.FLUSHED:
        return "Next: read the logs of the ranks at the other end. These logs contain the first error."
    return (
        "Next: check whether the process at the other end ended first. If not, run `healthd fleet links` for the "
        "ports and switches between these two ends, and `healthd status` on both."
    )


def hangs_advice() -> str:
    return (
        "Next: read the stack of a hanging process (`py-spy dump`, gdb) and run `healthd scan` on its "
        "node's kernel log."
    )


def _status(row: Document) -> str:
    number = f"status {row['status']}"
    return f"IBV_WC_{row['name']}, {number}" if row["name"] != number else number


def _local_end(row: Document) -> str:
    rank_text = f"rank {row['rank']}" if row["rank"] is not None else "a rank"
    details = [
        *([f"on {row['host']}"] if row["host"] else []),
        *([f"adapter {row['adapter']}"] if row["adapter"] else []),
        *([f"GID {row['local']}"] if row["local"] else []),
    ]
    return f"{rank_text} ({', '.join(details)})" if details else rank_text


def _remote_end(row: Document) -> str:
    peer = f"peer {row['peer']}" if row["peer"] else "an unnamed peer"
    return f"{peer} (GID {row['remote']})" if row["remote"] else peer
