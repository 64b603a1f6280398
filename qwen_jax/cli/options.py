"""Flags that several verbs share. Nothing here imports JAX, so that `--help` stays fast."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, Token

from ..errors import RequestError
from .flags import flag, flags_of

if TYPE_CHECKING:
    from ..decode import SamplingOptions


def _whole_number(_: Any, tokens: Sequence[Token]) -> int:
    """Strictly: cyclopts itself would round "2.5" to 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is not a whole number") from None


Whole = Annotated[int, Parameter(converter=_whole_number)]
WholeNumbers = Annotated[tuple[Whole, ...], Parameter(negative="")]
MaybeWhole = Annotated[int | None, Parameter(converter=_whole_number)]
MaybeFloat = float | None
Text = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
Texts = Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)]
Switch = Annotated[bool, Parameter(negative="")]
DType = Literal["float32", "bfloat16"]
Kernels = Literal["triton", "reference"]
KVCacheDType = Literal["auto", "int8"]

_ONLY_DRAWN = ("top_k", "top_p", "min_p", "seed")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How to choose tokens; each flag replaces one value of the model's generation_config.json.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: keep the most likely tokens until their probabilities reach this sum.
        top_k: keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this many times as likely as the most likely one.
        repetition_penalty: above 1 disfavours tokens of prompt and output; 1 is off.
        presence_penalty: lowers the logits of tokens in the output, once a token.
        frequency_penalty: lowers the logits of tokens in the output, once an occurrence.
        seed: makes the draw repeatable.
    """

    temperature: Annotated[MaybeFloat, Parameter(alias="--temp")] = None
    top_p: MaybeFloat = None
    top_k: MaybeWhole = None
    min_p: MaybeFloat = None
    repetition_penalty: MaybeFloat = None
    presence_penalty: MaybeFloat = None
    frequency_penalty: MaybeFloat = None
    seed: MaybeWhole = None

    def over(self, defaults: SamplingOptions) -> SamplingOptions:
        """The defaults with the given flags in their place.

        Raises:
            RequestError: a value outside its range.
        """
        with flags_of(*(field.name for field in dataclasses.fields(self))):
            return dataclasses.replace(defaults, **self._given())

    def idle(self, options: SamplingOptions) -> list[str]:
        """The given flags that greedy `options` leave without effect."""
        given = self._given()
        return [flag(name) for name in _ONLY_DRAWN if name in given and options.temperature == 0]

    def _given(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitFlags:
    """How long, and in how much memory.

    Attributes:
        max_tokens: most new tokens.
        max_model_len: most tokens of prompt and output together; the model's own limit by default.
        prefill_chunk_size: most prompt tokens in one forward pass (by default 512, and on a GPU up
            to 8192, as its memory allows); memory grows with it.
        ignore_eos: go on through the model's end tokens.
        stop: end where this text, or special token, would come; may be repeated.
        kv_cache_dtype: int8 keeps keys and values in about half the memory, slightly less exact;
            auto (the default) keeps them in the model's dtype.
    """

    max_tokens: Annotated[MaybeWhole, Parameter(alias="--max-new-tokens")] = None
    max_model_len: MaybeWhole = None
    prefill_chunk_size: MaybeWhole = None
    ignore_eos: Switch = False
    stop: Texts = ()
    kv_cache_dtype: KVCacheDType = "auto"

    @property
    def cache_dtype(self) -> str | None:
        """The `kv_cache_dtype` of `init_cache`."""
        return own_if_auto(self.kv_cache_dtype)

    def arguments(self) -> dict[str, Any]:
        """Arguments of `stream_generate` but for `max_tokens`."""
        values = {
            "ignore_eos": self.ignore_eos,
            "stop": self.stop,
            "max_model_len": self.max_model_len,
            "kv_cache_dtype": self.cache_dtype,
        }
        if self.prefill_chunk_size is not None:
            values["prefill_chunk_size"] = self.prefill_chunk_size
        return values

    @staticmethod
    def named() -> AbstractContextManager[None]:
        """Errors of `stream_generate` in it name these flags."""
        return flags_of(*(field.name for field in dataclasses.fields(LimitFlags)))


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """What the chat template is given.

    Attributes:
        system_prompt: the system message.
        enable_thinking: whether the model thinks before it answers; the template decides by
            default.
        chat_template_kwargs: further variables of the template, as a JSON object.
    """

    system_prompt: Text = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Text = None

    def messages(self) -> list[dict[str, str]]:
        """The conversation before the first turn."""
        if self.system_prompt is None:
            return []
        return [{"role": "system", "content": self.system_prompt}]

    def variables(self) -> dict[str, Any]:
        """Arguments of `Tokenizer.apply_chat_template` beside the messages.

        Raises:
            RequestError: not a JSON object, or a name that is not free.
        """
        given = {} if self.chat_template_kwargs is None else _json_object(self.chat_template_kwargs)
        mine = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        taken = sorted(given.keys() & {"messages", "self", "add_generation_prompt", *mine})
        if taken:
            raise RequestError(
                f"--chat-template-kwargs sets {', '.join(taken)}, which this command sets itself; "
                "leave it out"
            )
        return given | mine

    def refuse_without_chat(self) -> None:
        """Raise `RequestError` if any is given: a plain prompt passes through no template."""
        given = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        if given:
            names = ", ".join(flag(name) for name in given)
            raise RequestError(
                f"{names}: only the chat template reads this; add --chat, or leave it out"
            )


def own_if_auto(dtype: KVCacheDType) -> str | None:
    """A flag as the `kv_cache_dtype` of `init_cache`."""
    return None if dtype == "auto" else dtype


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--chat-template-kwargs is not JSON ({error}): {text[:80]!r}") from None
    if not isinstance(value, dict):
        raise RequestError(
            f"--chat-template-kwargs is {text[:80]!r}; accepted is a JSON object such as "
            '{"preserve_thinking": true}'
        )
    return value
