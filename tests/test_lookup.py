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

Format = _core.Format


@pytest.fixture(scope="module")
def memory(fp4_checkpoint: Path) -> Iterator[Memory]:
    with Memory.open(fp4_checkpoint) as opened:
        yield opened


def blocks_of(memory: Memory, ids: np.ndarray, **options: Any) -> lookup.Request:
    return lookup.from_blocks(memory, [(14, ids), (1, ids)], **options)


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

    keys = [key for block in plan.blocks for key in block.keys]
    chosen = ids[:, columns[0] : columns[1]]
    for layer in (14, 1):
        fetched = np.concatenate([np.empty(0, int), *(own.reshape(-1) for key, own in keys if key == layer)])
        expected = chosen.reshape(-1).tolist()
        if unique:
            expected = [row for row in dict.fromkeys(expected) if row >= 0]
        assert fetched.tolist() == expected
    for block in plan.blocks:
        assert block.rows * 136 <= block_bytes or block.positions == 1
        spans = list(block.spans(chunk_bytes))
        assert [first for first, _ in spans] == np.cumsum([0, *(n for _, n in spans)])[:-1].tolist()
        assert sum(count for _, count in spans) == block.positions
        assert all(n * block.position_bytes <= chunk_bytes or n == 1 for _, n in spans)
    payload = sum(block.positions * block.position_bytes for block in plan.blocks)
    assert plan.shape.payload_bytes == payload + sum(inverse.nbytes for inverse in plan.inverse)
    assert plan.shape.row_bytes == row_bytes
    assert len(plan.inverse) == (2 if unique else 0)


def test_a_block_leaves_room_in_a_small_budget(fp4_checkpoint: Path) -> None:
    budget_bytes = 1 << 20
    from engram_server.memory import MemoryOptions

    with Memory.open(fp4_checkpoint, MemoryOptions(budget_bytes=budget_bytes)) as memory:
        request = blocks_of(memory, np.zeros((200, 24), int))
        for block in lookup.plan(memory, request).blocks:
            memory.engine.submit(block.keys).wait()
            assert block.rows * 136 <= budget_bytes / 8


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
            fetcher.admit(rows(11))
        assert fetcher.admit(rows(10)) == 10
        assert fetcher.admit(rows(10)) == 10
        with pytest.raises(_core.OverloadedError, match="20 rows are being worked on; 6 more"):
            fetcher.admit(rows(6))
        fetcher.release(10)
        assert fetcher.admit(rows(10)) == 10
        # For tokens all columns of all layers are hashed, whatever is selected.
        one_token = pb.TokenKeys(sequences=[pb.Sequence(tokens=bytes(4))])
        with pytest.raises(InvalidRequestError, match="asks for 48 rows"):
            fetcher.admit(pb.LookupRequest(tokens=one_token, layers=[1]))
        fetcher.close()

    asyncio.run(admit())


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_bytes": 0},
        {"budget_wait_s": -1},
        {"message_bytes": 8 << 20},
        {"unary_reply_bytes": 1000},
        {"request_rows": 10, "pending_rows": 9},
    ],
)
def test_limits_that_contradict_each_other(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Limits(**fields)
