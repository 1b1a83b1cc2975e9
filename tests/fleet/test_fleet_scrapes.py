"""Tests of conditions from a Prometheus server: spans of scrapes, pieces of a long period, faulty servers."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fleet_reading import RecordedReading, store_rows
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.ingest import IngestError, IngestOptions, ingest
from healthd.fleet.sources import prometheus, prometheus_server
from healthd.fleet.sources.prometheus import ConditionSpan, ReadState, merge_points, node_name, query_ranges
from healthd.fleet.sources.prometheus_server import ResponseTooLarge, ServerError, parse_server, query_server

# openssl req -x509 -newkey rsa:2048 -nodes -days 36500 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1
CERTIFICATE = Path(__file__).parents[1] / "data" / "tls" / "certificate.pem"
LABELS = {"instance": "n1:9100", "check": "gpu_xid", "code": "gpu_xid/79", "subject": "61"}
SERIES = ("c1", "n1", "gpu_xid", "gpu_xid/79", "61")


def matrix(*scraped: tuple[int, int], severity: int = 3, enforced: bool = True, **labels: str) -> dict[str, Any]:
    """Return a series with one number per (time of the point, time of the scrape)."""
    values = [[at, str(scrape * 8 + 4 * enforced + severity)] for at, scrape in scraped]
    return {"metric": {**LABELS, **labels}, "values": values}


def row(
    first: int, last: int, severity: str = "critical", began: str = "", worst: int = 0, observed: bool = False
) -> tuple[Any, ...]:
    return (*SERIES, severity, first, last, 60, began or severity, worst or first, observed)


def span(first: int, last: int, last_point: int) -> ConditionSpan:
    return ConditionSpan(first, last, last_point, severity=3, first_severity=3, worst=first, observed=False)


def merge(*series: Any, open_spans: Any = None, last: int = 600, step: int = 60) -> tuple[list, dict, RecordedReading]:
    noted = RecordedReading()
    rows, after = merge_points(series, open_spans or {}, last, step, noted.reading)
    return rows, after, noted


def test_span_ends_at_missing_point():
    rows, after, _ = merge(matrix((60, 58), (120, 118), (300, 298)))
    assert rows == [row(58, 118), row(298, 298)]
    assert after == {}, "no span is open at the last point"


def test_span_open_at_last_point_continues_in_next_piece():
    _, after, _ = merge(matrix((540, 538), (600, 598)))
    assert after == {SERIES: span(538, 598, 600)}
    rows, after, _ = merge(matrix((660, 658), (720, 718)), open_spans=after, last=1200)
    assert (rows, after) == ([row(538, 718)], {})
    rows, _, _ = merge(matrix((720, 718)), open_spans={SERIES: span(538, 598, 600)}, last=1200)
    assert rows == [row(718, 718)], "it is missing at the point of 660"


def test_repeated_scrape_does_not_extend_span():
    rows, _, _ = merge(matrix((60, 58), (120, 58), (180, 58)))
    assert rows == [row(58, 58)]


def test_worse_condition_stays_one_span():
    points = [*matrix((60, 58), severity=1)["values"], *matrix((120, 118), (180, 178), severity=3)["values"]]
    rows, _, _ = merge({"metric": LABELS, "values": points})
    assert rows == [row(58, 178, "critical", "warning", 118)]
    rows, _, _ = merge(matrix((60, 58), severity=3), matrix((120, 118), severity=2))
    assert rows == [row(58, 118)], "the worst severity stays"


def test_span_is_observed_until_enforced():
    assert merge(matrix((60, 58), enforced=False))[0] == [row(58, 58, observed=True)]
    rows, _, _ = merge(matrix((60, 58), enforced=False), matrix((120, 118)))
    assert rows == [row(58, 118)]


def test_invalid_series_is_counted_and_others_are_kept():
    bad = [
        {"metric": {}, "values": []},
        {"values": []},
        7,
        matrix((60, 58), code=""),
        {**matrix(), "values": [[1, "NaN"]]},
    ]
    bad += [
        {**matrix(), "values": [["x", "1"]]},
        {**matrix(), "values": 7},
        {**matrix(), "metric": {**LABELS, "code": 7}},
    ]
    rows, _, noted = merge(*bad, matrix((60, 58)))
    assert rows == [row(58, 58)]
    assert noted.unread_lines == list(range(1, len(bad) + 1))


@pytest.mark.parametrize(
    ("instance", "node"),
    [("gpu-1:9100", "gpu-1"), ("gpu-1", "gpu-1"), ("GPU-1.example.org:9100", "GPU-1"), ("10.0.0.7:9100", "10.0.0.7")],
)
def test_node_name_of_instance(instance, node):
    assert node_name(instance) == node
    assert node_name("[fe80::1]:9100") == "fe80::1"


def test_node_and_cluster_labels_take_precedence():
    rows, _, _ = merge(matrix((60, 58), node="n7", cluster="c9"))
    assert rows[0][:2] == ("c9", "n7")


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(1, 3600), st.integers(1, 50))
def test_query_ranges_cover_every_point_once(begin, length, step, points):
    step = max(step, length // 2000 + 1)
    found = list(query_ranges(begin, begin + length, step, points))
    parameters = [at for first, last in found for at in range(first, last + 1, step)]
    assert parameters == list(range(begin, begin + length + 1, step))
    assert all((last - first) // step + 1 <= points for first, last in found)


PRESENT = st.lists(st.booleans(), min_size=1, max_size=60)


@given(PRESENT, st.integers(1, 20))
def test_pieces_of_query_change_no_span(present, points):
    """The result equals one query over the whole period: runs of present points."""

    def answer(path, parameters):
        first, last = int(parameters["start"]), int(parameters["end"])
        values = [(at, at) for at in range(first, last + 1, 60) if present[at // 60]]
        return {"resultType": "matrix", "result": [matrix(*values)] if values else []}

    noted = RecordedReading()
    found: dict[int, int] = {}
    state = None
    end = (len(present) - 1) * 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prometheus, "MAX_POINTS", points)
        for rows, at in prometheus.read(answer, None, 0, end, noted.reading):
            found.update({row_values[6]: row_values[7] for row_values in rows})
            state, _ = ReadState.from_text(at.to_text(""))
            assert state == at
    runs: dict[int, int] = {}
    for number, is_present in enumerate(present):
        if is_present:
            start = next((first for first, last in runs.items() if last == (number - 1) * 60), number * 60)
            runs[start] = number * 60
    assert found == runs
    assert state is not None
    assert state.until == end


@contextmanager
def serving(answer: Any, tls: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """Run a server that responds with (status, headers, body) of answer(request). Yield its address and requests."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self)
            status, headers, body = answer(self)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                return

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE, CERTIFICATE.with_name("key.pem"))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}", requests
        finally:
            server.shutdown()
            thread.join()


def matrix_response(*series: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}}).encode()


def test_query_has_prefix_tenant_and_token(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with serving(lambda request: matrix_response()) as (url, requests):
        at = parse_server(f"{url}/prometheus/", "rsc1", str(tmp_path / "token"))
        assert query_server(at, "query_range", {"query": "a{b}"}) == {"resultType": "matrix", "result": []}
    assert requests[0].path == "/prometheus/api/v1/query_range?query=a%7Bb%7D"
    assert (requests[0].headers["X-Scope-OrgID"], requests[0].headers["Authorization"]) == ("rsc1", "Bearer secret")
    assert "secret" not in repr(at)


def test_untrusted_certificate_is_rejected_unless_in_ca_file(tmp_path):
    (tmp_path / "token").write_text("secret")
    with serving(lambda request: matrix_response(), tls=True) as (url, requests):
        with pytest.raises(ServerError, match=r"cannot be reached: .*CERTIFICATE_VERIFY_FAILED"):
            query_server(parse_server(url, token_file=str(tmp_path / "token")), "query_range", {})
        assert requests == [], "no request, so no token, was sent"
        assert query_server(parse_server(url, ca_file=str(CERTIFICATE)), "query_range", {}) == {
            "resultType": "matrix",
            "result": [],
        }
        with pytest.raises(ServerError, match=r"the certificates in /gone\.pem cannot be read"):
            query_server(parse_server(url, ca_file="/gone.pem"), "query_range", {})


def test_basic_file_sets_authorization_header(tmp_path):
    (tmp_path / "basic").write_text("al:pass:word\n")
    with serving(lambda request: matrix_response()) as (url, requests):
        query_server(parse_server(url, basic_file=str(tmp_path / "basic")), "query_range", {})
    assert requests[0].headers["Authorization"] == "Basic YWw6cGFzczp3b3Jk"


def test_redirect_to_invalid_address_is_one_sentence():
    with (
        serving(lambda request: (302, {"Location": "http://[x"}, b"")) as (url, _),
        pytest.raises(ServerError, match="redirects to an invalid address"),
    ):
        query_server(parse_server(url), "query_range", {})


def test_token_is_not_sent_on_redirect(tmp_path):
    (tmp_path / "token").write_text("secret")
    with (
        serving(lambda request: matrix_response()) as (other_url, other_requests),
        serving(lambda request: (302, {"Location": f"{other_url}/x"}, b"")) as (url, _),
        pytest.raises(ServerError, match=f"redirects to {other_url}/x, which was not followed"),
    ):
        query_server(parse_server(url, token_file=str(tmp_path / "token")), "query_range", {})
    assert other_requests == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {}, b"<html>login</html>"), "does not respond with JSON"),
        ((200, {}, b'{"status":"success"}'), "does not respond like Prometheus"),
        ((200, {}, b'["success"]'), "does not respond like Prometheus"),
        ((401, {}, b"no"), "returned status 401"),
        ((400, {}, b'{"status":"error","error":"bad \\u001b[31mquery"}'), r"returned status 400: bad \?\[31mquery"),
        ((200, {"Content-Length": "100"}, b"{"), "does not respond with JSON"),
    ],
)
def test_invalid_response_is_one_sentence(answer, message):
    with serving(lambda request: answer) as (url, _), pytest.raises(ServerError, match=message) as error:
        query_server(parse_server(url), "query_range", {})
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (422, "query processing would load too many samples into memory in query execution", ResponseTooLarge),
        (503, "query timed out in expression evaluation", ResponseTooLarge),
        (503, "", ServerError),
        (504, "", ResponseTooLarge),
        (400, "", ServerError),
    ],
)
def test_error_kind_follows_status_and_message(status, message, kind):
    body = json.dumps({"status": "error", "error": message}).encode()
    with serving(lambda request: (status, {}, body)) as (url, _), pytest.raises(ServerError) as error:
        query_server(parse_server(url), "query_range", {})
    assert type(error.value) is kind


def test_unreachable_or_slow_server_is_one_sentence(monkeypatch):
    release = threading.Event()

    def slow(request):
        release.wait(20)
        return matrix_response()

    with serving(slow) as (url, _):
        monkeypatch.setattr(prometheus_server, "DEFAULT_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(ServerError, match=r"did not answer within 0\.2 s"):
            query_server(parse_server(url), "query_range", {})
        release.set()
    with pytest.raises(ServerError, match="cannot be reached: Connection refused"):
        query_server(parse_server(url), "query_range", {})


def test_too_large_response_is_dropped(monkeypatch):
    monkeypatch.setattr(prometheus_server, "MAX_RESPONSE_BYTES", 1 << 20)
    with (
        serving(lambda request: (200, {}, b" " * (2 << 20))) as (url, _),
        pytest.raises(ResponseTooLarge, match="more than 1 MiB"),
    ):
        query_server(parse_server(url), "query_range", {})


def test_read_shortens_range_until_response_fits():
    lengths: list[int] = []

    def respond(path, parameters):
        lengths.append((int(parameters["end"]) - int(parameters["start"])) // 60 + 1)
        if lengths[-1] > 1000:
            raise ResponseTooLarge("answers with status 422: too many samples")
        return {"resultType": "matrix", "result": []}

    noted = RecordedReading()
    states = [state for _, state in prometheus.read(respond, None, 0, 60 * 4999, noted.reading)]
    assert states[-1].until == 60 * 4999
    assert (lengths[0], max(lengths[3:])) == (5000, 625)

    def reject(path, parameters):
        raise ResponseTooLarge("answers with status 422")

    with pytest.raises(ResponseTooLarge):
        list(prometheus.read(reject, None, 0, 6000, noted.reading))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("url = 7", "url must be text"),
        ("step_seconds = 60", "url is missing"),
        ('url = "http://h"\ntoken = "x"', "unknown setting token"),
        ('url = "http://h"\nstep_seconds = 0', "step_seconds must be"),
        ('url = "ftp://h"', "is not a server address"),
        ('url = "http://me:secret@h"', "a password in the address is visible"),
        ('url = "http://h"\ntoken_file = "/gone"', "/gone cannot be read: No such file"),
        ("url", "prometheus.toml: "),
    ],
)
def test_invalid_settings_are_named_with_file(tmp_path, text, message):
    path = tmp_path / "prometheus.toml"
    path.write_text(text)
    with pytest.raises(IngestError) as error:
        prometheus.load_settings(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_token_with_line_break_is_rejected(tmp_path):
    (tmp_path / "token").write_text("a\nX-Other: b")
    with pytest.raises(ServerError, match="characters that are invalid in an HTTP header"):
        parse_server("http://h", token_file=str(tmp_path / "token"))


@pytest.mark.one_python
def test_ingest_extends_open_condition_in_one_row(tmp_path):
    clock = [6000]

    def answer(request):
        parameters = parse_qs(urlsplit(request.path).query)
        first, last, step = (int(parameters[name][0]) for name in ("start", "end", "step"))
        assert last <= clock[0] - 60
        return matrix_response(matrix(*((at, at - 5) for at in range(first, last + 1, step) if at >= 3000)))

    with serving(answer) as (url, requests):
        for time in (6000, 9000, 9000, 9030):
            clock[0] = time
            result = ingest(
                str(tmp_path / "db"), [(prometheus.SOURCE, [url])], IngestOptions(time, "c1", from_time=600)
            )
            assert (result.failed, result.unread.unread) == ([], {})
        assert len(requests) == 2
    rows = [
        (entry["node"], entry["first_time"], entry["last_time"], entry["step_seconds"])
        for entry in store_rows(tmp_path / "db", "scraped_conditions")
    ]
    assert rows == [("n1", 2995, 8935, 60)]
    periods = [(entry["from_time"], entry["to_time"]) for entry in store_rows(tmp_path / "db", "ingests")]
    assert sorted(periods) == [(600, 5940), (6000, 8940)]


def permanent_condition(start: int) -> Any:
    """Return the response of a server with one condition since `start`, scraped 5 s before each point."""

    def answer(request):
        parameters = parse_qs(urlsplit(request.path).query)
        first, last, step = (int(parameters[name][0]) for name in ("start", "end", "step"))
        return matrix_response(matrix(*((at, at - 5) for at in range(first, last + 1, step) if at > start)))

    return answer


def queried_times(requests: list[Any]) -> list[tuple[int, int]]:
    """Return (start, end) of each query since the last call."""
    found = [parse_qs(urlsplit(request.path).query) for request in requests]
    requests.clear()
    return [(int(entry["start"][0]), int(entry["end"][0])) for entry in found]


@pytest.mark.one_python
def test_ingest_reads_each_tenant_separately(tmp_path):
    with serving(permanent_condition(0)) as (url, requests):
        for tenant in ("", "a", "b"):
            (tmp_path / f"{tenant}.toml").write_text(f'url = "{url}"\ntenant = "{tenant}"\n'.replace('tenant = ""', ""))
            run = [(prometheus.SOURCE, [str(tmp_path / f"{tenant}.toml")])]
            assert ingest(str(tmp_path / "db"), run, IngestOptions(6000, "c1", from_time=600)).failed == []
            assert queried_times(requests) == [(600, 5940)], tenant
            assert ingest(str(tmp_path / "db"), run, IngestOptions(6600, "c1")).failed == []
            assert queried_times(requests) == [(6000, 6540)], tenant


@pytest.mark.one_python
def test_earlier_from_reads_time_before(tmp_path):
    db = tmp_path / "db"
    with serving(permanent_condition(0)) as (url, requests):

        def run(time, **values):
            assert ingest(str(db), [(prometheus.SOURCE, [url])], IngestOptions(time, "c1", **values)).failed == []
            return queried_times(requests)

        assert run(6000, from_time=3000) == [(3000, 5940)]
        assert run(6600) == [(6000, 6540)]
        assert run(6600, from_time=3000) == []
        assert run(6660, from_time=600) == [(600, 2940), (6600, 6600)]
        assert run(6660, from_time=600) == []
    spans = [(entry["first_time"], entry["last_time"]) for entry in store_rows(db, "scraped_conditions")]
    assert spans == [(595, 2935), (2995, 6595)], "a condition is two rows where two reads meet"


@pytest.mark.one_python
def test_earlier_range_does_not_shorten_condition_at_border(tmp_path):
    """A scrape is repeated for five minutes, so both reads have the first scrape of a condition at their border."""

    def answer(request):
        parameters = parse_qs(urlsplit(request.path).query)
        first, last, step = (int(parameters[name][0]) for name in ("start", "end", "step"))
        points = range(max(first, 2940), last + 1, step)
        return matrix_response(matrix(*((at, at - 5 if at > 3000 else 2930) for at in points)))

    with serving(answer) as (url, _):
        for begin in (3000, 600):
            run = [(prometheus.SOURCE, [url])]
            assert ingest(str(tmp_path / "db"), run, IngestOptions(6000, "c1", from_time=begin)).failed == []
    spans = [(entry["first_time"], entry["last_time"]) for entry in store_rows(tmp_path / "db", "scraped_conditions")]
    assert spans == [(2930, 5935)]


@pytest.mark.one_python
def test_read_with_clock_ahead_is_repeated(tmp_path, capsys):
    with serving(permanent_condition(0)) as (url, requests):
        run = [(prometheus.SOURCE, [url])]
        ingest(str(tmp_path / "db"), run, IngestOptions(60000, "c1", from_time=600))
        queried_times(requests)
        assert ingest(str(tmp_path / "db"), run, IngestOptions(6000, "c1")).failed == []
        assert queried_times(requests) == [(601, 5881)]
    assert "a clock was ahead" in capsys.readouterr().err


@pytest.mark.one_python
def test_ingest_without_from_is_one_sentence(tmp_path):
    servers = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    result = ingest(str(tmp_path / "db"), [(prometheus.SOURCE, servers)], IngestOptions(6000, "c1"))
    assert len(result.failed) == len(servers)
    for server, message in zip(servers, result.failed, strict=True):
        assert re.fullmatch(f"prometheus: {server}: .* --from", message)
