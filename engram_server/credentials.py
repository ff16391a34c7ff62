"""Options of commands that call a server: TLS and a token. For both programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from engram_client import Tls, Token


class Credentials(TypedDict):
    """Arguments of EngramClient."""

    tls: Tls | None
    token: Token | None


def add_credentials(parser: Any) -> None:
    """--tls, --tls-ca, --tls-cert, --tls-key, --token-file and --token-plaintext."""
    group = parser.add_argument_group("a server over TCP as TARGET")
    group.add_argument("--tls", action="store_true", help="use TLS, and trust the CAs that gRPC brings")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="use TLS, and trust these CAs (PEM)")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate of this client (PEM)")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    group.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token to call with")
    group.add_argument(
        "--token-plaintext", action="store_true", help="send the token to another host without TLS, too"
    )


def refuse_credentials(options: argparse.Namespace, path: object) -> None:
    """For tables that are read in this process. Raises ValueError for what was given all the same."""
    for name in ("tls", "tls_ca", "tls_cert", "tls_key", "token_file", "token_plaintext"):
        if getattr(options, name):
            raise ValueError(
                f"--{name.replace('_', '-')} is for a server over TCP; {path} is read in this process: leave it out"
            )


def credentials_of(options: argparse.Namespace) -> Credentials:
    """What they say. Raises ValueError."""
    from engram_client import Tls, Token

    tls = None
    if options.tls or options.tls_ca or options.tls_cert or options.tls_key:
        tls = Tls(options.tls_ca, options.tls_cert, options.tls_key)
    token = None
    if options.token_file is not None:
        token = Token(file=options.token_file, plaintext=options.token_plaintext)
    return Credentials(tls=tls, token=token)
