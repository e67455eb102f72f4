"""Rows of float32 times a weight that is held in 16 bits: widened in registers, summed in float32.

    x        float32 [rows, inputs]
    panels   16 bits [panels, inputs, 16 outputs]: the weight's only copy, 2 bytes for each of its numbers
    out      float32 [rows, panels * 16]

Work is 2 operations per row and weight. A decode reads each weight once, so half the bytes are half the time; with many
rows a panel stays in a cache while all rows go through it. Threads divide the panels.

Each sum takes its inputs in their order, block by block: so a result depends neither on the other rows, nor on the
tile, nor on the number of threads, bit for bit.

This is Python that numba compiles (`hack.kernels.prebuild_cpu`): nothing else imports it. It allocates nothing and
raises nothing. Blocks of registers: Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

from numba import carray, njit

from millstream_kernels.cpu import product_vectors
from millstream_kernels.cpu.intrinsics import OPTIONS, SIGNATURE
from millstream_kernels.cpu.task import Format, ProductField

_X, _PANELS, _OUT, _ROWS, _INPUTS, _NUM_PANELS, _FORMAT = (field.value for field in ProductField)
_GROUP_BYTES = 1 << 18  # of panels that stay in a core's cache while all rows go through them
_NUM_FIELDS, _BFLOAT16 = len(ProductField), Format.BFLOAT16.value
_WIDTH = product_vectors.WIDTH


def _pass_of(tile, height, width):
    """The product of rows, as many tiles of `height` as there are, by the panels of whole tiles of `width`."""

    @njit(**OPTIONS)
    def compute(x, panels, out, inputs, outputs, row, rows, first, end):
        """Return the first row that is not computed."""
        while row + height <= rows:
            own, into = x + 4 * row * inputs, out + 4 * row * outputs
            for panel in range(first, end, width):
                weights, place = panels + 2 * _WIDTH * panel * inputs, into + 4 * _WIDTH * panel
                tile(own, 4 * inputs, weights, inputs, place, 4 * outputs)
            row += height
        return row

    return compute


def _product_of(name: str):
    """The product by panels of one format."""
    six, four, two_by_two, two, one_by_four, one = (
        _pass_of(tile, rows, panels)
        for tile, (rows, panels) in zip(product_vectors.TILES_OF[name], product_vectors.TILES, strict=True)
    )

    @njit(**OPTIONS)
    def product(x, panels, out, rows, inputs, outputs, first, end):
        group = max(4, _GROUP_BYTES // (2 * _WIDTH * inputs))
        for start in range(first, end, group):
            stop = min(start + group, end)
            row = six(x, panels, out, inputs, outputs, 0, rows, start, stop)
            row = four(x, panels, out, inputs, outputs, row, rows, start, stop)
            pairs = stop - (stop - start) % 2
            two_by_two(x, panels, out, inputs, outputs, row, rows, start, pairs)
            row = two(x, panels, out, inputs, outputs, row, rows, pairs, stop)
            fours = stop - (stop - start) % 4
            one_by_four(x, panels, out, inputs, outputs, row, rows, start, fours)
            one(x, panels, out, inputs, outputs, row, rows, fours, stop)

    return product


_by_bfloat16, _by_float16 = _product_of("bfloat16"), _product_of("float16")


@njit(SIGNATURE, **OPTIONS)
def packed_product(task, part, step):
    """Compute the share `part` of `step` of a task; see `task.ProductField`."""
    fields = carray(task, _NUM_FIELDS)
    panels = fields[_NUM_PANELS]
    first, end = panels * part // step, panels * (part + 1) // step
    x, weights, out, rows, inputs = fields[_X], fields[_PANELS], fields[_OUT], fields[_ROWS], fields[_INPUTS]
    if fields[_FORMAT] == _BFLOAT16:
        _by_bfloat16(x, weights, out, rows, inputs, panels * _WIDTH, first, end)
    else:
        _by_float16(x, weights, out, rows, inputs, panels * _WIDTH, first, end)
