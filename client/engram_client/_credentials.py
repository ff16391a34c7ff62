"""What a client shows a server: TLS for its connections, and a token with each call."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from engram_client._config import Tls, Token
from engram_client._targets import is_local

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""What RFC 6750 allows in a header; gRPC would put anything else into the text of an error."""
_FRESH_S = 5.0
"""Between two looks at a file of a token."""


@dataclass(frozen=True)
class Credentials:
    """For all targets of a client."""

    tls: Tls | None = None
    token: Token | None = None

    @classmethod
    def of(cls, targets: Sequence[str], tls: Tls | None, token: Token | str | None) -> Credentials:
        """Raises ValueError where a token would be sent for everybody to read, and for what is no token, certificate or
        key; OSError for an unreadable file.
        """
        if isinstance(token, str):
            token = Token(token)
        if token is not None and tls is None and not token.plaintext:
            for target in targets:
                if not is_local(target):
                    raise ValueError(
                        f"the token would go to {target} readable for whoever listens in between: use TLS, or allow it "
                        "(Token.plaintext, --token-plaintext)"
                    )
        credentials = cls(tls, token)
        credentials.channel()
        if tls is not None:
            _check(tls)
        if token is not None:
            Bearer(token)
        return credentials

    def channel(self) -> grpc.ChannelCredentials | None:
        """Of connections over TCP; None: plain. Raises OSError."""
        tls = self.tls
        if tls is None:
            return None
        ca, key, cert = (None if path is None else path.read_bytes() for path in (tls.ca, tls.key, tls.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def bearer(self, target: str) -> Bearer | None:
        """What calls to a target bring; None: nothing."""
        return None if self.token is None or target.startswith("unix:") else Bearer(self.token)


class Bearer:
    """A token on its way. Safe to share between threads."""

    def __init__(self, token: Token) -> None:
        """Raises ValueError for what can be no token, and OSError for an unreadable file."""
        self._file = token.file
        self._metadata = _metadata(token.file.read_text() if token.file else token.text or "", token.file)
        self._looked = time.monotonic()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For one call."""
        if self._file is not None and time.monotonic() - self._looked > _FRESH_S:
            self._looked = time.monotonic()
            # If it is just being replaced: a server that does not like the old one says so.
            with suppress(OSError, ValueError):
                self._metadata = _metadata(self._file.read_text(), self._file)
        return self._metadata


def _check(tls: Tls) -> None:
    """gRPC would take anything, and never connect."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def password() -> str:
        raise ValueError(f"the key in {tls.key} is encrypted: give one without a password")

    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        raise ValueError(f"{tls.ca} holds no certificates of CAs in PEM") from error
    try:
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key, password)
    except ssl.SSLError as error:
        raise ValueError(f"{tls.cert} and {tls.key} are no certificate and its key in PEM") from error


def _metadata(text: str, file: Path | None) -> tuple[tuple[str, str], ...]:
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        where = "the token" if file is None else f"what {file} holds"
        raise ValueError(
            f"{where} is no token: expected letters, digits and -._~+/, then = signs, and nothing else"
        )
    return (("authorization", f"Bearer {token}"),)
