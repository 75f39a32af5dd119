"""Settings of the engine and the server. Flags are these fields with dashes (see configs/flags.py).

Names follow SGLang's server arguments, so that an operator's command line carries over.
"""

import dataclasses
import re
from typing import Any

from hybridjax.configs.flags import flag
from hybridjax.configs.validation import check, positive_int, take
from hybridjax.errors import ConfigError

QUANTIZATIONS = ("none", "fp8", "nvfp4", "modelopt", "modelopt_fp4", "compressed-tensors")


def _secret(help: str) -> Any:
    return dataclasses.field(default=None, repr=False, metadata={"help": help, "secret": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine needs to know; every field has a working default.

    ``None`` means: chosen from the model, the device and the free memory.
    """

    model_path: str = flag(
        "tiny-sala", "checkpoint directory, or the name of a bundled model", aliases=["--model"]
    )
    tokenizer_path: str | None = flag(None, "directory with tokenizer.json (default: the model's)")
    skip_tokenizer_init: bool = flag(False, "serve token ids only, load no tokenizer")
    dtype: str = flag(
        "auto",
        "parameter and activation dtype; auto: the checkpoint's, float32 on a CPU",
        choices=["auto", "float32", "bfloat16", "float16"],
    )
    quantization: str = flag(
        "auto",
        "how the checkpoint must be quantised; auto: as it is",
        choices=["auto", *QUANTIZATIONS],
    )
    nvfp4_activations: str = flag(
        "auto",
        "whether products with NVFP4 weights round their activations, too: never (w4a16), always (w4a4), for "
        "more rows than are faster that way (by-rows); auto: by-rows where tensor cores multiply FP4, w4a16 "
        "elsewhere, where it is emulated, and under deterministic inference",
        choices=["auto", "by-rows", "w4a16", "w4a4"],
    )
    ple_offload: str = flag(
        "auto",
        "where the n-gram table lives: on the device, in host memory, or memory-mapped from the checkpoint; "
        "auto: on the device if it takes at most an eighth of its memory, else host",
        choices=["auto", "device", "host", "mmap"],
    )
    max_image_area: int = flag(
        4 * 2**20,
        "pixels of an image after resizing; larger ones are scaled down (the checkpoint may say less)",
    )
    max_image_bytes: int = flag(
        20 * 2**20, "largest image file in a prompt; in an HTTP body, its base64 also counts as part of that"
    )
    max_image_pixels: int = flag(
        40_000_000, "most pixels (width * height) of all images of a prompt together"
    )
    max_images_per_request: int = flag(16, "most images in a prompt")
    context_length: int | None = flag(None, "longest prompt + completion in tokens (default: the model's)")
    mem_fraction_static: float = flag(
        0.85, "share of the device memory that weights and state pools may take together"
    )
    max_running_requests: int | None = flag(None, "requests that decode together")
    schedule_policy: str = flag(
        "fcfs",
        "order of waiting requests: first come, first served, or longest cached prefix first",
        choices=["fcfs", "lpm"],
    )
    enable_priority_scheduling: bool = flag(
        False, "requests with a higher priority go first and may preempt others"
    )
    queue_timeout: float | None = flag(
        None, "seconds after which a request that still waits for its first step is given up"
    )
    request_timeout: float | None = flag(
        None, "seconds after which a request ends unfinished, if it names no shorter time itself"
    )
    max_prefill_share: float = flag(
        0.45,
        "share of the device's time that prompts may take while others decode, unless more requests wait for "
        "a prompt than decode; 1: prefill and decode steps just alternate",
    )
    max_queued_requests: int = flag(1024, "requests that may wait; more are refused with HTTP 503")
    max_total_tokens: int | None = flag(None, "tokens that the K/V pools hold over all requests")
    chunked_prefill_size: int | None = flag(
        None,
        "prompt tokens computed per prefill step, in whole pages; -1: whole prompts "
        "(default: 2048, on a CPU 512)",
    )
    page_size: int | None = flag(None, "tokens per K/V page (default: the model's sparse block)")
    disable_radix_cache: bool = flag(False, "compute every prompt from its first token")
    max_mamba_cache_size: int | None = flag(
        None,
        "prefix-cache snapshots that fit beside all running requests (default: by free memory)",
    )
    num_continuous_decode_steps: int = flag(4, "decode steps that run per dispatch")
    disable_overlap_schedule: bool = flag(
        False, "wait for each step's tokens before launching the next (for debugging)"
    )
    enable_deterministic_inference: bool = flag(
        False,
        "bit-equal results whatever else runs: every step has the largest compiled shape, so that no sum's "
        "order depends on the batch; slower with few requests or short contexts",
    )
    random_seed: int = flag(0, "seed of requests that name none")
    implementation: str | None = flag(
        None, "op=name[,op=name]: force op implementations (default: the fastest that fits the device)"
    )
    compilation_cache_dir: str | None = flag(
        None, "where compiled programs are kept (default: ~/.cache/hybridjax; '' disables)"
    )
    skip_server_warmup: bool = flag(False, "compile each program at first use, not at start")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, take(vars(self), field.name, field.type))
        check(0 < self.mem_fraction_static <= 1, "mem_fraction_static", self.mem_fraction_static, "in (0, 1]")
        check(
            self.chunked_prefill_size in (None, -1) or self.chunked_prefill_size > 0,
            "chunked_prefill_size",
            self.chunked_prefill_size,
            "a positive number of tokens, or -1",
        )
        for name in ("num_continuous_decode_steps", "max_queued_requests", "max_image_area"):
            positive_int(name, getattr(self, name))
        for name in ("max_image_bytes", "max_image_pixels", "max_images_per_request"):
            positive_int(name, getattr(self, name))
        for name in (
            "context_length",
            "max_running_requests",
            "max_total_tokens",
            "page_size",
            "max_mamba_cache_size",
        ):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        check(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            "dtype",
            self.dtype,
            "auto, float32, bfloat16 or float16",
        )
        for name in ("quantization", "nvfp4_activations"):
            choices = EngineConfig.__dataclass_fields__[name].metadata["choices"]
            check(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(choices)}")
        if self.enable_deterministic_inference and self.nvfp4_activations == "by-rows":
            raise ConfigError(
                "nvfp4_activations is 'by-rows', which depends on the batch; deterministic inference needs "
                "w4a16 or w4a4"
            )
        places = ("auto", "device", "host", "mmap")
        check(self.ple_offload in places, "ple_offload", self.ple_offload, "auto, device, host or mmap")
        check(self.schedule_policy in ("fcfs", "lpm"), "schedule_policy", self.schedule_policy, "fcfs or lpm")
        share = self.max_prefill_share
        check(0.05 <= share <= 1, "max_prefill_share", share, "in 0.05..1")
        for name in ("queue_timeout", "request_timeout"):
            seconds = getattr(self, name)
            check(seconds is None or seconds > 0, name, seconds, "above 0 seconds")
        check(0 <= self.random_seed < 2**31, "random_seed", self.random_seed, "in 0..2**31-1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(EngineConfig):
    """The engine's settings and those of the HTTP front."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30000, "port to listen on (0: any free one)")
    served_model_name: str | None = flag(None, "name in /v1/models (default: last part of model_path)")
    tool_call_parser: str = flag(
        "auto",
        "how the model writes tool calls; auto: as its chat template does",
        choices=["auto", "off", "hermes", "qwen", "qwen25", "qwen3_coder", "llama3", "json"],
    )
    reasoning_parser: str = flag(
        "auto",
        "how the model marks its reasoning, which is kept out of the content; auto: <think> tags if the chat "
        "template knows them",
        choices=["auto", "off", "qwen3", "deepseek-r1"],
    )
    chat_template: str | None = flag(None, "file with a Jinja chat template (default: the tokenizer's)")
    log_level: str = flag("info", "log level", choices=["debug", "info", "warning", "error"])
    drain_timeout: float = flag(30.0, "seconds that running requests get after SIGTERM")
    max_request_bytes: int = flag(16 * 2**20, "largest HTTP body; larger ones get HTTP 413")
    health_check_timeout: float = flag(20.0, "seconds that GET /health_generate waits for its token")
    watchdog_timeout: float = flag(
        300.0, "seconds without progress after which a hung engine ends the process (0: never)"
    )
    disable_web_page: bool = flag(False, "no page at /")
    enable_metrics: bool = flag(False, "answer GET /metrics for Prometheus")
    log_requests: bool = flag(False, "one line of JSON on stderr per finished request, without its text")
    sampling_defaults: str = flag(
        "model",
        "what fields that a request leaves out mean: what the checkpoint's generation_config.json says, "
        "or OpenAI's defaults",
        choices=["model", "openai"],
    )
    api_key: str | None = _secret(
        "key that clients send as 'Authorization: Bearer KEY' (default: the environment's HYBRIDJAX_API_KEY, "
        "which other users of the machine cannot see)"
    )
    admin_api_key: str | None = _secret(
        "key of the operator's routes, which the other one then does not open "
        "(default: the environment's HYBRIDJAX_ADMIN_API_KEY)"
    )

    def __post_init__(self):
        super().__post_init__()
        check(0 <= self.port < 65536, "port", self.port, "in 0..65535")
        check(self.drain_timeout >= 0, "drain_timeout", self.drain_timeout, "0 or more seconds")
        positive_int("max_request_bytes", self.max_request_bytes, most=2**40)
        check(self.watchdog_timeout >= 0, "watchdog_timeout", self.watchdog_timeout, "0 or more seconds")
        timeout = self.health_check_timeout
        check(timeout > 0, "health_check_timeout", timeout, "above 0 seconds")
        for name in ("tool_call_parser", "reasoning_parser"):
            choices = type(self).__dataclass_fields__[name].metadata["choices"]
            check(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(choices)}")
        known = ("model", "openai")
        check(self.sampling_defaults in known, "sampling_defaults", self.sampling_defaults, "model or openai")
        for name in secret_fields(type(self)):
            value = getattr(self, name)
            if value is not None and not re.fullmatch("[!-~]+", value):
                raise ConfigError(f"{name} must be one or more printable ASCII characters without spaces")


def secret_fields(config: type) -> tuple[str, ...]:
    """Names of the fields whose values may not be shown."""
    return tuple(f.name for f in dataclasses.fields(config) if f.metadata.get("secret"))
