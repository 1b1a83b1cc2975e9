"""Tests of conditions from a Prometheus server: spans of scrapes, pieces of a long period, faulty servers."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fleet_reading import Noted, live
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


def span(first: int, last: int, looked: int) -> ConditionSpan:
    return ConditionSpan(first, last, looked, severity=3, first_severity=3, worst=first, observed=False)


def told(*series: Any, standing: Any = None, last: int = 600, step: int = 60) -> tuple[list, dict, Noted]:
    noted = Noted()
    rows, after = merge_points(series, standing or {}, last, step, noted.reading)
    return rows, after, noted


def test_a_span_goes_from_the_first_scrape_to_the_last_and_ends_where_a_point_is_missing():
    rows, after, _ = told(matrix((60, 58), (120, 118), (300, 298)))
    assert rows == [row(58, 118), row(298, 298)]
    assert after == {}, "no span is open at the last point"


def test_what_stands_at_the_last_point_goes_on_in_the_next_piece():
    _, after, _ = told(matrix((540, 538), (600, 598)))
    assert after == {SERIES: span(538, 598, 600)}
    rows, after, _ = told(matrix((660, 658), (720, 718)), standing=after, last=1200)
    assert (rows, after) == ([row(538, 718)], {})
    rows, _, _ = told(matrix((720, 718)), standing={SERIES: span(538, 598, 600)}, last=1200)
    assert rows == [row(718, 718)], "it is missing at the point of 660"


def test_a_point_that_repeats_a_scrape_makes_a_span_no_longer():
    rows, _, _ = told(matrix((60, 58), (120, 58), (180, 58)))
    assert rows == [row(58, 58)]


def test_a_condition_that_becomes_worse_does_not_end_and_begin():
    points = [*matrix((60, 58), severity=1)["values"], *matrix((120, 118), (180, 178), severity=3)["values"]]
    rows, _, _ = told({"metric": LABELS, "values": points})
    assert rows == [row(58, 178, "critical", "warning", 118)]
    rows, _, _ = told(matrix((60, 58), severity=3), matrix((120, 118), severity=2))
    assert rows == [row(58, 118)], "the worst severity stays"


def test_what_rests_only_on_a_log_that_users_can_forge_says_so_until_it_counts():
    assert told(matrix((60, 58), enforced=False))[0] == [row(58, 58, observed=True)]
    rows, _, _ = told(matrix((60, 58), enforced=False), matrix((120, 118)))
    assert rows == [row(58, 118)]


def test_a_series_that_is_none_is_counted_and_takes_no_other_with_it():
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
    rows, _, noted = told(*bad, matrix((60, 58)))
    assert rows == [row(58, 58)]
    assert noted.lines == list(range(1, len(bad) + 1))


@pytest.mark.parametrize(
    ("instance", "node"),
    [("gpu-1:9100", "gpu-1"), ("gpu-1", "gpu-1"), ("GPU-1.example.org:9100", "GPU-1"), ("10.0.0.7:9100", "10.0.0.7")],
)
def test_the_node_of_an_instance(instance, node):
    assert node_name(instance) == node
    assert node_name("[fe80::1]:9100") == "fe80::1"


def test_a_label_of_the_node_and_one_of_the_cluster_go_before():
    rows, _, _ = told(matrix((60, 58), node="n7", cluster="c9"))
    assert rows[0][:2] == ("c9", "n7")


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(1, 3600), st.integers(1, 50))
def test_pieces_have_every_point_once_and_few_enough(begin, length, step, points):
    step = max(step, length // 2000 + 1)
    found = list(query_ranges(begin, begin + length, step, points))
    asked = [at for first, last in found for at in range(first, last + 1, step)]
    assert asked == list(range(begin, begin + length + 1, step))
    assert all((last - first) // step + 1 <= points for first, last in found)


PRESENT = st.lists(st.booleans(), min_size=1, max_size=60)


@given(PRESENT, st.integers(1, 20))
def test_the_pieces_of_a_query_change_no_span(present, points):
    """The result equals one query over the whole period: runs of present points."""

    def answer(path, parameters):
        first, last = int(parameters["start"]), int(parameters["end"])
        values = [(at, at) for at in range(first, last + 1, 60) if present[at // 60]]
        return {"resultType": "matrix", "result": [matrix(*values)] if values else []}

    noted = Noted()
    found: dict[int, int] = {}
    state = None
    end = (len(present) - 1) * 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prometheus, "MAX_POINTS", points)
        for rows, at in prometheus.read(answer, None, 0, end, noted.reading):
            found.update({one[6]: one[7] for one in rows})
            state, _ = ReadState.from_text(at.to_text(""))
            assert state == at
    runs: dict[int, int] = {}
    for number, there in enumerate(present):
        if there:
            begun = next((first for first, last in runs.items() if last == (number - 1) * 60), number * 60)
            runs[begun] = number * 60
    assert found == runs
    assert state is not None
    assert state.until == end


@contextmanager
def serving(answer: Any, tls: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """Run a server that responds with (status, headers, body) of answer(request). Yield its address and requests."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self)
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

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as at:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE, CERTIFICATE.with_name("key.pem"))
            at.socket = context.wrap_socket(at.socket, server_side=True)
        thread = threading.Thread(target=at.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{at.server_address[1]}", seen
        finally:
            at.shutdown()
            thread.join()


def good(*series: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}}).encode()


def test_a_query_has_its_prefix_its_tenant_and_its_token(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with serving(lambda request: good()) as (url, seen):
        at = parse_server(f"{url}/prometheus/", "rsc1", str(tmp_path / "token"))
        assert query_server(at, "query_range", {"query": "a{b}"}) == {"resultType": "matrix", "result": []}
    assert seen[0].path == "/prometheus/api/v1/query_range?query=a%7Bb%7D"
    assert (seen[0].headers["X-Scope-OrgID"], seen[0].headers["Authorization"]) == ("rsc1", "Bearer secret")
    assert "secret" not in repr(at)


def test_a_certificate_that_nobody_vouches_for_is_refused_and_one_of_the_ca_file_is_not(tmp_path):
    (tmp_path / "token").write_text("secret")
    with serving(lambda request: good(), tls=True) as (url, seen):
        with pytest.raises(ServerError, match=r"cannot be reached: .*CERTIFICATE_VERIFY_FAILED"):
            query_server(parse_server(url, token_file=str(tmp_path / "token")), "query_range", {})
        assert seen == [], "no request, so no token, was sent"
        assert query_server(parse_server(url, ca_file=str(CERTIFICATE)), "query_range", {}) == {
            "resultType": "matrix",
            "result": [],
        }
        with pytest.raises(ServerError, match=r"the certificates in /gone\.pem cannot be read"):
            query_server(parse_server(url, ca_file="/gone.pem"), "query_range", {})


def test_basic_authorization_is_a_user_and_a_password(tmp_path):
    (tmp_path / "basic").write_text("al:pass:word\n")
    with serving(lambda request: good()) as (url, seen):
        query_server(parse_server(url, basic_file=str(tmp_path / "basic")), "query_range", {})
    assert seen[0].headers["Authorization"] == "Basic YWw6cGFzczp3b3Jk"


def test_who_sends_us_to_what_is_no_address_is_one_sentence():
    with (
        serving(lambda request: (302, {"Location": "http://[x"}, b"")) as (url, _),
        pytest.raises(ServerError, match="cannot be queried: it redirects to an invalid address"),
    ):
        query_server(parse_server(url), "query_range", {})


def test_a_token_does_not_go_where_a_server_sends_us(tmp_path):
    (tmp_path / "token").write_text("secret")
    with (
        serving(lambda request: good()) as (other, others),
        serving(lambda request: (302, {"Location": f"{other}/x"}, b"")) as (url, _),
        pytest.raises(ServerError, match=f"redirects to {other}/x, which was not followed"),
    ):
        query_server(parse_server(url, token_file=str(tmp_path / "token")), "query_range", {})
    assert others == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, {}, b"<html>login</html>"), "does not answer with JSON"),
        ((200, {}, b'{"status":"success"}'), "answers unlike Prometheus"),
        ((200, {}, b'["success"]'), "answers unlike Prometheus"),
        ((401, {}, b"no"), "answers with status 401"),
        ((400, {}, b'{"status":"error","error":"bad \\u001b[31mquery"}'), r"answers with status 400: bad \?\[31mquery"),
        ((200, {"Content-Length": "100"}, b"{"), "does not answer with JSON"),
    ],
)
def test_nonsense_is_one_sentence(answer, words):
    with serving(lambda request: answer) as (url, _), pytest.raises(ServerError, match=words) as error:
        query_server(parse_server(url), "query_range", {})
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (422, "query processing would load too many samples into memory in query execution", ResponseTooLarge),
        (503, "query timed out in expression evaluation", ResponseTooLarge),
        (503, "", ServerError),
        (504, "", ResponseTooLarge),
        (400, "", ServerError),
    ],
)
def test_what_a_shorter_time_may_help_with(status, said, kind):
    body = json.dumps({"status": "error", "error": said}).encode()
    with serving(lambda request: (status, {}, body)) as (url, _), pytest.raises(ServerError) as error:
        query_server(parse_server(url), "query_range", {})
    assert type(error.value) is kind


def test_a_server_that_is_away_or_slow_is_one_sentence(monkeypatch):
    release = threading.Event()

    def slow(request):
        release.wait(20)
        return good()

    with serving(slow) as (url, _):
        monkeypatch.setattr(prometheus_server, "DEFAULT_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(ServerError, match=r"did not answer within 0\.2 s"):
            query_server(parse_server(url), "query_range", {})
        release.set()
    with pytest.raises(ServerError, match="cannot be reached: Connection refused"):
        query_server(parse_server(url), "query_range", {})


def test_too_long_an_answer_is_not_kept(monkeypatch):
    monkeypatch.setattr(prometheus_server, "MAX_RESPONSE_BYTES", 1 << 20)
    with (
        serving(lambda request: (200, {}, b" " * (2 << 20))) as (url, _),
        pytest.raises(ResponseTooLarge, match="more than 1 MiB"),
    ):
        query_server(parse_server(url), "query_range", {})


def test_a_server_that_says_too_much_is_asked_for_less_until_one_point_is_too_much():
    lengths: list[int] = []

    def few(path, parameters):
        lengths.append((int(parameters["end"]) - int(parameters["start"])) // 60 + 1)
        if lengths[-1] > 1000:
            raise ResponseTooLarge("answers with status 422: too many samples")
        return {"resultType": "matrix", "result": []}

    noted = Noted()
    states = [state for _, state in prometheus.read(few, None, 0, 60 * 4999, noted.reading)]
    assert states[-1].until == 60 * 4999
    assert (lengths[0], max(lengths[3:])) == (5000, 625)

    def none(path, parameters):
        raise ResponseTooLarge("answers with status 422")

    with pytest.raises(ResponseTooLarge):
        list(prometheus.read(none, None, 0, 6000, noted.reading))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("url = 7", "url must be text"),
        ("step_seconds = 60", "url is missing"),
        ('url = "http://h"\ntoken = "x"', "unknown setting token"),
        ('url = "http://h"\nstep_seconds = 0', "step_seconds must be"),
        ('url = "ftp://h"', "is not the address of a server"),
        ('url = "http://me:secret@h"', "a password in the address is visible"),
        ('url = "http://h"\ntoken_file = "/gone"', "/gone cannot be read: No such file"),
        ("url", "prometheus.toml: "),
    ],
)
def test_settings_that_cannot_be_are_named_with_their_file(tmp_path, text, words):
    path = tmp_path / "prometheus.toml"
    path.write_text(text)
    with pytest.raises(IngestError) as error:
        prometheus.load_settings(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert words in str(error.value)


def test_a_token_with_a_line_end_in_it_is_no_header(tmp_path):
    (tmp_path / "token").write_text("a\nX-Other: b")
    with pytest.raises(ServerError, match="characters that are invalid in an HTTP header"):
        parse_server("http://h", token_file=str(tmp_path / "token"))


@pytest.mark.one_python
def test_what_still_stands_is_one_row_that_each_ingest_makes_longer(tmp_path):
    clock = [6000]

    def answer(request):
        asked = parse_qs(urlsplit(request.path).query)
        first, last, step = (int(asked[name][0]) for name in ("start", "end", "step"))
        assert last <= clock[0] - 60
        return good(matrix(*((at, at - 5) for at in range(first, last + 1, step) if at >= 3000)))

    with serving(answer) as (url, seen):
        for now in (6000, 9000, 9000, 9030):
            clock[0] = now
            came = ingest(str(tmp_path / "db"), [(prometheus.SOURCE, [url])], IngestOptions(now, "c1", from_time=600))
            assert (came.failed, came.unread.unread) == ([], {})
        assert len(seen) == 2
    rows = [
        (one["node"], one["first_time"], one["last_time"], one["step_seconds"])
        for one in live(tmp_path / "db", "scraped_conditions")
    ]
    assert rows == [("n1", 2995, 8935, 60)]
    about = [(one["from_time"], one["to_time"]) for one in live(tmp_path / "db", "ingests")]
    assert sorted(about) == [(600, 5940), (6000, 8940)]


def always(start: int) -> Any:
    """Return the response of a server with one condition since `start`, scraped 5 s before each point."""

    def answer(request):
        asked = parse_qs(urlsplit(request.path).query)
        first, last, step = (int(asked[name][0]) for name in ("start", "end", "step"))
        return good(matrix(*((at, at - 5) for at in range(first, last + 1, step) if at > start)))

    return answer


def asked_times(seen: list[Any]) -> list[tuple[int, int]]:
    """Return (start, end) of each query since the last call."""
    found = [parse_qs(urlsplit(request.path).query) for request in seen]
    seen.clear()
    return [(int(one["start"][0]), int(one["end"][0])) for one in found]


@pytest.mark.one_python
def test_what_was_read_of_one_tenant_was_not_read_of_another(tmp_path):
    with serving(always(0)) as (url, seen):
        for tenant in ("", "a", "b"):
            (tmp_path / f"{tenant}.toml").write_text(f'url = "{url}"\ntenant = "{tenant}"\n'.replace('tenant = ""', ""))
            run = [(prometheus.SOURCE, [str(tmp_path / f"{tenant}.toml")])]
            assert ingest(str(tmp_path / "db"), run, IngestOptions(6000, "c1", from_time=600)).failed == []
            assert asked_times(seen) == [(600, 5940)], tenant
            assert ingest(str(tmp_path / "db"), run, IngestOptions(6600, "c1")).failed == []
            assert asked_times(seen) == [(6000, 6540)], tenant


@pytest.mark.one_python
def test_an_earlier_from_adds_what_was_before(tmp_path):
    db = tmp_path / "db"
    with serving(always(0)) as (url, seen):

        def run(now, **values):
            assert ingest(str(db), [(prometheus.SOURCE, [url])], IngestOptions(now, "c1", **values)).failed == []
            return asked_times(seen)

        assert run(6000, from_time=3000) == [(3000, 5940)]
        assert run(6600) == [(6000, 6540)]
        assert run(6600, from_time=3000) == []
        assert run(6660, from_time=600) == [(600, 2940), (6600, 6600)]
        assert run(6660, from_time=600) == []
    spans = [(one["first_time"], one["last_time"]) for one in live(db, "scraped_conditions")]
    assert spans == [(595, 2935), (2995, 6595)], "a condition is two rows where two reads meet"


@pytest.mark.one_python
def test_a_stretch_before_does_not_make_what_begins_there_shorter(tmp_path):
    """A scrape is repeated for five minutes, so both reads have the first scrape of a condition at their border."""

    def answer(request):
        asked = parse_qs(urlsplit(request.path).query)
        first, last, step = (int(asked[name][0]) for name in ("start", "end", "step"))
        points = range(max(first, 2940), last + 1, step)
        return good(matrix(*((at, at - 5 if at > 3000 else 2930) for at in points)))

    with serving(answer) as (url, _):
        for begin in (3000, 600):
            run = [(prometheus.SOURCE, [url])]
            assert ingest(str(tmp_path / "db"), run, IngestOptions(6000, "c1", from_time=begin)).failed == []
    spans = [(one["first_time"], one["last_time"]) for one in live(tmp_path / "db", "scraped_conditions")]
    assert spans == [(2930, 5935)]


@pytest.mark.one_python
def test_a_server_that_was_asked_with_a_clock_ahead_is_asked_again(tmp_path, capsys):
    with serving(always(0)) as (url, seen):
        run = [(prometheus.SOURCE, [url])]
        ingest(str(tmp_path / "db"), run, IngestOptions(60000, "c1", from_time=600))
        asked_times(seen)
        assert ingest(str(tmp_path / "db"), run, IngestOptions(6000, "c1")).failed == []
        assert asked_times(seen) == [(601, 5881)]
    assert "a clock was ahead" in capsys.readouterr().err


@pytest.mark.one_python
def test_without_a_beginning_one_sentence_asks_for_it(tmp_path):
    servers = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    came = ingest(str(tmp_path / "db"), [(prometheus.SOURCE, servers)], IngestOptions(6000, "c1"))
    assert came.failed == [f"prometheus: {one}: the start of the period is missing: add --from" for one in servers]
