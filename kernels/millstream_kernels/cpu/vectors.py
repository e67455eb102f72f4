"""Loops over vectors of 16 rows, as LLVM instructions: what attention of prompts spends its time in.

    panel      [number][16 rows]: one number of 16 queries, or one score or weight of each, is two vectors of 8
    scores     of 6 or 4 tokens at a time: 12 or 8 sums in registers, each number of a key times the queries' vectors
    outputs    of 6, 4 or 1 numbers at a time: 12, 8 or 2 sums, each number of a value times the weights' vectors

numba's loops become vectors where LLVM finds them, and sums are reordered. Here each row has one place in a vector and
each of its sums one order, so the result of a row does not depend on the rows next to it.

All arguments are int64; addresses are of float32 unless said. Only the compiler imports this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from millstream_kernels.cpu.intrinsics import EXP2, LEAST_EXPONENT, LOG2_E

_SINGLE, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _WHOLE = ir.VectorType(_SINGLE, 8), ir.VectorType(_INT32, 8)
_ROW_BYTES, _HALF_BYTES = 64, 32  # of one number of a panel, and of one vector

Value = Any  # an instruction or a constant of llvmlite, which has no types
Body = Callable[[Value, Sequence[Value]], Sequence[Value]]


def intrinsic_of(write: Callable[..., None], num_arguments: int) -> Any:
    """An intrinsic without a result that becomes what `write(builder, *arguments)` writes."""
    names = ("typing_context", *(f"argument{index}" for index in range(num_arguments)))

    def of_types(typing_context: Any, *arguments: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            write(builder, *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * len(arguments)), code

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    of_types.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # numba asks for names
    return intrinsic(of_types)


def load(builder: ir.IRBuilder, address: Value, kind: ir.Type) -> Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=8 if kind is _INT64 else 4)


def store(builder: ir.IRBuilder, number: Value, address: Value) -> None:
    builder.store(number, builder.inttoptr(address, number.type.as_pointer()), align=4)


def plus(builder: ir.IRBuilder, number: Value, more: int) -> Value:
    return builder.add(number, _INT64(more)) if more else number


def times(builder: ir.IRBuilder, number: Value, factor: int) -> Value:
    return builder.mul(number, _INT64(factor))


def _of(number: Any) -> Value:
    return ir.Constant(_VECTOR, [ir.Constant(_SINGLE, float(number))] * 8)


def _splat(builder: ir.IRBuilder, number: Value) -> Value:
    """A vector of one number eight times."""
    kind = ir.VectorType(number.type, 8)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, _INT32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(_WHOLE, [0] * 8))


def _function(builder: ir.IRBuilder, name: str, *arguments: Value) -> Value:
    """One of LLVM's, which is an instruction of the CPU."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * len(arguments))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v8f32"), arguments)


def _halves(builder: ir.IRBuilder, address: Value) -> list[Value]:
    """The two vectors of one number of a panel."""
    return [load(builder, plus(builder, address, half * _HALF_BYTES), _VECTOR) for half in range(2)]


def _put_halves(builder: ir.IRBuilder, vectors: Sequence[Value], address: Value) -> None:
    for half, vector in enumerate(vectors):
        store(builder, vector, plus(builder, address, half * _HALF_BYTES))


def repeat(builder: ir.IRBuilder, count: Value, start: Sequence[Value], body: Body) -> list[Value]:
    """A loop over `range(count)` that keeps vectors in registers: `vectors = body(index, vectors)`."""
    before = builder.block
    test, inside, end = (builder.append_basic_block(name) for name in ("test", "inside", "end"))
    builder.branch(test)
    builder.position_at_end(test)
    index, kept = builder.phi(_INT64), [builder.phi(one.type) for one in start]
    goes_on = builder.icmp_signed("<", index, count)
    builder.cbranch(goes_on, inside, end)
    builder.position_at_end(inside)
    fresh = body(index, kept)
    following, last = builder.add(index, _INT64(1)), builder.block
    builder.branch(test)
    for phi, first, then in zip((index, *kept), (_INT64(0), *start), (following, *fresh), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, last)
    builder.position_at_end(end)
    return kept


def _exp(builder: ir.IRBuilder, x: Value) -> Value:
    """e ** x, where x is not above 0; `intrinsics.exp`."""
    exponent = builder.fmul(x, _of(LOG2_E))
    # NaN stays NaN, which a maximum would lose.
    is_less = builder.fcmp_ordered("<", exponent, _of(LEAST_EXPONENT))
    exponent = builder.select(is_less, _of(LEAST_EXPONENT), exponent)
    whole = _function(builder, "floor", builder.fadd(exponent, _of(0.5)))
    rest, power = builder.fsub(exponent, whole), _of(EXP2[0])
    for coefficient in EXP2[1:]:
        power = _function(builder, "fma", power, rest, _of(coefficient))
    bits = builder.add(builder.fptosi(whole, _WHOLE), ir.Constant(_WHOLE, [127] * 8))
    scale = builder.bitcast(builder.shl(bits, ir.Constant(_WHOLE, [23] * 8)), _VECTOR)
    return builder.fmul(power, scale)


def _products(
    builder: ir.IRBuilder, numbers: Sequence[Value], vectors: Sequence[Value], sums: Sequence[Value]
) -> list[Value]:
    """`sums` of each number, two vectors each, with its products by both vectors added."""
    splats = [_splat(builder, number) for number in numbers]
    pairs = [(splat, vector) for splat in splats for vector in vectors]
    return [_function(builder, "fma", *pair, one) for pair, one in zip(pairs, sums, strict=True)]


def _score(count: int) -> Callable[..., None]:
    """Scores of `count` tokens.

    `queries`: a panel of `size` numbers; `keys`: int64, the address of each token's key; `scores`: a panel, of which
    `count` numbers are written.
    """

    def score(builder: ir.IRBuilder, queries: Value, keys: Value, scores: Value, size: Value) -> None:
        addresses = [load(builder, plus(builder, keys, 8 * token), _INT64) for token in range(count)]

        def body(index: Value, sums: Sequence[Value]) -> Sequence[Value]:
            vectors = _halves(builder, builder.add(queries, times(builder, index, _ROW_BYTES)))
            offset = times(builder, index, 4)
            numbers = [load(builder, builder.add(one, offset), _SINGLE) for one in addresses]
            return _products(builder, numbers, vectors, sums)

        sums = repeat(builder, size, [_of(0)] * (2 * count), body)
        for token in range(count):
            _put_halves(builder, sums[2 * token : 2 * token + 2], plus(builder, scores, token * _ROW_BYTES))

    return score


def _weigh(count: int) -> Callable[..., None]:
    """Add weights times values of tokens that all rows see to `count` numbers of outputs.

    `weights`: a panel, from the first token on; `values`: int64, the address of each token's value; `offset`: bytes to
    the first of the numbers; `outputs`: a panel, from that number on.
    """

    def weigh(
        builder: ir.IRBuilder, weights: Value, values: Value, offset: Value, outputs: Value, tokens: Value
    ) -> None:
        def body(token: Value, sums: Sequence[Value]) -> Sequence[Value]:
            vectors = _halves(builder, builder.add(weights, times(builder, token, _ROW_BYTES)))
            return _products(builder, _numbers_of(builder, values, token, offset, count), vectors, sums)

        _add_to_outputs(builder, outputs, count, tokens, body)

    return weigh


def _weigh_seen(count: int) -> Callable[..., None]:
    """The same of tokens that some rows do not see: for these the value is 0, however large it is, or NaN.

    `bounds`: a panel of two numbers, the first and the last token that each row sees; `first`: the number of the first.
    """

    def weigh_seen(
        builder: ir.IRBuilder,
        weights: Value,
        values: Value,
        offset: Value,
        outputs: Value,
        tokens: Value,
        bounds: Value,
        first: Value,
    ) -> None:
        is_seen = _seen(builder, bounds)

        def body(token: Value, sums: Sequence[Value]) -> Sequence[Value]:
            vectors = _halves(builder, builder.add(weights, times(builder, token, _ROW_BYTES)))
            masks = [builder.sext(one, _WHOLE) for one in is_seen(builder.add(first, token))]
            added = []
            for number in _numbers_of(builder, values, token, offset, count):
                bits = builder.bitcast(_splat(builder, number), _WHOLE)
                added += [builder.bitcast(builder.and_(bits, mask), _VECTOR) for mask in masks]
            return [_function(builder, "fma", one, vectors[index % 2], sums[index]) for index, one in enumerate(added)]

        _add_to_outputs(builder, outputs, count, tokens, body)

    return weigh_seen


def _numbers_of(builder: ir.IRBuilder, values: Value, token: Value, offset: Value, count: int) -> list[Value]:
    """`count` numbers of a token's value."""
    start = builder.add(load(builder, builder.add(values, times(builder, token, 8)), _INT64), offset)
    return [load(builder, plus(builder, start, 4 * number), _SINGLE) for number in range(count)]


def _add_to_outputs(builder: ir.IRBuilder, outputs: Value, count: int, tokens: Value, body: Body) -> None:
    places = [plus(builder, outputs, number * _ROW_BYTES) for number in range(count)]
    sums = repeat(builder, tokens, [one for place in places for one in _halves(builder, place)], body)
    for number, place in enumerate(places):
        _put_halves(builder, sums[2 * number : 2 * number + 2], place)


def _seen(builder: ir.IRBuilder, bounds: Value) -> Callable[[Value], list[Value]]:
    """A function of a token's number: which rows see it, a vector of bits for each half."""
    lows, highs = _halves(builder, bounds), _halves(builder, plus(builder, bounds, _ROW_BYTES))

    def is_seen(token: Value) -> list[Value]:
        place = _splat(builder, builder.sitofp(token, _SINGLE))
        return [
            builder.and_(builder.fcmp_ordered("<=", low, place), builder.fcmp_ordered(">=", high, place))
            for low, high in zip(lows, highs, strict=True)
        ]

    return is_seen


def _mask(builder: ir.IRBuilder, scores: Value, tokens: Value, bounds: Value, first: Value) -> None:
    """Make scores -infinity where a row does not see the token; see `_weigh_seen`."""
    is_seen = _seen(builder, bounds)

    def body(token: Value, kept: Sequence[Value]) -> Sequence[Value]:
        address = builder.add(scores, times(builder, token, _ROW_BYTES))
        pairs = zip(is_seen(builder.add(first, token)), _halves(builder, address), strict=True)
        _put_halves(builder, [builder.select(seen, score, _of(float("-inf"))) for seen, score in pairs], address)
        return kept

    repeat(builder, tokens, [], body)


def _cap(builder: ir.IRBuilder, scores: Value, tokens: Value, softcap: Value) -> None:
    """Make scores softcap * tanh(score / softcap). `softcap`: the address of a float32."""
    cap = _splat(builder, load(builder, softcap, _SINGLE))

    def body(token: Value, kept: Sequence[Value]) -> Sequence[Value]:
        address = builder.add(scores, times(builder, token, _ROW_BYTES))
        capped = []
        for score in _halves(builder, address):
            size = _function(builder, "fabs", score)
            power = _exp(builder, builder.fdiv(builder.fmul(_of(-2), size), cap))
            rest = builder.fdiv(builder.fsub(_of(1), power), builder.fadd(_of(1), power))
            capped.append(_function(builder, "copysign", builder.fmul(cap, rest), score))
        _put_halves(builder, capped, address)
        return kept

    repeat(builder, tokens, [], body)


def _soften(builder: ir.IRBuilder, scores: Value, tokens: Value, state: Value) -> None:
    """Make weights of scores, e ** (score - largest), and take them into the state of the rows.

    `state`: a panel of three numbers: the largest score so far, the sum of weights, and, written, what the sum and the
    outputs so far were multiplied with, since they were of a smaller largest score.
    """
    minus_infinity = _of(float("-inf"))

    def larger(token: Value, largest: Sequence[Value]) -> Sequence[Value]:
        found = _halves(builder, builder.add(scores, times(builder, token, _ROW_BYTES)))
        return [
            builder.select(builder.fcmp_ordered(">", score, most), score, most)
            for score, most in zip(found, largest, strict=True)
        ]

    before = _halves(builder, state)
    largest = repeat(builder, tokens, before, larger)
    # A row that has seen no score above -infinity has no weight, and takes 0 for the largest.
    bases = [builder.select(builder.fcmp_ordered("==", most, minus_infinity), _of(0), most) for most in largest]
    factors = [_exp(builder, builder.fsub(old, base)) for old, base in zip(before, bases, strict=True)]
    sums = _halves(builder, plus(builder, state, _ROW_BYTES))
    sums = [builder.fmul(one, factor) for one, factor in zip(sums, factors, strict=True)]

    def weigh(token: Value, totals: Sequence[Value]) -> Sequence[Value]:
        address = builder.add(scores, times(builder, token, _ROW_BYTES))
        weights = [
            builder.select(
                builder.fcmp_ordered("==", score, minus_infinity), _of(0), _exp(builder, builder.fsub(score, base))
            )
            for score, base in zip(_halves(builder, address), bases, strict=True)
        ]
        _put_halves(builder, weights, address)
        return [builder.fadd(total, weight) for total, weight in zip(totals, weights, strict=True)]

    sums = repeat(builder, tokens, sums, weigh)
    _put_halves(builder, largest, state)
    _put_halves(builder, sums, plus(builder, state, _ROW_BYTES))
    _put_halves(builder, factors, plus(builder, state, 2 * _ROW_BYTES))


def _scale(builder: ir.IRBuilder, panel: Value, size: Value, factors: Value) -> None:
    """Multiply each of `size` numbers of a panel by the factor of its row. `factors`: a panel of one number."""
    of_rows = _halves(builder, factors)

    def body(index: Value, kept: Sequence[Value]) -> Sequence[Value]:
        address = builder.add(panel, times(builder, index, _ROW_BYTES))
        numbers = _halves(builder, address)
        _put_halves(builder, [builder.fmul(*pair) for pair in zip(numbers, of_rows, strict=True)], address)
        return kept

    repeat(builder, size, [], body)


def _turned(builder: ir.IRBuilder, rows: Sequence[Value]) -> list[Value]:
    """Eight vectors with rows and columns exchanged: in pairs, in fours, in halves."""

    def joined(first: Value, second: Value, places: Sequence[int]) -> Value:
        return builder.shuffle_vector(first, second, ir.Constant(_WHOLE, [*places]))

    low, high = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
    pairs = [joined(rows[one], rows[one + 1], places) for one in (0, 2, 4, 6) for places in (low, high)]
    low, high = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
    fours = [
        joined(pairs[one + of], pairs[one + of + 2], places)
        for one in (0, 4)
        for of in (0, 1)
        for places in (low, high)
    ]
    halves = ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    return [joined(fours[one], fours[one + 4], places) for places in halves for one in range(4)]


def _turn(*, is_into_panel: bool) -> Callable[..., None]:
    """Copy `8 * eights` numbers of eight rows into half of a panel, or out of it.

    `rows`: int64, the address of each row's first number; `panel`: of the half's first number.
    """

    def turn(builder: ir.IRBuilder, rows: Value, panel: Value, eights: Value) -> None:
        addresses = [load(builder, plus(builder, rows, 8 * row), _INT64) for row in range(8)]

        def body(index: Value, kept: Sequence[Value]) -> Sequence[Value]:
            offset = times(builder, index, 32)
            of_rows = [builder.add(one, offset) for one in addresses]
            start = builder.add(panel, times(builder, index, 8 * _ROW_BYTES))
            of_panel = [plus(builder, start, number * _ROW_BYTES) for number in range(8)]
            sources, targets = (of_rows, of_panel) if is_into_panel else (of_panel, of_rows)
            turned = _turned(builder, [load(builder, one, _VECTOR) for one in sources])
            for vector, target in zip(turned, targets, strict=True):
                store(builder, vector, target)
            return kept

        repeat(builder, eights, [], body)

    return turn


score6, score4 = intrinsic_of(_score(6), 4), intrinsic_of(_score(4), 4)
weigh6, weigh4, weigh1 = intrinsic_of(_weigh(6), 5), intrinsic_of(_weigh(4), 5), intrinsic_of(_weigh(1), 5)
weigh4_seen, weigh1_seen = intrinsic_of(_weigh_seen(4), 7), intrinsic_of(_weigh_seen(1), 7)
mask, cap, soften, scale = (
    intrinsic_of(_mask, 4),
    intrinsic_of(_cap, 3),
    intrinsic_of(_soften, 3),
    intrinsic_of(_scale, 3),
)
into_panel, out_of_panel = intrinsic_of(_turn(is_into_panel=True), 3), intrinsic_of(_turn(is_into_panel=False), 3)


@intrinsic
def take(typing_context: Any, address: Any) -> Any:
    """Return the int64 at an address and make it one more: no two threads get the same."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", place, _INT64(1), "monotonic")

    return types.int64(types.int64), code
