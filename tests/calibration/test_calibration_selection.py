"""Which tensors are quantised, under which names, and what is refused."""

import pytest
from calibration_fakes import GOLDENS, fuse_experts, model_with_tokenizer

from hybridjax.calibration.selection import make_plan, matches
from hybridjax.calibration.streaming import LayerStream
from hybridjax.errors import ConfigError


@pytest.fixture(scope="module")
def dense():
    return LayerStream(GOLDENS / "minicpm_sala" / "dense")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    directory = model_with_tokenizer(tmp_path_factory.mktemp("mixture") / "model", "qwen4_exp/text_mtp")
    fuse_experts(directory)
    return LayerStream(directory)


def plan_of(stream, *skip):
    return make_plan(stream.model, stream.weights, skip)


def groups(layer):
    kinds = (*layer.linears.items(), *layer.experts.items())
    return {".".join(map(str, path)): [e.name.split(".", 3)[3] for e in held] for path, held in kinds}


def test_every_matrix_of_a_minicpm_sala_layer(dense):
    plan = plan_of(dense)
    assert groups(plan.layers[0]) == {
        "mixer.in_proj": [f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_gate")],
        "mixer.o_proj": ["self_attn.o_proj.weight"],
        "mlp.gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "mlp.down": ["mlp.down_proj.weight"],
    }
    assert groups(plan.layers[1])["mixer.in_proj"][3] == "self_attn.z_proj.weight"
    assert len(plan.targets) == 4 * 8
    assert not any("embed" in e.name or "lm_head" in e.name for e in plan.targets)


def test_a_qwen4_exp_layer_keeps_what_the_releases_keep(mixture):
    plan = plan_of(mixture)
    linear, indexed = groups(plan.layers[0]), groups(plan.layers[3])
    assert linear["mixer.in_proj"] == ["linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"]
    assert indexed["mixer.in_proj"] == [f"self_attn.{n}_proj.weight" for n in "qkv"]
    shared = ["shared_expert.gate_proj.weight", "shared_expert.up_proj.weight"]
    assert linear["mlp.shared.gate_up"] == ["mlp." + name for name in shared]
    assert linear.keys() == {
        "mixer.in_proj", "mixer.out_proj", "mlp.shared.gate_up", "mlp.shared.down", "mlp.experts",
    }  # fmt: skip
    # Stored fused, but written one by one.
    experts = [f"mlp.experts.{e}.{p}_proj.weight" for e in range(8) for p in ("gate", "up", "down")]
    assert sorted(linear["mlp.experts"]) == sorted(experts)
    names = {entry.name for entry in plan.entries}
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.mlp.experts.gate_up_proj" not in names


def test_patterns_leave_out_tensors_and_modules(dense, mixture):
    plan = plan_of(dense, "*.o_proj", "model.layers.1.mlp.*_proj.weight")
    names = {entry.name for entry in plan.targets}
    assert len(names) == 4 * 8 - 4 - 3
    assert not any("o_proj" in name or name.startswith("model.layers.1.mlp") for name in names)
    assert "mixer.o_proj" not in groups(plan.layers[0])
    # A part of a fused matrix.
    assert len(groups(plan_of(dense, "*.k_proj").layers[0])["mixer.in_proj"]) == 3
    # Experts that stay are not taken apart.
    kept = plan_of(mixture, "model.layers.0.mlp.experts.*")
    assert "model.layers.0.mlp.experts.gate_up_proj" in {entry.name for entry in kept.entries}
    assert not kept.layers[0].experts and kept.layers[1].experts
    assert matches("a.b.weight", ["a.b"]) and not matches("a.bc.weight", ["a.b"])


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (("*",), "nothing is left to quantise"),
        (("*.no_proj",), r"skip has '\*.no_proj', which no tensor's name matches"),
        (("*.experts.3.down_proj",), "skip leaves out .*experts.3.down_proj.weight, but not .*experts.0"),
    ],
)
def test_what_cannot_be_left_out_is_named(mixture, skip, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(mixture, *skip)
