# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     notebook_metadata_filter: kernelspec,language_info.name,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # tiny-sala, from the inside
#
# MiniCPM-SALA (arXiv [2602.11761](https://arxiv.org/abs/2602.11761)) mixes two kinds of attention. In some
# layers it is sparse: InfLLM-V2 (arXiv [2509.24663](https://arxiv.org/abs/2509.24663)) lets every query
# read a few blocks of 64 keys with softmax attention. In the others it is linear: SimpleGLA, the
# recurrence of Lightning Attention-2 (arXiv [2401.04658](https://arxiv.org/abs/2401.04658)), keeps one
# matrix per head that fades at a fixed rate.
#
# hybridjax bundles `tiny-sala`, a model of that architecture with 5.5 million parameters, trained on the
# Python standard library and some old prose. It is small enough to look at everything it does. This
# notebook asks, in order:
#
# 1. What is it made of?
# 2. How well does it predict a text, and how does that change along the text?
# 3. Which blocks does a sparse layer select?
# 4. How fast does a linear layer forget?
# 5. Does running with caches compute the same thing?
# 6. What does it write?
# 7. What are the selected blocks worth?
#
# Figures quoted in the text were made with the library of Python 3.12; another version's text moves them
# a little. What must hold everywhere is asserted.

# %%
import dataclasses
import doctest
import inspect
import json

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import hybridjax
from hybridjax import checkpoints, ops
from hybridjax.batch import TILE, Batch, Mode, RecurrentCache
from hybridjax.ops.simple_gla import decay_slopes

plt.rcParams.update(
    {
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": "medium",
        "legend.frameon": False,
    }
)


def table(header, rows):
    """Prints aligned columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


# %% [markdown]
# ## 1. Structure
#
# Parameters and state are separate: a layer owns weights only, and what a sequence has accumulated is
# passed in and returned (`docs/design.md`). So the two costs can be listed side by side. A sparse layer
# stores keys and values of every token, and 5 compressed keys per block of 64, by which it selects. A
# linear layer stores the same 32 × 32 matrix per head after ten tokens and after thousands.

# %%
directory = checkpoints.resolve("tiny-sala")
model = hybridjax.load_model("tiny-sala", dtype="float32")
tokenizer = hybridjax.load_tokenizer(directory)
config, sparse = model.config, model.config.sparse_config


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def parameters(module):
    return size(nnx.state(module, nnx.Param))


# One page (64 tokens of a sparse layer) and one slot (one sequence in a linear layer), shapes only.
caches = jax.eval_shape(lambda: model.init_state(num_pages=1, num_slots=1))
rows = []
for i, (kind, layer, cache) in enumerate(zip(config.mixer_types, model.layers, caches)):
    floats = size(cache)
    state = f"{floats:,} per sequence" if isinstance(cache, RecurrentCache) else f"{floats // 64} per token"
    rows.append((i, kind, f"{parameters(layer.mixer):,}", f"{parameters(layer.mlp):,}", state))
table(("layer", "kind", "mixer", "MLP", "floats of state"), rows)
print(f"\nembedding and head {parameters(model.embed_tokens) + parameters(model.lm_head):,},", end=" ")
print(f"all parameters {parameters(model):,}")

# %% [markdown]
# ## 2. Bits per byte along a text
#
# The text is the beginning of the source of `doctest`, one of the documents that were held out of
# training, as the record of the model's evaluation confirms. Calling the model is teacher forcing: the
# logits of position $p$ predict token $p + 1$ from the true tokens $0 \dots p$. A *probe* is a function
# that the model shows intermediate values to, by name; sections 3 and 4 look at them.

# %%
evaluation = json.loads((directory / "evaluation.json").read_text())
assert "stdlib/doctest.py" in evaluation["heldout"]["documents"]

LENGTH = 3200
tokens = np.asarray(tokenizer.encode(inspect.getsource(doctest))[:LENGTH], np.int32)
target_bytes = np.array([len(tokenizer.token_bytes(token)) for token in tokens[1:]])


@nnx.jit
def teacher_forced(model, ids):
    seen = {}
    return model(ids[None], probe=seen.__setitem__)[0], seen


def bits(logits, ids):
    """Bits that each token after the first costs."""
    chosen = jnp.take_along_axis(logits[:-1], ids[1:, None], axis=1)[:, 0]
    return np.asarray(jax.nn.logsumexp(logits[:-1], axis=1) - chosen, np.float64) / np.log(2)


logits, seen = teacher_forced(model, tokens)
cost = bits(logits, tokens)
print(f"{len(tokens):,} tokens, {target_bytes.sum():,} bytes")
print(f"{cost.mean():.3f} bits per token, {cost.sum() / target_bytes.sum():.3f} bits per byte")

# %%
position = np.arange(1, LENGTH)
window = 128
local_cost, local_bytes = (np.convolve(x, np.ones(window), "valid") for x in (cost, target_bytes))
fig, ax = plt.subplots(figsize=(8, 3.2))
ax.plot(position[window - 1 :], local_cost / local_bytes, color="0.72", lw=1, label=f"last {window} tokens")
running = np.cumsum(cost) / np.cumsum(target_bytes)
ax.plot(position[15:], running[15:], color="C0", lw=2, label="running mean")
ax.axvline(sparse.dense_len, color="C3", ls=":", lw=1)
ax.text(sparse.dense_len + 30, 3.0, f"dense_len = {sparse.dense_len}", color="C3")
ax.set(xlabel="position in tokens", ylabel="bits per byte", xlim=(0, LENGTH), ylim=(0, 3.3))
ax.set_title("doctest.py: what the model pays per byte")
ax.legend(loc="upper right")
plt.show()

# %% [markdown]
# The running mean falls from above 2 to about 1.2: the model finds out what it reads, and code repeats
# itself. The local curve is rugged because the text is: a docstring, a list of names, classes. Nothing
# happens at `dense_len`, where selection begins.

# %% [markdown]
# ## 3. The blocks that a query selects
#
# A query at position $q$ in block $b = \lfloor q / 64 \rfloor$ is dense while $q + 1 <$ `dense_len`.
# Later it reads up to `topk + window_size / 64` = 12 blocks. Six of them are forced: the first block
# (`init_blocks`) and the local window $b - 4 \dots b$. The other six are *chosen* by score. Every query
# head gives each compressed key (the mean of 32 neighbouring keys) a softmax weight, whose normaliser
# comes from coarser keys (the means of 128). The weights are summed over the query heads of a key/value
# head, and a block scores the largest sum among the compressed keys that overlap it. So all query heads
# of one key/value head share a list, and the two key/value heads of a layer choose independently.
#
# Up to position 767 there are no more than 12 blocks, so that the first 768 queries read everything
# whatever `dense_len` says. The probe shows the list of each query, ascending and padded with -1.

# %%
block = sparse.block_size
blocks = -(-LENGTH // block)
sparse_layers = [i for i, kind in enumerate(config.mixer_types) if kind == "minicpm4"]
groups = config.num_key_value_heads
query = np.arange(LENGTH)
current = query // block
dense = query + 1 < sparse.dense_len
index = np.arange(blocks)
forced = (index < sparse.init_blocks) | (index >= current[:, None] - sparse.local_blocks)
forced &= index <= current[:, None]


def as_mask(ids):
    """Lists of block ids [queries, groups, listed] as bool[queries, groups, blocks]."""
    ids = np.asarray(ids)
    return (ids[..., None] == index).any(axis=-2)


attended = {i: as_mask(seen[f"layers.{i}.block_ids"][:LENGTH]) for i in sparse_layers}
chosen = {i: mask & ~forced[:, None] & ~dense[:, None, None] for i, mask in attended.items()}
for mask in attended.values():
    assert (mask & ~(index <= current[:, None])[:, None]).sum() == 0  # no block of the future
    assert (mask | ~forced[:, None]).all()  # every forced block is there
    assert (mask.sum(axis=-1) == np.where(dense, current + 1, np.minimum(current + 1, 12))[:, None]).all()

# %%
shown = sparse_layers[1:]
colours = ["white", "#d9d9d9", "#9ecae1", "#d7301f"]
names = ["dense: all blocks", "forced: first block, local window", "chosen by score"]
image = {"cmap": ListedColormap(colours), "vmin": 0, "vmax": 3, "interpolation": "nearest"}
extent = (0, LENGTH, -0.5, blocks - 0.5)
fig, axes = plt.subplots(len(shown), groups, figsize=(10, 7.5), sharex=True, sharey=True)
for i, row in zip(shown, axes):
    for g, ax in enumerate(row):
        picture = attended[i][:, g] * np.where(dense[:, None], 1, np.where(forced, 2, 3))
        ax.imshow(picture[::4].T, origin="lower", aspect="auto", extent=extent, **image)
        ax.axvline(sparse.selected_blocks * block, color="0.3", ls=":", lw=1)
        ax.set_title(f"layer {i}, key/value head {g}")
    row[0].set_ylabel("block id (64 tokens each)")
    row[0].text(
        sparse.selected_blocks * block + 40, blocks - 2, "from here on blocks\nare left out", va="top"
    )
for ax in axes[-1]:
    ax.set_xlabel("query position (every fourth is drawn)")
fig.legend([Patch(facecolor=c) for c in colours[1:]], names, loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# Do key/value heads agree? Over the queries that leave something out, the table gives the share of a
# query's six chosen blocks that another head chooses too; the share that the same head already chose one
# query earlier; what either share would be for uniform random choices; and the block chosen most often.

# %%
contested = query >= sparse.selected_blocks * block
free = sparse.selected_blocks - sparse.init_blocks - sparse.local_blocks - 1
heads = [(i, g) for i in sparse_layers for g in range(groups)]
choice = np.stack([chosen[i][contested, g] for i, g in heads])  # [head, query, block]
assert (choice.sum(axis=-1) == free).all()
common = np.einsum("aqb,cqb->ac", choice.astype(float), choice.astype(float)) / (choice.shape[1] * free)
chance = (free / (current[contested] + 1 - (sparse.selected_blocks - free))).mean()
stays = (choice[:, 1:] & choice[:, :-1]).sum(axis=-1).mean(axis=-1) / free
often = choice.mean(axis=1)

names = [f"{i}.{g}" for i, g in heads]
rows = []
for n, name in enumerate(names):
    shared = ["" if m == n else f"{common[n, m]:.2f}" for m in range(len(heads))]
    favourite = f"{often[n].argmax()} ({often[n].max():.0%})"
    rows.append((name, *shared, f"{stays[n]:.2f}", favourite))
table(("layer.head", *names, "one query earlier", "favourite block"), rows)
print(f"\nchance: {chance:.2f}")
for b in np.unique(often.argmax(axis=1)):
    print(f"\nblock {b} begins:\n{tokenizer.decode(tokens[b * block : (b + 1) * block])[:120]}")

# %% [markdown]
# Within layers 0 and 3 the two heads agree little more than chance, and each token chooses largely anew:
# the streaks of the map are blocks that many queries choose now and then. In layer 7 the heads agree on
# most blocks and stay with them, and choices follow the text: late queries hardly read its first half.
# The favourites are what a reader would look up too: how the module is used, and what it imports.
#
# **The position rule.** The released code switches a whole call from dense to sparse by the call's
# length, so there the way a prompt is cut into calls changes what its queries read. hybridjax answers
# every query as a decode step with $q + 1$ cached tokens would: $q$ alone decides between dense and
# sparse, and only key windows that end at or before $q$ are scored.
#
# To see that this makes teacher forcing and decoding agree, the same tokens now go through caches:
# chunks of 256 first, then 128 decode steps of one token. A `Batch` says which rows belong to which
# positions, pages and slot. The pages are handed out in random order and everything starts as NaN, so
# that only what was written can be read.

# %%
pages = blocks
page_table = jnp.asarray(np.random.default_rng(0).permutation(np.arange(1, pages + 1))[None], jnp.int32)
SLOT = 1  # page 0 and slot 0 belong to nobody


def prefill_batch(start, end):
    """Rows start .. end - 1 of the text; both on the grid of 64."""
    return Batch(
        tokens=jnp.asarray(tokens[start:end]),
        positions=jnp.arange(start, end, dtype=jnp.int32),
        tile_sequence=jnp.zeros(((end - start) // TILE,), jnp.int32),
        context_length=jnp.array([end], jnp.int32),
        slot=jnp.array([SLOT], jnp.int32),
        page_table=page_table,
        logit_rows=jnp.zeros((1,), jnp.int32),
        mode=Mode.PREFILL,
    )


def decode_batch(p):
    """One row: the token at position p."""
    return Batch(
        tokens=jnp.asarray(tokens[p : p + 1]),
        positions=jnp.array([p], jnp.int32),
        tile_sequence=jnp.zeros((0,), jnp.int32),
        context_length=jnp.array([p + 1], jnp.int32),
        slot=jnp.array([SLOT], jnp.int32),
        page_table=page_table,
        logit_rows=jnp.zeros((1,), jnp.int32),
        mode=Mode.DECODE,
    )


@nnx.jit
def cached_step(model, batch, state):
    seen = {}
    hidden, state = model.forward(batch, state, seen.__setitem__)
    return model.logits(hidden), state, {i: seen[f"layers.{i}.block_ids"] for i in sparse_layers}


CHUNK, CUT = 256, 3072
steps = [prefill_batch(start, start + CHUNK) for start in range(0, CUT, CHUNK)]
steps += [decode_batch(p) for p in range(CUT, LENGTH)]
state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), model.init_state(pages + 1, 2))
cached_logits, listed = [], []
for batch in steps:
    out, state, ids = cached_step(model, batch, state)
    cached_logits.append(out)
    listed.append(ids)

for i in sparse_layers:
    cached = np.concatenate([as_mask(ids[i]) for ids in listed])
    assert (cached[CUT:] == attended[i][CUT:]).all(), "a decode step selected other blocks"
    print(f"layer {i}: {(cached == attended[i]).all(axis=(1, 2)).sum():,} of {LENGTH:,} lists are the same")

# %% [markdown]
# ## 4. How a linear layer forgets
#
# Per head $h$ with its slope $s_h$, keys $k$, values $v$ and queries $q$ (normed and rotated):
#
# $$S_t = e^{-s_h} S_{t-1} + k_t v_t^\top, \qquad o_t = q_t^\top S_t / \sqrt{d}.$$
#
# The slopes are not learned. They are the geometric series $2^{-8/n}, 2^{-16/n}, \dots, 2^{-8}$ over the
# $n$ heads, in every layer the same; with $n = 8$ the half-lives $\ln 2 / s_h$ double from head to head.
# Token $j$ contributes $e^{-s_h (t - j)} (q_t \cdot k_j) v_j / \sqrt{d}$ to $o_t$. Relative to
# $|q_t| |k_j| |v_j| / \sqrt{d}$ its size is $e^{-s_h (t - j)} |\cos|$ of the angle between query and key:
# at most $e^{-s_h (t - j)}$.

# %%
slopes = decay_slopes(config.lightning_nh)
half_life = np.log(2) / slopes
linear = config.mixer_types.index("lightning-attn")
layer = model.layers[linear]
scale = config.lightning_scale_value


@nnx.jit
def queries_keys_values(layer, hidden):
    """What the layer's recurrence reads: each [tokens, heads, d]."""
    mixer = layer.mixer
    q, k, v, _ = mixer.in_proj.split(layer.input_norm(hidden))
    q, k, v = (x.reshape(len(x), config.lightning_nh, -1) for x in (q, k, v))
    positions = jnp.arange(len(hidden), dtype=jnp.int32)
    q, k = (ops.rotary(x, positions, theta=config.rope_theta) for x in (mixer.q_norm(q), mixer.k_norm(k)))
    return q, k, v


q, k, v = queries_keys_values(layer, seen[f"layers.{linear}.hidden"][:LENGTH])


@jax.jit
def impulse(q, k, v):
    """|contribution| [tokens, distance, head] of the first token of each sequence [tokens, distance, ...]."""
    v = v.at[:, 1:].set(0.0)
    out, _ = ops.simple_gla_whole(q, k, v, jnp.asarray(slopes), scale=scale)
    return jnp.linalg.norm(out, axis=-1)


REACH = 512
distance = np.arange(REACH)
decay = np.exp(-slopes * distance[:, None])
# Equal unit keys and queries: nothing but the decay is left.
unit = jnp.zeros((1, REACH, config.lightning_nh, config.lightning_head_dim)).at[..., 0].set(1.0)
pure = np.asarray(impulse(unit, unit, unit))[0] / scale
assert np.allclose(pure, decay, rtol=1e-4, atol=1e-7)
# 64 tokens of the text, and the 512 queries that follow each.
starts = np.linspace(0, LENGTH - REACH, 64).astype(int)
rows = starts[:, None] + distance
norms = [jnp.linalg.norm(x, axis=-1) for x in (q[rows], k[starts][:, None], v[starts][:, None])]
real = np.asarray(impulse(q[rows], k[rows], v[rows]) / (scale * norms[0] * norms[1] * norms[2]))
assert (real <= decay * 1.001 + 1e-6).all()
real = real.mean(axis=0)

# %%
shades = plt.get_cmap("viridis")(np.linspace(0, 0.92, config.lightning_nh))
fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
for h, colour in enumerate(shades):
    axes[0].plot(distance, pure[:, h], color=colour, label=f"{h}: {half_life[h]:.1f}")
    axes[1].plot(distance, real[:, h], color=colour)
    axes[1].plot(distance, decay[:, h], color=colour, ls=":", lw=1)
axes[0].set(yscale="log", ylim=(1e-4, 1.5), ylabel="relative size of the contribution")
axes[0].set_title("impulse with equal keys and queries")
axes[1].set_title(f"layer {linear} on the text, mean of {len(starts)} tokens (dotted: bound)")
for ax in axes:
    ax.set(xlabel="distance in tokens", xlim=(0, REACH))
fig.legend(loc="outside right center", title="head: half-life\nin tokens")
plt.show()

# %% [markdown]
# Left: the op alone draws $e^{-s d}$. Right: on the text contributions start at a tenth of the bound, the
# mean $|\cos|$ between a query and a nearby key, and then follow the slopes; those of the slow heads
# fade faster at first, because far keys also point elsewhere. After 512 tokens the slowest head has
# faded to 14 % by decay alone. What is much older is left to the sparse layers.
#
# The other side of forgetting is how much a state holds. Its norm depends on whether tokens add up
# or cancel: with $a$ the root mean square of $|k_t| |v_t|$, unrelated contributions give about
# $a / \sqrt{1 - e^{-2s}}$, equal ones $a / (1 - e^{-s})$.


# %%
@jax.jit
def state_norms(k, v):
    """Frobenius norm of every head's state after each token, and the last states."""

    def step(state, token):
        k, v = token
        state = jnp.exp(-slopes)[:, None, None] * state + k[:, :, None] * v[:, None, :]
        return state, jnp.linalg.norm(state, axis=(1, 2))

    zero = jnp.zeros((config.lightning_nh, k.shape[-1], v.shape[-1]))
    return jax.lax.scan(step, zero, (k, v))[::-1]


norm, last = state_norms(k, v)
inside = np.asarray(seen[f"layers.{linear}.state"][0])
assert np.abs(last - inside).max() < 1e-4 * np.abs(inside).max()  # the very state that the model has

single = np.asarray(jnp.linalg.norm(k, axis=-1) * jnp.linalg.norm(v, axis=-1))
relative = np.asarray(norm) / np.sqrt((single**2).mean(axis=0))
unrelated, equal = 1 / np.sqrt(1 - np.exp(-2 * slopes)), 1 / (1 - np.exp(-slopes))
settled = relative[1000:].mean(axis=0)
rows = zip(range(len(slopes)), slopes, half_life, unrelated, settled, equal)
table(
    ("head", "slope", "half-life", "if unrelated", "measured norm / a", "if equal"),
    [(h, f"{s:.4f}", *(f"{x:.1f}" for x in rest)) for h, s, *rest in rows],
)

# %%
fig, ax = plt.subplots(figsize=(8, 3.6))
for h, colour in enumerate(shades):
    smooth = np.convolve(relative[:, h], np.ones(32) / 32, "valid")
    ax.plot(np.arange(31, LENGTH), smooth, color=colour, lw=1.2, label=f"{h}: {half_life[h]:.1f}")
ax.set(xlabel="position in tokens", ylabel="norm of the state / a", xlim=(0, LENGTH), yscale="log")
ax.set_yticks([1, 2, 5, 10, 20], labels=["1", "2", "5", "10", "20"])
ax.minorticks_off()
ax.set_title(f"layer {linear}: size of each head's state along the text (mean of 32 tokens)")
fig.legend(loc="outside right center", title="head: half-life\nin tokens")
plt.show()

# %% [markdown]
# Each state saturates within a few half-lives and then only follows the text, in fast heads at the size of
# unrelated contributions, in slow ones at up to 1.6 times that. What came many half-lives ago has left no
# trace.

# %% [markdown]
# ## 5. Cached equals teacher-forced
#
# The run of section 3 also kept its logits. Chunks, pages, slots and single steps must not change what
# the model says; in float32 what is left is rounding.

# %%
difference = np.abs(np.asarray(jnp.concatenate(cached_logits) - logits))
print(f"logits range over {float(jnp.ptp(logits)):.0f}; largest difference", end=" ")
print(f"in prefill {difference[:CUT].max():.1e}, in decode {difference[CUT:].max():.1e}")
assert difference.max() < 1e-3

for i, cache in enumerate(state):
    if isinstance(cache, RecurrentCache):
        whole = seen[f"layers.{i}.state"][0]
        gap = float(jnp.abs(cache.state[SLOT] - whole).max() / jnp.abs(whole).max())
        print(f"layer {i}: final state differs by {gap:.1e} of its largest entry")
        assert gap < 1e-4

# %% [markdown]
# ## 6. Generation
#
# `hybridjax.Engine` is the serving engine without HTTP: the same caches, run by a scheduler. Its programs
# have static shapes; a short context, two requests at a time and small prefill steps keep them few, and
# `skip_server_warmup` compiles only those that are used. A model of this size writes the shape of code
# and of scripture, and no sense.

# %%
code = 'def is_palindrome(text):\n    """Return True if text reads the same backwards."""'
verse = "And it came to pass, when the king heard these words, that he"
greedy = hybridjax.SamplingParams(max_tokens=96, temperature=0)
sampled = hybridjax.SamplingParams(max_tokens=96, temperature=0.7, top_p=0.95, seed=1)
with hybridjax.Engine(
    "tiny-sala",
    context_length=1024,
    max_running_requests=2,
    chunked_prefill_size=128,
    skip_server_warmup=True,
    compilation_cache_dir="",  # keep no compiled programs on disk
) as engine:
    results = engine.generate([code, verse], [greedy, sampled])

for name, prompt, result in zip(("greedy", "temperature 0.7, top_p 0.95"), (code, verse), results):
    print(f"--- {name}: {len(result.token_ids)} tokens, finish_reason {result.finish_reason!r}")
    print(prompt + result.text + "\n")

# %% [markdown]
# Greedy decoding must choose what teacher forcing finds most likely.

# %%
known = len(results[0].prompt_token_ids)
full = np.asarray(results[0].prompt_token_ids + results[0].token_ids, np.int32)
padded = np.zeros(LENGTH, np.int32)  # the length for which the program exists; causality hides the rest
padded[: len(full)] = full
rows = np.asarray(teacher_forced(model, padded)[0])[known - 1 : len(full) - 1]
shortfall = rows.max(axis=1) - rows[np.arange(len(rows)), full[known:]]
print(f"logit of the chosen token below the highest one: at most {shortfall.max():.1e}")
assert shortfall.max() < 1e-3

# %% [markdown]
# ## 7. What the chosen blocks are worth
#
# Which blocks are read is configuration, not weights, so the same parameters can run under other
# settings: `topk = 2` leaves the forced blocks only, and `dense_len` beyond the text makes every layer
# dense. The model was trained with `topk = 8`; no other setting gets the chance to adapt, so these
# figures are sensitivities, not a comparison of architectures.
#
# Only positions from 768 on are counted. The standard error is that of the difference to the model as it
# is, from the differences of pieces of 64 tokens.


# %%
def with_sparse(model, **changes):
    """The same parameters under another ``sparse_config``."""
    changed = dataclasses.replace(model.config.sparse_config, **changes)
    config = dataclasses.replace(model.config, sparse_config=changed)
    other = nnx.eval_shape(lambda: type(model)(config, dtype=model.dtype, rngs=nnx.Rngs(0)))
    nnx.update(other, nnx.state(model, nnx.Param))
    return other


first = sparse.selected_blocks * block
tail_bytes = target_bytes[first:].sum()


def compare(name, other_cost):
    """A row of the table: bits per byte of the tail, difference, its standard error."""
    change = (other_cost - cost)[first:]
    pieces = np.array([piece.sum() for piece in np.split(change, range(block, len(change), block))])
    error = pieces.std(ddof=1) * np.sqrt(len(pieces)) / tail_bytes
    return name, other_cost[first:].sum() / tail_bytes, change.sum() / tail_bytes, error


settings = {
    "topk = 2: forced blocks only": {"topk": 2},
    "topk = 4": {"topk": 4},
    "topk = 8: as trained": {},
    f"dense_len = {LENGTH + 1}: all blocks": {"dense_len": LENGTH + 1},
}
costs = {
    name: bits(teacher_forced(with_sparse(model, **s), tokens)[0], tokens) for name, s in settings.items()
}
assert np.abs(costs["topk = 8: as trained"] - cost).max() < 1e-3
results = [compare(name, other) for name, other in costs.items()]
table(
    ("setting", "bits per byte", "change", "standard error"),
    [(name, f"{value:.4f}", f"{change:+.4f}", f"{error:.4f}") for name, value, change, error in results],
)

# %% [markdown]
# Beside the forced blocks, the six chosen ones are worth 0.03 bits per byte, 3 % and more than three
# standard errors; with two of them more than half of that is won. Reading everything would be better by
# 0.005, less than two standard errors: at this length, little of use is left in the blocks that a query
# leaves out.
