"""The vLLM plugin inside vLLM's own classes: rows of whole steps, against rows looked up by the book."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_world
from conftest import Served, bits
from schedules import Schedule, Work
from support.serving import serving, until
from support.truth import IMAGE, same
from vllm_world import WORLD, CUDAGraphMode, Requests, input_batch, vllm_config

from engram_client import EngramClient, MismatchError, UnavailableError
from engram_client.adapters import vllm as plugin
from engram_client.adapters._settings import Settings
from engram_client.adapters._vllm_model import build
from engram_server.tables.synth import synthesise

TEXT = [0, 3, 17, 17, 29, 4051, 128000, 5, 6, 7, *range(1000, 1030), 3, 17, 64000, 9, 8]
WITH_IMAGE = [3, 17, IMAGE, IMAGE, IMAGE, 29, 5, 6, 7, 8, IMAGE, 4051]


@pytest.fixture
def world() -> Iterator[vllm_world.World]:
    yield WORLD
    WORLD.tp_size, WORLD.tp_rank, WORLD.dp_size, WORLD.breakable = 1, 0, 1, True


class Engine:
    """The plugin's model and its model state, and steps of them."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        monkeypatch.setenv("ENGRAM_SERVER_TARGET", served.target)
        self.served = served
        self.config = vllm_config(served.checkpoint, **changes)
        self.model = getattr(plugin, plugin.ARCHITECTURE)(vllm_config=self.config)
        state = self.model.get_model_state_cls()
        self.state = state(self.config, self.model, None, torch.device("cpu"))
        self.requests = Requests()

    def step(self, chunks: Sequence[tuple[int, int, Sequence[int]]], padded: int) -> dict[int, torch.Tensor]:
        """Prepare a step and run what the forward does before its layers; each layer's rows [padded, C, 256]."""
        for module in self.model.layers.values():
            module.staged_rows.fill_(7)  # what an earlier step left
        batch = input_batch(chunks, padded)
        inputs = self.state.prepare_inputs(batch, self.requests)
        window = inputs["lookback_token_ids"]
        ids, hashes = batch.input_ids, self.model.engram_hash
        hash_ids = hashes(
            ids, batch.positions, batch.query_start_loc, ids == IMAGE, window, window == IMAGE, None, None
        )
        rows = {}
        for layer, module in self.model.layers.items():
            module.prepare_embeddings(hash_ids[:, module.layer_hash_index])
            rows[int(layer)] = module._ready_rows(padded).clone()
        return rows

    def columns(self) -> slice:
        begin, end = next(iter(self.model.layers.values())).embed_tokens.columns
        return slice(begin, end)


def by_the_book(served: Served, chunks: Sequence[tuple[Sequence[int], int, int]]) -> dict[int, np.ndarray]:
    """bf16 bits [T, 24, 256] by layer: of each (whole sequence, begin, end), as one pass over it gives them."""
    ids = np.concatenate([served.truth.ids(tokens)[begin:end] for tokens, begin, end in chunks])
    values = served.truth.values(ids, "bf16")
    return {layer: values[:, index] for index, layer in enumerate(served.truth.layers)}


def check(engine: Engine, rows: dict[int, torch.Tensor], expected: dict[int, np.ndarray]) -> None:
    for layer, wanted in expected.items():
        found, columns = bits(rows[layer]), engine.columns()
        count = columns.stop - columns.start
        assert same(found[: len(wanted), :count].copy(), wanted[:, columns].copy())
        assert not found[len(wanted) :].any(), "padded rows are zeros"
        assert not found[:, count:].any(), "padded columns are zeros"


def accepted(engine: Engine, sequences: Sequence[Sequence[int]]) -> None:
    for request, tokens in enumerate(sequences):
        engine.requests.accept(request, tokens)


# --------------------------------------------------------------------------------------------- staged steps


def test_chunked_prefill_gets_the_rows_of_one_pass(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(served, monkeypatch)
    accepted(engine, [TEXT])
    for begin, end, padded in ((0, 2, 8), (2, 3, 1), (3, 20, 32), (20, len(TEXT), 48)):
        rows = engine.step([(0, begin, TEXT[begin:end])], padded)
        check(engine, rows, by_the_book(served, [(TEXT, begin, end)]))


def test_decode_of_several_requests_looks_back_in_each(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fp4, monkeypatch)
    sequences = [TEXT, TEXT[7:], WITH_IMAGE]
    accepted(engine, sequences)
    for position in (1, 2, 3, 4, 9):
        order = (2, 0, 1)
        chunks = [(request, position, sequences[request][position : position + 1]) for request in order]
        rows = engine.step(chunks, 4)
        expected = by_the_book(fp4, [(sequences[request], position, position + 1) for request in order])
        check(engine, rows, expected)


def test_a_prefill_beside_decodes(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fp4, monkeypatch)
    sequences = [TEXT, TEXT[3:], WITH_IMAGE]
    accepted(engine, sequences)
    spans = [(0, 11, 12), (1, 20, 38), (2, 4, 5)]
    rows = engine.step([(request, begin, sequences[request][begin:end]) for request, begin, end in spans], 24)
    check(engine, rows, by_the_book(fp4, [(sequences[r], begin, end) for r, begin, end in spans]))


def test_image_spans_break_n_grams_in_every_cut(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fp4, monkeypatch)
    accepted(engine, [WITH_IMAGE])
    for cut in range(1, len(WITH_IMAGE)):
        rows = engine.step([(0, cut, WITH_IMAGE[cut:])], 12)
        check(engine, rows, by_the_book(fp4, [(WITH_IMAGE, cut, len(WITH_IMAGE))]))


def test_unknown_look_back_is_pad_for_its_own_shift(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fp4, monkeypatch)
    known = [17, -1, 29]
    accepted(engine, [[*known, 5, 6]])
    rows = engine.step([(0, 3, [5, 6])], 4)
    values = fp4.truth.values(fp4.truth.ids([5, 6], known), "bf16")
    check(engine, rows, {layer: values[:, index] for index, layer in enumerate(fp4.truth.layers)})


def test_rejected_drafts_never_enter_the_history(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify step hashes the last token and three drafts; one draft is accepted, and the next step goes on."""
    engine = Engine(fp4, monkeypatch)
    accepted(engine, [TEXT[:10]])
    verify = [TEXT[9], TEXT[10], 777, 778]
    rows = engine.step([(0, 9, verify)], 4)
    check(engine, rows, by_the_book(fp4, [([*TEXT[:9], *verify], 9, 13)]))
    accepted(engine, [[*TEXT[:11], 55]])  # TEXT[10] was right; 55 comes in the place of 777
    after = [55, 901, 902, 903]
    rows = engine.step([(0, 11, after)], 6)
    check(engine, rows, by_the_book(fp4, [([*TEXT[:11], *after], 11, 15)]))


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_a_tensor_parallel_rank_stages_its_own_columns(
    served: Served, monkeypatch: pytest.MonkeyPatch, world: vllm_world.World, size: int
) -> None:
    """5 leaves the last rank a column that is padding."""
    world.tp_size = size
    for rank in range(size):
        world.tp_rank = rank
        engine = Engine(served, monkeypatch)
        accepted(engine, [TEXT])
        check(engine, engine.step([(0, 5, TEXT[5:12])], 8), by_the_book(served, [(TEXT, 5, 12)]))
        assert engine.columns().start == rank * -(-24 // size)


def test_staged_rows_keep_their_address(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph has captured, a later step fills."""
    engine = Engine(fp4, monkeypatch)
    accepted(engine, [TEXT])
    captured = {int(layer): module.staged_rows for layer, module in engine.model.layers.items()}
    for rows in captured.values():
        rows.fill_(7)
    engine.state.prepare_dummy_inputs(2, 16)
    assert not any(bits(rows[:16]).any() for rows in captured.values()), (
        "graphs are captured over finite rows"
    )
    engine.step([(0, 4, TEXT[4:9])], 16)
    for layer, wanted in by_the_book(fp4, [(TEXT, 4, 9)]).items():
        assert same(bits(captured[layer][:5]), wanted.copy())


def test_a_batch_without_requests_gets_zeros_and_asks_for_nothing(
    fp4: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(fp4, monkeypatch)
    accepted(engine, [TEXT])
    engine.step([(0, 0, TEXT[:8])], 8)  # whose rows are not to be left there
    batch = input_batch([(0, 0, [1, 2, 3, 4])], 8)
    batch.req_ids = ["req_0_of_nobody"]
    monkeypatch.setattr(engine.model.engram_stager._source, "fill", None)
    engine.state.prepare_inputs(batch, engine.requests)
    assert not any(bits(module.staged_rows[:8]).any() for module in engine.model.layers.values())


def test_a_forward_whose_rows_were_not_staged_fails(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fp4, monkeypatch)
    accepted(engine, [TEXT])
    engine.step([(0, 0, TEXT[:4])], 4)
    module = engine.model.layers["1"]
    with pytest.raises(RuntimeError, match="a forward of 5 tokens has Engram rows staged for 4"):
        module.prepare_embeddings(torch.zeros(5, 24, dtype=torch.int32))


def test_a_step_whose_rows_cannot_be_had_leaves_none(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on in spite of the error does not go on with the step before."""
    engine = Engine(fp4, monkeypatch)
    accepted(engine, [TEXT])
    engine.step([(0, 0, TEXT[:4])], 4)

    def gone(*_: Any) -> None:
        raise UnavailableError("gone")

    monkeypatch.setattr(EngramClient, "_run", gone)
    batch = input_batch([(0, 4, TEXT[4:6])], 2)
    with pytest.raises(UnavailableError):
        engine.state.prepare_inputs(batch, engine.requests)
    with pytest.raises(RuntimeError, match="a forward of 2 tokens has Engram rows staged for 0"):
        engine.model.layers["1"].prepare_embeddings(torch.zeros(2, 24, dtype=torch.int32))


def test_the_gate_sees_the_rows(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Engram.embed`, as the layer's forward calls it."""
    engine = Engine(fp4, monkeypatch)
    accepted(engine, [TEXT])
    engine.step([(0, 0, TEXT[:6])], 6)
    found = engine.model.layers["14"].embed(torch.zeros(6, 24, dtype=torch.int32))
    assert same(bits(found), by_the_book(fp4, [(TEXT, 0, 6)])[14].copy())


def test_the_model_holds_no_table_and_reads_none(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fp4, monkeypatch)
    names = [name for name, _ in engine.model.named_parameters()]
    assert all("embed" not in name for name in names)
    table = ["layers.1.engram.embed.weight", "layers.14.engram.embed.scale"]
    kept = ["embed.weight", "layers.1.engram.wkv.weight", "layers.1.engram.q_weight", "vision.embed.scale"]
    assert all(engine.model.is_unused_checkpoint_weight(name) for name in table)
    assert not any(engine.model.is_unused_checkpoint_weight(name) for name in kept)
    assert engine.model.load_weights((name, None) for name in [*table, *kept]) == set(kept)


# --------------------------------------------------------------------------------------------- whole schedules


def computed(engine: Engine, works: Sequence[Work], padding: int) -> None:
    """A step of this work: every row compared."""
    for work in works:  # behind what is known of a request lies what another has left in its slot
        engine.requests.accept(work.slot, [*work.before, *[4051] * 9])
    tokens = sum(len(work.tokens) for work in works)
    rows = engine.step([(work.slot, work.begin, work.tokens) for work in works], tokens + padding)
    spans = [([*work.before, *work.tokens], work.begin, work.begin + len(work.tokens)) for work in works]
    check(engine, rows, by_the_book(engine.served, spans))


def test_rows_of_any_schedule(fp4: Served, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    engine, schedule = Engine(fp4, monkeypatch), Schedule(3, slots=vllm_world.MAX_REQUESTS, requests=4)
    for step in range(16):
        computed(engine, schedule.step(mixed=True), padding=step % 3 * 5)


def test_a_schedule_outlives_its_server(
    fp4: Served, monkeypatch: pytest.MonkeyPatch, transport: str, tmp_path: Path
) -> None:
    """Killed in the midst of it, twice, and started again."""
    uds = tmp_path / "s"
    mine = replace(fp4, server=SimpleNamespace(targets=[f"unix:{uds}"]))
    schedule, engine = Schedule(7, slots=vllm_world.MAX_REQUESTS, requests=4), None
    for _ in range(3):  # the engine's clients find the second and the third by themselves
        with serving(fp4.checkpoint, tmp_path, listen=None, uds=uds) as server:
            engine = engine or Engine(mine, monkeypatch)
            for _ in range(3):
                computed(engine, schedule.step(mixed=True), padding=2)
            server.kill()


def test_a_server_that_comes_back_with_another_table_stops_the_step(
    fp4: Served, monkeypatch: pytest.MonkeyPatch, transport: str, tmp_path: Path
) -> None:
    uds = tmp_path / "s"
    with serving(fp4.checkpoint, tmp_path, listen=None, uds=uds):
        engine = Engine(replace(fp4, server=SimpleNamespace(targets=[f"unix:{uds}"])), monkeypatch)
        computed(engine, [Work("extend", 0, [], TEXT[:4])], padding=0)
    other = synthesise(tmp_path / "other", 2000, "fp4", seed=5).path
    with (
        serving(other, tmp_path, listen=None, uds=uds),
        pytest.raises(MismatchError, match="table"),
    ):
        computed(engine, [Work("extend", 0, TEXT[:4], TEXT[4:8])], padding=0)
    with pytest.raises(RuntimeError, match="rows staged for 0"):
        engine.model.layers["1"].prepare_embeddings(torch.zeros(1, 24, dtype=torch.int32))


# --------------------------------------------------------------------------------------------- inline lookups


def real_embedding(served: Served, layer: int) -> Any:
    """vLLM's own table of a layer, loaded by its own loader from the checkpoint's bytes."""
    engram = vllm_world.WHEEL.load(vllm_world.ENGRAM)
    config = vllm_config(served.checkpoint)
    layout = engram.EngramLayout.from_config(config.model_config.hf_config)
    index = layout.layer_ids.index(layer)
    sizes = tuple(size for order in layout.primes[index] for size in order)
    table = engram.ParallelEngramEmbedding(layout.num_embeddings[index], 256, sizes)
    packed = torch.from_numpy(served.truth.oracle.packed(layer, np.arange(layout.num_embeddings[index])))
    codes, scales = packed[:, :256].contiguous(), packed[:, 256:].contiguous()
    table.weight.weight_loader(table.weight, codes.view(torch.float8_e4m3fn))
    table.weight_scale_inv.weight_loader(table.weight_scale_inv, scales.view(torch.float8_e8m0fnu))
    return table


def step_ids(served: Served, layer: int) -> torch.Tensor:
    """int32 [T, 24], a strided view, with dead rows as vLLM has them."""
    ids = served.truth.ids(WITH_IMAGE).astype(np.int32)
    ids[3] = -1
    ids[7, :, 5:9] = -1
    return torch.from_numpy(ids)[:, served.truth.layers.index(layer)]


def outputs(dtype: torch.dtype, tokens: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A place among others, as EngramBatch lays out packed rows, and all of the memory around it."""
    width = 256 if dtype == torch.bfloat16 else 264
    memory = torch.full((tokens, 2, columns, width), 3, dtype=dtype)
    return (memory[:, 1] if dtype == torch.uint8 else memory[:, 1].contiguous()), memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "packed"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_lookup_answers_as_the_table_would(
    fp8: Served, monkeypatch: pytest.MonkeyPatch, world: vllm_world.World, size: int, dtype: torch.dtype
) -> None:
    """vLLM's kernel over vLLM's table, beside the plugin's rows: the same bytes for each rank, none beside them."""
    world.tp_size = size
    monkeypatch.setenv("ENGRAM_SERVER_LOOKUP", "inline")
    for rank in {0, size // 2, size - 1}:
        world.tp_rank = rank
        engine = Engine(fp8, monkeypatch, mode="NONE", offload=False)
        ours, theirs = engine.model.layers["14"].embed_tokens, real_embedding(fp8, 14)
        ids, columns = step_ids(fp8, 14), theirs.part_n_hash_cols
        found, around = outputs(dtype, len(ids), columns)
        expected, _ = outputs(dtype, len(ids), columns)
        ours.lookup(ids, found)
        theirs.lookup(ids, expected)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        if dtype == torch.uint8:
            assert (around[:, 0] == 3).all(), "rows of another layer are untouched"


def test_an_inline_forward_is_vllms_own(fp8: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_SERVER_LOOKUP", "inline")
    engine = Engine(fp8, monkeypatch, mode="NONE", offload=False)
    assert type(engine.state) is vllm_world.WHEEL.load(vllm_world.STATE).DeepseekV41ModelState
    ids = step_ids(fp8, 1)
    found = engine.model.layers["1"].embed_tokens(ids)
    assert torch.equal(found.view(torch.int16), real_embedding(fp8, 1)(ids).view(torch.int16))
    engine.model.layers["1"].prepare_embeddings(ids)
    staged = engine.model.layers["1"].staged_rows[: len(ids)]
    assert torch.equal(staged.view(torch.int16), found.view(torch.int16))


# --------------------------------------------------------------------------------------------- at the start


REFUSED: list[tuple[dict[str, Any], dict[str, str], bool, str]] = [
    ({"dp": 2, "across_dp": True}, {}, True, '"embedding_across_dp": false'),
    ({"v2": False}, {}, True, "VLLM_USE_V2_MODEL_RUNNER=1"),
    ({"pcp": 2}, {}, True, "--prefill-context-parallel-size 1"),
    ({}, {"LOOKUP": "inline"}, True, "unset ENGRAM_SERVER_LOOKUP"),
    ({"mode": "FULL_DECODE_ONLY"}, {"LOOKUP": "inline"}, True, "FULL_DECODE_ONLY captures whole forwards"),
    ({"mode": "PIECEWISE", "offload": False}, {"LOOKUP": "inline"}, True, '"cpu_offload": true'),
    ({"mode": "PIECEWISE"}, {"LOOKUP": "inline"}, False, "VLLM_USE_BREAKABLE_CUDAGRAPH=1"),
]


@pytest.mark.parametrize(("changes", "settings", "breakable", "says"), REFUSED, ids=lambda case: str(case))
def test_what_would_freeze_or_bypass_rows_is_refused_by_name(
    fp4: Served,
    monkeypatch: pytest.MonkeyPatch,
    world: vllm_world.World,
    changes: dict[str, Any],
    settings: dict[str, str],
    breakable: bool,
    says: str,
) -> None:
    world.breakable = breakable
    for name, value in settings.items():
        monkeypatch.setenv(f"ENGRAM_SERVER_{name}", value)
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        Engine(fp4, monkeypatch, **changes)


def test_what_keeps_rows_live_is_not_refused(
    fp4: Served, monkeypatch: pytest.MonkeyPatch, world: vllm_world.World
) -> None:
    for mode in ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"):
        Engine(fp4, monkeypatch, mode=mode, offload=False, dp=2)
    monkeypatch.setenv("ENGRAM_SERVER_LOOKUP", "inline")
    Engine(fp4, monkeypatch, mode="NONE", offload=False, v2=False)
    assert CUDAGraphMode.PIECEWISE.has_piecewise_cudagraphs()


def test_replicas_that_share_memory_are_told_not_to(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """No check of /dev/shm, no huge pages: there is nothing to put there. dp_size 1: nothing is exchanged."""
    engine = Engine(fp4, monkeypatch, dp=2)
    assert engine.config.engram_config.dp_shared_memory is False
    assert engine.config.engram_config.use_thp is False
    layers = list(engine.model.layers.values())
    assert vllm_world.WHEEL.load(vllm_world.ENGRAM).EngramBatch.create(layers, 8) is None


def test_another_checkpoint_than_the_servers_is_refused(
    fp4: Served, fp8: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 tables in the engine's own directory, FP4 ones behind the server."""
    mixed = replace(fp4, checkpoint=fp8.checkpoint)
    with pytest.raises(MismatchError, match=r"table of layer 1 \(fp4 there\)"):
        Engine(mixed, monkeypatch)


def test_a_model_without_engram_layers_needs_no_server(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a pipeline stage without them."""
    config = vllm_config(fp4.checkpoint)
    config.engram_config = None
    plugin.refuse_unsuited(config, Settings(("127.0.0.1:1",)))
    monkeypatch.setenv("ENGRAM_SERVER_TARGET", "127.0.0.1:1")
    monkeypatch.setattr(vllm_world.WHEEL.load(vllm_world.ENGRAM), "NgramHashState", type("Other", (), {}))
    made: list[None] = []
    assert build(torch.nn.Module(), lambda: made.append(None), config, Settings(("127.0.0.1:1",))) is None
    assert made == [None]


def test_vllms_log_says_that_rows_come_from_a_server(
    fp4: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Below vLLM's own name: it shows no other."""
    caplog.set_level("INFO", logger="vllm")
    Engine(fp4, monkeypatch)
    said = [record.name for record in caplog.records if "Engram rows of layers 1, 14" in record.message]
    assert said == ["vllm.engram_server"]


def test_the_class_of_vllm_is_left_as_it_was(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engram = vllm_world.WHEEL.load(vllm_world.ENGRAM)
    before = engram.Engram._create_embedding
    Engine(fp4, monkeypatch)
    assert engram.Engram._create_embedding is before


def test_register_does_nothing_unless_told_a_target() -> None:
    WORLD.registered.clear()
    before = vllm_world.Scheduler.add_request
    plugin.register()
    assert not WORLD.registered
    assert vllm_world.Scheduler.add_request is before


def test_register_names_the_model_and_hands_prompts_on(fp4: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_SERVER_TARGET", fp4.target)
    monkeypatch.setattr(vllm_world.Scheduler, "add_request", vllm_world.Scheduler.add_request)
    plugin.register()
    plugin.register()  # vLLM loads plugins in every process, and may do so twice
    assert WORLD.registered == {plugin.ARCHITECTURE: f"{plugin.__name__}:{plugin.ARCHITECTURE}"}
    scheduler = vllm_world.Scheduler()
    request = SimpleNamespace(prompt_token_ids=list(range(2000, 2400)))
    before = fp4.cached_bytes()
    scheduler.add_request(request)
    assert scheduler.requests == [request]
    until(lambda: fp4.cached_bytes() > before)
    scheduler.add_request(SimpleNamespace(prompt_token_ids=None))  # a prompt of embeddings
