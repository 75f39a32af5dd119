"""A small corpus with both sources, a small hybrid model, a stand-in model, checkpoints in memory."""

import random

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.configs import MiniCPMSALAConfig, SparseConfig
from hybridjax.training.config import DataConfig, ExperimentConfig, OptimizerConfig, ScheduleConfig
from hybridjax.training.corpus import CODE, PROSE, Document

VOCABULARY = 300


def make_documents(count: int = 120) -> list[Document]:
    """Short documents, alternately code and prose, with a repetitive grammar."""
    words = "state page slot token window block layer query value key head scale gate norm".split()
    documents = []
    for i in range(count):
        source = random.Random(i)
        if i % 2:
            lines = [
                f"def {source.choice(words)}_{source.choice(words)}({source.choice(words)}):\n"
                f"    return {source.choice(words)} + {source.randrange(1000)}  # {source.randrange(10**6)}"
                for _ in range(12)
            ]
            documents.append(Document(f"stdlib/m{i}.py", CODE, "\n".join(lines) + "\n"))
        else:
            lines = [" ".join(source.choice(words) for _ in range(9)) + "." for _ in range(12)]
            documents.append(Document(f"kjv/book-{i}", PROSE, "\n".join(lines) + "\n"))
    return sorted(documents, key=lambda d: d.path)


class Bigram(nnx.Module):
    """Logits of the next token from the current one alone, through one hidden matrix."""

    def __init__(self, vocab: int, width: int = 16, seed: int = 0):
        rngs = nnx.Rngs(seed)
        init = nnx.initializers.normal(0.3)
        self.embed_tokens = nnx.Param(init(rngs.params(), (vocab, width)))
        self.hidden = nnx.Param(init(rngs.params(), (width, width)))
        self.norm = nnx.Param(jnp.ones((width,)))
        self.lm_head = nnx.Param(init(rngs.params(), (vocab, width)))

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        x = jnp.take(self.embed_tokens[...], input_ids, axis=0)
        x = x + jnp.tanh(x @ self.hidden[...].T)
        return ((x * self.norm[...]) @ self.lm_head[...].T).astype(jnp.float32)


def bigram(config):
    """What Trainer takes as ``model``."""
    return Bigram(config.model.vocab_size)


class MemoryCheckpoints:
    """What Trainer takes as ``checkpoints``: those of all directories, in one dictionary."""

    def __init__(self):
        self.saved = {}

    def __call__(self, directory, keep, config):
        self._key = str(directory)
        return self

    def save(self, step, state):
        self.saved.setdefault(self._key, {})[step] = jax.device_get(state)

    def latest_step(self):
        return max(self.saved.get(self._key, {}), default=None)

    def restore(self, step, like):
        return self.saved[self._key][step]

    def close(self):
        pass


def small_model(**changes) -> MiniCPMSALAConfig:
    """Two layers, one of each kind; selection is active from position 64 on."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "lightning_nh": 2,
        "lightning_nkv": 2,
        "lightning_head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "eos_token_id": (2,),
        "mixer_types": ("minicpm4", "lightning-attn"),
        "sparse_config": SparseConfig(topk=2, window_size=64, dense_len=64),
    }
    return MiniCPMSALAConfig(**{**fields, **changes})


def small_experiment(**changes) -> ExperimentConfig:
    """Six steps on the small corpus, the last two with long sequences."""
    fields = {
        "name": "small",
        "model": small_model(),
        "data": DataConfig(evaluation_length=64, evaluation_batch=4),
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


# What test_trainer.py trains on one device and test_train_cli.py on two.
HYBRID = {
    "optimizer": OptimizerConfig(learning_rate=1e-2),
    "sequence_length": 128,
    "long_share": 0.0,
    "steps": 24,
    "log_every": 4,
}
