"""What callers get: every way to ask, against oracles that share no code with the product."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.serving import ServerProcess, serving
from support.truth import IMAGE, Truth, same

from engram_client import (
    AsyncEngramClient,
    EngramClient,
    EngramMemory,
    Format,
    InvalidRequestError,
    Lookup,
    MismatchError,
    SharedMemory,
    to_torch,
)
from engram_server import lookup as server_lookup

FORMATS = get_args(Format)
Ask = Callable[..., Lookup]
"""Ask(method, *arguments, **keywords): the method of whatever is under test."""

# Repeats, an image, and a history with an unknown id; ids from all over the vocabulary.
TOKENS = [0, 3, 17, 17, 17, 129279, IMAGE, 5, 6, 7, *range(1000, 1020), 3, 17, 17, 64000]
HISTORY = [9, -1, 8]
SMALL = {"unary_reply_bytes": 20_000, "chunk_bytes": 10_000, "block_bytes": 30_000}
"""Limits that make a reply of a few tokens many blocks of many chunks."""
SMALL_MEMORY = SharedMemory("require", data_bytes=1)
"""The smallest data area: an answer of a few tokens comes in pieces."""


@dataclass
class Served:
    truth: Truth
    plain: ServerProcess
    small: ServerProcess
    """With the limits SMALL."""
    memory: EngramMemory


@contextmanager
def two_servers(path: Path, kind: str, folder: Path) -> Iterator[Served]:
    with (
        serving(path, folder, uds=folder / "plain", scales="memory") as plain,
        serving(path, folder, uds=folder / "small", limits=SMALL, backend="mmap", scales="disk") as small,
        EngramMemory.open(path, backend="pread") as memory,
    ):
        yield Served(Truth(path, kind), plain, small, memory)


@pytest.fixture(scope="module")
def fp4(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with two_servers(fp4_checkpoint, "fp4", tmp_path_factory.mktemp("fp4-served")) as served:
        yield served


@pytest.fixture(scope="module")
def fp8(fp8_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with two_servers(fp8_checkpoint, "fp8", tmp_path_factory.mktemp("fp8-served")) as served:
        yield served


@pytest.fixture(params=["fp4", "fp8"])
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


# ------------------------------------------------------------------------------------------- ways to ask


@contextmanager
def threads(target: str, shared_memory: Any = "off") -> Iterator[Ask]:
    with EngramClient(target, shared_memory=shared_memory) as client:
        yield lambda method, *args, **kwargs: getattr(client, method)(*args, **kwargs)


@contextmanager
def in_place(target: str) -> Iterator[Ask]:
    """Rows where the server wrote them: what is left of a lookup keeps them there."""
    with EngramClient(target, shared_memory="require") as client:
        lookups = client.in_place()
        yield lambda method, *args, **kwargs: getattr(lookups, method)(*args, **kwargs).result()


@contextmanager
def session(target: str) -> Iterator[Ask]:
    with EngramClient(target) as client, client.stream() as stream:
        yield lambda method, *args, **kwargs: getattr(stream, method)(*args, **kwargs).result()


@contextmanager
def async_client(target: str) -> Iterator[Ask]:
    with asyncio.Runner() as runner:
        client = AsyncEngramClient(target)
        yield lambda method, *args, **kwargs: runner.run(getattr(client, method)(*args, **kwargs))
        runner.run(client.close())


@contextmanager
def async_session(target: str) -> Iterator[Ask]:
    with asyncio.Runner() as runner:
        client = AsyncEngramClient(target)
        stream = client.stream()

        async def ask(method: str, *args: Any, **kwargs: Any) -> Lookup:
            return await getattr(stream, method)(*args, **kwargs)

        yield lambda *args, **kwargs: runner.run(ask(*args, **kwargs))
        runner.run(stream.close())
        runner.run(client.close())


@contextmanager
def embedded(memory: EngramMemory, block_bytes: int) -> Iterator[Ask]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_lookup.plan, "__defaults__", (block_bytes,))
        yield lambda method, *args, **kwargs: getattr(memory, method)(*args, **kwargs)


WAYS: dict[str, Callable[[Served], Any]] = {
    "client over TCP": lambda served: threads(served.plain.targets[0]),
    "client over UDS": lambda served: threads(served.plain.targets[1]),
    "small chunks over TCP": lambda served: threads(served.small.targets[0]),
    "small chunks over UDS": lambda served: threads(served.small.targets[1]),
    "shared memory": lambda served: threads(served.plain.targets[1], "require"),
    "shared memory, small blocks": lambda served: threads(served.small.targets[0], "require"),
    "shared memory in pieces": lambda served: threads(served.plain.targets[0], SMALL_MEMORY),
    "shared memory in place": lambda served: in_place(served.plain.targets[0]),
    "session": lambda served: session(served.small.targets[0]),
    "async client": lambda served: async_client(served.plain.targets[0]),
    "async small chunks": lambda served: async_client(served.small.targets[1]),
    "async session": lambda served: async_session(served.small.targets[0]),
    "embedded": lambda served: embedded(served.memory, server_lookup.BLOCK_BYTES),
    "embedded in blocks": lambda served: embedded(served.memory, 30_000),
}


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest, served: Served) -> Iterator[Ask]:
    with WAYS[request.param](served) as way:
        yield way


# ---------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("format", FORMATS)
def test_tokens(ask: Ask, served: Served, format: Format) -> None:
    found = ask("lookup", TOKENS, history=HISTORY, format=format)
    ids = served.truth.ids(TOKENS, HISTORY)
    assert same(found.values, served.truth.values(ids, format))
    assert found.layers == (1, 14)
    assert found.columns == (0, 24)
    assert found.mask is not None
    assert found.mask.tolist() == [token == IMAGE for token in TOKENS]
    assert found.stats.rows == ids.size
    assert found.values.flags.writeable


@pytest.mark.parametrize("format", FORMATS)
def test_list_of_rows(ask: Ask, served: Served, format: Format) -> None:
    last = served.truth.oracle.rows(14) - 1
    ids = [5, 0, last, -1, 5, 5, 77, -1, last - 1]
    found = ask("lookup_rows", 14, ids, format=format)
    assert same(found.values, served.truth.rows(14, ids, format))
    assert found.mask is None
    assert not found.values[3].any()


def test_batch_of_sequences(ask: Ask, served: Served) -> None:
    sequences = [[5, 6, 7], [], [8], TOKENS]
    histories = [[1, 2], [1], [], [3, 4, -1]]
    found = ask("lookup_batch", sequences, histories=histories, format="packed")
    ids = np.concatenate([served.truth.ids(s, h) for s, h in zip(sequences, histories, strict=True)])
    assert same(found.values, served.truth.values(ids, "packed"))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_blocks_of_ids(ask: Ask, served: Served, dtype: type) -> None:
    ids = served.truth.ids(TOKENS)
    ids[2] = -1
    ids[5, 1, 7:9] = -1
    blocks = {14: ids[:, 1].astype(dtype), 1: np.asfortranarray(ids[:, 0].astype(dtype))}
    found = ask("lookup_blocks", blocks, format="bf16")
    assert found.layers == (14, 1)
    assert same(found.values, served.truth.values(ids, "bf16", layers=(14, 1)))


@pytest.mark.parametrize("columns", [(0, 1), (8, 16), (21, 24)])
def test_columns_and_layers(ask: Ask, served: Served, columns: tuple[int, int]) -> None:
    ids = served.truth.ids(TOKENS)[:, :, columns[0] : columns[1]]
    found = ask("lookup", TOKENS, columns=columns, layers=[14, 1], format="packed-fp8")
    assert found.columns == columns
    assert same(found.values, served.truth.values(ids, "packed-fp8", layers=(14, 1)))
    blocks = {1: served.truth.ids(TOKENS)[:, 0]}
    one_layer = ask("lookup_blocks", blocks, columns=columns, format="fp32")
    assert same(one_layer.values, served.truth.values(ids, "fp32", layers=(1,)))


RANGES = [(0, 12), (12, 24), (6, 12), (18, 24), (3, 6), (21, 24), (5, 17), (7, 9), (0, 23), (11, 12)]
"""Columns of tensor-parallel ranks, and ranges that cut groups anywhere."""


def test_ranges_of_columns_whatever_the_other_ids_are(ask: Ask, served: Served) -> None:
    """In turn, so that a group is found in the cache with some of its rows, and asked for others."""
    ids = served.truth.ids(TOKENS)
    for number, (begin, end) in enumerate(RANGES):
        lane = ("auto", "decode", "prefill", "prefetch")[number % 4]
        expected = served.truth.values(ids[:, :, begin:end], "bf16")
        found = ask("lookup", TOKENS, columns=(begin, end), lane=lane)
        assert same(found.values, expected)
        foreign = ids.copy()
        foreign[:, :, :begin] = -(10**15)
        foreign[:, :, end:] += 10**15
        blocks = {1: foreign[:, 0], 14: foreign[:, 1]}
        assert same(ask("lookup_blocks", blocks, columns=(begin, end), lane=lane).values, expected)


def test_unique_ranges_of_columns(ask: Ask, served: Served) -> None:
    ids = served.truth.ids(TOKENS)
    for begin, end in RANGES:
        found = ask("lookup", TOKENS, columns=(begin, end), unique=True, format="packed")
        assert found.unique is not None
        assert found.inverse is not None
        for index, layer in enumerate(served.truth.layers):
            flat = ids[:, index, begin:end].reshape(-1).tolist()
            distinct = list(dict.fromkeys(flat))
            assert same(found.unique[layer], served.truth.rows(layer, distinct, "packed"))
            assert found.inverse[layer].reshape(-1).tolist() == [distinct.index(row) for row in flat]
        assert found.stats.distinct == sum(len(rows) for rows in found.unique.values())


def test_unique_blocks_with_zero_rows_and_repeats(ask: Ask, served: Served) -> None:
    random = np.random.default_rng(5)
    ids = random.integers(-1, 12, (60, 24))
    found = ask("lookup_blocks", {14: ids}, columns=(2, 21), unique=True, format="packed")
    assert found.unique is not None
    distinct = [row for row in dict.fromkeys(ids[:, 2:21].reshape(-1).tolist()) if row >= 0]
    assert same(found.unique[14], served.truth.rows(14, distinct, "packed"))
    assert same(found.values[:, 0], served.truth.rows(14, ids[:, 2:21], "packed"))


def test_groups_are_counted_once(ask: Ask) -> None:
    # 2 + 3 + 4 different n-grams of 8 rows from the start of a sequence, in one layer and within one block.
    stats = ask("lookup", [4321] * 4, layers=[14], format="packed").stats
    assert (stats.rows, stats.distinct, stats.groups) == (4 * 24, 9 * 8, 9)


@pytest.mark.parametrize("format", FORMATS)
def test_unique_tokens(ask: Ask, served: Served, format: Format) -> None:
    found = ask("lookup", TOKENS, unique=True, format=format)
    ids = served.truth.ids(TOKENS)
    assert found.unique is not None
    assert found.inverse is not None
    for index, layer in enumerate(served.truth.layers):
        flat = ids[:, index].reshape(-1).tolist()
        distinct = list(dict.fromkeys(flat))
        assert same(found.unique[layer], served.truth.rows(layer, distinct, format))
        inverse = np.asarray([distinct.index(i) for i in flat], dtype=np.int32).reshape(-1, 24)
        assert same(found.inverse[layer], inverse)
    assert same(found.values, served.truth.values(ids, format))
    assert found.stats.rows == ids.size
    assert found.stats.distinct == sum(len(rows) for rows in found.unique.values())


def test_unique_rows_with_zero_rows(ask: Ask, served: Served) -> None:
    ids = [7, -1, 9, 7, -1]
    found = ask("lookup_rows", 1, ids, unique=True, format="bf16")
    assert found.unique is not None
    assert found.inverse is not None
    assert same(found.unique[1], served.truth.rows(1, [7, 9], "bf16"))
    assert found.inverse[1].tolist() == [0, -1, 1, 0, -1]
    assert same(found.values, served.truth.rows(1, ids, "bf16"))


@pytest.mark.parametrize("unique", [False, True])
def test_empty_requests(ask: Ask, unique: bool) -> None:
    assert ask("lookup", [], unique=unique).values.shape == (0, 2, 24, 256)
    assert ask("lookup_batch", [], unique=unique, format="packed").values.shape[:3] == (0, 2, 24)
    assert ask("lookup_rows", 1, [], unique=unique).values.shape == (0, 256)
    assert ask("lookup_blocks", {14: np.empty((0, 24), np.int32)}, unique=unique).values.shape[:2] == (0, 1)


@pytest.mark.parametrize(
    "way",
    ["client over UDS", "shared memory", "shared memory in pieces", "session", "async session", "embedded"],
)
def test_65536_tokens(fp4: Served, way: str) -> None:
    """Larger than any message. What repeats every 64 tokens must have rows that do."""
    fp4 = replace(fp4, small=fp4.plain)
    tile = list(range(700, 764))
    with WAYS[way](fp4) as ask:
        found = ask("lookup", np.tile(np.asarray(tile, np.int64), 1024), format="packed")
    tiles = found.values.reshape(1024, 64, 2, 24, 136)
    assert same(tiles[0], fp4.truth.values(fp4.truth.ids(tile), "packed"))
    assert same(tiles[1], fp4.truth.values(fp4.truth.ids(tile, tile[-3:]), "packed"))
    assert (tiles[2:] == tiles[1]).all()
    assert found.stats.rows == 65_536 * 48


def test_zero_rows_alone(ask: Ask) -> None:
    found = ask("lookup_rows", 1, [-1, -1], format="fp32")
    assert same(found.values, np.zeros((2, 256), dtype=np.float32))
    assert found.stats.reads == 0


def test_repeated_token_is_read_once(ask: Ask) -> None:
    # 2 + 3 + 4 different n-grams from the start of a sequence, 8 heads, 2 layers.
    found = ask("lookup", [1234] * 2048, unique=True, format="packed")
    assert found.stats.rows == 2048 * 48
    assert found.stats.distinct == 144


def test_requests_that_are_refused(ask: Ask, served: Served) -> None:
    rows = served.truth.oracle.rows(1)
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
        ("lookup", ([0, 129280],), {}, r"129280"),
        ("lookup", ([0, -1],), {}, r"-1"),
        ("lookup", ([0],), {"history": [1, 2, 3, 4]}, r"histor"),
        ("lookup", ([0],), {"layers": [2]}, r"layer 2 has no table here; the layers served are 1, 14"),
        ("lookup", ([0],), {"layers": [1, 1]}, r"layer 1 is named twice"),
        ("lookup", ([0],), {"columns": (3, 3)}, r"columns 3 to 3"),
        ("lookup", ([0],), {"columns": (0, 25)}, r"columns 0 to 25"),
        ("lookup", ([0],), {"format": "fp16"}, r"'fp16'"),
        (
            "lookup",
            ([0],),
            {"lane": "fast"},
            r"lane is 'fast'; expected one of auto, decode, prefill, prefetch",
        ),
        ("lookup", ([2**31],), {}, r"2147483648 at position 0 is not an int32"),
        ("lookup", ([0.5],), {}, r"float64; expected integers"),
        ("lookup", ([[1, 2]],), {}, r"shape \[1, 2\]"),
        ("lookup_batch", ([[1]],), {"histories": []}, r"1 sequences, but 0 histories"),
        (
            "lookup_rows",
            (1, [0, rows]),
            {},
            rf"layer 1, position 1: row id {rows} is outside -1 to {rows - 1}",
        ),
        ("lookup_rows", (1, [0, -2]), {}, r"row id -2 is outside"),
        ("lookup_blocks", ({},), {}, r"names no layer"),
        ("lookup_blocks", ({1: np.full((2, 24), rows)},), {}, r"layer 1, position 0, column 0"),
        ("lookup_blocks", ({1: np.zeros((2, 24), int), 14: np.zeros((3, 24), int)},), {}, r"3 positions"),
    ]
    for method, args, kwargs, sentence in refused:
        with pytest.raises(InvalidRequestError, match=sentence):
            ask(method, *args, **kwargs)
    with pytest.raises(MismatchError, match="table of layer 14 has digest"):
        ask("lookup", [0], pin={14: bytes(32)})
    # And all of it did no harm.
    assert same(ask("lookup", [5]).values, served.truth.values(served.truth.ids([5]), "bf16"))


@pytest.mark.parametrize(("format", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_torch_tensors(ask: Ask, served: Served, format: Format, dtype: torch.dtype) -> None:
    found = ask("lookup", TOKENS, format=format)
    tensor = found.torch()
    assert tensor.dtype == dtype
    exact = served.truth.values(served.truth.ids(TOKENS), "fp32")
    rounded = torch.from_numpy(exact).to(dtype)
    assert torch.equal(tensor.nan_to_num(), rounded.nan_to_num())
    assert tensor.data_ptr() == found.values.ctypes.data
    unique = ask("lookup_rows", 1, [3, 3, -1], unique=True, format=format)
    assert unique.unique is not None
    assert torch.equal(to_torch(unique.unique[1], format), unique.torch()[:1])


def test_pinned_digest_of_the_table_is_accepted(ask: Ask, served: Served) -> None:
    with EngramClient(served.plain.targets[0]) as client:
        digest = client.describe().tables[14].digest
    assert ask("lookup", [5], pin={14: digest}).values.shape == (1, 2, 24, 256)
