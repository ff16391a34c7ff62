"""What a server says about itself, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from engram_client._errors import MismatchError
from engram_client._proto import engram_pb2 as pb

PROTOCOL_VERSION = 1


@dataclass(frozen=True)
class ModelFacts:
    """From the checkpoint's config; see ModelSpec in engram.proto."""

    model_type: str
    layers: tuple[int, ...]
    max_ngram_size: int
    heads: int
    """Per n-gram order."""
    columns: int
    """Rows per token and layer: column = (order - 2) * heads + head."""
    head_dim: int
    """Values per row."""
    engram_vocab_size: int
    token_vocab_size: int
    """Valid token ids are below this; 0 = the server has no tokenizer and looks up row ids only."""
    compressed_vocab_size: int
    pad_token_id: int
    image_token_id: int


@dataclass(frozen=True)
class TableFacts:
    """One layer's table."""

    layer: int
    rows: int
    kind: Literal["fp4", "fp8"]
    row_bytes: int
    """Of a packed row: 136 (fp4) or 264 (fp8)."""
    digest: bytes
    """See TableInfo.digest in engram.proto."""
    scales: Literal["memory", "disk"]
    scale_rows_loaded: int
    scales_error: str


@dataclass(frozen=True)
class ServerLimits:
    """See Limits in engram.proto."""

    message_bytes: int
    unary_reply_bytes: int
    chunk_bytes: int
    request_rows: int
    stream_requests: int
    concurrent_rpcs: int
    decode_rows: int
    prefetch_rows: int
    pending_rows: int
    queue_seconds: float
    client_rows: int
    client_rows_per_s: float


@dataclass(frozen=True)
class CacheFacts:
    """The row cache when it was asked; counts are of distinct row groups, since the start of the server."""

    capacity_bytes: int
    """0 = there is none."""
    used_bytes: int
    hits: int
    misses: int
    joined: int
    """Neither hits nor misses: another request was reading them."""
    evictions: int


@dataclass(frozen=True)
class SharedMemoryFacts:
    """Where clients on the server's host find its shared-memory channel; see SharedMemoryInfo in engram.proto."""

    socket: str
    version: int
    slots: int
    clients: int
    client_bytes_max: int


@dataclass(frozen=True)
class FileFacts:
    """A file that holds rows; see FileInfo in engram.proto."""

    bytes: int
    direct: bool
    """Read past the page cache."""
    alignment_bytes: int
    reason: str
    file_system: str
    device: str


@dataclass(frozen=True)
class MachineFacts:
    """What reads the tables; see MachineInfo in engram.proto. "" and 0 = unknown."""

    kernel: str
    cpu: str
    cpus: int
    files: tuple[FileFacts, ...]


@dataclass(frozen=True)
class Description:
    """What one server serves. Digests are raw bytes; `.hex()` prints them."""

    protocol_version: int
    server_version: str
    server_id: str
    """Random, new at every start of the server."""
    model: ModelFacts
    token_map_digest: bytes
    """sha256 of the token map as little-endian int32; empty without a tokenizer."""
    hash_digest: bytes
    tables: Mapping[int, TableFacts]
    """By layer, ascending: the layers that can be looked up."""
    limits: ServerLimits
    backend: str
    backend_reason: str
    backend_fallback: bool
    """True when a better backend was refused by the system."""
    scales_reason: str
    cache: CacheFacts
    shared_memory: SharedMemoryFacts | None = None
    machine: MachineFacts | None = None
    """None: the server is an older one."""

    @cached_property
    def pins(self) -> list[pb.TablePin]:
        """The digests of all tables, as requests carry them."""
        return table_pins({layer: table.digest for layer, table in self.tables.items()})

    def identity(self) -> dict[str, bytes]:
        """Everything that must be equal for two servers to answer alike, by name."""
        digests = {f"table of layer {layer}": table.digest for layer, table in self.tables.items()}
        return {**digests, "token map": self.token_map_digest, "hash": self.hash_digest}


def table_pins(digests: Mapping[int, bytes]) -> list[pb.TablePin]:
    """Digests by layer as a message."""
    return [pb.TablePin(layer=layer, digest=digest) for layer, digest in digests.items()]


def description_from(reply: pb.DescribeReply, target: str) -> Description:
    """Raises MismatchError when the server speaks another version of the contract."""
    if reply.protocol_version != PROTOCOL_VERSION:
        raise MismatchError(
            f"the server speaks version {reply.protocol_version} of engram.proto; this client speaks "
            f"{PROTOCOL_VERSION}",
            target=target,
        )
    spec, limits = reply.spec, reply.limits
    return Description(
        protocol_version=reply.protocol_version,
        server_version=reply.server_version,
        server_id=reply.server_id,
        model=ModelFacts(
            model_type=spec.model_type,
            layers=tuple(spec.layers),
            max_ngram_size=spec.max_ngram_size,
            heads=spec.heads,
            columns=spec.columns,
            head_dim=spec.head_dim,
            engram_vocab_size=spec.engram_vocab_size,
            token_vocab_size=spec.token_vocab_size,
            compressed_vocab_size=spec.compressed_vocab_size,
            pad_token_id=spec.pad_token_id,
            image_token_id=spec.image_token_id,
        ),
        token_map_digest=reply.digests.token_map,
        hash_digest=reply.digests.hash,
        tables={table.layer: _table_from(table) for table in reply.tables},
        limits=ServerLimits(
            message_bytes=limits.message_bytes,
            unary_reply_bytes=limits.unary_reply_bytes,
            chunk_bytes=limits.chunk_bytes,
            request_rows=limits.request_rows,
            stream_requests=limits.stream_requests,
            concurrent_rpcs=limits.concurrent_rpcs,
            decode_rows=limits.decode_rows,
            prefetch_rows=limits.prefetch_rows,
            pending_rows=limits.pending_rows,
            queue_seconds=limits.queue_seconds,
            client_rows=limits.client_rows,
            client_rows_per_s=limits.client_rows_per_s,
        ),
        backend=reply.backend.name,
        backend_reason=reply.backend.reason,
        backend_fallback=reply.backend.fallback,
        scales_reason=reply.scales_reason,
        cache=CacheFacts(
            capacity_bytes=reply.cache.capacity_bytes,
            used_bytes=reply.cache.used_bytes,
            hits=reply.cache.hits,
            misses=reply.cache.misses,
            joined=reply.cache.joined,
            evictions=reply.cache.evictions,
        ),
        shared_memory=_shared_memory_from(reply),
        machine=_machine_from(reply),
    )


def _shared_memory_from(reply: pb.DescribeReply) -> SharedMemoryFacts | None:
    if not reply.HasField("shared_memory"):
        return None
    info = reply.shared_memory
    return SharedMemoryFacts(info.socket, info.version, info.slots, info.clients, info.client_bytes_max)


def _machine_from(reply: pb.DescribeReply) -> MachineFacts | None:
    if not reply.HasField("machine"):
        return None
    info = reply.machine
    files = (
        FileFacts(file.bytes, file.direct, file.alignment_bytes, file.reason, file.file_system, file.device)
        for file in info.files
    )
    return MachineFacts(info.kernel, info.cpu, info.cpus, tuple(files))


def _table_from(table: pb.TableInfo) -> TableFacts:
    return TableFacts(
        layer=table.layer,
        rows=table.rows,
        kind="fp4" if table.kind == pb.ROW_KIND_FP4 else "fp8",
        row_bytes=table.row_bytes,
        digest=table.digest,
        scales="memory" if table.scales == pb.SCALE_PLACEMENT_MEMORY else "disk",
        scale_rows_loaded=table.scale_rows_loaded,
        scales_error=table.scales_error,
    )
