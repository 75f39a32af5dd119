"""Machine code for GPUs that are not here, compiled in one process per architecture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compilers import needs_compilers

from hybridjax.pallas_kernels import aot
from hybridjax.pallas_kernels.catalog import KERNELS

HLO = """
input_output_alias={ {1}: (4, {}, may-alias) }
  %a = f32[20,32,128,128]{3,2,1,0} parameter(4), sharding={}
  %b = f32[20,32,128,128]{3,2,1,0} copy(%a)
  %c = (f32[8]{0}, f32[20,32,128,128]{3,2,1,0}) custom-call(%b), output_to_operand_aliasing={{1}: (6, {})}
  %d = f32[20,32,128,128]{3,2,1,0} get-tuple-element(%c), index=1
"""


def dumped(folder, spilled):
    (folder / "k.ptxas").write_text(
        f"0 bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads\nUsed 80 registers"
    )
    (folder / "k.resources.txt").write_text("Resources(smem_scratch_bytes=18432, tmem_scratch_cols=0)")
    (folder / "k.sass_ctrl").write_text("/*01*/ HGMMA.64x64x16.F32.BF16 R24\n/*02*/ LDS.64 R1")


def test_a_report_names_spills_copies_and_instructions(tmp_path):
    dumped(tmp_path, 40)
    assert aot.report(HLO, tmp_path, "f32[20,32,128,128]") == {
        "registers": 80,
        "spilled": 40,
        "shared_memory": 18432,
        "tensor_core": 1,
        "copies": ["copy"],
        "in_place": True,
    }


def test_a_report_on_a_pool_that_is_not_aliased_says_so(tmp_path):
    dumped(tmp_path, 0)
    found = aot.report(HLO.replace("output_to_operand_aliasing", "x"), tmp_path, "f32[9,9]")
    assert not found["in_place"] and not found["copies"] and not found["spilled"]


@needs_compilers
@pytest.mark.parametrize("architecture", aot.GPUS)
def test_kernels_compile_without_spills_and_without_copies_of_the_pool(architecture):
    done = subprocess.run(
        [sys.executable, "-m", "hybridjax.pallas_kernels.aot", architecture],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    compiled = [k for k in KERNELS if architecture in k.compiles]
    assert [x["op"] for x in found] == [k.op for k in compiled for _ in k.forms(architecture)]
    known = {k.op: k for k in KERNELS}
    for kernel in found:
        entry = known[kernel["op"]]
        assert kernel["spilled"] <= entry.spills and kernel["registers"] <= 255
        assert kernel["shared_memory"] <= kernel["limit"] == aot.GPUS[architecture].block_shared_memory
        assert kernel["in_place"] == entry.writes and not kernel["copies"]
        assert bool(kernel["tensor_core"]) == entry.tensor_cores


@needs_compilers
@pytest.mark.parametrize("architecture", ["sm_100a", "sm_120a"])
def test_w4a4_is_one_block_scaled_product_of_the_library_on_blackwell(architecture):
    script = Path(__file__).with_name("compile_block_scaled.py")
    done = subprocess.run(
        [sys.executable, str(script), architecture],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["__cudnn$blockScaledDot"]
