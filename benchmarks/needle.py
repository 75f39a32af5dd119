"""Needle test: is a made-up word that a long text gives once known when the text asks for it at its end?

    python -m benchmarks.needle [--model tiny-sala] [--filler text|random] [--lengths 512,1024,2048,4096]

Each answer is scored in three texts of the same length: ``with`` the word in its place, with ``another`` word
in its place, and ``without`` any (only filler). The first less the second is what the model found, the
second less the third what the form of such a word is worth, the third is chance. Scores, each token given
those before it: nats per answer token of the model's own distribution; how many tokens are the model's first
choice; and how many of those stand in a row at the front, which is what greedy decoding would write. Filler:
pieces of held-out documents, or noise.
"""

import argparse
import dataclasses
import queue
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import environment, finish
from benchmarks.long_context import make_engine
from hybridjax.checkpoints import resolve
from hybridjax.serving import Engine, RequestOutput, SamplingParams
from hybridjax.text import load_tokenizer
from hybridjax.training.config import DataConfig
from hybridjax.training.data import PreparedData, load_prepared

DEPTHS = (0.0, 0.5, 0.9)
QUESTIONS = {  # what asks, the answer, what ends it in its place
    "prose": ("\nThe secret word is", " {}", ".\n"),
    "code": ("\nSECRET_WORD =", ' "{}', '"\n'),
}
TEXTS = ("with", "another", "without")


def random_word(rng: np.random.Generator) -> str:
    """Four syllables, one of 20 million words."""
    return "".join(rng.choice(list("bcdfgklmnprst")) + rng.choice(list("aeiou")) for _ in range(4))


def noise(rng: np.random.Generator, length: int, vocab_size: int) -> np.ndarray:
    """int32[length] tokens drawn evenly, special ones left out."""
    return rng.integers(5, vocab_size - 8, length).astype(np.int32)


def piece(rng: np.random.Generator, length: int, data: PreparedData) -> np.ndarray:
    """int32[length] tokens from somewhere in a held-out document that is long enough."""
    fitting = [d for d in data.documents if d.tokens - 2 >= length]
    if not fitting:
        raise SystemExit(f"no held-out document has {length} tokens")
    document = fitting[rng.integers(len(fitting))]
    start = document.token_start + 1 + rng.integers(document.tokens - 1 - length)
    return data.heldout[start : start + length].astype(np.int32)


def compose(filler: np.ndarray, needle: np.ndarray | None, depth: float, end: np.ndarray) -> np.ndarray:
    """The filler with the needle in place of as many of its tokens, and of its last ones the end.

    Args:
      filler: int32[N]; needle, end: together no longer; None: no needle.
      depth: where the needle begins, in parts of what is left beside needle and end.
    """
    out = np.concatenate([filler[: len(filler) - len(end)], end])
    if needle is not None:
        first = int(depth * (len(filler) - len(end) - len(needle)))
        out[first : first + len(needle)] = needle
    return out


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one answer: nats per token, tokens, those that are the first choice, and those before any other."""

    nats: float
    tokens: int
    right: int
    in_a_row: int

    @classmethod
    def of(cls, answer: np.ndarray, logprobs: Sequence[float], best: Sequence[int]) -> "Score":
        right = answer == np.asarray(best)
        return cls(float(np.mean(logprobs)), len(answer), int(right.sum()), int(np.cumprod(right).sum()))


class Scorer:
    """Scores the last tokens of texts."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __call__(self, text: np.ndarray, count: int) -> Score:
        """The score of the last ``count`` tokens."""
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=1)
        events: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._engine.submit(text.tolist(), params, events.put)
        scores = None
        while True:
            event = events.get(timeout=600)
            scores = event.prompt_logprobs or scores
            if event.finish_reason is not None:
                break
        if scores is None:
            raise SystemExit(f"a text was not scored: {event.error}")
        last = [entry for entry in scores[-count:] if entry is not None]
        return Score.of(text[-count:], [e.logprob for e in last], [e.top[0][0] for e in last])


def measure(
    score: Callable[[np.ndarray, int], Score],
    encode: Callable[[str], np.ndarray],
    fill: Callable[[np.random.Generator, int], np.ndarray],
    length: int,
    question: str,
    trials: int,
) -> Iterator[dict]:
    """A row of results for each depth.

    Args:
      score: as Scorer.
      encode: text -> int32 tokens.
      fill: (generator, length) -> filler.
      length: tokens of a text, question and answer included.
      question: a name in QUESTIONS.
      trials: fillers, each with words of its own.
    """
    ask, say, close = QUESTIONS[question]
    found: dict[tuple[str, float], list[Score]] = {(t, depth): [] for t in TEXTS for depth in DEPTHS}
    for trial in range(trials):
        rng = np.random.default_rng([length, zlib.crc32(question.encode()), trial])
        filler = fill(rng, length)
        answer, other = (encode(say.format(random_word(rng))) for _ in range(2))
        needle, decoy = (np.concatenate([encode(ask), word, encode(close)]) for word in (answer, other))
        end = np.concatenate([encode(ask), answer])
        without = score(compose(filler, None, 0, end), len(answer))
        for depth in DEPTHS:
            found["without", depth].append(without)
            found["with", depth].append(score(compose(filler, needle, depth, end), len(answer)))
            found["another", depth].append(score(compose(filler, decoy, depth, end), len(answer)))
    for depth in DEPTHS:
        yield {"length": length, "question": question, "depth": depth, **summary(found, depth)}


def summary(found: dict[tuple[str, float], list[Score]], depth: float) -> dict:
    """Means and sums over the trials of a depth, and what ``with`` has over ``another``."""
    trials = found["with", depth]
    row: dict = {"trials": len(trials), "tokens": sum(s.tokens for s in trials)}
    for text in TEXTS:
        scores = found[text, depth]
        row[text] = {
            "nats": float(np.mean([s.nats for s in scores])),
            "right": sum(s.right for s in scores),
            "in_a_row": sum(s.in_a_row for s in scores),
        }
    gain = np.array([a.nats - b.nats for a, b in zip(trials, found["another", depth], strict=True)])
    row["gain"] = float(gain.mean())
    row["gain_error"] = float(gain.std(ddof=1) / len(gain) ** 0.5) if len(gain) > 1 else None
    return row


def shown(row: dict) -> str:
    """The row in a line."""
    texts = "; ".join(
        f"{t} {row[t]['nats']:6.2f} {row[t]['right']:3d} {row[t]['in_a_row']:3d}" for t in TEXTS
    )
    error = "" if row["gain_error"] is None else f" +- {row['gain_error']:.2f}"
    return (
        f"{row['length']:5d}, {row['question']:5s} at {row['depth']:3.0%}, {row['tokens']:3d}: {texts}; "
        f"found {row['gain']:+.2f}{error} nats a token"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-sala")
    parser.add_argument("--filler", choices=("text", "random"), default="text")
    parser.add_argument("--questions", default="prose,code")
    parser.add_argument("--lengths", default="512,1024,2048,4095", help="of texts; one token follows")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--data", default=DataConfig.directory, help="of prepared training data")
    args = parser.parse_args()
    print(environment(), flush=True)
    lengths = [int(n) for n in args.lengths.split(",")]
    tokenizer = load_tokenizer(resolve(args.model))

    def encode(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)

    rows = []
    engine, _ = make_engine(args.model, max(lengths) + 1, 0, 1, deterministic=True)
    with engine:
        if args.filler == "text":
            data = load_prepared(Path(args.data))
            fill = lambda rng, length: piece(rng, length, data)  # noqa: E731
        else:
            fill = lambda rng, length: noise(rng, length, engine.info.vocab_size)  # noqa: E731
        for length in lengths:
            for question in args.questions.split(","):
                for row in measure(Scorer(engine), encode, fill, length, question, args.trials):
                    rows.append(row)
                    print(shown(row), flush=True)
    finish("needle", rows, model=args.model, filler=args.filler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
