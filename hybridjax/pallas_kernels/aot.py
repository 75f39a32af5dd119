"""Compiles every kernel to machine code for a named GPU on a machine without one, and reports on the code.

    JAX_PLATFORMS=cpu python -m hybridjax.pallas_kernels.aot sm_100a [--only simple_gla_decode]

Needs jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc and nvidia-nvvm, but no driver. Prints one JSON
line per kernel. One architecture per process: the assembler is set up for the first one that is asked for.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the compiler wants to know of a GPU; sizes in bytes."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int  # per multiprocessor
    block_shared_memory: int  # limit of one block
    bandwidth: int  # bytes per second
    l2: int
    memory: int


GPUS = {
    "sm_90a": Gpu("NVIDIA H200", (9, 0), 132, 233472, 232448, 4_800_000_000_000, 52428800, 151397597184),
    "sm_100a": Gpu("NVIDIA B200", (10, 0), 148, 233472, 232448, 7_672_000_000_000, 132644864, 191514411008),
    "sm_120a": Gpu(
        "NVIDIA RTX PRO 6000 Blackwell",
        (12, 0),
        188,
        131072,
        101376,
        1_792_000_000_000,
        134217728,
        103079215104,
    ),
}


def target_config(gpu: Gpu) -> str:
    """The GpuTargetConfigProto of a GPU, in text form."""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_memory}
  shared_memory_per_block_optin: {gpu.block_shared_memory}
  threads_per_core_limit: 2048 core_count: {gpu.multiprocessors} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth} l2_cache_size: {gpu.l2} clock_rate_ghz: 1.98
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{
    major: {gpu.capability[0]} minor: {gpu.capability[1]} feature_extension: ACCELERATED_FEATURES
  }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0" name: "{gpu.name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""


def available() -> bool:
    """Whether the CUDA compiler of JAX and NVIDIA's assembler are installed."""
    try:
        return all(
            importlib.util.find_spec(name) is not None
            for name in ("jax_plugins.xla_cuda13", "jax_cuda13_plugin", "nvidia.cu13")
        )
    except ModuleNotFoundError:
        return False


def compile_kernel(kernel, operands: dict, options: dict, architecture: str, dump: Path) -> dict:
    """Compiles an entry of the catalog in one of its forms; see ``report`` for what comes back.

    ``dump``: where the compiler, told by MOSAIC_GPU_DUMP_TO before JAX was imported, leaves its files.
    """
    import jax
    from jax.experimental import topologies

    gpu = GPUS[architecture]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands)
    function = kernel.function()
    donated = ("pool",) if kernel.writes else ()
    run = jax.jit(lambda **operands: function(**operands, **options), donate_argnames=donated)
    for path in dump.glob("*"):
        path.unlink()
    with jax.default_device(topology.devices[0]):
        compiled = run.lower(**operands).compile()
    held = jax.tree.leaves(operands[kernel.held])[0]
    name = {"uint32": "u32", "bfloat16": "bf16"}.get(str(held.dtype), "f32")
    named = name + "[" + ",".join(map(str, held.shape)) + "]"
    found = report(compiled.as_text() or "", dump, named)
    return {"op": kernel.op, "architecture": architecture, **found, "limit": gpu.block_shared_memory}


def report(hlo: str, dump: Path, held: str) -> dict:
    """What was compiled; ``held`` names the type of the pool, or of codes: 'f32[20,32,128,128]'.

    Returns:
      registers per thread, spilled bytes, shared_memory (bytes of a block) and tensor_core (instructions) of
      the machine code; copies: operations of the program that make another array of the held one's shape;
      in_place: whether the kernel writes the pool where it is.
    """
    assembler, resources, code = (
        "\n".join(path.read_text() for path in dump.glob(pattern))
        for pattern in ("*.ptxas", "*.resources.txt", "*.sass*")
    )

    def numbers(pattern: str, text: str) -> list[int]:
        return [int(x) for x in re.findall(pattern, text)]

    made = re.findall(rf"= {re.escape(held)}\S* (\S+?)\(", hlo)
    return {
        "registers": max(numbers(r"Used (\d+) registers", assembler)),
        "spilled": sum(numbers(r"(\d+) bytes spill", assembler)),
        "shared_memory": max(numbers(r"smem_scratch_bytes=(\d+)", resources)),
        "tensor_core": len(re.findall(r"\b(?:HGMMA|UTC\w*MMA|HMMA)", code)),
        "copies": [x for x in made if x not in ("parameter", "get-tuple-element", "bitcast")],
        "in_place": "output_to_operand_aliasing" in hlo and "input_output_alias" in hlo,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture", choices=GPUS)
    parser.add_argument("--only", default="", help="ops, separated by commas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as dump:
        # Read when the compiler's library is loaded.
        os.environ["MOSAIC_GPU_DUMP_TO"] = dump
        from hybridjax.pallas_kernels.catalog import KERNELS

        for kernel in KERNELS:
            wanted = not options.only or kernel.op in options.only.split(",")
            if not wanted or options.architecture not in kernel.compiles:
                continue
            for operands, static in kernel.forms(options.architecture):
                found = compile_kernel(kernel, operands, static, options.architecture, Path(dump))
                print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
