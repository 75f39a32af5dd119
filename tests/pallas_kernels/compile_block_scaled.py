"""Prints the library calls of a W4A4 product, compiled for a GPU that is not here; see test_ahead_of_time."""

import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from hybridjax.ops import nvfp4_w4a4
from hybridjax.ops.dispatch import assume
from hybridjax.pallas_kernels.aot import GPUS, target_config

M, N, K = 128, 512, 256

architecture = sys.argv[1]
topology = topologies.get_topology_desc(
    platform="cuda", target_config=target_config(GPUS[architecture]), topology="1x1x1"
)
mesh = topologies.make_mesh(topology, (1,), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
shapes = (
    ((M, K), jnp.bfloat16),
    ((N, K // 2), jnp.uint8),
    ((N, K // 16), jnp.float8_e4m3fn),
    ((N,), jnp.float32),
    ((), jnp.float32),
)
operands = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
with assume(architecture.rstrip("a")), jax.default_device(topology.devices[0]):
    compiled = jax.jit(lambda *operands: nvfp4_w4a4(*operands)).lower(*operands).compile()
print(*re.findall(r'custom_call_target="([^"]+)"', compiled.as_text() or ""))
