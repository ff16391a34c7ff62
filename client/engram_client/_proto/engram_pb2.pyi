from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_KIND_UNSPECIFIED: _ClassVar[RowKind]
    ROW_KIND_FP4: _ClassVar[RowKind]
    ROW_KIND_FP8: _ClassVar[RowKind]

class ScalePlacement(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALE_PLACEMENT_UNSPECIFIED: _ClassVar[ScalePlacement]
    SCALE_PLACEMENT_DISK: _ClassVar[ScalePlacement]
    SCALE_PLACEMENT_MEMORY: _ClassVar[ScalePlacement]

class Format(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORMAT_UNSPECIFIED: _ClassVar[Format]
    FORMAT_PACKED: _ClassVar[Format]
    FORMAT_PACKED_FP8: _ClassVar[Format]
    FORMAT_BF16: _ClassVar[Format]
    FORMAT_FP32: _ClassVar[Format]

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_UNSPECIFIED: _ClassVar[Lane]
    LANE_DECODE: _ClassVar[Lane]
    LANE_PREFILL: _ClassVar[Lane]
    LANE_PREFETCH: _ClassVar[Lane]
ROW_KIND_UNSPECIFIED: RowKind
ROW_KIND_FP4: RowKind
ROW_KIND_FP8: RowKind
SCALE_PLACEMENT_UNSPECIFIED: ScalePlacement
SCALE_PLACEMENT_DISK: ScalePlacement
SCALE_PLACEMENT_MEMORY: ScalePlacement
FORMAT_UNSPECIFIED: Format
FORMAT_PACKED: Format
FORMAT_PACKED_FP8: Format
FORMAT_BF16: Format
FORMAT_FP32: Format
LANE_UNSPECIFIED: Lane
LANE_DECODE: Lane
LANE_PREFILL: Lane
LANE_PREFETCH: Lane

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("protocol_version", "server_version", "server_id", "spec", "digests", "tables", "formats", "limits", "backend", "scales_reason", "cache", "shared_memory", "machine")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    SCALES_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    server_version: str
    server_id: str
    spec: ModelSpec
    digests: Digests
    tables: _containers.RepeatedCompositeFieldContainer[TableInfo]
    formats: _containers.RepeatedScalarFieldContainer[Format]
    limits: Limits
    backend: BackendInfo
    scales_reason: str
    cache: CacheInfo
    shared_memory: SharedMemoryInfo
    machine: MachineInfo
    def __init__(self, protocol_version: _Optional[int] = ..., server_version: _Optional[str] = ..., server_id: _Optional[str] = ..., spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., digests: _Optional[_Union[Digests, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[TableInfo, _Mapping]]] = ..., formats: _Optional[_Iterable[_Union[Format, str]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., backend: _Optional[_Union[BackendInfo, _Mapping]] = ..., scales_reason: _Optional[str] = ..., cache: _Optional[_Union[CacheInfo, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemoryInfo, _Mapping]] = ..., machine: _Optional[_Union[MachineInfo, _Mapping]] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("model_type", "layers", "max_ngram_size", "heads", "columns", "head_dim", "engram_vocab_size", "token_vocab_size", "compressed_vocab_size", "pad_token_id", "image_token_id")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    ENGRAM_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAD_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    max_ngram_size: int
    heads: int
    columns: int
    head_dim: int
    engram_vocab_size: int
    token_vocab_size: int
    compressed_vocab_size: int
    pad_token_id: int
    image_token_id: int
    def __init__(self, model_type: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., max_ngram_size: _Optional[int] = ..., heads: _Optional[int] = ..., columns: _Optional[int] = ..., head_dim: _Optional[int] = ..., engram_vocab_size: _Optional[int] = ..., token_vocab_size: _Optional[int] = ..., compressed_vocab_size: _Optional[int] = ..., pad_token_id: _Optional[int] = ..., image_token_id: _Optional[int] = ...) -> None: ...

class Digests(_message.Message):
    __slots__ = ("token_map", "hash")
    TOKEN_MAP_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    token_map: bytes
    hash: bytes
    def __init__(self, token_map: _Optional[bytes] = ..., hash: _Optional[bytes] = ...) -> None: ...

class TableInfo(_message.Message):
    __slots__ = ("layer", "rows", "kind", "row_bytes", "digest", "scales", "scale_rows_loaded", "scales_error")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    SCALE_ROWS_LOADED_FIELD_NUMBER: _ClassVar[int]
    SCALES_ERROR_FIELD_NUMBER: _ClassVar[int]
    layer: int
    rows: int
    kind: RowKind
    row_bytes: int
    digest: bytes
    scales: ScalePlacement
    scale_rows_loaded: int
    scales_error: str
    def __init__(self, layer: _Optional[int] = ..., rows: _Optional[int] = ..., kind: _Optional[_Union[RowKind, str]] = ..., row_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., scales: _Optional[_Union[ScalePlacement, str]] = ..., scale_rows_loaded: _Optional[int] = ..., scales_error: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("message_bytes", "unary_reply_bytes", "chunk_bytes", "request_rows", "stream_requests", "concurrent_rpcs", "decode_rows", "prefetch_rows", "pending_rows", "queue_seconds", "client_rows", "client_rows_per_s")
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNARY_REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ROWS_FIELD_NUMBER: _ClassVar[int]
    STREAM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_RPCS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    PENDING_ROWS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ROWS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ROWS_PER_S_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, message_bytes: _Optional[int] = ..., unary_reply_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., request_rows: _Optional[int] = ..., stream_requests: _Optional[int] = ..., concurrent_rpcs: _Optional[int] = ..., decode_rows: _Optional[int] = ..., prefetch_rows: _Optional[int] = ..., pending_rows: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., client_rows: _Optional[int] = ..., client_rows_per_s: _Optional[float] = ...) -> None: ...

class BackendInfo(_message.Message):
    __slots__ = ("name", "reason", "fallback")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    fallback: bool
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., fallback: bool = ...) -> None: ...

class CacheInfo(_message.Message):
    __slots__ = ("capacity_bytes", "used_bytes", "hits", "misses", "joined", "evictions")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    used_bytes: int
    hits: int
    misses: int
    joined: int
    evictions: int
    def __init__(self, capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., joined: _Optional[int] = ..., evictions: _Optional[int] = ...) -> None: ...

class SharedMemoryInfo(_message.Message):
    __slots__ = ("socket", "version", "slots", "clients", "client_bytes_max")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    socket: str
    version: int
    slots: int
    clients: int
    client_bytes_max: int
    def __init__(self, socket: _Optional[str] = ..., version: _Optional[int] = ..., slots: _Optional[int] = ..., clients: _Optional[int] = ..., client_bytes_max: _Optional[int] = ...) -> None: ...

class MachineInfo(_message.Message):
    __slots__ = ("kernel", "cpu", "cpus", "files")
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    kernel: str
    cpu: str
    cpus: int
    files: _containers.RepeatedCompositeFieldContainer[FileInfo]
    def __init__(self, kernel: _Optional[str] = ..., cpu: _Optional[str] = ..., cpus: _Optional[int] = ..., files: _Optional[_Iterable[_Union[FileInfo, _Mapping]]] = ...) -> None: ...

class FileInfo(_message.Message):
    __slots__ = ("bytes", "direct", "alignment_bytes", "reason", "file_system", "device")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FILE_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    direct: bool
    alignment_bytes: int
    reason: str
    file_system: str
    device: str
    def __init__(self, bytes: _Optional[int] = ..., direct: bool = ..., alignment_bytes: _Optional[int] = ..., reason: _Optional[str] = ..., file_system: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("request_id", "tokens", "blocks", "rows", "layers", "columns", "format", "unique", "pins", "protocol_version", "lane", "timeout_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    tokens: TokenKeys
    blocks: BlockKeys
    rows: RowKeys
    layers: _containers.RepeatedScalarFieldContainer[int]
    columns: ColumnRange
    format: Format
    unique: bool
    pins: Pins
    protocol_version: int
    lane: Lane
    timeout_ms: int
    def __init__(self, request_id: _Optional[int] = ..., tokens: _Optional[_Union[TokenKeys, _Mapping]] = ..., blocks: _Optional[_Union[BlockKeys, _Mapping]] = ..., rows: _Optional[_Union[RowKeys, _Mapping]] = ..., layers: _Optional[_Iterable[int]] = ..., columns: _Optional[_Union[ColumnRange, _Mapping]] = ..., format: _Optional[_Union[Format, str]] = ..., unique: bool = ..., pins: _Optional[_Union[Pins, _Mapping]] = ..., protocol_version: _Optional[int] = ..., lane: _Optional[_Union[Lane, str]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ColumnRange(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Pins(_message.Message):
    __slots__ = ("tables", "token_map", "hash")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MAP_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TablePin]
    token_map: bytes
    hash: bytes
    def __init__(self, tables: _Optional[_Iterable[_Union[TablePin, _Mapping]]] = ..., token_map: _Optional[bytes] = ..., hash: _Optional[bytes] = ...) -> None: ...

class TablePin(_message.Message):
    __slots__ = ("layer", "digest")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    layer: int
    digest: bytes
    def __init__(self, layer: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class TokenKeys(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    def __init__(self, sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("tokens", "history")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    history: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., history: _Optional[bytes] = ...) -> None: ...

class BlockKeys(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerBlock]
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerBlock, _Mapping]]] = ...) -> None: ...

class LayerBlock(_message.Message):
    __slots__ = ("layer", "ids", "id_bytes")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    ids: bytes
    id_bytes: int
    def __init__(self, layer: _Optional[int] = ..., ids: _Optional[bytes] = ..., id_bytes: _Optional[int] = ...) -> None: ...

class RowKeys(_message.Message):
    __slots__ = ("layer", "ids", "id_bytes")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    ids: bytes
    id_bytes: int
    def __init__(self, layer: _Optional[int] = ..., ids: _Optional[bytes] = ..., id_bytes: _Optional[int] = ...) -> None: ...

class ReplyShape(_message.Message):
    __slots__ = ("tokens", "layers", "columns", "row_bytes", "format", "unique_rows", "payload_bytes")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_ROWS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    columns: int
    row_bytes: int
    format: Format
    unique_rows: _containers.RepeatedScalarFieldContainer[int]
    payload_bytes: int
    def __init__(self, tokens: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., columns: _Optional[int] = ..., row_bytes: _Optional[int] = ..., format: _Optional[_Union[Format, str]] = ..., unique_rows: _Optional[_Iterable[int]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("request_id", "shape", "payload", "mask", "stats")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    shape: ReplyShape
    payload: bytes
    mask: bytes
    stats: LookupStats
    def __init__(self, request_id: _Optional[int] = ..., shape: _Optional[_Union[ReplyShape, _Mapping]] = ..., payload: _Optional[bytes] = ..., mask: _Optional[bytes] = ..., stats: _Optional[_Union[LookupStats, _Mapping]] = ...) -> None: ...

class LookupChunk(_message.Message):
    __slots__ = ("request_id", "shape", "mask", "payload", "last", "stats", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    shape: ReplyShape
    mask: bytes
    payload: bytes
    last: bool
    stats: LookupStats
    error: Error
    def __init__(self, request_id: _Optional[int] = ..., shape: _Optional[_Union[ReplyShape, _Mapping]] = ..., mask: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., last: bool = ..., stats: _Optional[_Union[LookupStats, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    retry_after_ms: int
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class LookupStats(_message.Message):
    __slots__ = ("rows", "distinct", "cached", "joined", "reads", "read_bytes", "groups")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    distinct: int
    cached: int
    joined: int
    reads: int
    read_bytes: int
    groups: int
    def __init__(self, rows: _Optional[int] = ..., distinct: _Optional[int] = ..., cached: _Optional[int] = ..., joined: _Optional[int] = ..., reads: _Optional[int] = ..., read_bytes: _Optional[int] = ..., groups: _Optional[int] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("request_id", "rows", "groups", "queued_rows")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ROWS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    rows: int
    groups: int
    queued_rows: int
    def __init__(self, request_id: _Optional[int] = ..., rows: _Optional[int] = ..., groups: _Optional[int] = ..., queued_rows: _Optional[int] = ...) -> None: ...
