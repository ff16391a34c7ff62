"""engram-load against real servers: counts that are exact, waits that are not hidden, errors that are sentences."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.proxy import proxied
from support.serving import ServerProcess, serving
from support.truth import Truth

from engram_client import EngramClient
from engram_load import cli
from engram_server.tokens import encode, installed_tokenizer

ROOT = Path(__file__).resolve().parents[1]
STATS = ("rows", "distinct", "cached", "joined", "reads", "read_bytes", "groups")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of prose: this project's own."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("README.md", "docs/architecture.md", "docs/shared-memory.md"):
        (folder / Path(name).name).write_text((ROOT / name).read_text())
    return folder


@pytest.fixture(scope="module")
def server(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("serve")
    with serving(fp4_checkpoint, folder, uds=folder / "engram.sock", cache_bytes=4 << 20) as process:
        yield process


def load(*arguments: object, status: int = 0) -> None:
    """Run the command in this process."""
    assert cli.main([*map(str, arguments), *(["--quiet"] if "compare" not in arguments else [])]) == status


def report(tmp_path: Path, *arguments: object, status: int = 0) -> dict[str, Any]:
    """What it writes as JSON."""
    file = tmp_path / "report.json"
    load(*arguments, "--json", file, status=status)
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence that it fails with."""
    capsys.readouterr()
    load(*arguments, status=1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"engram-load {arguments[0]}: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


# -------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize("pattern", ["prefill", "decode", "mix", "zipf"])
def test_counts_are_the_sums_of_what_the_server_says_each_request_cost(
    server: ServerProcess, text: Path, tmp_path: Path, pattern: str
) -> None:
    with proxied(server.targets[0]) as (target, proxy), EngramClient(server.targets[0]) as client:
        before = client.describe().cache
        arguments = {
            "prefill": [text, "--length", "300,900", "--chunk", 256, "--concurrency", 3],
            "decode": [text, "--batch", 4, "--drafts", 2, "--concurrency", 3],
            "mix": [text, "--batch", 4, "--length", 300, "--rate", 50],
            "zipf": ["--length", 20, "--concurrency", 2],
        }[pattern]
        document = report(tmp_path, pattern, target, *arguments, "--count", 12)
        after = client.describe().cache
    (point,) = document["points"]
    counts = point["counts"]
    seen = proxy.counts
    assert {name: counts[name] for name in STATS} == {name: seen[name] for name in STATS}
    assert counts["requests"] == seen["requests"] == len(proxy.requests)
    assert counts["rows"] == 48 * counts["tokens"] > 0
    assert counts["answer_bytes"] == 136 * counts["rows"]
    # The server's own counters, of groups: every distinct group was a hit, a miss or somebody else's read.
    gone = [after.hits - before.hits, after.misses - before.misses, after.joined - before.joined]
    assert counts["groups"] == sum(gone)
    assert (counts["cached"] > 0) == (gone[0] > 0)
    assert point["cache"]["before"] == vars(before)
    assert point["cache"]["after"] == vars(after)
    main = {"prefill": "prompt", "decode": "step", "mix": "prompt", "zipf": "request"}[pattern]
    assert point["series"][main]["jobs"] == 12
    assert sum(point["time_line"]["rows"]) == counts["rows"]
    assert sum(point["time_line"]["reads"]) == counts["reads"]
    for series in point["series"].values():
        for latencies in series["latencies"].values():
            assert latencies["count"] > 0
            assert (
                latencies["percentiles_ms"]["50"] <= latencies["percentiles_ms"]["99"] <= latencies["max_ms"]
            )


def test_every_transport_is_asked_for_the_same_rows(
    server: ServerProcess, fp4_checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    tcp, uds = server.targets
    found = []
    for target, transport in (
        (tcp, "gRPC over TCP"),
        (uds, "gRPC over a UNIX socket"),
        (f"shm:{tcp}", "shared memory"),
        (fp4_checkpoint, "embedded"),
    ):
        document = report(
            tmp_path, "prefill", target, text, "--length", 500, "--count", 5, "--format", "bf16"
        )
        assert document["target"]["transport"] == transport
        assert document["target"]["server_version"]
        (point,) = document["points"]
        found.append([point["counts"][name] for name in ("requests", "tokens", "rows", "answer_bytes")])
        found[-1].append(point["distinct_rows"])
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][:4] == [5, 2_500, 120_000, 120_000 * 512]


def test_distinct_rows_of_the_run_are_those_of_the_oracles_hash(
    server: ServerProcess, fp4_checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    document = report(
        tmp_path,
        "prefill",
        server.targets[0],
        text / "README.md",
        "--length",
        150,
        "--chunk",
        64,
        "--count",
        4,
    )
    tokenizer = installed_tokenizer()
    assert tokenizer is not None
    tokens = encode(tokenizer, (text / "README.md").read_text())
    truth = Truth(fp4_checkpoint, "fp4")
    rows = {
        (layer, int(row))
        for prompt in range(4)
        for position in truth.ids(tokens[150 * prompt : 150 * (prompt + 1)])
        for layer, ids in zip((1, 14), position, strict=True)
        for row in ids
    }
    (point,) = document["points"]
    assert point["distinct_rows"] == {"rows": 4 * 150 * 48, "distinct": len(rows), "whole_run": True}
    assert point["ratios"]["distinct_in_run"] == len(rows) / (4 * 150 * 48)


def test_uniform_rows_are_all_distinct_and_none_is_cached(server: ServerProcess, tmp_path: Path) -> None:
    document = report(tmp_path, "uniform", server.targets[0], "--length", 20, "--count", 30)
    (point,) = document["points"]
    assert point["distinct_rows"] == {"rows": 30 * 20 * 48, "distinct": 30 * 20 * 48, "whole_run": True}
    assert point["ratios"]["distinct_in_request"] == 1.0


def test_what_no_text_looks_like_is_said_aloud(
    server: ServerProcess, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = server.targets[0]
    natural = report(tmp_path, "prefill", target, text, "--length", 1_000, "--count", 2)
    assert natural["warnings"] == []
    assert "NOT REPRESENTATIVE" in report(tmp_path, "repeat", target, "--count", 2)["warnings"][0]
    assert "WARNING: NOT REPRESENTATIVE" in capsys.readouterr().out
    (tmp_path / "lorem.txt").write_text("all work and no play makes a dull boy\n" * 2_000)
    lorem = report(tmp_path, "prefill", target, tmp_path / "lorem.txt", "--length", 1_000, "--count", 2)
    assert "unnaturally repetitive" in lorem["warnings"][0]
    again = report(tmp_path, "prefill", target, text / "README.md", "--length", 4_000, "--count", 4)
    prompts = again["load"]["corpus"]["tokens"] // 4_000
    assert f"begun again {-(-4 // prompts) - 1} time(s)" in " ".join(again["warnings"])


# ----------------------------------------------------------------------------------------------------- load


def arrivals(rate: float, seconds: float, seed: int = 1) -> int:
    """How many a Poisson process of this seed has."""
    rng, at, count = random.Random(seed), 0.0, 0
    while (at := at + rng.expovariate(rate)) < seconds:
        count += 1
    return count


def test_an_open_loop_makes_everybody_wait_who_came_during_a_stall(
    server: ServerProcess, text: Path, tmp_path: Path
) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        proxy.stall = (20, 2.0)
        document = report(
            tmp_path, "prefill", target, text, "--length", 20, "--rate", 40, "--duration", 3, "--threads", 8
        )
    (point,) = document["points"]
    series = point["series"]["prompt"]
    assert series["jobs"] == arrivals(40, 3)
    assert series["unfinished"] == 0
    # Two of three seconds nobody was answered: two in three waited, the first of them for two seconds.
    percentiles = series["latencies"]["prompt"]["percentiles_ms"]
    assert percentiles["99"] >= 1_800
    assert percentiles["50"] >= 300
    assert series["late"]["percentiles_ms"]["90"] >= 500, "most of it before there was a thread to send them"


def test_twice_what_a_server_can_do_shows_as_a_queue(
    server: ServerProcess, text: Path, tmp_path: Path
) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        proxy.service_s = 0.02  # 50 a second
        document = report(tmp_path, "decode", target, text, "--batch", 1, "--rate", 100, "--duration", 2)
    (point,) = document["points"]
    series = point["series"]["step"]
    expected = arrivals(100, 2)
    assert series["jobs"] == expected
    # The last one waited for all before: expected / 50 seconds of service, less the two in which they came.
    assert series["latencies"]["step"]["max_ms"] >= 1e3 * (expected * 0.02 - 2) - 100
    assert series["latencies"]["step"]["percentiles_ms"]["99"] >= 1e3 * (expected * 0.02 - 2) * 0.9 - 100


def test_refusals_are_counted_apart_and_break_an_objective(
    server: ServerProcess, text: Path, tmp_path: Path
) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        proxy.refuse_every = 5
        document = report(
            tmp_path, "prefill", target, text, "--length", 20, "--count", 50, "--slo", "p99<60s", status=1
        )
    (point,) = document["points"]
    series = point["series"]["prompt"]
    assert series["jobs"] == series["latencies"]["prompt"]["count"] == proxy.counts["requests"] == 40
    assert series["failures"]["OverloadedError"]["count"] == 10
    assert "planted: there is no room" in series["failures"]["OverloadedError"]["first"]
    assert document["objective"] == {"text": "p99<60s", "met": False}
    assert "10 of 50 prompts failed (10 OverloadedError)" in document["warnings"][0]


def test_a_warm_up_is_sent_but_not_measured(server: ServerProcess, text: Path, tmp_path: Path) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        arguments = ["--length", 20, "--rate", 50, "--warmup", 1, "--duration", 1]
        document = report(tmp_path, "prefill", target, text, *arguments)
    (point,) = document["points"]
    assert point["counts"]["requests"] == arrivals(50, 2) - arrivals(50, 1)
    assert proxy.counts["requests"] == arrivals(50, 2)


def test_a_sweep_finds_the_highest_load_that_meets_the_objective(
    server: ServerProcess, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        # As many closed loops as there is room for are never refused; 64 are, for certain.
        proxy.room = 4
        document = report(
            tmp_path, "decode", target, text, "--batch", 1, "--sweep", "concurrency=1..64", "--duration", 1,
            "--slo", "p50<60s",
        )  # fmt: skip
    assert document["sweep"]["objective"] == "p50<60s"
    values = [point["value"] for point in document["points"]]
    assert values == sorted(values)
    best = document["sweep"]["highest"]
    assert best in values
    assert 4 <= best < 64
    assert document["sweep"]["lowest"] is None
    assert f"highest concurrency that meets p50<60s: {best:g}" in capsys.readouterr().out


def test_ctrl_c_reports_what_there_is(server: ServerProcess, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "engram_load.cli",
        "prefill",
        server.targets[0],
        str(text),
        "--length",
        "50",
    ]
    with proxied(server.targets[0]) as (target, proxy):
        command[4] = target
        process = subprocess.Popen(
            [*command, "--duration", "600", "--json", str(file)], stdout=subprocess.DEVNULL
        )
        while proxy.counts["requests"] < 20:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        document = json.loads(file.read_text())
        assert document["points"][0]["interrupted"]
        assert "interrupted" in document["warnings"][0]
        assert 20 <= document["points"][0]["counts"]["requests"] == proxy.counts["requests"]


# ------------------------------------------------------------------------------------------------- reports


class Page(HTMLParser):
    """Elements that are open, ids, links, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.pictures = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.pictures += tag == "svg"
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("sweep", [False, True])
def test_the_page_needs_nothing_else_and_says_who_answered(
    server: ServerProcess, text: Path, tmp_path: Path, sweep: bool
) -> None:
    file = tmp_path / "report.html"
    arguments = ["--sweep", "length=50,100"] if sweep else ["--length", "uniform:50-100"]
    document = report(
        tmp_path,
        "prefill",
        server.targets[0],
        text,
        *arguments,
        "--count",
        5,
        "--html",
        file,
        "--label",
        "a <b> & c",
    )
    page = Page(file.read_text())
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), "pictures do not share names"
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "<script" not in file.read_text()
    assert "a <b> & c" in page.text
    target = document["target"]
    (table, _), machine, client = target["tables"], target["machine"], document["client"]
    for fact in (
        target["server_version"], target["backend"], target["backend_reason"], f"{target['cache_bytes']:,}",
        table["digest"][:16], client["cpu"], client["kernel"], machine["cpu"], machine["kernel"],
        machine["files"][0]["device"] or "unknown device", f"alignment {machine['files'][0]['alignment_bytes']}",
        "disk reads per token", "bytes read / bytes useful", "cache hit rate", "distinct rows, over the run",
    ):  # fmt: skip
        assert fact in page.text
    assert page.pictures == (4 if sweep else 2)


def test_two_reports_compare(
    server: ServerProcess, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, target in zip(files, (server.targets[0], f"shm:{server.targets[0]}"), strict=True):
        load("prefill", target, text, "--length", 200, "--count", 5, "--json", file)
    documents = [json.loads(file.read_text()) for file in files]
    capsys.readouterr()
    load("compare", *files)
    out = capsys.readouterr().out
    assert "differs: transport: gRPC over TCP / shared memory" in out
    assert "differs: server version" not in out
    p99 = [
        document["points"][0]["series"]["prompt"]["latencies"]["prompt"]["percentiles_ms"]["99"]
        for document in documents
    ]
    line = next(line for line in out.splitlines() if line.startswith("prompt p99 ms"))
    assert line.split()[-3:] == [f"{p99[0]:,.3f}", f"{p99[1]:,.3f}", f"{p99[1] / p99[0]:.3f}"]

    files[0].write_text("{}")
    assert "a.json is no report that this version reads" in refused(capsys, "compare", *files)
    files[0].write_text("x")
    assert "a.json is no report of engram-load: it is not JSON" in refused(capsys, "compare", *files)


def test_every_field_of_the_report_is_documented(server: ServerProcess, text: Path, tmp_path: Path) -> None:
    document = report(
        tmp_path, "mix", server.targets[0], text, "--length", 50, "--count", 3, "--slo", "step:p99<60s"
    )
    described = (ROOT / "docs/load.md").read_text()

    def names(value: Any) -> set[str]:
        if isinstance(value, dict):
            return {name for name in value if re.fullmatch(r"[a-z]\w+", name)}.union(
                *map(names, value.values())
            )
        return set().union(*map(names, value)) if isinstance(value, list) else set()

    assert {name for name in names(document) if f"`{name}`" not in described} == set()


# -------------------------------------------------------------------------------------------------- errors


def test_what_an_operator_gets_wrong_is_a_sentence(
    server: ServerProcess, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = server.targets[0]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "no server answers at 127.0.0.1:9" in refused(capsys, "prefill", "127.0.0.1:9", text)
    assert "no server answers at unix:/nowhere" in refused(capsys, "prefill", "unix:/nowhere", text)
    assert "'engram' is no target: expected HOST:PORT" in refused(capsys, "prefill", "engram", text)
    assert "there are no tables at /no/where" in refused(capsys, "prefill", "/no/where", text)
    assert "name a checkpoint directory, or one shard" in refused(capsys, "prefill", tmp_path, text)
    assert "there is no corpus" in refused(capsys, "prefill", target, tmp_path / "none")
    assert "files in there" in refused(capsys, "prefill", target, tmp_path / "empty")
    assert "there is no text in there" in refused(capsys, "prefill", target, tmp_path / "empty.txt")
    assert "is not a tokenizer.json" in refused(
        capsys, "prefill", target, text, "--tokenizer", tmp_path / "tokenizer.json"
    )
    assert "but a prompt wants 900,000" in refused(capsys, "prefill", target, text, "--length", 900_000)
    assert "--rate is an open loop and --concurrency a closed one" in refused(
        capsys, "prefill", target, text, "--rate", 5, "--concurrency", 2
    )
    assert "--count is 0: give a number above 0" in refused(capsys, "prefill", target, text, "--count", 0)
    assert "is not a size such as" in refused(capsys, "prefill", target, text, "--cache-bytes", "lots")
    assert "names no parameter that can be swept" in refused(
        capsys, "prefill", target, text, "--sweep", "x=1"
    )
    assert "give --slo, or a list" in refused(capsys, "prefill", target, text, "--sweep", "rate=1..9")
    assert "is no objective" in refused(capsys, "prefill", target, text, "--slo", "fast")
    assert "there are no latencies of 'token' here, but of prompt, chunk" in refused(
        capsys, "prefill", target, text, "--count", 1, "--length", 20, "--slo", "token:p99<1s"
    )
    assert "there is no folder /no/where" in refused(
        capsys, "prefill", target, text, "--json", "/no/where/x.json"
    )
    assert "--token 129999999 is no token" in refused(capsys, "repeat", target, "--token", 129_999_999)


def test_a_server_that_refuses_everything_is_no_result(
    server: ServerProcess, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        proxy.refuse_every = 1
        sentence = refused(capsys, "prefill", target, text, "--length", 20, "--count", 5)
    assert "not one prompt was answered; 5 failed (OverloadedError)" in sentence
    assert "planted: there is no room" in sentence


def test_help_teaches() -> None:
    for arguments in (
        ["--help"],
        *([name, "--help"] for name in ("prefill", "decode", "mix", "uniform", "compare")),
    ):
        command = [sys.executable, "-m", "engram_load.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "engram-load " in done.stdout
        assert "  engram-load " in done.stdout, "an example to copy"
