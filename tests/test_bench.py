"""Every benchmark runs and gives the results it is named for; how fast is no matter here."""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench.__main__ as runner
from bench import one_core, table
from bench.pairs import interleaved, median_ratio
from bench.result import Bar, Result
from bench.scale import Scale
from bench.tables import LAYER, open_memory, unique_blocks, unseen_rows
from engram_server.spec import EngramSpec

RESULTS = {
    "hash": {"hash_vs_numpy"},
    "dequant": {"dequant_vs_memcpy"},
    "cold": {"cold_vs_fio", "cold_cpu_vs_fio", "cold_inplace_vs_fio"},
    "rivals": {"memmap_rows", "madvise64_rows", "pread64_rows"},
    "warm": {"warm_packed_vs_torch", "warm_bf16_vs_torch"},
    "text": {"text_reads_vs_groups", "text_warm_vs_cold", "text_chunk_vs_plain_ring", "repeat_reads"},
    "lanes": {"decode_p95_beside_prefill", "prefill_share"},
    "shm": {
        "shm_decode_vs_floor",
        "shm_decode_p99_vs_p50",
        "shm_prefill_vs_embedded",
        "shm_vs_grpc_throughput",
        "grpc_decode_vs_echo",
    },
    "overload": {"overload_refusal_p99_ms", "overload_goodput", "overload_recovery_s", "overload_rss_mib"},
    "rss": {"rss_over_budget_mib"},
    "metrics": {"metrics_read_share", "metrics_lookup_share", "metrics_scrape_share"},
    "engine": {"engine_rss_growth_mib"},
    "load": {"load_over_server_ms"},
    "convert": {"convert_vs_copy"},
}

EXAMPLE = Result("example", "an example", 2.0, "rows/s", 4.0, "a rival", 0.5)


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Scale:
    """Small tables that all benchmarks of a run share."""
    return Scale(tmp_path_factory.mktemp("bench") / "data", vocab_size=4_000, quick=True)


@pytest.mark.parametrize("name", runner.BENCHMARKS)
def test_benchmark_gives_its_results(name: str, scale: Scale, capsys: pytest.CaptureFixture[str]) -> None:
    results = list(runner.measured(name, scale))
    assert {result.name for result in results} == RESULTS[name]
    printed = capsys.readouterr().out
    for result in results:
        assert np.isfinite([result.value, result.reference, result.ratio]).all(), result
        assert f"  {result.name} " in printed
        json.dumps(result.document(), allow_nan=False)


def test_all_benchmarks_are_known_here() -> None:
    assert set(RESULTS) == set(runner.BENCHMARKS)


# ------------------------------------------------------------------------------------------- the runner


def test_whole_run_is_written_and_partial_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "results" / "latest.json"
    monkeypatch.setattr(runner, "RESULTS", written)
    monkeypatch.delenv("ENGRAM_BENCH_QUICK", raising=False)

    def measured(name: str, scale: Scale) -> Any:
        if name == "warm":
            raise RuntimeError("no torch")
        yield replace(EXAMPLE, name=f"{name}_result")

    monkeypatch.setattr(runner, "measured", measured)
    assert runner.main(["hash", "cold"]) == 0
    assert not written.exists()
    assert runner.main([]) == 1
    document = json.loads(written.read_text())
    assert document["failed"] == {"warm": "RuntimeError: no torch"}
    assert [one["name"] for one in document["results"]] == [
        f"{name}_result" for name in runner.BENCHMARKS if name != "warm"
    ]
    assert "warm failed: RuntimeError: no torch" in capsys.readouterr().err


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["colt"])
    assert "there is no benchmark 'colt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bar", "met"),
    [
        (None, None),
        (Bar(">=", 0.5), True),
        (Bar(">=", 0.51), False),
        (Bar("<=", 0.5), True),
        (Bar("<=", 0.49), False),
        (Bar("<=", 2, of="value"), True),
        (Bar(">=", 2.1, of="value"), False),
    ],
)
def test_bar_is_met_by_the_figure_it_is_set_for(bar: Bar | None, met: bool | None) -> None:
    assert replace(EXAMPLE, bar=bar).met is met


def test_rounds_are_interleaved_and_compared_pair_by_pair() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str) -> Callable[[int], float]:
        def call(number: int) -> float:
            calls.append((name, number))
            return float(number + 1)

        return call

    outcomes = interleaved("", 3, {"a": side("a"), "b": side("b")})
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert outcomes == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert median_ratio([1, 4, 9], [1, 2, 3]) == 2


# ---------------------------------------------------------------------------------------------- its parts


def test_walk_repeats_no_row_and_keeps_to_its_columns(fp4_checkpoint: Path) -> None:
    spec = EngramSpec.from_file(fp4_checkpoint)
    shortest = min(min(primes) for primes in spec.primes)
    ids = np.concatenate([unique_blocks(spec, 0, 1_000), unique_blocks(spec, 1_000, shortest - 1_000)])
    local = ids - np.asarray(spec.offsets)
    assert (local >= 0).all()
    assert (local < np.asarray(spec.primes)).all()
    for layer in range(ids.shape[1]):
        assert len(np.unique(ids[:, layer])) == ids[:, layer].size
    with pytest.raises(ValueError, match="ENGRAM_BENCH_VOCAB_SIZE"):
        unique_blocks(spec, 1, shortest)


def test_cold_rows_are_distinct_and_none_was_read_for_the_digest(fp4_checkpoint: Path) -> None:
    with open_memory(fp4_checkpoint) as memory:
        ids = unseen_rows(memory, 2, 20_000)
        rows = memory.tables[LAYER].rows
    assert ids.shape == (2, 20_000)
    assert len(np.unique(ids)) == ids.size
    assert ids.min() >= 0
    assert ids.max() < rows
    assert not set(ids.reshape(-1).tolist()) & ({i * rows // 4096 for i in range(4096)} | {rows - 1})


def test_one_core_pins_every_thread_and_lets_go() -> None:
    before = os.sched_getaffinity(0)
    go, seen = threading.Event(), []

    def work() -> None:
        go.wait()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    with one_core():
        assert len(os.sched_getaffinity(0)) == 1
        go.set()
        thread.join()
    assert seen == [{max(before)}]
    assert os.sched_getaffinity(0) == before


def test_table_goes_between_the_marks_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "latest.json"
    monkeypatch.setattr(table, "README", readme)
    monkeypatch.setattr(table, "RESULTS", results)
    assert table.main() == 1
    missed = replace(EXAMPLE, value=93_123.0, reference=1_234_567.0, bar=Bar(">=", 0.95))
    results.write_text(json.dumps({"results": [EXAMPLE.document(), missed.document()]}))
    readme.write_text("above\n<!-- figures:begin: of a run -->\nold\n<!-- figures:end -->\nbelow\n")
    assert table.main() == 0
    text = readme.read_text()
    assert text.startswith("above\n<!-- figures:begin: of a run -->\n\n| what ")
    assert text.endswith("\n<!-- figures:end -->\nbelow\n")
    assert "old" not in text
    assert "a rival: 1.23 M rows/s" in text
    assert ">= 0.95, missed |" in text
    assert "93,100 rows/s" in text
    readme.write_text("no marks\n")
    assert table.main() == 1
