"""Where the rows of a batch lie in paged caches: what all attention layers share."""

import jax
import jax.numpy as jnp

from hybridjax.batch import Batch
from hybridjax.ops import scatter


def row_pages(batch: Batch, page_size: int) -> tuple[jax.Array, jax.Array]:
    """int32[N] page and column of each row's token; padding rows go to page 0, column 0."""
    positions = jnp.maximum(batch.positions, 0)
    table = batch.page_table[batch.row_sequence]
    page = jnp.take_along_axis(table, (positions // page_size)[:, None], axis=1)[:, 0]
    return jnp.where(batch.positions >= 0, page, 0), positions % page_size


def write_rows(pool: jax.Array, page: jax.Array, column: jax.Array, rows: jax.Array) -> jax.Array:
    """pool [pages, G, page_size, D] with rows [N, G, D] at their pages and columns; page 0 takes none."""
    return scatter.write_rows(pool, page > 0, rows, page, slice(None), column)


def as_pages(rows: jax.Array, page_size: int) -> jax.Array:
    """Rows [pages * page_size, G, D] of whole sequences as pages [pages, G, page_size, D]."""
    return jnp.moveaxis(rows.reshape(-1, page_size, *rows.shape[1:]), 1, 2)


def whole_page_table(sequences: int, pages: int) -> jax.Array:
    """int32[sequences, pages / sequences]: the table of pages that lie in order of position."""
    return jnp.arange(pages, dtype=jnp.int32).reshape(sequences, -1)
