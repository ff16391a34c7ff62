"""A small random backbone with Engram at layers 1 and 14, run twice: tables in its memory, and at a server.

    python examples/torch_backbone.py

A prompt is prefilled and continued greedily. With tables resident, rows come from `nn.Embedding`; with tables remote,
from an engram-server process (through shared memory, as on any one host), asked for when a step's tokens are known and
waited for at the layer that needs them. The logits are equal bit for bit, and the histogram says how long the forward
waited.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from engram_client import EngramClient, EngramMemory
from engram_client.torch import EngramLayer, LayerRows, RowPrefetcher
from engram_server.spec import EngramSpec
from engram_server.tables.synth import synthesise
from engram_server.tokens import encode, load_token_map, ngram_hash

ENGRAM_LAYERS = (1, 14)
LAYERS = 16
HIDDEN, STREAMS, HEADS = 64, 4, 4
TOKENS = 129_280
PROMPT = (
    "Engram looks up rows of a table by the last few tokens, and the table may well be somewhere else. " * 4
)
NEW_TOKENS = 16
LOOK_BACK = 3

Rows = Callable[[int], LayerRows]
"""Rows of a layer, for the tokens of one step."""


class Attention(nn.Module):
    """Causal attention and an MLP, on the mean of the hyper-connection streams."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 128), nn.SiLU(), nn.Linear(128, HIDDEN)
        )

    def forward(self, hidden: Tensor, past: list[Tensor]) -> Tensor:
        """hidden [T, STREAMS, HIDDEN]; past: keys and values so far, [2, HEADS, past T, d], which grow."""
        new = self.qkv(self.norm(hidden.mean(1))).view(len(hidden), 3, HEADS, -1).permute(1, 2, 0, 3)
        known = torch.cat([*past, new[1:]], dim=2)
        past[:] = [known]
        seen = torch.ones(len(hidden), known.shape[2], dtype=torch.bool).tril(known.shape[2] - len(hidden))
        mixed = functional.scaled_dot_product_attention(new[0], known[0], known[1], attn_mask=seen)
        hidden = hidden + self.out(mixed.transpose(0, 1).flatten(1))[:, None]
        return hidden + self.mlp(hidden.mean(1))[:, None]


class Backbone(nn.Module):
    """What an engine has in memory: all but the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, HIDDEN)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.engram = nn.ModuleDict({str(layer): EngramLayer(HIDDEN, STREAMS) for layer in ENGRAM_LAYERS})
        self.head = nn.Linear(HIDDEN, TOKENS, bias=False)

    def forward(self, tokens: Sequence[int], rows: Rows, past: list[list[Tensor]]) -> Tensor:
        """Logits [TOKENS] of the last of one step's tokens."""
        hidden = self.embed(torch.tensor(tokens))[:, None].expand(-1, STREAMS, -1).bfloat16()
        for layer, attention in enumerate(self.attention):
            if layer in ENGRAM_LAYERS:
                hidden = self.engram[str(layer)](hidden, *rows(layer))
            hidden = attention(hidden, past[layer])
        logits: Tensor = self.head(hidden[-1].mean(0))
        return logits


def generate(
    backbone: Backbone, prompt: list[int], rows_of: Callable[[list[int], list[int]], Rows]
) -> Tensor:
    """Logits [1 + NEW_TOKENS, TOKENS] of a prefill and greedy steps; rows_of: a step's tokens and look-back -> rows."""
    past: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    sequence, step = list(prompt), list(prompt)
    logits = []
    while True:
        before = sequence[: -len(step)]
        logits.append(backbone(step, rows_of(step, before[-LOOK_BACK:]), past))
        if len(logits) > NEW_TOKENS:
            return torch.stack(logits)
        step = [int(logits[-1].argmax())]
        sequence += step


def resident(checkpoint: Path) -> Callable[[list[int], list[int]], Rows]:
    """Rows the way engines hold them now: whole tables in memory, row ids from the hash."""
    tables = {}
    with EngramMemory.open(checkpoint) as memory:
        for layer, facts in memory.describe().tables.items():
            rows = memory.lookup_rows(layer, np.arange(facts.rows)).torch()
            tables[layer] = nn.Embedding.from_pretrained(rows)
    spec = EngramSpec.from_file(checkpoint)
    hasher = ngram_hash(spec, load_token_map(checkpoint / "tokenizer.json", spec))

    def rows_of(tokens: list[int], look_back: list[int]) -> Rows:
        new, old = np.array(tokens, dtype=np.int32), np.array(look_back, dtype=np.int32)
        ids, mask = hasher.rows(new, np.array([len(new)]), old, np.array([len(old)]))
        by_layer = dict(zip(spec.layers, torch.from_numpy(ids).unbind(1), strict=True))
        return lambda layer: LayerRows(tables[layer](by_layer[layer]), torch.from_numpy(mask))

    return rows_of


def remote(prefetcher: RowPrefetcher) -> Callable[[list[int], list[int]], Rows]:
    """Rows from a client: both layers are asked for before the step's first layer runs."""
    return lambda tokens, look_back: prefetcher.prefetch(tokens, history=look_back).wait


@contextmanager
def server(checkpoint: Path) -> Iterator[str]:
    """An engram-server process on a free port; its address."""
    command = [sys.executable, "-m", "engram_server.cli", "serve", str(checkpoint), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r" on (127\.0\.0\.1:\d+)", line)
        if found is None:
            raise SystemExit(f"the server did not start; try `{' '.join(command)}`")
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    """Run both; 0 when every logit is equal."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        checkpoint = synthesise(Path(folder) / "tables", engram_vocab_size=2000).path
        prompt = encode(checkpoint / "tokenizer.json", PROMPT)
        backbone = Backbone().bfloat16()
        print(
            f"prompt of {len(prompt)} tokens, then {NEW_TOKENS} steps; Engram at layers {ENGRAM_LAYERS} of {LAYERS}"
        )
        here = generate(backbone, prompt, resident(checkpoint))
        with (
            server(checkpoint) as target,
            EngramClient(target) as client,
            RowPrefetcher(client) as prefetcher,
        ):
            there = generate(backbone, prompt, remote(prefetcher))
            waits = prefetcher.waits.exposition().decode()
    differing = int((here.view(torch.int16) != there.view(torch.int16)).sum())
    print(f"tokens: {here.argmax(1).tolist()}")
    print(f"{here.numel():,} logits, tables resident against tables remote: {differing} differ")
    print("\nhow long the forward waited, by layer:\n" + waits)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
