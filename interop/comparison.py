"""What interop/compare.py compares: logits, the blocks that queries select, greedy tokens and images."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridjax.images import ImageProcessor, patch_layout, rope_positions
from hybridjax.layers import indexed_attention
from hybridjax.ops.index_selection import index_scores

TOLERANCE = {"float32": 2e-4, "bfloat16": 5e-2}
# How far apart, as a share of the largest score, the scores of blocks may lie that rounding can swap.
SCORE_ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2}
OK, TIE, DIFFERS = "ok", "tie", "DIFFERS"


class InteropError(Exception):
    """The comparison cannot be made; the message says why."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: ids with one placeholder per image, and the text they come from."""

    name: str
    ids: tuple[int, ...]
    text: str | None = None
    image: bool = False


@dataclasses.dataclass(frozen=True)
class Picture:
    """The image as hybridjax sees it, and what transformers is told of it."""

    file: Path
    pixels: np.ndarray
    processor: ImageProcessor

    @property
    def request(self) -> dict[str, Any]:
        p = self.processor
        size = {"shortest_edge": p.min_pixels, "longest_edge": p.max_pixels}
        sizes = {"patch_size": p.patch_size, "temporal_patch_size": p.temporal_patch_size}
        means = {"image_mean": list(p.mean), "image_std": list(p.std)}
        return {
            "file": str(self.file.resolve()),
            "processor": {**sizes, "merge_size": p.merge_size, "size": size, **means},
        }


class Answers:
    """What transformers answered for one prompt, checked.

    Attributes:
      ids: int[L]; logits: float32[L, V]; tokens: int[N] greedy; steps: float32[N, V] their logits.
      selected: per indexed layer, bool[T, T] which tokens each query may attend to; T = L + N - 1.
      encoded: the text's ids; rope: int[L, 3]; None where there are none.
    """

    def __init__(self, tensors: Mapping[str, np.ndarray], number: int, new_tokens: int, vocab: int):
        def take(name: str, kind: str, *shape: int | None) -> np.ndarray:
            value = tensors.get(f"{number}.{name}")
            if value is None:
                raise InteropError(f"the answers lack {number}.{name}")
            fits = len(value.shape) == len(shape) and all(
                want in (None, got) for want, got in zip(shape, value.shape)
            )
            if not fits or value.dtype.kind not in kind:
                raise InteropError(f"{number}.{name} is {value.dtype}{list(value.shape)}; expected {shape}")
            return value

        def optional(name: str, *shape: int | None) -> np.ndarray | None:
            return take(name, "i", *shape) if f"{number}.{name}" in tensors else None

        self.ids = take("ids", "i", None)
        length = len(self.ids)
        self.logits = take("logits", "f", length, vocab)
        self.tokens = take("tokens", "i", new_tokens)
        self.steps = take("steps", "f", new_tokens, vocab)
        total = length + new_tokens - 1
        start = f"{number}.selected."
        layers = sorted(int(name.removeprefix(start)) for name in tensors if name.startswith(start))
        self.selected = {
            layer: np.unpackbits(
                take(f"selected.{layer}", "u", total, -(-total // 8)), axis=1, count=total, bitorder="little"
            ).astype(bool)
            for layer in layers
        }
        self.encoded, self.rope = optional("encoded", None), optional("rope", length, 3)
        self.sequence = np.concatenate([self.ids, self.tokens[:-1]]).astype(np.int32)
        self.all_logits = np.concatenate([self.logits, self.steps[1:]])


@dataclasses.dataclass
class Selections:
    """How the selections of the two sides differ, (layer, row) each.

    Attributes:
      exact: blocks with equal scores compete for the last places; nothing says which one wins.
      near: their scores differ by less than rounding can explain.
      faults: they differ for no such reason.
    """

    exact: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    near: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    faults: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @property
    def ties(self) -> list[tuple[int, int]]:
        return sorted(self.exact + self.near)


def settle_ties(
    ours: jax.Array,
    theirs: jax.Array,
    scores: jax.Array,
    positions: jax.Array,
    block_size: int,
    rounding: Any,
) -> tuple[jax.Array, ...]:
    """Where two selections differ, and whether ties explain it.

    Args:
      ours, theirs: bool[R, blocks] listed blocks of each query; scores: float32[R, blocks], >= 0.
      positions: int32[R]; block_size: tokens per block.
      rounding: difference of scores, as a share of the row's largest, that counts as a tie.

    Returns:
      bool[R] each: exact ties (all swapped blocks are complete and have equal scores), near ties (equal up
      to ``rounding``), and faults (they differ in any other way).
    """
    ours_only, theirs_only = ours & ~theirs, theirs & ~ours
    complete = jnp.arange(ours.shape[1]) < ((positions + 1) // block_size)[:, None]
    swap = jnp.sum(ours_only, 1) == jnp.sum(theirs_only, 1)
    swap = swap & ~jnp.any((ours_only | theirs_only) & ~complete, 1)

    def span(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (
            jnp.min(jnp.where(chosen, scores, jnp.inf), 1),
            jnp.max(jnp.where(chosen, scores, -jnp.inf), 1),
        )

    (our_low, our_high), (their_low, their_high) = span(ours_only), span(theirs_only)
    gap = jnp.maximum(our_high - their_low, their_high - our_low)
    differ = jnp.any(ours_only | theirs_only, 1)
    exact = differ & swap & (gap == 0)
    near = differ & swap & ~exact & (gap <= rounding * span(complete)[1])
    return exact, near, differ & ~exact & ~near


@contextlib.contextmanager
def _their_ties(
    theirs: Sequence[jax.Array], follow: jax.Array, rounding: jax.Array
) -> Iterator[list[tuple[jax.Array, ...]]]:
    """While a model is traced: with ``follow``, queries whose selection is a tie select ``theirs``.

    All else is computed as ever, so what still differs then is not for the ties. Yields what settle_ties
    finds, layer by layer.
    """
    found, layers = [], iter(theirs)
    select = indexed_attention.select_index_blocks

    def tied(q, index_keys, page_table, rows, positions, *, block_size, top_k, tiled):
        chosen = select(
            q, index_keys, page_table, rows, positions, block_size=block_size, top_k=top_k, tiled=tiled
        )[:, 0]
        wanted = next(layers)
        count = wanted.shape[1]
        index = jnp.arange(count, dtype=jnp.int32)
        # One column more takes the padding.
        ours = jnp.zeros((len(wanted), count + 1), bool)
        ours = ours.at[jnp.arange(len(wanted))[:, None], jnp.where(chosen < 0, count, chosen)].set(True)[
            :, :-1
        ]
        scores = index_scores(q, index_keys[page_table[0]].reshape(count, -1))
        found.append(settle_ties(ours, wanted, scores, positions, block_size, rounding))
        ids = jnp.sort(jnp.where(wanted, index, count), axis=1)[:, : chosen.shape[1]]
        tie = follow & (found[-1][0] | found[-1][1])
        return jnp.where(tie[:, None], jnp.where(ids < count, ids, -1), chosen)[:, None]

    if theirs:
        indexed_attention.select_index_blocks = tied
    try:
        yield found
    finally:
        indexed_attention.select_index_blocks = select


@nnx.jit
def _run(model, ids, inputs, theirs, follow, rounding):
    with _their_ties(theirs, follow, rounding) as found:
        logits = model(ids, **inputs)[0]
    return logits, found


class TeacherForced:
    """Calls of a model on sequences as long as one that transformers answered for.

    Args:
      model: the model.
      answers: of transformers.
      inputs: what the model takes beside the ids, for each token: features, feature_index, rope_positions.
      rounding: see SCORE_ROUNDING.
    """

    def __init__(self, model: Any, answers: Answers, inputs: Mapping[str, Any], rounding: float):
        self._model, self._answers, self._rounding = model, answers, np.float32(rounding)
        self.total = len(answers.sequence)
        # Few lengths mean few compilations; later rows change no earlier one.
        self._length = 64
        while self._length < self.total:
            self._length *= 2
        self._inputs = {k: v if k == "features" else self._padded(v, 1) for k, v in inputs.items()}
        theirs = []
        for tokens in answers.selected.values():
            tokens = self._padded(self._padded(tokens, 0), 1)
            ratio = _text_config(model).indexer_compress_ratio
            theirs.append(jnp.asarray(tokens.reshape(self._length, -1, ratio).any(-1)))
        self._theirs = tuple(theirs)

    def __call__(self, sequence: np.ndarray) -> np.ndarray:
        """float32[T, V]: what the model makes of T ids."""
        return self._call(sequence, False)[0]

    def with_their_ties(self) -> tuple[np.ndarray, Selections]:
        """The same for the answers' own sequence, where selections that are ties go transformers' way."""
        logits, found = self._call(self._answers.sequence, True)
        lists = Selections()
        for layer, kinds in zip(self._answers.selected, found):
            for kind, rows in zip((lists.exact, lists.near, lists.faults), kinds):
                kind += [(layer, int(row)) for row in np.flatnonzero(rows[: self.total])]
        return logits, lists

    def _call(self, sequence: np.ndarray, follow: bool) -> tuple[np.ndarray, Any]:
        ids = jnp.asarray(self._padded(sequence[None], 1), jnp.int32)
        logits, found = _run(self._model, ids, self._inputs, self._theirs, np.bool_(follow), self._rounding)
        return np.asarray(logits)[: self.total], jax.tree.map(np.asarray, found)

    def _padded(self, x: Any, axis: int) -> np.ndarray:
        x = np.asarray(x)
        widths = [(0, self._length - self.total if i == axis else 0) for i in range(x.ndim)]
        return np.pad(x, widths)


def _text_config(model: Any) -> Any:
    return getattr(model, "text_config", model.config)


def relative_errors(got: Any, want: Any) -> np.ndarray:
    """Per row, |got - want| / |want| (2-norms)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def agreement(got: Any, want: Any) -> int:
    """How many tokens at the start are equal."""
    differ = np.flatnonzero(np.asarray(got) != np.asarray(want))
    return int(differ[0]) if len(differ) else len(want)


def compare_prompt(
    model: Any, prompt: Prompt, answers: Answers, engine_tokens: Sequence[int] | None, inputs: dict[str, Any],
    *, tolerance: float, rounding: float,
) -> dict[str, Any]:  # fmt: skip
    """One row of the table.

    Args:
      engine_tokens: the engine's greedy tokens, None if it was not run.
      inputs: keyword arguments of the model for the whole sequence.
      tolerance: on the relative error of a row of logits; rounding: see SCORE_ROUNDING.
    """
    length, new_tokens = len(answers.ids), len(answers.tokens)
    want, notes = answers.all_logits, []
    call = TeacherForced(model, answers, inputs, rounding)
    plain = call(answers.sequence)
    errors = relative_errors(plain, want)
    over = ~(errors <= tolerance)
    selections, replay = Selections(), errors
    if answers.selected:
        logits, selections = call.with_their_ties()
        replay = relative_errors(logits, want)
    unexplained = np.flatnonzero(~(replay <= tolerance))
    first_tie = min((row for _, row in selections.ties), default=len(want))
    result = OK
    if over.any():
        result = TIE
    if len(unexplained) or selections.faults:
        result = DIFFERS
        if len(unexplained):
            notes.append(f"rows beyond the tolerance, ties aside: {_some(unexplained)}")
        if selections.faults:
            notes.append(f"(layer, row) that select other blocks without a tie: {_some(selections.faults)}")
    if selections.ties:
        notes.append(f"(layer, row) where the last place of a selection is a tie: {_some(selections.ties)}")
    if answers.encoded is not None and answers.encoded.tolist() != list(prompt.ids):
        result = DIFFERS
        notes.append("the tokenizers give different ids")

    def explained(who: str, tokens: Sequence[int], count: int) -> bool:
        """Says why the token after ``count`` equal ones is another one."""
        row, theirs, mine = length - 1 + count, int(answers.tokens[count]), int(tokens[count])
        logits = want[row].astype(np.float64)
        gap, best = logits[theirs] - logits[mine], np.sort(logits)[::-1]
        # Two logits of a row move apart by at most sqrt(2) times the row's error.
        near = gap <= 2**0.5 * tolerance * np.linalg.norm(logits)
        tied = first_tie <= row and replay[row] <= tolerance and int(plain[row].argmax()) == mine
        why = "near-tie" if near else "after a tie of a selection" if tied else "UNEXPLAINED"
        notes.append(
            f"greedy token {count} ({who}): {mine} instead of {theirs}; logits there {gap:.3g} apart, "
            f"the best two {best[0] - best[1]:.3g}: {why}"
        )
        return near or tied

    greedy = {}
    candidates = {"model": plain[length - 1 :].argmax(-1), "engine": engine_tokens}
    for who, tokens in candidates.items():
        if tokens is None:
            continue
        greedy[who] = agreement(tokens, answers.tokens)
        if greedy[who] < new_tokens:
            fine = explained(who, tokens, greedy[who])
            if who == "engine" and not _follows(call, answers.ids, tokens, tolerance):
                fine = False
                notes.append("the engine's own continuation is not what the model prefers")
            result = DIFFERS if not fine or result == DIFFERS else TIE
    return {
        "prompt": prompt.name,
        "tokens": length,
        "max_error": float(errors.max()),
        "median_error": float(np.median(errors)),
        "rows": len(errors),
        "rows_over": int(over.sum()),
        "argmax_equal": int((plain[:length].argmax(-1) == answers.logits.argmax(-1)).sum()),
        "ties_exact": len(selections.exact),
        "ties_near": len(selections.near),
        "max_error_ties_aside": float(replay.max()),
        "greedy": {"new_tokens": new_tokens, **greedy},
        "result": result,
        "notes": notes,
    }


def _follows(call: TeacherForced, ids: np.ndarray, tokens: Sequence[int], tolerance: float) -> bool:
    """Whether every token is what the model prefers after those before it, near-ties aside."""
    sequence = np.concatenate([ids, tokens[:-1]]).astype(np.int32)
    logits = call(sequence)[len(ids) - 1 :]
    gap = logits.max(-1) - logits[np.arange(len(tokens)), np.asarray(tokens)]
    return bool((gap <= 2**0.5 * tolerance * np.linalg.norm(logits, axis=-1)).all())


def _some(items: Any, most: int = 8) -> str:
    shown = ", ".join(str(tuple(map(int, i)) if isinstance(i, tuple) else int(i)) for i in items[:most])
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")


def compare_image(
    model: Any, picture: Picture, tensors: Mapping[str, np.ndarray], tolerance: float
) -> tuple[dict[str, Any], jax.Array, tuple[int, int, int]]:
    """The row of the image itself, its features and its grid."""
    patches, grid = picture.processor(picture.pixels)
    vision, notes, result = model.config.vision_config, [], OK
    layout = patch_layout([grid], side=vision.grid_side, merge_size=vision.spatial_merge_size)
    features = model.visual(
        jnp.asarray(patches, model.dtype), layout.positions, (layout.taps, layout.weights), layout.frame
    )
    missing = [n for n in ("pixel_values", "image_grid_thw", "features") if f"image.{n}" not in tensors]
    if missing:
        raise InteropError(f"the answers lack image.{missing[0]}")
    theirs, want = tensors["image.pixel_values"], tensors["image.features"]
    worst = float("inf")
    error = np.full(1, np.inf)
    if tensors["image.image_grid_thw"].tolist() != [list(grid)]:
        notes.append(f"grid {grid} instead of {tensors['image.image_grid_thw'].tolist()}")
    elif theirs.shape == patches.shape and want.shape == features.shape:
        worst = float(np.abs(patches - theirs).max())
        error = relative_errors(features, want)
    # A step of one of 255 levels, seen through the usual deviation of 0.5, is 0.0078.
    if not (worst < 1e-5 and error.max() <= tolerance):
        result = DIFFERS
    row = {
        "image": picture.file.name,
        "patches": len(patches),
        "features": len(features),
        "max_pixel_difference": worst,
        "max_error": float(error.max()),
        "median_error": float(np.median(error)),
        "result": result,
        "notes": notes,
    }
    return row, features, grid


def image_arguments(
    config: Any, answers: Answers, features: jax.Array, grid: tuple[int, int, int]
) -> tuple[dict[str, Any], list[str]]:
    """The model's arguments for a sequence with the image, and in which inputs the two sides differ."""
    merge, token = config.vision_config.spatial_merge_size, config.image_token_id
    total = len(answers.sequence)
    rope, delta = rope_positions(answers.ids, [grid], token, merge)
    wrong = (
        []
        if answers.rope is not None and np.array_equal(rope, answers.rope)
        else ["the rotary positions differ"]
    )
    later = np.arange(len(rope), total)[:, None] + delta
    rope = np.concatenate([rope, np.broadcast_to(later, (len(later), 3))]).astype(np.int32)
    placeholder = np.pad(answers.ids == token, (0, total - len(answers.ids)))
    index = np.where(placeholder, np.cumsum(placeholder) - 1, -1).astype(np.int32)
    return {"features": features, "feature_index": index[None], "rope_positions": rope[None]}, wrong
