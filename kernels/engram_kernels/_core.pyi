"""Typed interface of the native core (C++, nanobind).

Every call that moves bytes releases the GIL. Arrays are NumPy arrays, C-contiguous unless said otherwise.
"""

import enum
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# ------------------------------------------------------------------------------------- formats

class RowKind(enum.Enum):
    """How a table stores its codes."""

    FP4 = 0
    FP8 = 1

class Format(enum.Enum):
    """What a lookup returns; PACKED is the table's own bytes."""

    PACKED = 0
    PACKED_FP8 = 1
    BF16 = 2
    FP32 = 3

def packed_row_bytes(kind: RowKind) -> int:
    """136 for FP4, 264 for FP8."""

def output_row_bytes(kind: RowKind, format: Format) -> int:
    """Bytes of one row in `format`."""

# ---------------------------------------------------------------------------------------- hash

class NgramHash:
    """Token ids -> row ids (see docs/architecture.md, "Hash")."""

    def __init__(
        self,
        token_map: NDArray[np.int32],
        pad_class: int,
        image_token_id: int,
        multipliers: NDArray[np.uint64],
        primes: NDArray[np.uint64],
        offsets: NDArray[np.uint64],
    ) -> None:
        """token_map [V]; multipliers [L, N]; primes and offsets [L, (N - 1) * heads]; N = max n-gram size.

        Raises ValueError when these are not a layout the hash is exact for: a product of multiplier and class
        over 2^63 - 1, a prime outside 2..2^32 - 1, offsets that are not the sums of the primes before them.
        """

    def rows(
        self,
        tokens: NDArray[np.int32],
        lengths: NDArray[np.int64],
        history: NDArray[np.int32],
        history_lengths: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Hash sequences laid end to end.

        tokens [T], lengths [S] summing to T; history [sum(history_lengths)] oldest first, at most N - 1 a
        sequence, fewer = the sequence starts there, -1 = unknown.
        Returns row ids [T, L, C] and the image mask [T]. Raises ValueError naming sequence, position and id.
        """

# ------------------------------------------------------------------------------------- dequant

def simd_levels() -> list[str]:
    """Levels this CPU can run, best first, e.g. ["avx512", "avx2", "scalar"]."""

def convert_rows(
    kind: RowKind,
    format: Format,
    packed: NDArray[np.uint8],
    out: NDArray[np.uint8],
    simd: str | None = None,
) -> None:
    """Convert packed rows [n, packed_row_bytes] into out [n, output_row_bytes] (bit patterns).

    `simd` names a level (None = best). Raises ValueError on a shape that does not fit or a level the CPU
    lacks.
    """

# -------------------------------------------------------------------------------------- reader

class FileInfo:
    """One file of a reader, as it was opened."""

    path: str
    size_bytes: int
    direct: bool
    """O_DIRECT is on; else buffered with FADV_RANDOM."""
    alignment_bytes: int
    """Of offset, length and memory of a direct read; 1 when buffered."""
    reason: str
    """Why this mode, in words."""

class Reader:
    """Batched random reads from a fixed set of files.

    Raises OSError when a file cannot be opened or a test read of it fails, RuntimeError when a backend asked
    for by name cannot run here.
    """

    def __init__(
        self,
        paths: Sequence[str],
        backend: str = "auto",
        depth: int = 64,
        threads: int = 0,
        *,
        bulk_depth: int = 0,
    ) -> None:
        """backend: io_uring, pread, mmap or auto. depth: reads in flight on each device, all threads together;
        bulk_depth: of these, what the bulk lanes may hold, 0 = three quarters. threads: io threads, 0 = the
        backend's default."""

    @property
    def backend(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def fallback(self) -> bool: ...
    @property
    def broken(self) -> bool:
        """Whether a ring has broken and nothing took over: reads fail, and the reason says why."""
    @property
    def depth(self) -> int: ...
    @property
    def bulk_depth(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def registered(self) -> str:
        """What the kernel holds registered: "files+buffers", "files", "none"."""
    @property
    def files(self) -> list[FileInfo]: ...
    def counters(self) -> dict[str, int]:
        """Totals since start: reads, read_bytes, needed_bytes, short_reads, retries, errors; truncated, of these."""
    def in_flight(self, file: int) -> int:
        """Reads in flight on the device that holds a file."""
    def read_latencies(self) -> list[tuple[int, int, Lane, list[int], int]]:
        """(file, table, lane, counts, sum in ns) of what was read: how long reads of a table (its place among those of
        an engine; -1: of none) in one file took, from submission to completion. Counts are for LATENCY_BOUNDS_US, each
        without those of smaller bounds, and above the last."""
    def queue_latency(self, lane: Lane) -> tuple[list[int], int]:
        """(counts, sum in ns): how long reads of a lane waited to be submitted."""
    def change(self) -> str:
        """What has happened to a file since it was opened (it was written to, or has another size); "" = nothing. A
        file that was replaced by another of its name is still the one that was opened."""
    def read(
        self,
        file: NDArray[np.uint32],
        offset: NDArray[np.uint64],
        length: NDArray[np.uint32],
        out: NDArray[np.uint8],
    ) -> NDArray[np.int32]:
        """Read item i into the first length[i] bytes of out[i] (out [n, at least max length]).

        Returns an error per item: 0, an errno, or ERROR_TRUNCATED. Blocks until all are done. Raises
        ValueError for a file, length or offset that none can have, RuntimeError once closed or forked.
        """
    def close(self) -> None: ...

LATENCY_BOUNDS_US: tuple[int, ...]
"""Upper bounds of the buckets of a latency, inclusive."""

ERROR_TRUNCATED: int
"""The file ends inside the bytes asked for."""

ERROR_CHECKSUM: int
"""A packed store's record is not the row it should be."""

READ_BUFFER_BYTES: int
"""Memory per read in flight, which io_uring registers and RLIMIT_MEMLOCK counts."""

def error_text(error: int) -> str:
    """An item error in words."""

# -------------------------------------------------------------------------------------- engine

class Plane:
    """Where one part of every row lies: row r at `offset + r * stride` of `file`."""

    def __init__(self, file: int, offset: int, stride: int) -> None: ...

class Planes:
    """A copy of a table in place: codes and scales of a row lie apart, and cost a read each."""

    def __init__(self, codes: Plane, scales: Plane) -> None: ...

class Pages:
    """A copy of a table in a packed store (docs/format.md): record pages from `offset` on. One read a row, and
    every row read is checked against its seal."""

    def __init__(self, file: int, offset: int, uuid: bytes) -> None:
        """uuid: the store's, 16 bytes. Raises ValueError for another length."""

class Table:
    """One layer's table, in one copy or several equal ones, of which each read takes that of the least busy device.
    File numbers as given to the reader."""

    def __init__(self, layer: int, rows: int, kind: RowKind, copies: Sequence[Planes | Pages]) -> None: ...

class Lane(enum.Enum):
    """Whose reads go first: DECODE before PREFILL before PREFETCH."""

    DECODE = 0
    PREFILL = 1
    PREFETCH = 2

class RowError(Exception):
    """A row could not be read, or was given up (ECANCELED, ETIMEDOUT); the text says which and why."""

    layer: int
    row: int
    error: int
    """As Reader.read reports it, or ERROR_CHECKSUM."""

class OverloadLimit(enum.Enum):
    """What a refused request ran into."""

    ROWS = 0
    """Rows of all requests being worked on."""
    QUEUE = 1
    """Seconds that it would wait for others."""
    DEADLINE = 2
    """Its own time: it would not be answered within it."""
    CLIENT_ROWS = 3
    CLIENT_RATE = 4
    BUDGET = 5
    """Bytes of all batches alive."""

class OverloadedError(Exception):
    """There is no room now."""

    limit: OverloadLimit
    retry_after_s: float
    """The same request may be let in so much later; more than 0."""

class AdmissionLimits:
    """What requests may ask for together, and each client of them; 0 = no limit of a client's."""

    def __init__(
        self, *, rows: int, queue_s: float, client_rows: int = 0, client_rows_per_s: float = 0.0
    ) -> None:
        """rows: of all requests being worked on, the last eighth of them in the decode lane alone. queue_s: seconds
        that a new one may have to wait for others, as estimated (kernels/src/admission.h). client_rows: of one client
        being worked on, though one request is always let in. client_rows_per_s: a client that has asked for more than
        this times the seconds, and one second more, is refused until the rest is up."""

class Quota:
    """What one client has been let in with."""

    def __init__(self) -> None: ...

class Admission:
    """A request that was let in, until it is released or dropped."""

    def release(self) -> None:
        """It is over. Any number of times."""

class Batch:
    """One submitted set of rows, deduplicated by group. Holds its rows, in the cache's slots or in memory of its
    own, until it is dropped; dropped before it is done, it gives up the reads not yet started."""

    @property
    def tag(self) -> int: ...
    @property
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every read ended; False on time-out. Ctrl-C is honoured."""
    def check(self) -> None:
        """Raise RowError for the first row (in submission order) that failed. Only when done."""
    @property
    def stats(self) -> tuple[int, int, int, int, int, int, int]:
        """rows asked for (zero rows included); then of the distinct groups: rows, those of them that were in memory,
        those that another batch was reading; reads made, bytes they asked for; and the number of distinct groups
        (0 for resident tables, whose rows are not deduplicated)."""
    def gather(self, first: int, count: int, format: Format) -> bytes:
        """Positions first .. first + count - 1 as row[count, L, W] bytes; raises RowError as check() does.
        Only when done."""
    def gather_into(self, first: int, count: int, format: Format, out: NDArray[np.uint8]) -> None:
        """As gather, into a C-contiguous uint8 array of exactly that many bytes (any shape)."""
    def pick(self, layer: int, picks: NDArray[np.int64], format: Format) -> bytes:
        """Some rows of the batch's layer number `layer`: rows picks[i] of its [n, columns], flattened."""

class Engine:
    """Rows in, packed or dequantised rows out. Not usable after fork."""

    def __init__(
        self,
        reader: Reader,
        tables: Sequence[Table],
        budget_bytes: int = 1 << 30,
        *,
        cache_bytes: int = 0,
    ) -> None:
        """budget_bytes bounds what all batches alive hold besides cache slots, of which bulk lanes may use seven
        eighths; cache_bytes bounds the row cache (0, or too little for one set of slots = none)."""

    def admit(
        self,
        rows: int,
        lane: Lane,
        limits: AdmissionLimits,
        *,
        left_s: float | None = None,
        client: Quota | None = None,
    ) -> Admission:
        """Count a request in before any work is done for it, whichever way it came. left_s: seconds until nobody wants
        the answer. client: whose limits count, None = nobody's. Raises OverloadedError."""
    def count_overload(self, limit: OverloadLimit) -> None:
        """A request was answered with an OverloadedError of that limit; requests of shared memory count themselves."""
    def overloads(self) -> dict[str, int]:
        """Requests answered so since the start, by the name of the limit in lower case."""
    @property
    def admitted_rows(self) -> int:
        """Rows of all requests that were admitted and are not over."""
    def wait_s(self, lane: Lane) -> float:
        """Seconds that what was admitted has still to read, at the rate of late: of decode, or of both bulk lanes."""
    @property
    def event_fd(self) -> int:
        """Readable when a batch ended; see completions()."""
    def completions(self) -> list[int]:
        """Tags of the batches that ended since the last call; resets event_fd. Never blocks."""
    def submit(
        self,
        keys: Sequence[tuple[int, NDArray[np.int64]]],
        notify: bool = False,
        *,
        group: int = 1,
        columns: tuple[int, int] | None = None,
        lane: Lane = Lane.DECODE,
        deadline_s: float | None = None,
        admission: Admission | None = None,
    ) -> Batch:
        """Start reading rows. keys: (layer id, ids [n, W]) with the same n and W in every item; ids may be
        strided views, -1 = zero row. notify: report the tag through event_fd.

        group: 8 when every run of 8 columns is a row group, else 1. columns: (begin, end) of the W to answer;
        ids outside of it only say which group a row belongs to. deadline_s: seconds from now after which reads
        that have not started are given up. admission: of the request it is a part of.

        Raises ValueError naming layer, position and id when an id is out of range or a layer is unknown,
        OverloadedError when the budget is used up.
        """
    def copy_hits(
        self,
        keys: Sequence[tuple[int, NDArray[np.int64]]],
        format: Format,
        out: NDArray[np.uint8],
        *,
        group: int = 1,
        columns: tuple[int, int] | None = None,
        lane: Lane = ...,
        admission: Admission | None = None,
    ) -> tuple[int, int, int, int, int, int, int] | None:
        """Rows that are all in the cache, copied as they are looked up: what a batch would give, and faster.
        keys, group, columns, admission as submit; lane: what it is counted under; out: uint8, written as
        [n, L, columns, row].

        Returns stats as Batch.stats; None when it takes a batch, and then some of out may have been written.
        Raises ValueError when out has another size than these rows, or layers have no row size in common.
        """
    def populate_cache(self) -> None:
        """Make the memory of all slots ready in the background, as happens anyway once a few of them are used: the
        first row to come to a slot then need not wait for the kernel to clear a huge page."""
    def load_scales(self, layer: int) -> None:
        """Read the layer's scale plane into memory on a native thread; lookups use it as it arrives."""
    def load_resident(self, layer: int) -> None:
        """Read the whole table into memory on a native thread; once all is there, lookups read no disk.
        Raises MemoryError when the kernel refuses the memory."""
    def scale_progress(self, layer: int) -> tuple[int, int, str]:
        """Rows loaded, rows in all, and an error text ("" = none)."""
    def resident_progress(self, layer: int) -> tuple[int, int, str]:
        """As scale_progress."""
    def cache_stats(self) -> dict[str, int]:
        """capacity_bytes and slot_bytes of rows, slots, used; since start, in groups: hits (found whole), misses (rows
        were read), joined (another batch was reading them), overflows (no slot could be had), evictions; and
        ready_bytes, how much of capacity_bytes populate_cache has made ready. Empty without a cache."""
    def cached_groups(
        self, layer: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8]]:
        """What the cache holds of a layer: rows of the group (8 or 1) [n], row ids [n, 8], mask of the rows held
        [n], heat 0..3 [n]."""
    def in_flight_bytes(self) -> int: ...
    def totals(self, lane: Lane) -> tuple[int, int, int, int, int, int, int]:
        """Batch.stats of all batches and hits of a lane since the start, those that failed included."""
    def converted(self, format: Format) -> tuple[int, int]:
        """(ns, bytes) since the start: time that threads spent copying and converting rows into answers of a format,
        and what they wrote. With rows that copy_hits copied, the time of looking them up."""
    @property
    def checksum_errors(self) -> int:
        """Records read that are not the row they should be."""
    @property
    def failed_files(self) -> list[int]:
        """The reader's numbers of files that a read has failed on, of copies that are not their table's only one."""
    def close(self) -> None:
        """Wait for reads in flight and stop the threads."""

# --------------------------------------------------------------------------------- shared memory

class ShmLostError(Exception):
    """The server has ended, or ended this client."""

class ShmRefusedError(Exception):
    """The server does not let this client in, and says why."""

class ShmServed:
    """What a shared-memory server answers from."""

    def __init__(
        self,
        *,
        engine: Engine,
        reader: Reader,
        hash: NgramHash | None,
        layers: Sequence[int],
        tables: Sequence[tuple[int, int, RowKind, bytes]],
        columns: int,
        group_rows: int,
        token_map_digest: bytes,
        hash_digest: bytes,
        sealed: bool,
    ) -> None:
        """layers: of the hash's planes, in order. tables: (layer, rows, kind, digest of 32 bytes), ascending. Digests
        of token map and hash are empty without a hash. sealed: rows carry checksums, so files that were written to
        need no look."""

class ShmServer:
    """Serves the shared-memory channel (docs/shared-memory.md) from native threads. Not usable after fork."""

    def __init__(
        self,
        served: ShmServed,
        *,
        server_id: bytes,
        listener: int,
        group: int | None,
        request_rows: int,
        admission: AdmissionLimits,
        decode_rows: int,
        block_bytes: int,
        budget_wait_s: float,
        clients: int,
        client_bytes: int,
        total_bytes: int,
        spin_us: int,
    ) -> None:
        """listener: descriptor of a listening SOCK_SEQPACKET socket, which is taken over. group: id of a group that
        may attach, besides root and the process' own user."""
    def reopen(self, served: ShmServed) -> None:
        """Answer requests from other tables, from the next on; clients stay attached."""
    @property
    def settled(self) -> bool:
        """Whether all requests that began before the last `reopen` are over."""
    def drain(self) -> None:
        """Refuse new clients and new requests."""
    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
    def close(self) -> None:
        """Give up what is under way and end all threads; before the engine is closed."""
    def counts(self) -> dict[str, int]:
        """clients and bytes (of their memory files) now; requests since start."""
    def failures(self) -> dict[int, int]:
        """Requests of these that were not answered with rows, by status as gRPC numbers it."""
    def latencies(self) -> list[tuple[Lane, Format, list[int], int]]:
        """(lane, format, counts, sum in ns) of those that were: from when each was taken up until its answer was there.
        Counts as in Reader.read_latencies."""
    @property
    def damage(self) -> str:
        """The first row found truncated or with a wrong checksum, in words; "" = none."""
    def take_notes(self) -> list[str]:
        """Clients that were not let in or were shown out since the last call, and why."""
    def note_requests(self, bytes: int) -> None:
        """Note requests that are taken up from now on, as long as their keys take no more memory than this until they
        are dropped; 0 = no more of them."""
    def take_requests(self) -> tuple[list[ShmRequest], int]:
        """What was noted since the last call, in order, and how many more had no room. Works after `close`."""

class ShmRequest:
    """A request that was checked, as ShmServer.take_requests gives it."""

    @property
    def at_ns(self) -> int:
        """When it was let in, as time.monotonic_ns tells it."""
    @property
    def lane(self) -> Lane: ...
    @property
    def kind(self) -> Literal["tokens", "blocks", "rows"]: ...
    @property
    def format(self) -> Format: ...
    @property
    def columns(self) -> tuple[int, int]: ...
    @property
    def names_layers(self) -> bool:
        """False: tokens, of all layers that are served."""
    @property
    def sequences(self) -> list[tuple[bytes, bytes]]:
        """(tokens, look-back) of each, int32 little-endian; none but of tokens."""
    @property
    def ids(self) -> list[tuple[int, NDArray[np.int64]]]:
        """(layer, row ids [T, columns of a layer, or 1 of a list of rows]); views, which keep this alive."""

class ShmTicket:
    """A request, and the memory of its answer. Safe to share between threads; dropped, it is released once no array of
    it is left."""

    def wait(self, timeout_s: float | None = None, spin_us: int = 0) -> bool:
        """False on time-out. Ctrl-C is honoured. Raises ShmLostError, RuntimeError once it is released."""
    @property
    def answer(self) -> tuple[int, str, int, int, tuple[int, ...], int]:
        """Status as gRPC numbers it, sentence, bytes of the rows, bytes of one, Batch.stats, milliseconds until the
        same request may be let in (0: unknown). After wait()."""
    @property
    def rows(self) -> NDArray[np.uint8]:
        """uint8[payload_bytes], in shared memory."""
    @property
    def mask(self) -> NDArray[np.uint8]:
        """uint8[mask_bytes], in shared memory."""
    def release(self) -> None:
        """Give the memory back at once: arrays of it are not to be used any more."""

class ShmClient:
    """Attached to one server. Safe to share between threads; not usable after fork."""

    def __init__(self, path: str, data_bytes: int, timeout_s: float) -> None:
        """Raises OSError when nobody serves there, ShmRefusedError, RuntimeError for a server that makes no sense."""
    @property
    def server_id(self) -> bytes: ...
    @property
    def alive(self) -> bool: ...
    @property
    def data(self) -> NDArray[np.uint8]:
        """The whole data area, uint8[bytes]."""
    def submit(
        self,
        *,
        kind: int,
        keys: list[NDArray[Any] | bytes],
        positions: int,
        sequences: int = 0,
        history: int = 0,
        layers: int = 0,
        pins: int = 0,
        column_begin: int = 0,
        column_end: int = 0,
        format: Format,
        lane: int = 0,
        id_bytes: int = 0,
        timeout_ns: int = 0,
        payload_bytes: int,
        mask_bytes: int = 0,
        wait_s: float | None = None,
    ) -> ShmTicket | None:
        """Send a request as docs/shared-memory.md lays it out; keys are its parts, contiguous, one behind the other.
        None when wait_s passed without a free slot and room. Raises ValueError for what the data area cannot hold,
        ShmLostError."""
    def close(self) -> None:
        """Take no more requests. Answers in use stay until they are released."""

SHM_VERSION: int
SHM_SLOTS: int

def unique_ids(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Distinct ids of a flat array in order of first appearance, and the inverse; -1 is left out and
    its inverse is -1."""

# --------------------------------------------------------------------------------------- store

def crc32c(data: bytes, crc: int = 0, portable: bool = False) -> int:
    """CRC-32C of `data`, going on from the CRC of the bytes before it. portable: without the CPU's
    instruction, for tests."""

def record_seal(uuid: bytes, layer: int, row: int, packed: bytes) -> int:
    """The CRC-32C that follows a packed row in a store: over UUID, u32 layer, u64 row and the row."""

def record_offset(kind: RowKind, row: int) -> int:
    """Where a row's record begins, in bytes from its table's first page."""

def records_per_page(kind: RowKind) -> int:
    """29 for FP4, 15 for FP8."""

def pack_rows(
    source: RowKind,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    first: int,
    kind: RowKind,
    out: NDArray[np.uint8],
) -> tuple[NDArray[np.int64], NDArray[np.uint8], int]:
    """Write rows packed as `kind` into out [n * packed_row_bytes(kind)], re-coded where `source` differs.

    codes [n, 128 or 256] and scales [n, 8] as `source` stores them; rows may be strided, so that interleaved
    rows need no copy. FP8 -> FP4 rounds by the public re-pack's rule, FP4 -> FP8 is exact.
    Returns the suspect rows' ids, counted from `first`, why each is (NAN_CODE | SCALE_255), and the number of blocks
    that FP4's largest scale had to clip. Raises ValueError for shapes that do not fit.
    """

def seal_pages(
    source: RowKind,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    first: int,
    kind: RowKind,
    uuid: bytes,
    layer: int,
    origin: int,
    pages: NDArray[np.uint8],
) -> tuple[NDArray[np.int64], NDArray[np.uint8], int]:
    """As pack_rows, but as sealed records of a store: pages [p * PAGE_BYTES] begins with the record of row
    `origin`, the first of a page, and gets those of rows `first` ... The rest of the last row's page is zeroed.
    """

def check_pages(
    pages: NDArray[np.uint8], first: int, count: int, kind: RowKind, uuid: bytes, layer: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Check the pages of `count` rows from `first`, the first of a page.

    Returns the ids of rows whose seal does not match, and the pages (counted from the table's first) whose
    padding is not zero.
    """

def row_cosines(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], packed_fp4: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """float64[n]: cosine between FP8 rows (codes [n, 256], scales [n, 8]) and packed FP4 rows [n, 136]."""

def reserve_file(fd: int, bytes: int) -> int:
    """Allocate the file's first `bytes`, as fallocate does. Returns 0 or an errno."""

PAGE_BYTES: int
NAN_CODE: int
SCALE_255: int

# ---------------------------------------------------------------------------------------- probes

def probe_io_uring() -> dict[str, Any]:
    """Set up a ring as the reader does: {"ok": bool, "errno": int, "reason": words, "" when ok,
    "setup_flags": IORING_SETUP_* names without the prefix}."""

def recording_ns(reads: int, together: int) -> float:
    """What counting a read and its latencies costs, in ns: of so many reads, those that come together sharing a look at
    the clock. For bench/metrics.py. Raises ValueError when `together` is 0."""

def statx_dioalign(path: str) -> tuple[int, int]:
    """(memory alignment, offset alignment) that statx reports; (0, 0) when it reports none."""

def hardware_queues(path: str) -> int:
    """Hardware queues of the block device that holds the file, the default number of rings; 1 when that
    cannot be told."""
