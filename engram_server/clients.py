"""Who a call is from, in one word: what limits, refusals and logs go by."""

from __future__ import annotations

import ipaddress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc.aio

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

UDS = "uds"
"""Everybody who may open the UNIX socket: the kernel tells gRPC's users no more."""

_NAME_CHARS = 64

token_name: ContextVar[str | None] = ContextVar("token_name", default=None)
"""The name of the token that a call brought, once it was checked; bearer.py sets it."""


def client_name(context: Context) -> str:
    """The name of the call's token; else the common name, or first alternative name, of the client's certificate;
    else "uds"; else the site of its address."""
    if (name := token_name.get()) is not None:
        return name
    peer = context.peer()
    if peer.startswith("unix:"):
        return UDS
    return _certified(context) or site_of(peer_address(peer))


@lru_cache(maxsize=1024)
def peer_address(peer: str) -> str:
    """Of a peer as gRPC names it ("ipv4:10.0.0.1:40312", "ipv6:%5B::1%5D:40312"): the address alone."""
    if peer.startswith("unix:"):
        return UDS
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host or peer
    # A socket for both families names IPv4 clients so.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


@lru_cache(maxsize=1024)
def site_of(address: str) -> str:
    """Of an address over IPv6 its /64, which whoever has one of has all of: 2001:db8:0:1::/64. All else as it is."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, ipaddress.IPv6Address) or parsed.is_loopback or parsed.ipv4_mapped:
        return address
    network = ipaddress.IPv6Network((int(parsed), 64), strict=False)
    return f"{network}%{parsed.scope_id}" if parsed.scope_id else str(network)


def _certified(context: Context) -> str:
    facts = context.auth_context()
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for value in facts.get(key, ()):
            if name := _printable(value):
                return name
    return ""


def _printable(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_NAME_CHARS]
