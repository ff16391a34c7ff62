"""What an operator tells a plugin: environment variables, which reach every process of an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from engram_client._config import Retry, Timeouts, Tls, Token
from engram_client._sync import EngramClient
from engram_client._targets import parse_targets

LookupMode: TypeAlias = Literal["staged", "inline"]

_PREFIX = "ENGRAM_SERVER_"
_WAIT_S = 30.0
_SLOW_S = 60.0
"""How long a server that is there may take for one step, beyond the wait for one that is not."""


@dataclass(frozen=True)
class Settings:
    """Everything a plugin can be told."""

    targets: tuple[str, ...]
    """ENGRAM_SERVER_TARGET, several separated by commas: "unix:/run/engram.sock", "10.0.0.2:50051"."""
    wait_s: float = _WAIT_S
    """ENGRAM_SERVER_WAIT_S: how long a step waits for a server that has gone away, before it fails."""
    lookup: LookupMode = "staged"
    """ENGRAM_SERVER_LOOKUP, for vLLM. staged: rows are there before the forward begins, so that CUDA graphs may hold
    all of it. inline: rows are fetched where the forward looks them up, which no CUDA graph may capture."""
    prefetch: bool = True
    """ENGRAM_SERVER_PREFETCH, 0 or 1: read a prompt's rows into the server's cache when the request arrives."""
    pins: Mapping[int, bytes] = field(default_factory=dict)
    """ENGRAM_SERVER_PIN, "1=<64 hex digits>,14=...": the digest each layer's table must have, as
    `engram-server inspect` prints it. Takes the place of a comparison with the tables of the engine's checkpoint."""
    tls: Tls | None = None
    """ENGRAM_SERVER_TLS_CA, and ENGRAM_SERVER_TLS_CERT with ENGRAM_SERVER_TLS_KEY: files in PEM. TLS for targets over
    TCP where any of them is set."""
    token: Token | None = None
    """ENGRAM_SERVER_TOKEN_FILE: a file with the token for targets over TCP. ENGRAM_SERVER_TOKEN_PLAINTEXT=1 sends it to
    other hosts without TLS, too."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings | None:
        """The settings; None when ENGRAM_SERVER_TARGET is unset or empty: the plugin then does nothing.

        Raises ValueError for a variable that cannot be understood.
        """
        target = environment.get(f"{_PREFIX}TARGET", "").strip()
        if not target:
            return None
        return cls(
            targets=parse_targets([part.strip() for part in target.split(",") if part.strip()]),
            wait_s=_seconds(environment, "WAIT_S", _WAIT_S),
            lookup=_mode(environment),
            prefetch=_switch(environment, "PREFETCH", True),
            tls=_tls(environment),
            token=_token(environment),
            pins=_pins(environment.get(f"{_PREFIX}PIN", "")),
        )

    @classmethod
    def required(cls) -> Settings:
        """The same where the plugin is active already. Raises ValueError when the target has vanished."""
        settings = cls.from_environment()
        if settings is None:
            raise ValueError(
                f"{_PREFIX}TARGET was set when the plugin was loaded and is not now: set it again"
            )
        return settings

    def client(self) -> EngramClient:
        """A client that waits as told. It must not be made before a fork."""
        return EngramClient(
            self.targets,
            timeouts=Timeouts(request_s=self.wait_s + _SLOW_S),
            retry=Retry(wait_for_server_s=self.wait_s, wait_for_room_s=self.wait_s),
            tls=self.tls,
            token=self.token,
        )


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(_PREFIX + name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"{_PREFIX}{name} is {text!r}; expected seconds, zero or more")
    return seconds


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    text = environment.get(_PREFIX + name, "").strip()
    return Path(text) if text else None


def _tls(environment: Mapping[str, str]) -> Tls | None:
    ca, cert, key = (_path(environment, f"TLS_{name}") for name in ("CA", "CERT", "KEY"))
    if (cert is None) != (key is None):
        raise ValueError(f"{_PREFIX}TLS_CERT needs {_PREFIX}TLS_KEY, and the other way round: set both")
    return None if ca is None and cert is None else Tls(ca, cert, key)


def _token(environment: Mapping[str, str]) -> Token | None:
    file = _path(environment, "TOKEN_FILE")
    plaintext = _switch(environment, "TOKEN_PLAINTEXT", False)
    return None if file is None else Token(file=file, plaintext=plaintext)


def _switch(environment: Mapping[str, str], name: str, default: bool) -> bool:
    text = environment.get(_PREFIX + name, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"{_PREFIX}{name} is {text!r}; expected 0 or 1")
    return text == "1" if text else default


def _mode(environment: Mapping[str, str]) -> LookupMode:
    text = environment.get(f"{_PREFIX}LOOKUP", "").strip() or "staged"
    if text not in get_args(LookupMode):
        raise ValueError(f"{_PREFIX}LOOKUP is {text!r}; expected one of {', '.join(get_args(LookupMode))}")
    return text  # type: ignore[return-value]


def _pins(text: str) -> dict[int, bytes]:
    pins = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        layer, _, digest = part.partition("=")
        try:
            pins[int(layer)] = bytes.fromhex(digest)
        except ValueError:
            pins[-1] = b""
        if -1 in pins or len(pins[int(layer)]) != 32:
            raise ValueError(
                f"{_PREFIX}PIN has {part!r}; expected LAYER=DIGEST with a digest of 64 hexadecimal digits"
            )
    return pins
