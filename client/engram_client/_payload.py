"""Replies on the wire, their payload spliced in and out.

Nearly all of a reply is its payload, and protobuf copies that on either side: into the message, and between the message
and the bytes that travel. But a field of a message is a tag, a length and the bytes themselves, wherever it stands: so
it is put behind the other fields here, and cut out from among them, as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message

from engram_client._proto import engram_pb2 as pb

M = TypeVar("M", bound=Message)


@dataclass(slots=True, eq=False)
class Spliced(Generic[M]):
    """A message of a type that has a field `payload`, and apart from it what belongs into that field."""

    message: M
    payload: bytes | memoryview = b""


class PayloadCodec(Generic[M]):
    """Serialises and parses messages of one type."""

    def __init__(self, message_type: type[M]) -> None:
        self._type = message_type
        number = message_type.DESCRIPTOR.fields_by_name["payload"].number
        assert number < 16, "its tag is one byte"
        self._tag = number << 3 | 2

    def serialize(self, spliced: Spliced[M]) -> bytes:
        """What the message with its payload would be serialised to, but for the order of the fields."""
        size, prefix = len(spliced.payload), bytearray([self._tag])
        if not size:
            return spliced.message.SerializeToString()
        while size >= 0x80:
            prefix.append(size & 0x7F | 0x80)
            size >>= 7
        prefix.append(size)
        return b"".join((spliced.message.SerializeToString(), prefix, spliced.payload))

    def parse(self, data: bytes) -> Spliced[M]:
        """The message, and its payload as a view of `data`. Raises DecodeError for bytes that are no such message."""
        found = self._find(data)
        if found is None:
            message: Any = self._type.FromString(data)
            payload = message.payload
            message.ClearField("payload")
            return Spliced(message, payload)
        start, begin, end = found
        return Spliced(self._type.FromString(data[:start] + data[end:]), memoryview(data)[begin:end])

    def _find(self, data: bytes) -> tuple[int, int, int] | None:
        """Where the payload's field starts, its bytes begin, and both end. None: protobuf must look, at a message
        without a payload, or with anything that no server of this protocol writes."""
        found = None
        at = 0
        try:
            while at < len(data):
                start, tag = at, data[at]
                value, at = _varint(data, at + 1)
                if tag & 7 == 2:
                    at += value
                elif tag & 7:
                    return None
                if tag == self._tag and found is None:
                    found = start, at - value, at
                elif tag == self._tag or tag >= 0x80:
                    return None
        except (IndexError, ValueError):
            return None
        return found if at == len(data) else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends. Raises IndexError when the data end before, ValueError when
    it is longer than a length is."""
    value = 0
    for shift in range(0, 35, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("more than 35 bits")


Chunk: TypeAlias = Spliced[pb.LookupChunk]
Reply: TypeAlias = Spliced[pb.LookupReply]
CHUNKS = PayloadCodec(pb.LookupChunk)
REPLIES = PayloadCodec(pb.LookupReply)
