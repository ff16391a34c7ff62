"""Traces: what a server records, what is sent again, what a cache would have made of it, and which reads it cost."""

import asyncio
import errno
import json
import os
import stat
import struct
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.faulty_fs import faulty_fs
from support.serving import ServerProcess, serving, until
from support.truth import Truth
from test_metrics import Scrape

from engram_client import EngramClient, EngramError, EngramMemory
from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_load import cli
from engram_load._analyze import stack_distances
from engram_server import recorder
from engram_server.convert import ConvertOptions, convert
from engram_server.recorder import RecordOptions
from engram_server.server import ServeOptions, serve
from engram_server.sockets import ServeError
from engram_server.trace import Trace, TraceError

TEXT = np.random.default_rng(2).integers(0, 100_000, size=4_000).astype(np.int32)


def traffic(client: EngramClient) -> list[tuple[str, Any]]:
    """Some lookups of every kind; what a plain reading of docs/trace.md says a trace has of them."""
    client.lookup(TEXT[:300], format="packed")  # in one piece through shared memory, too
    client.lookup(TEXT[300:600], history=TEXT[297:300], layers=[14], columns=(4, 13), lane="prefill")
    client.lookup_batch([TEXT[:1], TEXT[9:11]], histories=[[], TEXT[6:9]], unique=True)
    client.lookup_rows(1, [5, -1, 7, 5], lane="prefetch")
    client.lookup_blocks({14: np.arange(48).reshape(2, 24), 1: np.arange(48, 96).reshape(2, 24)})
    with client.stream() as stream:
        stream.lookup(TEXT[600:700]).result()
    with pytest.raises(EngramError):
        client.lookup_rows(1, [1 << 40])
    return [
        ("tokens", pb.LANE_PREFILL),
        ("tokens", pb.LANE_PREFILL),
        ("tokens", pb.LANE_DECODE),
        ("rows", pb.LANE_PREFETCH),
        ("blocks", pb.LANE_DECODE),
        ("tokens", pb.LANE_DECODE),
    ]


@pytest.fixture(scope="module")
def recorded(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of `traffic`."""
    return record(fp4_checkpoint, tmp_path_factory.mktemp("record"), "requests")


def record(checkpoint: Path, folder: Path, what: Any, shared_memory: Any = "off") -> Path:
    file = folder / "lookups.trace"
    with serving(checkpoint, folder, record=RecordOptions(file, what)) as server:
        with EngramClient(server.targets[0], shared_memory=shared_memory) as client:
            expected = traffic(client)
        assert f"recording to {file}" in server.ready_line
        assert server.stop() == 0
    assert f"{len(expected)} of {len(expected)} lookups recorded" in (folder / "server.log").read_text()
    return file


def plainly(path: Path) -> tuple[pb.DescribeReply, list[tuple[int, int, int, bytes]]]:
    """A trace by docs/trace.md alone: the head, and (kind, lane, ns, body) of each entry."""
    data = path.read_bytes()
    assert data[:8] == b"ENGRMTRC"
    version, head_bytes = struct.unpack("<II", data[8:16])
    assert version == 1
    at = 16 + head_bytes
    entries = []
    while at < len(data):
        body_bytes, kind, lane, zero, ns = struct.unpack("<IBBHQ", data[at : at + 16])
        assert zero == 0
        entries.append((kind, lane, ns, data[at + 16 : at + 16 + body_bytes]))
        at += 16 + body_bytes
    assert at == len(data)
    return pb.DescribeReply.FromString(data[16 : 16 + head_bytes]), entries


def load(*arguments: object, status: int = 0) -> None:
    assert cli.main([str(argument) for argument in arguments]) == status


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence that it fails with."""
    capsys.readouterr()
    load(*arguments, status=1)
    error = capsys.readouterr().err
    assert error.startswith(f"engram-load {arguments[0]}: ")
    assert error.count("\n") == 1, error
    return error


# ------------------------------------------------------------------------------------------------ recording


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_a_trace_has_every_lookup_as_it_came(
    fp4_checkpoint: Path, tmp_path: Path, shared_memory: str
) -> None:
    recorded = record(fp4_checkpoint, tmp_path, "requests", shared_memory)
    head, entries = plainly(recorded)
    assert [table.layer for table in head.tables] == [1, 14]
    assert [kind for kind, *_ in entries] == [1] * 6
    times = [ns for _, _, ns, _ in entries]
    assert times == sorted(times)
    requests = [pb.LookupRequest.FromString(body) for *_, body in entries]
    lanes = [lane for _, lane, _, _ in entries]
    assert list(zip([request.WhichOneof("keys") for request in requests], lanes, strict=True)) == [
        ("tokens", pb.LANE_PREFILL),
        ("tokens", pb.LANE_PREFILL),
        ("tokens", pb.LANE_DECODE),
        ("rows", pb.LANE_PREFETCH),
        ("blocks", pb.LANE_DECODE),
        ("tokens", pb.LANE_DECODE),
    ]
    assert requests[0].tokens.sequences[0].tokens == TEXT[:300].tobytes()
    assert requests[1].tokens.sequences[0].history == TEXT[297:300].tobytes()
    assert list(requests[1].layers) == [14]
    assert (requests[1].columns.begin, requests[1].columns.end) == (4, 13)
    assert not requests[0].layers
    assert not requests[0].HasField("columns")
    assert requests[2].unique
    assert [sequence.history for sequence in requests[2].tokens.sequences] == [b"", TEXT[6:9].tobytes()]
    assert [sequence.tokens for sequence in requests[2].tokens.sequences] == [
        TEXT[:1].tobytes(),
        TEXT[9:11].tobytes(),
    ]
    assert ids_in(requests[3].rows) == [5, -1, 7, 5]
    assert [(block.layer, ids_in(block)) for block in requests[4].blocks.layers] == [
        (14, list(range(48))),
        (1, list(range(48, 96))),
    ]
    assert not any(request.HasField("pins") for request in requests)
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600, "it holds what users wrote"


def ids_in(keys: Any) -> list[int]:
    """Row ids of a block or a list."""
    return np.frombuffer(keys.ids, dtype=f"<i{keys.id_bytes}").tolist()


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_rows_in_place_of_tokens_are_those_of_the_oracles_hash(
    fp4_checkpoint: Path, tmp_path: Path, shared_memory: str
) -> None:
    _, entries = plainly(record(fp4_checkpoint, tmp_path, "rows", shared_memory))
    requests = [pb.LookupRequest.FromString(body) for *_, body in entries]
    assert [request.WhichOneof("keys") for request in requests] == [
        "blocks", "blocks", "blocks", "rows", "blocks", "blocks",
    ]  # fmt: skip
    truth = Truth(fp4_checkpoint, "fp4")
    for request, ids, layers in (
        (requests[0], truth.ids(TEXT[:300].tolist()), (1, 14)),
        (requests[1], truth.ids(TEXT[300:600].tolist(), TEXT[297:300].tolist()), (14,)),
    ):
        assert [block.layer for block in request.blocks.layers] == list(layers)
        for block in request.blocks.layers:
            found = np.frombuffer(block.ids, dtype="<i4" if block.id_bytes == 4 else "<i8").reshape(-1, 24)
            assert (found == ids[:, (1, 14).index(block.layer)]).all()
    whole = b"".join(body for *_, body in entries)
    assert TEXT[:4].tobytes() not in whole, "no text can be read out of it"


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_what_does_not_fit_is_counted_and_left_out(
    fp4_checkpoint: Path, tmp_path: Path, shared_memory: Any
) -> None:
    file = tmp_path / "small.trace"
    options = RecordOptions(file, file_bytes=4_000)
    asked = 0
    with serving(fp4_checkpoint, tmp_path, record=options) as server:
        with EngramClient(server.targets[0], shared_memory=shared_memory) as client:
            while file.stat().st_size < 4_000:
                client.lookup(TEXT[:100])
                asked += 1
            for _ in range(10):
                client.lookup(TEXT[:100])
        assert server.stop() == 0
    _, entries = plainly(file)
    lookups = [entry for entry in entries if entry[0] == 1]
    missing = sum(struct.unpack("<Q", body)[0] for kind, _, _, body in entries if kind == 2)
    assert 0 < len(lookups) <= asked
    assert len(lookups) + missing == asked + 10
    trace = Trace(file)
    assert len(list(trace.entries())) == len(lookups)
    assert trace.missing == missing


class Channel:
    """In place of shared memory: what the recorder finds there."""

    def __init__(self) -> None:
        self.looks = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.answered = True

    def note_requests(self, pending_bytes: int) -> None:
        pass

    def take_requests(self) -> tuple[list[Any], int]:
        """One lookup more, every time, that was not kept."""
        self.looks += 1
        self.answered &= self.may_answer.wait(20)
        return [], 1


def follow(file: Path, channel: Channel, script: Any, **options: Any) -> None:
    """Run `script` while lookups of a channel are recorded."""

    async def run() -> None:
        opened = await recorder.Recorder.open(RecordOptions(file, **options), pb.DescribeReply())
        opened.follow(channel)  # type: ignore[arg-type]
        await script()
        await opened.close()

    asyncio.run(run())


def test_a_trace_that_is_full_does_not_grow_on(tmp_path: Path) -> None:
    file, channel = tmp_path / "full.trace", Channel()

    async def look() -> None:
        while channel.looks < 3:
            await asyncio.sleep(0.01)
        assert not plainly(file)[1]

    follow(file, channel, look, file_bytes=1)
    [(kind, _, _, body)] = plainly(file)[1]
    assert (kind, *struct.unpack("<Q", body)) == (2, channel.looks)


def test_what_piled_up_in_shared_memory_does_not_hold_up_the_server(tmp_path: Path) -> None:
    """A stalled disk lets a hundred thousand lookups wait, and then they are fetched."""
    channel = Channel()
    channel.may_answer.clear()

    async def go_on() -> None:
        while not channel.looks:
            await asyncio.sleep(0.01)
        channel.may_answer.set()

    follow(tmp_path / "piled.trace", channel, go_on)
    assert channel.answered


def test_sequences_without_tokens_take_room_as_well(fp4_checkpoint: Path, tmp_path: Path) -> None:
    """Else a client could let so many wait that a server takes minutes to write them, and to end."""
    file = tmp_path / "empty.trace"
    with serving(fp4_checkpoint, tmp_path, record=RecordOptions(file, pending_bytes=1 << 20)) as server:
        with EngramClient(server.targets[0], shared_memory="off") as client:
            socket = client.describe().shared_memory.socket
        attached = _core.ShmClient(socket, 1 << 20, 30.0)
        for count in (1_000, 10_000):
            ticket = attached.submit(
                kind=1,
                keys=[np.zeros(2 * count, dtype="<u4")],
                positions=0,
                sequences=count,
                format=_core.Format.BF16,
                payload_bytes=0,
            )
            assert ticket is not None
            assert ticket.wait(20)
            assert ticket.answer[0] == 0
            del ticket
        attached.close()
        assert server.stop() == 0
    trace = Trace(file)
    assert [len(entry.request.tokens.sequences) for entry in trace.entries()] == [1_000]
    assert trace.missing == 1


@pytest.mark.parametrize("far", [-(1 << 40), 1 << 40])
def test_ids_outside_the_columns_stay_what_they_are(fp4_checkpoint: Path, tmp_path: Path, far: int) -> None:
    """They tell row groups apart, and may be anything."""
    ids = np.full((2, 24), far, dtype=np.int64)
    ids[:, :4] = [[1, 2, 3, 4], [5, 6, 7, 8]]
    file = tmp_path / "far.trace"
    with serving(fp4_checkpoint, tmp_path, record=RecordOptions(file)) as server:
        with EngramClient(server.targets[0], shared_memory="require") as client:
            client.lookup_blocks({1: ids}, columns=(0, 4))
        assert server.stop() == 0
    [entry] = Trace(file).entries()
    assert ids_in(entry.request.blocks.layers[0]) == ids.ravel().tolist()


def test_who_waits_for_his_turn_is_noted_when_it_comes(fp4_checkpoint: Path, tmp_path: Path) -> None:
    """As over gRPC: a replay would take him for one that was held up by the server that it tries."""
    file = tmp_path / "turns.trace"
    with (
        faulty_fs(fp4_checkpoint, tmp_path / "mnt", tmp_path / "control.json", threads=True) as faults,
        serving(
            tmp_path / "mnt",
            tmp_path,
            record=RecordOptions(file),
            metrics="127.0.0.1:0",
            limits={"pending_rows": 8 * 48 * 10, "request_rows": 48 * 10},
            cache_bytes=0,
            io_depth=4,
            scales="memory",
        ) as server,
        EngramClient(server.targets[0], shared_memory="require") as client,
        EngramClient(server.targets[0], shared_memory="off") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        until(lambda: "scales are in memory" in (tmp_path / "server.log").read_text())
        faults.set("hold")
        ours = client.in_place()
        first = ours.lookup(TEXT[:8], format="packed")
        second = ours.lookup(TEXT[8:16], format="packed")  # more than its share, with the first
        try:
            until(lambda: Scrape(server).sum("engram_admitted_rows") == 8 * 48)
            third = pool.submit(other.lookup, TEXT[16:18])
            until(lambda: Scrape(server).sum("engram_admitted_rows") == 10 * 48)
        finally:
            faults.clear()
        for rows in (first, second):
            with rows:
                pass
        third.result(60)
        assert server.stop() == 0
    entries = sorted(Trace(file).entries(), key=lambda entry: entry.ns)
    asked = [entry.request.tokens.sequences[0].tokens for entry in entries]
    assert asked == [TEXT[:8].tobytes(), TEXT[16:18].tobytes(), TEXT[8:16].tobytes()]


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_keys_that_wait_are_bounded(fp4_checkpoint: Path, tmp_path: Path, shared_memory: Any) -> None:
    file = tmp_path / "bounded.trace"

    def found() -> list[int]:
        """Tokens of each lookup in the trace so far."""
        return [len(entry.request.tokens.sequences[0].tokens) // 4 for entry in Trace(file).entries()]

    options = RecordOptions(file, pending_bytes=2_000)
    with serving(fp4_checkpoint, tmp_path, record=options) as server:
        with EngramClient(server.targets[0], shared_memory=shared_memory) as client:
            for count in range(1, 6):
                client.lookup(TEXT[:600], format="packed")  # larger than all that may wait
                client.lookup(TEXT[:2])
                until(lambda count=count: found() == [2] * count)
        assert server.stop() == 0
    trace = Trace(file)
    assert len(list(trace.entries())) == 5
    assert trace.missing == 5


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(
    fp4_checkpoint: Path, tmp_path: Path, shared_memory: Any
) -> None:
    with serving(fp4_checkpoint, tmp_path, record=RecordOptions(tmp_path / "t.trace")) as server:
        with (
            EngramClient(server.targets[0], shared_memory=shared_memory) as client,
            EngramMemory.open(fp4_checkpoint) as memory,
        ):
            client.lookup(TEXT[:1])
            limit_file_size(server, 3_000)
            for _ in range(9):
                found = client.lookup(TEXT[:200], format="packed")
            assert found.values.tobytes() == memory.lookup(TEXT[:200], format="packed").values.tobytes()
        assert server.stop() == 0
    log = (tmp_path / "server.log").read_text()
    assert "recording to" in log
    assert "ends here: File too large" in log
    assert "of 10 lookups recorded" in log


def limit_file_size(server: ServerProcess, size: int) -> None:
    """RLIMIT_FSIZE of a running server. Python ignores SIGXFSZ, so that writes fail with EFBIG."""
    import resource

    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, size))


def test_a_trace_that_cannot_begin_leaves_nothing_in_the_way(
    fp4_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(description: object) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder, "head_bytes", full)
    path = tmp_path / "trace"
    options = ServeOptions(fp4_checkpoint, listen="127.0.0.1:0", record=RecordOptions(path))
    with pytest.raises(ServeError, match=f"cannot record to {path}: No space left on device"):
        serve(options)
    assert not path.exists()


def test_a_trace_is_not_overwritten(fp4_checkpoint: Path, recorded: Path, tmp_path: Path) -> None:
    server = serving(fp4_checkpoint, tmp_path, record=RecordOptions(recorded))
    with pytest.raises(AssertionError, match="it exists, and is not overwritten"), server:
        pass
    plainly(recorded)


# ------------------------------------------------------------------------------------------------- reading


def test_a_trace_that_was_cut_off_is_read_up_to_there(recorded: Path, tmp_path: Path) -> None:
    whole = [entry.request for entry in Trace(recorded).entries()]
    data = recorded.read_bytes()
    cut = tmp_path / "cut.trace"
    for length in (len(data) - 1, len(data) - 500, len(data) - 1_500):
        cut.write_bytes(data[:length])
        trace = Trace(cut)
        found = [entry.request for entry in trace.entries()]
        assert found == whole[: len(found)]
        assert len(found) < 6
        assert trace.cut_short


@pytest.mark.parametrize("damage", ["magic", "version", "head", "head-bytes", "kind", "body", "empty"])
def test_a_damaged_trace_is_refused_by_name(recorded: Path, tmp_path: Path, damage: str) -> None:
    data = bytearray(recorded.read_bytes())
    first = 16 + struct.unpack("<I", data[12:16])[0]
    match damage:
        case "magic":
            data[0] ^= 1
        case "version":
            data[8] = 2
        case "head":
            data[16:40] = b"\xff" * 24
        case "head-bytes":
            data[12:16] = b"\xff" * 4
        case "kind":
            data[first + 4] = 9
        case "body":
            data[first + 16 : first + 40] = b"\xff" * 24
        case "empty":
            data = bytearray()
    bad = tmp_path / "bad.trace"
    bad.write_bytes(data)
    with pytest.raises(TraceError, match=r"bad\.trace"):
        list(Trace(bad).entries())


def tokens(ids: Sequence[int], history: Sequence[int] = (), **fields: Any) -> pb.LookupRequest:
    sequence = pb.Sequence(
        tokens=np.asarray(ids, dtype="<i4").tobytes(), history=np.asarray(history, dtype="<i4").tobytes()
    )
    return pb.LookupRequest(tokens=pb.TokenKeys(sequences=[sequence]), **fields)


def blocks(**ids: Sequence[int]) -> pb.LookupRequest:
    layers = [
        pb.LayerBlock(layer=int(layer[1:]), ids=np.asarray(found, dtype="<i4").tobytes(), id_bytes=4)
        for layer, found in ids.items()
    ]
    return pb.LookupRequest(blocks=pb.BlockKeys(layers=layers))


_ODD = pb.LookupRequest(tokens=pb.TokenKeys(sequences=[pb.Sequence(tokens=b"12345")]))


@pytest.mark.parametrize(
    "lookup",
    [
        _ODD,
        pb.LookupRequest(tokens=pb.TokenKeys(sequences=[pb.Sequence(tokens=bytes(4), history=b"123")])),
        pb.LookupRequest(),
        tokens([1 << 30]),
        tokens([-2]),
        tokens([1], [1, 2, 3, 4]),
        tokens([1], layers=[2]),
        tokens([1], columns=pb.ColumnRange(begin=5, end=3)),
        tokens([1], columns=pb.ColumnRange(begin=0, end=25)),
        blocks(),
        blocks(_1=[0] * 23),
        blocks(_2=[0] * 24),
        blocks(_1=[0] * 24, _14=[0] * 48),
        blocks(_1=[1 << 30] * 24),
        blocks(_1=[-2] * 24),
        pb.LookupRequest(rows=pb.RowKeys(layer=1, ids=bytes(7), id_bytes=4)),
        pb.LookupRequest(rows=pb.RowKeys(layer=3, ids=bytes(8), id_bytes=4)),
        pb.LookupRequest(rows=pb.RowKeys(layer=1, ids=b"\xff" * 3 + b"\x7f", id_bytes=4)),
    ],
)
def test_a_lookup_that_no_server_can_have_taken_is_refused_by_name(
    fp4_checkpoint: Path,
    recorded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lookup: pb.LookupRequest,
) -> None:
    bad = tmp_path / "bad.trace"
    body = lookup.SerializeToString()
    bad.write_bytes(recorded.read_bytes() + struct.pack("<IBBHQ", len(body), 1, 0, 0, 0) + body)
    commands = (
        ["analyze", bad],
        ["export-fio", bad, fp4_checkpoint, "--output", tmp_path / "x.iolog"],
        ["replay", fp4_checkpoint, bad, "--concurrency", 1, "--quiet"],
    )
    for command in commands:
        assert f"{bad}: a lookup in it is damaged: " in refused(capsys, *command)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.trace"], "nothing half written"


def test_a_hot_set_is_not_made_of_half_a_token(recorded: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.trace"
    body = _ODD.SerializeToString()
    head = recorded.read_bytes()[: 16 + struct.unpack("<I", recorded.read_bytes()[12:16])[0]]
    bad.write_bytes(head + struct.pack("<IBBHQ", len(body), 1, 0, 0, 0) + body)
    with pytest.raises(TraceError, match=r"bad\.trace: a lookup in it is damaged: 5 bytes are no token ids"):
        list(Trace(bad).sequences())


def test_bytes_that_are_wrong_are_a_sentence_or_another_lookup(recorded: Path, tmp_path: Path) -> None:
    from engram_load._access import open_accesses

    data = recorded.read_bytes()
    first = 16 + struct.unpack("<I", data[12:16])[0]
    rng = np.random.default_rng(7)
    bad = tmp_path / "bad.trace"
    sentences = []
    for _ in range(60):
        wrong = bytearray(data)
        for at in rng.integers(first, len(data), size=3):
            wrong[at] = rng.integers(256)
        bad.write_bytes(wrong)
        try:
            list(open_accesses(bad, None))
        except ValueError as error:
            sentences.append(str(error))
    assert 0 < len(sentences) < 60, "a changed token is another token"
    assert all(str(bad) in sentence for sentence in sentences), sentences


# -------------------------------------------------------------------------------------------------- replay


def test_a_replay_asks_for_the_same_again(fp4_checkpoint: Path, recorded: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.trace"
    file = tmp_path / "report.json"
    with serving(fp4_checkpoint, tmp_path, record=RecordOptions(again)) as server:
        load("replay", server.targets[0], recorded, "--speed", 5, "--json", file)
        assert server.stop() == 0
    ours, theirs = list(Trace(recorded).entries()), list(Trace(again).entries())

    def asked(entry: Any) -> tuple[bytes, int]:
        request = pb.LookupRequest.FromString(entry.request.SerializeToString())
        request.format = pb.FORMAT_UNSPECIFIED
        return request.SerializeToString(), entry.lane

    assert sorted(map(asked, ours)) == sorted(map(asked, theirs))
    document = json.loads(file.read_text())
    assert document["points"][0]["counts"]["requests"] == 6
    assert document["points"][0]["distinct_rows"]["rows"] > 0
    # Not before its time: the last one was recorded so much later than the first.
    assert document["points"][0]["seconds"] >= (ours[-1].ns - ours[0].ns) / 5 / 1e9


def test_a_replay_can_go_round_in_process_and_at_another_load(
    fp4_checkpoint: Path, recorded: Path, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    load("replay", fp4_checkpoint, recorded, "--concurrency", 2, "--json", file)
    assert json.loads(file.read_text())["points"][0]["counts"]["requests"] == 6


def test_a_replay_against_other_tables_is_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engram_server.tables.synth import synthesise

    other = synthesise(tmp_path / "other", 1_000, "fp4").path
    assert "was recorded from a table of layer 1 with" in refused(capsys, "replay", other, recorded)
    (tmp_path / "text").write_text("text")
    assert "is no trace" in refused(capsys, "replay", other, tmp_path / "text")
    assert "is a trace, and no text" in refused(capsys, "prefill", other, recorded)


def test_a_hot_set_can_be_made_from_a_trace(fp4_checkpoint: Path, recorded: Path, tmp_path: Path) -> None:
    from test_cli import done
    from test_cli import refused as server_refused

    np.save(tmp_path / "a.npy", TEXT[:300])
    whole = done("warm", fp4_checkpoint, tmp_path / "a.npy", "--output", tmp_path / "a.hot")
    assert "300 tokens of 1 files" in whole
    file = tokens_only(recorded, tmp_path / "tokens.trace")
    assert "703 tokens of 1 files" in done("warm", fp4_checkpoint, file, "--output", tmp_path / "b.hot")
    sentence = server_refused("warm", fp4_checkpoint, recorded, "--output", tmp_path / "c.hot")
    assert "holds row ids, and what is wanted here are tokens" in sentence


def tokens_only(path: Path, out: Path) -> Path:
    """The trace without its lookups by row id."""
    data = path.read_bytes()
    at = 16 + struct.unpack("<I", data[12:16])[0]
    kept = data[:at]
    while at < len(data):
        size = 16 + struct.unpack("<I", data[at : at + 4])[0]
        if pb.LookupRequest.FromString(data[at + 16 : at + size]).WhichOneof("keys") == "tokens":
            kept += data[at : at + size]
        at += size
    out.write_bytes(kept)
    return out


# ------------------------------------------------------------------------------------------------ analysis


def lru_hits(names: Sequence[int], room: int) -> int:
    """Of a cache of so many, simulated."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for name in names:
        hits += name in held
        held[name] = None
        held.move_to_end(name)
        if len(held) > room:
            held.popitem(last=False)
    return hits


@given(names=st.lists(st.integers(0, 12), max_size=200))
def test_stack_distances_give_the_hits_of_a_cache_of_every_size(names: list[int]) -> None:
    distances = stack_distances(np.asarray(names, dtype=np.uint64))
    for room in (1, 2, 3, 5, 8, 13):
        assert int(((distances >= 0) & (distances < room)).sum()) == lru_hits(names, room)


def test_stack_distances_of_many_accesses() -> None:
    names = np.random.default_rng(1).zipf(1.3, size=20_000) % 3_000
    distances = stack_distances(names)
    for room in (1, 30, 300, 2_000):
        assert int(((distances >= 0) & (distances < room)).sum()) == lru_hits(names.tolist(), room)


def groups_of(truth: Truth, tokens: NDArray[np.int32]) -> list[tuple[int, ...]]:
    """Distinct row groups of a lookup of both layers, in order of layers, then of first appearance."""
    found: dict[tuple[int, ...], None] = {}
    for plane, layer in enumerate((1, 14)):
        for position in truth.ids(tokens.tolist())[:, plane]:
            for group in position.reshape(3, 8):
                found[(layer, *(int(row) for row in group))] = None
    return list(found)


@pytest.mark.parametrize("what", ["requests", "rows"])
def test_the_curve_is_that_of_a_simulated_cache(
    fp4_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: Any
) -> None:
    rng = np.random.default_rng(4)
    prompts = [TEXT[(at := int(rng.integers(0, 300))) : at + 60] for _ in range(25)]
    file = tmp_path / "t.trace"
    with serving(fp4_checkpoint, tmp_path, record=RecordOptions(file, what)) as server:
        with EngramClient(server.targets[0]) as client:
            for prompt in prompts:
                client.lookup(prompt)
        assert server.stop() == 0
    truth = Truth(fp4_checkpoint, "fp4")
    accesses = [group for prompt in prompts for group in groups_of(truth, prompt)]
    names = {group: number for number, group in enumerate(dict.fromkeys(accesses))}
    line = [names[group] for group in accesses]
    capsys.readouterr()
    load("analyze", file, "--json", "--cache-bytes", "100KiB", "--cache-bytes", "1MiB")
    found = json.loads(capsys.readouterr().out)
    assert (found["lookups"], found["rows"]) == (25, 25 * 60 * 48)
    assert (found["accesses"], found["groups"]) == (len(line), len(names))
    assert found["distinct_rows_in_lookups"] == 8 * len(line)
    assert {100 << 10, 1 << 20} <= {size for size, _ in found["curve"]}
    for size, rate in found["curve"]:
        assert rate == pytest.approx(lru_hits(line, size // (8 * 136)) / len(line), abs=1e-12)
    times = sorted((line.count(name) for name in names.values()), reverse=True)
    top = max(1, round(0.1 * len(times)))
    assert found["top_shares"]["10"] == pytest.approx(sum(times[:top]) / len(line))
    assert found["once"] == pytest.approx(times.count(1) / len(times))
    load("analyze", file)
    out = capsys.readouterr().out
    assert f"{len(line):,} accesses to {len(names):,} row groups" in out


def test_what_cannot_be_analyzed_is_a_sentence(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = recorded.read_bytes()
    empty = tmp_path / "empty.trace"
    empty.write_bytes(data[: 16 + struct.unpack("<I", data[12:16])[0]])
    assert "holds no lookup of a row" in refused(capsys, "analyze", empty)
    assert "No such file" in refused(capsys, "analyze", tmp_path / "none.trace")
    assert "is not a size" in refused(capsys, "analyze", recorded, "--cache-bytes", "much")


# ----------------------------------------------------------------------------------------------------- fio


@pytest.fixture(scope="module")
def store(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "tables.engram"
    convert(fp4_checkpoint, path, ConvertOptions())
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("scales", ["memory", "disk", "store"])
def test_fio_reads_what_a_server_reads(
    fp4_checkpoint: Path, store: Path, recorded: Path, tmp_path: Path, version: int, scales: str
) -> None:
    tables = store if scales == "store" else fp4_checkpoint
    options = {"scales": "disk" if scales == "store" else scales, "cache_bytes": 0}
    file = tmp_path / "reads.iolog"
    load(
        "export-fio", recorded, tables, "--output", file, "--version", version, "--scales", options["scales"]
    )
    with EngramMemory.open(tables, **options) as memory:
        until(lambda: all_loaded(memory))
        reads = read_bytes = 0
        for entry in Trace(recorded).entries():
            stats = sent(memory, entry.request)
            reads, read_bytes = reads + stats.reads, read_bytes + stats.read_bytes
    lines = [line.split() for line in file.read_text().splitlines()[1:]]
    asked = [line[-2:] for line in lines if "read" in line]
    assert len(asked) == reads
    assert sum(int(length) for _, length in asked) == read_bytes
    done = subprocess.run(
        ["fio", "--name=trace", f"--read_iolog={file}", "--ioengine=psync", "--readonly", "--output-format=json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    assert (job["read"]["total_ios"], job["read"]["io_bytes"], job["error"]) == (reads, read_bytes, 0)


def all_loaded(memory: EngramMemory) -> bool:
    """Whether every row takes the reads that it always will."""
    tables = memory.describe().tables.values()
    return all(table.scales == "disk" or table.scale_rows_loaded == table.rows for table in tables)


def sent(memory: EngramMemory, request: pb.LookupRequest) -> Any:
    """The statistics of a recorded lookup, sent by hand."""
    columns = (request.columns.begin, request.columns.end) if request.HasField("columns") else None
    if request.WhichOneof("keys") == "rows":
        return memory.lookup_rows(
            request.rows.layer, np.frombuffer(request.rows.ids, dtype=f"<i{request.rows.id_bytes}")
        ).stats
    if request.WhichOneof("keys") == "blocks":
        blocks = {
            block.layer: np.frombuffer(block.ids, dtype=f"<i{block.id_bytes}").reshape(-1, 24)
            for block in request.blocks.layers
        }
        return memory.lookup_blocks(blocks, columns=columns).stats
    parts = request.tokens.sequences
    return memory.lookup_batch(
        [np.frombuffer(part.tokens, dtype="<i4") for part in parts],
        histories=[np.frombuffer(part.history, dtype="<i4") for part in parts],
        layers=list(request.layers) or None,
        columns=columns,
    ).stats


def test_a_cache_leaves_out_what_it_has(fp4_checkpoint: Path, recorded: Path, tmp_path: Path) -> None:
    counts = []
    for size in ("0", "8MiB"):
        file = tmp_path / f"{size}.iolog"
        load("export-fio", recorded, fp4_checkpoint, "--output", file, "--cache-bytes", size)
        counts.append(sum(" read " in line for line in file.read_text().splitlines()))
    # TEXT[:1] and TEXT[9:11] were asked for before, with the same tokens before them but for the first two.
    assert counts[1] < counts[0]


def test_an_iolog_is_not_written_for_other_tables(
    store: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engram_server.tables.synth import synthesise

    other = synthesise(tmp_path / "other", 1_000, "fp4").path
    arguments = ["--output", tmp_path / "x.iolog"]
    assert "was recorded from a table of layer 1" in refused(
        capsys, "export-fio", recorded, other, *arguments
    )
    spaced = tmp_path / "a b"
    spaced.symlink_to(store)
    assert "names have no spaces" in refused(capsys, "export-fio", recorded, spaced, *arguments)
