"""The worked example, as a reader would run it, and that its claim means something."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "torch_backbone.py"


def test_resident_and_remote_tables_give_the_same_logits() -> None:
    ran = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    logits = re.search(r"([\d,]+) logits, tables resident against tables remote: 0 differ", ran.stdout)
    assert logits is not None
    assert int(logits[1].replace(",", "")) == 17 * 129_280
    for layer in (1, 14):
        assert f'engram_client_wait_seconds_count{{layer="{layer}"}} 17.0' in ran.stdout


def test_one_wrong_row_of_either_layer_would_change_the_logits() -> None:
    example = _module()
    torch.manual_seed(1)
    backbone = example.Backbone().bfloat16()
    rows = {layer: (torch.randn(3, 24, 256) * 0.3).bfloat16() for layer in example.ENGRAM_LAYERS}

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            past: list[list[torch.Tensor]] = [[] for _ in range(example.LAYERS)]
            found: torch.Tensor = backbone([5, 6, 7], lambda layer: (rows[layer], None), past)
            return found

    right = logits()
    assert torch.equal(right, logits())
    for layer in rows:
        kept = rows[layer][1, 13].clone()
        rows[layer][1, 13] = rows[layer][1, 12]
        assert not torch.equal(right, logits())
        rows[layer][1, 13] = kept
    assert torch.equal(right, logits())


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("torch_backbone", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
