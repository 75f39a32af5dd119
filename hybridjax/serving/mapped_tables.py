"""N-gram tables in host memory that the device reads in place."""

import logging
from typing import Any

from hybridjax.layers.ngram_embedding import MappedTable
from hybridjax.mapped_memory import MappedMemory, MappingError

logger = logging.getLogger(__name__)


def map_tables(model: Any) -> list[MappedMemory]:
    """Lets a model read its ``host_tables`` itself, if they lie in memory and the device can reach it.

    The model is changed: its tables become parameters. Nothing happens if it has none, if they are mapped
    files, or, with a warning, if the driver refuses.

    Returns:
      What to close when the model is not used any more.
    """
    tables = getattr(model, "host_tables", None) or ()
    if not tables or any(table.codes is None for table in tables):
        return []
    mapped: list[MappedMemory] = []
    try:
        for table in tables:
            mapped.append(MappedMemory(table.codes))
    except MappingError as error:
        logger.warning("%s: n-grams are looked up by the host between two programs, which is slower", error)
        for memory in mapped:
            memory.close()
        return []
    model.use_tables(
        [
            MappedTable(memory.view, table.stored_dtype, table.values, table.dtype)
            for memory, table in zip(mapped, tables)
        ]
    )
    return mapped
