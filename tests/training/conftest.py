import pytest
from training_fakes import VOCABULARY, make_documents, small_model

from hybridjax.training.data import prepare
from hybridjax.training.experiments import DataConfig, ExperimentConfig, ScheduleConfig


@pytest.fixture(scope="session")
def documents():
    return make_documents()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, documents):
    """The small corpus as token files."""
    folder = tmp_path_factory.mktemp("data")
    return prepare(folder / "prepared", folder / "cache", vocab_size=VOCABULARY, documents=documents)


@pytest.fixture
def experiment(prepared):
    """Makes a six-step experiment on the small corpus; keyword arguments replace fields."""

    def make(**changes) -> ExperimentConfig:
        fields = {
            "name": "small",
            "model": small_model(),
            "data": DataConfig(directory=str(prepared.directory), evaluation_length=64, evaluation_batch=4),
            "schedule": ScheduleConfig(warmup_steps=2),
            "batch_size": 4,
            "sequence_length": 64,
            "long_sequence_length": 128,
            "long_share": 1 / 3,
            "steps": 6,
            "compute_dtype": "float32",
            "log_every": 2,
        }
        return ExperimentConfig(**{**fields, **changes})

    return make
