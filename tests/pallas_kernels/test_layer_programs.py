"""What steps of whole linear mixers consist of on an H200, compiled without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from compilers import needs_compilers

# A decode step takes as long as it has kernels: at most so many per layer, projections and residual included.
MOST = {
    ("lightning", "decode", "chosen"): 6,
    ("lightning", "decode", "xla"): 9,
    ("gdn", "decode", "chosen"): 7,
    ("gdn", "decode", "xla"): 9,
    ("gdn", "prefill", "chosen"): 10,
}


@needs_compilers
def test_steps_have_few_kernels_and_copy_no_pool():
    script = Path(__file__).with_name("compile_layers.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(programs) == 9
    for program in programs:
        assert program["copies"] == 0, program
        assert 3 < program["kernels"] <= MOST[program["kind"], program["mode"], program["form"]], program
