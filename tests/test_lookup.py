"""How a request becomes blocks of bounded size, and what the service admits; without a server."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server import lookup
from engram_server.fetch import Fetcher
from engram_server.limits import Limits
from engram_server.lookup import InvalidRequestError
from engram_server.memory import Memory
from engram_server.terms import Terms

Format = _core.Format


@pytest.fixture(scope="module")
def memory(fp4_checkpoint: Path) -> Iterator[Memory]:
    with Memory.open(fp4_checkpoint) as opened:
        yield opened


def blocks_of(memory: Memory, ids: np.ndarray, **options: Any) -> lookup.Request:
    return lookup.from_blocks(memory, [(14, ids), (1, ids)], **options)


def rows_answered(block: lookup.Block, layer: int) -> list[int]:
    """Row ids of one layer that a block's payload consists of, in order."""
    own = [ids[:, slice(*block.columns)] for key, ids in block.keys if key == layer]
    flat = np.concatenate([np.empty(0, int), *(ids.reshape(-1) for ids in own)])
    return [int(row) for row in (flat if block.picks is None or not own else flat[block.picks])]


@given(
    tokens=st.integers(0, 40),
    columns=st.tuples(st.integers(0, 23), st.integers(1, 24)).filter(lambda c: c[0] < c[1]),
    block_bytes=st.integers(1, 40 * 48 * 136),
    chunk_bytes=st.integers(1, 100_000),
    unique=st.booleans(),
    format=st.sampled_from(list(Format)),
)
def test_blocks_cover_the_request_in_order_and_stay_small(
    memory: Memory,
    tokens: int,
    columns: tuple[int, int],
    block_bytes: int,
    chunk_bytes: int,
    unique: bool,
    format: Format,
) -> None:
    ids = np.random.default_rng(tokens).integers(-1, 30, (tokens, 24))
    request = blocks_of(memory, ids, columns=columns, unique=unique, format=format)
    plan = lookup.plan(memory, request, block_bytes)
    width = columns[1] - columns[0]
    row_bytes = {"PACKED": 136, "PACKED_FP8": 264, "BF16": 512, "FP32": 1024}[format.name]
    assert request.rows == tokens * 2 * width

    chosen = ids[:, columns[0] : columns[1]]
    for layer in (14, 1):
        answered = [row for block in plan.blocks for row in rows_answered(block, layer)]
        expected = chosen.reshape(-1).tolist()
        if unique:
            expected = [row for row in dict.fromkeys(expected) if row >= 0]
        assert answered == expected
    for block in plan.blocks:
        assert block.rows * 136 <= block_bytes or len(block.keys[0][1]) == 1
        spans = list(block.spans(chunk_bytes))
        assert [first for first, _ in spans] == np.cumsum([0, *(n for _, n in spans)])[:-1].tolist()
        assert sum(count for _, count in spans) == block.items
        assert all(n * block.item_bytes <= chunk_bytes or n == 1 for _, n in spans)
    payload = sum(block.payload_bytes for block in plan.blocks)
    assert plan.shape.payload_bytes == payload + sum(inverse.nbytes for inverse in plan.inverse)
    assert plan.shape.row_bytes == row_bytes
    assert len(plan.inverse) == (2 if unique else 0)


def test_a_block_leaves_room_in_a_small_budget(fp4_checkpoint: Path) -> None:
    budget_bytes = 1 << 20
    from engram_server.memory import MemoryOptions

    with Memory.open(fp4_checkpoint, MemoryOptions(budget_bytes=budget_bytes)) as memory:
        request = blocks_of(memory, np.zeros((200, 24), int))
        for block in lookup.plan(memory, request).blocks:
            block.submit(memory.engine, Terms(_core.Lane.PREFILL)).wait()
            assert block.rows * 136 <= budget_bytes / 8


@given(
    tokens=st.integers(1, 30),
    columns=st.tuples(st.integers(0, 23), st.integers(1, 24)).filter(lambda c: c[0] < c[1]),
    block_bytes=st.integers(1, 40 * 24 * 136),
)
def test_groups_go_to_the_engine_whole_and_once(
    memory: Memory, tokens: int, columns: tuple[int, int], block_bytes: int
) -> None:
    """All 8 ids of a group are sent whichever are wanted, those outside the range as they came; a unique request
    sends the groups that bring a new row, and no others."""
    random = np.random.default_rng(tokens)
    ids = random.integers(0, 200, (tokens, 24))[random.integers(0, tokens, tokens)]
    ids[:, : columns[0]] -= 10**12  # no rows: they only tell groups apart
    begin, end = columns
    seen: set[int] = set()
    expected = []
    for position in range(tokens):
        for first in range(0, 24, 8):
            wanted = ids[position, max(first, begin) : min(first + 8, end)].tolist()
            if set(wanted) - seen:
                expected.append((first, ids[position, first : first + 8].tolist()))
            seen.update(wanted)
    for unique in (False, True):
        request = lookup.from_blocks(memory, [(14, ids)], columns=columns, unique=unique)
        sent = []
        for block in lookup.plan(memory, request, block_bytes).blocks:
            assert (block.group, block.columns) == (8, columns)
            sent.append(block.keys[0][1])
        if not unique:
            assert np.concatenate(sent).tolist() == ids.tolist()
            continue
        groups = [
            (first, row[first : first + 8].tolist()) for part in sent for row in part for first in (0, 8, 16)
        ]
        assert [(first, group) for first, group in groups if group != [-1] * 8] == expected


def test_a_list_of_rows_is_no_group(memory: Memory) -> None:
    for unique in (False, True):
        request = lookup.from_rows(memory, 14, np.arange(8), unique=unique)
        assert (request.group, request.groups) == (1, 8)
        assert [block.group for block in lookup.plan(memory, request).blocks] == [1]


@pytest.mark.parametrize(
    ("columns", "groups"), [((0, 24), 3), ((0, 12), 2), ((9, 15), 1), ((7, 9), 2), ((21, 24), 1)]
)
def test_groups_of_a_request_are_those_its_columns_touch(
    memory: Memory, columns: tuple[int, int], groups: int
) -> None:
    request = blocks_of(memory, np.zeros((5, 24), int), columns=columns)
    assert request.groups == 5 * 2 * groups


def test_packed_rows_of_tables_that_differ_are_refused(memory: Memory) -> None:
    mixed = replace(memory, tables=dict(memory.tables))
    mixed.tables[14] = replace(mixed.tables[14], kind=_core.RowKind.FP8, row_bytes=264)
    request = blocks_of(mixed, np.zeros((1, 24), int))
    with pytest.raises(InvalidRequestError, match=r"layer 14: 264 bytes, layer 1: 136 bytes"):
        lookup.plan(mixed, request)
    for format in (Format.PACKED_FP8, Format.BF16, Format.FP32):
        lookup.plan(mixed, replace(request, format=format))
    lookup.plan(mixed, lookup.from_rows(mixed, 14, np.zeros(3, int)))


def test_tokens_without_a_tokenizer(memory: Memory) -> None:
    bare = replace(memory, hash=None, token_map=None)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        lookup.from_tokens(bare, [])
    lookup.from_rows(bare, 1, np.zeros(3, int))


def test_requests_are_admitted_up_to_the_limit(memory: Memory) -> None:
    def rows(count: int) -> pb.LookupRequest:
        return pb.LookupRequest(rows=pb.RowKeys(layer=1, ids=bytes(4 * count), id_bytes=4))

    async def admit() -> None:
        fetcher = Fetcher(memory, Limits(request_rows=10, pending_rows=25), lambda sentence: None)
        with pytest.raises(InvalidRequestError, match="asks for 11 rows, over the limit of 10"):
            await fetcher.admit(rows(11), "")
        first = await fetcher.admit(rows(10), "")
        assert first.rows == 10
        second = await fetcher.admit(rows(10), "")
        with pytest.raises(_core.OverloadedError, match="20 rows are being worked on; 6 more"):
            await fetcher.admit(rows(6), "")
        # What is left after an eighth of the limit is for the decode lane alone.
        bulk = rows(4)
        bulk.lane = pb.LANE_PREFILL
        with pytest.raises(_core.OverloadedError, match="the limit of 22 for lanes other than decode"):
            await fetcher.admit(bulk, "")
        fetcher.release(await fetcher.admit(rows(4), ""))
        fetcher.release(first)
        assert second.rows == 10
        assert (await fetcher.admit(rows(10), "")).rows == 10
        # For tokens all columns of all layers are hashed, whatever is selected.
        one_token = pb.TokenKeys(sequences=[pb.Sequence(tokens=bytes(4))])
        with pytest.raises(InvalidRequestError, match="asks for 48 rows"):
            await fetcher.admit(pb.LookupRequest(tokens=one_token, layers=[1]), "")
        fetcher.close()

    asyncio.run(admit())


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_bytes": 0},
        {"budget_wait_s": -1},
        {"message_bytes": 8 << 20},
        {"unary_reply_bytes": 1000},
        {"request_rows": 100, "pending_rows": 113},
    ],
)
def test_limits_that_contradict_each_other(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Limits(**fields)
