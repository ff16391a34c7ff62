"""What engram-load asks for: the prompts, steps and rows of each pattern, and what their words mean."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client._query import BlockKeys, TokenKeys
from engram_load._corpus import Corpus, parse_lengths
from engram_load._errors import LoadError
from engram_load._forward import parse_forward
from engram_load._patterns import (
    Decoding,
    Job,
    Request,
    Shuffled,
    Unasked,
    decode,
    prefill,
    repeat,
    uniform,
    zipf,
)
from engram_load._sweep import parse_objective, parse_sweep, run_sweep
from engram_server.spec import EngramSpec, primes_from

TEXT = np.random.default_rng(1).integers(
    0, 1 << 30, size=5_000, dtype=np.int32
)  # no token twice, for certain enough


def parts(job: Job) -> list[tuple[list[int], list[int]]]:
    """(tokens, history) of the one sequence of each request."""
    found = []
    for request in job.requests:
        assert isinstance(request.keys, TokenKeys)
        ((tokens, history),) = request.keys.sequences
        found.append((tokens.tolist(), history.tolist()))
    return found


def test_prompts_follow_one_another_through_the_text_in_chunks_with_their_look_back() -> None:
    corpus = Corpus("text", TEXT)
    jobs = prefill(corpus, parse_lengths("1000"), 300, 3, random.Random(0))
    for number, job in enumerate(islice(jobs, 5)):
        prompt = TEXT[1000 * number : 1000 * (number + 1)].tolist()
        assert parts(job) == [
            (prompt[at : at + 300], prompt[max(0, at - 3) : at]) for at in (0, 300, 600, 900)
        ]
    assert corpus.wraps == 0
    assert parts(next(jobs))[0][0] == TEXT[:300].tolist()
    assert corpus.wraps == 1


def test_a_prompt_longer_than_the_text_is_refused() -> None:
    with pytest.raises(LoadError, match="text has 5,000 tokens, but a prompt wants 6,000: give more text"):
        next(prefill(Corpus("text", TEXT), parse_lengths("6000"), 300, 3, random.Random(0)))


def test_one_token_is_repeated_and_nothing_else() -> None:
    for job in islice(repeat(7, parse_lengths("5,9"), 4, 3, random.Random(0)), 20):
        tokens = [token for chunk, _ in parts(job) for token in chunk]
        assert tokens in ([7] * 5, [7] * 9)


@pytest.mark.parametrize("drafts", [0, 3])
def test_decode_steps_go_through_the_text_and_look_back_at_it_alone(drafts: int) -> None:
    place = {int(token): at for at, token in enumerate(TEXT)}
    how = Decoding(batch=4, steps=20, drafts=drafts, accept=0.5)
    expected: list[int | None] = [None] * 4
    advanced: set[int] = set()
    for job in islice(decode(Corpus("text", TEXT), how, 3, random.Random(0)), 200):
        (request,) = job.requests
        assert isinstance(request.keys, TokenKeys)
        assert request.lane == "decode"
        assert len(request.keys.sequences) == 4
        for i, (tokens, history) in enumerate(request.keys.sequences):
            at = place[int(tokens[0])]
            assert len(tokens) == 1 + drafts
            assert history.tolist() == TEXT[max(0, at - 3) : at].tolist(), "rejected drafts are no look-back"
            right = 0
            while right < drafts and tokens[1 + right] == TEXT[at + 1 + right]:
                right += 1
            if expected[i] == at:
                advanced.add(at)
            expected[i] = at + 1 + right
    assert len(advanced) > 500, (
        "sequences go on where the accepted drafts ended, but for their few new beginnings"
    )


@given(count=st.integers(1, 3_000), seed=st.integers(0, 1 << 20))
def test_an_order_without_a_table_has_each_number_once(count: int, seed: int) -> None:
    order = Shuffled(count, seed)
    found = order.take(0, count)
    assert sorted(found.tolist()) == list(range(count))
    assert order.take(count, 5).tolist() == order.take(0, 5).tolist()[:5] or count < 5


def test_uniform_asks_for_every_row_before_it_asks_for_one_again() -> None:
    rows = {1: 9_601, 14: 12_000}
    seen: dict[int, list[int]] = {1: [], 14: []}
    unasked = Unasked(rows, 24, seed=3)
    # As in a sweep: a second run goes on where the first one ended.
    for job in [*islice(uniform(unasked, 50), 3), *islice(uniform(unasked, 50), 5)]:
        (request,) = job.requests
        assert isinstance(request.keys, BlockKeys)
        for layer, ids in request.keys.layers.items():
            assert ids.shape == (50, 24)
            seen[layer] += ids.ravel().tolist()
    for layer, ids in seen.items():
        assert len(set(ids)) == len(ids) == 9_600
        assert all(0 <= row < rows[layer] for row in ids)
        assert ids != sorted(ids)
        assert len({row * 10 // rows[layer] for row in ids[:200]}) == 10, "from all over the table"
    assert unasked.wraps == 0
    next(uniform(unasked, 50))
    assert unasked.wraps == 1


def small_spec() -> EngramSpec:
    columns, primes = 24, primes_from(500, 48)
    return EngramSpec.from_config(
        {
            "model_type": "deepseek_v41",
            "image_token_id": 128_000,
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [sum(primes[:columns]), sum(primes[columns:])],
            "engram_max_ngram_size": 4,
            "engram_vocab_size": 500,
            "engram_n_heads": 8,
            "engram_head_dim": 256,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": 99_092,
        }
    )


def test_zipf_draws_row_groups_by_rank_and_rows_inside_their_columns() -> None:
    spec = small_spec()
    groups: Counter[tuple[int, ...]] = Counter()
    for job in islice(zipf(spec, [1, 14], 100, 1.0, random.Random(5)), 50):
        (request,) = job.requests
        assert isinstance(request.keys, BlockKeys)
        for plane, ids in enumerate(request.keys.layers.values()):
            offsets = np.asarray(spec.offsets[plane])
            assert (ids >= offsets).all()
            assert (ids < offsets + np.asarray(spec.primes[plane])).all()
        for order in np.split(request.keys.layers[14], 3, axis=1):
            groups.update(map(tuple, order.tolist()))
    times = sorted(groups.values(), reverse=True)
    # 5,000 draws from 500 ranks of each of 3 orders: the first gets ln 2 / ln 501 of them, 11 %.
    assert 450 < times[2] <= times[0] < 670
    assert times[0] > 5 * times[30]
    assert sum(times) == 15_000


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("100", 100, 100), ("5,50,500", 5, 500), ("uniform:10-20", 10, 20), ("lognormal:100,0.5", 1, 1_600)],
)
def test_lengths_are_drawn_as_they_are_written(text: str, low: int, high: int) -> None:
    rng = random.Random(0)
    lengths = parse_lengths(text)
    drawn = [lengths.draw(rng) for _ in range(2_000)]
    assert low <= min(drawn) <= max(drawn) <= high == lengths.largest
    assert len(set(drawn)) == {"100": 1, "5,50,500": 3, "uniform:10-20": 11}.get(text, len(set(drawn)))
    if text.startswith("lognormal"):
        assert 90 < sorted(drawn)[1_000] < 110


@pytest.mark.parametrize(
    "text", ["", "0", "x", "5,", "uniform:9-3", "uniform:0-5", "lognormal:0,1", "99999999"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="is not a prompt length: expected 1 to 1048576"):
        parse_lengths(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "rate",
            "rate=",
            "rate=0,1",
            "rate=5..2",
            "rate=a",
            "rate=nan",
            "length=1.5",
            "concurrency=2..2",
            "=1",
        ),
        *("cache=", "cache=x", "cache=1GB", "cache=2GiB..1GiB", "cache=0..1GiB", "cache=-1", "depth=1"),
        "cache=" + ",".join(map(str, range(65))),
    ],
)
def test_other_sweeps_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match=r"^--sweep '.*'[ :]"):
        parse_sweep(text)


@pytest.mark.parametrize("text", ["", "p99", "p99<5", "p99<0ms", "p99>5ms", "p100<5ms", "p5x<1s", "<5ms"])
def test_other_objectives_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="is no objective: expected something like p99<5ms"):
        parse_objective(text)


def swept(text: str, met: Callable[[float], bool] | None) -> tuple[list[float], float | None]:
    """Values measured, ascending, and the highest that is met."""

    def judge(point: dict[str, Any]) -> bool:
        assert met is not None
        return met(point["value"])

    found = run_sweep(parse_sweep(text), lambda value: {"interrupted": False}, judge if met else None)
    assert found.ended is None
    return [point["value"] for point in found.points], found.best


def test_a_range_is_doubled_until_it_fails_and_halved_between() -> None:
    values, best = swept("rate=10..1000", lambda rate: rate < 130)
    assert values == [10, 20, 40, 80, 120, 125, 130, 140, 160]
    assert best == 125
    assert swept("concurrency=1..64", lambda loops: loops <= 5) == ([1, 2, 4, 5, 6, 8], 5)


def test_a_range_that_never_fails_ends_at_its_end_and_one_that_always_does_has_no_answer() -> None:
    assert swept("length=100..350", lambda _: True) == ([100, 200, 350], 350)
    assert swept("length=100..350", lambda _: False) == ([100], None)


def test_a_list_is_measured_whole_and_the_highest_before_the_first_that_fails_counts() -> None:
    assert swept("rate=8,1,4,2", lambda rate: rate not in (4,)) == ([1, 2, 4, 8], 2)
    assert swept("rate=8,1", None) == ([1, 8], None)


def test_of_caches_the_lowest_counts_from_which_all_meet_it() -> None:
    mib = 1 << 20
    values, best = swept("cache=64MiB..512MiB", lambda size: size >= 128 * mib)
    assert values == [64 * mib, 128 * mib, 256 * mib, 512 * mib]
    assert best == 128 * mib
    assert swept("cache=4MiB,0,1MiB", lambda size: size != mib)[1] == 4 * mib
    assert swept("cache=1MiB,2MiB", lambda size: size == mib)[1] is None


def test_a_value_that_cannot_be_measured_ends_a_sweep_and_keeps_what_there_is() -> None:
    def measure(value: float) -> dict[str, Any]:
        if value == 4:
            raise LoadError("no such thing")
        return {"interrupted": False}

    found = run_sweep(parse_sweep("rate=1,2,4,8"), measure, lambda _: True)
    assert [point["value"] for point in found.points] == [1, 2]
    assert (found.best, found.ended) == (2, "the sweep ends before 4: no such thing")
    with pytest.raises(LoadError, match=r"^no such thing$"):
        run_sweep(parse_sweep("rate=4,8"), measure, None)


def test_an_interrupted_sweep_keeps_what_there_is() -> None:
    found = run_sweep(parse_sweep("rate=1,2,4"), lambda value: {"interrupted": value == 2}, lambda _: True)
    assert [point["value"] for point in found.points] == [1, 2]
    assert (found.best, found.ended) == (1, None)


def test_forwards_are_parsed_as_they_are_written() -> None:
    assert parse_forward("1=500us, 14=15ms").reaches == ((1, 0.0005), (14, 0.015))
    with pytest.raises(LoadError, match="names layers 1, but tables are of 1 and 14"):
        parse_forward("1=2ms").check((1, 14))


@pytest.mark.parametrize(
    "text", ["", "1", "1=2", "1=2ms,", "14=1ms,1=2ms", "1=5ms,14=2ms", "1=2ms,1=3ms", "a=1s"]
)
def test_other_forwards_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="is no forward: expected LAYER=TIME"):
        parse_forward(text)


def test_a_forward_asks_for_all_layers_at_once_and_waits_for_each() -> None:
    begun = threading.Event()

    def send(request: Request) -> Any:
        (layer,) = request.layers or ()
        if layer == 1:
            begun.wait()  # until the other one was asked for as well
            time.sleep(0.05)
        else:
            begun.set()
        return f"rows of {layer}"

    request = Request(TokenKeys(()))
    with ThreadPoolExecutor(2) as pool:
        found, stalls = parse_forward("1=0ms,14=10ms").run(send, pool, request)
    assert found == ["rows of 1", "rows of 14"]
    assert list(stalls) == [1, 14]
    assert stalls[1] >= 50_000_000
