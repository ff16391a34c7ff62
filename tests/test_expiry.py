"""When certificates expire: as `cryptography` reads them, shown, and said in time."""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import NEXT_WEEK, YESTERDAY, Authority, files_of
from support.prometheus import ROOT
from support.serving import serving, until
from test_metrics import Scrape

from engram_server.certificates import SOON_S, Certificates
from engram_server.expiry import expiry_of
from engram_server.refusals import Refusals
from engram_server.security import Security, SecurityOptions
from engram_server.sockets import ServeError

NAME = "engram_certificate_expiry_timestamp_seconds"
CA = trustme.CA()
ISSUED = CA.issue_cert("127.0.0.1", not_after=datetime(2027, 3, 4, 5, 6, 7)).cert_chain_pems[0].bytes()
DER = x509.load_pem_x509_certificate(ISSUED).public_bytes(Encoding.DER)


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def pem(der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).encode()


def end_of(text: bytes) -> float:
    """The oracle's."""
    return min(one.not_valid_after_utc.timestamp() for one in x509.load_pem_x509_certificates(text))


@given(
    st.datetimes(datetime(2012, 1, 1), datetime(9999, 12, 31)).map(lambda when: when.replace(microsecond=0))
)
def test_the_end_of_a_certificate_is_read_in_either_form_of_time(until: datetime) -> None:
    """UTCTime before 2050, GeneralizedTime from then on."""
    issued = CA.issue_cert("a.test", not_before=datetime(2011, 1, 1), not_after=until)
    text = issued.cert_chain_pems[0].bytes()
    assert expiry_of(text) == end_of(text) == until.replace(tzinfo=UTC).timestamp()


def test_times_of_the_last_century_are_told_from_those_of_this() -> None:
    before, after = DER.partition(b"270304050607Z")[::2]
    for year, text in ((1950, b"500304050607Z"), (1999, b"990304050607Z"), (2049, b"490304050607Z")):
        assert expiry_of(pem(before + text + after)) == datetime(year, 3, 4, 5, 6, 7, tzinfo=UTC).timestamp()


def test_of_a_chain_the_first_to_expire_counts_wherever_it_stands() -> None:
    texts = [
        CA.issue_cert("a.test", not_after=datetime(year, 1, 1)).cert_chain_pems[0].bytes()
        for year in (2031, 2030)
    ]
    between = CA.create_child_ca().issue_cert("a.test").cert_chain_pems
    for parts in (texts, texts[::-1], [*(one.bytes() for one in between), texts[1]]):
        chain = "# Autorité\n".encode().join(parts)
        assert expiry_of(chain) == end_of(chain) == datetime(2030, 1, 1, tzinfo=UTC).timestamp()


@given(st.integers(0, len(DER) - 1), st.integers(0, 255), st.booleans())
def test_damaged_certificates_are_an_error_or_tell_a_time(at: int, byte: int, cut: bool) -> None:
    damaged = DER[:at] if cut else DER[:at] + bytes([byte]) + DER[at + 1 :]
    try:
        found = expiry_of(pem(damaged))
    except ValueError:
        return
    assert not cut or at > DER.index(b"270304050607Z")
    assert isinstance(found, float)


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        (b"", "there is no certificate"),
        (b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n", "byte 0 begins no 0x30 of DER"),
        (pem(DER.replace(b"270304050607Z", b"270304050607+")), "is no time as certificates have it"),
        (pem(DER.replace(b"270304050607Z", b"271304050607Z")), "does not match format"),
        (pem(DER[:100]), "ends beyond the 100 bytes"),
    ],
    ids=["nothing", "an empty one", "another time zone", "a thirteenth month", "cut short"],
)
def test_what_is_wrong_with_a_certificate_is_said(damaged: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        expiry_of(damaged)


def test_a_certificate_whose_end_cannot_be_told_is_refused_by_its_file(
    ca: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ca.server()
    original = Path.read_bytes
    monkeypatch.setattr("engram_server.certificates._check_pair", lambda files, cert, key: None)
    monkeypatch.setattr(Path, "read_bytes", lambda path: original(path).replace(b"MII", b"AII"))
    with pytest.raises(
        ServeError, match=rf"{pair.cert} holds a certificate whose end cannot be told: byte 0"
    ):
        Certificates(files_of(pair))


@pytest.mark.parametrize(
    ("until", "says"),
    [
        (
            YESTERDAY,
            rf"expired {YESTERDAY:%Y-%m-%dT%H:%M:%S}Z: clients refuse it; put a new one in its place",
        ),
        (NEXT_WEEK, rf"expires {NEXT_WEEK:%Y-%m-%dT%H:%M:%S}Z, in [67]\.\d days; put a new one in its place"),
        (datetime.now(UTC) + timedelta(seconds=SOON_S + 3600), None),
    ],
    ids=["yesterday", "next week", "later"],
)
def test_a_certificate_that_is_not_good_for_long_is_worth_a_warning_at_the_start_and_at_each_reload(
    ca: Authority, until: datetime, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    pair = ca.server(until=until)
    security = Security(SecurityOptions(tls=files_of(pair)), Refusals())
    at_start = list(caplog.messages)
    assert asyncio.run(security.reload()) == "certificates"
    if says is None:
        assert caplog.messages == []
        return
    assert len(at_start) == 1
    assert re.match(rf"the certificate in {pair.cert} {says} and reload \(SIGHUP\)$", at_start[0])
    assert caplog.messages == at_start * 2


def test_the_rule_and_the_log_mean_the_same_time() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "engram-server.rules.yml").read_text()
    (days,) = re.findall(rf"{NAME} - time\(\) < (\d+) \* 86400", rules)
    assert int(days) * 86_400 == SOON_S


def test_the_end_of_the_chain_that_is_served_is_shown_and_follows_reloads(
    fp4_checkpoint: Path, tmp_path: Path, ca: Authority
) -> None:
    pair = ca.server(until=NEXT_WEEK)
    security = SecurityOptions(tls=files_of(pair, ca.file))
    with serving(fp4_checkpoint, tmp_path, security=security, metrics="127.0.0.1:0") as server:
        assert Scrape(server).sum(NAME) == end_of(pair.cert.read_bytes()) == int(NEXT_WEEK.timestamp())
        assert "the certificate in" in server.log.read_text()
        ca.server()
        assert Scrape(server).sum(NAME) == int(NEXT_WEEK.timestamp()), "it is not served yet"
        server.process.send_signal(signal.SIGHUP)
        until(lambda: Scrape(server).sum(NAME) == end_of(pair.cert.read_bytes()))
        assert server.log.read_text().count("the certificate in") == 1


def test_a_server_without_tls_shows_none(fp4_checkpoint: Path, tmp_path: Path) -> None:
    with serving(fp4_checkpoint, tmp_path, metrics="127.0.0.1:0") as server:
        assert NAME not in {sample.name for sample in Scrape(server).samples}
