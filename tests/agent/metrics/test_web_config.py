"""Tests of the web configuration file: accepted and refused content, its certificates, and reloads."""

from __future__ import annotations

import contextlib
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requirements import require_programs

from healthd.agent.metrics.certificates import EXPIRY_WARNING_SECONDS, WebFiles
from healthd.agent.metrics.web_config import WebConfig, WebConfigError, parse
from healthd.cli.main import main

pytestmark = pytest.mark.one_python  # PyYAML comes with healthd[web]

TLS = Path(__file__).parents[2] / "data" / "tls"
ENDS = 4_948_952_881.0  # openssl x509 -enddate: Oct 29 13:08:01 2126 GMT
WITH_CERTIFICATE = "tls_server_config:\n  cert_file: node.crt\n  key_file: /etc/node.key\n"


def test_parse_accepts_documented_prometheus_file() -> None:
    """prometheus/exporter-toolkit, docs/web-config.yml, without its users."""
    text = """
# TLS and basic authentication configuration example.
tls_server_config:
  cert_file: server.crt
  key_file: server.key
  min_version: TLS13
  client_auth_type: "RequireAndVerifyClientCert"
  client_ca_file: ca.crt
  client_allowed_sans: [prometheus.example]
  cipher_suites:
  - TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
  curve_preferences: [X25519]
http_server_config:
  http2: true
  headers:
    X-Frame-Options: deny
    Strict-Transport-Security: max-age=31536000
"""
    config = parse(text, "/etc/healthd")
    assert config.tls_server_config is not None
    assert config.tls_server_config.cert_file == "/etc/healthd/server.crt"
    assert config.tls_server_config.client_ca_file == "/etc/healthd/ca.crt"
    assert config.http_server_config.headers["X-Frame-Options"] == "deny"


def test_parse_resolves_paths_relative_to_file() -> None:
    tls = parse(WITH_CERTIFICATE, "/etc/healthd").tls_server_config
    assert tls is not None
    assert (tls.cert_file, tls.key_file, tls.client_ca_file) == ("/etc/healthd/node.crt", "/etc/node.key", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("- a", "must be a table"),
        ("tls_server_config: [", "not YAML: line 1"),
        ("a: &a [*a]\nb: 2020-13-45", "not YAML"),
        ("\x00", "not YAML"),
        ("tls_server_config:", "tls_server_config is empty"),
        ("tls_server_confg: {a: b}", 'unknown setting "tls_server_confg"; did you mean "tls_server_config"?'),
        ("tls_server_config: {cert_file: a}", "missing key_file"),
        ("tls_server_config: {cert_file: '', key_file: a}", "cert_file is missing"),
        (f"{WITH_CERTIFICATE}  cert: x\n", "tls_server_config.cert is not supported: name a file"),
        ("rate_limit: {interval: 1s}", "rate_limit is not supported"),
        (f"{WITH_CERTIFICATE}  min_version: TLS10\n", "min_version: must be TLS12 or TLS13"),
        (f"{WITH_CERTIFICATE}  min_version: TLS13\n  max_version: TLS12\n", "min_version is above"),
        (f"{WITH_CERTIFICATE}  client_auth_type: RequireAnyClientCert\n", "does not verify certificates"),
        (f"{WITH_CERTIFICATE}  client_auth_type: Sure\n", "must be one of NoClientCert"),
        (f"{WITH_CERTIFICATE}  client_auth_type: RequireAndVerifyClientCert\n", "set together"),
        (f"{WITH_CERTIFICATE}  client_ca_file: ca\n", "set together"),
        (f"{WITH_CERTIFICATE}  client_allowed_sans: [a]\n", "needs client_auth_type"),
        (f"{WITH_CERTIFICATE}  cipher_suites: [RC4]\n", "RC4 is not one of"),
        (f"{WITH_CERTIFICATE}  curve_preferences: [X25519, CurveP256]\n", "only one curve"),
        (f"{WITH_CERTIFICATE}  curve_preferences: [Curve1]\n", "is not one of CurveP256"),
        (f"{WITH_CERTIFICATE}  min_versions: TLS13\n", 'unknown setting "min_versions"'),
        (f"{WITH_CERTIFICATE}  key_file: other\n", "duplicate key key_file"),
        (f"{WITH_CERTIFICATE}basic_auth_users: {{ann: $2y$10$x}}\n", "basic_auth_users is not supported: put a proxy"),
        ("basic_auth_users:", "basic_auth_users is not supported"),
        ("http_server_config: {1: a}", "line 1: 1 is not a string"),
        ("http_server_config: {headers: {Server: x}}", "Server cannot be set"),
        ("http_server_config: {headers: {X-Frame-Options: allow}}", "must be deny or sameorigin"),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nb"}}', "must not contain"),
        ("http_server_config: {http2: 1}", "http_server_config.http2"),
        ("a: !!python/object/apply:os.system [id]", "not YAML"),
    ],
)
def test_parse_refuses_unsupported_setting_in_single_sentence(text: str, message: str) -> None:
    with pytest.raises(WebConfigError) as raised:
        parse(text, "/etc")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "$2y$" not in str(raised.value)


@given(st.text(max_size=200) | st.text(alphabet="abc:{}[]&*!|>-?'\"#%\n \t0~", max_size=60))
@settings(deadline=None)
def test_parse_accepts_or_refuses_any_text(text: str) -> None:
    with contextlib.suppress(WebConfigError):
        assert isinstance(parse(text, "/"), WebConfig)


# --- files


def write_web_config(folder: Path, text: str = "") -> Path:
    """Write a web configuration with the tests' certificate for 127.0.0.1."""
    for name, mode in (("certificate.pem", 0o644), ("key.pem", 0o600)):
        shutil.copy(TLS / name, folder / name)
        (folder / name).chmod(mode)
    path = folder / "web.yml"
    path.write_text(f"tls_server_config:\n  cert_file: certificate.pem\n  key_file: key.pem\n{text}")
    path.chmod(0o640)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(WebConfigError) as raised:
        WebFiles(str(path))
    return str(raised.value)


def test_problem_reports_certificate_a_week_before_expiry(tmp_path: Path) -> None:
    path, now = write_web_config(tmp_path), [ENDS - EXPIRY_WARNING_SECONDS - 1]
    files = WebFiles(str(path), lambda: now[0])
    assert files.web().expires == ENDS
    assert files.problem() == ""
    now[0] += 2
    assert files.problem() == f"{tmp_path}/certificate.pem: the certificate expires 2126-10-29 13:08 UTC"
    now[0] = ENDS + 1
    assert "the certificate expired 2126-10-29" in files.problem()


def self_signed(folder: Path, *openssl: str) -> Path:
    """Write a web configuration with a new self-signed certificate."""
    require_programs("openssl", packages="openssl")
    path = write_web_config(folder)
    argv = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", "/CN=n1", "-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem"))  # fmt: skip
    subprocess.run([*argv, *openssl], capture_output=True, timeout=240, check=True)
    (folder / "key.pem").chmod(0o600)
    return path


@pytest.mark.parametrize("text", ["min_version: TLS13", "max_version: TLS12", "client_auth_type: NoClientCert"])
def test_expiry_is_read_for_each_tls_version(tmp_path: Path, text: str) -> None:
    assert WebFiles(str(write_web_config(tmp_path, f"  {text}\n"))).web().expires == ENDS


def test_expiry_is_read_if_clients_need_certificate(tmp_path: Path) -> None:
    text = "  client_ca_file: certificate.pem\n  client_auth_type: RequireAndVerifyClientCert\n  max_version: TLS12\n"
    web = WebFiles(str(write_web_config(tmp_path, text))).web()
    assert web.expires == ENDS
    assert web.context is not None
    assert web.context.verify_mode == ssl.CERT_REQUIRED


def test_expired_certificate_is_reported_and_used(tmp_path: Path) -> None:
    path = self_signed(tmp_path)
    certificate = str(tmp_path / "certificate.pem")
    argv = ("openssl", "x509", "-in", certificate, "-signkey", str(tmp_path / "key.pem"), "-days", "-1")
    subprocess.run([*argv, "-out", certificate], capture_output=True, timeout=240, check=True)
    files = WebFiles(str(path))
    assert files.web().context is not None
    assert "the certificate expired 20" in files.problem()


def test_client_certificate_is_reported(tmp_path: Path) -> None:
    path = self_signed(tmp_path, "-addext", "extendedKeyUsage=clientAuth")
    files = WebFiles(str(path))
    assert files.web().context is not None
    assert "clients reject the certificate: unsuitable certificate purpose" in files.problem()


def test_cipher_suites_that_do_not_match_key_are_refused(tmp_path: Path) -> None:
    path = self_signed(tmp_path)
    text = "  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]\n  max_version: TLS12\n"
    path.write_text(path.read_text() + text)
    assert "NO_SHARED_CIPHER" in refusal(path)


def test_world_readable_or_writable_files_are_refused(tmp_path: Path) -> None:
    path = write_web_config(tmp_path)
    (tmp_path / "key.pem").chmod(0o644)
    assert refusal(path) == f"{tmp_path}/key.pem: every user may read the key: chmod 0640 {tmp_path}/key.pem"
    (tmp_path / "key.pem").chmod(0o640)
    WebFiles(str(path))
    path.chmod(0o666)
    assert "web.yml" in refusal(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("web.yml", None, "web.yml: cannot be read: No such file"),
        ("certificate.pem", None, "certificate.pem: cannot be read: No such file"),
        ("certificate.pem", "nothing", "not a certificate and its key"),
        ("key.pem", "nothing", "not a certificate and its key"),
        ("web.yml", "\xff", "is not UTF-8 text"),
        ("web.yml", "a: b" + " " * (300 << 10), "is larger than 256 KiB"),
    ],
)
def test_invalid_files_are_refused_in_single_sentence(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    path = write_web_config(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text, encoding="latin-1")
    assert message in refusal(path)
    assert "\n" not in refusal(path)


def test_invalid_change_is_reported_and_previous_config_stays(tmp_path: Path) -> None:
    path = write_web_config(tmp_path, "http_server_config: {headers: {X-Frame-Options: deny}}")
    files = WebFiles(str(path))
    valid_text, valid_web = path.read_text(), files.web()
    for invalid_text, message in (
        ("basic_auth_users: {ann: x}", "basic_auth_users is not supported"),
        ("http_server_config: {}", "only be turned on or off by a restart"),
    ):
        path.write_text(invalid_text)
        assert files.web() == valid_web
        assert message in files.problem()
        assert files.problem().endswith("(the previous configuration stays in force)")
    path.write_text(valid_text.replace("deny", "sameorigin"))
    assert files.web().config.http_server_config.headers == {"X-Frame-Options": "sameorigin"}
    assert files.problem() == ""
    os.replace(tmp_path / "key.pem", tmp_path / "old.pem")
    assert files.web().context is not None
    assert "key.pem: cannot be read" in files.problem()
    os.replace(tmp_path / "old.pem", tmp_path / "key.pem")
    assert files.problem() == ""


def test_key_with_password_is_refused_without_prompt(tmp_path: Path) -> None:
    path = write_web_config(tmp_path)
    (tmp_path / "key.pem").write_text(ENCRYPTED)
    assert "not a certificate and its key" in refusal(path)


# openssl genpkey -algorithm ed25519 -aes256 -pass pass:secret
ENCRYPTED = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIGbMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAg0LkWemXkVGQICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEC2veZxxR44uG0HWClrGwUUEQAON
fSUlkp5fAMCFOIuE1IlKidmUNcAitLFcVYquIZxk2FBI4NnMHqyViGIktGUkjMVA
CNuZOSJqvaMRGGNezuU=
-----END ENCRYPTED PRIVATE KEY-----
"""


def test_config_check_warns_about_missing_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    web, settings_file = write_web_config(tmp_path), tmp_path / "healthd.toml"
    settings_file.write_text(f'[metrics]\nweb_config = "{web}"\n')
    assert main(["config", "check", str(settings_file)]) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "key.pem").unlink()
    assert main(["config", "check", str(settings_file)]) == 0
    output = capsys.readouterr().err
    assert "warning: metrics.web_config: the metrics page cannot start: " in output
    assert f"{tmp_path}/key.pem: cannot be read: No such file" in output


def test_parse_without_pyyaml_names_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(WebConfigError, match="pip install PyYAML"):
        parse(WITH_CERTIFICATE, "/etc")
