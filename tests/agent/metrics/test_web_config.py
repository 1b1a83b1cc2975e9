"""The web configuration file: what is taken, what is refused in one sentence, and passwords against bcrypt hashes."""

from __future__ import annotations

import contextlib
import os
import shutil
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from healthd.agent.metrics.certificates import SOON_SECONDS, WebFiles, not_after
from healthd.agent.metrics.passwords import REMEMBERED, WAITING, Passwords, TooBusy, _Guess
from healthd.agent.metrics.web_config import MOST_COST, WebConfig, WebConfigError, parse
from healthd.cli.main import main

pytestmark = pytest.mark.one_python  # PyYAML is of healthd[web]

TLS = Path(__file__).parents[2] / "data" / "tls"
ENDS = 4_948_952_881.0  # openssl x509 -enddate: Oct 29 13:08:01 2126 GMT
# Of the known answers of bcrypt implementations: cost 5, "U*U"
UU = "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW"
CERTIFIED = "tls_server_config:\n  cert_file: node.crt\n  key_file: /etc/node.key\n"


def test_a_file_as_prometheus_documents_it_is_taken() -> None:
    """prometheus/exporter-toolkit, docs/web-config.yml."""
    text = f"""
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
basic_auth_users:
  alice: {UU}
"""
    config = parse(text, "/etc/healthd")
    assert config.tls_server_config is not None
    assert config.tls_server_config.cert_file == "/etc/healthd/server.crt"
    assert config.tls_server_config.client_ca_file == "/etc/healthd/ca.crt"
    assert config.basic_auth_users == {"alice": UU}
    assert config.http_server_config.headers["X-Frame-Options"] == "deny"


def test_a_path_counts_from_the_folder_of_the_file() -> None:
    tls = parse(CERTIFIED, "/etc/healthd").tls_server_config
    assert tls is not None
    assert (tls.cert_file, tls.key_file, tls.client_ca_file) == ("/etc/healthd/node.crt", "/etc/node.key", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "says nothing"),
        ("- a", "must be a table"),
        ("tls_server_config: [", "not YAML: line 1"),
        ("a: &a [*a]\nb: 2020-13-45", "not YAML"),
        ("\x00", "not YAML"),
        ("tls_server_config:", "tls_server_config is empty"),
        ("basic_auth_user: {a: b}", 'unknown setting "basic_auth_user"; did you mean "basic_auth_users"?'),
        ("tls_server_config: {cert_file: a}", "missing key_file"),
        ("tls_server_config: {cert_file: '', key_file: a}", "names no cert_file"),
        (f"{CERTIFIED}  cert: x\n", "tls_server_config.cert is not supported: name a file"),
        ("rate_limit: {interval: 1s}", "rate_limit is not supported"),
        (f"{CERTIFIED}  min_version: TLS10\n", "min_version: must be TLS12 or TLS13"),
        (f"{CERTIFIED}  min_version: TLS13\n  max_version: TLS12\n", "min_version is above"),
        (f"{CERTIFIED}  client_auth_type: RequireAnyClientCert\n", "looks at no certificate"),
        (f"{CERTIFIED}  client_auth_type: Sure\n", "must be one of NoClientCert"),
        (f"{CERTIFIED}  client_auth_type: RequireAndVerifyClientCert\n", "go together"),
        (f"{CERTIFIED}  client_ca_file: ca\n", "go together"),
        (f"{CERTIFIED}  client_allowed_sans: [a]\n", "needs client_auth_type"),
        (f"{CERTIFIED}  cipher_suites: [RC4]\n", "RC4 is none of"),
        (f"{CERTIFIED}  curve_preferences: [X25519, CurveP256]\n", "only one curve"),
        (f"{CERTIFIED}  curve_preferences: [Curve1]\n", "is none of CurveP256"),
        (f"{CERTIFIED}  min_versions: TLS13\n", 'unknown setting "min_versions"'),
        (f"{CERTIFIED}  key_file: other\n", "key_file is there twice"),
        (f"basic_auth_users: {{a: {UU}, a: {UU}}}", "line 1: a is there twice"),
        ("basic_auth_users: {ann: secret}", "basic_auth_users.ann: no bcrypt hash"),
        ("basic_auth_users: {ann: }", "basic_auth_users.ann"),
        (f"basic_auth_users: {{'a:b': {UU}}}", "can be no user"),
        (f"basic_auth_users: {{1: {UU}}}", "1 is no name: put it in quotes"),
        (f"basic_auth_users: {{ann: {UU.replace('05', str(MOST_COST + 1))}}}", f"more than {MOST_COST}"),
        ("http_server_config: {headers: {Server: x}}", "Server cannot be set"),
        ("http_server_config: {headers: {X-Frame-Options: allow}}", "must be deny or sameorigin"),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nb"}}', "no header may have"),
        ("http_server_config: {http2: 1}", "http_server_config.http2"),
        ("a: !!python/object/apply:os.system [id]", "not YAML"),
    ],
)
def test_what_is_not_known_or_not_supported_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(WebConfigError) as refused:
        parse(text, "/etc")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert UU not in str(refused.value)


@given(st.text(max_size=200) | st.text(alphabet="abc:{}[]&*!|>-?'\"#%\n \t0~", max_size=60))
@settings(deadline=None)
def test_any_text_is_a_web_configuration_or_one_sentence(text: str) -> None:
    with contextlib.suppress(WebConfigError):
        assert isinstance(parse(text, "/"), WebConfig)


# --- passwords


def fit(passwords: Passwords, user: str, password: bytes, **hashes: str) -> bool:
    return passwords.fit(hashes or {"ann": UU}, user, password, 60.0)


def test_a_password_fits_its_hash_and_no_other() -> None:
    passwords = Passwords()
    for _ in range(2):  # the second time it is remembered
        assert fit(passwords, "ann", b"U*U")
        assert not fit(passwords, "ann", b"U*V")
        assert not fit(passwords, "bob", b"U*U")
        assert not fit(passwords, "ann", b"")
        assert not fit(passwords, "ann", b"U*U\0")
    assert not fit(passwords, "ann", b"U*U", ann=UU.replace("CCCC.", "CCCCO")), "the hash was changed"
    assert fit(passwords, "ann", b"U*U", ann=UU.replace("$2a$", "$2y$"))


def test_no_number_of_guesses_makes_it_forget_who_is_known() -> None:
    passwords = Passwords()
    assert fit(passwords, "ann", b"U*U", ann=UU)
    for number in range(REMEMBERED + 20):
        assert not fit(passwords, "ann", b"guess %d" % number, ann=UU)
    with working(passwords):
        assert passwords.fit({"ann": UU}, "ann", b"U*U", 0.0)
        with pytest.raises(TooBusy):
            passwords.fit({"ann": UU}, "ann", b"another guess", 0.0)


@contextlib.contextmanager
def working(passwords: Passwords) -> Iterator[None]:
    """Somebody's password is worked on."""
    with passwords._turn(_Guess("10.0.0.1", b"somebody's"), 60.0, lambda: False):
        yield


class Client(threading.Thread):
    """It has a password looked at; `found` is the answer, None = too many wait."""

    def __init__(self, passwords: Passwords, password: bytes, address: str, gone: threading.Event) -> None:
        super().__init__(daemon=True)
        self.passwords, self.password, self.address, self.gone = passwords, password, address, gone
        self.found: bool | None = None
        self.start()

    def run(self) -> None:
        with contextlib.suppress(TooBusy):
            self.found = self.passwords.fit({"ann": UU}, "ann", self.password, 60.0, self.address, self.gone.is_set)


def test_few_wait_and_a_new_right_password_passes_guesses_from_other_addresses() -> None:
    passwords, here = Passwords(), threading.Event()
    assert not passwords.fit({"ann": UU}, "ann", b"first", 60.0, "10.0.0.2")
    with working(passwords):
        guesses = [Client(passwords, b"%d" % number, "10.0.0.2", here) for number in range(WAITING)]
        until(lambda: len(passwords._waiting) == WAITING, "they wait", 60)
        with pytest.raises(TooBusy):
            passwords.fit({"ann": UU}, "ann", b"one more", 60.0, "10.0.0.2")
        scrape = Client(passwords, b"U*U", "10.0.0.3", here)
        until(lambda: sum(guess.is_alive() for guess in guesses) == WAITING - 1, "one of them made room", 60)
        assert scrape.is_alive()
        assert passwords._in_turn()[0].address == "10.0.0.3"
    for client in (scrape, *guesses):
        client.join(60)
    assert scrape.found is True
    assert [guess.found for guess in guesses].count(False) == WAITING - 1


def test_a_guess_whose_client_is_gone_leaves_its_place() -> None:
    passwords, gone = Passwords(), threading.Event()
    with working(passwords):
        guesses = [Client(passwords, b"%d" % number, "10.0.0.2", gone) for number in range(WAITING)]
        until(lambda: len(passwords._waiting) == WAITING, "they wait", 60)
        gone.set()
        for guess in guesses:
            guess.join(60)
            assert not guess.is_alive()
        assert not passwords._waiting
    assert {guess.found for guess in guesses} == {None}


def test_passwords_are_looked_at_from_many_threads_at_once() -> None:
    passwords, found = Passwords(), []
    words = [b"U*U", b"wrong"] * 8
    threads = [threading.Thread(target=lambda w=w: found.append((w, fit(passwords, "ann", w)))) for w in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted((w, w == b"U*U") for w in words)


# --- files


def certified(folder: Path, text: str = "") -> Path:
    """A web configuration with the tests' certificate, for 127.0.0.1."""
    for name, mode in (("certificate.pem", 0o644), ("key.pem", 0o600)):
        shutil.copy(TLS / name, folder / name)
        (folder / name).chmod(mode)
    path = folder / "web.yml"
    path.write_text(f"tls_server_config:\n  cert_file: certificate.pem\n  key_file: key.pem\n{text}")
    path.chmod(0o640)
    return path


def refused(path: Path) -> str:
    with pytest.raises(WebConfigError) as error:
        WebFiles(str(path))
    return str(error.value)


def test_a_certificate_says_when_it_ends_and_is_a_trouble_a_week_before(tmp_path: Path) -> None:
    path, now = certified(tmp_path), [ENDS - SOON_SECONDS - 1]
    files = WebFiles(str(path), lambda: now[0])
    assert files.web().expires == ENDS
    assert files.trouble() == ""
    now[0] += 2
    assert files.trouble() == f"{tmp_path}/certificate.pem: the certificate ends 2126-10-29 13:08 UTC"
    now[0] = ENDS + 1
    assert "the certificate ended 2126-10-29" in files.trouble()


@given(st.binary(max_size=300) | st.integers(0, 900).map(lambda at: DER[:at]))
def test_what_is_no_certificate_is_none(der: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert not_after(der) == ENDS


DER = ssl.PEM_cert_to_DER_cert((TLS / "certificate.pem").read_text())


def test_the_end_of_a_certificate_is_read_from_it() -> None:
    assert not_after(DER) == ENDS


def test_files_that_others_may_read_or_change_are_refused(tmp_path: Path) -> None:
    path = certified(tmp_path)
    (tmp_path / "key.pem").chmod(0o644)
    assert refused(path) == f"{tmp_path}/key.pem: everybody may read the key: chmod 0640 {tmp_path}/key.pem"
    (tmp_path / "key.pem").chmod(0o640)
    WebFiles(str(path))
    path.chmod(0o666)
    assert "web.yml" in refused(path)
    path.chmod(0o644)
    path.write_text(f"basic_auth_users: {{ann: {UU}}}")
    assert "everybody may read it: chmod 0640" in refused(path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("web.yml", None, "web.yml: cannot be read: No such file"),
        ("certificate.pem", None, "certificate.pem: cannot be read: No such file"),
        ("certificate.pem", "nothing", "no certificate with its key"),
        ("key.pem", "nothing", "no certificate with its key"),
        ("web.yml", "\xff", "is no UTF-8 text"),
        ("web.yml", "a: b" + " " * (300 << 10), "is longer than 256 KiB"),
    ],
)
def test_files_that_are_none_are_one_sentence(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    path = certified(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text, encoding="latin-1")
    assert words in refused(path)
    assert "\n" not in refused(path)


def test_a_file_that_becomes_bad_changes_nothing_and_is_a_trouble_until_it_is_good_again(tmp_path: Path) -> None:
    path = certified(tmp_path, f"basic_auth_users: {{ann: {UU}}}")
    files = WebFiles(str(path))
    good, before = path.read_text(), files.web()
    for bad, words in (
        ("basic_auth_users: {ann: x}", "no bcrypt hash"),
        ("http_server_config: {}", "changes at the next start only"),
    ):
        path.write_text(bad)
        assert files.web() == before
        assert words in files.trouble()
        assert files.trouble().endswith("(what was read before still holds)")
    path.write_text(good.replace("ann", "bob"))
    assert files.web().config.basic_auth_users == {"bob": UU}
    assert files.trouble() == ""
    os.replace(tmp_path / "key.pem", tmp_path / "old.pem")
    assert files.web().context is not None
    assert "key.pem: cannot be read" in files.trouble()
    os.replace(tmp_path / "old.pem", tmp_path / "key.pem")
    assert files.trouble() == ""


def test_a_key_with_a_password_asks_no_terminal(tmp_path: Path) -> None:
    path = certified(tmp_path)
    (tmp_path / "key.pem").write_text(ENCRYPTED)
    assert "no certificate with its key" in refused(path)


# openssl genpkey -algorithm ed25519 -aes256 -pass pass:secret
ENCRYPTED = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIGbMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAg0LkWemXkVGQICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEC2veZxxR44uG0HWClrGwUUEQAON
fSUlkp5fAMCFOIuE1IlKidmUNcAitLFcVYquIZxk2FBI4NnMHqyViGIktGUkjMVA
CNuZOSJqvaMRGGNezuU=
-----END ENCRYPTED PRIVATE KEY-----
"""


def test_config_check_says_beforehand_what_would_keep_the_page_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web, settings_file = certified(tmp_path), tmp_path / "healthd.toml"
    settings_file.write_text(f'[metrics]\nweb_config = "{web}"\n')
    assert main(["config", "check", str(settings_file)]) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "key.pem").unlink()
    assert main(["config", "check", str(settings_file)]) == 0
    said = capsys.readouterr().err
    assert "warning: metrics.web_config: there would be no metrics page: " in said
    assert f"{tmp_path}/key.pem: cannot be read: No such file" in said


def test_without_pyyaml_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(WebConfigError, match=r'pip install "healthd\[web\]"'):
        parse(CERTIFIED, "/etc")
