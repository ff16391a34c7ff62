"""The SGLang plugin inside SGLang's own classes, against rows looked up by the book and against SGLang's own tables."""

import functools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_world
import torch
from conftest import Served, bits
from schedules import DRAFTS, Schedule, Work
from sglang_world import (
    ENGRAM,
    FULL,
    PAD_SHIFT,
    STAGING,
    WHEEL,
    WORLD,
    ForwardMode,
    Model,
    capturing,
    forward_batch,
    schedule_batch,
)
from support.serving import serving, until
from support.truth import IMAGE, same

from engram_client import DeadlineError, EngramClient, MismatchError, UnavailableError
from engram_client.adapters import _settings, _sglang_engram
from engram_client.adapters import sglang as plugin
from engram_client.adapters._settings import Settings
from engram_client.adapters._sglang_graphs import FullGraphs
from engram_server.tables.safetensors import build_header
from engram_server.tables.synth import synthesise

TEXT = [0, 3, 17, 17, 29, 4051, 128000, 5, 6, 7, *range(1000, 1020), 3, 17, 64000, 9, 8]
WITH_IMAGES = [3, 17, PAD_SHIFT + 5, PAD_SHIFT + 5, 29, 5, 6, 7, 8, PAD_SHIFT + 77_000, 4051, 9]
"""As SGLang's scheduler has images: a hash of each, at each of its positions."""


@pytest.fixture
def world() -> Iterator[sglang_world.World]:
    yield WORLD
    WORLD.tp_size, WORLD.tp_rank, WORLD.attn_dp_size = 1, 0, 1
    WORLD.in_breakable_graph, WORLD.forward_context = False, None


@pytest.fixture
def engram(monkeypatch: pytest.MonkeyPatch, served: Served, world: Any) -> Any:
    """SGLang's module, its embedding replaced as the plugin does."""
    return _plugged(monkeypatch, served)


def _plugged(monkeypatch: pytest.MonkeyPatch, served: Served) -> Any:
    module, staging = WHEEL.load(ENGRAM), WHEEL.load(STAGING)
    monkeypatch.setenv("ENGRAM_SERVER_TARGET", served.target)
    settings = Settings.required()
    graphs = FullGraphs(module.MODE_DECODE, module.MODE_VERIFY)
    connect = functools.cache(settings.client)
    embedding = _sglang_engram.embedding_class(module, connect, graphs)
    stager = _sglang_engram.stager_class(staging, embedding, connect, settings, graphs)
    monkeypatch.setattr(module, "EngramEmbedding", embedding)
    monkeypatch.setattr(staging, "EngramRowStager", stager)
    full = WHEEL.load(FULL).FullCudaGraphBackend
    for name in ("capture_one", "replay"):
        monkeypatch.setattr(full, name, around(getattr(graphs, name), getattr(full, name)))
    return module


def around(hook: Any, plain: Any) -> Any:
    return lambda *args, **named: hook(plain, *args, **named)


def as_hashed(tokens: Sequence[int]) -> list[int]:
    return [IMAGE if token >= PAD_SHIFT else token for token in tokens]


def by_the_book(served: Served, tokens: Sequence[int], begin: int, end: int) -> dict[int, np.ndarray]:
    values = served.truth.values(served.truth.ids(as_hashed(tokens))[begin:end], "bf16")
    return {layer: values[:, index] for index, layer in enumerate(served.truth.layers)}


def stager_of(model: Model) -> Any:
    return WHEEL.load(STAGING).EngramRowStager.from_model(model, model.hasher, torch.device("cpu"))


def looked_up(model: Model, batch: Any) -> dict[int, torch.Tensor]:
    """Rows by layer, as the forward of `Engram` takes them."""
    ids = model.hasher(batch.input_ids, batch)
    return {
        module.embed.layer_id: module.embed_rows(ids[:, module.layer_hash_index], batch, False)
        for module in model.engrams
    }


def check(rows: dict[int, torch.Tensor], expected: dict[int, np.ndarray]) -> None:
    for layer, wanted in expected.items():
        assert same(bits(rows[layer]), wanted.copy())


def test_chunked_prefill_then_decode(engram: Any, served: Served) -> None:
    model = Model(served.checkpoint)
    for begin, end in ((0, 2), (2, 3), (3, 20)):
        history = torch.tensor([model.hasher.history_row(TEXT[max(0, begin - 3) : begin])], dtype=torch.int32)
        batch = forward_batch(ForwardMode.EXTEND, [(1, begin, TEXT[begin:end])], engram_history=history)
        check(looked_up(model, batch), by_the_book(served, TEXT, begin, end))
    for position in range(20, 24):
        batch = forward_batch(ForwardMode.DECODE, [(1, position, TEXT[position : position + 1])])
        check(looked_up(model, batch), by_the_book(served, TEXT, position, position + 1))


def test_a_position_of_any_image_is_an_image_token(engram: Any, served: Served) -> None:
    model = Model(served.checkpoint)
    for begin in (0, 3, 5, 11):
        history = torch.tensor(
            [model.hasher.history_row(WITH_IMAGES[max(0, begin - 3) : begin])], dtype=torch.int32
        )
        batch = forward_batch(ForwardMode.EXTEND, [(2, begin, WITH_IMAGES[begin:])], engram_history=history)
        check(looked_up(model, batch), by_the_book(served, WITH_IMAGES, begin, len(WITH_IMAGES)))


def test_rejected_drafts_never_enter_the_history(engram: Any, served: Served) -> None:
    model = Model(served.checkpoint)
    start = torch.tensor([model.hasher.history_row([])], dtype=torch.int32)
    looked_up(model, forward_batch(ForwardMode.EXTEND, [(3, 0, TEXT[:9])], engram_history=start))
    drafts = SimpleNamespace(draft_token_num=4)
    verify = [TEXT[9], TEXT[10], 777, 778]
    batch = forward_batch(ForwardMode.TARGET_VERIFY, [(3, 9, verify)], spec_info=drafts)
    check(looked_up(model, batch), by_the_book(served, [*TEXT[:9], *verify], 9, 13))
    model.hasher.commit_after_verify(torch.tensor([verify]), torch.tensor([3]), torch.tensor([2]))
    after = [55, 901, 902, 903]
    batch = forward_batch(ForwardMode.TARGET_VERIFY, [(3, 11, after)], spec_info=drafts)
    check(looked_up(model, batch), by_the_book(served, [*TEXT[:11], *after], 11, 15))


class Runs:
    """Steps of a model as SGLang's scheduler and worker take them, every row compared."""

    def __init__(self, served: Served, slots: int) -> None:
        self.served = served
        self.model = Model(served.checkpoint)
        self.model.hasher.init_history(slots, "cpu")
        self.stager = stager_of(self.model)

    def step(self, works: Sequence[Work], staged: bool) -> None:
        hasher, kind = self.model.hasher, works[0].kind
        chunks = [(work.slot, work.begin, work.tokens) for work in works]
        if kind == "extend":
            history = torch.tensor(
                [hasher.history_row(work.before[-3:]) for work in works], dtype=torch.int32
            )
            rows = None
            if staged:
                spans = [
                    ([*work.before, *work.tokens], work.begin, work.begin + len(work.tokens))
                    for work in works
                ]
                rows = self.stager.stage(schedule_batch(spans))
            more = {"engram_history": history, "engram_staged_rows": rows}
            batch = forward_batch(ForwardMode.EXTEND, chunks, **more)
        elif kind == "verify":
            drafts = SimpleNamespace(draft_token_num=1 + DRAFTS)
            batch = forward_batch(ForwardMode.TARGET_VERIFY, chunks, spec_info=drafts)
        else:
            batch = forward_batch(ForwardMode.DECODE, chunks)
        check(looked_up(self.model, batch), self.expected(works))
        self.accept(works)

    def expected(self, works: Sequence[Work]) -> dict[int, np.ndarray]:
        books = [
            by_the_book(self.served, [*work.before, *work.tokens], work.begin, work.begin + len(work.tokens))
            for work in works
        ]
        return {layer: np.concatenate([book[layer] for book in books]) for layer in books[0]}

    def accept(self, works: Sequence[Work]) -> None:
        """Which drafts of a verify were right."""
        if works[0].kind == "verify":
            self.model.hasher.commit_after_verify(
                torch.tensor([work.tokens for work in works]),
                torch.tensor([work.slot for work in works]),
                torch.tensor([1 + work.right for work in works]),
            )


@pytest.fixture
def hashes_of_fp4(monkeypatch: pytest.MonkeyPatch, fp4: Served, transport: str, world: Any) -> None:
    _plugged(monkeypatch, fp4)


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_any_schedule(fp4: Served, hashes_of_fp4: None, seed: int) -> None:
    runs, schedule = Runs(fp4, slots=8), Schedule(seed, slots=8, requests=5)
    for step in range(40):
        runs.step(schedule.step(mixed=False), staged=step % 3 > 0)


def test_a_schedule_outlives_its_server(
    monkeypatch: pytest.MonkeyPatch, fp4: Served, transport: str, world: Any, tmp_path: Path
) -> None:
    """Killed in the midst of it, twice, and started again."""
    uds = tmp_path / "s"
    mine = replace(fp4, server=SimpleNamespace(targets=[f"unix:{uds}"]))
    _plugged(monkeypatch, mine)
    schedule, runs = Schedule(7, slots=8, requests=4), None
    for _ in range(3):
        with serving(fp4.checkpoint, tmp_path, listen=None, uds=uds) as server:
            runs = runs or Runs(mine, slots=8)
            for step in range(4):
                runs.step(schedule.step(mixed=False), staged=step % 2 == 0)
            server.kill()


@pytest.mark.parametrize("staged", [True, False])
def test_a_server_that_comes_back_with_another_table_stops_the_step(
    monkeypatch: pytest.MonkeyPatch, fp4: Served, transport: str, world: Any, tmp_path: Path, staged: bool
) -> None:
    uds = tmp_path / "s"
    mine = replace(fp4, server=SimpleNamespace(targets=[f"unix:{uds}"]))
    _plugged(monkeypatch, mine)
    with serving(fp4.checkpoint, tmp_path, listen=None, uds=uds):
        runs = Runs(mine, slots=4)
        runs.step([Work("extend", 0, [], TEXT[:4])], staged)
    other = synthesise(tmp_path / "other", 2000, "fp4", seed=5).path
    with (
        serving(other, tmp_path, listen=None, uds=uds),
        pytest.raises(MismatchError, match="table"),
    ):
        runs.step([Work("extend", 0, TEXT[:4], TEXT[4:8])], staged)


@pytest.mark.parametrize("staged", [True, False])
def test_a_step_fails_when_the_server_stays_away(
    monkeypatch: pytest.MonkeyPatch, fp4: Served, transport: str, world: Any, tmp_path: Path, staged: bool
) -> None:
    uds = tmp_path / "s"
    mine = replace(fp4, server=SimpleNamespace(targets=[f"unix:{uds}"]))
    monkeypatch.setenv("ENGRAM_SERVER_WAIT_S", "0.4")
    _plugged(monkeypatch, mine)
    with serving(fp4.checkpoint, tmp_path, listen=None, uds=uds):
        runs = Runs(mine, slots=4)
        runs.step([Work("extend", 0, [], TEXT[:4])], staged)
    with pytest.raises(UnavailableError):
        runs.step([Work("extend", 0, TEXT[:4], TEXT[4:8])], staged)


@pytest.mark.parametrize("staged", [True, False])
def test_a_server_that_does_not_answer_is_waited_for_so_long(
    monkeypatch: pytest.MonkeyPatch, fp4: Served, transport: str, world: Any, tmp_path: Path, staged: bool
) -> None:
    with serving(fp4.checkpoint, tmp_path) as server:
        monkeypatch.setenv("ENGRAM_SERVER_WAIT_S", "0.3")
        monkeypatch.setattr(_settings, "_SLOW_S", 0.3)
        mine = replace(fp4, server=server)
        _plugged(monkeypatch, mine)
        runs = Runs(mine, slots=4)
        runs.step([Work("extend", 0, [], TEXT[:4])], staged)
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises((DeadlineError, UnavailableError)):
            runs.step([Work("extend", 0, TEXT[:4], TEXT[4:8])], staged)
        server.process.send_signal(signal.SIGCONT)
        runs.step([Work("extend", 0, TEXT[:4], TEXT[4:8])], staged)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_each_row_comes_from_the_one_rank_that_owns_it(
    engram: Any, served: Served, world: Any, size: int
) -> None:
    """What an all-reduce would add up. 5 does not divide the columns: rows are then split evenly, within columns."""
    ids = torch.from_numpy(served.truth.ids(TEXT[:9]))
    wanted = by_the_book(served, TEXT, 0, 9)[14]
    total, owners = np.zeros_like(wanted), np.zeros(wanted.shape[:2], dtype=int)
    world.tp_size = size
    for rank in range(size):
        world.tp_rank = rank
        found = bits(Model(served.checkpoint).engrams[1].embed._owned_rows(ids[:, 1]))
        total |= found
        owners += found.any(axis=2)
    assert same(total, wanted.copy())
    assert (owners == 1).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_under_dp_attention_a_rank_takes_all_rows_of_its_own_tokens(
    engram: Any, served: Served, world: Any, rank: int
) -> None:
    """One with a prefill, whose rows are staged, beside one with a decode, whose are not: no collective is joined."""
    world.tp_size, world.tp_rank, world.attn_dp_size = 2, rank, 2
    model = Model(served.checkpoint)
    prefill = SimpleNamespace(engram_staged_rows=stager_of(model).stage(schedule_batch([(TEXT, 0, 5)])))
    decode = SimpleNamespace(engram_staged_rows=None)
    ids = torch.from_numpy(served.truth.ids(TEXT[:5]))
    for batch in (prefill, decode):
        rows = {
            module.embed.layer_id: module.embed_rows(ids[:, module.layer_hash_index], batch, False)
            for module in model.engrams
        }
        check(rows, by_the_book(served, TEXT, 0, 5))


def test_the_scheduler_stages_a_prefill(engram: Any, served: Served) -> None:
    model = Model(served.checkpoint)
    stager = stager_of(model)
    spans = [(TEXT, 0, 4), (WITH_IMAGES, 2, 12), (TEXT, 7, 20)]
    staged = stager.stage(schedule_batch(spans))
    books = [by_the_book(served, *span) for span in spans]
    for module, entry in zip(model.engrams, staged, strict=True):
        wanted = np.concatenate([book[module.embed.layer_id] for book in books])
        batch = SimpleNamespace(engram_staged_rows=staged)
        padded = torch.zeros(len(wanted) + 5, 24, dtype=torch.int64)
        rows = bits(module.embed_rows(padded, batch, False))
        assert same(rows[: len(wanted)].copy(), wanted)
        assert not rows[len(wanted) :].any(), "rows past the staged ones are zeros"
        assert entry[1] == module.embed.layer_id


def test_what_the_scheduler_cannot_stage_is_left_to_the_forward(engram: Any, served: Served) -> None:
    model = Model(served.checkpoint)
    stager = stager_of(model)
    decode = schedule_batch([(TEXT, 3, 4)])
    decode.forward_mode = ForwardMode.DECODE
    assert stager.stage(decode) is None
    on_the_device = schedule_batch([(TEXT[:5], 3, 9)])
    assert stager.stage(on_the_device) is None


# ------------------------------------------------------------------------------------------- full CUDA graphs

CAPTURING = "engram_client.adapters._sglang_graphs.capturing"
GRAPH = 6
"""Requests of a captured step."""


class Captured:
    """Full graphs of a decode and of a verify step, around the buffers that SGLang fills before a replay."""

    def __init__(self, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = runs
        self.backend = sglang_world.FullGraphs(monkeypatch, CAPTURING).backend
        self.batches: dict[str, Any] = {}
        self.found: dict[str, dict[int, torch.Tensor]] = {}
        for kind, width in (("verify", 1 + DRAFTS), ("decode", 1)):
            mode = ForwardMode.TARGET_VERIFY if kind == "verify" else ForwardMode.DECODE
            batch = forward_batch(
                mode,
                [(8, 0, [0] * width)] * GRAPH,
                spec_info=SimpleNamespace(draft_token_num=width) if kind == "verify" else None,
            )
            batch.out_cache_loc.zero_()
            self.batches[kind] = batch
            self.backend.capture_one(kind, lambda batch=batch: looked_up(runs.model, batch))
            self.found[kind] = self.backend._outputs[kind]

    def step(self, works: Sequence[Work]) -> None:
        batch, kind = self.batches[works[0].kind], works[0].kind
        live = forward_batch(batch.forward_mode, [(work.slot, work.begin, work.tokens) for work in works])
        tokens = len(live.input_ids)
        for name in ("input_ids", "positions", "out_cache_loc"):
            getattr(batch, name).zero_()[:tokens] = getattr(live, name)
        batch.req_pool_indices.fill_(8)[: len(works)] = live.req_pool_indices
        found = self.backend.replay(kind, live)
        check({layer: rows[:tokens] for layer, rows in found.items()}, self.runs.expected(works))
        assert not any(rows.isnan().any() for rows in found.values())
        self.runs.accept(works)


@pytest.mark.parametrize("seed", range(2))
def test_full_graphs_find_the_rows_of_any_schedule(
    monkeypatch: pytest.MonkeyPatch, fp4: Served, hashes_of_fp4: None, seed: int
) -> None:
    runs, schedule = Runs(fp4, slots=8), Schedule(seed, slots=8, requests=GRAPH)
    captured = Captured(runs, monkeypatch)
    for _ in range(40):
        works = schedule.step(mixed=False)
        if works[0].kind == "extend":
            runs.step(works, staged=True)
        else:
            captured.step(works)


@pytest.mark.parametrize("size", [2, 5])
def test_a_rank_stages_its_own_rows_for_a_full_graph(
    monkeypatch: pytest.MonkeyPatch, engram: Any, served: Served, world: Any, size: int
) -> None:
    world.tp_size = size
    monkeypatch.setattr(engram, "tensor_model_parallel_all_reduce", lambda rows: rows)
    works = [Work("decode", 1, TEXT[:7], TEXT[7:8]), Work("decode", 2, TEXT[:9], TEXT[9:10])]
    total: dict[int, Any] = {}
    for rank in range(size):
        world.tp_rank = rank
        runs = Runs(served, slots=8)
        captured = Captured(runs, monkeypatch)
        for work in works:
            runs.model.hasher.history[work.slot] = torch.tensor(work.before[-3:])
        monkeypatch.setattr(captured.runs, "expected", lambda _: {})
        captured.step(works)
        for layer, rows in captured.found["decode"].items():
            total[layer] = bits(rows[:2]) | total.get(layer, 0)
    for layer, wanted in Runs(served, slots=8).expected(works).items():
        assert same(total[layer], wanted)


def test_a_full_graph_that_wants_other_rows_gets_none(
    monkeypatch: pytest.MonkeyPatch, fp4: Served, hashes_of_fp4: None
) -> None:
    """Ids that change between the staging and the replay, whatever may do that."""
    runs = Runs(fp4, slots=8)
    captured = Captured(runs, monkeypatch)
    works = [Work("decode", 1, TEXT[:7], TEXT[7:8]), Work("decode", 2, TEXT[:9], TEXT[9:10])]
    for work in works:
        runs.model.hasher.history[work.slot] = torch.tensor(work.before[-3:])
    graph = captured.backend._graphs["decode"]
    replay = graph.replay
    graph.replay = lambda: (captured.batches["decode"].input_ids[1].fill_(4051), replay())
    monkeypatch.setattr(runs, "expected", lambda _: {})
    with pytest.raises(AssertionError):  # not a row of NaN
        captured.step(works)
    rows = captured.found["decode"][14]
    assert rows[1].isnan().all()
    assert not rows[0].isnan().any()
    with pytest.raises(RuntimeError, match="other Engram rows than were staged"):
        captured.step(works)


def test_a_step_without_rows_replays_nothing(
    monkeypatch: pytest.MonkeyPatch, fp4: Served, hashes_of_fp4: None
) -> None:
    runs = Runs(fp4, slots=8)
    captured = Captured(runs, monkeypatch)

    def gone(*_: Any) -> None:
        raise UnavailableError("gone")

    monkeypatch.setattr(EngramClient, "_run", gone)
    captured.backend._graphs["decode"].replay = None
    with pytest.raises(UnavailableError):
        captured.step([Work("decode", 1, TEXT[:7], TEXT[7:8])])


def test_a_full_graph_of_prefills_is_refused(
    monkeypatch: pytest.MonkeyPatch, fp4: Served, hashes_of_fp4: None
) -> None:
    runs = Runs(fp4, slots=8)
    backend = sglang_world.FullGraphs(monkeypatch, CAPTURING).backend
    history = torch.zeros(1, 3, dtype=torch.int32)
    batch = forward_batch(ForwardMode.EXTEND, [(1, 0, TEXT[:4])], engram_history=history)
    with pytest.raises(RuntimeError, match="--cuda-graph-backend-prefill breakable"):
        backend.capture_one("prefill", lambda: looked_up(runs.model, batch))


@pytest.mark.parametrize(("said", "stages"), [(None, True), ("1", True), ("0", False)])
def test_prefills_are_staged_unless_sglang_is_told_otherwise(
    engram: Any, served: Served, monkeypatch: pytest.MonkeyPatch, said: str | None, stages: bool
) -> None:
    if said is not None:
        monkeypatch.setenv("SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING", said)
    assert (stager_of(Model(served.checkpoint)) is not None) == stages


def test_tables_that_sglang_made_after_all_stop_it(engram: Any, served: Served) -> None:
    """It logs a hook that cannot be applied, and goes on."""
    model = Model(served.checkpoint)
    model.engrams[1].embed = torch.nn.Module()
    with pytest.raises(RuntimeError, match="has not applied engram-server's hook"):
        stager_of(model)


def test_a_breakable_graph_fetches_at_each_replay(engram: Any, served: Served, world: Any) -> None:
    """While it is captured ids are not computed yet: nothing is asked for."""
    model = Model(served.checkpoint)
    embed = model.engrams[0].embed
    ids = torch.full((4, 24), 2**40)
    with capturing() as graph:
        out = embed._owned_rows(ids)
    assert not bits(out).any()
    for begin in (0, 6):
        ids.copy_(torch.from_numpy(served.truth.ids(TEXT)[begin : begin + 4, 0]))
        graph.replay()
        assert same(bits(out), by_the_book(served, TEXT, begin, begin + 4)[1].copy())


def test_a_replay_takes_the_rows_staged_for_its_batch(engram: Any, served: Served, world: Any) -> None:
    model = Model(served.checkpoint)
    stager = stager_of(model)
    world.tp_size, world.in_breakable_graph = 1, True
    embed = model.engrams[1].embed
    with capturing() as graph:
        out = embed._owned_rows(torch.zeros(8, 24, dtype=torch.int64))
    staged = stager.stage(schedule_batch([(TEXT, 2, 8)]))
    world.forward_context = SimpleNamespace(forward_batch=SimpleNamespace(engram_staged_rows=staged))
    graph.replay()
    assert same(bits(out)[:6].copy(), by_the_book(served, TEXT, 2, 8)[14].copy())
    assert not bits(out)[6:].any()


def test_rows_are_those_of_sglangs_own_table(
    monkeypatch: pytest.MonkeyPatch, fp8: Served, world: Any
) -> None:
    own = Model(fp8.checkpoint).engrams[0].embed
    packed = torch.from_numpy(fp8.truth.oracle.packed(1, np.arange(own.rows)))
    own.weight.weight_loader(own.weight, packed[:, :256].contiguous().view(torch.float8_e4m3fn))
    own.scale.weight_loader(own.scale, packed[:, 256:].contiguous().view(torch.float8_e8m0fnu))
    _plugged(monkeypatch, fp8)
    ids = torch.from_numpy(fp8.truth.ids(TEXT))[:, 0]
    assert torch.equal(
        Model(fp8.checkpoint).engrams[0].embed(ids).view(torch.int16), own(ids).view(torch.int16)
    )


def test_scale_bytes_0_and_255_are_read_as_sglang_does(
    monkeypatch: pytest.MonkeyPatch, fp8: Served, world: Any
) -> None:
    """2^-127 and NaN on a CPU. NaN is the canonical one here, and whichever torch makes there."""
    own = Model(fp8.checkpoint).engrams[0].embed
    ids = torch.arange(48).reshape(2, 24)
    rows = np.random.default_rng(5).integers(0, 256, (2, 1, 24, 264), dtype=np.uint8)
    rows[..., 256:] = np.array([0, 255, 1, 254, 127, 126, 0, 255], dtype=np.uint8)
    flat = torch.from_numpy(rows.reshape(48, 264))
    with torch.no_grad():
        own.weight[:48] = flat[:, :256].contiguous().view(torch.float8_e4m3fn)
        own.scale[:48] = flat[:, 256:].contiguous().view(torch.float8_e8m0fnu)
    _plugged(monkeypatch, fp8)
    monkeypatch.setattr(EngramClient, "_run", lambda *_: SimpleNamespace(values=rows.copy(), format="packed"))
    found, expected = Model(fp8.checkpoint).engrams[0].embed(ids), own(ids)
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found[numbers].view(torch.int16), expected[numbers].view(torch.int16))


def test_another_table_is_refused_when_the_model_is_made(
    monkeypatch: pytest.MonkeyPatch, fp4: Served, fp8: Served, world: Any
) -> None:
    _plugged(monkeypatch, fp4)
    model = Model(fp8.checkpoint)
    with pytest.raises(MismatchError, match=r"table of layer 1 \(fp4 there\)"):
        stager_of(model)


def test_a_text_only_model_agrees_with_any_image_token(engram: Any, served: Served) -> None:
    model = Model(served.checkpoint, image_token_id=None)
    assert stager_of(model) is not None


def test_the_embedding_holds_no_table(engram: Any, served: Served) -> None:
    model = Model(served.checkpoint)
    assert not list(model.engrams.parameters())
    for module in model.engrams:
        module.embed.finish_load(label="a layer")


@pytest.fixture
def hooks() -> Iterator[Any]:
    """SGLang's own registry; what it replaced is put back."""
    registry = WHEEL.load("sglang.srt.plugins.hook_registry").HookRegistry
    kept = {
        (module, name): getattr(module, name)
        for module, name in (
            (WHEEL.load(ENGRAM), "EngramEmbedding"),
            (WHEEL.load(STAGING), "EngramEmbedding"),
            (WHEEL.load(STAGING), "EngramRowStager"),
            (sglang_world.DeepseekV4ForCausalLM, "load_weights"),
            (sglang_world.DefaultModelLoader, "_prepare_weights"),
            (WHEEL.load(FULL).FullCudaGraphBackend, "capture_one"),
            (WHEEL.load(FULL).FullCudaGraphBackend, "replay"),
            (sglang_world.Scheduler, "_add_request_to_queue"),
        )
    }
    yield registry
    registry.reset()
    for (module, name), value in kept.items():
        setattr(module, name, value)


def test_register_does_nothing_unless_told_a_target(hooks: Any) -> None:
    plugin.register()
    assert not hooks._hooks


def shard(*names: str) -> bytes:
    """A safetensors file of these tensors, a byte each."""
    head, located = build_header([(name, "U8", (1,)) for name in names], {})
    return head + bytes(len(located))


def test_sglang_applies_what_register_asks_for(
    monkeypatch: pytest.MonkeyPatch,
    hooks: Any,
    fp4: Served,
    world: Any,
    clients: list[EngramClient],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ENGRAM_SERVER_TARGET", fp4.target)
    plugin.register()
    hooks.apply_hooks()
    assert len(hooks._patched) == 7
    model = Model(fp4.checkpoint)
    stager_of(model)
    looked_up(model, forward_batch(ForwardMode.DECODE, [(1, 0, TEXT[:1])]))
    assert len(clients) == 1, "each client takes a part of the server's shared memory"
    assert not list(model.engrams.parameters())
    names = ["layers.1.engram.embed.weight", "layers.1.engram.embed.scale", "embed.weight"]
    loaded = sglang_world.DeepseekV4ForCausalLM().load_weights((name, None) for name in names)
    assert loaded == {"embed.weight"}
    loader = sglang_world.DefaultModelLoader()
    tables, others = tmp_path / "tables.safetensors", tmp_path / "others.safetensors"
    tables.write_bytes(shard("layers.1.engram.embed.weight", "layers.1.engram.embed.scale"))
    others.write_bytes(shard("layers.14.engram.embed.weight", "embed.weight"))
    (tmp_path / "unreadable.safetensors").write_bytes(b"version https://git-lfs")
    kept = [str(others), str(tmp_path / "unreadable.safetensors")]
    assert loader._prepare_weights(str(tmp_path)) == (str(tmp_path), kept, True)
    scheduler, before = sglang_world.Scheduler(), fp4.cached_bytes()
    request = SimpleNamespace(origin_input_ids=[PAD_SHIFT + 3, *range(3000, 3300)])
    scheduler._add_request_to_queue(request)
    assert scheduler.queued == [request]
    until(lambda: fp4.cached_bytes() > before)


@pytest.mark.parametrize(("name", "value"), [("WAIT_S", "soon"), ("PIN", "1=abc")])
def test_settings_in_error_stop_the_engine(
    monkeypatch: pytest.MonkeyPatch, hooks: Any, name: str, value: str
) -> None:
    """SGLang would log a ValueError and fill its memory with tables."""
    monkeypatch.setenv("ENGRAM_SERVER_TARGET", "127.0.0.1:50051")
    monkeypatch.setenv(f"ENGRAM_SERVER_{name}", value)
    with pytest.raises(SystemExit, match=f"ENGRAM_SERVER_{name}"):
        plugin.register()
