"""What the engine's programs need of a GPU that is not here: compiled ahead of time, nothing is run.

    PYTHONPATH=.venv/aot JAX_PLATFORMS=cpu python -m benchmarks.device_memory --length 131072 [--gpu sm_90a]

A MiniCPM-SALA of the released widths in bfloat16. Prints, for the largest programs of a context of that
length, the compiler's own account of memory: what goes in (weights and state), how much of it the results
reuse, and the temporaries. Needs the compilers that ``make aot`` installs. Matmuls are not autotuned without
a GPU, so their scratch memory may differ there.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from benchmarks.model_steps import stack
from hybridjax import __version__
from hybridjax.configs import EngineConfig, MiniCPMSALAConfig
from hybridjax.models import ARCHITECTURES
from hybridjax.ops.dispatch import assume
from hybridjax.ops.sampling import init_sampler_state
from hybridjax.pallas_kernels.aot import GPUS, available, target_config
from hybridjax.serving.programs import STEPS, DeviceState, Extras
from hybridjax.serving.sizing import buckets, pool_sizes

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=131072, help="tokens of the context")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--requests", type=int, default=8, help="that run together")
    parser.add_argument("--gpu", default="sm_90a", choices=GPUS)
    args = parser.parse_args()
    if not available():
        parser.error("the compilers are missing: make aot installs them in .venv/aot, for PYTHONPATH")

    gpu, architecture = GPUS[args.gpu], stack(MiniCPMSALAConfig(), args.layers)
    cls = ARCHITECTURES["MiniCPMSALAForCausalLM"].model
    model = nnx.eval_shape(lambda: cls(architecture, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model, nnx.Param)
    leaves, structure = jax.tree.flatten(parameters)
    config = EngineConfig(
        context_length=args.length,
        max_total_tokens=2 * args.length,
        max_running_requests=args.requests,
        chunked_prefill_size=2048,
        max_mamba_cache_size=8,
    )
    sizes = pool_sizes(config, model, gpu.memory)
    shapes = jax.eval_shape(
        lambda: DeviceState(
            model.init_state(sizes.num_pages, sizes.num_slots),
            init_sampler_state(sizes.num_slots, architecture.vocab_size),
        )
    )
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    weights, state = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / MIB for tree in (leaves, shapes)
    )
    print(f"{gpu.name}, {args.layers} layers, context of {args.length} tokens: {sizes.summary}")
    print(f"weights {weights:,.0f} MiB, state {state:,.0f} MiB")
    print(f"{'program':28} {'inputs':>9} {'reused':>9} {'results':>9} {'temporaries':>11}  MiB   compiled in")
    every = buckets(config, sizes)
    rows = []
    for mode in ("prefill", "decode"):
        bucket = [bucket for bucket in every if bucket.mode == mode][-1]

        def run(leaves, state, buffer, extras, bucket=bucket):
            parameters = jax.tree.unflatten(structure, leaves)
            return STEPS[bucket.mode](graph, bucket, parameters, state, buffer, extras)

        inputs = placed((leaves, shapes, jax.ShapeDtypeStruct((bucket.layout.size,), jnp.int32)))
        start = time.perf_counter()
        with assume(args.gpu.rstrip("a")), jax.default_device(topology.devices[0]):
            compiled = jax.jit(run, donate_argnums=1).lower(*inputs, Extras()).compile()
        found = compiled.memory_analysis()
        assert found is not None
        row = {
            "mode": mode,
            "rows": bucket.rows,
            "pages": bucket.pages,
            "inputs_mib": found.argument_size_in_bytes / MIB,
            "reused_mib": found.alias_size_in_bytes / MIB,
            "results_mib": found.output_size_in_bytes / MIB,
            "temporaries_mib": found.temp_size_in_bytes / MIB,
        }
        name = f"{mode} {bucket.rows} {'tiles' if mode == 'prefill' else 'rows'}, {bucket.pages} pages"
        sizes_text = " ".join(f"{row[key]:9,.0f}" for key in ("inputs_mib", "reused_mib", "results_mib"))
        seconds = time.perf_counter() - start
        print(f"{name:28} {sizes_text} {row['temporaries_mib']:11,.0f}        {seconds:.0f} s")
        rows.append(row)
    print(
        json.dumps(
            {
                "benchmark": "device_memory",
                "gpu": gpu.name,
                "length": args.length,
                "layers": args.layers,
                "weights_mib": weights,
                "state_mib": state,
                "programs": rows,
                "hybridjax": __version__,
                "jax": jax.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
