"""Layers put in codes one after the other, each with what the quantised ones before it give it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen_jax.checkpoint.keys import HEAD
from qwen_jax.checkpoint.mapping import EMBEDDING
from qwen_jax.checkpoint.plan import LoadPlan
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.model.layers import RMSNorm

from ..calibrate import advance, at
from ..layer import quantise_head, quantise_layer
from ..layer_fit import fit_layer
from ..methods import Solved, rounded_without_data
from .calibration import Calibration
from .choice import Choice
from .folding import fold_solved
from .hidden_states import StateFolder
from .packed import Packed, packed
from .weights import Weights
from .written import WrittenCodes

_LAYER = re.compile(r"layers\.(\d+)\.")
_HEAD_STAGE = -1
_WINDOWS_AT_ONCE = 8


class LayerByLayer:
    """The tensors of a model in codes, in memory a layer at a time.

    Tensors are to be asked for in the order of the model. The first one of a layer has the whole
    layer solved.

    Args:
        load: the source.
        weights: of the source.
        choice: what becomes of which tensor.
        calibration: the text.
        states: where hidden states are kept.
        written: codes that are finished.
        tell: told what is done.
    """

    def __init__(
        self,
        load: LoadPlan,
        weights: Weights,
        choice: Choice,
        calibration: Calibration,
        states: StateFolder,
        written: WrittenCodes,
        tell: Callable[[str], None],
    ) -> None:
        # What codes stand for is exact in float32.
        self._config = dataclasses.replace(load.config, dtype="float32")
        self._weights, self._choice, self._tokens = weights, choice, calibration.tokens
        self._fit_steps = calibration.fit_steps
        self._states, self._written, self._tell = states, written, tell
        self._hidden: tuple[int, np.ndarray] | None = None
        self._solved: tuple[int, dict[str, Packed], float] | None = None

    def chunks(self, path: str, part: str) -> Iterator[np.ndarray]:
        """Yields one of the parts of a tensor, as `TensorScheme.parts` names them."""
        yield getattr(self._stage(path)[path], part)

    def remark(self, path: str) -> dict[str, Any]:
        """What to say of a tensor; the time of a layer is divided evenly."""
        tensors = self._stage(path)
        assert self._solved is not None
        seconds = self._solved[2] / len(tensors)
        return {**tensors[path].report.to_json(), "seconds": round(seconds, 3)}

    def _stage(self, path: str) -> Mapping[str, Packed]:
        """The tensors of the layer of a tensor, or the head."""
        match = _LAYER.match(path)
        stage = int(match[1]) if match else _HEAD_STAGE
        if self._solved is None or self._solved[0] != stage:
            self._solved = None  # or two layers would be in memory
            begin = time.monotonic()
            found = self._solve_head() if stage == _HEAD_STAGE else self._solve_layer(stage)
            self._solved = (stage, found, time.monotonic() - begin)
        return self._solved[1]

    def _solve_layer(self, number: int) -> dict[str, Packed]:
        hidden = self._before(number)
        begin = time.monotonic()
        layer, solved = self._solved_layer(number, hidden)
        hidden = advance(layer, self._config, hidden)
        del layer
        self._hidden = (number + 1, hidden)
        self._states.save(number + 1, hidden)
        layers = self._config.num_hidden_layers
        seconds = time.monotonic() - begin
        self._tell(f"layer {number + 1} of {layers}: {len(solved)} tensors in {seconds:.1f} s")
        place = f"layers.{number}."
        return self._packed({place + path: tensor for path, tensor in solved.items()})

    def _solved_layer(
        self, number: int, hidden: np.ndarray
    ) -> tuple[DecoderLayer, dict[str, Solved]]:
        """A layer with what its codes stand for, and the codes."""
        place = f"layers.{number}."
        rules = {path.removeprefix(place): self._choice.rules[path] for path in self._coded(place)}
        folding = {
            path.removeprefix(place): fold.within(place)
            for path, fold in self._choice.folds.items()
            if path.startswith(place)
        }
        layer, config = self._weights.layer(number, self._config), self._config
        if self._fit_steps:
            steps = self._fit_steps
            solved = fit_layer(layer, config, hidden, rules, steps=steps, folds=folding)
        else:
            solved = quantise_layer(layer, config, hidden, rules, folds=folding)
        return layer, fold_solved(layer, solved, rules, folding, config)

    def _coded(self, place: str) -> list[str]:
        return [path for path in self._choice.rules if path.startswith(place)]

    def _solve_head(self) -> dict[str, Packed]:
        hidden = self._before(self._config.num_hidden_layers)
        normal = self._final_norm(hidden)
        weight = self._weights.whole(HEAD)
        return self._packed({HEAD: quantise_head(normal, weight, self._choice.rules[HEAD])})

    def _packed(self, solved: Mapping[str, Solved]) -> dict[str, Packed]:
        schemes = self._choice.scheme.tensors
        return {path: packed(path, tensor, schemes[path]) for path, tensor in solved.items()}

    def _before(self, number: int) -> np.ndarray:
        """What goes into a layer: at hand, from the disk, or computed from what is there."""
        if self._hidden is not None and self._hidden[0] == number:
            return self._hidden[1]
        self._hidden = None
        nearest, hidden = self._nearest(number)
        if nearest < number:
            self._tell(
                f"hidden states in front of layer {number + 1} are computed from layer "
                f"{nearest + 1} on"
            )
        for layer in range(nearest, number):
            hidden = self._behind(layer, hidden)
        self._hidden = (number, hidden)
        return hidden

    def _nearest(self, number: int) -> tuple[int, np.ndarray]:
        """The last layer up to a number whose input is known, and that input."""
        for layer in range(number, 0, -1):
            found = self._states.load(layer)
            if found is not None:
                return layer, found
        return 0, self._embedded()

    def _behind(self, number: int, hidden: np.ndarray) -> np.ndarray:
        """What comes out of a layer of which the codes are finished, in this run or another."""
        place = f"layers.{number}."
        coded = self._coded(place)
        found = self._written.read(coded)
        if found is None:
            raise RuntimeError(f"internal error: codes of {place} are needed before they are made")
        layer = self._weights.layer(number, self._config)
        for path, weight in found.items():
            parameter = at(layer, path.removeprefix(place))
            parameter.set_value(weight.astype(parameter[...].dtype))
        return advance(layer, self._config, hidden)

    def _embedded(self) -> np.ndarray:
        """Rows of the embedding, as its codes have them."""
        ids, places = np.unique(self._tokens, return_inverse=True)
        rows = self._weights.rows(EMBEDDING, ids)
        rule = self._choice.rules.get(EMBEDDING)
        if rule is not None and rule.format is not None:
            # A row's codes depend on nothing but itself.
            rows = np.asarray(rounded_without_data(rows, rule).weight(rule.format))
        return rows[places.reshape(self._tokens.shape)]

    def _final_norm(self, hidden: np.ndarray) -> np.ndarray:
        config = self._config
        norm = RMSNorm(
            config.hidden_size,
            config.dtype,
            eps=config.rms_norm_eps,
            zero_centred=config.zero_centred_norm,
            implementation=config.implementation,
        )
        self._weights.fill(norm, "norm.", config)
        run = jax.jit(norm.__call__)
        parts = [
            np.asarray(run(jnp.asarray(hidden[start : start + _WINDOWS_AT_ONCE])))
            for start in range(0, len(hidden), _WINDOWS_AT_ONCE)
        ]
        return np.concatenate(parts)
