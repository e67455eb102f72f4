"""Attention of prompt chunks over paged keys and values on a CPU, in float32: flash attention on panels of 16 queries.

    a unit    up to 64 queries of one chunk that share a head of keys, four panels; threads take units, large ones first
    a tile    64 tokens, from a multiple of 64 on: scores, cap, weights, and the outputs so far, rescaled
    a panel   sees some tokens of a tile with all its rows, and at the edges some with a part of them: these are masked

Work: 4 * D operations per query, head and token that it sees, in loops of twelve sums (`vectors`). Keys and values of
float32 are read where they lie, by the address of each token; others are made float32 tile by tile. A query's sums are
in the order of its tokens, tile by tile, whatever else is in its panel: it has one result in any company, however its
prompt is cut and whichever thread computes it. A masked token is left out, not multiplied by a weight of 0, so a NaN
that a query does not see does not reach it.

This is Python that numba compiles (`hack.kernels.prebuild_cpu`). It allocates nothing and raises nothing. Flash
attention: Dao 2023 (arXiv 2307.08691).
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from millstream_kernels.cpu.intrinsics import OPTIONS, SIGNATURE, bytes_at, float32s, int32s, int64s, uint16s
from millstream_kernels.cpu.stored_numbers import to_float32
from millstream_kernels.cpu.task import KEY_TILE_TOKENS, OVERHANG_TOKENS, PANEL_ROWS, UNIT_ROWS, Format, PromptField
from millstream_kernels.cpu.vectors import (
    cap,
    into_panel,
    mask,
    out_of_panel,
    scale,
    score4,
    score6,
    soften,
    take,
    weigh1,
    weigh1_seen,
    weigh4,
    weigh4_seen,
    weigh6,
)

# Plain integers: numba takes globals for constants, but no members of an enumeration.
_QUERY, _POOL, _OUTPUT, _BLOCKS, _STARTS, _LENGTHS, _FIRSTS, _UNITS = (field.value for field in list(PromptField)[:8])
_NEXT, _SCRATCH, _SCALES, _FORMAT, _CHUNKS, _NUM_UNITS = (field.value for field in list(PromptField)[8:14])
_SCRATCH_BYTES, _HEADS, _GROUP, _HEAD_SIZE, _SLOTS, _BLOCK_SIZE = (field.value for field in list(PromptField)[14:20])
_WINDOW, _SCALE, _SOFTCAP, _VALUE_HEADS, _VALUE_SIZE = (field.value for field in list(PromptField)[20:])
_NUM_FIELDS, _FLOAT32 = len(PromptField), Format.FLOAT32.value
_PANELS, _HALF = UNIT_ROWS // PANEL_ROWS, PANEL_ROWS // 2
_ROW_BYTES = 4 * PANEL_ROWS
_TILE, _ADDRESSES = KEY_TILE_TOKENS, KEY_TILE_TOKENS + OVERHANG_TOKENS


@njit(**OPTIONS)
def _addresses(places, base, size, group, head, heads, first_token, first_row, last_row):
    """Where the 16 rows from `first_row` on begin in queries or outputs; behind `last_row` it comes again."""
    for lane in range(PANEL_ROWS):
        row = min(first_row + lane, last_row)
        token, member = row // group, row % group
        places[lane] = base + 4 * size * (((first_token + token) * heads + head) * group + member)


@njit(**OPTIONS)
def _read_panel(places, places_at, panel_at, size):
    """Copy 16 rows into a panel."""
    for half in range(2):
        into_panel(places_at + 8 * _HALF * half, panel_at + 4 * _HALF * half, size // 8)
    panel = carray(float32s(panel_at), size * PANEL_ROWS)
    for lane in range(PANEL_ROWS):
        row = carray(float32s(places[lane]), size)
        for number in range(size // 8 * 8, size):
            panel[number * PANEL_ROWS + lane] = row[number]


@njit(**OPTIONS)
def _write_panel(places, places_at, panel_at, size):
    """Copy a panel to 16 rows."""
    for half in range(2):
        out_of_panel(places_at + 8 * _HALF * half, panel_at + 4 * _HALF * half, size // 8)
    panel = carray(float32s(panel_at), size * PANEL_ROWS)
    for lane in range(PANEL_ROWS):
        row = carray(float32s(places[lane]), size)
        for number in range(size // 8 * 8, size):
            row[number] = panel[number * PANEL_ROWS + lane]


@njit(**OPTIONS)
def _weigh(weights, values, outputs, size, count):
    """Add weights times values of `count` tokens that all rows see, to `size` numbers of outputs."""
    number = 0
    while number < size:
        rest = size - number
        if rest >= 6 and rest != 8:
            weigh6(weights, values, 4 * number, outputs + _ROW_BYTES * number, count)
            number += 6
        elif rest >= 4:
            weigh4(weights, values, 4 * number, outputs + _ROW_BYTES * number, count)
            number += 4
        else:
            weigh1(weights, values, 4 * number, outputs + _ROW_BYTES * number, count)
            number += 1


@njit(**OPTIONS)
def _are_finite(values_at, size, count):
    """Whether each number of the values of `count` tokens is: else its product with 0 is NaN."""
    values, total = carray(int64s(values_at), count), np.float32(0)
    for token in range(count):
        value = carray(float32s(values[token]), size)
        for number in range(size):
            total += value[number] * np.float32(0)
    return total == np.float32(0)


@njit(**OPTIONS)
def _weigh_seen(weights, values, outputs, size, count, bounds, first):
    """The same of tokens, from `first` of the tile on, that some rows do not see: a weight there is 0."""
    if count == 0:
        return
    if _are_finite(values, size, count):
        _weigh(weights, values, outputs, size, count)
        return
    for number in range(0, size // 4 * 4, 4):
        weigh4_seen(weights, values, 4 * number, outputs + _ROW_BYTES * number, count, bounds, first)
    for number in range(size // 4 * 4, size):
        weigh1_seen(weights, values, 4 * number, outputs + _ROW_BYTES * number, count, bounds, first)


@njit(**OPTIONS)
def _attend(query, output, state, bounds, scores, keys, values, softcap_at, is_capped, dim, size, places):
    """Take tokens of a tile into a panel. `places`: begin, where the tokens that all rows see begin and end, end."""
    begin, all_begin, all_end, end = places
    token = begin
    while token < end:
        rest = end - token
        if rest >= 5 and rest != 7 and rest != 8:
            score6(query, keys + 8 * token, scores + _ROW_BYTES * token, dim)
            token += 6
        else:
            score4(query, keys + 8 * token, scores + _ROW_BYTES * token, dim)
            token += 4
    if is_capped:
        cap(scores + _ROW_BYTES * begin, end - begin, softcap_at)
    mask(scores + _ROW_BYTES * begin, all_begin - begin, bounds, begin)
    mask(scores + _ROW_BYTES * all_end, end - all_end, bounds, all_end)
    soften(scores + _ROW_BYTES * begin, end - begin, state)
    scale(output, size, state + 2 * _ROW_BYTES)
    _weigh_seen(scores + _ROW_BYTES * begin, values + 8 * begin, output, size, all_begin - begin, bounds, begin)
    _weigh(scores + _ROW_BYTES * all_begin, values + 8 * all_begin, output, size, all_end - all_begin)
    _weigh_seen(scores + _ROW_BYTES * all_end, values + 8 * all_end, output, size, end - all_end, bounds, all_end)


@njit(**OPTIONS)
def _layout(fields, part):
    """Where the parts of a thread's scratch begin; see `task.prompt_scratch_bytes`."""
    dim, size = fields[_HEAD_SIZE], fields[_VALUE_SIZE]
    keys = fields[_SCRATCH] + part * fields[_SCRATCH_BYTES]
    values = keys + 8 * _ADDRESSES
    places = values + 8 * _ADDRESSES
    queries = places + 8 * PANEL_ROWS
    outputs = queries + _PANELS * dim * _ROW_BYTES
    states = outputs + _PANELS * size * _ROW_BYTES
    bounds = states + _PANELS * 3 * _ROW_BYTES
    scores = bounds + 2 * _ROW_BYTES
    factors = scores + _ADDRESSES * _ROW_BYTES
    return keys, values, places, queries, outputs, states, bounds, scores, factors, factors + _ROW_BYTES


@njit(**OPTIONS)
def _start(fields, layout, first_token, head, first_row, last_row):
    """Read the queries of a unit into panels, scaled. Nothing was seen yet."""
    _, _, places_at, queries_at, outputs_at, states_at, _, _, factors_at, _ = layout
    heads, group, dim, size = fields[_HEADS], fields[_GROUP], fields[_HEAD_SIZE], fields[_VALUE_SIZE]
    places, factors = carray(int64s(places_at), PANEL_ROWS), carray(float32s(factors_at), PANEL_ROWS)
    for lane in range(PANEL_ROWS):
        factors[lane] = np.float32(np.int64(fields[_SCALE]).view(np.float64))
    for panel in range((last_row - first_row) // PANEL_ROWS + 1):
        row, panel_at = first_row + panel * PANEL_ROWS, queries_at + panel * dim * _ROW_BYTES
        _addresses(places, fields[_QUERY], dim, group, head, heads, first_token, row, last_row)
        _read_panel(places, places_at, panel_at, dim)
        scale(panel_at, dim, factors_at)
        outputs = carray(float32s(outputs_at + panel * size * _ROW_BYTES), size * PANEL_ROWS)
        for number in range(size * PANEL_ROWS):
            outputs[number] = np.float32(0)
        state = carray(float32s(states_at + 3 * panel * _ROW_BYTES), 2 * PANEL_ROWS)
        for lane in range(PANEL_ROWS):
            state[lane], state[PANEL_ROWS + lane] = -np.float32(np.inf), np.float32(0)
    factors[0] = np.float32(np.int64(fields[_SOFTCAP]).view(np.float64))


@njit(**OPTIONS)
def _find(fields, layout, table, head, tile, begin, count):
    """Where the keys and values of a tile are, from its token `begin` on; those that are not float32 are made so."""
    keys_at, values_at, _, _, _, _, _, _, _, tile_at = layout
    keys, values = carray(int64s(keys_at), _ADDRESSES), carray(int64s(values_at), _ADDRESSES)
    block_size, slots, dim, form = fields[_BLOCK_SIZE], fields[_SLOTS], fields[_HEAD_SIZE], fields[_FORMAT]
    value_heads, pool_heads = fields[_VALUE_HEADS], fields[_HEADS] + fields[_VALUE_HEADS]
    pool_size = pool_heads * slots * dim
    codes, halves = carray(bytes_at(fields[_POOL]), pool_size), carray(uint16s(fields[_POOL]), pool_size)
    slot_scales = carray(uint16s(fields[_SCALES]), pool_heads * slots)
    head_scales = carray(float32s(fields[_SCALES]), pool_heads)
    token = begin
    while token < count:
        inside = (tile + token) % block_size
        run = min(block_size - inside, count - token)
        slot = np.int64(table[(tile + token) // block_size]) * block_size + inside
        for are_values in range(2):
            of_head = head + value_heads * are_values
            start, place = of_head * slots + slot, fields[_POOL]
            if form == _FLOAT32:
                place += 4 * dim * start
            else:
                place = tile_at + 4 * dim * (token + (_TILE if are_values and value_heads else 0))
                if are_values <= value_heads:
                    block = carray(float32s(place), run * dim)
                    to_float32(codes, halves, slot_scales, head_scales, form, of_head, start, dim, block, run)
            addresses = values if are_values else keys
            for number in range(run):
                addresses[token + number] = place + 4 * dim * number
        token += run
    for place in range(count, count + OVERHANG_TOKENS):
        keys[place] = keys[count - 1]


@njit(**OPTIONS)
def _attend_panel(fields, layout, panel, count, low, position, first_row, last_row):
    """Take a tile of `count` tokens into a panel. `low`: the first that the unit sees; `position`: where the chunk
    begins, as a number of the tile, as all tokens here are."""
    keys_at, values_at, _, queries_at, outputs_at, states_at, bounds_at, scores_at, softcap_at, _ = layout
    group, window, dim, size = fields[_GROUP], fields[_WINDOW], fields[_HEAD_SIZE], fields[_VALUE_SIZE]
    row = first_row + panel * PANEL_ROWS
    nearest = position + row // group  # the last token that the first row sees, and that the last row sees
    furthest = position + min(row + PANEL_ROWS - 1, last_row) // group
    begin, end = max(low, nearest - window + 1) if window > 0 else low, min(count, furthest + 1)
    if begin >= end:
        return
    all_begin = min(end, max(begin, furthest - window + 1)) if window > 0 else begin
    all_end = max(all_begin, min(end, nearest + 1))
    if all_begin > begin or all_end < end:
        bounds = carray(float32s(bounds_at), 2 * PANEL_ROWS)
        for lane in range(PANEL_ROWS):
            last = position + min(row + lane, last_row) // group
            bounds[lane] = np.float32(max(last - window + 1, 0) if window > 0 else 0)
            bounds[PANEL_ROWS + lane] = np.float32(min(last, _TILE))
    query, output = queries_at + panel * dim * _ROW_BYTES, outputs_at + panel * size * _ROW_BYTES
    state, softcap = states_at + panel * 3 * _ROW_BYTES, fields[_SOFTCAP] != 0
    places = (begin, all_begin, all_end, end)
    _attend(query, output, state, bounds_at, scores_at, keys_at, values_at, softcap_at, softcap, dim, size, places)


@njit(**OPTIONS)
def _finish(fields, layout, first_token, head, first_row, last_row):
    """Write the outputs of a unit, divided by the sums of their weights."""
    _, _, places_at, _, outputs_at, states_at, _, _, _, _ = layout
    heads, group, size = fields[_HEADS], fields[_GROUP], fields[_VALUE_SIZE]
    places = carray(int64s(places_at), PANEL_ROWS)
    for panel in range((last_row - first_row) // PANEL_ROWS + 1):
        row, panel_at = first_row + panel * PANEL_ROWS, outputs_at + panel * size * _ROW_BYTES
        state = carray(float32s(states_at + 3 * panel * _ROW_BYTES), 3 * PANEL_ROWS)
        for lane in range(PANEL_ROWS):
            state[2 * PANEL_ROWS + lane] = np.float32(1) / state[PANEL_ROWS + lane]
        scale(panel_at, size, states_at + (3 * panel + 2) * _ROW_BYTES)
        _addresses(places, fields[_OUTPUT], size, group, head, heads, first_token, row, last_row)
        _write_panel(places, places_at, panel_at, size)


@njit(SIGNATURE, **OPTIONS)
def paged_prefill(task, part, step):
    """Compute units of a task until none is left; see `task.PromptField`."""
    fields = carray(task, _NUM_FIELDS)
    chunks, group, window, num_units = fields[_CHUNKS], fields[_GROUP], fields[_WINDOW], fields[_NUM_UNITS]
    starts, lengths = carray(int64s(fields[_STARTS]), chunks), carray(int64s(fields[_LENGTHS]), chunks)
    firsts, units = carray(int64s(fields[_FIRSTS]), chunks + 1), carray(int64s(fields[_UNITS]), 4 * num_units)
    layout = _layout(fields, part)
    index = take(fields[_NEXT])
    while index < num_units:
        unit = 4 * index  # read one by one: to unpack a slice, numba checks its length and would raise
        chunk, head, first_row, num_rows = units[unit], units[unit + 1], units[unit + 2], units[unit + 3]
        last_row, length, first_token = first_row + num_rows - 1, lengths[chunk], firsts[chunk]
        position = length - (firsts[chunk + 1] - first_token)  # of the chunk's first token
        table = carray(int32s(fields[_BLOCKS] + 4 * starts[chunk]), -(-length // fields[_BLOCK_SIZE]))
        _start(fields, layout, first_token, head, first_row, last_row)
        end = position + last_row // group + 1
        first = max(0, position + first_row // group - window + 1) if window > 0 else 0
        for tile in range(first // _TILE * _TILE, end, _TILE):
            low, count = max(first - tile, 0), min(_TILE, end - tile)
            _find(fields, layout, table, head, tile, low, count)
            for panel in range((last_row - first_row) // PANEL_ROWS + 1):
                _attend_panel(fields, layout, panel, count, low, position - tile, first_row, last_row)
        _finish(fields, layout, first_token, head, first_row, last_row)
        index = take(fields[_NEXT])
