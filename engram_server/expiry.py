"""Until when certificates are good. Python's ssl tells that of CAs, and of a server's own certificate to nobody, so the
few elements of DER before it are passed over here."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime

_PEM = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END ", re.DOTALL)
_INTEGER, _UTC_TIME, _GENERALIZED_TIME, _SEQUENCE, _VERSION = 0x02, 0x17, 0x18, 0x30, 0xA0
"""Tags."""


def expiry_of(pem: bytes) -> float:
    """When the first of these certificates expires, in seconds since the epoch.

    Raises ValueError when there is none, or when one is not as RFC 5280 has it.
    """
    ends = [_not_after(base64.b64decode(body)) for body in _PEM.findall(pem)]
    if not ends:
        raise ValueError("there is no certificate in PEM")
    return min(ends)


def _not_after(der: bytes) -> float:
    """Of TBSCertificate { version?, serialNumber, signature, issuer, Validity { notBefore, notAfter }, ...}."""
    at, _ = _element(der, 0, _SEQUENCE)
    at, _ = _element(der, at, _SEQUENCE)
    if der[at : at + 1] == bytes([_VERSION]):
        _, at = _element(der, at, _VERSION)
    for tag in (_INTEGER, _SEQUENCE, _SEQUENCE):
        _, at = _element(der, at, tag)
    at, _ = _element(der, at, _SEQUENCE)
    _, at = _element(der, at, _UTC_TIME, _GENERALIZED_TIME)
    begin, end = _element(der, at, _UTC_TIME, _GENERALIZED_TIME)
    return _seconds(der[begin:end])


def _element(der: bytes, at: int, *tags: int) -> tuple[int, int]:
    """Where the contents of the element at a place begin and end; it has one of these tags."""
    head = der[at : at + 2]
    if len(head) < 2 or head[0] not in tags:
        raise ValueError(f"byte {at} begins no {' or '.join(f'{tag:#04x}' for tag in tags)} of DER")
    begin, length = at + 2, head[1]
    if length >= 0x80:  # so many bytes of the length follow
        begin, more = begin + (length & 0x7F), der[begin : begin + (length & 0x7F)]
        length = int.from_bytes(more)
    if begin + length > len(der):
        raise ValueError(f"the element at byte {at} ends beyond the {len(der)} bytes that there are")
    return begin, begin + length


def _seconds(time: bytes) -> float:
    """Of the two forms that RFC 5280 allows (4.1.2.5): YYMMDDHHMMSSZ from 1950 on, and YYYYMMDDHHMMSSZ."""
    if re.fullmatch(rb"(\d\d)?\d{12}Z", time) is None:
        raise ValueError(f"{time!r} is no time as certificates have it")
    text = time.decode()
    if len(text) == 13:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
