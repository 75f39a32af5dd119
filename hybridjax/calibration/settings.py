"""What a quantisation run is asked to do, checked before anything is read."""

import dataclasses
import math

from hybridjax.configs.validation import check, finite_floats, positive_int
from hybridjax.errors import ConfigError
from hybridjax.quantization import GROUP, ORDERINGS, RULES

METHODS = ("gptq", "rtn")
LENGTHS = ("fixed", "log-uniform")
SHORTEST = 64  # tokens that the longest sample must at least have
# Where GPTQ was clearly better than rounding on rows that it had not seen: docs/quantization.md.
EXPERT_ROWS_PER_COLUMN = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How weights are quantised.

    Attributes:
      method: "gptq" or "rtn" (rounding to nearest).
      scale_rule: how the scale of a block is chosen, one of quantization.RULES.
      skip: fnmatch patterns of tensors or modules that stay as they are, beside those of the architecture.
      damping: share of the Hessian's mean diagonal that is added to it.
      activation_ordering: of columns, one of quantization.ORDERINGS.
      min_expert_tokens: rows that an expert must have seen for GPTQ; None: ``EXPERT_ROWS_PER_COLUMN`` for
        each column of its matrix.
      calibration_samples: at most.
      calibration_length: tokens of the longest sample.
      calibration_lengths: "fixed": samples as long as that, or their document; "log-uniform": limits spread
        evenly on a logarithmic scale up to it.
      weights_only: write no input scales, so that only W4A16 is possible.
      group_size: values that share a scale; NVFP4 has 16.

    Raises:
      ConfigError: a value is none of those.
    """

    method: str = "gptq"
    scale_rule: str = "mse"
    skip: tuple[str, ...] = ()
    damping: float = 0.01
    activation_ordering: str = "static"
    min_expert_tokens: int | None = None
    calibration_samples: int = 128
    calibration_length: int = 2048
    calibration_lengths: str = "fixed"
    weights_only: bool = False
    group_size: int = GROUP

    def __post_init__(self):
        for name, allowed in (
            ("method", METHODS),
            ("scale_rule", RULES),
            ("activation_ordering", ORDERINGS),
            ("calibration_lengths", LENGTHS),
        ):
            check(getattr(self, name) in allowed, name, getattr(self, name), f"one of {', '.join(allowed)}")
        finite_floats(self)
        check(0 < self.damping <= 1, "damping", self.damping, "in (0, 1]")
        for name in ("calibration_samples", "calibration_length"):
            positive_int(name, getattr(self, name))
        check(
            self.calibration_length >= SHORTEST,
            "calibration_length",
            self.calibration_length,
            f"at least {SHORTEST}",
        )
        if self.min_expert_tokens is not None:
            positive_int("min_expert_tokens", self.min_expert_tokens)
        check(self.group_size == GROUP, "group_size", self.group_size, f"{GROUP}: NVFP4 has no other")
        if any(not pattern.strip() for pattern in self.skip):
            raise ConfigError("skip holds an empty pattern; it must be a name, which may have * and ?")

    def least_tokens(self, columns: int) -> int:
        """Rows below which an expert's matrix of so many columns is rounded instead."""
        return self.min_expert_tokens or math.ceil(EXPERT_ROWS_PER_COLUMN * columns)
