"""Tables opened in every way that changes how rows reach the reader: none may change a row."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import store as oracle
from support.serving import until
from support.truth import IMAGE, Truth, same

from engram_client import DataLossError, EngramMemory
from engram_kernels import _core
from engram_server.convert import convert
from engram_server.memory import Memory, MemoryOptions
from engram_server.tables.errors import TableError
from engram_server.tables.synth import synthesise
from engram_server.tokens import TokenMapError

TOKENS = [0, 3, 17, 17, IMAGE, *range(1000, 1100), 3, 17, 17]
WAYS: dict[str, dict[str, Any]] = {
    "no cache": {"cache_bytes": 0},
    "a cache of a few sets": {"cache_bytes": 256 << 10},
    "a cache of everything": {"cache_bytes": 256 << 20},
    "one io thread": {"io_threads": 1, "cache_bytes": 0},
    "four io threads": {"io_threads": 4, "io_depth": 16, "bulk_depth": 4},
    "scales on disk": {"scales": "disk"},
    "scales in memory": {"scales": "memory"},
    "resident": {"resident": True},
    "pread": {"backend": "pread"},
    "mmap": {"backend": "mmap", "cache_bytes": 256 << 10},
    "two replicas": {"replicas": 2, "cache_bytes": 0},
    "packed": {"packed": True},
    "packed, no cache, one io thread": {"packed": True, "cache_bytes": 0, "io_threads": 1},
    "packed, a cache of a few sets, four io threads": {
        "packed": True,
        "cache_bytes": 256 << 10,
        "io_threads": 4,
    },
    "packed, resident": {"packed": True, "resident": True},
    "packed, pread": {"packed": True, "backend": "pread", "cache_bytes": 0},
    "packed, mmap": {"packed": True, "backend": "mmap", "cache_bytes": 0},
    "packed, two replicas in place": {"packed": True, "replicas": 2, "cache_bytes": 0},
}


@pytest.fixture(scope="module", params=["fp4", "fp8"])
def truth(request: pytest.FixtureRequest) -> Truth:
    return Truth(request.getfixturevalue(f"{request.param}_checkpoint"), request.param)


@pytest.fixture(scope="module")
def copies(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp("copies") / name for name in ("a", "b")]
    for path in made:
        shutil.copytree(truth.path, path)
    return made


@pytest.fixture(scope="module")
def store(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "tables.engram"
    convert(truth.path, path)
    return path


@pytest.fixture(params=WAYS)
def memory(
    request: pytest.FixtureRequest, truth: Truth, copies: list[Path], store: Path
) -> Iterator[EngramMemory]:
    options = dict(WAYS[request.param])
    path = store if options.pop("packed", False) else truth.path
    if "replicas" in options:
        options["replicas"] = tuple(copies)
    with EngramMemory.open(path, **options) as opened:
        yield opened


def test_every_row_is_exact_the_second_time_too(memory: EngramMemory, truth: Truth) -> None:
    ids = truth.ids(TOKENS, [9, -1])
    for _ in range(2):
        found = memory.lookup(TOKENS, history=[9, -1], format="packed")
        assert same(found.values, truth.values(ids, "packed"))
        for columns in ((0, 12), (6, 9), (11, 22)):
            found = memory.lookup(TOKENS, history=[9, -1], columns=columns, format="fp32")
            assert same(found.values, truth.values(ids[:, :, slice(*columns)], "fp32"))
        found = memory.lookup(TOKENS, history=[9, -1], unique=True)
        assert same(found.values, truth.values(ids, "bf16"))
        rows = [5, 0, truth.oracle.rows(14) - 1, -1, 5]
        assert same(memory.lookup_rows(14, rows).values, truth.rows(14, rows, "bf16"))


def test_resident_tables_are_read_once(truth: Truth) -> None:
    with Memory.open(truth.path, MemoryOptions(resident=True)) as memory:
        assert (memory.loads, memory.has_cache, memory.cache_state().capacity_bytes) == ("tables", False, 0)
        until(lambda: memory.load_progress()[0] == memory.load_progress()[1])
        assert memory.load_progress()[2] == ""
        with EngramMemory(memory) as embedded:
            found = embedded.lookup(TOKENS)
            assert found.stats.reads == 0
            assert same(found.values, truth.values(truth.ids(TOKENS), "bf16"))


def test_a_cache_is_described(truth: Truth) -> None:
    with EngramMemory.open(truth.path, cache_bytes=32 << 20) as memory:
        empty = memory.describe().cache
        assert 0 < empty.capacity_bytes <= 32 << 20
        assert (empty.used_bytes, empty.hits, empty.misses) == (0, 0, 0)
        for _ in range(2):
            memory.lookup(range(100, 200))
        used = memory.describe().cache
        assert (used.hits, used.misses, used.evictions) == (used.misses, used.hits, 0)
        assert used.hits == len(np.unique(truth.ids(range(100, 200)).reshape(-1, 8), axis=0))
        assert used.used_bytes > 0


def test_a_packed_store_takes_one_read_a_row_and_is_the_same_table(truth: Truth, store: Path) -> None:
    with (
        EngramMemory.open(store, cache_bytes=0) as packed,
        EngramMemory.open(truth.path, cache_bytes=0, scales="disk") as in_place,
    ):
        digests = [
            [table.digest for table in memory.describe().tables.values()] for memory in (packed, in_place)
        ]
        assert digests[0] == digests[1]
        assert packed.describe().hash_digest == in_place.describe().hash_digest != b""
        stats = packed.lookup(range(100, 120)).stats
        assert stats.reads == stats.distinct
        assert in_place.lookup(range(100, 120)).stats.reads == 2 * stats.reads


@pytest.mark.parametrize("way", [{}, {"cache_bytes": 0}, {"backend": "pread"}, {"backend": "mmap"}])
def test_a_record_that_is_not_its_row_fails_its_request_alone(
    truth: Truth, store: Path, tmp_path: Path, way: dict[str, Any]
) -> None:
    """Damaged, misplaced, or of another store: none of them is ever returned."""
    convert(synthesise(tmp_path / "other", 2000, truth.kind, seed=99).path, tmp_path / "other.engram")
    good, foreign = store.read_bytes(), (tmp_path / "other.engram").read_bytes()
    assert len(foreign) == len(good)
    firsts = {table["layer"]: table["first_page"] for table in oracle.header(good)["tables"]}
    sampled = {layer: {i * truth.oracle.rows(layer) // 4096 for i in range(4096)} for layer in firsts}

    def unsampled(layer: int, at: int) -> int:
        """A row that opening does not read, for then it would be refused at once."""
        return next(row for row in range(at, at + 99) if row not in sampled[layer])

    def record(layer: int, row: int) -> slice:
        at, width = oracle.PAGE * firsts[layer], oracle.ROW_BYTES[truth.kind] + 4
        at += row // oracle.PER_PAGE[truth.kind] * oracle.PAGE + row % oracle.PER_PAGE[truth.kind] * width
        return slice(at, at + width)

    flipped, moved, swapped = unsampled(1, 1000), unsampled(1, 2000), unsampled(14, 3000)
    damaged = bytearray(good)
    damaged[record(1, flipped).start + 3] ^= 4
    damaged[record(1, moved)] = good[record(1, moved + 1)]
    damaged[record(14, swapped)] = foreign[record(14, swapped)]
    (tmp_path / "damaged.engram").write_bytes(damaged)
    with EngramMemory.open(tmp_path / "damaged.engram", **way) as memory:
        for layer, row in ((1, flipped), (1, moved), (14, swapped)):
            for _ in range(2):  # nor is it cached
                with pytest.raises(DataLossError, match=rf"layer {layer}, row {row}\b.*checksum"):
                    memory.lookup_rows(layer, [7, row, 8])
        beside = [flipped - 1, flipped + 1, moved + 1]
        assert same(memory.lookup_rows(1, beside).values, truth.rows(1, beside, "bf16"))


def test_a_store_whose_digest_is_not_that_of_its_rows_is_refused(store: Path, tmp_path: Path) -> None:
    content = store.read_bytes()
    facts = oracle.header(content)
    facts["tables"][1]["digest"] = facts["tables"][0]["digest"]
    (tmp_path / "a.engram").write_bytes(oracle.header_page(facts) + content[4096:])
    with pytest.raises(TableError, match="rows of layer 14 do not give the digest in the header"):
        Memory.open(tmp_path / "a.engram")
    facts = oracle.header(content) | {"token_map_sha256": "0" * 64}
    (tmp_path / "a.engram").write_bytes(oracle.header_page(facts) + content[4096:])
    with pytest.raises(TokenMapError, match=r"yields a token map with sha256 .*, but .* was made with 0000"):
        Memory.open(tmp_path / "a.engram")


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_what_a_copy_cannot_give_is_read_from_the_next(
    truth: Truth, store: Path, tmp_path: Path, cache_bytes: int
) -> None:
    paths = [tmp_path / name for name in ("a.engram", "b.engram", "c.engram")]
    for path in paths:
        shutil.copy(store, path)
    with Memory.open(paths[0], MemoryOptions(replicas=tuple(paths[1:]), cache_bytes=cache_bytes)) as memory:
        ids = np.arange(memory.tables[1].rows)[-3_000:]
        assert memory.failed_copies() == []
        for broken, path in enumerate(paths, start=1):
            os.truncate(path, 8192)
            for seed in range(3):
                wanted = np.random.default_rng(seed).permutation(ids)
                batch = memory.engine.submit([(1, wanted.reshape(-1, 1))])
                batch.wait()
                if broken == len(paths):
                    with pytest.raises(_core.RowError, match="it was truncated"):
                        batch.gather(0, len(ids), _core.Format.PACKED)
                    continue
                found = batch.gather(0, len(ids), _core.Format.PACKED)
                assert found == truth.rows(1, wanted, "packed").tobytes()
                assert set(memory.failed_copies()) <= {str(path) for path in paths[:broken]}
        assert set(memory.failed_copies()) == {str(path) for path in paths}


def test_what_is_no_copy_is_refused(truth: Truth, tmp_path: Path) -> None:
    other_rows = synthesise(tmp_path / "rows", 2000, truth.kind, seed=99).path
    other_shape = synthesise(tmp_path / "shape", 300, truth.kind, seed=4).path
    other_store = tmp_path / "rows.store"
    convert(other_rows, other_store)
    for path, sentence in (
        (other_rows, r"rows is no copy of .*: its table of layer 1 has other rows"),
        (other_shape, r"shape is no copy of .*: its tables have another shape"),
        (other_store, rf"rows\.store is no copy of {truth.path}: its table of layer 1 has other rows"),
        (tmp_path / "absent", "absent"),
    ):
        with pytest.raises((TableError, OSError), match=sentence):
            Memory.open(truth.path, MemoryOptions(replicas=(path,)))
