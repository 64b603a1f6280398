"""The 32 values of units, inside a kernel.

A field at bit p is masked into the mantissa of 2^(23 - p), which gives 2^(23 - p) + value without
converting integers. Fields are shifted together to positions that cost the fewest bits of the sum,
where those 2^(23 - p), the offsets, come off again.
"""

from __future__ import annotations

from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from .._compat import INTERPRETER, as_mantissa, assembled, current_target, multiply_add, selected
from .layout import CENTRES, UNIT

# By bits, for each field of a word in order: by how much the word is shifted left.
SHIFTS = {
    3: (11,) * 4 + (0,) * 3 + (-9,) * 3,
    4: (11,) * 3 + (0,) * 2 + (-9,) * 3,
    8: (7,) * 2 + (-9,) * 2,
}
# At 3 bits, the last fields of each word go one bit further than those of the word before: then
# what is left of the words, values 30 and 31, lies together.
LAST_POSITIONS = (20, 19)


def offsets(bits: int) -> tuple[float, ...]:
    """For each value of a unit: what it is more in `shifted_values`."""
    return tuple(2.0 ** (23 - position) for position in positions(bits))


def positions(bits: int) -> tuple[int, ...]:
    """At what bit of the mantissa each value of a unit is put."""
    count = 32 // bits
    fields = [
        bits * field + _shift(bits, word, field) for word in range(bits) for field in range(count)
    ]
    return (*fields, *LAST_POSITIONS)[:UNIT]


def shifted_values(words: list[UInt[Array, "*s"]]) -> list[Float[Array, "*s"]]:
    """For each value of a unit: the value and its offset.

    Args:
        words: of the units, one array for each bit of a code.
    """
    bits = len(words)
    count = 32 // bits
    moved = [
        {by: _shifted(words[word], by) for by in {_shift(bits, word, i) for i in range(count)}}
        for word in range(bits)
    ]
    found = [moved[word][_shift(bits, word, i)] for word in range(bits) for i in range(count)]
    if bits == 3:
        first, second, third = (moved[word][_shift(3, word, count - 1)] for word in range(3))
        found += [selected(first, second, 3 << 21), selected(second, third, 1 << 21)]
    mask = 2**bits - 1
    return [
        as_mantissa(word, mask << position, 23 - position)
        for word, position in zip(found, positions(bits), strict=True)
    ]


def centred(words: list[UInt[Array, "o u"]]) -> Float[Array, "o i"]:
    """The codes of units from the centre, in steps of `step(bits)`: integers, in bfloat16."""
    bits = len(words)
    factor = 1 / step(bits)
    values = []
    for value, offset in zip(shifted_values(words), offsets(bits), strict=True):
        lower = jnp.float32(-(offset + CENTRES[bits]) * factor)
        values.append(multiply_add(value, factor, lower).astype(jnp.bfloat16))
    return joined(values)


def step(bits: int) -> float:
    """Size of a step of `centred`, in codes: 0.5 where the centre is between two of them."""
    return 0.5 if CENTRES[bits] % 1 else 1.0


def joined(values: list[Float[Array, "*s"]]) -> Float[Array, "*t"]:
    """The values of a unit, in order, along a last axis; units side by side if there are some."""
    while len(values) > 1:
        half = len(values) // 2
        pairs = zip(values[:half], values[half:], strict=True)
        values = [jnp.stack(pair, axis=-1) for pair in pairs]
    return values[0].reshape(values[0].shape[0], -1)


def _shift(bits: int, word: int, field: int) -> int:
    left = SHIFTS[bits][field]
    return left - word if bits == 3 and left < 0 else left


def _shifted(word: UInt[Array, "*s"], left: int) -> UInt[Array, "*s"]:
    if left == 0:
        return word
    return word << jnp.uint32(left) if left > 0 else word >> jnp.uint32(-left)


def multiplied(words, xs, start):
    """start + sum of (value + offset) * x, over a unit."""
    bits=len(words); count=32//bits
    if current_target().platform == INTERPRETER:
        for shifted, x in zip(shifted_values(words), xs, strict=True):
            start = multiply_add(shifted, x, start)
        return start
    lines=[]
    names={}
    # 0 result, 1..bits words, then xs, then start
    X=lambda v: f"${1+bits+v}"
    S=f"${1+bits+32}"
    for w in range(bits):
        for by in sorted({_shift(bits,w,i) for i in range(count)}):
            if by==0: names[w,by]=f"${1+w}"; continue
            names[w,by]=f"w{w}_{abs(by)}{'l' if by>0 else 'r'}"
            lines.append(f".reg .b32 {names[w,by]}; {'shl' if by>0 else 'shr'}.b32 {names[w,by]}, ${1+w}, {abs(by)};" if by>0 else f".reg .b32 {names[w,by]}; shr.u32 {names[w,by]}, ${1+w}, {-by};")
    src=[names[w,_shift(bits,w,i)] for w in range(bits) for i in range(count)]
    if bits==3:
        a,b,c=(names[w,_shift(3,w,count-1)] for w in range(3))
        for nm,p_,q,m in(("t0",a,b,3<<21),("t1",b,c,1<<21)):
            lines.append(f".reg .b32 {nm}; lop3.b32 {nm}, {p_}, {q}, {m}, 0xE4;"); src.append(nm)
    lines.append(".reg .b32 v; .reg .f32 f, t; mov.f32 t, %s;"%S)
    mask=2**bits-1
    for v,(sname,p_) in enumerate(zip(src,positions(bits),strict=True)):
        power=(127+23-p_)<<23
        lines.append(f".reg .b32 m{v}; mov.b32 m{v}, {mask<<p_}; lop3.b32 v, {sname}, m{v}, {power}, 0xEA; mov.b32 f, v; fma.rn.f32 t, f, {X(v)}, t;")
    lines.append("mov.f32 $0, t;")
    text="{ "+" ".join(lines)+" }"
    args=[lax.bitcast_convert_type(w,jnp.int32) for w in words]+list(xs)+[start]
    return assembled(text,args,"=f,"+",".join(["r"]*bits+["f"]*33))
