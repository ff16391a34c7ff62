"""Certificates for one test, by trustme."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from engram_client import Tls
from engram_server.certificates import TlsFiles

YESTERDAY = datetime.now(UTC) - timedelta(days=1)
NEXT_WEEK = datetime.now(UTC) + timedelta(days=7)


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A CA whose files lie in one folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self._ca = trustme.CA()
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *hosts: str, until: datetime | None = None) -> Pair:
        """A certificate whose common name is `name`, in files of that name."""
        issued = self._ca.issue_cert(*(hosts or (f"{name}.test",)), common_name=name, not_after=until)
        pair = Pair(self._folder / f"{name}.{self._name}.crt", self._folder / f"{name}.{self._name}.key")
        pair.key.write_bytes(issued.private_key_pem.bytes())
        pair.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return pair

    def server(self, name: str = "server", until: datetime | None = None) -> Pair:
        """Of a server on this host."""
        return self.issue(name, "127.0.0.1", "localhost", until=until)

    def tls(self, client: Pair | None = None) -> Tls:
        """For a client that trusts this CA."""
        return Tls(self.file, client and client.cert, client and client.key)


def files_of(pair: Pair, client_ca: Path | None = None) -> TlsFiles:
    """For a server."""
    return TlsFiles(pair.cert, pair.key, client_ca)
