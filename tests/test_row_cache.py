"""Row groups and their cache: every row exact and read once, whoever asks, in whatever pieces."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.native import BACKENDS, PACKED, ROWS, Tables, drain, random_ids

from engram_kernels import _core
from engram_kernels._core import Lane

SLOT_BYTES = {_core.RowKind.FP4: 1088, _core.RowKind.FP8: 2112}
SET_BYTES = {kind: 64 + 16 * (64 + slot) for kind, slot in SLOT_BYTES.items()}
PLENTY = 1 << 28


@pytest.fixture(params=[_core.RowKind.FP4, _core.RowKind.FP8], ids=["fp4", "fp8"])
def tables(tmp_path: Path, request: pytest.FixtureRequest) -> Tables:
    """Two layers of random rows."""
    return Tables(tmp_path / "tables.bin", request.param)


@pytest.fixture
def fp4(tmp_path: Path) -> Tables:
    """The same, FP4 only, where the format makes no difference."""
    return Tables(tmp_path / "tables.bin", _core.RowKind.FP4)


def groups_of(layer: int, count: int, seed: int = 0) -> NDArray[np.int64]:
    """Blocks [count, 24] without zero rows, no two rows of it alike if the table is large enough."""
    rng = np.random.default_rng(seed)
    return rng.choice(ROWS[layer], (count, 24), replace=count * 24 > ROWS[layer]).astype(np.int64)


def whole(engine: _core.Engine, layer: int, ids: NDArray[np.int64], **options: Any) -> _core.Batch:
    """A finished batch of whole blocks."""
    batch = engine.submit([(layer, ids)], group=8, **options)
    assert batch.wait(60)
    return batch


def rows_of(tables: Tables, layer: int, batch: _core.Batch, ids: NDArray[np.int64]) -> None:
    """Assert that the batch holds the rows of ids [n, columns]."""
    assert batch.gather(0, len(ids), PACKED) == tables.expected(layer, ids).tobytes()


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("cache", ["none", "one set", "few sets", "plenty"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_exact_in_any_cache_and_any_columns(tables: Tables, backend: str, cache: str) -> None:
    sets = {"none": 0, "one set": 1, "few sets": 5}
    cache_bytes = sets[cache] * SET_BYTES[tables.kind] if cache in sets else PLENTY
    engine = tables.open(backend, cache_bytes=cache_bytes, threads=0 if backend == "mmap" else 4)
    assert engine.cache_stats().get("slots", 0) == (
        sets[cache] * 16 if cache in sets else PLENTY // SET_BYTES[tables.kind] * 16
    )
    rng = np.random.default_rng(5)
    for columns in ((0, 24), (0, 12), (12, 24), (6, 12), (3, 6), (21, 24), (5, 17), (7, 8), (8, 9)):
        for positions in (1, 40):
            ids = {layer: random_ids(layer, (positions, 24), int(rng.integers(50))) for layer in ROWS}
            batch = engine.submit(list(ids.items()), group=8, columns=columns, lane=Lane.PREFILL)
            assert batch.wait(60)
            got = np.frombuffer(batch.gather(0, positions, PACKED), np.uint8)
            got = got.reshape(positions, 2, columns[1] - columns[0], -1)
            for at, layer in enumerate(ROWS):
                wanted = ids[layer][:, columns[0] : columns[1]]
                np.testing.assert_array_equal(got[:, at], tables.expected(layer, wanted))
                picks = rng.integers(0, wanted.size, 30)
                rows = np.frombuffer(batch.pick(at, picks, PACKED), np.uint8).reshape(30, -1)
                np.testing.assert_array_equal(rows, tables.expected(layer, wanted.reshape(-1)[picks]))
    engine.close()


def test_what_was_read_once_is_read_no_more(tables: Tables) -> None:
    engine = tables.open(cache_bytes=PLENTY)
    ids = groups_of(1, 100)
    first = whole(engine, 1, ids)
    again = whole(engine, 1, np.concatenate([ids[50:], ids[:50]]))
    assert first.stats[:5] == (2400, 2400, 0, 0, 4800)  # codes and scales, a read each
    assert again.stats[:5] == (2400, 2400, 2400, 0, 0)
    assert first.stats[6] == again.stats[6] == 300
    rows_of(tables, 1, again, np.concatenate([ids[50:], ids[:50]]))
    # One n-gram over and over costs one group a request, and none in all when it is known.
    assert whole(engine, 1, np.repeat(ids[:1], 500, axis=0)).stats[:5] == (12_000, 24, 24, 0, 0)
    engine.close()


def test_all_ids_identify_a_group(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    ids = groups_of(1, 1)
    other = ids.copy()
    other[0, 7] = (ids[0, 7] + 1) % ROWS[1]  # seven rows in common with the first order's group
    whole(engine, 1, ids)
    batch = whole(engine, 1, other)
    assert batch.stats[6] == 3
    assert batch.stats[2] == 16
    rows_of(fp4, 1, batch, other)
    # The same ids in the other layer are other rows.
    ids %= ROWS[14]
    rows_of(fp4, 14, whole(engine, 14, ids), ids)
    engine.close()


def test_a_column_range_reads_and_keeps_only_its_rows(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    ids = groups_of(1, 10)
    reads = []
    for columns in ((0, 3), (0, 8), (5, 11), (0, 24), (0, 24)):
        batch = whole(engine, 1, ids, columns=columns)
        rows_of(fp4, 1, batch, ids[:, slice(*columns)])
        reads.append(batch.stats[4] // 20)
    assert reads == [3, 5, 3, 13, 0]
    engine.close()


def test_ids_outside_the_columns_are_never_looked_at(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    ids = groups_of(1, 10)
    wild = ids.copy()
    wild[:, 12:] = np.random.default_rng(0).integers(-(2**62), 2**62, (10, 12))
    rows_of(fp4, 1, whole(engine, 1, wild, columns=(0, 12)), ids[:, :12])
    # Ids that agree in 32 bits are one group to the cache, whose rows are still the table's own.
    wild[:, 12:] = ids[:, 12:] + (1 << 32)
    rows_of(fp4, 1, whole(engine, 1, wild, columns=(0, 12)), ids[:, :12])
    rows_of(fp4, 1, whole(engine, 1, ids), ids)
    engine.close()


def test_a_group_with_zero_rows_in_it_still_answers_the_others(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    ids = groups_of(1, 30)
    ids[np.random.default_rng(1).random(ids.shape) < 0.3] = -1
    ids[4] = -1
    for _ in range(2):
        rows_of(fp4, 1, whole(engine, 1, ids), ids)
    engine.close()


# ---------------------------------------------------------------------------------------- shared reads


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_at_once_read_each_row_once(fp4: Tables, backend: str) -> None:
    engine = fp4.open(backend, cache_bytes=PLENTY, depth=2, bulk_depth=1)
    ids = groups_of(1, 150)
    batches: list[_core.Batch] = []
    lock = threading.Lock()

    def ask(lane: Lane, part: NDArray[np.int64]) -> None:
        batch = engine.submit([(1, part)], group=8, lane=lane)
        with lock:
            batches.append(batch)
        assert batch.wait(60)
        rows_of(fp4, 1, batch, part)

    threads = [
        threading.Thread(target=ask, args=(lane, part))
        for lane in (Lane.PREFETCH, Lane.PREFILL, Lane.DECODE, Lane.PREFILL)
        for part in (ids, ids[100:], ids[::-1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(batches) == len(threads)
    assert sum(batch.stats[4] for batch in batches) == 2 * ids.size
    for batch in batches:
        rows, distinct, cached, joined, _, _, _ = batch.stats
        assert rows == distinct >= cached + joined
    engine.close()


def test_decode_takes_over_what_waits_in_a_lower_lane(fp4: Tables) -> None:
    engine = fp4.open("pread", cache_bytes=PLENTY, depth=1)
    ids = groups_of(1, 200)
    bulk = engine.submit([(1, ids)], group=8, lane=Lane.PREFETCH)
    last = whole(engine, 1, ids[-1:])
    assert not bulk.done  # of which 9,000 reads wait in line, one by one
    rows_of(fp4, 1, last, ids[-1:])
    assert bulk.wait(60)
    rows_of(fp4, 1, bulk, ids)
    assert bulk.stats[4] + last.stats[4] == 2 * ids.size
    engine.close()


def test_a_dropped_batch_still_reads_what_another_waits_for(fp4: Tables) -> None:
    engine = fp4.open("pread", cache_bytes=PLENTY, depth=1)
    ids = groups_of(1, 200)
    first = engine.submit([(1, ids)], group=8, lane=Lane.PREFILL)
    second = engine.submit([(1, ids[60:90])], group=8, lane=Lane.PREFILL)
    del first
    assert second.wait(60)
    rows_of(fp4, 1, second, ids[60:90])
    assert second.stats[3] > 0
    # What nobody waited for was given up, and not kept as if it had been read.
    rows_of(fp4, 1, whole(engine, 1, ids), ids)
    engine.close()


@pytest.mark.parametrize("cache_bytes", [0, PLENTY])
def test_reads_that_have_not_begun_by_the_deadline_are_given_up(fp4: Tables, cache_bytes: int) -> None:
    engine = fp4.open("pread", cache_bytes=cache_bytes, depth=1)
    ids = groups_of(1, 200)
    late = engine.submit([(1, ids)], group=8, deadline_s=0.0)
    assert late.wait(60)
    with pytest.raises(_core.RowError, match="timed out") as raised:
        late.check()
    assert raised.value.error == errno.ETIMEDOUT
    assert late.stats[4] < ids.size
    rows_of(fp4, 1, whole(engine, 1, ids, deadline_s=60.0), ids)
    for never in (float("inf"), float("nan"), 1e300):
        rows_of(fp4, 1, whole(engine, 1, ids[:1], deadline_s=never), ids[:1])
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_read_is_not_kept_and_fails_those_who_wanted_it(fp4: Tables, backend: str) -> None:
    content = fp4.path.read_bytes()
    engine = fp4.open(backend, cache_bytes=PLENTY, depth=2)
    lost = len(content) - 4096 * 20
    os.truncate(fp4.path, lost)  # scales of layer 14's last rows
    bad = groups_of(14, 50)
    bad[:, 8:16] = np.arange(ROWS[14] - 8, ROWS[14])
    batches = [engine.submit([(14, bad)], group=8, lane=lane) for lane in (Lane.PREFILL, Lane.DECODE)]
    good = [engine.submit([(14, bad)], group=8, columns=columns) for columns in ((0, 8), (16, 24))]
    for batch in batches:
        assert batch.wait(60)
        with pytest.raises(_core.RowError, match="truncated"):
            batch.check()
    for batch, columns in zip(good, ((0, 8), (16, 24)), strict=True):
        assert batch.wait(60)
        if (bad[:, slice(*columns)] * 8).max() < lost - (len(content) - ROWS[14] * 8):
            rows_of(fp4, 14, batch, bad[:, slice(*columns)])
    with fp4.path.open("r+b") as file:
        file.write(content)
    rows_of(fp4, 14, whole(engine, 14, bad), bad)
    engine.close()


# ------------------------------------------------------------------------------------------ the cache


def test_pinned_slots_are_never_given_to_another(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=SET_BYTES[fp4.kind])
    held = [(ids, whole(engine, 1, ids)) for ids in (groups_of(1, 4, seed) for seed in range(20))]
    stats = engine.cache_stats()
    assert (stats["slots"], stats["used"], stats["evictions"]) == (16, 16, 0)
    assert stats["overflows"] == 20 * 12 - 16
    for ids, batch in held:
        rows_of(fp4, 1, batch, ids)
    held.clear()
    ids = groups_of(1, 4, 99)
    rows_of(fp4, 1, whole(engine, 1, ids), ids)
    assert engine.cache_stats()["evictions"] == 12
    engine.close()


def test_a_cache_made_ready_holds_its_memory_and_serves_meanwhile(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    before = resident_bytes()
    engine.populate_cache()
    ids = groups_of(1, 100)
    rows_of(fp4, 1, whole(engine, 1, ids), ids)
    engine.populate_cache()  # under way, or done
    deadline = time.monotonic() + 60
    while (stats := engine.cache_stats())["ready_bytes"] < stats["capacity_bytes"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert resident_bytes() - before >= stats["capacity_bytes"]
    rows_of(fp4, 1, whole(engine, 1, ids), ids)
    engine.close()
    fp4.open().populate_cache()  # there is no cache


def test_what_is_asked_for_often_outlives_what_passes_by(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=4 * SET_BYTES[fp4.kind])  # 64 groups
    hot = groups_of(1, 4, 1)
    for _ in range(3):
        whole(engine, 1, hot)
    kept = 0
    for seed in range(10, 30):
        whole(engine, 1, groups_of(1, 8, seed))  # 24 groups nobody asks for again
        kept += whole(engine, 1, hot).stats[2]
    assert kept > 0.8 * 20 * hot.size
    engine.close()


def test_the_cache_says_what_it_holds(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    ids = groups_of(14, 20)
    whole(engine, 14, ids, columns=(0, 12))
    whole(engine, 14, ids[:5], columns=(0, 12))
    single = engine.submit([(14, np.array([[7]]))])
    assert single.wait(60)
    rows, groups, masks, heats = engine.cached_groups(14)
    assert sorted(rows.tolist()) == [1] + [8] * 40
    held = {
        tuple(group): (mask, heat) for group, mask, heat in zip(groups.tolist(), masks, heats, strict=True)
    }
    for position, block in enumerate(ids.tolist()):
        heat = 1 if position < 5 else 0
        assert held[tuple(block[:8])] == (0xFF, heat)
        assert held[tuple(block[8:16])] == (0x0F, heat)
    assert held[(7, 0, 0, 0, 0, 0, 0, 0)] == (1, 0)
    assert engine.cached_groups(1)[1].shape == (0, 8)
    engine.close()


def test_an_engine_without_a_cache_says_so(fp4: Tables) -> None:
    for too_little in (0, SET_BYTES[fp4.kind] - 1):
        engine = fp4.open(cache_bytes=too_little)
        assert engine.cache_stats() == {}
        assert len(engine.cached_groups(1)[0]) == 0
        engine.close()


# ------------------------------------------------------------------------------------ whole in memory


def test_a_resident_table_reads_no_disk(tables: Tables) -> None:
    engine = tables.open(cache_bytes=0)
    assert engine.resident_progress(1) == (0, ROWS[1], "")
    engine.load_resident(1)
    while engine.resident_progress(1)[0] < ROWS[1]:
        time.sleep(0.001)
    for positions, columns in ((1, (0, 24)), (300, (0, 24)), (300, (5, 17))):
        ids = random_ids(1, (positions, 24), positions)
        batch = whole(engine, 1, ids, columns=columns)
        rows_of(tables, 1, batch, ids[:, slice(*columns)])
        wanted = ids[:, slice(*columns)]
        assert batch.stats[1] == batch.stats[2] == (wanted >= 0).sum()
        assert batch.stats[4] == 0
    ids = random_ids(14, (10, 24))
    batch = engine.submit([(1, ids % ROWS[1]), (14, ids)], group=8)
    assert batch.wait(60)
    got = np.frombuffer(batch.gather(0, 10, PACKED), np.uint8).reshape(10, 2, 24, -1)
    np.testing.assert_array_equal(got[:, 1], tables.expected(14, ids))
    engine.close()


def test_a_table_that_cannot_be_loaded_whole_is_read_from_disk(fp4: Tables) -> None:
    engine = fp4.open()
    os.truncate(fp4.path, fp4.path.stat().st_size - 4096)
    engine.load_resident(14)
    while not engine.resident_progress(14)[2]:
        time.sleep(0.001)
    loaded, rows, error = engine.resident_progress(14)
    assert loaded < rows
    assert str(fp4.path) in error
    assert "truncated" in error
    ids = groups_of(14, 10) % 1000
    rows_of(fp4, 14, whole(engine, 14, ids), ids)
    engine.close()


# -------------------------------------------------------------------------------------------- copies


def test_equal_copies_on_two_devices_share_the_reads(fp4: Tables, tmp_path: Path) -> None:
    """The second copy, on another file system, has other scales here: so that we see whose rows come."""
    shared_memory = Path("/dev/shm") / f"engram-test-{os.getpid()}"
    code_plane, scale_plane = _core.Plane(0, 333, 128), _core.Plane(0, 333 + ROWS[1] * 128, 8)
    content = bytearray(fp4.path.read_bytes())
    begin = 333 + ROWS[1] * 128
    content[begin : begin + ROWS[1] * 8] = b"\x55" * (ROWS[1] * 8)
    shared_memory.write_bytes(content)
    try:
        reader = _core.Reader([str(fp4.path), str(shared_memory)], depth=8)
        copies = [
            _core.Planes(code_plane, scale_plane),
            _core.Planes(_core.Plane(1, 333, 128), _core.Plane(1, begin, 8)),
        ]
        engine = _core.Engine(reader, [_core.Table(1, ROWS[1], fp4.kind, copies)])
        ids = groups_of(1, 200)
        batch = whole(engine, 1, ids)
        got = np.frombuffer(batch.gather(0, 200, PACKED), np.uint8).reshape(-1, 136)
        np.testing.assert_array_equal(got[:, :128], fp4.rows[1][ids.reshape(-1), :128])
        second = (got[:, 128:] == 0x55).all(axis=1)
        np.testing.assert_array_equal(got[~second], fp4.rows[1][ids.reshape(-1)[~second]])
        assert 0 < second.sum() < len(second)
        engine.close()
        reader.close()
    finally:
        shared_memory.unlink()


def test_dropped_and_kept_batches_leave_nothing_behind(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=2 * SET_BYTES[fp4.kind], depth=4)
    for seed in range(30):
        ids = groups_of(1, 40, seed % 7)
        kept = engine.submit([(1, ids)], group=8, lane=list(Lane)[seed % 3])
        engine.submit([(1, ids[::-1])], group=8, lane=list(Lane)[(seed + 1) % 3])
        if seed % 2:
            assert kept.wait(60)
            rows_of(fp4, 1, kept, ids)
    del kept
    drain(engine)
    engine.close()
