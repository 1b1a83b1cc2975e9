"""TLS of the metrics page on several addresses, with real clients: curl, openssl and Prometheus."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd
from ports import free_ports
from requirements import require_programs
from waiting import until


def openssl(*arguments: str | Path) -> None:
    completed = subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
    )
    assert completed.returncode == 0, completed.stderr


class Authority:
    """A certificate authority in a folder. It signs certificates for 127.0.0.1."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.certificate, self.key = folder, folder / f"{name}.crt", folder / f"{name}.key"
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30",
                "-subj", f"/CN={name}", "-keyout", self.key, "-out", self.certificate)  # fmt: skip

    def sign(self, name: str, days: int = 30) -> tuple[Path, Path]:
        """Return (certificate, key), each replaced as a whole, as an ACME client does."""
        certificate, key, request = (self.folder / f"{name}.{suffix}" for suffix in ("crt", "key", "csr"))
        openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:127.0.0.1,DNS:{name}",
                "-keyout", f"{key}.new", "-out", request)  # fmt: skip
        openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.key, "-CAcreateserial",
                "-days", str(days), "-copy_extensions", "copy", "-out", f"{certificate}.new")  # fmt: skip
        os.replace(f"{key}.new", key)
        os.replace(f"{certificate}.new", certificate)
        return certificate, key


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    require_programs("openssl", "curl", "prometheus", "promtool", packages="openssl curl prometheus")
    return Authority(tmp_path, "ca")


def write_web_config(folder: Path, text: str) -> Path:
    path = folder / "web.yml"
    path.write_text(text)
    path.chmod(0o640)
    completed = subprocess.run(["promtool", "check", "web-config", path], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return path


def run_curl(*arguments: str | Path) -> tuple[int, str]:
    """Return (exit status, output)."""
    argv = ["curl", "--silent", "--max-time", "30", *map(str, arguments)]
    completed = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    return completed.returncode, completed.stdout


STATUS_ONLY = ("--output", "/dev/null", "--write-out", "%{http_code}")


@contextlib.contextmanager
def serve(path: Path, listen: list[str]) -> Iterator[Healthd]:
    config = f'interval_seconds = 1.0\n[metrics]\nlisten = {json.dumps(listen)}\nweb_config = "{path}"\n'
    with Healthd(config=config) as daemon:
        yield daemon


def problems(daemon: Healthd) -> str:
    return "\n".join(daemon.status()["problems"])


def test_prometheus_scrapes_over_tls(authority: Authority, tmp_path: Path) -> None:
    authority.sign("node")
    path = write_web_config(
        tmp_path,
        "tls_server_config: {cert_file: node.crt, key_file: node.key}\n"
        "http_server_config: {headers: {X-Content-Type-Options: nosniff}}\n",
    )
    with contextlib.ExitStack() as ports:
        ipv4_port, ipv6_port, prometheus_port = (free_ports(1, ports) for _ in range(3))
        with serve(path, [f"127.0.0.1:{ipv4_port}", f"[::1]:{ipv6_port}"]):
            ca_options, url = ("--cacert", authority.certificate), f"https://127.0.0.1:{ipv4_port}"
            assert run_curl(*ca_options, *STATUS_ONLY, f"{url}/metrics") == (0, "200")
            assert run_curl(*STATUS_ONLY, url)[0] == 60, "curl does not trust the authority"
            assert run_curl(*STATUS_ONLY, f"http://127.0.0.1:{ipv4_port}/metrics")[0] != 0, "no page without TLS"
            assert run_curl("-k", *STATUS_ONLY, f"https://[::1]:{ipv6_port}/-/healthy") == (0, "200")
            assert run_curl(*ca_options, "--tls-max", "1.1", *STATUS_ONLY, f"{url}/")[0] == 35, "TLS 1.2 or newer"
            _, headers = run_curl(*ca_options, "--head", f"{url}/metrics")
            assert "X-Content-Type-Options: nosniff" in headers
            target = {"targets": [f"127.0.0.1:{ipv4_port}"]}
            job = {
                "job_name": "healthd",
                "scrape_interval": "1s",
                "scheme": "https",
                "tls_config": {"ca_file": str(authority.certificate)},
                "static_configs": [target],
            }
            (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML
            argv = ("prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data")
            with open(tmp_path / "log", "wb") as log:
                process = subprocess.Popen(
                    [*argv, f"--web.listen-address=127.0.0.1:{prometheus_port}"], stdout=log, stderr=log
                )
            try:
                until(
                    lambda: query_prometheus(prometheus_port, "healthd_node_info and on (instance) up == 1"),
                    "a scrape",
                    120,
                )
            finally:
                process.terminate()
                process.wait(60)


def query_prometheus(port: int, query: str) -> list[Any]:
    with contextlib.suppress(OSError):
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(url, timeout=240) as answer:
            return list(json.loads(answer.read())["data"]["result"])
    return []


def test_only_client_with_allowed_certificate_gets_page(authority: Authority, tmp_path: Path) -> None:
    authority.sign("node")
    allowed, allowed_key = authority.sign("prometheus")
    other, other_key = authority.sign("somebody")
    (tmp_path / "strangers").mkdir()
    foreign, foreign_key = Authority(tmp_path / "strangers", "ca").sign("prometheus")
    path = write_web_config(
        tmp_path,
        "tls_server_config:\n  cert_file: node.crt\n  key_file: node.key\n  client_ca_file: ca.crt\n"
        "  client_auth_type: RequireAndVerifyClientCert\n",
    )
    path.write_text(f"{path.read_text()}  client_allowed_sans: [prometheus]\n")  # unknown to promtool 2.42
    with contextlib.ExitStack() as ports:
        port = free_ports(1, ports)
        with serve(path, [f"127.0.0.1:{port}"]):
            options = ("--cacert", authority.certificate, *STATUS_ONLY, f"https://127.0.0.1:{port}/metrics")
            assert run_curl("--cert", allowed, "--key", allowed_key, *options) == (0, "200")
            assert run_curl("--cert", other, "--key", other_key, *options)[0] != 0
            assert run_curl("--cert", foreign, "--key", foreign_key, *options)[0] != 0
            assert run_curl(*options)[0] != 0


def test_renewed_certificate_needs_no_restart_and_broken_one_is_problem(authority: Authority, tmp_path: Path) -> None:
    certificate, _ = authority.sign("node", days=2)
    path = write_web_config(tmp_path, "tls_server_config: {cert_file: node.crt, key_file: node.key}")
    with contextlib.ExitStack() as ports:
        port = free_ports(1, ports)

        def served_certificate() -> str:
            return ssl.get_server_certificate(("127.0.0.1", port), timeout=240)

        with serve(path, [f"127.0.0.1:{port}"]) as daemon:
            assert served_certificate() == certificate.read_text()
            assert "node.crt: the certificate expires" in problems(daemon), "in two days"
            authority.sign("node")
            assert served_certificate() == certificate.read_text()
            good = certificate.read_text()
            certificate.write_text("nothing")
            assert served_certificate() == good
            until(lambda: "not a certificate and its key" in problems(daemon), "the problem is reported")
            authority.sign("node")
            assert served_certificate() == certificate.read_text()
            until(lambda: "certificate" not in problems(daemon), "the problem is over")


def test_missing_tls_files_mean_no_page_until_they_exist(authority: Authority, tmp_path: Path) -> None:
    path = write_web_config(tmp_path, "http_server_config: {}")
    path.write_text("tls_server_config: {cert_file: node.crt, key_file: node.key}")
    with contextlib.ExitStack() as ports:
        port = free_ports(1, ports)
        with serve(path, [f"127.0.0.1:{port}"]) as daemon:
            assert "no metrics page:" in problems(daemon)
            assert "node.crt: cannot be read: No such file" in problems(daemon)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=240)
            authority.sign("node")
            url = f"https://127.0.0.1:{port}/-/healthy"
            until(
                lambda: run_curl("--cacert", authority.certificate, *STATUS_ONLY, url) == (0, "200"),
                "the page is served",
            )


def test_unfinished_handshakes_do_not_block_scrape(authority: Authority, tmp_path: Path) -> None:
    authority.sign("node")
    path = write_web_config(tmp_path, "tls_server_config: {cert_file: node.crt, key_file: node.key}")
    with contextlib.ExitStack() as ports:
        port = free_ports(1, ports)
        with serve(path, [f"127.0.0.1:{port}"]) as daemon, contextlib.ExitStack() as connections:
            scrape = ("--cacert", authority.certificate, *STATUS_ONLY, f"https://127.0.0.1:{port}/metrics")
            for number in range(200):
                stream = connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=240))
                with contextlib.suppress(OSError):
                    stream.sendall((b"", b"\x16\x03\x01", b"GET / HTTP/1.0\r\n\r\n")[number % 3])
            until(lambda: run_curl(*scrape) == (0, "200"), "a scrape", 120)
            connections.close()
            until(lambda: count_threads(daemon) <= 4, "the threads of disconnected clients end", 120)


def count_threads(daemon: Healthd) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/task"))
