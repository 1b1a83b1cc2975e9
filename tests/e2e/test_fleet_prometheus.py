"""Tests with the real Prometheus and VictoriaMetrics: nine days of a node's conditions, and a real healthd that they
scrape."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_reading import store_rows
from healthd_daemon import Healthd, xid_line
from ports import free_ports
from requirements import require_programs
from waiting import until

from healthd.fleet.ingest import IngestOptions, ingest
from healthd.fleet.sources import events, prometheus

DAYS = 9
MINUTE = 60
HISTORY_START = int(time.time()) // MINUTE * MINUTE - DAYS * 86400  # of the history
LONG = (HISTORY_START + 3600, HISTORY_START + 8 * 86400 + 3600)  # 11,521 scrapes, so two queries
SHORT = ((HISTORY_START + 7200, HISTORY_START + 7200 + 29 * MINUTE), (HISTORY_START + 90000, HISTORY_START + 90000))


def backfill() -> str:
    """Return OpenMetrics text: a condition that was open for eight days, and one that was open twice."""
    lines = []
    for name, value in (("severity", 1), ("enforced", 1)):
        lines.append(f"# TYPE healthd_condition_{name} gauge")
        for code, first, last in (("long/one", *LONG), *(("short/two", *times) for times in SHORT)):
            labels = f'cluster="c1",node="n1",check="x",code="{code}",subject="s"'
            series = f"healthd_condition_{name}{{{labels}}} {value}"
            lines.extend(f"{series} {timestamp}" for timestamp in range(first, last + 1, MINUTE))
    return "\n".join((*lines, "# EOF", ""))


def write_scrape_config(directory: Path, target: str) -> Path:
    labels = {"targets": [target], "labels": {"node": "gpu-1", "cluster": "c1"}}
    # A condition that is missing in the last scrape has ended. A scrape of a busy machine's daemon may take 5 s.
    job = {"job_name": "healthd", "scrape_interval": "5s", "static_configs": [labels]}
    path = directory / "scrape.yml"
    path.write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML
    return path


@contextlib.contextmanager
def run_program(*argv: str, log: Path) -> Iterator[None]:
    with open(log, "ab") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def responds(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        return bool(response.status == 200)
    return False


@contextlib.contextmanager
def run_prometheus(directory: Path, target: str, ports: contextlib.ExitStack) -> Iterator[str]:
    (directory / "history.txt").write_text(backfill())
    data = directory / "data"
    promtool = ("promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", directory / "history.txt", data)
    subprocess.run(promtool, check=True, capture_output=True, timeout=300)
    port = free_ports(1, ports)
    argv = ("prometheus", f"--config.file={write_scrape_config(directory, target)}", f"--storage.tsdb.path={data}")
    more_arguments = (
        f"--web.listen-address=127.0.0.1:{port}",
        "--storage.tsdb.retention.time=1y",
        "--web.route-prefix=/prom",
    )
    with run_program(*argv, *more_arguments, log=directory / "prometheus.log"):
        url = f"http://127.0.0.1:{port}/prom"
        until(lambda: responds(f"{url}/-/ready"), "Prometheus is ready", 120)
        yield url


@contextlib.contextmanager
def run_victoria_metrics(directory: Path, target: str, ports: contextlib.ExitStack) -> Iterator[str]:
    port = free_ports(1, ports)
    argv = ("victoria-metrics", f"-storageDataPath={directory}/data", f"-httpListenAddr=127.0.0.1:{port}")
    more_arguments = (
        f"-promscrape.config={write_scrape_config(directory, target)}",
        "-retentionPeriod=1y",
        "-memory.allowedBytes=200MB",
    )
    more_arguments += ("-search.latencyOffset=1s",)  # the default is 30 s
    with run_program(*argv, *more_arguments, log=directory / "victoria.log"):
        url = f"http://127.0.0.1:{port}"
        until(lambda: responds(f"{url}/health"), "VictoriaMetrics is ready", 120)
        # the same in its format: milliseconds, no comments
        lines = [line for line in backfill().splitlines() if not line.startswith("#")]
        body = "".join(f"{line}000\n" for line in lines).encode()
        request = urllib.request.Request(f"{url}/api/v1/import/prometheus", body, {"Content-Type": "text/plain"})
        urllib.request.urlopen(request, timeout=120).close()
        yield url


SERVERS = {
    "prometheus": (run_prometheus, "prometheus"),
    "victoria-metrics": (run_victoria_metrics, "victoria-metrics"),
}


def spans(store: Path, code: str) -> list[tuple[int, int]]:
    rows = store_rows(store, "scraped_conditions")
    assert all(row["step_seconds"] == MINUTE for row in rows)
    return [(row["first_time"], row["last_time"]) for row in rows if row["code"] == code]


@pytest.mark.parametrize("name", SERVERS)
def test_ingest_returns_first_and_last_scrape_of_each_condition(name: str, tmp_path: Path) -> None:
    start, package = SERVERS[name]
    require_programs(name, "promtool", packages=f"{package} prometheus")
    with contextlib.ExitStack() as ports:
        listen = f"127.0.0.1:{free_ports(1, ports)}"
        with (
            Healthd("--listen", listen, "--mode", "observe", config="interval_seconds = 1.0") as daemon,
            start(tmp_path, listen, ports) as url,
        ):
            test_start = time.time()
            daemon.kernel_line(xid_line(79))
            daemon.wait_until(
                lambda s: any(entry["code"] == "gpu_xid/79" for entry in s["conditions"]), "the Xid is a condition"
            )
            store, code = tmp_path / "db", "gpu_xid/79"

            def run_ingest(now: float) -> Any:
                ingested = ingest(
                    str(store), [(prometheus.SOURCE, [url])], IngestOptions(int(now), from_time=HISTORY_START)
                )
                assert (ingested.failed, ingested.unread.unread) == ([], {})
                return ingested

            def scraped() -> bool:
                query = f"{url}/api/v1/query?query=healthd_condition_severity%7Bcode%3D%22{code}%22%7D"
                with urllib.request.urlopen(query, timeout=120) as response:
                    return bool(json.loads(response.read())["data"]["result"])

            until(scraped, "the server has scraped the condition")
            last_scrape = time.time()
            # The ingest only takes settled data, so its clock is ahead of that of this machine.
            run_ingest(last_scrape + 4 * MINUTE)
            assert spans(store, "long/one") == [LONG]
            assert spans(store, "short/two") == list(SHORT)
            ((first, last),) = spans(store, code)
            assert test_start - 5 <= first <= last <= time.time()
            (xid_row,) = [row for row in store_rows(store, "scraped_conditions") if row["code"] == code]
            assert (xid_row["severity"], xid_row["first_severity"], xid_row["observed"]) == (
                "critical",
                "critical",
                False,
            )
            assert {row["observed"] for row in store_rows(store, "scraped_conditions")} == {False}
            ingest_rows = [row for row in store_rows(store, "ingests") if row["source"] == "prometheus"]
            assert len(ingest_rows) == 2, "more than 11,000 points are two queries"
            assert {row["node"] for row in store_rows(store, "scraped_conditions")} == {"n1", "gpu-1"}
            assert run_ingest(last_scrape + 4 * MINUTE).unread.rows["prometheus"] == 0
            # The stream of the same daemon has what scrapes lack: the kind, and the time of the first sighting.
            state = daemon.directory / "state"
            lines = state / "events.jsonl"
            until(lambda: lines.exists() and b'"gpu_xid/79"' in lines.read_bytes(), "the stream contains it")
            ingested = ingest(str(store), [(events.SOURCE, [str(state)])], IngestOptions(int(time.time()), "c1"))
            assert (ingested.failed, ingested.unread.unread) == ([], {})
            (opened,) = [row for row in store_rows(store, "events") if (row["event"], row["code"]) == ("opened", code)]
            assert (opened["cluster"], opened["kind"], opened["severity"]) == ("c1", "edge", "critical")
            assert opened["first_time"] <= first
