"""Hot sets: what is in the file, what a server does with it, and what `warm` counts."""

import hashlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.serving import serving, until
from support.truth import IMAGE, Truth, same

from engram_client import EngramClient, EngramMemory
from engram_kernels import _core
from engram_server import warm as warming
from engram_server.corpus import CorpusError
from engram_server.hotset import HotGroups, HotSetError, blocks_of, check_place, read_hot_set, write_hot_set
from engram_server.hotset_keeper import HotSetKeeper, cached_groups
from engram_server.memory import Memory, MemoryOptions, TableState
from engram_server.prefetch import read_into_cache
from engram_server.terms import Terms
from engram_server.tokens import encode

TABLES = {
    1: TableState(1, 1000, _core.RowKind.FP4, 136, b"\1" * 32),
    14: TableState(14, 2**31, _core.RowKind.FP4, 136, b"\2" * 32),
}
TOKENS = list(range(3000, 3100))


def groups(layer: int, count: int, rows: int = 1000) -> HotGroups:
    random = np.random.default_rng(count)
    ids = random.integers(-1, rows, (count, 8))
    return HotGroups(
        layer,
        random.choice(np.array([1, 8], np.uint8), count),
        random.integers(1, 256, count).astype(np.uint8),
        ids,
    )


def equal(found: HotGroups, expected: HotGroups) -> bool:
    return (
        found.layer == expected.layer
        and found.group_rows.tolist() == expected.group_rows.tolist()
        and found.masks.tolist() == expected.masks.tolist()
        and found.ids.tolist() == expected.ids.tolist()
    )


# ------------------------------------------------------------------------------------------------ the file


@pytest.fixture
def hot_file(tmp_path: Path) -> Path:
    path = tmp_path / "hot.set"
    write_hot_set(path, TABLES, [groups(1, 5), groups(14, 9000, 2**31)])
    return path


def test_what_is_written_is_read(hot_file: Path) -> None:
    small, large = read_hot_set(hot_file, TABLES, 10_000)
    assert equal(small, groups(1, 5))
    assert equal(large, groups(14, 9000, 2**31))
    assert [len(part) for part in read_hot_set(hot_file, TABLES, 3)] == [3, 3]
    assert read_hot_set(hot_file, TABLES, 3)[1].ids.tolist() == large.ids[:3].tolist()
    assert list(hot_file.parent.iterdir()) == [hot_file]


def test_the_file_is_laid_out_as_its_description_says(hot_file: Path) -> None:
    data = hot_file.read_bytes()
    magic, version, length = struct.unpack_from("<8sII", data)
    assert (magic, version) == (b"ENGRMHOT", 1)
    assert json.loads(data[16 : 16 + length]) == {
        "tables": [
            {"layer": 1, "digest": "01" * 32, "id_bytes": 4, "groups": 5},
            {"layer": 14, "digest": "02" * 32, "id_bytes": 8, "groups": 9000},
        ]
    }
    at, expected = 16 + length, groups(1, 5)
    assert list(data[at : at + 5]) == expected.group_rows.tolist()
    assert list(data[at + 5 : at + 10]) == expected.masks.tolist()
    assert np.frombuffer(data, "<i4", 40, at + 10).reshape(5, 8).tolist() == expected.ids.tolist()
    assert len(data) == at + 5 * (2 + 32) + 9000 * (2 + 64) + 32
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()


def test_groups_of_another_table_are_left_out(hot_file: Path) -> None:
    changed = {**TABLES, 14: replace(TABLES[14], digest=b"\3" * 32)}
    assert [part.layer for part in read_hot_set(hot_file, changed, 10)] == [1]
    assert [part.layer for part in read_hot_set(hot_file, {14: TABLES[14]}, 10)] == [14]
    assert read_hot_set(hot_file, {}, 10) == []


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hot.set"
    write_hot_set(path, TABLES, [groups(1, 3)])
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(HotSetError):
            read_hot_set(path, TABLES, 10)
        path.write_bytes(whole[:place])
        with pytest.raises(HotSetError):
            read_hot_set(path, TABLES, 10)
    path.write_bytes(whole + b"\0")
    with pytest.raises(HotSetError):
        read_hot_set(path, TABLES, 10)
    path.write_bytes(whole)
    assert len(read_hot_set(path, TABLES, 10)) == 1


def sealed(head: bytes, body: bytes = b"", version: int = 1) -> bytes:
    data = struct.pack("<8sII", b"ENGRMHOT", version, len(head)) + head + body
    return data + hashlib.sha256(data).digest()


def entry(**changes: Any) -> dict[str, Any]:
    return {"layer": 1, "digest": "01" * 32, "id_bytes": 4, "groups": 0} | changes


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (sealed(b"{}", version=2), "version 2; this server reads version 1"),
        (struct.pack("<8sII", b"ENGRMHOT", 1, 2**31) + bytes(99), "claims a head of 2147483648 bytes"),
        (sealed(b"not json"), "a head that cannot be read"),
        (sealed(b"[]"), "a head that cannot be read"),
        (sealed(b'{"tables": [{}]}'), "a head that cannot be read"),
        (sealed(json.dumps({"tables": [entry(digest="x")]}).encode()), "a head that cannot be read"),
        (sealed(json.dumps({"tables": [entry(groups=1)]}).encode()), "not what its head says"),
        (sealed(json.dumps({"tables": [entry(groups=2**60)]}).encode()), "not what its head says"),
        (sealed(json.dumps({"tables": [entry(groups=-1)]}).encode()), "not what its head says"),
        (sealed(json.dumps({"tables": [entry(id_bytes=3)]}).encode()), "not what its head says"),
        (
            sealed(json.dumps({"tables": [entry(groups=1)]}).encode(), b"\7" + bytes(33)),
            "neither 1 nor 8 rows",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "hot.set"
    path.write_bytes(content)
    with pytest.raises(HotSetError, match=sentence):
        read_hot_set(path, TABLES, 10)


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    check_place(tmp_path / "new")
    (tmp_path / "empty").touch()
    check_place(tmp_path / "empty")
    (tmp_path / "notes").write_text("precious")
    with pytest.raises(HotSetError, match="exists and is not a hot set"):
        check_place(tmp_path / "notes")
    with pytest.raises(HotSetError, match="there is no directory"):
        check_place(tmp_path / "absent" / "hot.set")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HotSetError, match="is not a regular file"):
        check_place(tmp_path / "pipe")


_WRITER = """
import pickle, sys
from engram_server.hotset import write_hot_set
path, tables, sets = pickle.load(sys.stdin.buffer)
while True:
    for hot in sets:
        write_hot_set(path, tables, [hot])
"""


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "hot.set"
    task = pickle.dumps((path, TABLES, [groups(1, 1000), groups(1, 3000)]))
    for attempt in range(10):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", _WRITER], stdin=subprocess.PIPE)
        assert writer.stdin is not None
        with writer.stdin as stdin:
            stdin.write(task)
        until(path.exists)
        time.sleep(0.003 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        (found,) = read_hot_set(path, TABLES, 10_000)
        assert len(found) in (1000, 3000)
    write_hot_set(path, TABLES, [groups(1, 2)])
    assert list(tmp_path.iterdir()) == [path]


# -------------------------------------------------------------------------------------------- in the cache


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


@pytest.fixture
def memory(fp4_checkpoint: Path) -> Iterator[Memory]:
    with Memory.open(fp4_checkpoint, MemoryOptions(cache_bytes=32 << 20)) as opened:
        yield opened


def contents(memory: Memory) -> set[tuple[int, int, int, tuple[int, ...]]]:
    """(layer, rows of the group, mask, ids) of all that is cached."""
    return {
        (part.layer, int(rows), int(mask), tuple(ids))
        for part in cached_groups(memory)
        for rows, mask, ids in zip(
            part.group_rows.tolist(), part.masks.tolist(), part.ids.tolist(), strict=True
        )
    }


def test_a_cache_comes_back_as_it_was(
    memory: Memory, fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    path = tmp_path / "hot.set"
    with EngramMemory(memory) as embedded:
        embedded.lookup(TOKENS)
        embedded.lookup(range(4000, 4050), columns=(3, 6))
        embedded.lookup(range(5000, 5050), layers=[14], columns=(10, 19))
        embedded.lookup_rows(1, [5, 7, 900])
        before = contents(memory)
        write_hot_set(path, memory.tables, cached_groups(memory))
    assert {rows for _, rows, _, _ in before} == {1, 8}
    assert len({mask for _, _, mask, _ in before}) >= 4
    with Memory.open(fp4_checkpoint, MemoryOptions(cache_bytes=32 << 20)) as again:
        assert contents(again) == set()
        hot = read_hot_set(path, again.tables, 10**6)
        read_into_cache(
            again.engine, blocks_of(hot, again.tables), Terms(_core.Lane.PREFETCH), threading.Event()
        )
        assert contents(again) == before
        with EngramMemory(again) as embedded:
            found = embedded.lookup(TOKENS)
            assert found.stats.reads == 0
            assert same(found.values, truth.values(truth.ids(TOKENS), "bf16"))


def test_ids_that_are_no_rows_are_left_out(memory: Memory) -> None:
    ids = np.zeros((3, 8), np.int64)
    ids[1, 2] = memory.tables[1].rows
    ids[2, 7] = -5  # outside its mask: it only tells the group apart
    masks = np.array([255, 255, 127], np.uint8)
    hot = [HotGroups(1, np.full(3, 8, np.uint8), masks, ids)]
    blocks = list(blocks_of(hot, memory.tables))
    assert [(block.columns, block.keys[0][1].tolist()) for block in blocks] == [
        ((0, 7), ids[2:].tolist()),
        ((0, 8), ids[:1].tolist()),
    ]


def test_a_server_restores_its_hot_set_and_saves_it_again(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    path = tmp_path / "hot.set"
    options = {"hot_set": path, "cache_bytes": 32 << 20}
    with serving(fp4_checkpoint, tmp_path, **options) as server:
        with EngramClient(server.targets[0]) as client:
            assert client.lookup(TOKENS).stats.reads > 0
        assert server.stop() == 0
        assert "there is no hot set" in server.log.read_text()
    saved = path.read_bytes()
    for _ in range(2):
        with serving(fp4_checkpoint, tmp_path, **options) as server:
            until(lambda server=server: "are in the cache after" in server.log.read_text())
            with EngramClient(server.targets[0]) as client:
                found = client.lookup(TOKENS)
                assert found.stats.reads == 0
                assert same(found.values, truth.values(truth.ids(TOKENS), "bf16"))
            server.kill()
        assert path.read_bytes() == saved  # a kill loses nothing of it
        server.log.unlink()


SAVE_WAITS = """
import time
from pathlib import Path
from engram_server import hotset_keeper, server
write = hotset_keeper.write_hot_set
server._SAVE_S = {save_s}

def waiting(path, *what):
    logging.info("saving the hot set")
    while not Path(str(path) + ".go").exists():
        time.sleep(0.01)
    write(path, *what)

hotset_keeper.write_hot_set = waiting
"""


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_keep_a_server_from_saving_its_hot_set(
    fp4_checkpoint: Path, tmp_path: Path, again: signal.Signals
) -> None:
    path = tmp_path / "hot.set"
    with serving(fp4_checkpoint, tmp_path, hot_set=path, before=SAVE_WAITS.format(save_s=3600)) as server:
        with EngramClient(server.targets[0]) as client:
            client.lookup(TOKENS)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "saving the hot set" in server.log.read_text())
        server.process.send_signal(again)
        path.with_suffix(".set.go").touch()
        assert server.wait() == 0
    with Memory.open(fp4_checkpoint, MemoryOptions(cache_bytes=0)) as memory:
        saved = read_hot_set(path, memory.tables, 10_000)
    assert sum(len(part) for part in saved) == 2 * 3 * len(TOKENS)


def test_a_hot_set_that_cannot_be_saved_does_not_keep_a_server_for_ever(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "hot.set"
    with serving(fp4_checkpoint, tmp_path, hot_set=path, before=SAVE_WAITS.format(save_s=0.1)) as server:
        with EngramClient(server.targets[0]) as client:
            client.lookup(TOKENS)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "a signal ends the server without it" in server.log.read_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM


def test_what_is_no_hot_set_stops_the_start_and_a_damaged_one_does_not(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "hot.set"
    path.write_bytes(b"ENGRMHOT and nothing more")
    with serving(fp4_checkpoint, tmp_path, hot_set=path) as server:
        until(lambda: "the cache starts empty" in server.log.read_text())
        assert server.stop() == 0
    path.write_text("notes")
    with (
        pytest.raises(AssertionError, match="is not a hot set"),
        serving(fp4_checkpoint, tmp_path, hot_set=path),
    ):
        pass
    with pytest.raises(HotSetError, match="needs a row cache"):
        EngramMemory.open(fp4_checkpoint, hot_set=tmp_path / "new", cache_bytes=0)


def test_a_hot_set_is_not_replaced_before_it_was_restored(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hot.set"
    write_hot_set(path, memory.tables, [groups(1, 50)])
    saved = path.read_bytes()

    def never(engine: object, blocks: object, terms: object, stop: Any) -> None:
        stop.wait()

    monkeypatch.setattr("engram_server.hotset_keeper.read_into_cache", never)
    keeper = HotSetKeeper(memory, path, save_period_s=0.001)
    keeper.start()
    keeper.close()
    assert path.read_bytes() == saved


def test_it_is_saved_while_serving(memory: Memory, tmp_path: Path) -> None:
    path = tmp_path / "hot.set"
    keeper = HotSetKeeper(memory, path, save_period_s=0.01)
    keeper.start()
    block = np.arange(8, dtype=np.int64).reshape(1, 8)
    memory.engine.submit([(1, block)], group=8).wait()
    until(lambda: path.exists() and len(read_hot_set(path, memory.tables, 10)[0]) == 1)
    keeper.close()


# -------------------------------------------------------------------------------------------------- warm


def counted(truth: Truth, sequences: list[list[int]], layer: int) -> Counter[tuple[int, ...]]:
    """How often each group of a layer is asked for, by the oracle of the hash."""
    counts: Counter[tuple[int, ...]] = Counter()
    for sequence in sequences:
        ids = truth.ids(sequence)[:, truth.layers.index(layer)].reshape(-1, 8)
        counts.update(tuple(group) for group in ids.tolist())
    return counts


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, list[list[int]]]:
    """A folder of two token files, and their sequences."""
    random = np.random.default_rng(1)
    sequences = [random.choice([5, 6, 7, 8, 900, IMAGE], 3000).tolist(), random.integers(0, 40, 500).tolist()]
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, sequence in enumerate(sequences):
        np.save(folder / f"{number}.npy", np.asarray(sequence, np.int32))
    return folder, sequences


def warmed(memory: Memory, corpus: Path, output: Path, limit_bytes: int) -> warming.WarmReport:
    return warming.warm(memory, memory.checkpoint.root / "tokenizer.json", [corpus], output, limit_bytes)


@pytest.mark.parametrize("piece", [1 << 16, 7])
def test_the_most_frequent_groups_are_kept(
    memory: Memory,
    truth: Truth,
    tmp_path: Path,
    corpus: tuple[Path, list[list[int]]],
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warming, "_HASH_TOKENS", piece)
    folder, sequences = corpus
    output = tmp_path / "hot.set"
    report = warmed(memory, folder, output, limit_bytes=200 * 2 * 8 * 136)
    assert (report.files, report.tokens, report.groups, report.forgotten_below) == (2, 3500, 400, 1)
    shares = []
    for hot in read_hot_set(output, memory.tables, 10**6):
        counts = counted(truth, sequences, hot.layer)
        times = [counts[tuple(group)] for group in hot.ids.tolist()]
        assert len({tuple(group) for group in hot.ids.tolist()}) == 200
        assert sorted(times, reverse=True) == [times for _, times in counts.most_common(200)]
        assert set(hot.masks.tolist()) == {255}
        shares.append(sum(times) / counts.total())
    assert report.share == pytest.approx(shares[0])


def test_what_is_rare_is_forgotten_when_there_is_too_much(memory: Memory, truth: Truth) -> None:
    random = np.random.default_rng(2)
    common = [11, 12, 13, 14]
    parts = [np.append(random.integers(0, 120_000, 500), common).astype(np.int32) for _ in range(40)]
    tokens = np.concatenate(parts)
    counter = warming.NgramCounter(memory, ngrams_max=2000)
    for part in parts:
        counter.add(part)
    assert len(counter) <= 2000
    assert counter.forgotten_below > 1
    hot, _ = counter.hottest(6)
    frequent = counted(truth, [tokens.tolist()], 14).most_common(6)
    assert {tuple(group) for group in hot[1].ids.tolist()} == {group for group, _ in frequent}


def test_text_is_tokenised(memory: Memory, truth: Truth, tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog.\n" * 3
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    tokens = encode(memory.checkpoint.root / "tokenizer.json", text)
    report = warmed(memory, tmp_path, tmp_path / "hot.set", 1 << 20)
    assert (report.files, report.tokens, report.share) == (1, len(tokens), 1.0)
    for hot in read_hot_set(tmp_path / "hot.set", memory.tables, 10**6):
        expected = counted(truth, [tokens], hot.layer)
        assert {tuple(group) for group in hot.ids.tolist()} == set(expected)


def test_a_corpus_that_is_none_is_refused(memory: Memory, tmp_path: Path) -> None:
    output = tmp_path / "hot.set"
    with pytest.raises(CorpusError, match="there is no corpus"):
        warmed(memory, tmp_path / "absent", output, 1 << 20)
    with pytest.raises(CorpusError, match=r"no \.txt"):
        warmed(memory, tmp_path, output, 1 << 20)
    wrong = tmp_path / "wrong.npy"
    for content in (np.zeros((2, 2), np.int32), np.zeros(3), np.array(["x"]), np.array([None])):
        np.save(wrong, content, allow_pickle=True)
        with pytest.raises(CorpusError, match=r"wrong\.npy is not"):
            warmed(memory, tmp_path, output, 1 << 20)
    np.save(wrong, np.array([129280], np.int32))
    with pytest.raises(ValueError, match=r"wrong\.npy: .*129280"):
        warmed(memory, tmp_path, output, 1 << 20)
    assert not output.exists()


@pytest.mark.parametrize("content", [b"", np.lib.format.magic(1, 0) + b"\x08\x00" + b"{{(((((("])
def test_an_array_cut_or_garbled_is_refused(memory: Memory, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "wrong.npy").write_bytes(content)
    with pytest.raises(CorpusError, match=r"wrong\.npy is not a NumPy array"):
        warmed(memory, tmp_path / "wrong.npy", tmp_path / "hot.set", 1 << 20)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(CorpusError, match="a device or a pipe"):
        warmed(memory, tmp_path / "pipe.txt", tmp_path / "hot.set", 1 << 20)
