"""Safetensors files and checkpoints written the plain way, so that tests can bend them.

Shares no code with the product.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, tuple[str, list[int]]]
"""Name -> dtype and shape."""

_BYTES = {"U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4}


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file from any header: an object to dump, or the header's bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_shard(path: Path, tensors: Tensors, seed: int = 0) -> None:
    """A file of these tensors back to back, filled with random bytes."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    data = np.random.default_rng(seed).integers(0, 256, end, dtype=np.uint8).tobytes()
    path.write_bytes(safetensors_bytes(header, data))


class CheckpointFiles:
    """A tiny checkpoint of layers 1 and 14 as plain data; change it, then `write` it."""

    SHARD_1 = "model-00047-of-00048.safetensors"
    SHARD_14 = "model-00048-of-00048.safetensors"

    def __init__(self, fmt: str = "fp4") -> None:
        dtype, width = {"fp4": ("U8", 128), "fp8": ("F8_E4M3", 256)}[fmt]
        # One column a layer, so the tables have as many rows as the first two primes from 11 on.
        self.config: dict[str, Any] = {
            "model_type": "deepseek_v41",
            "image_token_id": 129264,
            "quantization_config": {"quant_method": "fp8"},
            "text_config": {
                "engram_layer_ids": [1, 14],
                "engram_num_embeddings": [11, 13],
                "engram_max_ngram_size": 2,
                "engram_vocab_size": 11,
                "engram_n_heads": 1,
                "engram_head_dim": 256,
                "engram_pad_token_id": 2,
                "engram_compressed_vocab_size": 99092,
            },
        }
        self.shards: dict[str, Tensors] = {
            file: {
                f"layers.{layer}.engram.embed.weight": (dtype, [rows, width]),
                f"layers.{layer}.engram.embed.scale": ("F8_E8M0", [rows, 8]),
            }
            for file, layer, rows in ((self.SHARD_1, 1, 11), (self.SHARD_14, 14, 13))
        }
        self.index: dict[str, Any] | None = {
            "metadata": {},
            "weight_map": {name: file for file, tensors in self.shards.items() for name in tensors}
            | {"layers.0.attn.wq.weight": "model-00001-of-00048.safetensors"},
        }

    @property
    def hints(self) -> dict[str, Any]:
        hints: dict[str, Any] = self.config["quantization_config"]
        return hints

    def write(self, root: Path) -> Path:
        (root / "config.json").write_text(json.dumps(self.config))
        if self.index is not None:
            (root / "model.safetensors.index.json").write_text(json.dumps(self.index))
        for file, tensors in self.shards.items():
            write_shard(root / file, tensors)
        return root
