"""Decode steps in several programs: every parameter and cache goes where it is used."""

import collections

import jax
import pytest
from flax import nnx

from hybridjax.configs import Qwen4ExpConfig
from hybridjax.models.qwen4_exp import Qwen4Exp
from hybridjax.serving.decode_parts import DecodeParts


@pytest.mark.parametrize("tied", [False, True])
def test_parts_share_nothing_but_a_tied_embedding_and_leave_out_the_draft_head(tied):
    config = Qwen4ExpConfig(tie_word_embeddings=tied, ple_layer_ids=(2, 21))
    model = nnx.eval_shape(lambda: Qwen4Exp(config, rngs=nnx.Rngs(0), ngram_table="host"))
    graph, parameters = nnx.split(model, nnx.Param)
    leaves, structure = jax.tree_util.tree_flatten_with_path(parameters)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    default = DecodeParts(model, graph, structure)
    assert [(part.start, part.stop) for part in default.parts] == [(0, 1), (1, 48)]
    parts = DecodeParts(model, graph, structure, [(0, 1), (1, 3), (3, 13), (13, 48)]).parts

    uses = collections.Counter(names[i] for part in parts for i in part.parameters)
    (embedding,) = (name for name in names if "embed_tokens" in name)
    assert {name for name in names if name not in uses} == {name for name in names if "'mtp'" in name}
    assert {name for name, count in uses.items() if count > 1} == ({embedding} if tied else set())
    for part in parts:
        own = {names[i] for i in part.parameters if "'layers'" in names[i]}
        layers = {int(name.split("[")[2].rstrip("]")) for name in own}
        assert layers == set(range(part.start, part.stop))

    caches = [i for part in parts for i in part.caches]
    assert sorted(caches) == list(range(48 + 2))
    assert [48 in part.caches for part in parts] == [False, True, False, False]
    assert [49 in part.caches for part in parts] == [False, False, False, True]
