"""engram-load where things go wrong: what was measured is reported, and what cannot be is a sentence."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.proxy import Proxy, proxied
from support.serving import ServerProcess, serving
from test_load import arrivals, load, refused, report
from test_metrics import Scrape

from engram_load import _command

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "README.md"


@pytest.fixture(scope="module")
def server(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(fp4_checkpoint, tmp_path_factory.mktemp("serve"), cache_bytes=4 << 20) as process:
        yield process


@contextmanager
def running(tmp_path: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own; its report goes to report.json."""
    command = [
        sys.executable,
        "-m",
        "engram_load.cli",
        *map(str, arguments),
        "--json",
        str(tmp_path / "report.json"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def once(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something while it runs."""
    while not condition():
        assert process.poll() is None
        time.sleep(0.02)


def lookups(server: ServerProcess) -> float:
    """That a server has answered."""
    scrape = Scrape(server)
    shown = {sample.name for sample in scrape.samples}
    return scrape.sum("engram_lookup_seconds_count") if "engram_lookup_seconds_count" in shown else 0


def ended(process: subprocess.Popen[str], tmp_path: Path) -> tuple[int, str, dict[str, Any]]:
    """Exit status, stderr, and the report."""
    _, error = process.communicate(timeout=120)
    assert "Traceback" not in error
    return process.returncode, error, json.loads((tmp_path / "report.json").read_text())


# ---------------------------------------------------------------------------------------------- in the middle


def test_a_server_that_dies_leaves_a_report_of_what_there_was(fp4_checkpoint: Path, tmp_path: Path) -> None:
    with (
        serving(fp4_checkpoint, tmp_path, metrics="127.0.0.1:0") as server,
        running(tmp_path, "prefill", server.targets[0], TEXT, "--length", 20, "--duration", 600) as process,
    ):
        once(lambda: lookups(server) >= 10, process)
        server.kill()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        status, _, document = ended(process, tmp_path)
    (point,) = document["points"]
    assert status == 1
    assert point["series"]["prompt"]["jobs"] > 0
    assert point["series"]["prompt"]["failures"]["UnavailableError"]["count"] > 0
    assert point["cache"]["after"] is None
    assert any("does not answer any more" in warning for warning in document["warnings"])


def test_a_server_that_dies_in_a_sweep_leaves_the_points_before(fp4_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--length", 20, "--sweep", "concurrency=1,2,3", "--count", 500]
    with (
        serving(fp4_checkpoint, tmp_path, metrics="127.0.0.1:0") as server,
        running(tmp_path, "prefill", server.targets[0], TEXT, *arguments) as process,
    ):
        once(lambda: lookups(server) >= 500, process)
        server.kill()
        status, _, document = ended(process, tmp_path)
    assert status == 1
    assert document["points"][0]["series"]["prompt"]["jobs"] == 500
    assert any("does not answer any more" in warning for warning in document["warnings"])


def test_ctrl_c_counts_who_had_come_and_was_not_answered(server: ServerProcess, tmp_path: Path) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        proxy.service_s = 0.1  # ten a second, and fifty come
        arguments = ["--length", 20, "--rate", 50, "--duration", 600, "--threads", 2]
        with running(tmp_path, "prefill", target, TEXT, *arguments) as process:
            once(lambda: proxy.counts["requests"] >= 20, process)
            process.send_signal(signal.SIGINT)
            status, _, document = ended(process, tmp_path)
        answered = proxy.counts["requests"]
    (point,) = document["points"]
    series = point["series"]["prompt"]
    assert status == 0
    assert point["interrupted"]
    assert series["jobs"] == answered
    # Two seconds and more, in which a hundred came.
    assert series["unfinished"] >= 40
    assert series["latencies"]["prompt"]["count"] == series["jobs"] + series["unfinished"]


def test_ctrl_c_ends_a_long_prompt_after_the_chunk_that_is_under_way(
    server: ServerProcess, tmp_path: Path
) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        proxy.service_s = 0.1
        arguments = ["--length", 4000, "--chunk", 10, "--duration", 600, "--concurrency", 2]
        with running(tmp_path, "prefill", target, TEXT, *arguments) as process:
            once(lambda: proxy.counts["requests"] >= 5, process)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert error == "engram-load prefill: interrupted before anything was answered\n"
        assert proxy.counts["requests"] < 400, "the prompts had 400 chunks each"


def test_a_sweep_whose_first_point_is_refused_goes_on(server: ServerProcess, tmp_path: Path) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        refuse_first(proxy, 5)
        arguments = ["--length", 20, "--sweep", "concurrency=1,2", "--count", 5, "--slo", "p50<60s"]
        document = report(
            tmp_path, "prefill", target, TEXT, *arguments, "--html", tmp_path / "x.html", status=1
        )
    first, second = (point["series"]["prompt"] for point in document["points"])
    assert (first["jobs"], first["failures"]["OverloadedError"]["count"], second["jobs"]) == (0, 5, 5)
    assert document["sweep"]["highest"] is None
    assert "5 of 5 prompts failed" in document["warnings"][0]


def refuse_first(proxy: Proxy, count: int) -> None:
    """So many lookups, and no more."""
    answered = proxy.saw
    proxy.refuse_every = 1

    def saw(request: bytes, context: Any) -> None:
        if len(proxy.requests) >= count:
            proxy.refuse_every = 0
        answered(request, context)

    proxy.saw = saw  # type: ignore[method-assign]


def test_what_was_given_up_after_a_minute_of_draining_is_counted(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_command, "DRAIN_S", 0.5)
    with proxied(server.targets[0]) as (target, proxy):
        proxy.service_s = 0.1
        document = report(
            tmp_path, "prefill", target, TEXT, "--length", 20, "--rate", 100, "--duration", 1, "--threads", 4,
            "--slo", "p50<60s", status=1,
        )  # fmt: skip
        answered = proxy.counts["requests"]
    series = document["points"][0]["series"]["prompt"]
    assert series["jobs"] == answered
    assert series["jobs"] + series["unfinished"] == arrivals(100, 1)
    assert series["unfinished"] > 0
    assert "were given up" in " ".join(document["warnings"])


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_full_disk_is_a_sentence_behind_the_summary(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    capsys.readouterr()
    load("prefill", server.targets[0], TEXT, "--length", 20, "--count", 2, option, "/dev/full", status=1)
    captured = capsys.readouterr()
    assert "2 prompts in" in captured.out
    assert captured.err == "engram-load prefill: No space left on device\n"


def test_a_report_that_cannot_be_written_leaves_the_one_that_was_there(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "report.json"
    file.write_text("precious")
    monkeypatch.setattr(Path, "replace", full)
    load("prefill", server.targets[0], TEXT, "--length", 20, "--count", 2, "--json", file, status=1)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert file.read_text() == "precious"


def test_a_reader_of_the_summary_that_went_away_does_not_cost_the_report(
    server: ServerProcess, tmp_path: Path
) -> None:
    arguments = ["prefill", server.targets[0], TEXT, "--length", 20, "--count", 2]
    with running(tmp_path, *arguments) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(60)
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert json.loads((tmp_path / "report.json").read_text())["points"]


def test_a_label_of_odd_bytes_is_written(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    load(
        "prefill",
        server.targets[0],
        TEXT,
        "--length",
        20,
        "--count",
        2,
        "--label",
        "a\udcffb $x$ ü",
        "--html",
        file,
    )
    assert "<h1>a?b $x$ ü</h1>" in file.read_text(encoding="utf-8")


def test_damaged_reports_do_not_compare(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole.json"
    load("prefill", server.targets[0], TEXT, "--length", 20, "--count", 2, "--json", whole)
    bad = tmp_path / "bad.json"
    for spoil in ("load", "points", "target"):
        document = json.loads(whole.read_text())
        document[spoil] = {} if spoil != "points" else []
        bad.write_text(json.dumps(document))
        assert "bad.json is damaged: a report has what is not there" in refused(capsys, "compare", whole, bad)
    bad.write_text(json.dumps(json.loads(whole.read_text()) | {"schema": "engram-load/2"}))
    assert "its schema is 'engram-load/2', expected 'engram-load/1'" in refused(capsys, "compare", whole, bad)


def test_a_sweep_and_a_single_run_do_not_compare(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    base = ["prefill", server.targets[0], TEXT, "--length", 20, "--count", 2, "--json"]
    load(*base, files[0])
    load(*base, files[1], "--sweep", "concurrency=1,2")
    capsys.readouterr()
    load("compare", *files)
    assert "one is no sweep, the other a sweep of concurrency" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rate", "1e9"], "--rate is 1e+09: give a number above 0, 10,000 at most"),
        (["--rate", "nan"], "--rate is nan: give a number above 0"),
        (["--rate", "-1"], "--rate is -1: give a number above 0"),
        (["--rate", "0.001", "--duration", "0.1"], "nothing was measured: give a longer --duration"),
        (["--duration", "0"], "--duration is 0: give a number above 0"),
        (["--duration", "inf"], "--duration is inf: give a number above 0, 1,000,000,000 at most"),
        (["--timeout", "0"], "--timeout is 0: give a number above 0"),
        (["--timeout", "nan"], "--timeout is nan: give a number above 0"),
        (["--concurrency", "5000"], "--concurrency is 5000: give a number above 0, 4,096 at most"),
        (["--threads", "5000", "--rate", "1"], "--threads is 5000: give a number above 0, 4,096 at most"),
        (["--warmup", "-1"], "--warmup is -1: give a number from 0"),
        (["--sweep", "rate=1,20000"], "a rate of 10,000 is the most that one process tries"),
        (["--sweep", "concurrency=1..9999", "--slo", "p99<1s"], "a concurrency of 4,096 is the most"),
        (["--sweep", "length=1,2000000"], "--length 2000000 is not a prompt length"),
        (["--sweep", "cache=1MiB,2MiB"], "is a server, whose cache was made when it started"),
        (["--cache-bytes", "1GiB"], "is a server, which has its own"),
        (["--io-depth", "4"], "is a server, which has its own"),
        (["--slo", "step:p99<1s"], "there are no latencies of 'step' here, but of prompt, chunk"),
        (["--slo", "p99<1e3ms"], "is no objective"),
        (["--slo", "p99<5 minutes"], "is no objective"),
        (["--forward", "1=2ms"], "names layers 1, but tables are of 1 and 14"),
        (["--json", "."], "cannot write .: it is a folder"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_sent(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        assert sentence in refused(capsys, "prefill", target, TEXT, *arguments)
        assert proxy.requests == []


@pytest.mark.parametrize(
    "option", ["--tls", "--tls-ca=f", "--tls-cert=f", "--tls-key=f", "--token-file=f", "--token-plaintext"]
)
def test_what_a_server_wants_is_not_for_tables_that_are_read_here(
    fp4_checkpoint: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    said = refused(capsys, "uniform", fp4_checkpoint, option)
    assert (
        f"{option.partition('=')[0]} is for a server over TCP; {fp4_checkpoint} is read in this process"
        in said
    )


def test_text_that_is_none_is_refused(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = server.targets[0]
    (tmp_path / "binary.txt").write_bytes(b"text\0text" * 100)
    assert "binary.txt is no text: it has zero bytes" in refused(
        capsys, "prefill", target, tmp_path / "binary.txt"
    )
    (tmp_path / "tiny.txt").write_text("hi")
    sentence = refused(capsys, "decode", target, tmp_path / "tiny.txt", "--drafts", 3)
    assert "too few to decode with 3 drafts" in sentence
    assert "--length 5,10 is not what uniform takes" in refused(capsys, "uniform", target, "--length", "5,10")


def test_few_jobs_have_no_p99(server: ServerProcess, tmp_path: Path) -> None:
    arguments = ["decode", server.targets[0], TEXT, "--batch", 1, "--slo", "p99<60s", "--count"]
    assert (
        "p99 of 99 steps is the longest of them: measure 100 or more"
        in report(tmp_path, *arguments, 99)["warnings"]
    )
    assert report(tmp_path, *arguments, 100)["warnings"] == []


def test_uniform_says_when_it_has_no_rows_left(server: ServerProcess, tmp_path: Path) -> None:
    document = report(tmp_path, "uniform", server.targets[0], "--length", 1_000, "--count", 3)
    assert "used up and begun again 1 time(s)" in " ".join(document["warnings"])


# ------------------------------------------------------------------------------------------------- sweeps


def test_points_of_a_sweep_do_not_repeat_one_another(server: ServerProcess, tmp_path: Path) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        for arguments in (
            ["decode", target, TEXT, "--batch", 2],
            ["zipf", target, "--length", 5],
            ["uniform", target, "--length", 5],
        ):
            proxy.requests.clear()
            report(tmp_path, *arguments, "--sweep", "concurrency=1,2", "--count", 10)
            keys = [request.SerializeToString() for request in proxy.requests]
            assert len(keys) == 20
            assert len(set(keys)) == 20, arguments[0]


def test_a_cache_is_swept_by_opening_the_tables_anew(fp4_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--length", 300, "--count", 2, "--sweep", "cache=0,64MiB", "--slo", "p50<60s"]
    document = report(tmp_path, "prefill", fp4_checkpoint, TEXT, *arguments, "--html", tmp_path / "x.html")
    sizes = [point["cache"]["before"]["capacity_bytes"] for point in document["points"]]
    assert sizes[0] == 0
    assert 48 << 20 < sizes[1] <= 64 << 20
    assert [point["counts"]["cached"] > 0 for point in document["points"]] == [False, True]
    one, other = (point["counts"] for point in document["points"])
    assert (one["rows"], one["distinct"]) == (other["rows"], other["distinct"]), "the same text"
    assert (document["sweep"]["lowest"], document["sweep"]["highest"]) == (0, None)
    assert "cache 64 MiB" in (tmp_path / "x.html").read_text()


# ----------------------------------------------------------------------------------------------- forwards


@pytest.mark.parametrize("pattern", ["prefill", "decode"])
def test_a_forward_says_how_long_each_layer_stood_still(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    with proxied(server.targets[0]) as (target, proxy):
        proxy.service_s = 0.05  # one lookup at a time: the second layer's comes after the first one's
        arguments = [target, TEXT, "--forward", "1=1ms,14=20ms", "--count", 3]
        arguments += ["--length", 20] if pattern == "prefill" else ["--batch", 2]
        document = report(tmp_path, pattern, *arguments, "--html", tmp_path / "x.html")
        asked = [list(request.layers) for request in proxy.requests]
    (series,) = document["points"][0]["series"].values()
    assert sorted(asked) == [[1]] * 3 + [[14]] * 3
    assert {layer: found["count"] for layer, found in series["stalls"].items()} == {"1": 3, "14": 3}
    forwards = next(iter(series["latencies"].values()))
    assert forwards["mean_ms"] >= 2 * 50
    assert 0 < sum(found["mean_ms"] for found in series["stalls"].values()) < forwards["mean_ms"]
    assert series["counts"]["requests"] == 6
    assert series["counts"]["tokens"] * 48 == series["counts"]["rows"]
    out = capsys.readouterr().out
    assert "layer 1 stood still ms: p50" in out
    assert "layer 14 stood still" in (tmp_path / "x.html").read_text()
