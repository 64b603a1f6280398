"""What a benchmark is asked for; checked before JAX is loaded."""

from __future__ import annotations

import dataclasses

from ..errors import RequestError
from .flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What to measure.

    Attributes:
        model: a preset, a folder, "demo", or the id of a model on the Hub.
        revision: branch, tag or commit of a Hub model; its main branch if None.
        dummy: random weights, made on the device, instead of the folder's.
        prompt_tokens: tokens of each prompt, drawn at random.
        generation_tokens: new tokens of each row, from 2 on; end tokens don't stop a row.
        batch_size: rows.
        num_trials: measured repetitions, after one that compiles.
        recipe: name of the recipe that puts random weights into codes; needs `dummy`, since a
            folder's weights are what they are.
        num_layers: use only so many of the model's layers, from the first on; needs `dummy`.
        max_model_len: tokens a row that the cache has room for; prompt and generation if None.
        prefill_chunk_size: most prompt tokens a row in one forward pass; see `prefill_prompts` if
            None.
        dtype: of weights and activations; the model's own if None, float32 on a CPU.
        implementation: "triton" or "reference" for every operation, or None for the first that
            takes each call.
        kv_cache_dtype: "int8", or None for keys and values in the model's dtype.

    Raises:
        RequestError: a value outside its range.
    """

    model: str
    revision: str | None = None
    dummy: bool = False
    prompt_tokens: int = 512
    generation_tokens: int = 128
    batch_size: int = 1
    num_trials: int = 5
    recipe: str | None = None
    num_layers: int | None = None
    max_model_len: int | None = None
    prefill_chunk_size: int | None = None
    dtype: str | None = None
    implementation: str | None = None
    kv_cache_dtype: str | None = None

    def __post_init__(self) -> None:
        smallest = {"prompt_tokens": 1, "generation_tokens": 2, "batch_size": 1, "num_trials": 1}
        smallest |= {"num_layers": 1, "max_model_len": 1, "prefill_chunk_size": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(
                    f"{flag(name)} is {value}; accepted is a whole number from {least} on"
                )
        if self.recipe is not None and not self.dummy:
            raise RequestError(
                "--recipe makes codes of random weights; add --dummy, or give a folder that "
                "qwen-jax quantize wrote"
            )
        if self.length < self.prompt_tokens + self.generation_tokens:
            raise RequestError(
                f"--max-model-len is {self.max_model_len}, but {self.prompt_tokens} prompt tokens "
                f"and {self.generation_tokens} new ones need more; raise it, or leave it out"
            )

    @property
    def length(self) -> int:
        """Tokens a row that the cache has room for."""
        return self.max_model_len or self.prompt_tokens + self.generation_tokens

    def arguments(self) -> list[str]:
        """The command-line arguments that ask for this."""
        words = [self.model]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "model" and value != field.default:
                words.append(flag(field.name))
                words += [] if value is True else [str(value)]
        return words
