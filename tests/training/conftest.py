import json

import jax
import pytest
from training_fakes import HYBRID, VOCABULARY, make_documents, small_experiment

from hybridjax.training.data import prepare
from hybridjax.training.trainer import Trainer


@pytest.fixture(scope="session")
def documents():
    return make_documents()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, documents):
    """The small corpus as token files."""
    folder = tmp_path_factory.mktemp("data")
    return prepare(folder / "prepared", folder / "cache", vocab_size=VOCABULARY, documents=documents)


@pytest.fixture(scope="session")
def hybrid(prepared):
    """A trainer of the real model on one device, with Orbax checkpoints."""
    return Trainer(small_experiment(**HYBRID), prepared, devices=jax.devices()[:1])


@pytest.fixture(scope="session")
def uninterrupted(hybrid, tmp_path_factory):
    """The directory and the result of its whole run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, hybrid.run(folder)


@pytest.fixture(scope="session")
def one_device_losses(uninterrupted):
    found = map(json.loads, (uninterrupted[0] / "metrics.jsonl").read_text().splitlines())
    return [x["loss"] for x in found if "loss" in x]
