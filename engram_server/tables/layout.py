"""What a DeepSeek-V4.1 checkpoint calls its Engram tensors, and how it lays rows out.

A table is two tensors: `embed.weight` holds the codes of a row, `embed.scale` one E8M0 scale byte per block
of 32 values. Their dtype and width say which format a table has. Names carry no `model.` prefix.
"""

import re
from typing import Literal

TableFormat = Literal["fp4", "fp8"]

ROW_VALUES = 256
BLOCK_VALUES = 32
SCALE_DTYPE = "F8_E8M0"
SCALES_PER_ROW = ROW_VALUES // BLOCK_VALUES

CODES: dict[TableFormat, tuple[str, int]] = {"fp4": ("U8", ROW_VALUES // 2), "fp8": ("F8_E4M3", ROW_VALUES)}
"""safetensors dtype and bytes per row of `embed.weight`. FP4 is two E2M1 nibbles a byte, low nibble first."""

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

ENGRAM_TENSOR = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\.engram\.(.+)")
"""Any Engram tensor: layer id and the name inside the layer."""

BACKBONE_PARTS = ("wkv.weight", "wkv.scale", "q_weight", "k_weight")
"""The small Engram tensors: the backbone multiplies rows by them. Never read here."""


def weight_name(layer: int) -> str:
    """Tensor of a layer's codes."""
    return f"layers.{layer}.engram.embed.weight"


def scale_name(layer: int) -> str:
    """Tensor of a layer's scale bytes."""
    return f"layers.{layer}.engram.embed.scale"
