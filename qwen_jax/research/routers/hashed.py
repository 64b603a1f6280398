"""Experts by a hash of the token's id (Roller et al. 2021, arXiv 2106.04426): a baseline."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from ...errors import RequestError
from ...model import RouterContext, Routing
from ...whole_number import is_whole
from .choice import checked_k


class HashRouter:
    """The same k experts for a token's id wherever it stands, in each layer others; weights 1 / k.

    Raises:
        RequestError: k outside 1 to E, a seed outside 0 to 2^32 - 1, or at a call without token
            ids.
    """

    def __init__(self, experts: int, k: int, *, seed: int = 0):
        if not is_whole(seed) or not 0 <= seed < 2**32:
            raise RequestError(f"seed is {seed!r}; accepted is a whole number from 0 to 2^32 - 1")
        self.experts, self.k, self.seed = experts, checked_k(k, experts), int(seed)

    def __hash__(self) -> int:
        return hash((type(self), self.experts, self.k, self.seed))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __call__(self, x: Array, context: RouterContext) -> Routing:
        """See the class."""
        return self.routing(self.key(context), context)

    def key(self, context: RouterContext) -> UInt[Array, "B T"]:
        """What a token's experts depend on."""
        if context.tokens is None:
            raise RequestError("this router needs token ids, which a layer alone does not have")
        return mixed(context.tokens.astype(jnp.uint32), self.seed, context.layer)

    def routing(self, key: UInt[Array, "B T"], context: RouterContext) -> Routing:
        """The experts of hashes."""
        ids = distinct(key, self.experts, self.k)
        ids = jnp.where(context.valid[..., None], ids, self.experts)
        weights = jnp.where(ids < self.experts, 1 / self.k, 0.0).astype(jnp.float32)
        return Routing(ids, weights)


def distinct(key: UInt[Array, "B T"], experts: int, k: int) -> Int[Array, "B T k"]:
    """K different experts: steps of a length without common factor with E, from some expert on."""
    steps = [step for step in range(1, experts + 1) if math.gcd(step, experts) == 1]
    first = key % jnp.uint32(experts)
    step = jnp.asarray(steps, jnp.uint32)[mixed(key, 1) % jnp.uint32(len(steps))]
    number = jnp.arange(k, dtype=jnp.uint32)[None, None, :]
    return ((first[..., None] + step[..., None] * number) % jnp.uint32(experts)).astype(jnp.int32)


def mixed(key: UInt[Array, "B T"], *salts: int) -> UInt[Array, "B T"]:
    """A hash of 32 bits of numbers and salts.

    Each salt is added to what was hashed before it, so that none can make up for another one: no
    seed and layer are alike to others.
    """
    key = _finalised(key)
    for salt in salts:
        key = _finalised(key + jnp.uint32((salt * 0x9E3779B1 + 0x7F4A7C15) % 2**32))
    return key


def _finalised(key: UInt[Array, "B T"]) -> UInt[Array, "B T"]:
    """Multiply and shift, with the constants of MurmurHash3's finaliser."""
    key = (key ^ (key >> 16)) * jnp.uint32(0x85EBCA6B)
    key = (key ^ (key >> 13)) * jnp.uint32(0xC2B2AE35)
    return key ^ (key >> 16)
