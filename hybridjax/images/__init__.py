"""Images on the host: from data URLs to patches, grids and rotary positions; NumPy and Pillow only."""

from hybridjax.images.data_url import ImageLimits, content_hash, decode_image, load_image, parse_data_url
from hybridjax.images.grid import Grid, PatchLayout, patch_count, patch_layout, token_count
from hybridjax.images.positions import cache_ids, expand_placeholders, rope_positions
from hybridjax.images.processor import ImageProcessor

__all__ = [
    "Grid",
    "ImageLimits",
    "ImageProcessor",
    "PatchLayout",
    "cache_ids",
    "content_hash",
    "decode_image",
    "expand_placeholders",
    "load_image",
    "parse_data_url",
    "patch_count",
    "patch_layout",
    "rope_positions",
    "token_count",
]
