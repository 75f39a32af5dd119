"""The command: checkpoints that load, reports that are right, runs that go on, and errors before any work."""

import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from calibration_fakes import fuse_experts, model_with_tokenizer, write_text
from safetensors.numpy import save_file

from hybridjax.calibration import Quantization, Settings
from hybridjax.calibration.results import WorkDirectory
from hybridjax.checkpoints import load_model
from hybridjax.checkpoints.safetensors_file import SafetensorsFile, write_safetensors
from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.layers.quantized import NVFP4Experts, NVFP4Weight, SplitWeight
from hybridjax.quantization import NVFP4, dequantize, quantize
from hybridjax.quantize import main

LENGTH = ["--calibration-length", "128"]


def read(directory):
    file = SafetensorsFile(directory / "model.safetensors")
    return {name: file.read(name) for name in file.tensors}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The dense golden, quantised by the command in ModelOpt's layout: (original, result, report)."""
    home = tmp_path_factory.mktemp("dense")
    source = model_with_tokenizer(home / "model", "minicpm_sala/dense")
    text = write_text(home / "text.txt", 40)
    out = home / "out"
    command = ["--model-path", str(source), "--output", str(out), "--calibration", str(text), *LENGTH]
    assert main([*command, "--skip", "*.k_proj", "--no-progress"]) == 0
    return source, out, json.loads((home / "out.report.json").read_text())


def test_the_result_loads_and_all_else_is_as_it_was(dense):
    source, out, _ = dense
    before, after = read(source), read(out)
    quantised = {name.removesuffix("_scale_2") for name in after if name.endswith("weight_scale_2")}
    assert len(quantised) == 4 * 7
    for name in before.keys() - quantised:
        assert before[name].tobytes() == after[name].tobytes() and before[name].dtype == after[name].dtype
    assert "model.layers.0.self_attn.k_proj.weight" in before.keys() - quantised
    model = load_model(out)
    layer = model.layers[0]
    assert isinstance(layer.mlp.down.weight, NVFP4Weight) and isinstance(
        layer.mixer.in_proj.weight, SplitWeight
    )
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert (out / "tokenizer.json").exists() and (out / "hf_quant_config.json").exists()
    assert not (out.parent / ".out.quantize").exists()


def test_fused_matrices_share_a_scale_that_fits_the_largest_of_them(dense):
    source, out, _ = dense
    before, after = read(source), read(out)
    name = "model.layers.1.mlp."
    scales = {p: after[f"{name}{p}_proj.weight_scale_2"] for p in ("gate", "up", "down")}
    assert scales["gate"] == scales["up"] != scales["down"]
    amax = max(np.abs(before[f"{name}{p}_proj.weight"]).max() for p in ("gate", "up"))
    assert float(scales["gate"]) == pytest.approx(amax / 1536, rel=1e-6)
    assert after[name + "gate_proj.input_scale"] == after[name + "up_proj.input_scale"] > 0


def test_weights_stay_near_and_outputs_nearer(dense):
    source, out, report = dense
    before, after = read(source), read(out)
    for row in report["modules"]:
        name = row["name"]
        stored = NVFP4(*(jnp.asarray(after[name + s]) for s in ("", "_scale", "_scale_2")))
        found, wanted = np.asarray(dequantize(stored)), before[name].astype(np.float32)
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert row["weight_error"] == pytest.approx(error, rel=1e-4)
        assert row["weight_error"] < 0.2 and 0.3 < row["share_of_fours"] < 0.6
        assert row["output_error"] < row["output_error_rtn"] < 0.12
        plain = np.linalg.norm(np.asarray(dequantize(quantize(jnp.asarray(wanted)))) - wanted)
        assert row["weight_error_rtn"] == pytest.approx(plain / np.linalg.norm(wanted), rel=0.05)
    assert report["perplexity"].keys() == {"before", "after, W4A16", "after, W4A4"}
    assert report["settings"]["calibration"]["tokens"] > 1000


def test_a_run_that_was_stopped_goes_on_and_gives_the_same_bytes(dense, tmp_path, monkeypatch):
    source, out, _ = dense
    save, saved = WorkDirectory.save, []

    def stop_after_two(self, index, *args):
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(index)
        save(self, index, *args)

    def run(**options):
        settings = Settings(calibration_length=128, skip=options.pop("skip", ("*.k_proj",)))
        text = source.parent / "text.txt"
        return Quantization(
            source, tmp_path / "again", "modelopt", settings, calibration=text, progress=False, **options
        )

    monkeypatch.setattr(WorkDirectory, "save", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        run().quantize()
    assert not (tmp_path / "again").exists()
    # What a run leaves that is killed while it writes the output; another name's is not ours.
    killed, other = tmp_path / ".again.0123abcd.tmp", tmp_path / ".again2.0123abcd.tmp"
    for path in (killed, other):
        (path / "part").mkdir(parents=True)
    with pytest.raises(ConfigError, match="run with another skip; repeat that run, or --restart"):
        run(skip=())
    saved.clear()
    run().quantize()
    assert saved == [2, 3] and not killed.exists() and other.exists()
    for file in out.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    # Nothing is left to do, and that changes nothing.
    saved[:] = [0, 0]
    run().quantize()
    assert run(skip=(), restart=True).work.path.exists() is False


def test_two_runs_on_one_output_do_not_meet(dense, tmp_path):
    source, _, _ = dense
    settings = Settings(method="rtn", weights_only=True)

    def run(**options):
        return Quantization(source, tmp_path / "one", "modelopt", settings, progress=False, **options)

    first, second = run(), run()
    first.work.create()
    with pytest.raises(ConfigError, match="one is being written by another run; wait for its end"):
        second.quantize()
    with pytest.raises(ConfigError, match="being written by another run"):
        run(restart=True)
    first.work.release()
    second.quantize()
    assert (tmp_path / "one/config.json").exists()


def test_results_that_came_after_the_check_are_not_taken_for_ones_own(dense, tmp_path):
    source, _, _ = dense

    def run(rule):
        settings = Settings(method="rtn", scale_rule=rule, weights_only=True)
        return Quantization(source, tmp_path / "one", "modelopt", settings, progress=False)

    first, second = run("mse"), run("static_6")
    first.quantize()
    for _ in range(2):  # it does not keep the directory for itself, either
        with pytest.raises(
            ConfigError, match="results of a run with another scale_rule; repeat that run, or --res"
        ):
            second.quantize()
    first.quantize()


def test_a_checkpoint_that_was_replaced_with_its_times_kept_is_told_apart(dense, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(dense[0], source)
    settings = Settings(method="rtn", weights_only=True)

    def run():
        return Quantization(source, tmp_path / "one", "modelopt", settings, progress=False)

    run().work.create()
    file = source / "model.safetensors"
    times, value = file.stat(), read(source)["model.norm.weight"]
    whole = file.read_bytes()
    assert whole.count(value.tobytes()) == 1
    file.write_bytes(whole.replace(value.tobytes(), (value * 2).tobytes()))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ConfigError, match="results of a run with another checkpoint"):
        run()


def test_a_checkpoint_that_is_changed_while_it_is_read_is_refused(dense, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(dense[0], source)
    settings = Settings(method="rtn", weights_only=True)
    run = Quantization(source, tmp_path / "one", "modelopt", settings, progress=False)
    shutil.copyfile(source / "model.safetensors", tmp_path / "new")
    os.replace(tmp_path / "new", source / "model.safetensors")
    with pytest.raises(ConfigError, match="model was changed while it was read, .* again with --restart"):
        run.quantize()
    assert not (tmp_path / "one").exists()


def test_a_run_that_is_killed_while_it_tidies_up_leaves_nothing_that_stands_in_the_way(dense, tmp_path):
    source, _, _ = dense
    settings = Settings(method="rtn", weights_only=True)

    def run():
        return Quantization(source, tmp_path / "one", "modelopt", settings, progress=False)

    with pytest.MonkeyPatch.context() as patch:
        run_of_old = run()
        run_of_old.work.create()

        def killed(path, **_):
            for file in Path(path).glob("run.json"):
                file.unlink()

        patch.setattr("hybridjax.calibration.results.shutil.rmtree", killed)
        run_of_old.work.remove()
    run().quantize()
    assert (tmp_path / "one/config.json").exists()


def test_a_report_that_cannot_be_written_is_told_at_once(dense, tmp_path):
    source, _, _ = dense
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    settings = Settings(method="rtn", weights_only=True)
    for report in ("file/report.json", "folder.json"):
        with pytest.raises(ConfigError, match="which cannot be written"):
            Quantization(source, tmp_path / "out", "modelopt", settings, report_file=tmp_path / report)


@pytest.mark.parametrize("output", ["/", "~no-such-user/x", "a\0b"])
def test_an_output_that_can_be_no_directory_is_refused(dense, output):
    source, _, _ = dense
    with pytest.raises(CheckpointError, match="cannot be a directory|cannot be replaced"):
        Quantization(source, Path(output), "modelopt", Settings(method="rtn", weights_only=True))


def test_a_mixture_of_experts(tmp_path):
    source = model_with_tokenizer(tmp_path / "model", "qwen4_exp/text_mtp")
    fuse_experts(source)
    text, out = write_text(tmp_path / "text.txt", 30), tmp_path / "out"
    settings = Settings(calibration_length=128, min_expert_tokens=400, skip=("*_attn.*", "*.shared_expert.*"))
    run = Quantization(source, out, "compressed-tensors", settings, calibration=text, progress=False)
    report = run.quantize()
    before, after = read(source), read(out)
    fused = before["model.layers.1.mlp.experts.gate_up_proj"]
    for e in (0, 7):
        place = f"model.layers.1.mlp.experts.{e}."
        for part, rows in (("gate", slice(0, 32)), ("up", slice(32, 64))):
            stored = [after[f"{place}{part}_proj.weight{s}"] for s in ("_packed", "_scale", "_global_scale")]
            found = dequantize(
                NVFP4(jnp.asarray(stored[0]), jnp.asarray(stored[1]), 1 / jnp.asarray(stored[2][0]))
            )
            wanted = fused[e, rows].astype(np.float32)
            assert np.linalg.norm(found - wanted) < 0.2 * np.linalg.norm(wanted)
        scales = {part: after[f"{place}{part}_proj.weight_global_scale"] for part in ("gate", "up")}
        assert scales["gate"] == scales["up"]
    inputs = {float(v[0]) for n, v in after.items() if ".layers.1.mlp.experts." in n and "input" in n}
    assert len(inputs) == 2  # of all experts' gate and up, and of all experts' down
    kept = (
        "mlp.gate.weight",
        "shared_expert_gate",
        "hyper_connection",
        ".ple.",
        "indexer",
        "in_proj_a",
        "mtp.",
    )
    for name, value in before.items():
        if any(part in name for part in kept):
            assert after[name].tobytes() == value.tobytes()
    model = load_model(out)
    assert isinstance(model.layers[0].mlp.experts, NVFP4Experts)
    rows = {row["name"]: row for row in report["modules"]}
    row = rows["model.layers.1.mlp.experts.*.down_proj.weight"]
    assert row["tokens_per_expert"]["least"] < 400 < row["tokens_per_expert"]["most"]
    assert 0 < row["experts_rounded"] < 8
    assert row["output_error"] < row["output_error_rtn"]


def test_rounding_needs_no_text(tmp_path):
    source = model_with_tokenizer(tmp_path / "model", "minicpm_sala/dense")
    command = ["--model-path", str(source), "--output", str(tmp_path / "out"), "--method", "rtn"]
    assert main([*command, "--scale-rule", "static_6", "--weights-only", "--no-progress"]) == 0
    before, after = read(source), read(tmp_path / "out")
    name = "model.layers.2.mlp.down_proj.weight"
    wanted = quantize(jnp.asarray(before[name]), "static_6")
    assert after[name].tobytes() == np.asarray(wanted.codes).tobytes()
    assert not any("input_scale" in name for name in after)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    home = tmp_path_factory.mktemp("errors")
    write_text(home / "text.txt", 120)
    (home / "empty.txt").write_text("\n")
    (home / "other").mkdir()
    (home / "other" / "notes").write_text("mine")
    return model_with_tokenizer(home / "model", "minicpm_sala/dense")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "gguf"], "format is 'gguf'; it must be one of modelopt, compressed-tensors"),
        (["--method", "awq"], "method is 'awq'; it must be one of gptq, rtn"),
        (["--scale-rule", "max"], "scale_rule is 'max'"),
        (["--group-size", "32"], "group_size is 32; it must be 16"),
        (["--damping", "nan"], "damping is nan"),
        (["--activation-ordering", "dynamic"], "activation_ordering is 'dynamic'"),
        (["--calibration-length", "8"], "calibration_length is 8; it must be at least 64"),
        (["--calibration-samples", "0"], "calibration_samples is 0"),
        (["--skip", " "], "skip holds an empty pattern"),
        (["--skip", "*.no_such"], "no tensor's name matches"),
        (["--calibration", "empty.txt"], "empty.txt: holds no text"),
        (["--calibration", "missing.txt"], "missing.txt: cannot be read"),
        (["--evaluate", "missing.txt"], "missing.txt: cannot be read"),
        (["--calibration", None], "method gptq needs a calibration text"),
        (["--calibration", None, "--method", "rtn"], "input scales for W4A4 need a calibration text"),
        (["--output", "other"], "holds notes, which is no part of a checkpoint"),
        (["--output", "model"], "the model that is to be quantised"),
        (["--report", "report.txt"], "must end in .json"),
        (["--dtype", "int4"], "dtype is 'int4'"),
    ],
)
def test_what_cannot_work_is_named_before_any_work(model, flags, message, monkeypatch, capsys):
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr(Quantization, "run", lambda self: pytest.fail("work has begun"))
    given = {"--model-path": "model", "--output": "out", "--calibration": "text.txt"}
    pairs = dict(zip(flags[::2], flags[1::2]))
    command = [part for flag, value in (given | pairs).items() if value is not None for part in (flag, value)]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not (model.parent / "out").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "values that are not finite"),
        (-np.inf, "values that are not finite"),
        (1e-36, "scale would be 0"),
    ],
)
def test_weights_that_no_scale_fits_are_named(model, tmp_path, value, message):
    source = tmp_path / "model"
    shutil.copytree(model, source)
    tensors = {name: v.copy() for name, v in read(source).items()}
    name = "model.layers.3.mlp.up_proj.weight"
    if np.isfinite(value):
        tensors[name][:] = value
    else:
        tensors[name][3, 5] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name} in model.safetensors .*{message}"):
        Quantization(source, tmp_path / "out", "modelopt", Settings(), calibration=model.parent / "text.txt")


def test_a_width_that_does_not_divide_is_named(tmp_path):
    source = model_with_tokenizer(tmp_path / "model", "minicpm_sala/dense")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 88}))
    tensors = {name: v.copy() for name, v in read(source).items()}
    for name in tensors:
        if "mlp.gate" in name or "mlp.up" in name:
            tensors[name] = tensors[name][:88]
        elif "mlp.down" in name:
            tensors[name] = np.ascontiguousarray(tensors[name][:, :88])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    text = write_text(tmp_path / "text.txt", 120)
    with pytest.raises(ConfigError, match=r"mlp.down_proj.weight \[64, 88\] has 88 columns.* groups of 16"):
        Quantization(source, tmp_path / "out", "modelopt", Settings(), calibration=text)
    Quantization(source, tmp_path / "out", "modelopt", Settings(skip=("*.down_proj",)), calibration=text)


def test_a_quantised_checkpoint_is_refused(dense, tmp_path):
    source, out, _ = dense
    with pytest.raises(ConfigError, match="quantised to NVFP4 already"):
        Quantization(
            out,
            tmp_path / "x",
            "modelopt",
            Settings(calibration_length=128),
            calibration=source.parent / "text.txt",
        )


def test_bfloat16_checkpoints(dense, tmp_path):
    source, _, _ = dense
    small = tmp_path / "model"
    shutil.copytree(source, small)
    tensors = {name: v.astype(ml_dtypes.bfloat16) for name, v in read(source).items()}
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    run = Quantization(
        small, tmp_path / "out", "modelopt", Settings(method="rtn", weights_only=True), dtype="bfloat16"
    )
    run.quantize()
    name = "model.layers.0.mlp.gate_proj.weight"
    assert read(tmp_path / "out")[name].dtype == np.uint8
    assert read(tmp_path / "out")["model.norm.weight"].dtype == ml_dtypes.bfloat16


def test_float8_experts_are_quantised_and_a_float8_table_is_copied(tmp_path):
    source = model_with_tokenizer(tmp_path / "model", "qwen4_exp/text_mtp")
    stored, meant = {}, {}
    for name, value in read(source).items():
        if ".experts." in name and not name.startswith("mtp."):
            scale = np.float32(np.abs(value).max() / 448)
            stored[name] = (value / scale).astype(ml_dtypes.float8_e4m3fn)
            stored[name + "_scale_inv"] = np.full((1, 1), scale, np.float32)
            meant[name] = stored[name].astype(np.float32) * scale
        elif ".shard_" in name:
            stored[name] = (value * 100).astype(ml_dtypes.float8_e4m3fn)
            stored[name.partition("shard_")[0] + "weight_scale"] = np.full(1, 0.01, ml_dtypes.bfloat16)
        else:
            stored[name] = value
    (source / "model.safetensors").unlink()
    layout = {name: (value.dtype, value.shape) for name, value in stored.items()}
    write_safetensors(source / "model.safetensors", layout, stored.__getitem__, {"format": "pt"})
    settings = Settings(method="rtn", scale_rule="static_6", weights_only=True)
    Quantization(source, tmp_path / "out", "modelopt", settings, progress=False).quantize()
    after = read(tmp_path / "out")
    assert not any("scale_inv" in name for name in after)
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    assert after[name].tobytes() == np.asarray(quantize(jnp.asarray(meant[name]), "static_6").codes).tobytes()
    for name, value in stored.items():
        if ".ple." in name:
            assert after[name].dtype == value.dtype and after[name].tobytes() == value.tobytes()
    load_model(tmp_path / "out")
