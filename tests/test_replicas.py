"""A server whose tables lie on two drives, of which one, then the other, begins to fail under load."""

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.faulty_fs import Faults, faulty_fs
from support.serving import ServerProcess, serving, until
from support.truth import Truth, same
from test_metrics import Scrape

from engram_client import DataLossError, EngramClient, EngramError
from engram_client._query import Lane
from engram_server.cli import main
from engram_server.tables.store import open_store

SHARED = ["off", "require"]


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


@pytest.fixture(scope="module")
def store(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "tables.engram"
    assert main(["convert", str(fp4_checkpoint), str(path), "--verify", "none"]) == 0
    return path


@pytest.fixture(params=[("in place", "packed"), ("packed", "packed")], ids=" beside ".join)
def drives(
    request: pytest.FixtureRequest, truth: Truth, store: Path, tmp_path: Path
) -> Iterator[tuple[list[Path], list[Faults]]]:
    """The paths of two equal copies of the tables, and how to break the drives that they are on."""
    paths, faults = [], []
    with ExitStack() as mounts:
        for number, layout in enumerate(request.param):
            source, mounted = store.parent if layout == "packed" else truth.path, tmp_path / f"drive{number}"
            control = tmp_path / f"control{number}.json"
            faults.append(mounts.enter_context(faulty_fs(source, mounted, control, threads=True)))
            paths.append(mounted / store.name if layout == "packed" else mounted)
        yield paths, faults


@contextmanager
def under_load(server: ServerProcess, truth: Truth, shared: str) -> Iterator[list[int]]:
    """Decode steps beside prompts, whose rows must all be exact; how many there were of each, so far."""
    done, stop = [0, 0], threading.Event()

    def ask(number: int, lane: Lane, tokens: int) -> None:
        with EngramClient(server.targets[1], shared_memory=shared) as client:
            for begin in range(0, 1 << 20, tokens):
                prompt = [token % 5000 for token in range(begin, begin + tokens)]
                found = client.lookup(prompt, format="packed", lane=lane)
                assert same(found.values, truth.values(truth.ids(prompt), "packed"))
                done[number] += 1
                if stop.is_set():
                    return

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, 0, "decode", 1), pool.submit(ask, 1, "prefill", 40)]
        try:
            yield done
        finally:
            stop.set()
        for one in asking:
            one.result()


@pytest.mark.parametrize("shared", SHARED, ids=["gRPC", "shared memory"])
def test_no_lookup_fails_while_one_drive_has_the_rows(
    drives: tuple[list[Path], list[Faults]], truth: Truth, tmp_path: Path, shared: str
) -> None:
    (path, replica), faults = drives
    with (
        serving(
            path,
            tmp_path,
            uds=tmp_path / "socket",
            metrics="127.0.0.1:0",
            cache_bytes=0,
            scales="disk",
            replicas=(replica,),
        ) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
    ):
        errors = 0.0
        with under_load(server, truth, shared) as done:
            for failing, mounted in zip(faults, ("drive0", "drive1"), strict=True):
                failing.set("eio")
                until(lambda: Scrape(server).sum("engram_read_errors_total", kind="io") > errors)  # noqa: B023
                before = list(done)
                until(lambda: all(now > then + 1 for now, then in zip(done, before, strict=True)))  # noqa: B023
                until(lambda: said(server, tmp_path / mounted))  # noqa: B023
                failing.clear()
                errors = Scrape(server).sum("engram_read_errors_total", kind="io")
        assert Scrape(server).sum("engram_read_errors_total", kind="truncated") == 0
        assert Scrape(server).sum("engram_read_errors_total", kind="checksum") == 0
        assert "lookup failed" not in server.log.read_text()
        check = health_pb2.HealthCheckRequest(service="engram.v1.Engram")
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(check).status == health_pb2.HealthCheckResponse.SERVING
        for mounted in ("drive0", "drive1"):
            lines = said(server, tmp_path / mounted)
            assert len(set(lines)) == len(lines), "once of each file"

        # Of rows that neither has, the reason is that of a drive; and nothing is remembered.
        with EngramClient(server.targets[1], shared_memory=shared) as client:
            for failing in faults:
                failing.set("eio")
            with pytest.raises(EngramError, match="layer 1, row 7 could not be read: Input/output") as raised:
                client.lookup_rows(1, [7])
            assert isinstance(raised.value, DataLossError)
            for failing in faults:
                failing.clear()
            found = client.lookup_rows(1, [7], format="packed")
            assert same(found.values, truth.rows(1, [7], "packed"))
        assert server.stop() == 0


@pytest.mark.parametrize("shared", SHARED, ids=["gRPC", "shared memory"])
def test_a_damaged_record_ends_health_only_when_no_copy_has_its_row(
    truth: Truth, store: Path, tmp_path: Path, shared: str
) -> None:
    layer = next(table for table in open_store(store).tables if table.layer == 14)
    copies = [tmp_path / name / store.name for name in ("a", "b")]
    with ExitStack() as stack:
        paths = []
        for copy in copies:  # through a file system without times: nobody sees the file change
            copy.parent.mkdir()
            shutil.copy(store, copy)
            mounted = tmp_path / f"drive-{copy.parent.name}"
            stack.enter_context(faulty_fs(copy.parent, mounted, mounted.with_suffix(".json"), threads=True))
            paths.append(mounted / store.name)
        server = stack.enter_context(
            serving(
                paths[0],
                tmp_path,
                uds=tmp_path / "socket",
                metrics="127.0.0.1:0",
                cache_bytes=0,
                replicas=(paths[1],),
            )
        )
        client = stack.enter_context(EngramClient(server.targets[1], shared_memory=shared))

        def damage(copy: Path) -> None:
            with copy.open("r+b") as file:
                file.seek(layer.offset + 5 * 140)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))

        damage(copies[0])
        found = client.lookup_rows(14, [5, 6], format="packed")
        assert same(found.values, truth.rows(14, [5, 6], "packed"))
        until(lambda: said(server, paths[0].parent))
        assert Scrape(server).sum("engram_read_errors_total", kind="checksum") == 1
        assert Scrape(server).sum("engram_ready") == 1
        damage(copies[1])
        with pytest.raises(DataLossError, match="layer 14, row 5 could not be read: its checksum"):
            client.lookup_rows(14, [5, 6])
        until(lambda: Scrape(server).sum("engram_ready") == 0)


def said(server: ServerProcess, folder: Path) -> list[str]:
    """The lines of its log that name a file of a folder as what cannot be read."""
    lines = server.log.read_text().splitlines()
    return [line for line in lines if f"{folder}/" in line and "could not be read" in line]
