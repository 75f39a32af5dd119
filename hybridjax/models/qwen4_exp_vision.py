"""Which tensors of a released checkpoint fill the parameters of the vision tower."""

from collections.abc import Iterator

from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpVisionConfig
from hybridjax.models.base import Path, TensorEntry


def vision_entries(
    config: Qwen4ExpVisionConfig, prefix: str = "model.visual.", path: Path = ()
) -> Iterator[TensorEntry]:
    """Every tensor of the vision tower, in the order of computation (qwen4_exp 11).

    Args:
      config: of the tower.
      prefix: what the released names begin with.
      path: where the ``VisionTower`` lives in the model, ``("visual",)`` for instance.
    """
    hidden, wide, size = config.hidden_size, config.intermediate_size, config.patch_size
    patch = (config.in_channels, config.temporal_patch_size, size, size)
    merged = hidden * config.merge_unit

    def tensor(name: str, shape: tuple[int, ...], *inner: str | int) -> TensorEntry:
        return TensorEntry(prefix + name, shape, (*path, *inner))

    def linear(name: str, outputs: int, inputs: int, *inner: str | int) -> Iterator[TensorEntry]:
        yield tensor(name + ".weight", (outputs, inputs), *inner, "weight", "value")
        yield tensor(name + ".bias", (outputs,), *inner, "bias")

    def norm(name: str, *inner: str | int) -> Iterator[TensorEntry]:
        yield tensor(name + ".weight", (hidden,), *inner, "weight")
        yield tensor(name + ".bias", (hidden,), *inner, "bias")

    yield tensor("patch_embed.proj.weight", (hidden, *patch), "patch_embed", "weight")
    yield tensor("patch_embed.proj.bias", (hidden,), "patch_embed", "bias")
    grid = (config.num_position_embeddings, hidden)
    yield tensor("pos_embed.weight", grid, "pos_embed", "weight", "value")
    for i in range(config.depth):
        name, block = f"blocks.{i}.", ("blocks", i)
        yield from norm(name + "norm1", *block, "norm1")
        yield from linear(name + "attn.qkv", 3 * hidden, hidden, *block, "attn", "qkv")
        yield from linear(name + "attn.proj", hidden, hidden, *block, "attn", "proj")
        yield from norm(name + "norm2", *block, "norm2")
        yield from linear(name + "mlp.linear_fc1", wide, hidden, *block, "mlp", "linear_fc1")
        yield from linear(name + "mlp.linear_fc2", hidden, wide, *block, "mlp", "linear_fc2")
    yield from norm("merger.norm", "merger", "norm")
    yield from linear("merger.linear_fc1", merged, merged, "merger", "linear_fc1")
    yield from linear("merger.linear_fc2", config.out_hidden_size, merged, "merger", "linear_fc2")
