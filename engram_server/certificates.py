"""The server's certificate, its key, and whose clients' certificates count: files that are read again while serving.

gRPC asks for them at every new connection, so what replaces them counts from the next one on, and connections that are
there go on.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from engram_server.sockets import ServeError


@dataclass(frozen=True)
class TlsFiles:
    """PEM files."""

    cert: Path
    """The server's certificate, and after it those between it and its CA."""
    key: Path
    """Its private key, without a password."""
    client_ca: Path | None = None
    """CAs that clients must have a certificate of; None: clients need none."""


class Certificates:
    """What new connections are to see."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ServeError."""
        self._files = files
        self._current = self.read()
        self._lock = threading.Lock()
        self._begun = 0

    def read(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold now, for `use`. Raises ServeError when that would serve nobody."""
        cert, key = _bytes(self._files.cert), _bytes(self._files.key)
        _check_pair(self._files, cert, key)
        roots = None
        if self._files.client_ca is not None:
            roots = _bytes(self._files.client_ca)
            _check_roots(self._files.client_ca, roots)
        return grpc.ssl_server_certificate_configuration([(key, cert)], roots)

    def use(self, configuration: grpc.ServerCertificateConfiguration) -> None:
        """For connections from now on."""
        self._current = configuration

    def credentials(self) -> grpc.ServerCredentials:
        """For a port to listen at."""
        return grpc.dynamic_ssl_server_credentials(
            self._current, self._at_handshake, self._files.client_ca is not None
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
        return self._current


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


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """A path for bytes: Python's ssl reads certificates from files alone."""
    with open(os.memfd_create("engram-tls"), "wb") as file:  # noqa: PTH123
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
