"""Which tensor-parallel sizes a model allows. One sentence for each that it does not."""

from __future__ import annotations

from millstream_operator.catalog.model_shape import ModelShape

MOST_GPUS = 16  # of one node, to name in a message


def sizes(shape: ModelShape, largest: int) -> list[int]:
    """Sizes worth looking at: what divides the heads, up to `largest`."""
    return [size for size in range(1, min(largest, shape.num_heads) + 1) if shape.num_heads % size == 0]


def tensor_parallel_problem(shape: ModelShape, size: int, group_size: int | None = None) -> str | None:
    """Why `size` ranks cannot share each layer; None when they can.

    `group_size` counts the weights behind one scale of a quantised checkpoint: a shard that cuts a group in two has
    no scale for its half. The same holds for the blocks of a checkpoint in block FP8, in both dimensions. The
    vocabulary never forbids a size: its rows are padded, and the last rank may hold fewer.
    """
    if size == 1:
        return None
    if shape.num_heads % size:
        return f"{size} does not divide the model's {shape.num_heads} attention heads"
    if shape.latent_kv_elements is None and shape.num_kv_heads % size and size % shape.num_kv_heads:
        return f"{size} neither divides the model's {shape.num_kv_heads} KV heads nor is a multiple of them"
    for width in shape.intermediate_sizes:
        if width % size:
            return f"{size} does not divide the intermediate size {width}"
        if group_size and (width // size) % group_size:
            return (
                f"a shard of {width // size} columns ({width} over {size} GPUs) is no multiple of the quantization "
                f"group of {group_size}"
            )
    head_columns = shape.num_heads * shape.head_size // size
    if group_size and head_columns % group_size:
        return f"a shard of {head_columns} attention columns is no multiple of the quantization group of {group_size}"
    return _block_problem(shape, size)


def allowed_sizes(shape: ModelShape, largest: int, group_size: int | None = None) -> str:
    """Return the sizes up to `largest` that the model allows, in words: `1, 2, 4`."""
    found = (size for size in sizes(shape, largest) if tensor_parallel_problem(shape, size, group_size) is None)
    return ", ".join(map(str, found))


def _block_problem(shape: ModelShape, size: int) -> str | None:
    """Why the blocks of block FP8 cannot be shared: projections up are cut by rows, those down by columns."""
    block = shape.quantization.block_size if shape.quantization is not None else None
    if block is None:
        return None
    rows, columns = block
    named = f"the blocks of {rows} × {columns} weights that have one scale"
    for width in shape.intermediate_sizes:
        shard = width // size
        if shard % rows or shard % columns:
            return f"a shard of {shard} columns ({width} over {size} GPUs) cuts {named}"
    heads = shape.num_heads * shape.head_size // size
    if heads % rows or heads % columns:
        return f"a shard of {heads} attention columns cuts {named}"
    if shape.latent_kv_elements is None and (keys := shape.kv_heads_per_rank(size) * shape.head_size) % rows:
        return f"a shard of {keys} key columns cuts {named}"
    return None
