"""Packing: what goes into the buffer comes out of it, bit by bit."""

import numpy as np

from hybridjax.serving.packing import Field, Layout
from hybridjax.serving.programs import Bucket


def test_every_dtype_survives_the_buffer():
    layout = Layout(
        (
            Field("a", (2, 3)),
            Field("b", (), "int32"),
            Field("c", (4,), "float32"),
            Field("d", (2, 2), "uint32"),
            Field("e", (3,), "bool"),
        )
    )
    fields = layout.empty()
    fields["a"][:] = [[1, -2, 3], [4, 5, 2**31 - 1]]
    fields["b"][...] = -7
    fields["c"][:] = [0.1, -np.inf, 1e-30, 3e38]
    fields["d"][:] = [[0, 2**32 - 1], [5, 6]]
    fields["e"][:] = [True, False, True]
    out = layout.unpack(fields[""])
    assert layout.size == 6 + 1 + 4 + 4 + 3
    for field in layout.fields:
        np.testing.assert_array_equal(np.asarray(out[field.name]), fields[field.name].astype(field.dtype))
        assert out[field.name].dtype == field.dtype


def test_fields_of_a_bucket_do_not_overlap():
    layout = Bucket("decode", 3, 5, 4).layout
    fields = layout.empty()
    for i, field in enumerate(layout.fields):
        fields[field.name][...] = i + 1
    for i, field in enumerate(layout.fields):
        expected = True if field.dtype == "bool" else i + 1
        assert (fields[field.name].astype(field.dtype) == expected).all(), field.name
