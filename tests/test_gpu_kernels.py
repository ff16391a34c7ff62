"""Rows converted on a device: the Triton kernel, interpreted on the CPU, and its twin in torch operators.

tests/gpu/ makes the same statements on a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import device_rows as rows
from support.device_rows import ConvertRowsTests

from engram_kernels.device import convert_rows

# NumPy, which the interpreter computes with, says so when it comes to infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

ROOT = Path(__file__).resolve().parents[1]


class TestOnTheCpu(ConvertRowsTests):
    device = "cpu"


def test_the_gpu_tests_refuse_without_a_gpu_in_a_sentence() -> None:
    """And what they need is importable: `make test-gpu` fails for want of a GPU and nothing else."""
    environment = {**os.environ, "ENGRAM_TEST_GPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    for command, sentence in (
        (["pytest", "-q", "tests/gpu"], "these tests need a GPU that torch can use, and there is none"),
        (["bench.gpu"], "finds no GPU here"),
    ):
        ran = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 1
        assert sentence in ran.stdout + ran.stderr
        assert "Traceback" not in ran.stdout + ran.stderr


def refused(
    packed: torch.Tensor, out: torch.Tensor, index: torch.Tensor | None = None, **options: object
) -> str:
    before = rows.as_bytes(out).copy()
    with pytest.raises(ValueError, match=r"\w") as error:
        convert_rows(packed, out, index=index, **options)  # type: ignore[arg-type]
    np.testing.assert_array_equal(rows.as_bytes(out), before)
    return str(error.value)


def test_tensors_that_do_not_fit_are_refused_in_a_sentence() -> None:
    packed, out = torch.zeros(4, 136, dtype=torch.uint8), torch.zeros(4, 256, dtype=torch.bfloat16)
    assert "packed is torch.uint8 of shape [4, 137]" in refused(torch.zeros(4, 137, dtype=torch.uint8), out)
    assert "expected uint8 [..., 136] or uint8 [..., 264]" in refused(packed.view(torch.int8), out)
    assert "packed is torch.uint8 of shape [136]" in refused(packed[0], out)
    assert "out is torch.float32" in refused(packed, out.float())
    assert "out is torch.uint8 of shape [4, 136]" in refused(packed, packed.clone())
    assert "only the first dimension may be longer" in refused(packed, out[:3])
    assert "index gives rows of shape [2, 2]" in refused(packed, out, torch.zeros(2, 2, dtype=torch.int64))
    grid = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
    assert "[2, 2], but out has room for [2, 3]" in refused(
        packed, grid, torch.zeros(2, 2, dtype=torch.int64)
    )
    assert "packed gives rows of shape [4]" in refused(packed, grid)
    assert "index is torch.int16" in refused(packed, out, torch.zeros(4, dtype=torch.int16))
    assert "packed is on cpu, out on meta" in _meta_refusal(packed, out)
    assert "scale_rule is 'ocp'" in refused(packed, out, scale_rule="ocp")
    assert "backend is 'cuda'" in refused(packed, out, backend="cuda")


def _meta_refusal(packed: torch.Tensor, out: torch.Tensor) -> str:
    with pytest.raises(ValueError) as error:
        convert_rows(packed, out.to("meta"))
    return str(error.value)


def test_last_dimensions_must_be_contiguous() -> None:
    packed, out = torch.zeros(4, 136, dtype=torch.uint8), torch.zeros(4, 256, dtype=torch.bfloat16)
    sparse = torch.zeros(4, 272, dtype=torch.uint8)[:, ::2]
    assert "the last dimension of packed has stride 2" in refused(sparse, out)
    assert "the last dimension of out has stride 4" in refused(packed, torch.zeros(256, 4).bfloat16().t())
    lying = torch.zeros(1, 256, dtype=torch.bfloat16).expand(4, 256)
    assert "rows lie on one another" in refused(packed, lying)


def test_triton_without_a_gpu_or_its_interpreter_is_a_sentence() -> None:
    code = (
        "import torch; from engram_kernels.device import convert_rows; "
        "convert_rows(torch.zeros(1, 136, dtype=torch.uint8), torch.zeros(1, 256).bfloat16(), backend='triton')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "RuntimeError: Triton does not run on cpu: take backend='torch'" in ran.stderr


COMPILE = """
import itertools, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engram_kernels.triton_dequant import ROWS, convert_rows_kernel as kernel

found = {}
every = list(itertools.product((False, True), repeat=3))
variants = {80: every[::4], 90: every, 100: every[::4]}  # every fourth: FP8 and FP4 to bf16
for capability in variants:
    for fp4, to_fp8, indexed in variants[capability]:
        constants = dict(FP4=fp4, TO_FP8=to_fp8, INDEXED=indexed, ALIGNED=indexed, ROWS=ROWS)
        constants |= dict(ZERO_IS_SUBNORMAL=not indexed, MAX_IS_NAN=not indexed)
        signature = dict.fromkeys(kernel.arg_names, "i64")
        signature |= {"packed": "*u8", "index": "*i32" if indexed else "*u8", "out": "*u8" if to_fp8 else "*i16"}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, signature, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        found[f"sm_{capability} {fp4} {to_fp8} {indexed}"] = compiled.asm["ptx"]
json.dump(found, sys.stdout)
"""


def test_the_kernel_compiles_for_gpus_and_flushes_no_subnormal_number() -> None:
    """Seen in the machine's code, since no GPU is at hand: products of tiny scales are exact only so."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for variant, assembly in json.loads(ran.stdout).items():
        _, _, to_fp8, _ = variant.split()
        assert ".ftz" not in assembly, variant
        assert ("mul.f32" in assembly or "mul.rn.f32" in assembly) == (to_fp8 == "False"), variant
