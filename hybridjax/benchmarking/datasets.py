"""Workloads: which prompts are sent and how many tokens each asks for. No downloads."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hybridjax.benchmarking.conversations import Row, read_rows
from hybridjax.configs.flags import flag
from hybridjax.configs.validation import check, positive_int
from hybridjax.errors import ConfigError

MIN_CONVERSATION_TOKENS = 2

# Text for --dataset-name random without a file; common words, so that most tokenizers agree on lengths.
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had "
    "by word but not what all were we when your can said there use an each which she do how their if will "
    "up other about out many then them these so some her would make like him into time has look two more"
).split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Flags that describe a workload; names and meanings follow SGLang's benchmark."""

    dataset_name: str = flag(
        "random",
        "random: text of random words or of --dataset-path; random-ids: random token ids; "
        "generated-shared-prefix: random ids behind common system prompts; sharegpt, custom: a file",
        choices=["random", "random-ids", "generated-shared-prefix", "sharegpt", "custom"],
    )
    dataset_path: str | None = flag(None, "JSON or JSON Lines file with conversations or prompts")
    num_prompts: int = flag(1000, "requests (generated-shared-prefix: groups x prompts per group)")
    random_input_len: int = flag(1024, "longest random prompt in tokens", aliases=["--random-input"])
    random_output_len: int = flag(1024, "longest random completion in tokens", aliases=["--random-output"])
    random_range_ratio: float = flag(
        0.0, "random lengths are uniform between this share of the longest and the longest; 1: all equal"
    )
    sharegpt_output_len: int | None = flag(None, "completion length (default: that of the file's answer)")
    sharegpt_context_len: int | None = flag(None, "leave out rows with more prompt + completion tokens")
    gsp_num_groups: int = flag(64, "number of system prompts")
    gsp_prompts_per_group: int = flag(16, "requests behind each system prompt")
    gsp_system_prompt_len: int = flag(2048, "tokens of a system prompt")
    gsp_question_len: int = flag(128, "tokens behind the system prompt")
    gsp_output_len: int = flag(256, "completion tokens")
    gsp_range_ratio: float = flag(1.0, "like random-range-ratio, for the three lengths above")
    gsp_ordered: bool = flag(False, "the requests of a group one after the other, not in random order")
    apply_chat_template: bool = flag(False, "write each prompt as a user's turn in the tokenizer's template")
    prompt_suffix: str = flag("", "text behind every prompt that is text")
    tokenize_prompt: bool = flag(False, "send token ids instead of text")
    vocab_size: int | None = flag(None, "range of random token ids if there is no tokenizer")
    seed: int = flag(1, "of prompts, lengths, order and arrival times")

    def __post_init__(self):
        sizes = ("num_prompts", "random_input_len", "random_output_len", "gsp_num_groups")
        sizes += ("gsp_prompts_per_group", "gsp_system_prompt_len", "gsp_question_len", "gsp_output_len")
        optional = ("sharegpt_output_len", "sharegpt_context_len", "vocab_size")
        for name in sizes + tuple(name for name in optional if getattr(self, name) is not None):
            positive_int(name, getattr(self, name))
        for name in ("random_range_ratio", "gsp_range_ratio"):
            check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "in [0, 1]")
        check(self.seed >= 0, "seed", self.seed, "0 or more")


class TextTokenizer(Protocol):
    """What a workload needs of a tokenizer (hybridjax.text)."""

    vocab_size: int
    special_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    @property
    def has_chat_template(self) -> bool: ...

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True) -> str: ...


@dataclasses.dataclass(frozen=True)
class Item:
    """One request of a workload.

    Attributes:
      prompt: text or token ids.
      input_len: tokens of the prompt as counted here; what counts in a report is the server's count.
      output_len: tokens to ask for.
    """

    prompt: str | tuple[int, ...]
    input_len: int
    output_len: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are sent.

    Attributes:
      skipped: rows of the file that were not used, by reason.
    """

    items: tuple[Item, ...]
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)


def load_dataset(config: DatasetConfig, tokenizer: TextTokenizer | None) -> Workload:
    """The workload that the flags describe; the same flags give the same one.

    Raises:
      ConfigError: a tokenizer, a vocabulary size or a file is needed and missing, or the file holds
        nothing that can be used.
    """
    rng = np.random.default_rng(config.seed)
    make: dict[str, Callable[[DatasetConfig, TextTokenizer | None, np.random.Generator], Workload]] = {
        "random": _random_text,
        "random-ids": _random_ids,
        "generated-shared-prefix": _shared_prefix,
        "sharegpt": _from_file,
        "custom": _from_file,
    }
    check(config.dataset_name in make, "dataset_name", config.dataset_name, f"one of {', '.join(make)}")
    return _dressed(make[config.dataset_name](config, tokenizer, rng), config, tokenizer)


def _dressed(workload: Workload, config: DatasetConfig, tokenizer: TextTokenizer | None) -> Workload:
    """The workload with a suffix, in a chat template and as token ids, as far as the flags say so."""
    if config.apply_chat_template:
        workload = as_text(workload, tokenizer)
        if not _needed(tokenizer, "for its chat template").has_chat_template:
            raise ConfigError("apply_chat_template is set; the tokenizer has no chat template")
    items = [_dressed_item(item, config, tokenizer) for item in workload.items]
    return dataclasses.replace(workload, items=tuple(items))


def _dressed_item(item: Item, config: DatasetConfig, tokenizer: TextTokenizer | None) -> Item:
    if not isinstance(item.prompt, str):
        return item
    prompt, special = item.prompt + config.prompt_suffix, True
    if config.apply_chat_template:
        turns = [{"role": "user", "content": prompt}]
        # Templates write the special tokens themselves.
        prompt = _needed(tokenizer, "for its chat template").render_chat(turns, add_generation_prompt=True)
        special = False
    if prompt == item.prompt and not config.tokenize_prompt:
        return item
    ids = _needed(tokenizer, "to count tokens").encode(prompt, special)
    return Item(tuple(ids) if config.tokenize_prompt else prompt, len(ids), item.output_len)


def as_text(workload: Workload, tokenizer: TextTokenizer | None) -> Workload:
    """The same workload with text prompts, for interfaces that take no token ids."""
    items = []
    for item in workload.items:
        if not isinstance(item.prompt, str):
            text = _needed(tokenizer, "to turn token ids into text").decode(item.prompt)
            item = dataclasses.replace(item, prompt=text)
        items.append(item)
    return dataclasses.replace(workload, items=tuple(items))


def random_prompts(
    rng: np.random.Generator, lengths: Sequence[int], vocab_size: int, excluded: frozenset[int] = frozenset()
) -> list[tuple[int, ...]]:
    """Token ids drawn uniformly from the vocabulary without the excluded ones."""
    allowed = np.setdiff1d(np.arange(vocab_size), np.fromiter(excluded, np.int64, len(excluded)))
    if not allowed.size:
        raise ConfigError("every token of the vocabulary is a special one; there is nothing to draw from")
    return [tuple(rng.choice(allowed, length).tolist()) for length in lengths]


def _lengths(rng: np.random.Generator, longest: int, ratio: float, count: int) -> list[int]:
    return rng.integers(max(1, int(longest * ratio)), longest + 1, count).tolist()


def _random_sizes(config: DatasetConfig, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    ratio, count = config.random_range_ratio, config.num_prompts
    inputs = _lengths(rng, config.random_input_len, ratio, count)
    return inputs, _lengths(rng, config.random_output_len, ratio, count)


def _random_ids(config: DatasetConfig, tokenizer: TextTokenizer | None, rng: np.random.Generator) -> Workload:
    inputs, outputs = _random_sizes(config, rng)
    prompts = random_prompts(rng, inputs, *_vocabulary(config, tokenizer))
    return Workload(tuple(map(Item, prompts, inputs, outputs)))


def _random_text(
    config: DatasetConfig, tokenizer: TextTokenizer | None, rng: np.random.Generator
) -> Workload:
    tokenizer = _needed(tokenizer, "for random text (random-ids does with --vocab-size)")
    inputs, outputs = _random_sizes(config, rng)
    texts, skipped = None, {}
    if config.dataset_path is not None:
        rows = read_rows(config.dataset_path)
        texts = [row.prompt for row in rows.rows if isinstance(row.prompt, str) and row.prompt]
        skipped = {"malformed": rows.malformed} if rows.malformed else {}
        if not texts:
            raise ConfigError(f"dataset_path is {config.dataset_path!r}; it holds no text")
    items = []
    for length, output_len in zip(inputs, outputs):
        if texts is None:
            text = " ".join(_WORDS[i] for i in rng.integers(0, len(_WORDS), length))
        else:
            text = texts[int(rng.integers(len(texts)))]
        text = _with_length(tokenizer, text, length)
        items.append(Item(text, len(tokenizer.encode(text)), output_len))
    return Workload(tuple(items), skipped)


def _with_length(tokenizer: TextTokenizer, text: str, length: int) -> str:
    """The text cut, or repeated and cut, to so many tokens with the special ones.

    Text read back can have a token more or less where the cut falls within a word; never more than
    asked for, because a prompt that fills the context must not overflow it.
    """
    special = len(tokenizer.encode("")) if length > 1 else 0
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = (ids * -(-length // max(1, len(ids))))[: max(1, length - special)]
    cut = tokenizer.decode(ids)
    while len(ids) > 1 and len(tokenizer.encode(cut)) > length:
        ids = ids[:-1]
        cut = tokenizer.decode(ids)
    return cut


def _shared_prefix(
    config: DatasetConfig, tokenizer: TextTokenizer | None, rng: np.random.Generator
) -> Workload:
    vocabulary = _vocabulary(config, tokenizer)
    per_group, groups, ratio = config.gsp_prompts_per_group, config.gsp_num_groups, config.gsp_range_ratio
    count = groups * per_group
    systems = random_prompts(rng, _lengths(rng, config.gsp_system_prompt_len, ratio, groups), *vocabulary)
    questions = random_prompts(rng, _lengths(rng, config.gsp_question_len, ratio, count), *vocabulary)
    outputs = _lengths(rng, config.gsp_output_len, ratio, count)
    prompts = [systems[i // per_group] + question for i, question in enumerate(questions)]
    items = [Item(prompt, len(prompt), output) for prompt, output in zip(prompts, outputs)]
    order = range(count) if config.gsp_ordered else rng.permutation(count)
    return Workload(tuple(items[i] for i in order))


def _from_file(config: DatasetConfig, tokenizer: TextTokenizer | None, rng: np.random.Generator) -> Workload:
    """ShareGPT conversations in random order, or the rows of a custom file in their own."""
    if config.dataset_path is None:
        raise ConfigError(f"dataset_name is {config.dataset_name!r}; it needs --dataset-path")
    rows = read_rows(config.dataset_path)
    skipped = {"malformed": rows.malformed, "too_short": 0, "too_long": 0}
    is_sharegpt = config.dataset_name == "sharegpt"
    shortest = MIN_CONVERSATION_TOKENS if is_sharegpt else 1
    order = rng.permutation(len(rows.rows)) if is_sharegpt else range(len(rows.rows))
    items: list[Item] = []
    for index in order:
        if len(items) == config.num_prompts:
            break
        item = _row_item(rows.rows[index], config, tokenizer)
        if min(item.input_len, item.output_len) < shortest:
            skipped["too_short"] += 1
        elif config.sharegpt_context_len and item.input_len + item.output_len > config.sharegpt_context_len:
            skipped["too_long"] += 1
        else:
            items.append(item)
    skipped = {reason: count for reason, count in skipped.items() if count}
    if not items:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no rows"
        raise ConfigError(f"{Path(config.dataset_path)}: holds nothing to send ({why})")
    return Workload(tuple(items), skipped)


def _row_item(row: Row, config: DatasetConfig, tokenizer: TextTokenizer | None) -> Item:
    output_len = config.sharegpt_output_len or row.output_len
    if output_len is None and row.completion is not None:
        output_len = len(_needed(tokenizer, "to count tokens").encode(row.completion, False))
    elif output_len is None:
        output_len = config.random_output_len
    if not isinstance(row.prompt, str):
        return Item(tuple(row.prompt), len(row.prompt), output_len)
    return Item(row.prompt, len(_needed(tokenizer, "to count tokens").encode(row.prompt)), output_len)


def _vocabulary(config: DatasetConfig, tokenizer: TextTokenizer | None) -> tuple[int, frozenset[int]]:
    if config.vocab_size is not None:
        return config.vocab_size, tokenizer.special_ids if tokenizer else frozenset()
    tokenizer = _needed(tokenizer, "for random token ids, or --vocab-size")
    return tokenizer.vocab_size, tokenizer.special_ids


def _needed(tokenizer: TextTokenizer | None, what: str) -> TextTokenizer:
    if tokenizer is None:
        raise ConfigError(f"a tokenizer is needed {what}, and there is none; --help says how to give one")
    return tokenizer
