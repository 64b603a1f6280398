"""What `benchmarks/accuracy.py` compares: cases of random weights, and of trained ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.accuracy_figures import Row, bit_equal, distances, unchanged
from benchmarks.accuracy_runs import LOOP, PATHS, Batch, Call, Runs, started, widened

MARGIN = 0.1
"""Greedy tokens must be equal where the best two logits are further apart. Rounding to bfloat16
moves logits by some hundredths."""
Case = tuple[str, Row]


@dataclasses.dataclass(frozen=True)
class RandomSizes:
    """Sizes of the cases with random weights.

    Attributes:
        lengths: of the first prompts; more have any length up to `longest`.
        longest: of a prompt in the largest batch.
        width: tokens that prompts of the other batches are padded to.
        room: tokens of a row of the cache.
        batches: rows; the first is 1.
        steps: single steps behind the prompts.
    """

    lengths: tuple[int, ...] = (515, 1, 63, 64, 65, 200, 130, 31)
    longest: int = 512
    width: int = 1024
    room: int = 640
    batches: tuple[int, int, int] = (1, 8, 32)
    steps: int = 4

    def batch(self, rows: int) -> Batch:
        """The shapes of a batch."""
        width = self.longest if rows == self.batches[-1] else self.width
        return Batch(rows, width, self.room)

    def prompts(self, vocabulary: int) -> list[np.ndarray]:
        """Random prompts, one for each row of the largest batch."""
        more = np.random.default_rng(3).integers(1, self.longest + 1, self.batches[-1]).tolist()
        lengths = [*self.lengths, *more][: self.batches[-1]]
        draw = np.random.default_rng(7)
        return [draw.integers(0, vocabulary, length).astype(np.int32) for length in lengths]


def random_cases(runs: Runs, sizes: RandomSizes) -> Iterator[Case]:
    """One prompt, steps, runs against runs, and a sequence in a batch against itself alone."""
    alone, few, many = sizes.batches
    wide = Batch(1, sizes.width, sizes.width)
    calls: list[Call] = [(path, "logits", wide) for path in PATHS]
    for rows in sizes.batches:
        batch = sizes.batch(rows)
        calls += [("kernels", "prompt", batch), *((path, "step", batch) for path in PATHS)]
    calls += [("kernels", "loop", sizes.batch(rows)) for rows in (alone, many)]
    runs.compile(calls)

    prompts = sizes.prompts(runs.models["kernels"].config.vocab_size)
    length = len(prompts[0])
    found = {path: [runs.logits(path, wide, prompts[:1])[0][0, :length]] for path in PATHS}
    yield f"{length} random tokens", distances(found)
    del found
    for rows in sizes.batches:
        name = f"{sizes.steps} steps, batch {rows}"
        yield name, distances(_steps(runs, sizes.batch(rows), prompts[:rows], sizes.steps))
    for rows in (alone, many):
        thrice = [_generated(runs, sizes.batch(rows), prompts[:rows]) for _ in range(3)]
        yield f"same run three times, batch {rows}", bit_equal(thrice)
    base, read = _first_row(runs, sizes.batch(alone), prompts[:alone], None)
    other, tokens = _first_row(runs, sizes.batch(few), prompts[:few], read)
    row = unchanged(other, base) | {"greedy_tokens_equal": tokens == read}
    yield f"alone against batch {few}, {LOOP} positions", row


def _steps(
    runs: Runs, batch: Batch, prompts: Sequence[np.ndarray], steps: int
) -> dict[str, list[Array]]:
    """Logits of steps behind the cache that the kernels filled; all paths read the same tokens."""
    logits, cache = runs.prompt("kernels", batch, prompts)
    caches = {"kernels": cache, "reference": cache, "float32": widened(cache)}
    found: dict[str, list[Array]] = {path: [] for path in PATHS}
    for _ in range(steps):
        tokens = _best(logits)
        for path in PATHS:
            logits, caches[path] = runs.step(path, batch, caches[path], tokens)
            found[path].append(logits)
        logits = found["kernels"][-1]
    return found


def _generated(runs: Runs, batch: Batch, prompts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """All that one greedy run of the kernels gives."""
    logits, cache = runs.prompt("kernels", batch, prompts)
    state = started(logits)
    first, _ = runs.step("kernels", batch, cache, state.last)
    state, cache = runs.loop("kernels", batch, cache, state)
    last, _ = runs.step("kernels", batch, cache, state.last)
    found = {
        "prompt logits": logits,
        "step logits": first,
        "logits behind the loop": last,
        "tokens": state.tokens,
        "logprobs": state.logprobs,
    }
    return {name: np.asarray(array) for name, array in found.items()}


def _first_row(
    runs: Runs, batch: Batch, prompts: Sequence[np.ndarray], read: list[int] | None
) -> tuple[list[Array], list[int]]:
    """Logits and greedy tokens of row 0.

    It reads `read`, if given, so that one other token does not hide what follows.
    """
    logits, cache = runs.prompt("kernels", batch, prompts)
    found, chosen = [logits[:1]], [int(_best(logits)[0])]
    for position in range(LOOP - 1):
        tokens = _best(logits)
        if read is not None:
            tokens = tokens.at[0].set(read[position])
        logits, cache = runs.step("kernels", batch, cache, tokens)
        found.append(logits[:1])
        chosen.append(int(_best(logits)[0]))
    return found, chosen


def _best(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class TrainedSizes:
    """Sizes of the cases with trained weights.

    Attributes:
        tokens: of a window of held-out text.
        windows: most windows.
        width: tokens that a window or a prompt alone is padded to, and the room of its cache.
        new: greedy tokens of a prompt.
        together: prompts are padded to so many tokens where all are in one batch.
    """

    tokens: int = 515
    windows: int = 4
    width: int = 1024
    new: int = 48
    together: int = 256

    def greedy_batches(self, prompts: int) -> tuple[Batch, Batch]:
        """Each prompt alone, and all in one."""
        return (
            Batch(1, self.width, self.width),
            Batch(prompts, self.together, self.together + self.new + 16),
        )


def trained_cases(
    runs: Runs, text: np.ndarray, prompts: Mapping[str, Sequence[int]], sizes: TrainedSizes
) -> Iterator[Case]:
    """Held-out text, and greedy tokens of some prompts.

    Args:
        runs: the model.
        text: ids, at least as many as a window has.
        prompts: ids by name; `sizes.together` at most.
        sizes: of the cases.
    """
    alone, together = sizes.greedy_batches(len(prompts))
    calls: list[Call] = [(path, what, alone) for path in PATHS for what in ("logits", "step")]
    runs.compile([*calls, ("kernels", "logits", together), ("kernels", "step", together)])

    count = min(sizes.windows, len(text) // sizes.tokens)
    windows = text[: count * sizes.tokens].astype(np.int32).reshape(count, sizes.tokens)
    found: dict[str, list[Array]] = {
        path: [runs.logits(path, alone, [window])[0][0, : sizes.tokens] for window in windows]
        for path in PATHS
    }
    first = {path: logits[:1] for path, logits in found.items()}
    yield f"{sizes.tokens} held-out tokens", distances(first)
    if count > 1:
        yield f"{count} x {sizes.tokens} held-out tokens", distances(found)
    del found, first
    yield from _greedy_cases(runs, prompts, sizes)


def _greedy_cases(
    runs: Runs, prompts: Mapping[str, Sequence[int]], sizes: TrainedSizes
) -> Iterator[Case]:
    """All paths read the tokens that float32 chooses, so that one change hides nothing."""
    rows = [np.asarray(ids, np.int32) for ids in prompts.values()]
    alone, together = sizes.greedy_batches(len(rows))
    exact = _chain(runs, "float32", alone, rows, sizes.new, None)
    wanted = exact.argmax(-1)
    best = np.partition(exact, -2, axis=-1)[..., -2:]
    margins = best[..., 1] - best[..., 0]
    reference = _chain(runs, "reference", alone, rows, sizes.new, wanted).argmax(-1)
    for batch in (alone, together):
        logits = _chain(runs, "kernels", batch, rows, sizes.new, wanted)
        chosen = logits.argmax(-1)
        changed = (chosen != wanted) | (chosen != reference)
        yield (
            f"greedy tokens, batch {batch.rows}",
            {
                "prompts": list(prompts),
                "tokens": wanted.size,
                "clear_tokens": int((margins > MARGIN).sum()),
                "smallest_margin": float(margins.min()),
                "relative_error": float(np.linalg.norm(logits - exact) / np.linalg.norm(exact)),
                "kernels against reference": {"same_tokens": _share(chosen, reference)},
                "kernels against float32": {"same_tokens": _share(chosen, wanted)},
                "reference against float32": {"same_tokens": _share(reference, wanted)},
                "largest_margin_of_a_change": (
                    float(margins[changed].max()) if changed.any() else None
                ),
                "margin": MARGIN,
                "right": bool(np.isfinite(logits).all() and not (margins > MARGIN)[changed].any()),
            },
        )


def _share(a: np.ndarray, b: np.ndarray) -> float:
    return float((a == b).mean())


def _chain(
    runs: Runs,
    path: str,
    batch: Batch,
    prompts: Sequence[np.ndarray],
    new: int,
    read: np.ndarray | None,
) -> np.ndarray:
    """float32 logits [P, new, V] behind prompts, which read `read` [P, new] or what they choose."""
    parts = []
    for begin in range(0, len(prompts), batch.rows):
        these = prompts[begin : begin + batch.rows]
        every, cache = runs.logits(path, batch, these)
        logits = every[np.arange(batch.rows), np.array([len(prompt) - 1 for prompt in these])]
        found = [logits]
        for position in range(new - 1):
            tokens = _best(logits)
            if read is not None:
                tokens = jnp.asarray(read[begin : begin + batch.rows, position], jnp.int32)
            logits, cache = runs.step(path, batch, cache, tokens)
            found.append(logits)
        parts.append(np.asarray(jnp.stack(found, axis=1)))
    return np.concatenate(parts)
