"""The command line is a contract: what each command prints and writes, and how it fails."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.facts import FACTS, nested_config
from support.faulty_fs import faulty_fs
from support.serving import until
from support.truth import Truth, same

from engram_server.cli import main

Result = subprocess.CompletedProcess[str]


def engram_server(*arguments: object, timeout_s: float = 120) -> Result:
    """Run the command as a user would."""
    command = [sys.executable, "-m", "engram_server.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, errors="surrogateescape", timeout=timeout_s, check=False
    )


def done(*arguments: object) -> str:
    """Its stdout; it must have succeeded."""
    result = engram_server(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(*arguments: object, status: int = 1) -> str:
    """Its stderr; it must have failed with a sentence of one line, not a traceback."""
    result = engram_server(*arguments)
    assert result.returncode == status, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("engram-server")]
    assert len(lines) == 1, result.stderr
    return lines[0]


@contextmanager
def served(path: Path, *options: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`engram-server serve` in a process of its own: its ready line, and the process."""
    command = [sys.executable, "-m", "engram_server.cli", "serve", str(path), *map(str, options)]
    if "--cache-bytes" not in options:
        command.append("--cache-bytes=64MiB")  # a server makes all of it ready at once
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline(), process
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def sha256(numbers: list[Any]) -> str:
    """Of nested lists, as little-endian int64."""
    return hashlib.sha256(np.asarray(numbers, dtype="<i8").tobytes()).hexdigest()


def test_help_teaches_every_command() -> None:
    text = done("--help")
    for command in ("synth", "inspect", "hash", "serve", "warm", "lookup", "doctor"):
        assert f"    {command} " in text
        assert "PATH" in done(command, "--help") or command == "synth"
    assert re.fullmatch(r"engram-server \d+\.\d+\.\d+\n", done("--version"))
    assert engram_server("nonsense").returncode == 2


def test_hash_gives_the_official_digests_on_the_released_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nested_config()))
    document = json.loads(done("hash", tmp_path, "--tokens", "0,3", "--json"))
    official = FACTS["official_digest_tokens_0_3"]
    assert sha256(document["layers"]["1"]) == official["layer1"]
    assert sha256(document["layers"]["14"]) == official["layer14"]
    both = np.stack([document["layers"]["1"], document["layers"]["14"]], axis=1)
    assert sha256(both.tolist()) == official["all_int64_le"]
    assert document["mask"] == [False, False]


def test_hash_takes_history_oldest_first_and_unknown_ids(fp4_checkpoint: Path) -> None:
    truth = Truth(fp4_checkpoint, "fp4")
    tokens, history = [42, truth.model.image_token_id, 7], [-1, 8, 9]
    document = json.loads(
        done("hash", fp4_checkpoint, "--tokens", "42,129264,7", "--history=-1,8,9", "--json")
    )
    expected = truth.ids(tokens, history)
    assert document["layers"] == {"1": expected[:, 0].tolist(), "14": expected[:, 1].tolist()}
    assert document["mask"] == [False, True, False]
    text = done("hash", fp4_checkpoint, "--tokens", "42")
    assert str(truth.ids([42])[0, 1, 23]) in text


@pytest.mark.parametrize("format", ["packed", "packed-fp8", "bf16", "fp32"])
@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_lookup_writes_the_rows_of_tokens(
    kind: str, format: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(f"{kind}_checkpoint")
    truth = Truth(checkpoint, kind)
    output = tmp_path / "rows"
    done("lookup", checkpoint, "--tokens", "5,6,5", "--history=3,4", "--format", format, "--output", output)
    rows = np.load(output)
    assert rows.shape[:2] == (3, 48)
    expected = truth.values(truth.ids([5, 6, 5], [3, 4]), format)
    assert same(rows, expected.reshape(3, 48, -1))


def test_lookup_asks_servers_over_tcp_and_unix_sockets(fp8_checkpoint: Path, tmp_path: Path) -> None:
    truth = Truth(fp8_checkpoint, "fp8")
    socket = tmp_path / "engram.sock"
    with served(fp8_checkpoint, "--listen", "127.0.0.1:0", "--uds", socket) as (line, _):
        tcp = re.search(r" on (127\.0\.0\.1:\d+) and unix:", line)
        assert tcp, line
        assert "backend io_uring" in line
        ids = [0, 17, -1, truth.oracle.rows(14) - 1, 17]
        expected = truth.rows(14, ids, "packed")
        for target in (tcp[1], f"unix:{socket}"):
            output = tmp_path / "rows.npy"
            done("lookup", target, "--rows", f"14:{','.join(map(str, ids))}", "--output", output)
            assert same(np.load(output), expected)
            document = json.loads(done("lookup", target, "--rows", "14:0,17", "--json"))
            assert document["rows"] == expected[:2].tolist()
            assert document["sha256"] == hashlib.sha256(expected[:2].tobytes()).hexdigest()
            assert document["stats"]["distinct"] == 2
        text = done("lookup", tcp[1], "--text", "the memory of a model", "--format", "bf16")
        assert re.match(r"uint16\[\d+, 48, 256\] bf16", text)
        assert "row id 999999999 is outside" in refused("lookup", tcp[1], "--rows", "14:999999999")
        busy = engram_server("serve", fp8_checkpoint, "--listen", tcp[1])
        assert busy.returncode == 1
        assert busy.stderr.splitlines()[-1].startswith("engram-server serve: cannot listen on")
        assert "absl" not in busy.stderr
    assert not socket.exists()
    assert "onnect" in refused("lookup", f"unix:{socket}", "--tokens", "1")


def test_text_needs_the_tokenizer_that_the_server_hashes_with(fp4_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((fp4_checkpoint / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {
        token: 128_000 - number if 1000 <= number < 127_001 else number
        for token, number in tokenizer["model"]["vocab"].items()
    }
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(tokenizer))
    sentence = refused("lookup", fp4_checkpoint, "--text", "hello", "--tokenizer", other)
    assert "token map" in sentence
    assert FACTS["token_map_sha256_int32_le"] in sentence


def test_inspect_tells_what_is_there_and_what_is_wrong(fp4_checkpoint: Path, tmp_path: Path) -> None:
    report = json.loads(done("inspect", fp4_checkpoint, "--json"))
    assert report["problems"] == []
    assert report["tokenizer"]["token_map_digest"] == FACTS["token_map_sha256_int32_le"]
    assert "can be served" in done("inspect", fp4_checkpoint)
    for file in fp4_checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model-00048-of-00048.safetensors").unlink()
    broken = engram_server("inspect", tmp_path)
    assert broken.returncode == 1
    assert "model-00048-of-00048.safetensors" in broken.stdout


def test_synth_finishes_at_once_when_there_is_nothing_to_do(tmp_path: Path) -> None:
    out = tmp_path / "small"
    arguments = ("synth", out, "--engram-vocab-size", 300, "--seed", 5)
    assert "written" in done(*arguments)
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert "nothing to do" in done(*arguments)
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before
    assert str(out) in refused("synth", out, "--engram-vocab-size", 301)


def test_planted_rows_of_full_size_tables_are_served_from_the_start(tmp_path: Path) -> None:
    full = tmp_path / "full"
    done("synth", full, "--sparse")
    planted = json.loads((full / "planted.json").read_text())["layers"]
    assert list(planted) == ["1", "14"]
    for scales in ("auto", "memory", "disk"):
        with served(full, "--listen", "none", "--uds", tmp_path / "sock", "--scales", scales) as (line, _):
            assert "384,006,168 rows" in line
            for layer, rows in planted.items():
                assert max(rows["ids"]) * 128 > 2**32
                output = tmp_path / "rows.npy"
                ids = ",".join(map(str, rows["ids"]))
                done("lookup", f"unix:{tmp_path / 'sock'}", "--rows", f"{layer}:{ids}", "--output", output)
                assert np.load(output).tobytes() == b"".join(map(bytes.fromhex, rows["packed_hex"]))


def test_what_operators_get_wrong_is_a_sentence(fp4_checkpoint: Path, tmp_path: Path) -> None:
    assert "there is no such file" in refused("serve", tmp_path / "absent")
    assert "has neither model.safetensors.index.json nor" in refused("serve", tmp_path)
    assert "HOST:PORT" in refused("serve", fp4_checkpoint, "--listen", "999")
    assert "is not a target" in refused("lookup", "nowhere", "--tokens", "1", "--cache-bytes", "1MiB")
    assert "token id 129280" in refused("lookup", fp4_checkpoint, "--tokens", "1,129280")
    assert "token id -5" in refused("hash", fp4_checkpoint, "--tokens", "1", "--history=-5")
    assert "tokenizer" in refused("hash", fp4_checkpoint, "--tokens", "1", "--tokenizer", tmp_path / "absent")
    for arguments in (
        ("hash", fp4_checkpoint, "--tokens", "one"),
        ("lookup", fp4_checkpoint, "--rows", "14"),
        ("lookup", fp4_checkpoint, "--tokens", "1", "--rows", "14:1"),
        ("serve", fp4_checkpoint, "--io-depth", "0"),
        ("serve", fp4_checkpoint, "--io-depth", "9" * 20),
        ("serve", fp4_checkpoint, "--io-threads=-1"),
        ("serve", fp4_checkpoint, "--drain-seconds", "nan"),
    ):
        result = engram_server(*arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--backend", "auto"], "--backend is for tables that are read in this process, and {} is a server"),
        (["--scales=disk"], "--scales is for tables"),
        (["--io-depth=64"], "--io-depth is for tables"),
        (["--bulk-depth=0"], "--bulk-depth is for tables"),
        (["--io-threads=0"], "--io-threads is for tables"),
        (["--budget-bytes=1GiB"], "--budget-bytes is for tables"),
        (["--cache-bytes=0"], "--cache-bytes is for tables"),
        (["--resident"], "--resident is for tables"),
        (["--replica", "/other"], "--replica is for tables"),
        (["--tokenizer", "tokenizer.json"], "--tokenizer is for tables"),
    ],
)
@pytest.mark.parametrize("target", ["127.0.0.1:1", "unix:/nobody"])
def test_how_tables_are_read_is_not_for_those_who_ask_a_server(
    capsys: pytest.CaptureFixture[str], target: str, options: list[str], says: str
) -> None:
    """Also where it is the default."""
    assert main(["lookup", target, "--tokens", "1", *options]) == 1
    assert says.format(target) in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--tls", "--tls-ca=f", "--tls-cert=f", "--tls-key=f", "--token-file=f", "--token-plaintext"]
)
def test_what_a_server_wants_is_not_for_tables_that_are_read_here(
    fp4_checkpoint: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(["lookup", str(fp4_checkpoint), "--tokens", "1", option]) == 1
    said = f"{option.partition('=')[0]} is for a server over TCP; {fp4_checkpoint} is read in this process"
    assert said in capsys.readouterr().err


def test_history_is_not_for_row_ids(fp4_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lookup", str(fp4_checkpoint), "--rows", "1:0", "--history=3"]) == 1
    assert "--history goes before --tokens or --text" in capsys.readouterr().err


def test_no_time_to_wait_is_refused_by_the_name_of_its_option(
    fp4_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", str(fp4_checkpoint), "--queue-seconds", "0"])
    assert "argument --queue-seconds: 0 seconds would refuse whatever has to wait" in capsys.readouterr().err
    monkeypatch.setenv("ENGRAM_SERVE_QUEUE_SECONDS", "0.0")
    assert main(["serve", str(fp4_checkpoint)]) == 1
    assert "ENGRAM_SERVE_QUEUE_SECONDS: 0 seconds would refuse" in capsys.readouterr().err


def test_names_that_are_no_text(
    fp4_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")  # as in most locales
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/n\xffm"))
    shutil.copytree(fp4_checkpoint, folder)
    for command in (("serve", folder), ("lookup", folder, "--tokens", "1")):
        assert "the name is not UTF-8; rename it, or open it by a link" in refused(*command)
    assert "its name is not UTF-8" in engram_server("doctor", folder).stdout
    socket = Path(os.fsdecode(bytes(tmp_path) + b"/s\xff"))
    assert "the UNIX socket is not UTF-8" in refused(
        "serve", fp4_checkpoint, "--listen", "none", "--uds", socket
    )
    assert "this is not UTF-8" in refused("lookup", fp4_checkpoint, "--text", "n\udcffm", status=2)
    store = folder.with_suffix(".store")
    assert f"{store}: " in done("convert", folder, store)
    (tmp_path / "link").symlink_to(folder)
    done("lookup", tmp_path / "link", "--tokens", "1")


def test_a_budget_that_holds_no_request_is_refused(fp4_checkpoint: Path) -> None:
    assert "holds no request" in refused("lookup", fp4_checkpoint, "--tokens", "1", "--budget-bytes", "100")
    done("lookup", fp4_checkpoint, "--tokens", "1", "--budget-bytes", "1MiB")


def test_a_disk_that_fails_when_tables_are_opened_is_a_sentence(fp4_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = fp4_checkpoint / "tokenizer.json"
    with faulty_fs(fp4_checkpoint, tmp_path / "mnt", tmp_path / "control.json") as faults:
        # Away from the first, middle and last page of a shard, and amid the rows that a digest samples.
        faults.set("eio", 1_000_000, 1_200_000)
        for command in (("serve", "--listen", "127.0.0.1:0"), ("lookup", "--rows", "1:0")):
            name, *options = command
            sentence = refused(name, tmp_path / "mnt", *options, "--tokenizer", tokenizer)
            assert "a test read of" in sentence
            assert "could not be read: Input/output error" in sentence


def test_a_corpus_warms_a_server(fp4_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    hot = tmp_path / "hot.set"
    said = done("warm", fp4_checkpoint, tmp_path / "corpus", "--output", hot, "--limit-bytes", "1MiB")
    assert "row groups for 100.0 % of what" in said
    arguments = ("--listen", "127.0.0.1:0", "--cache-bytes", "64MiB", "--hot-set", hot)
    with served(fp4_checkpoint, *arguments) as (line, _):
        assert re.search(r"cache 6\d MiB;", line.rstrip())
        (target,) = re.findall(r" on (\S+): layer", line)
        text = (
            "lookup",
            target,
            "--text",
            "The quick brown fox",
            "--json",
            "--output",
            tmp_path / "rows.npy",
        )
        until(lambda: json.loads(done(*text))["stats"]["reads"] == 0)


def test_sizes_are_numbers_with_a_unit_or_none(fp4_checkpoint: Path) -> None:
    for size in ("2GB", "-1", "1.5GiB", "much", ""):
        result = engram_server("lookup", fp4_checkpoint, "--rows", "1:0", f"--cache-bytes={size}")
        assert result.returncode == 2
        assert "is not a size such as 2GiB, 512MiB or 0" in result.stderr
    for size in ("0", "67108864", "64MiB", "65536 KiB"):
        done("lookup", fp4_checkpoint, "--rows", "1:0", f"--cache-bytes={size}")


def test_what_memory_cannot_hold_is_refused_at_the_start(fp4_checkpoint: Path) -> None:
    sentence = refused("serve", fp4_checkpoint, "--cache-bytes", "900000GiB", "--listen", "127.0.0.1:0")
    assert (
        "--cache-bytes (900000.00 GiB) and --budget-bytes (1.00 GiB) and --shm-bytes (1.00 GiB) take 900002.00 GiB"
        in sentence
    )
    sentence = refused("serve", fp4_checkpoint, "--shm-bytes", "900000GiB", "--listen", "127.0.0.1:0")
    assert "--shm-bytes (900000.00 GiB) take" in sentence
    assert len(sentence.splitlines()) == 1
