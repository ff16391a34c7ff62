"""The Engram layer against its formula in float64, and its weights against a checkpoint's bytes."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracles import dequant
from oracles.engram_layer import engram_layer
from oracles.files import safetensors_bytes

from engram_client.torch import EngramLayer
from engram_server.tables.errors import TableError

TOKENS, STREAMS, HIDDEN, COLUMNS = 5, 4, 64, 24
EPS = 1e-20


def made(
    seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[EngramLayer, torch.Tensor, torch.Tensor]:
    """A layer with random weights, a residual and rows."""
    torch.manual_seed(seed)
    layer = EngramLayer(HIDDEN, STREAMS, COLUMNS, dtype=dtype).requires_grad_(False)
    layer.wkv.weight.normal_(std=0.02)
    layer.q_weight.normal_(1.0, 0.1)
    layer.k_weight.normal_(1.0, 0.1)
    hidden = torch.randn(TOKENS, STREAMS, HIDDEN).bfloat16()
    rows = (torch.randn(TOKENS, COLUMNS, 256) * 0.3).bfloat16()
    return layer, hidden, rows


def expected(
    layer: EngramLayer, hidden: torch.Tensor, rows: torch.Tensor, mask: NDArray[np.bool_]
) -> NDArray[np.float64]:
    tensors = (hidden, rows, layer.wkv.weight, layer.q_weight, layer.k_weight)
    return engram_layer(*(tensor.double().numpy() for tensor in tensors), mask, EPS)


@pytest.mark.parametrize("seed", range(3))
def test_the_formula_in_float32_with_one_cast(seed: int) -> None:
    layer, hidden, rows = made(seed)
    mask = np.zeros(TOKENS, dtype=np.bool_)
    mask[2] = True
    exact = expected(layer, hidden.float(), rows, mask)
    wide = layer(hidden.float(), rows, torch.from_numpy(mask))
    np.testing.assert_allclose(wide.numpy(), exact, rtol=2e-5, atol=2e-6)
    # One cast: the nearest bf16 of what float32 gave, no second rounding on the way.
    narrow = layer(hidden, rows, torch.from_numpy(mask))
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, wide.bfloat16())
    assert torch.equal(narrow[2], hidden[2])


def test_no_mask_means_no_images() -> None:
    layer, hidden, rows = made()
    assert torch.equal(layer(hidden, rows), layer(hidden, rows, torch.zeros(TOKENS, dtype=torch.bool)))


def test_every_stream_has_its_own_gate_and_all_share_the_value() -> None:
    layer, hidden, rows = made()
    added = layer(hidden.float(), rows) - hidden.float()
    flat = rows.flatten(1).double()
    value = flat @ layer.wkv.weight[STREAMS * HIDDEN :].double().T
    gates = (added.double() / value[:, None]).median(-1).values
    np.testing.assert_allclose(added, gates[..., None] * value[:, None], atol=1e-5)
    assert len(np.unique(gates.numpy().round(6))) == TOKENS * STREAMS


def test_zero_rows_and_a_zero_residual_stay_finite() -> None:
    """eps is 1e-20: a key of zeros has a norm of 1e10 times its zeros."""
    layer, hidden, rows = made()
    nothing = torch.zeros_like(rows)
    assert torch.equal(layer(hidden, nothing), hidden)
    silent = layer(torch.zeros_like(hidden), rows)
    assert silent.isfinite().all()
    flat = rows.flatten(1).float()
    half = torch.sigmoid(torch.tensor(1e-3))  # sqrt of the smallest |dot|
    value = flat @ layer.wkv.weight[STREAMS * HIDDEN :].float().T
    np.testing.assert_allclose(silent[:, 0].float(), half * value, rtol=1e-2, atol=1e-6)


def test_autocast_changes_nothing() -> None:
    layer, hidden, rows = made()
    expected = layer(hidden.float(), rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(hidden.float(), rows), expected)
        assert torch.equal(layer(hidden, rows), layer(hidden.float(), rows).bfloat16())


def test_copies_compiled_and_restored_layers_compute_the_same() -> None:
    layer, hidden, rows = made()
    expected = layer(hidden, rows)
    restored = EngramLayer(HIDDEN, STREAMS, COLUMNS)
    restored.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for other in (restored, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), compiled):
        assert torch.equal(other(hidden, rows), expected)
    with torch.inference_mode():
        assert torch.equal(layer(hidden, rows), expected)


def test_gradients_are_those_of_the_formula() -> None:
    """Against central differences of the oracle in float64."""
    layer, hidden, rows = made(dtype=torch.float32)
    wide = hidden.float().requires_grad_()
    layer(wide, rows).square().sum().backward()
    assert wide.grad is not None
    none = np.zeros(TOKENS, dtype=np.bool_)
    for at in ((0, 0, 3), (2, 1, 50), (4, 3, 63)):
        ends = []
        for step in (1e-4, -1e-4):
            moved = hidden.double()
            moved[at] += step
            ends.append(np.square(expected(layer, moved, rows, none)).sum())
        assert wide.grad[at].item() == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-3, abs=1e-4)


def test_tensors_that_do_not_fit_are_refused_and_none_is_broadcast() -> None:
    layer, hidden, rows = made()
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    wrong: list[tuple[tuple[torch.Tensor, ...], str]] = [
        (
            (hidden, rows[:1]),
            r"rows is torch.bfloat16 of shape \[1, 24, 256\] on cpu; expected floating point \[5, 24",
        ),
        ((hidden, rows.view(torch.int16)), "rows is torch.int16"),  # bits of bf16, as NumPy has them
        ((hidden, rows.flatten(1)), "rows is"),
        ((hidden, rows[:, :12]), "rows is"),
        ((hidden, rows.to("meta")), "rows is .* on meta; expected .* on cpu"),
        ((hidden[:1], rows), r"rows is .* expected floating point \[1, 24, 256\]"),
        ((hidden[:, 0], rows), "hidden is"),
        ((hidden[:, :1], rows), "hidden is"),
        ((hidden[None], rows), "hidden is"),
        ((hidden.int(), rows), "hidden is torch.int32"),
        ((hidden, rows, mask[:1]), "mask is"),
        ((hidden, rows, mask[:, None]), "mask is"),
        ((hidden, rows, mask.int()), "mask is torch.int32 .* expected bool"),
    ]
    for tensors, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            layer(*tensors)
    assert layer(hidden[:0], rows[:0], mask[:0]).shape == (0, STREAMS, HIDDEN)


def test_the_released_shape() -> None:
    with torch.device("meta"):
        layer = EngramLayer()
        out = layer(
            torch.empty(3, 4, 5120, dtype=torch.bfloat16), torch.empty(3, 24, 256, dtype=torch.bfloat16)
        )
    assert {name: list(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "q_weight": [4, 5120],
        "k_weight": [4, 5120],
        "wkv.weight": [25600, 6144],
    }
    assert out.shape == (3, 4, 5120)


# ------------------------------------------------------------------------------------------------ checkpoints


class Parts:
    """The small Engram tensors of layer 1 as plain bytes; change them, then `write` a checkpoint."""

    def __init__(self, wkv: str, hidden: int = HIDDEN, streams: int = 2) -> None:
        rng = np.random.default_rng(11)
        outputs, inputs = (streams + 1) * hidden, COLUMNS * 256
        self.config: dict[str, Any] = {"text_config": {"rms_norm_eps": 1e-9}}
        self.codes = rng.integers(0, 0x7E, (outputs, inputs), dtype=np.uint8)
        self.codes |= rng.integers(0, 2, self.codes.shape, dtype=np.uint8) << 7
        self.scales = rng.integers(100, 140, (outputs // 32, inputs // 32), dtype=np.uint8)
        self.q, self.k = (
            rng.normal(1, 0.1, (streams, hidden)).astype("<f4").view("<u4") >> 16 for _ in range(2)
        )
        weight = self.codes if wkv == "F8_E4M3" else self.values().astype("<u2")
        self.tensors: dict[str, tuple[str, NDArray[Any]]] = {
            "wkv.weight": (wkv, weight),
            "q_weight": ("BF16", self.q.astype("<u2")),
            "k_weight": ("BF16", self.k.astype("<u2")),
        }
        if wkv == "F8_E4M3":
            self.tensors["wkv.scale"] = ("F8_E8M0", self.scales)

    def values(self) -> NDArray[np.uint16]:
        """Bits of wkv in bf16."""
        scales = self.scales.repeat(32, axis=0).repeat(32, axis=1)
        return dequant.bit_table("fp8", "bf16")[scales, self.codes].astype(np.uint16)

    def write(self, root: Path) -> Path:
        (root / "config.json").write_text(json.dumps(self.config))
        header, data = {}, b"\0" * 3  # no alignment is promised
        for name, (dtype, array) in self.tensors.items():
            begin, end = len(data), len(data) + array.nbytes
            header[f"layers.1.engram.{name}"] = {
                "dtype": dtype,
                "shape": list(array.shape),
                "data_offsets": [begin, end],
            }
            data += array.tobytes()
        (root / "model.safetensors").write_bytes(safetensors_bytes(header, data))
        return root


@pytest.mark.parametrize("wkv", ["F8_E4M3", "BF16"])
def test_weights_are_those_of_the_checkpoint(tmp_path: Path, wkv: str) -> None:
    parts = Parts(wkv)
    layer = EngramLayer.from_checkpoint(parts.write(tmp_path), 1)
    assert (layer.hidden, layer.streams, layer.eps) == (HIDDEN, 2, 1e-9)
    for tensor, bits in (
        (layer.wkv.weight, parts.values()),
        (layer.q_weight, parts.q),
        (layer.k_weight, parts.k),
    ):
        assert tensor.dtype == torch.bfloat16
        assert not tensor.requires_grad
        np.testing.assert_array_equal(tensor.view(torch.int16).numpy().view(np.uint16), bits)


def test_a_synthetic_checkpoint_has_the_released_shapes(fp4_checkpoint: Path) -> None:
    layer = EngramLayer.from_checkpoint(fp4_checkpoint, 14)
    assert layer.wkv.weight.shape == (25600, 6144)
    assert (layer.hidden, layer.streams, layer.eps) == (5120, 4, 1e-20)
    hidden, rows = torch.randn(2, 4, 5120).bfloat16(), torch.randn(2, 24, 256).bfloat16()
    assert torch.equal(layer(hidden, rows), hidden)  # its wkv is zeros


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"text_config": {"rms_norm_eps": "1e-20"}},
            r"config\.json: rms_norm_eps is '1e-20'; expected a number above 0",
        ),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),  # zeros would become NaN
        ({"text_config": None}, r"config\.json has no object of the model's settings"),
        ([], "no object"),
    ],
)
def test_a_config_without_a_sensible_eps_is_refused(tmp_path: Path, config: Any, sentence: str) -> None:
    parts = Parts("BF16")
    parts.config = config
    with pytest.raises(TableError, match=sentence):
        EngramLayer.from_checkpoint(parts.write(tmp_path), 1)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TableError, match=r"config\.json is no JSON"):
        EngramLayer.from_checkpoint(tmp_path, 1)


def test_a_checkpoint_without_the_layer_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    parts = Parts("F8_E4M3")
    with pytest.raises(TableError, match=r"lists no 'layers\.14\.engram\.q_weight'"):
        EngramLayer.from_checkpoint(parts.write(tmp_path), 14)
    parts.tensors["wkv.scale"] = ("F8_E8M0", parts.scales[1:])
    with pytest.raises(TableError, match="expected one for each block of 32 x 32"):
        EngramLayer.from_checkpoint(parts.write(tmp_path), 1)
    del parts.tensors["wkv.scale"]
    with pytest.raises(TableError, match=r"lists no 'layers\.1\.engram\.wkv\.scale'"):
        EngramLayer.from_checkpoint(parts.write(tmp_path), 1)
    parts = Parts("BF16")
    parts.tensors["k_weight"] = ("BF16", parts.tensors["k_weight"][1][:1])
    with pytest.raises(TableError, match=r"expected \[\(streams \+ 1\) \* hidden, columns \* 256\]"):
        EngramLayer.from_checkpoint(parts.write(tmp_path), 1)
    parts.tensors["q_weight"] = ("U8", np.zeros((2, 64), dtype=np.uint8))
    with pytest.raises(TableError, match=r"is U8\[2, 64\]; expected BF16"):
        EngramLayer.from_checkpoint(parts.write(tmp_path), 1)
