"""The command line, from prepared data to a model directory that loads, on two devices."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer
from training_fakes import HYBRID, small_experiment

from hybridjax.checkpoints import load_config, load_model, resolve
from hybridjax.train import main
from hybridjax.training.experiments import EXPERIMENTS
from hybridjax.training.report import check_output
from hybridjax.training.trainer import Trainer


def test_the_list_has_every_experiment(capsys):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(EXPERIMENTS)
    assert all(len(line.split()) > 3 for line in printed)


def test_show_prints_the_changed_settings_and_trains_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--experiment", "tiny_sala", "--set", "steps=17", "--data", "elsewhere", "--show"]) == 0
    printed = capsys.readouterr().out
    assert "steps=17" in printed and "directory='elsewhere'" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experiment", "huge"], "unknown experiment 'huge'; known: tiny_flash_next,"),
        (["--experiment", "tiny_sala", "--set", "stepz=3"], "unknown field 'stepz'; known: name, model,"),
        (["--experiment", "tiny_sala", "--set", "steps=x"], "steps is 'x'; it must be of type int"),
        (["--experiment", "tiny_sala", "--data", "nowhere"], "no prepared data in nowhere"),
        (["--evaluate", "model", "--data", "nowhere"], "no prepared data in nowhere"),
    ],
)
def test_requests_that_cannot_work_are_answered_in_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def assignments(config):
    """--set arguments that turn tiny_sala_debug into this experiment."""
    out = []

    def walk(prefix, node):
        for name, value in node.items():
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            else:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else value
                out.extend(["--set", f"{prefix}{name}={text}"])

    walk("", dataclasses.asdict(config))
    return out


# Two devices, and no time spent on good code.
FLAGS = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """The experiment of test_trainer.py in mixed precision and parts, trained by the command."""
    folder = tmp_path_factory.mktemp("cli")
    command = [sys.executable, "-m", "hybridjax.train", "--experiment", "tiny_sala_debug"]
    config = small_experiment(**HYBRID, compute_dtype="bfloat16", microbatches=2, remat=True)
    command += assignments(config) + ["--data", str(prepared.directory)]
    command += ["--run-dir", str(folder / "run"), "--output", str(folder / "model")]
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bits per byte: all" in done.stderr
    return folder


def no_training(*_, **__):
    raise AssertionError("training started")


@pytest.mark.parametrize("name", ["README.md", "evaluation.json", "notes.txt"])
def test_an_output_directory_of_the_users_is_refused_before_training(
    prepared, tmp_path, capsys, monkeypatch, name
):
    monkeypatch.setattr(Trainer, "run", no_training)
    (tmp_path / name).write_text("mine")
    arguments = ["--experiment", "tiny_sala_debug", "--data", str(prepared.directory)]
    arguments += ["--run-dir", str(tmp_path / "run"), "--set", f"model.vocab_size={prepared.vocab_size}"]
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    assert f"{tmp_path} holds {name}, which is no part" in capsys.readouterr().err
    assert main([*arguments, "--output", str(tmp_path / name / "model")]) == 2
    assert "cannot write beside it" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_an_earlier_output_is_replaced(trained):
    check_output(trained / "model")


def test_two_devices_in_bfloat16_see_the_losses_of_one_in_float32(trained, one_device_losses):
    found = [json.loads(x) for x in (trained / "run/metrics.jsonl").read_text().splitlines()]
    losses = [x["loss"] for x in found if "loss" in x]
    np.testing.assert_allclose(losses, one_device_losses, rtol=1e-2)


def test_the_output_is_a_small_complete_model(trained, prepared):
    folder = trained / "model"
    report = json.loads((folder / "evaluation.json").read_text())
    assert report["finished"] and report["steps"] == 24 and report["device"].startswith("2 x ")
    assert set(report["heldout"]) == {"all", "code", "prose", "documents"}
    model = load_model(folder)
    assert model.config.dtype == "bfloat16"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("state page").ids
    logits = nnx.jit(lambda m, ids: m(ids))(model, np.asarray([ids], np.int32))
    assert logits.shape == (1, len(ids), prepared.vocab_size)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size < 2 * report["parameters"] + 100_000


def test_the_card_states_the_measured_values(trained, prepared):
    card = (trained / "model/README.md").read_text()
    report = json.loads((trained / "model/evaluation.json").read_text())
    assert card.startswith("---\nlicense: apache-2.0\n")
    for name in ("all", "code", "prose"):
        row = report["heldout"][name]
        assert f"{row['bits_per_byte']:.3f} | {row['xz_bits_per_byte']:.3f} |" in card
    # dense_len is 64, but the first three blocks are all there are until then.
    assert "A query beyond 192 tokens attends to 3 blocks of 64." in card
    assert prepared.info["corpus_sha256"] in card and f"{report['parameters']:,} parameters" in card
    assert "Python Software Foundation License" in card and "None" not in card


def test_the_bundled_card_says_from_where_on_blocks_are_left_out():
    card = (resolve("tiny-sala") / "README.md").read_text()
    sparse = load_config("tiny-sala").sparse_config
    assert (sparse.dense_len, sparse.selected_blocks, sparse.block_size) == (512, 12, 64)
    assert "A query beyond 768 tokens attends to 12 blocks of 64." in card


def test_the_second_bundled_card_names_its_parts_and_what_they_do():
    config = load_config("tiny-flash-next")
    card = (resolve("tiny-flash-next") / "README.md").read_text()
    assert config == dataclasses.replace(EXPERIMENTS["tiny_flash_next"]().model, extra=config.extra)
    assert "16 experts, 4 per token, and a shared one; 4 residual streams" in card
    assert "n-gram embeddings by 4 hashes before layer 2; a draft (MTP) head" in card
    assert "reads 64 blocks of 4 tokens and the block not yet complete" in card
    parts = json.loads((resolve("tiny-flash-next") / "evaluation.json").read_text())["parts"]
    share = parts["attention_share"]
    assert f"the chosen blocks hold {share['chosen']:.1%} of dense attention's weight" in card
    assert share["random"] < share["latest"] < share["chosen"] < share["best"]
    assert f"in {parts['mtp_agreement']:.1%} of all places" in card


def test_evaluating_the_directory_gives_the_figures_of_its_report(trained, prepared, capsys):
    arguments = ["--evaluate", str(trained / "model"), "--data", str(prepared.directory)]
    assert main([*arguments, "--set", "data.evaluation_length=64", "--set", "data.evaluation_batch=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    written = json.loads((trained / "model/evaluation.json").read_text())["heldout"]
    assert found["all"]["bits_per_byte"] == pytest.approx(written["all"]["bits_per_byte"], rel=1e-5)
    assert found["documents"].keys() == written["documents"].keys()


def test_a_model_with_another_tokenizer_is_not_compared(trained, prepared, tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["--evaluate", str(tmp_path), "--data", str(prepared.directory)]) == 2
    assert "has another tokenizer than" in capsys.readouterr().err


def test_preparing_prints_what_was_written(tmp_path, documents, monkeypatch, capsys):
    monkeypatch.setattr("hybridjax.training.corpus.load_corpus", lambda cache: documents)
    arguments = ["--prepare-data", str(tmp_path), "--cache", str(tmp_path / "c"), "--vocab-size", "280"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["vocab_size"] == 280 and printed["heldout"]["bytes"] > 0
    assert (tmp_path / "tokenizer.json").exists()
