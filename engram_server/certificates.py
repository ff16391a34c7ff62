"""The server's certificate, its key, and whose clients' certificates count: files that are read again while serving.

gRPC asks for them at every new connection, so what replaces them counts from the next one on, and connections that are
there go on.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engram_server.expiry import expiry_of
from engram_server.logs import ONE_BY_ONE
from engram_server.sockets import ServeError

log = logging.getLogger("engram_server")

SOON_S = 14 * 86_400
"""Before a certificate expires, it is worth a warning; EngramCertificateExpires (deploy/prometheus) fires then, too."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files."""

    cert: Path
    """The server's certificate, and after it those between it and its CA."""
    key: Path
    """Its private key, without a password."""
    client_ca: Path | None = None
    """CAs that clients must have a certificate of; None: clients need none."""


@dataclass(frozen=True)
class CertificatesRead:
    """What files held when they were read."""

    configuration: grpc.ServerCertificateConfiguration
    expires: float
    """When the first of the server's chain does, in seconds since the epoch."""


class Certificates(Collector):
    """What new connections are to see."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ServeError."""
        self._files = files
        self._lock = threading.Lock()
        self._begun = 0
        self.use(self.read())

    def read(self) -> CertificatesRead:
        """What the files hold now, for `use`. Raises ServeError when that would serve nobody."""
        cert, key = _bytes(self._files.cert), _bytes(self._files.key)
        _check_pair(self._files, cert, key)
        roots = None
        if self._files.client_ca is not None:
            roots = _bytes(self._files.client_ca)
            _check_roots(self._files.client_ca, roots)
        configuration = grpc.ssl_server_certificate_configuration([(key, cert)], roots)
        return CertificatesRead(configuration, _expiry(self._files.cert, cert))

    def use(self, read: CertificatesRead) -> None:
        """For connections from now on. Says when they are not good for long."""
        self._current = read
        _warn_of(self._files.cert, read.expires)

    def collect(self) -> Iterator[Metric]:
        """`engram_certificate_expiry_timestamp_seconds`."""
        yield GaugeMetricFamily(
            "engram_certificate_expiry_timestamp_seconds",
            "When the first certificate of the chain that new connections see expires.",
            value=self._current.expires,
        )

    def credentials(self) -> grpc.ServerCredentials:
        """For a port to listen at."""
        return grpc.dynamic_ssl_server_credentials(
            self._current.configuration, self._at_handshake, self._files.client_ca is not None
        )

    @property
    def begun(self) -> int:
        """Handshakes begun, as many as there were connections."""
        with self._lock:
            return self._begun

    def _at_handshake(self) -> grpc.ServerCertificateConfiguration:
        """On a thread of gRPC's."""
        with self._lock:
            self._begun += 1
        return self._current.configuration


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ServeError(f"{path} cannot be read: {error.strerror}") from error


def _check_pair(files: TlsFiles, cert: bytes, key: bytes) -> None:
    """gRPC would take anything, and fail every handshake."""

    def password() -> str:
        raise ServeError(f"the key in {files.key} is encrypted: give one without a password")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # These very bytes: the files may be replaced at any time, one after the other.
    with _in_memory(cert) as cert_path, _in_memory(key) as key_path:
        try:
            context.load_cert_chain(cert_path, key_path, password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ServeError(f"{files.key} is not the key of the certificate in {files.cert}") from error
            raise ServeError(
                f"{files.cert} and {files.key} are no certificate and key in PEM: {error.reason or error}"
            ) from error


def _check_roots(path: Path, roots: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        with _in_memory(roots) as roots_path:
            context.load_verify_locations(roots_path)
    except ssl.SSLError as error:
        raise ServeError(f"{path} holds no certificates of CAs in PEM") from error


def _expiry(path: Path, cert: bytes) -> float:
    try:
        return expiry_of(cert)
    except ValueError as error:
        raise ServeError(f"{path} holds a certificate whose end cannot be told: {error}") from error


def _warn_of(path: Path, expires: float) -> None:
    left_s = expires - time.time()
    if left_s > SOON_S:
        return
    when = datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    what = (
        f"expires {when}, in {left_s / 86_400:.1f} days"
        if left_s > 0
        else f"expired {when}: clients refuse it"
    )
    log.warning(
        "the certificate in %s %s; put a new one in its place and reload (SIGHUP)",
        path,
        what,
        extra=ONE_BY_ONE,
    )


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """A path for bytes: Python's ssl reads certificates from files alone."""
    with open(os.memfd_create("engram-tls"), "wb") as file:  # noqa: PTH123
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
