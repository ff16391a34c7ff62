"""Bearer tokens: a file that gives each client a name and a secret."""

from __future__ import annotations

import hashlib
import logging
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from engram_server.clients import UDS
from engram_server.sockets import ServeError

log = logging.getLogger("engram_server")

TOKEN_CHARS_MIN = 16
"""Less can be guessed; `openssl rand -hex 32` makes 64."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""What RFC 6750 allows in a header."""
_SCHEME = "bearer "


class Tokens:
    """Names by digests of their tokens: how long a look-up takes says nothing of the secrets."""

    def __init__(self, names: dict[bytes, str]) -> None:
        self._names = names

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """From lines "NAME TOKEN", empty ones, and comments from # on. Raises ServeError; no text of it has a token."""
        names: dict[bytes, str] = {}
        for number, line in enumerate(_text(path).splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            name, digest = _parsed(words, f"{path}, line {number}")
            if name in names.values():
                raise ServeError(f"{path}, line {number}: the name stands in an earlier line, too")
            if digest in names:
                raise ServeError(f"{path}, line {number}: the token stands in an earlier line, too")
            names[digest] = name
        if not names:
            raise ServeError(f"{path} has no tokens, and would keep everybody out: write lines of NAME TOKEN")
        return cls(names)

    def __len__(self) -> int:
        return len(self._names)

    def name_of(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """Whose token a call brought; "" = nobody's, None = it brought none."""
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str) and value[:7].lower() == _SCHEME:
                return self._names.get(_digest(value[7:].strip()), "")
        return None


def _parsed(words: list[str], where: str) -> tuple[str, bytes]:
    """Says nothing of what it found: who swaps the two has a token where the name should be."""
    if len(words) != 2:
        raise ServeError(f"{where}: expected NAME TOKEN, found {len(words)} words")
    name, token = words
    if not _NAME.fullmatch(name) or name == UDS:
        raise ServeError(
            f"{where}: a name has 1 to 64 letters, digits, dots, hyphens and underscores, and is not {UDS}"
        )
    if not _TOKEN.fullmatch(token):
        raise ServeError(f"{where}: the token has characters that no header may carry")
    if len(token) < TOKEN_CHARS_MIN:
        raise ServeError(
            f"{where}: the token has {len(token)} characters and can be guessed: take at least {TOKEN_CHARS_MIN}, such "
            "as `openssl rand -hex 32` prints"
        )
    return name, _digest(token)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _text(path: Path) -> str:
    try:
        if path.stat().st_mode & stat.S_IROTH:
            log.warning("everybody on this host can read the tokens in %s: chmod o-r", path)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ServeError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ServeError(f"{path} is no text in UTF-8") from error
