"""What gates do to the rows above, in PTX."""

from __future__ import annotations

import math

from ..assembly import Assembly, float32


def silu(a: Assembly, gate: str, up: str) -> str:
    """Silu(gate) * up, in float32."""
    power = a.f32("ex2.approx.f32", a.f32("mul.f32", gate, float32(-math.log2(math.e))))
    opened = a.f32("rcp.approx.f32", a.f32("add.f32", power, float32(1.0)))
    return a.f32("mul.f32", a.f32("mul.f32", gate, opened), up)
