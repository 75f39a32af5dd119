"""Everything that decides a training run, as frozen dataclasses."""

import dataclasses

from hybridjax.configs import MiniCPMSALAConfig, Qwen4ExpConfig
from hybridjax.configs.validation import check, finite_floats, positive_int
from hybridjax.quantization import RULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the prepared data lies, and the held-out evaluation.

    Attributes:
      directory: written by ``python -m hybridjax.train --prepare-data``.
      evaluation_length: tokens per evaluation window; the stride is half of it.
      evaluation_batch: windows evaluated together.
      evaluation_documents: how many held-out documents, evenly spaced; None: all.
    """

    directory: str = ".data/tiny_sala"
    evaluation_length: int = 4096
    evaluation_batch: int = 16
    evaluation_documents: int | None = None

    def __post_init__(self):
        check(
            self.evaluation_length >= 2 and self.evaluation_length % 2 == 0,
            "data.evaluation_length",
            self.evaluation_length,
            "an even number of tokens",
        )
        positive_int("data.evaluation_batch", self.evaluation_batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon for the hidden matrices and AdamW for embeddings, output head and norms.

    Attributes:
      name: "muon" or "adamw".
      learning_rate: peak, of hidden matrices. Muon's updates are scaled to AdamW's usual size, so the
        same value suits both.
      embedding_learning_rate: peak, of everything that is no hidden matrix.
      weight_decay: of hidden matrices and the output head, relative to the learning rate.
      momentum: Muon's.
      beta1, beta2, eps: AdamW's.
      grad_clip: largest global norm of the gradients.
    """

    name: str = "muon"
    learning_rate: float = 3e-3
    embedding_learning_rate: float = 2e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0

    def __post_init__(self):
        finite_floats(self, "optimizer.")
        check(self.name in ("muon", "adamw"), "optimizer.name", self.name, "'muon' or 'adamw'")
        for name in ("learning_rate", "embedding_learning_rate", "grad_clip", "eps"):
            check(getattr(self, name) > 0, f"optimizer.{name}", getattr(self, name), "above 0")
        for name in ("momentum", "beta1", "beta2"):
            check(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "in [0, 1)")
        check(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up to the peak, then "cosine", or "wsd": constant with a linear decay at the end.

    Attributes:
      warmup_steps: steps until the peak.
      decay_share: the share of all steps over which "wsd" decays.
      final_scale: the last step's rate relative to the peak.
    """

    name: str = "wsd"
    warmup_steps: int = 100
    decay_share: float = 0.4
    final_scale: float = 0.02

    def __post_init__(self):
        finite_floats(self, "schedule.")
        check(self.name in ("wsd", "cosine"), "schedule.name", self.name, "'wsd' or 'cosine'")
        check(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "0 or more")
        check(0 < self.decay_share <= 1, "schedule.decay_share", self.decay_share, "in (0, 1]")
        check(0 <= self.final_scale <= 1, "schedule.final_scale", self.final_scale, "in [0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Everything that decides the result of a training run.

    Attributes:
      batch_size: sequences per step of ``sequence_length`` tokens, over all devices.
      long_share: the share of the steps, the last ones, that see sequences of ``long_sequence_length``
        tokens instead and proportionally fewer of them.
      microbatches: parts of a batch whose gradients are added up one after the other.
      compute_dtype: of activations and of the weights that the model sees; masters are float32.
      z_loss: factor on the mean squared log-normaliser.
      mtp_loss, indexer_loss: factors on these losses of models that have them (Qwen4Exp); that of the
        routers' balance is ``model.router_aux_loss_coef``.
      implementation: of ops, as ``op=name,...``, where the automatic choice is not to be trusted.
      remat: recompute each layer in the backward pass.
      quantize_weights: "none", or a rule of ``hybridjax.quantization.RULES``: the matrices that
        ``hybridjax.quantize`` would bring into NVFP4 by that rule have its values in the forward pass, and
        gradients go straight through to the float32 masters. The saved model has these values, too, so
        that ``hybridjax.quantize --method rtn`` with the same rule finds the same codes.
      log_every, eval_every, checkpoint_every: in steps; eval and checkpoint also happen at the end,
        and 0 leaves it at that.
    """

    name: str
    model: MiniCPMSALAConfig | Qwen4ExpConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    batch_size: int = 32
    sequence_length: int = 2048
    long_sequence_length: int = 4096
    long_share: float = 0.0
    microbatches: int = 1
    steps: int = 1000
    seed: int = 0
    compute_dtype: str = "bfloat16"
    z_loss: float = 1e-4
    mtp_loss: float = 0.3
    indexer_loss: float = 1.0
    implementation: str | None = None
    remat: bool = False
    quantize_weights: str = "none"
    log_every: int = 10
    eval_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2

    def __post_init__(self):
        finite_floats(self)
        for name in (
            "batch_size",
            "sequence_length",
            "steps",
            "microbatches",
            "log_every",
            "keep_checkpoints",
        ):
            positive_int(name, getattr(self, name))
        for name in ("eval_every", "checkpoint_every", "z_loss", "mtp_loss", "indexer_loss"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        check(0 <= self.seed < 2**31, "seed", self.seed, "in 0..2**31-1")
        known = ("float32", "bfloat16")
        check(self.compute_dtype in known, "compute_dtype", self.compute_dtype, " or ".join(known))
        rules = ("none", *RULES)
        check(
            self.quantize_weights in rules,
            "quantize_weights",
            self.quantize_weights,
            f"one of {', '.join(rules)}",
        )
        check(0 <= self.long_share <= 1, "long_share", self.long_share, "in [0, 1]")
        longest = max(self.sequence_length, self.long_sequence_length if self.long_steps else 0)
        limit = self.model.max_position_embeddings
        check(longest <= limit, "sequence_length", longest, f"at most max_position_embeddings ({limit})")
        for step in (0, self.steps - 1):
            rows, length = self.shape_at(step)
            check(
                rows > 0 and rows % self.microbatches == 0,
                "batch_size",
                self.batch_size,
                f"such that a batch of {rows} rows of {length} tokens has {self.microbatches} equal parts",
            )

    def loss_weight(self, name: str) -> float:
        """The factor on a loss that the model's ``training_losses`` gives beside the logits."""
        if name == "router" and isinstance(self.model, Qwen4ExpConfig):
            return self.model.router_aux_loss_coef
        return {"mtp": self.mtp_loss, "indexer": self.indexer_loss}[name]

    @property
    def long_steps(self) -> int:
        return round(self.long_share * self.steps)

    def shape_at(self, step: int) -> tuple[int, int]:
        """(rows, tokens per row) of a step's batch, steps counted from 0."""
        if step < self.steps - self.long_steps:
            return self.batch_size, self.sequence_length
        rows = self.batch_size * self.sequence_length // self.long_sequence_length
        return rows, self.long_sequence_length
