"""`healthd validate`: measure this node's GPUs, links and ports."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from healthd.cli import flags
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import REFUSED, UNKNOWN, Stop, as_json, page, write_error, write_output
from healthd.common.page import Page, plain
from healthd.common.text import is_decimal

if TYPE_CHECKING:
    from healthd.agent.settings.config import CheckConfig, Loaded
    from healthd.validation.document import Validation
    from healthd.validation.run import ValidationRequest

MAX_PARTS = 4096
MAX_NODES = 512
SECONDS, QUICK_SECONDS, MAX_SECONDS = 900.0, 30.0, 86400.0
STATUS = {"ok": 0, "slow": 1, "failed": 2, "not_measured": UNKNOWN}
WHY = {"manual", "before_resume", "epilog", "nodes", "repair"}


def _flags(parser: Parser) -> None:
    parser.add_argument("--quick", action="store_true", help="gemm, memory, pcie, p2p and cpu only, within 30 s")
    parser.add_argument("--seconds", metavar="N", help="time limit (default: 900, with --quick 30)")
    parser.add_argument("--only", metavar="A,B", help="run only these: gemm, memory, pcie, p2p, nccl, ib, dcgm, cpu")
    parser.add_argument(
        "--force",
        action="store_true",
        help="run even if a job is on the node; the job slows down and the measured values are too low",
    )
    parser.add_argument("--why", choices=sorted(WHY), default="manual", help=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="measure nothing; show the last result")
    parser.add_argument(
        "--nodes", metavar="A,B", help="validate these nodes and the links between them in a maintenance reservation"
    )
    parser.add_argument(
        "--mndiag",
        metavar="A,B",
        nargs="?",
        const="",
        help="run dcgmi mndiag from this node on these GB200 or GB300 nodes (default: the nodes of --nodes or of this "
        "Slurm job)",
    )
    parser.add_argument("--pair", metavar="PASS", help=argparse.SUPPRESS)  # --nodes runs this on each node
    parser.add_argument("--plan", metavar="N", help="only print the passes between N parts, as sender>receiver")
    parser.add_argument("--shape", choices=("ring", "tree"), default="ring", help="shape for --plan (default: ring)")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    flags.add_config_flag(parser)
    parser.add_argument("--root", metavar="DIR", help="read /proc and /sys under DIR")
    parser.add_argument("--profile", metavar="NAME|FILE", help="expected hardware: auto (default), none, dgx-h100, ...")
    parser.add_argument("--node-name", metavar="NAME", help="NodeName in Slurm (default: the host name)")
    parser.add_argument("--state-dir", metavar="DIR", help="directory for the result and the history")
    parser.add_argument("--runtime-dir", metavar="DIR", help="directory for the lock")


def _validate(args: argparse.Namespace) -> int:
    if args.plan is not None:
        document = _plan(args.plan, args.shape)
        return write_output(as_json(document) if args.json else _plan_text(document))
    if args.show:
        return _print_validation(_last_validation(flags.state_dir(args)), args.json)
    if args.nodes is not None:
        return _measure_nodes(args)
    with flags.settings_errors_as_usage():
        loaded, _ = flags.load_settings(args)
    if args.pair is not None:
        return _measure_pair(args.pair, loaded)
    if args.mndiag is not None:
        return _diagnose_domain(args, loaded)
    return _measure(args, loaded)


# --- several nodes, and links between them


def _measure_nodes(args: argparse.Namespace) -> int:
    """Validate several nodes from a host that has Slurm's commands.

    Each node saves its own result; this host saves nothing.
    """
    from healthd.validation import across_nodes as several
    from healthd.validation.passes import ring
    from healthd.validation.reservation import NoReservation, ReservationRequest, Stopped, validate

    names = _node_names("--nodes", args.nodes, MAX_NODES)
    if args.mndiag:
        raise Stop("healthd validate: with --nodes, --mndiag takes no list; it runs on the nodes of --nodes")
    if os.geteuid() != 0:
        raise Stop("healthd validate: --nodes creates a reservation and writes files owned by root; run it as root")
    options = (*(("--quick",) if args.quick else ()), *(("--only", args.only) if args.only is not None else ()))
    passes = tuple(tuple((names[a], names[b]) for a, b in pairs) for pairs in ring(len(names)))
    request = ReservationRequest(
        names,
        f"healthd-validate-{os.urandom(4).hex()}",
        "root",
        os.environ.get("HEALTHD", "healthd"),
        _seconds(args),
        options,
        passes,
        0.0 if args.mndiag is None else _mndiag_seconds(args, names),
    )
    try:
        found = several.run(validate(request), lambda message: write_error(f"healthd validate: {message}"))
    except (NoReservation, Stopped) as error:
        raise Stop(f"healthd validate: {error}", UNKNOWN) from None
    document = several.as_document(request, found)
    return write_output(as_json(document) if args.json else several.as_text(document), STATUS[document["verdict"]])


def _node_names(option: str, text: str, most: int) -> tuple[str, ...]:
    """Return the nodes of a host list. Raises Stop."""
    from healthd.common.slurm.hostlist import HostListError, expand
    from healthd.common.slurm.lemon_command import is_node_name

    try:
        names = expand(text, most)
    except HostListError as error:
        raise Stop(f"healthd validate: {option}: {error}") from None
    if not names or not all(map(is_node_name, names)) or len(set(names)) != len(names):
        raise Stop(f'healthd validate: {option} must be a list of distinct node names, got "{text}"; example: n[1-4]')
    return tuple(names)


def _diagnose_domain(args: argparse.Namespace, loaded: Loaded) -> int:
    """Run DCGM's multi-node diagnostic from this node. Nothing is saved."""
    from healthd.validation import domain, run
    from healthd.validation import tool_paths as found
    from healthd.validation.programs import adopt_orphans, end_on_signals

    settings, config = loaded.settings, _config(loaded)
    hosts = _diagnosed_hosts(args.mndiag)
    seconds = _mndiag_seconds(args, hosts)
    other_jobs = [job for job in run.jobs_on_node(settings.root) if job != os.environ.get("SLURM_JOB_ID")]
    if other_jobs and not args.force:
        raise Stop(f"healthd validate: jobs on this node: {', '.join(other_jobs[:5])}; --force runs anyway", UNKNOWN)
    stop = end_on_signals()
    adopt_orphans()
    with _alone(settings.runtime_dir):
        tools = found.find(getattr(config, "tools", {}), os.environ.get("PATH", os.defpath))
        results = domain.run(hosts, tools, seconds, stop)
    document = domain.as_document(settings.node_name or os.uname().nodename, hosts, results)
    return write_output(as_json(document) if args.json else domain.as_text(document), STATUS[document["verdict"]])


def _diagnosed_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts for --mndiag. Within a job, only the job's nodes are allowed. Raises Stop."""
    job_text = os.environ.get("SLURM_JOB_NODELIST", "")
    job_nodes = _node_names("SLURM_JOB_NODELIST", job_text, MAX_NODES) if job_text else ()
    if not text and not job_nodes:
        raise Stop("healthd validate: --mndiag needs a list of nodes outside a Slurm job; example: --mndiag n[1-4]")
    hosts = _node_names("--mndiag", text, MAX_NODES) if text else job_nodes
    if job_nodes and not set(hosts) <= set(job_nodes):
        others = ", ".join(sorted(set(hosts) - set(job_nodes))[:5])
        raise Stop(f"healthd validate: --mndiag: not nodes of this job ({job_text}): {others}")
    return hosts


def _mndiag_seconds(args: argparse.Namespace, hosts: Sequence[str]) -> float:
    """Return the time limit for --mndiag. --quick does not shorten it, because MPI needs time to start. Raises Stop."""
    from healthd.validation.tools.mndiag import MAX_HOSTS, MIN_SECONDS

    if len(hosts) > MAX_HOSTS:
        raise Stop(f"healthd validate: --mndiag: at most {MAX_HOSTS} nodes, got {len(hosts)}")
    seconds = SECONDS if args.seconds is None else _seconds(args)
    if seconds < MIN_SECONDS:
        raise Stop(f"healthd validate: --seconds must be at least {MIN_SECONDS:.0f} with --mndiag")
    return seconds


def _measure_pair(text: str, loaded: Loaded) -> int:
    from healthd.validation import across_nodes
    from healthd.validation import tool_paths as found
    from healthd.validation.programs import end_on_signals

    settings, config = loaded.settings, _config(loaded)
    node = settings.node_name or os.uname().nodename
    try:
        role = across_nodes.role_in_pass(text, node)
    except across_nodes.InvalidPass as error:
        raise Stop(f"healthd validate: {error}") from None
    stop = end_on_signals()
    tools = found.find(getattr(config, "tools", {}), os.environ.get("PATH", os.defpath))
    sent = across_nodes.transfer(role, tools, settings.root, stop) if role else []
    return write_output(as_json(across_nodes.pair_document(node, sent)))


# --- this node


def _measure(args: argparse.Namespace, loaded: Loaded) -> int:
    from healthd.validation import document, run
    from healthd.validation import tool_paths as found
    from healthd.validation.programs import adopt_orphans, end_on_signals

    settings, config = loaded.settings, _config(loaded)
    request = _request(args, settings.node_name or os.uname().nodename, settings.root, config)
    jobs = run.jobs_on_node(settings.root)
    if jobs and not args.force:
        job_list = ", ".join(jobs[:5]) + (" ..." if len(jobs) > 5 else "")
        raise Stop(
            f"healthd validate: jobs on this node: {job_list}; a validation would slow them down, and the measured "
            "values would be too low; --force runs anyway",
            UNKNOWN,
        )
    stop = end_on_signals()
    adopt_orphans()
    with _alone(settings.runtime_dir):
        past = run.read_history(settings.state_dir)
        tools = found.find(getattr(config, "tools", {}), os.environ.get("PATH", os.defpath))
        lock = os.path.join(settings.runtime_dir, document.LOCK)
        validation = run.validate(request, tools, past, stop, lock)
        _save(settings.state_dir, validation, past)
    return _print_validation(validation, args.json)


def _print_validation(validation: Validation, as_document: bool) -> int:
    from healthd.validation import document

    output = document.as_document(validation)
    return write_output(as_json(output) if as_document else text(output, page()), STATUS[output["verdict"]])


def _last_validation(state_dir: str) -> Validation:
    """Return this node's last validation. Raises Stop."""
    from healthd.common import ownership
    from healthd.validation import document

    path = os.path.join(state_dir, document.FILE)
    try:
        return document.parse(ownership.read(path).decode("utf-8", "replace"))
    except FileNotFoundError:
        raise Stop(f"healthd validate: no result for this node yet ({path}); run healthd validate", UNKNOWN) from None
    except OSError as error:
        raise Stop(f"healthd validate: {path}: {error.strerror or error}", UNKNOWN) from None
    except document.NotAValidation as error:
        raise Stop(f"healthd validate: {path}: {error}", UNKNOWN) from None


def _config(loaded: Loaded) -> CheckConfig | None:
    """Return the [checks.validation] settings."""
    configs = {**loaded.disabled, **loaded.checks}
    return next((config for name, config in configs.items() if str(name.check) == "validation"), None)


def _request(args: argparse.Namespace, node: str, root: str, config: CheckConfig | None) -> ValidationRequest:
    from healthd.validation.measurement import FAMILIES, QUICK
    from healthd.validation.run import ValidationRequest

    families = QUICK if args.quick else tuple(FAMILIES)
    if args.only is not None:
        selected = [word.strip() for word in args.only.split(",")]
        unknown = [word for word in selected if word not in FAMILIES]
        if unknown:
            raise Stop(f'healthd validate: --only: unknown measurement "{unknown[0]}"; known: {", ".join(FAMILIES)}')
        families = tuple(family for family in FAMILIES if family in selected)
    seconds = _seconds(args)
    level = int(getattr(config, "dcgm_level", 2))
    if level == 0 and args.only is None:
        families = tuple(family for family in families if family != "dcgm")
    floors = dict(getattr(config, "floors", {}))
    return ValidationRequest(node, root, families, args.quick, seconds, floors, level or 1, args.why, args.force)


def _seconds(args: argparse.Namespace) -> float:
    seconds = QUICK_SECONDS if args.quick else SECONDS
    if args.seconds is not None:
        limit = flags.parse_duration(
            args.seconds if args.seconds[-1:] in "smhd" and args.seconds else f"{args.seconds}s"
        )
        if limit is None or not 1 <= limit <= MAX_SECONDS:
            raise Stop(f'healthd validate: --seconds must be 1 to {MAX_SECONDS:.0f}, got "{args.seconds}"')
        seconds = limit
    return seconds


@contextmanager
def _alone(runtime_dir: str) -> Iterator[None]:
    """Ensure that only one validation runs at a time.

    A user who may not write the lock file runs the validation without the lock, so a job's prolog cannot end it. Print
    a note.
    """
    from healthd.validation import run

    try:
        holding = run.exclusive_lock(runtime_dir)
        holding.__enter__()
    except run.Refused as error:
        raise Stop(f"healthd validate: {error}", UNKNOWN) from None
    except OSError as error:
        if not run.is_permission_error(error):
            raise Stop(f"healthd validate: {runtime_dir}: {error.strerror or error}", UNKNOWN) from None
        write_error("healthd validate: not running as root, so a starting job cannot end this validation")
        yield
        return
    try:
        yield
    finally:
        holding.__exit__(None, None, None)


def _save(state_dir: str, validation: Validation, past: dict[tuple[str, str, str], list[float]]) -> None:
    from healthd.validation import run

    try:
        run.save(state_dir, validation, past)
    except OSError as error:
        why = "not as root" if run.is_permission_error(error) and os.geteuid() != 0 else (error.strerror or str(error))
        write_error(
            f"healthd validate: the result was not saved in {state_dir}: {why}; the daemon cannot use it", REFUSED
        )


# --- the result as text, problems first

VERDICT_TITLES = {"failed": "Failed", "slow": "Slow", "not_measured": "Not measured"}
VERDICT_SUMMARIES = {
    "failed": "failed",
    "slow": "some results are slow",
    "ok": "all results are good",
    "not_measured": "nothing could be measured",
}
COLOURS = {"failed": "critical", "slow": "warning", "ok": "healthy", "not_measured": "unknown"}

Result = Mapping[str, Any]


def text(document: Mapping[str, Any], page: Page) -> str:
    """Return a `healthd validate --json` document as text."""
    return "\n".join(_lines(document, page)) + "\n"


def _lines(document: Mapping[str, Any], page: Page) -> Iterator[str]:
    by_verdict: dict[str, list[Result]] = {"failed": [], "slow": [], "ok": [], "not_measured": []}
    for result in document["results"]:
        by_verdict[result["verdict"]].append(result)
    verdict = document["verdict"]
    took = f"{document['ended'] - document['began']:.0f} s"
    summary = (
        "all measured results are good"
        if verdict == "ok" and by_verdict["not_measured"]
        else VERDICT_SUMMARIES[verdict]
    )
    head = f"{plain(document['node']) or 'this node'}: {page.paint(summary, COLOURS[verdict])}"
    counts = [f"{len(by_verdict[word])} {name}" for word, name in _COUNTED if by_verdict[word]]
    began = datetime.fromtimestamp(document["began"], timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    yield page.heading(f"{head}; {', '.join([*counts, took])}, {began}")
    if document["stopped_by"]:
        yield f"Stopped by {document['stopped_by']}. Results up to that time are valid; the rest is unknown."
    for word in ("failed", "slow"):
        if by_verdict[word]:
            yield ""
            yield page.paint(VERDICT_TITLES[word], COLOURS[word])
            for result in by_verdict[word]:
                yield from page.item(_sentence(result), "  ")
    measured = [result for result in by_verdict["ok"] if result["value"] is not None]
    if measured:
        yield ""
        yield from page.table(("good", "parts", "lowest", "median", "unit", "against", "tool"), list(_rows(measured)))
    for source, names in _passed_tests(by_verdict["ok"]).items():
        yield ""
        yield from page.wrap(f"Passed by {source}: {', '.join(names)}")
    if by_verdict["not_measured"]:
        yield ""
        yield VERDICT_TITLES["not_measured"]
        for message, names in _group_by_message(by_verdict["not_measured"]).items():
            yield from page.item(f"{', '.join(names)}: {message}", "  ")
    yield ""
    yield "Not covered"
    for sentence in filter(str.strip, document["unmeasured"]):
        yield from page.item(plain(sentence), "  ")


_COUNTED = (("failed", "failed"), ("slow", "slow"), ("ok", "good"), ("not_measured", "not measured"))


def _name(result: Result) -> str:
    return " ".join(plain(word) for word in (result["test"], result["part"]) if word)


def _sentence(result: Result) -> str:
    by = f" ({plain(result['source'])})" if result["source"] else ""
    return f"{_name(result)}: {plain(result['message'])}{by}"


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each test and tool. All parts with good results share a row."""
    from statistics import median

    from healthd.validation.measurement import number

    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result["test"], result["source"]), []).append(result)
    for (test, source), group in groups.items():
        values = [item["value"] for item in group]
        minimum, middle = number(min(values)), number(median(values))
        labels = {"floor": "floor", "peers": "peers", "own": "earlier results", "": "nothing"}
        against = ", ".join(dict.fromkeys(labels[item["against"]] for item in group))
        yield plain(test), str(len(group)), minimum, middle, plain(group[0]["unit"]), against, plain(source)


def _passed_tests(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return a dict that maps each tool to its pass-or-fail tests, each with the number of parts."""
    counts: dict[str, dict[str, int]] = {}
    for result in results:
        if result["value"] is None:
            tests_of_tool = counts.setdefault(plain(result["source"]), {})
            tests_of_tool[plain(result["test"])] = tests_of_tool.get(plain(result["test"]), 0) + 1
    return {
        tool: [f"{test} ({count})" if count > 1 else test for test, count in tests.items()]
        for tool, tests in counts.items()
    }


def _group_by_message(results: Sequence[Result]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for result in results:
        found.setdefault(plain(result["message"]), []).append(_name(result))
    return {
        message: names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
        for message, names in found.items()
    }


# --- the plan


def _plan(count_text: str, shape: str) -> dict[str, Any]:
    from healthd.validation.passes import SHAPES

    if not is_decimal(count_text) or len(count_text) > 9 or not 1 <= int(count_text) <= MAX_PARTS:
        raise Stop(f'healthd validate: --plan must be a number of parts, 1 to {MAX_PARTS}, got "{count_text}"')
    return {"parts": int(count_text), "shape": shape, "passes": SHAPES[shape](int(count_text))}


def _plan_text(document: dict[str, Any]) -> str:
    """Return one line per pass, such as "pass 1: 0>1 2>3"."""
    passes = document["passes"]
    lines = [f"pass {n}: " + " ".join(f"{a}>{b}" for a, b in pairs) for n, pairs in enumerate(passes, 1)]
    return "\n".join(lines or ["a single part has no partner"]) + "\n"


COMMANDS = {
    "validate": Command(
        _flags,
        _validate,
        "Measure the current performance of this node's GPUs, links and ports with the installed tools. Results are "
        "compared with floors, peers and earlier results. No job should run on the node meanwhile.\n"
        "Exit status: 0 all results are good, 1 something is slow, 2 something failed, 3 nothing could be measured "
        "(with --mndiag: a GPU or node was not measured) or a job is running, 64 usage error.",
        "  healthd validate --quick\n  healthd validate --show\n"
        "  healthd validate --only gemm,p2p --seconds 120 --json > validation.json\n"
        "  healthd validate --nodes n[1-4] --quick\n"
        "  healthd validate --mndiag n[1-4]\n"
        "  healthd validate --plan 7 --shape tree\n",
    )
}
