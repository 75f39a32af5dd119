"""Sampling: logits of a step in, one token per row out. Pure functions of static shapes.

A row's token depends on its own logits, settings, seed and position only, never on who else is in the
batch: the noise of a position is ``fold_in(key(seed), position)``, indexed by token id. Positions are
those that the sampled tokens will take, so the first token after a prompt of n has position n.

``sample_reference`` is the definition, one row at a time in float64; ``sample`` is the batched program.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

MAX_DEVICE_STOP_TOKENS = 8
MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5  # below this a row is greedy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """What sampling remembers, by slot. Slot 0 belongs to nobody and takes the writes of padding.

    Fields:
      last_token: int32[S], the token that the slot's next decode step feeds.
      output_counts: int32[S, V], how often each token occurs in the completion.
      prompt_seen: bool[S, V], whether a token occurs in the prompt.
      logit_bias: float32[S, V].
      token_mask: uint32[S, ceil(V / 32)], bits of the tokens that may come next, lowest first; read only
        for rows with ``use_mask``, which write it for every token.

    Only ``last_token`` is valid for every request; the others are valid after ``reset_slot``, which a
    request with penalties or a bias needs at admission and any other can do without.
    """

    last_token: jax.Array
    output_counts: jax.Array
    prompt_seen: jax.Array
    logit_bias: jax.Array
    token_mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """Sampling settings of the B rows of a step; see ``SamplingParams`` for their meaning.

    Fields (all [B], float32 unless noted):
      temperature: below MIN_TEMPERATURE: greedy.
      top_k: int32, 0 for all.
      top_p, min_p
      seed: uint32[B, 2], high and low word of the request's 64-bit seed (see ``seed_words``).
      repetition_penalty, presence_penalty, frequency_penalty
      use_bias: bool, whether the slot's logit_bias is valid.
      use_mask: bool, whether only tokens of the slot's token_mask are sampled.
      want_top: bool, whether the most likely tokens are wanted.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    use_bias: jax.Array
    use_mask: jax.Array
    want_top: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledLogprobs:
    """Log probabilities under the raw distribution (before penalties, temperature and filters).

    Fields:
      sampled: float32[B].
      top_ids, top_logprobs: int32 and float32 [B, MAX_TOP_LOGPROBS], best first, ties by lower id;
        beyond the vocabulary -1 and -inf; meaningless unless some row has ``want_top``.
    """

    sampled: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def init_sampler_state(num_slots: int, vocab: int) -> SamplerState:
    """Zeroed state for ``num_slots`` slots, slot 0 included."""
    return SamplerState(
        last_token=jnp.zeros(num_slots, jnp.int32),
        output_counts=jnp.zeros((num_slots, vocab), jnp.int32),
        prompt_seen=jnp.zeros((num_slots, vocab), bool),
        logit_bias=jnp.zeros((num_slots, vocab), jnp.float32),
        token_mask=jnp.zeros((num_slots, mask_words(vocab)), jnp.uint32),
    )


def mask_words(vocab: int) -> int:
    """Words of a token mask."""
    return -(-vocab // 32)


def neutral_rows(num_rows: int) -> SamplingRows:
    """Greedy rows without filters, penalties or wishes: what padding rows hold. Compiles nothing."""
    zeros = jax.device_put(np.zeros(num_rows, np.float32))
    ones = jax.device_put(np.ones(num_rows, np.float32))
    false = jax.device_put(np.zeros(num_rows, bool))
    return SamplingRows(
        temperature=zeros,
        top_k=jax.device_put(np.zeros(num_rows, np.int32)),
        top_p=ones,
        min_p=zeros,
        seed=jax.device_put(np.zeros((num_rows, 2), np.uint32)),
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        use_bias=false,
        use_mask=false,
        want_top=false,
    )


def seed_words(seed: int) -> tuple[int, int]:
    """High and low 32 bits of a seed in two's complement."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def reset_slot(
    state: SamplerState,
    slot: jax.Array,
    prompt_tokens: jax.Array,
    bias_ids: jax.Array,
    bias_values: jax.Array,
) -> SamplerState:
    """Prepares a slot's penalty counts and bias for a new owner; returns the new state.

    Args:
      slot: int32 scalar.
      prompt_tokens: int32[P] padded with -1; order and repetitions do not matter, so the prompt's
        distinct tokens padded to the vocabulary's size fit any prompt into one program.
      bias_ids, bias_values: int32[K] padded with -1, float32[K].
    """
    vocab = state.output_counts.shape[1]
    seen = jnp.zeros(vocab, bool).at[_drop_negative(prompt_tokens, vocab)].set(True, mode="drop")
    bias = jnp.zeros(vocab, jnp.float32).at[_drop_negative(bias_ids, vocab)].set(bias_values, mode="drop")
    return dataclasses.replace(
        state,
        output_counts=state.output_counts.at[slot].set(0),
        prompt_seen=state.prompt_seen.at[slot].set(seen),
        logit_bias=state.logit_bias.at[slot].set(bias),
    )


def write_masks(token_mask: jax.Array, slots: jax.Array, masks: jax.Array) -> jax.Array:
    """``SamplerState.token_mask`` with ``masks`` uint32[B, W] in the rows of ``slots`` int32[B]."""
    return token_mask.at[slots].set(masks)


def record_tokens(state: SamplerState, slot: jax.Array, tokens: jax.Array, active: jax.Array) -> SamplerState:
    """Makes ``tokens`` int32[B] the last tokens of the active rows' slots and counts them."""
    target = jnp.where(active, slot, 0)
    tokens = jnp.maximum(tokens, 0)
    return dataclasses.replace(
        state,
        last_token=state.last_token.at[target].set(tokens),
        output_counts=state.output_counts.at[target, tokens].add(1),
    )


def sample(
    logits: jax.Array,
    rows: SamplingRows,
    state: SamplerState,
    slot: jax.Array,
    positions: jax.Array,
    stop_tokens: jax.Array,
    min_position: jax.Array,
) -> tuple[jax.Array, SampledLogprobs]:
    """Draws one token per row. Does not change ``state``; call ``record_tokens`` for that.

    Work over the vocabulary that no row needs (penalties, noise, sorting, top tokens) is skipped at
    run time.

    Args:
      logits: float32[B, V].
      slot: int32[B], where each row's penalty counts and bias are.
      positions: int32[B], the position that the sampled token will take.
      stop_tokens: int32[B, 8] padded with -1; not sampled while ``positions < min_position``.
      min_position: int32[B], prompt length + min_tokens.

    Returns:
      Tokens int32[B] and their log probabilities.
    """
    suppressed = jnp.where((positions < min_position)[:, None], stop_tokens, -1)
    special = _penalised(rows) | rows.use_bias | rows.use_mask | rows.want_top
    special |= jnp.any(suppressed >= 0, axis=1)
    random = rows.temperature >= MIN_TEMPERATURE
    normaliser = jax.nn.logsumexp(logits, axis=-1)

    def plain() -> tuple[jax.Array, jax.Array, jax.Array]:
        return _best(logits), *_no_top(logits)

    def adjusted(choose: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        wanted = jnp.any(rows.want_top)
        top = jax.lax.cond(wanted, lambda: _top(logits, normaliser), lambda: _no_top(logits))
        return choose(_adjust(logits, rows, state, slot, suppressed)), *top

    def greedy() -> tuple[jax.Array, jax.Array, jax.Array]:
        return adjusted(_best)

    def drawn() -> tuple[jax.Array, jax.Array, jax.Array]:
        return adjusted(lambda x: _draw(x, rows, positions))

    # A conditional makes a GPU wait for the host, so the plain greedy batch meets only this one.
    kind = jnp.where(jnp.any(random), 2, jnp.any(special).astype(jnp.int32))
    tokens, *top = jax.lax.switch(kind, (plain, greedy, drawn))
    sampled = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - normaliser
    return tokens, SampledLogprobs(sampled, *top)


def score(logits: jax.Array, targets: jax.Array) -> SampledLogprobs:
    """Log probabilities of given tokens and of the most likely ones.

    Args:
      logits: float32[B, V].
      targets: int32[B]; those below 0 give values without meaning.
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    return SampledLogprobs(chosen - normaliser, *_top(logits, normaliser))


def gumbel_noise(seed: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """float32[vocab] noise of one position of a request's stream; ``seed`` is uint32[2]."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)


def sample_reference(
    logits: np.ndarray,
    noise: np.ndarray,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    prompt_seen: np.ndarray | None = None,
    output_counts: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
    forbidden: tuple[int, ...] = (),
) -> int:
    """The definition of ``sample`` for one row, in float64: the token chosen from logits [V]."""
    x = adjusted_reference(
        logits,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        prompt_seen=prompt_seen,
        output_counts=output_counts,
        bias=bias,
        allowed=allowed,
        forbidden=forbidden,
    )
    if temperature < MIN_TEMPERATURE:
        return int(np.argmax(x))
    x = (x - x.max()) / temperature
    kept = filter_reference(x, top_k=top_k, top_p=top_p, min_p=min_p)
    return int(kept[np.argmax(x[kept] + noise[kept])])


def adjusted_reference(
    logits: np.ndarray,
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    prompt_seen: np.ndarray | None = None,
    output_counts: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
    forbidden: tuple[int, ...] = (),
) -> np.ndarray:
    """Logits after the mask of allowed tokens (bool), penalties, bias and forbidden tokens, in this order."""
    x = np.asarray(logits, np.float64).copy()
    if allowed is not None:
        x[~allowed] = -np.inf
    seen = np.zeros(len(x), bool) if prompt_seen is None else prompt_seen
    counts = np.zeros(len(x), int) if output_counts is None else output_counts
    repeated = seen | (counts > 0)
    x = np.where(repeated, np.where(x > 0, x / repetition_penalty, x * repetition_penalty), x)
    x = x - presence_penalty * (counts > 0) - frequency_penalty * counts
    if bias is not None:
        x = x + bias
    x[list(forbidden)] = -np.inf
    return x


def filter_reference(x: np.ndarray, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Ids that may be sampled, ascending: top_k, then top_p of what is left, then min_p.

    Tokens are ranked by logit, equal ones by id. top_p keeps the shortest prefix of the ranking that
    reaches top_p, and at least one token; min_p keeps tokens at least min_p times as likely as the best.
    """
    order = np.argsort(-x, kind="stable")
    if 0 < top_k < len(order):
        order = order[:top_k]
    probability = np.exp(x[order] - x[order[0]])
    probability /= probability.sum()
    if top_p < 1:
        before = np.cumsum(probability) - probability
        order = order[: max(1, int(np.sum(before < top_p)))]
    order = order[np.exp(x[order] - x[order[0]]) >= min_p]
    return np.sort(order)


def _penalised(rows: SamplingRows) -> jax.Array:
    """bool[B]: whether a row reads its slot's penalty counts."""
    return (rows.repetition_penalty != 1) | (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)


def _adjust(
    logits: jax.Array, rows: SamplingRows, state: SamplerState, slot: jax.Array, suppressed: jax.Array
) -> jax.Array:
    """Logits after masks, penalties, bias and suppressed tokens (int32[B, 8], -1 padded), in this order."""

    def penalise(x: jax.Array) -> jax.Array:
        x = jnp.where(rows.use_mask[:, None] & ~_mask_bits(state.token_mask[slot], x.shape[1]), -jnp.inf, x)
        counts = state.output_counts[slot]
        produced = counts > 0
        repeated = produced | state.prompt_seen[slot]
        penalty = rows.repetition_penalty[:, None]
        # A slot without penalties may hold its former owner's counts: neutral settings ignore them.
        x = jnp.where(repeated, jnp.where(x > 0, x / penalty, x * penalty), x)
        x = x - rows.presence_penalty[:, None] * produced.astype(jnp.float32)
        x = x - rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
        return jnp.where(rows.use_bias[:, None], x + state.logit_bias[slot], x)

    x = jax.lax.cond(jnp.any(_penalised(rows) | rows.use_bias | rows.use_mask), penalise, lambda x: x, logits)
    row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    return x.at[row, _drop_negative(suppressed, x.shape[1])].set(-jnp.inf, mode="drop")


def _mask_bits(words: jax.Array, vocab: int) -> jax.Array:
    """bool[B, vocab] of packed masks uint32[B, ceil(vocab / 32)]."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] != 0


def _best(logits: jax.Array) -> jax.Array:
    """int32[B]: the lowest id of each row's maxima."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(adjusted: jax.Array, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """int32[B] tokens: the best of greedy rows, else drawn at the row's temperature from what is kept."""
    vocab = adjusted.shape[1]
    random = rows.temperature >= MIN_TEMPERATURE
    temperature = jnp.maximum(rows.temperature, MIN_TEMPERATURE)[:, None]
    x = (adjusted - jnp.max(adjusted, axis=-1, keepdims=True)) / temperature
    keep = x >= jnp.log(rows.min_p)[:, None]
    ranking = random & (((rows.top_k > 0) & (rows.top_k < vocab)) | (rows.top_p < 1))
    keep = jax.lax.cond(jnp.any(ranking), lambda: keep & _ranked_filter(x, rows), lambda: keep)
    noise = jax.vmap(gumbel_noise, in_axes=(0, 0, None))(rows.seed, positions, vocab)
    drawn = jnp.argmax(jnp.where(keep, x + noise, -jnp.inf), axis=-1)
    return jnp.where(random, drawn.astype(jnp.int32), _best(adjusted))


def _ranked_filter(x: jax.Array, rows: SamplingRows) -> jax.Array:
    """bool[B, V]: what top_k and then top_p keep of logits x, whose row maxima are 0."""
    vocab = x.shape[1]
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    negated, order = jax.lax.sort((-x, ids), dimension=1, is_stable=True, num_keys=1)
    ranked = -negated
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)[:, None]
    weight = jnp.where(ids < k, jnp.exp(ranked), 0.0)
    cumulative = jnp.cumsum(weight, axis=-1)
    inside = cumulative - weight < rows.top_p[:, None] * cumulative[:, -1:]
    inside = (ids < k) & (inside | (rows.top_p >= 1)[:, None])
    last = jnp.maximum(jnp.sum(inside, axis=-1, dtype=jnp.int32, keepdims=True), 1) - 1
    # The kept set is a prefix of the ranking, so its last member describes it in id order.
    lowest = jnp.take_along_axis(ranked, last, axis=1)
    lowest_id = jnp.take_along_axis(order, last, axis=1)
    return (x > lowest) | ((x == lowest) & (ids <= lowest_id))


def _top(logits: jax.Array, normaliser: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids and log probabilities of the MAX_TOP_LOGPROBS most likely tokens of each row."""
    count = min(MAX_TOP_LOGPROBS, logits.shape[1])
    values, ids = jax.lax.top_k(logits, count)
    padding = ((0, 0), (0, MAX_TOP_LOGPROBS - count))
    values = jnp.pad(values - normaliser[:, None], padding, constant_values=-jnp.inf)
    return jnp.pad(ids.astype(jnp.int32), padding, constant_values=-1), values


def _no_top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (logits.shape[0], MAX_TOP_LOGPROBS)
    return jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)


def _drop_negative(ids: jax.Array, vocab: int) -> jax.Array:
    """Moves negative ids out of range, where ``mode="drop"`` ignores them instead of wrapping."""
    return jnp.where(ids < 0, vocab, ids)
