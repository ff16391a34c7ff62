"""What is published of the released model, and configs that carry it: from tests/data/engram_hash.json."""

import json
from pathlib import Path
from typing import Any

FACTS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "engram_hash.json").read_text())
"""Row ids of known n-grams with the layout they belong to; `history` there is class ids, newest first."""

LAYOUTS: dict[str, dict[str, Any]] = {"released": FACTS, "small": FACTS["small_layout"]}
ENGRAM_VOCAB_SIZE = {"released": 16_000_000, "small": 200_000}


def text_config(layout: str = "released") -> dict[str, Any]:
    """The Engram keys of a config.json, as the text part carries them."""
    return {
        "engram_layer_ids": list(FACTS["layers"]),
        "engram_num_embeddings": list(LAYOUTS[layout]["rows_per_layer"].values()),
        "engram_max_ngram_size": 4,
        "engram_vocab_size": ENGRAM_VOCAB_SIZE[layout],
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": FACTS["pad_token_id"],
        "engram_compressed_vocab_size": FACTS["compressed_vocab_size"],
    }


def nested_config(layout: str = "released") -> dict[str, Any]:
    """A config.json as released: model type and image id at the top, the rest in `text_config`."""
    return {
        "model_type": "deepseek_v41",
        "image_token_id": FACTS["image_token_id"],
        "text_config": {"model_type": "deepseek_v41_text", **text_config(layout)},
    }
