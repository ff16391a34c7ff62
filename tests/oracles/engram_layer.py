"""The Engram layer by its formula, in float64, one token and one stream at a time. Shares nothing with the product."""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def engram_layer(
    hidden: Array,
    rows: Array,
    wkv: Array,
    q_weight: Array,
    k_weight: Array,
    mask: NDArray[np.bool_],
    eps: float,
) -> Array:
    """hidden [T, S, H], rows [T, C, 256], wkv [(S + 1) * H, C * 256], weights [S, H], mask [T] -> [T, S, H]."""
    tokens, streams, width = hidden.shape
    out = np.empty_like(hidden)
    for token in range(tokens):
        projected = wkv @ rows[token].reshape(-1)
        value = projected[streams * width :]
        for stream in range(streams):
            h, key = hidden[token, stream], projected[stream * width : (stream + 1) * width]
            dot = 0.0
            for d in range(width):
                dot += h[d] * q_weight[stream, d] * k_weight[stream, d] * key[d]
            dot /= math.sqrt(np.mean(h**2) + eps)
            dot /= math.sqrt(np.mean(key**2) + eps)
            dot /= math.sqrt(width)
            signed = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
            gate = 0.0 if mask[token] else 1 / (1 + math.exp(-signed))
            out[token, stream] = h + gate * value
    return out
