"""Compiles serving steps of linear mixers for an H200 that is not here, and says what kernels they have.

One JSON line per program: kernels per layer, and the copies of a pool that it makes.
"""

import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from benchmarks.qwen4_exp_common import decode_batch, prefill_batch
from hybridjax.batch import GatedDeltaCache, RecurrentCache
from hybridjax.configs import MiniCPMSALAConfig, Qwen4ExpConfig
from hybridjax.layers import GatedDeltaNet, LightningAttention
from hybridjax.ops.dispatch import override
from hybridjax.pallas_kernels import aot

FUSIONS = "lightning_decode=xla,gated_delta_net_decode=reference,gated_delta_output=reference"
CASES = [(kind, "decode", rows) for kind in ("lightning", "gdn") for rows in (1, 64)] + [
    ("gdn", "prefill", 256)
]
SLOTS = 77
# What the entry computation lists beside kernels.
_FREE = "parameter|get-tuple-element|bitcast|tuple|constant|optimization-barrier"

topology = topologies.get_topology_desc(
    platform="cuda", target_config=aot.target_config(aot.GPUS["sm_90a"]), topology="1x1x1"
)
SHARDING = jax.sharding.NamedSharding(
    topologies.make_mesh(topology, (1,), ("x",)), jax.sharding.PartitionSpec()
)


def placed(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SHARDING), tree)


def program(kind, mode, rows, layers):
    """The entry computation of equal layers, each adding to its input; line by line."""
    shared: Any = {"init": nnx.initializers.zeros, "dtype": jnp.bfloat16}
    conv: Any = jax.ShapeDtypeStruct((SLOTS, 3, 10240), jnp.bfloat16)
    states: Any = jax.ShapeDtypeStruct((SLOTS, 48 if kind == "gdn" else 32, 128, 128), jnp.float32)
    if kind == "gdn":
        config, layer, cache = Qwen4ExpConfig(), GatedDeltaNet, GatedDeltaCache(states, conv)
    else:
        config, layer, cache = MiniCPMSALAConfig(), LightningAttention, RecurrentCache(states)
    make: Any = functools.partial(layer, config, **shared)
    graph, parameters = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))

    def run(parameters, caches, x, batch):
        after = []
        for mine, cache in zip(parameters, caches):
            y, cache = nnx.merge(graph, mine)(x, batch, cache)
            x = (x + y).astype(x.dtype)
            after.append(cache)
        return x, after

    batch = decode_batch(rows, 64, 1000) if mode == "decode" else prefill_batch(rows, 0, 1000)
    x = jax.ShapeDtypeStruct((rows, config.hidden_size), jnp.bfloat16)
    arguments = placed(([parameters] * layers, [cache] * layers, x, batch))
    with jax.default_device(topology.devices[0]):
        text = jax.jit(run, donate_argnums=1).lower(*arguments).compile().as_text() or ""
    return [line for line in text[text.index("\nENTRY") :].splitlines() if " = " in line]


for kind, mode, rows in CASES:
    for form in ("chosen", "xla") if mode == "decode" else ("chosen",):
        with override(FUSIONS if form == "xla" else None):
            entries = {layers: program(kind, mode, rows, layers) for layers in (1, 3)}
        counts = {
            layers: sum(not re.search(rf"= .*? ({_FREE})\(", line) for line in lines)
            for layers, lines in entries.items()
        }
        found = {
            "kind": kind,
            "mode": mode,
            "rows": rows,
            "form": form,
            "kernels": (counts[3] - counts[1]) / 2,
            "copies": sum(bool(re.search(rf"= \w+\[{SLOTS},\S* copy\(", line)) for line in entries[3]),
        }
        print(json.dumps(found), flush=True)
