"""`healthd fleet status`: show the current state of all nodes, from Prometheus."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from healthd.cli.flags import Command, Parser
from healthd.cli.fleet.ingest import fleet_errors
from healthd.cli.terminal import Stop, json_pieces, page, write_output, write_stream

if TYPE_CHECKING:
    from healthd.common.slurm.blocks import BlockTopology

VARIABLE, DEFAULT = "HEALTHD_PROMETHEUS", "http://localhost:9090"
SECONDS = 30.0  # timeout for a query, short because a person is waiting
MAX_TOPOLOGY_CHARACTERS = 16 << 20


def _arguments(parser: Parser) -> None:
    parser.add_argument(
        "--prometheus", metavar="URL", help=f"server URL, up to /api/v1 (default: ${VARIABLE}, else {DEFAULT})"
    )
    parser.add_argument(
        "--job",
        metavar="NAME",
        default="",
        help="scrape job to read (default: healthd and, for nodes missing there, any job with healthd metrics)",
    )
    parser.add_argument("--basic-file", metavar="FILE", default="", help='file with "user:password"')
    parser.add_argument("--token-file", metavar="FILE", default="", help="file with a bearer token")
    parser.add_argument(
        "--ca-file", metavar="FILE", default="", help="CA certificates to trust in addition to the system's"
    )
    parser.add_argument("--tenant", metavar="NAME", default="", help="X-Scope-OrgID header, for Mimir")
    parser.add_argument(
        "--topology",
        metavar="FILE",
        default="",
        help="Slurm's blocks, for the largest job of an NVLink domain: topology.conf, or the output of scontrol show "
        "topology",
    )
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--drained", action="store_true", help="only drained nodes, regardless of who drained them")
    selection.add_argument("--problems", action="store_true", help="hide nodes that are healthy and in service")
    selection.add_argument("--all", action="store_true", help="also list each healthy node")
    parser.add_argument(
        "--sort",
        choices=("worst", "since", "node"),
        default="worst",
        help="sort by severity (default), duration or name",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")


def _status(args: argparse.Namespace) -> int:
    import os
    from dataclasses import replace

    with fleet_errors("healthd fleet status"):
        from healthd.fleet.sources.prometheus_server import ServerError, parse_server, query_server
        from healthd.fleet.status import text
        from healthd.fleet.status.queries import read_fleet

        topology = _topology(args.topology)
        url = args.prometheus or os.environ.get(VARIABLE) or DEFAULT
        try:
            prometheus_server = parse_server(url, args.tenant, args.token_file, args.basic_file, args.ca_file)
        except ServerError as error:
            raise Stop(f"healthd fleet status: {url}: {error}") from None
        try:
            fleet = read_fleet(partial(query_server, prometheus_server, timeout_seconds=SECONDS), args.job)
        except ServerError as error:
            hint = "" if args.prometheus or os.environ.get(VARIABLE) else "; set --prometheus URL"
            raise ServerError(f"{prometheus_server.url}: {error}{hint}") from None
        if topology is not None and len({node.cluster for node in fleet.nodes}) > 1:
            topology = None
            note = "--topology was ignored, because the server has several clusters and the file describes only one"
            fleet = replace(fleet, notes=(*fleet.notes, note))
        elif topology is not None:
            fleet = replace(fleet, notes=(*fleet.notes, *text.topology_notes(fleet, topology)))
        nodes = text.select_nodes(fleet, args.drained, args.problems, args.sort)
        status = text.exit_status(fleet)
    if args.json:
        write_stream(json_pieces(text.fleet_document(fleet, nodes, topology)))
        return status
    return write_output(text.fleet_text(fleet, nodes, page(), args.all, topology), status)


def _topology(path: str) -> BlockTopology | None:
    """Read the blocks. Raises Stop."""
    if not path:
        return None
    from healthd.common.slurm.blocks import parse_topology

    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            topology = parse_topology(file.read(MAX_TOPOLOGY_CHARACTERS))
    except OSError as error:
        raise Stop(f"healthd fleet status: {path}: {error.strerror}") from None
    except ValueError as error:
        raise Stop(f"healthd fleet status: {path}: {error}") from None
    if topology is None:
        raise Stop(
            f"healthd fleet status: {path}: has no BlockName=; use topology.conf, or the output of scontrol "
            "show topology NAME for a topology with blocks (topology/block)"
        )
    return topology


COMMANDS = {
    "fleet status": Command(
        _arguments,
        _status,
        "Show the current state of all nodes, from Prometheus: drained nodes with reason and time, broken nodes in "
        "service, nodes that do not report, and repairs by healthd.\n"
        'The command needs neither a store nor the extra "fleet". The server must scrape healthd (docs/metrics.md).\n'
        "Exit status: 0 all nodes are healthy; 1 a node has a warning, is unknown or was drained by others; 2 a node "
        "is broken, drained by healthd or not reporting; 3 Prometheus cannot answer or has no healthd metrics; 64 "
        "usage error.",
        "  healthd fleet status --prometheus http://prometheus:9090\n"
        "  healthd fleet status --drained --sort since\n"
        "  healthd fleet status --topology /etc/slurm/topology.conf\n"
        "  healthd fleet status --json | jq .counts\n",
    ),
}
