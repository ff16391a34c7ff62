"""What both plugins share: settings, the handshake, rows written in place, a server that goes away."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Served
from support.serving import serving
from support.truth import Truth, same

from engram_client import EngramClient, InvalidRequestError, MismatchError, UnavailableError
from engram_client.adapters import _handshake, _prompts
from engram_client.adapters._handshake import EngineFacts
from engram_client.adapters._rows import RowSource, Wanted
from engram_client.adapters._settings import Settings

CPU = torch.device("cpu")


def test_settings_say_what_the_environment_says() -> None:
    digest = "ab" * 32
    environment = {
        "ENGRAM_SERVER_TARGET": "unix:/run/a.sock, 10.0.0.2:50051",
        "ENGRAM_SERVER_WAIT_S": "2.5",
        "ENGRAM_SERVER_LOOKUP": "inline",
        "ENGRAM_SERVER_PREFETCH": "0",
        "ENGRAM_SERVER_PIN": f"1={digest}, 14={digest}",
    }
    pins = {1: bytes.fromhex(digest), 14: bytes.fromhex(digest)}
    targets = ("unix:/run/a.sock", "10.0.0.2:50051")
    assert Settings.from_environment(environment) == Settings(targets, 2.5, "inline", False, pins)
    assert Settings.from_environment({"ENGRAM_SERVER_TARGET": " "}) is None
    assert Settings.from_environment({}) is None


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TARGET", "nowhere", "'nowhere' is not a target"),
        ("WAIT_S", "-1", "expected seconds"),
        ("WAIT_S", "nan", "expected seconds"),
        ("LOOKUP", "eager", "expected one of staged, inline"),
        ("PREFETCH", "yes", "expected 0 or 1"),
        ("PIN", "1=00", "expected LAYER=DIGEST"),
        ("PIN", "one=" + "00" * 32, "expected LAYER=DIGEST"),
    ],
)
def test_settings_in_error_are_named(name: str, value: str, says: str) -> None:
    environment = {"ENGRAM_SERVER_TARGET": "127.0.0.1:1", f"ENGRAM_SERVER_{name}": value}
    with pytest.raises(ValueError, match=says):
        Settings.from_environment(environment)


# ------------------------------------------------------------------------------------------------- handshake


def facts_of(truth: Truth, **changes: Any) -> EngineFacts:
    model = truth.model
    facts = {
        "rows": {layer: truth.oracle.rows(layer) for layer in truth.layers},
        "head_dim": 256,
        "token_map": np.array(model.token_map),
        "primes": np.array(model.primes),
        "multipliers": np.array(model.multipliers),
        "pad_class": model.pad_class,
        "image_token_id": model.image_token_id,
    }
    return EngineFacts(**{**facts, **changes})


def test_a_server_of_the_same_checkpoint_is_agreed_with(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = Settings((served.target,))
    with settings.client() as client:
        _handshake.agree(client.describe(), facts_of(served.truth), str(served.checkpoint), settings)
    said = f"Engram rows of layers 1, 14 come from {served.target}; table digests compared: 1, 14"
    assert said in caplog.messages


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda truth: {"token_map": np.roll(truth.model.token_map, 1)}, "digest of the token map"),
        (lambda truth: {"primes": np.array(truth.model.primes)[::-1]}, "digest of the hash"),
        (lambda truth: {"image_token_id": 5}, "digest of the hash"),
        (lambda truth: {"rows": {1: 7, 14: truth.oracle.rows(14)}}, "layer 1 has .* rows there and 7"),
        (lambda truth: {"rows": {1: truth.oracle.rows(1), 9: 5}}, "layer 9 is not served"),
        (lambda truth: {"head_dim": 128}, "256 values there and 128 here"),
    ],
)
def test_a_server_of_something_else_is_refused(fp4: Served, change: Any, says: str) -> None:
    with EngramClient(fp4.target) as client, pytest.raises(MismatchError, match=says):
        _handshake.check(client.describe(), facts_of(fp4.truth, **change(fp4.truth)), {}, fp4.target)


def test_the_engines_own_tables_are_compared_with_the_servers(fp4: Served, fp8: Served) -> None:
    """FP4 rows for an engine whose checkpoint has FP8 ones."""
    tables = _handshake.known_tables(str(fp8.checkpoint), (1, 14), Settings((fp4.target,)))
    with EngramClient(fp4.target) as client:
        with pytest.raises(MismatchError, match=r"table of layer 1 \(fp4 there\).*table of layer 14"):
            _handshake.check(client.describe(), facts_of(fp4.truth), tables, fp4.target)
        served = {layer: table.digest for layer, table in client.describe().tables.items()}
        # A pin says that these are the tables that are meant, whatever the engine's directory holds.
        pinned = _handshake.known_tables(str(fp8.checkpoint), (1, 14), Settings((fp4.target,), pins=served))
        _handshake.check(client.describe(), facts_of(fp4.truth), pinned, fp4.target)
        wrong = _handshake.known_tables("", (1, 14), Settings((fp4.target,), pins={14: bytes(32)}))
        with pytest.raises(MismatchError, match="table of layer 14"):
            _handshake.check(client.describe(), facts_of(fp4.truth), wrong, fp4.target)


def test_an_engine_whose_checkpoint_lacks_the_tables_is_warned(
    fp4: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_bytes((fp4.checkpoint / "config.json").read_bytes())
    for checkpoint in (str(tmp_path), "deepseek-ai/DeepSeek-V4.1-Flash"):
        caplog.clear()
        assert _handshake.known_tables(checkpoint, (1, 14), Settings((fp4.target,))) == {}
        assert "does not hold the Engram tables of layers 1, 14" in caplog.text


# ------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("format", "width"), [("bf16", 256), ("packed-fp8", 264)])
@pytest.mark.parametrize("rule", ["vllm", "sglang"], ids=["served", "converted"])
def test_rows_are_written_where_they_are_wanted(
    served: Served, dtype: torch.dtype, format: str, width: int, rule: Any
) -> None:
    """By every way of converting them: strided ids, strided places, -1, padding, and no byte beside."""
    ids = served.truth.ids([3, 17, 29, 5])
    ids[1, 0] = -1
    ids[2, 1, 4:7] = -1
    kind = torch.bfloat16 if format == "bf16" else torch.uint8
    memory = torch.full((2, 7, 12, width), 9, dtype=kind)
    outs = {1: memory[0, :6, 1:8], 14: memory[1, :6, 2:9]}
    given = torch.from_numpy(ids).to(dtype)
    with EngramClient(served.target) as client:
        source = RowSource(client, CPU, columns=(6, 11), scale_rule=rule)
        source.fill({layer: Wanted(given[:, i], outs[layer]) for i, layer in enumerate(served.truth.layers)})
    expected = memory.clone().fill_(9)
    for index, layer in enumerate(served.truth.layers):
        place = expected[index, :6, 1 + index : 8 + index]
        place.zero_()
        rows = served.truth.rows(layer, ids[:, index, 6:11], format)
        place[:4, :5] = torch.from_numpy(rows.view(np.uint8)).view(kind)
    assert torch.equal(memory.view(torch.uint8), expected.view(torch.uint8))


def test_no_tokens_are_no_lookup(fp4: Served) -> None:
    out = torch.ones(3, 24, 256, dtype=torch.bfloat16)
    source = RowSource(None, CPU, columns=(0, 24))  # type: ignore[arg-type]
    source.fill({1: Wanted(torch.zeros(0, 24, dtype=torch.int32), out)})
    assert not out.any()


@pytest.mark.parametrize(
    ("ids", "out", "says"),
    [
        ((4, 24), torch.zeros(4, 24, 256), "torch.float32"),
        ((4, 24), torch.zeros(4, 24, 264, dtype=torch.bfloat16), "expected bfloat16"),
        ((4, 24), torch.zeros(3, 24, 256, dtype=torch.bfloat16), "too small"),
        ((4, 24), torch.zeros(4, 23, 256, dtype=torch.bfloat16), "too small"),
        ((4,), torch.zeros(4, 24, 256, dtype=torch.bfloat16), "too small"),
        ((4, 24), torch.zeros(4, 24, 256, dtype=torch.bfloat16, device="meta"), "on meta, not on cpu"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(ids: tuple[int, ...], out: torch.Tensor, says: str) -> None:
    source = RowSource(None, CPU, columns=(0, 24))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        source.fill({1: Wanted(torch.zeros(ids, dtype=torch.int32), out)})


def test_an_id_that_is_no_row_fails_and_writes_nothing(fp4: Served) -> None:
    out = torch.full((1, 24, 256), 5, dtype=torch.bfloat16)
    with EngramClient(fp4.target) as client, pytest.raises(InvalidRequestError):
        RowSource(client, CPU, columns=(0, 24)).fill({1: Wanted(torch.full((1, 24), 2**30), out)})
    assert (out == 5).all()


# ------------------------------------------------------------------------------------------------- a server gone


def test_a_step_waits_for_a_server_that_comes_back(fp4_checkpoint: Path, fp4: Served, tmp_path: Path) -> None:
    uds = tmp_path / "s"
    ids = fp4.truth.ids([3, 17, 29])
    out = torch.full((3, 24, 256), 5, dtype=torch.bfloat16)
    settings = Settings((f"unix:{uds}",), wait_s=60.0)
    with settings.client() as client:
        source = RowSource(client, CPU, columns=(0, 24))
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds):
            source.fill({1: Wanted(torch.from_numpy(ids[:, 0]), out)})
        out.fill_(5)
        done = threading.Event()

        def step() -> None:
            source.fill({14: Wanted(torch.from_numpy(ids[:, 1]), out)})
            done.set()

        thread = threading.Thread(target=step)
        thread.start()
        assert not done.wait(0.5)
        assert (out == 5).all()
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds):
            thread.join()
        assert done.is_set()
    found = out.view(torch.int16).numpy().view(np.uint16)
    assert same(found, fp4.truth.rows(14, ids[:, 1], "bf16"))


def test_a_step_fails_when_the_server_stays_away(fp4: Served, tmp_path: Path) -> None:
    settings = Settings((f"unix:{tmp_path}/nobody",), wait_s=0.4)
    out = torch.full((3, 24, 256), 5, dtype=torch.bfloat16)
    with settings.client() as client:
        begin = time.monotonic()
        with pytest.raises(UnavailableError) as gone:
            RowSource(client, CPU, columns=(0, 24)).fill(
                {1: Wanted(torch.from_numpy(fp4.truth.ids([3, 17, 29])[:, 0]), out)}
            )
        assert time.monotonic() - begin >= 0.4
    assert "ENGRAM_SERVER_WAIT_S" in gone.value.__notes__[0]
    assert (out == 5).all(), "old rows are nobody's: the step has failed"


def test_a_prompt_that_cannot_be_prefetched_is_nobodys_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried = threading.Event()

    def connect() -> EngramClient:
        tried.set()
        raise UnavailableError("nobody there")

    prompts = _prompts.PromptPrefetcher(connect, waiting_max=2)
    for _ in range(50):
        prompts.prompt([1, 2, 3])
    assert tried.wait(20.0)
    prompts.prompt(None)
    prompts.prompt([])
