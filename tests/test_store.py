"""Packed stores: what a reader takes and what it refuses, by docs/format.md. Every byte counts."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracles import store as oracle
from oracles.files import CheckpointFiles
from oracles.rows import RowOracle

from engram_server.cli import main
from engram_server.convert import convert
from engram_server.doctor.reads import find_target
from engram_server.spec import EngramSpec
from engram_server.tables.inspect import format_report, inspect
from engram_server.tables.store import is_store, open_store, read_rows
from engram_server.verify import verify

PAGE = 4096
TABLES = {1: 11, 14: 13}


def tiny_store(root: Path, fmt: str, seed: int = 0) -> Path:
    """A store of 11 and 13 rows: the header and a page for each."""
    root.mkdir()
    checkpoint = CheckpointFiles(fmt).write(root)
    oracle_rows = RowOracle(checkpoint)
    for layer, rows in TABLES.items():  # any bytes, but for NaN and infinity
        for part in ("weight", "scale"):
            file, begin, width, _ = oracle_rows._planes[layer, part]
            data = bytearray(file.read_bytes())
            for at in range(begin, begin + rows * width):
                data[at] = (data[at] * 5 + seed + at) % 127
            file.write_bytes(data)
    convert(checkpoint, root / "tiny.store")
    return root / "tiny.store"


@pytest.fixture(params=["fp4", "fp8"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_store(tmp_path / "tiny", request.param)


def problems_of(path: Path) -> list[str]:
    """What opening or verifying says is wrong."""
    try:
        return list(verify(path, threads=1).problems)
    except ValueError as error:
        return [str(error)]


def test_a_store_is_what_the_format_says(tiny: Path) -> None:
    content, store, rows = tiny.read_bytes(), open_store(tiny), RowOracle(tiny.parent)
    facts, tables = oracle.header(content), oracle.read(content)
    assert is_store(tiny)
    assert {layer: len(found) for layer, found in tables.items()} == TABLES
    for table, entry in zip(store.tables, facts["tables"], strict=True):
        layer = table.layer
        assert b"".join(tables[layer]) == rows.packed(layer, range(table.rows)).tobytes()
        assert entry["digest"] == oracle.table_digest(layer, tables[layer]) == table.digest.hex()
        assert read_rows(store, table, range(table.rows)).tobytes() == b"".join(tables[layer])
        assert (table.first_page, table.kind.name.lower()) == (entry["first_page"], facts["kind"])
    assert str(store.uuid) == facts["uuid"]
    assert store.spec == EngramSpec.from_file(tiny.parent) == EngramSpec.from_config(facts["config"])
    assert store.token_map_sha256.hex() == facts["token_map_sha256"] != ""
    assert problems_of(tiny) == []


def test_every_flipped_byte_of_the_header_is_refused(tiny: Path) -> None:
    good = tiny.read_bytes()
    fd = os.open(tiny, os.O_RDWR)
    for at in range(PAGE):
        os.pwrite(fd, bytes([good[at] ^ 1 << at % 8]), at)
        with pytest.raises(ValueError, match=r"header page is damaged|does not begin as a packed store does"):
            open_store(tiny)
        os.pwrite(fd, good[at : at + 1], at)
    os.close(fd)
    assert problems_of(tiny) == []


def test_flipped_bytes_of_pages_are_reported(tiny: Path) -> None:
    """Through all of `verify`: the first and last byte of every record, of the padding, and some between. That every
    byte of a page is checked, test_repack shows."""
    good = tiny.read_bytes()
    record = open_store(tiny).tables[0].row_bytes + 4
    fd = os.open(tiny, os.O_RDWR)
    places = {*range(0, PAGE, 61), *range(0, PAGE, record), *range(record - 1, PAGE, record), PAGE - 1}
    for page, (layer, rows) in enumerate(TABLES.items(), 1):
        for place in sorted(places):
            at = page * PAGE + place
            os.pwrite(fd, bytes([good[at] ^ 1 << at % 8]), at)
            row = place // record
            words = (
                f"rows do not match their checksum: {row}"
                if row < rows
                else f"padding that is not zero: {page}"
            )
            found = problems_of(tiny)[0]
            assert found.startswith(f"layer {layer}: 1 ")
            assert found.endswith(words)
            os.pwrite(fd, good[at : at + 1], at)
    os.close(fd)
    assert problems_of(tiny) == []


def test_a_flipped_row_is_not_read(tiny: Path) -> None:
    good = bytearray(tiny.read_bytes())
    store = open_store(tiny)
    table = store.tables[1]
    good[table.offset + 3 * (table.row_bytes + 4)] ^= 1
    tiny.write_bytes(good)
    assert len(read_rows(store, table, [2, 4])) == 2
    with pytest.raises(ValueError, match="row 3 of layer 14 does not match its checksum; `verify` lists"):
        read_rows(store, table, [2, 3, 4])


@pytest.mark.parametrize("fmt", ["fp4", "fp8"])
def test_pages_in_the_wrong_place_are_reported(
    fmt: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Within a table, between tables, and from another store of the same shape."""
    checkpoint: Path = request.getfixturevalue(f"{fmt}_checkpoint")
    path = tmp_path / "a.store"
    convert(checkpoint, path)
    store, good = open_store(path), path.read_bytes()
    other_store = tiny_store(tmp_path / "other", fmt), tiny_store(tmp_path / "same-shape", fmt, seed=1)
    per_page = oracle.PER_PAGE[fmt]
    first, second = store.tables
    for here, there in ((first.offset, first.offset + 5 * PAGE), (first.offset, second.offset + PAGE)):
        swapped = bytearray(good)
        swapped[here : here + PAGE], swapped[there : there + PAGE] = (
            good[there : there + PAGE],
            good[here : here + PAGE],
        )
        path.write_bytes(swapped)
        assert sum(table.bad_rows for table in verify(path).tables) == 2 * per_page
    a, b = (file.read_bytes() for file in other_store)
    assert len(a) == len(b)
    other_store[0].write_bytes(a[: 2 * PAGE] + b[2 * PAGE :])
    assert [table.bad_rows for table in verify(other_store[0]).tables] == [0, 13]


def test_a_store_of_another_length_is_refused(tiny: Path) -> None:
    good = tiny.read_bytes()
    for length in {*range(0, len(good), 509), PAGE - 1, PAGE, PAGE + 1, len(good) - 1}:
        tiny.write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"truncated|less than a store's header page"):
            open_store(tiny)
    for extra in (1, PAGE):
        tiny.write_bytes(good + bytes(extra))
        with pytest.raises(ValueError, match="longer than it was written"):
            open_store(tiny)


Bend = Callable[[dict[str, Any]], object]


def put(key: str, value: object) -> Bend:
    return lambda facts: facts.update({key: value})


def table(key: str, value: object) -> Bend:
    return lambda facts: facts["tables"][1].update({key: value})


BENT: dict[str, tuple[Bend, str]] = {
    "uuid missing": (lambda facts: facts.pop("uuid"), "the header's uuid is not a string"),
    "uuid is text": (put("uuid", "tiny"), "the header's uuid is 'tiny'"),
    "uuid without dashes": (put("uuid", "0" * 32), "the header's uuid is '0000"),
    "kind unknown": (put("kind", "fp6"), "kind is 'fp6'; known are fp4 and fp8"),
    "kind missing": (lambda facts: facts.pop("kind"), "the header's kind is not a string"),
    "tables missing": (lambda facts: facts.pop("tables"), "tables is not a list of objects"),
    "no tables": (put("tables", []), "tables is not a list of objects"),
    "tables of numbers": (put("tables", [1, 14]), "tables is not a list of objects"),
    "tables reversed": (lambda facts: facts["tables"].reverse(), r"tables of layers \[14, 1\]"),
    "table twice": (
        lambda facts: facts["tables"].append(facts["tables"][1]),
        r"tables of layers \[1, 14, 14\]",
    ),
    "foreign layer": (table("layer", 15), r"tables of layers \[1, 15\]"),
    "rows are another number": (table("rows", 14), "layer 14 rows 14; it must be 13"),
    "rows are a fraction": (table("rows", 13.0), r"layer 14 rows 13\.0; it must be 13"),
    "first page overlaps": (table("first_page", 1), "layer 14 first_page 1; it must be 2"),
    "first page leaves a gap": (table("first_page", 3), "layer 14 first_page 3; it must be 2"),
    "digest is short": (table("digest", "ab"), "digest in the header is not 64 hexadecimal digits"),
    "digest missing": (lambda facts: facts["tables"][0].pop("digest"), "is not 64 hexadecimal digits"),
    "token map digest is no digest": (put("token_map_sha256", "x" * 64), "token_map_sha256 is 'xxx"),
    "config missing": (
        lambda facts: facts.pop("config"),
        "the header's config: the config is not a JSON object",
    ),
    "config of another model": (
        lambda facts: facts["config"].update(engram_kernel_size=4),
        "the header's config: .*engram_kernel_size.*another model",
    ),
}


@pytest.mark.parametrize(("bend", "words"), BENT.values(), ids=BENT)
def test_a_bent_header_gets_its_sentence(tmp_path: Path, bend: Bend, words: str) -> None:
    path = tiny_store(tmp_path / "tiny", "fp4")
    content = path.read_bytes()
    facts = oracle.header(content)
    bend(facts)
    path.write_bytes(oracle.header_page(facts) + content[PAGE:])
    with pytest.raises(ValueError, match=words) as error:
        open_store(path)
    assert str(path) in str(error.value)


def test_keys_that_are_not_known_are_ignored(tiny: Path) -> None:
    content = tiny.read_bytes()
    facts = oracle.header(content) | {"made_by": "a later release"}
    tiny.write_bytes(oracle.header_page(facts) + content[PAGE:])
    assert problems_of(tiny) == []


def test_another_version_is_refused_by_its_number(tiny: Path) -> None:
    content = tiny.read_bytes()
    tiny.write_bytes(oracle.header_page(oracle.header(content), version=2) + content[PAGE:])
    with pytest.raises(
        ValueError, match="a store of version 2; this program reads version 1; use the program"
    ):
        open_store(tiny)


def test_a_wrong_digest_is_reported_by_verify(tiny: Path) -> None:
    content = tiny.read_bytes()
    facts = oracle.header(content)
    facts["tables"][0]["digest"] = "0" * 64
    tiny.write_bytes(oracle.header_page(facts) + content[PAGE:])
    assert problems_of(tiny) == ["layer 1: the rows do not give the digest in the header"]


def test_what_is_no_store(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_bytes(b"a text file\n" * 1000)
    for name, words in (
        ("", "not a regular file"),
        ("absent", "there is no such file"),
        ("pipe", "not a regular file"),
        ("text", "does not begin as a packed store does"),
    ):
        assert not is_store(tmp_path / name)
        with pytest.raises(ValueError, match=words):
            open_store(tmp_path / name)


def test_verify_on_the_command_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tiny)]) == 0
    assert "sound" in capsys.readouterr().out
    content = bytearray(tiny.read_bytes())
    content[PAGE + 7] ^= 1
    tiny.write_bytes(content)
    assert main(["verify", str(tiny), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"][0] == "layer 1: 1 rows do not match their checksum: 0"
    tiny.write_bytes(content[:-1])
    assert main(["verify", str(tiny)]) == 1
    assert "truncated" in capsys.readouterr().err


def test_verify_names_some_and_counts_all(tmp_path: Path, fp4_checkpoint: Path) -> None:
    path = tmp_path / "a.store"
    convert(fp4_checkpoint, path)
    store = open_store(path)
    with path.open("r+b") as file:
        file.seek(store.tables[1].offset)
        file.write(bytes(store.tables[1].pages * PAGE))
    (sound, damaged) = verify(path).tables
    assert (sound.bad_rows, damaged.bad_rows) == (0, store.tables[1].rows)
    assert damaged.first_rows == list(range(20))
    assert len("".join(verify(path).problems)) < 1000


def test_inspect_tells_what_a_store_holds(tmp_path: Path, fp4_checkpoint: Path) -> None:
    path = tmp_path / "a.store"
    convert(fp4_checkpoint, path)
    report, in_place = inspect(path), inspect(fp4_checkpoint)
    assert report["problems"] == []
    assert report["store"]["uuid"] == oracle.header(path.read_bytes())["uuid"]
    for key in ("layer", "format", "rows", "row_bytes", "bytes", "digest"):
        assert [table[key] for table in report["tables"]] == [table[key] for table in in_place["tables"]]
    assert report["tokenizer"]["hash_digest"] == in_place["tokenizer"]["hash_digest"]
    text = format_report(report)
    assert "packed store, version 1" in text
    assert "can be served" in text
    json.dumps(report)


def test_inspect_tells_what_is_wrong_with_a_store(tiny: Path) -> None:
    content = bytearray(tiny.read_bytes())
    content[PAGE] ^= 1
    tiny.write_bytes(content)
    assert "row 0 of layer 1 does not match its checksum" in inspect(tiny)["problems"][0]
    assert [table["layer"] for table in inspect(tiny)["tables"]] == [1, 14]
    tiny.write_bytes(content[:-1])
    assert "truncated" in inspect(tiny)["problems"][0]
    assert "cannot be served" in format_report(inspect(tiny))


def test_a_store_alone_serves_hash_and_doctor(
    tmp_path: Path, fp4_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.store"
    convert(fp4_checkpoint, path)
    printed = []
    for target in (path, fp4_checkpoint):
        assert main(["hash", str(target), "--tokens", "0,3,17", "--json"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    target, findings = find_target(path)
    assert target is not None
    assert target.reads_per_token == 48
    assert [finding.level for finding in findings] == ["ok"]
