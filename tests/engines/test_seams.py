"""The engines as the plugins know them: a newer wheel that moved something fails here, by name."""

import pytest
import sglang_seams
import vllm_seams
from seams import Seam
from vllm_seams import ENGRAM


@pytest.mark.parametrize(
    "seam", [*vllm_seams.SEAMS, *sglang_seams.SEAMS], ids=lambda seam: f"{seam.module}.{seam.name}"
)
def test_an_engine_is_as_its_plugin_knows_it(seam: Seam) -> None:
    moved = seam.moved()
    assert not moved, moved


@pytest.mark.parametrize(
    ("seam", "sentence"),
    [
        (Seam(ENGRAM, "Engram.nowhere", why="x"), "Engram.nowhere is gone"),
        (Seam("vllm.nowhere", "Engram", why="x"), "vllm.nowhere.Engram is gone"),
        (Seam(ENGRAM, "Engram.embed", "self tokens", why="x"), "takes (self hash_ids), not (self tokens)"),
        (
            Seam(ENGRAM, "Engram._finish_prefetch", why="x"),
            "decorated with eager_break_during_capture, not nothing",
        ),
        (Seam(ENGRAM, "Engram.embed", uses=("self.rows",), why="x"), "no longer has `self.rows`"),
    ],
)
def test_what_moved_is_named(seam: Seam, sentence: str) -> None:
    assert sentence in seam.moved()
