"""A model as EleutherAI's lm-evaluation-harness takes it. lm-eval itself is imported when used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..decode import SamplingOptions
from ..errors import RequestError
from ..generation import generate
from ..model import CausalLM
from ..text import Tokenizer
from ..whole_number import check_whole
from .continuations import Continuation, likelihoods, rolling

DEFAULT_MAX_MODEL_LEN = 2048
DEFAULT_MAX_GEN_TOKS = 256
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


class HarnessAdapter:
    """The methods that lm-eval calls, on token ids and text.

    `as_lm` makes an `lm_eval.api.model.TemplateLM` of it, which cuts context and continuation apart
    as for every other model.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        name: the model's name, for results.
        batch_size: requests in one forward pass.
        max_model_len: most tokens that the model reads at a time; longer contexts lose their first
            ones.
        enable_thinking: handed to the chat template; it decides if None.
        progress: called with the number of requests that were finished.

    Raises:
        RequestError: no end token, a batch size below 1, or a length outside the model's context.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        name: str,
        batch_size: int = 1,
        max_model_len: int | None = None,
        enable_thinking: bool | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        limit = model.config.max_position_embeddings
        length = min(limit, DEFAULT_MAX_MODEL_LEN) if max_model_len is None else max_model_len
        if not 2 <= length <= limit:
            raise RequestError(
                f"max_model_len is {length}; accepted are 2 to {limit}, the model's context"
            )
        check_whole("batch_size", batch_size, 1)
        ends = tokenizer.eos_token_ids or model.config.eos_token_id
        if not ends:
            raise RequestError(
                f"{name} names no end token, which texts without a context are scored behind; add "
                "eos_token to tokenizer_config.json"
            )
        self.model, self.tokens_of, self.name = model, tokenizer, name
        self.batch_size, self.max_length, self.progress = batch_size, length, progress
        self.enable_thinking = enable_thinking
        self._end = ends[0]

    @property
    def eot_token_id(self) -> int:
        """What texts without a context are scored behind."""
        return self._end

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keeps requests under."""
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """The ids of a text; the tokenizer never adds special tokens."""
        return self.tokens_of.encode(string)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        **_: Any,
    ) -> list[tuple[float, bool]]:
        found = self._likelihoods([Continuation(*request[1:]) for request in requests])
        return [(one.log_likelihood, one.greedy) for one in found]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each text, behind the end token."""
        pieces, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            cut = list(rolling(ids, self.eot_token_id, self.max_length))
            pieces += cut
            owners += [number] * len(cut)
        totals = [0.0] * len(requests)
        for number, one in zip(owners, self._likelihoods(pieces), strict=True):
            totals[number] += one.log_likelihood
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of each answer, up to the first of its stop strings."""
        asked = [_Generation.of(request.args[1]) for request in requests]
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        texts: dict[int, str] = {}
        for options in dict.fromkeys(asked):
            same = [number for number, other in enumerate(asked) if other == options]
            same.sort(key=lambda number: -len(prompts[number]))
            for begin in range(0, len(same), self.batch_size):
                numbers = same[begin : begin + self.batch_size]
                texts |= self._generate(numbers, prompts, options)
                self.progress(len(numbers))
        return [texts[number] for number in range(len(requests))]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text; without a generation prompt its last message stays open."""
        text = self.tokens_of.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=self.enable_thinking,
        )
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        at = text.rfind(last)
        if not last or at < 0:
            raise RequestError(
                "the chat template does not show the last message as it is, so that it cannot be "
                "continued; leave out --apply-chat-template"
            )
        return text[: at + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """What lm-eval records; a template of another name is refused."""
        if isinstance(chat_template, str) and chat_template != "default":
            raise RequestError(
                f"chat template {chat_template!r} is asked for; the model's own is used, so give "
                "--apply-chat-template without a name"
            )
        return f"of {self.name}" if chat_template else ""

    def _likelihoods(self, requests: list[Continuation]):
        return likelihoods(
            self.model,
            requests,
            batch_size=self.batch_size,
            max_model_len=self.max_length,
            progress=self.progress,
        )

    def _generate(
        self, numbers: list[int], prompts: list[list[int]], options: _Generation
    ) -> dict[int, str]:
        room = self.max_length - options.max_tokens
        if room < 1:
            raise RequestError(
                f"{options.max_tokens} new tokens leave no room for a prompt within "
                f"{self.max_length}; raise --max-model-len"
            )
        results = generate(
            self.model,
            self.tokens_of,
            [prompts[number][-room:] or [self.eot_token_id] for number in numbers],
            max_tokens=options.max_tokens,
            sampling=options.sampling,
            stop=options.until,
        )
        return {number: result.text for number, result in zip(numbers, results, strict=True)}


@dataclasses.dataclass(frozen=True)
class _Generation:
    """What a task asks of a generation."""

    until: tuple[str, ...]
    max_tokens: int
    sampling: SamplingOptions

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Generation:
        """From lm-eval's names; one that is not known is refused, since it might matter."""
        left = dict(given)
        until = left.pop("until", None) or ()
        until = (until,) if isinstance(until, str) else tuple(text for text in until if text)
        limits = [left.pop(name, None) for name in _MAX_TOKENS]
        limit = next((value for value in limits if value is not None), DEFAULT_MAX_GEN_TOKS)
        drawn = left.pop("do_sample", None)
        chosen = {name: left.pop(name) for name in _SAMPLED if left.get(name) is not None}
        left = {name: value for name, value in left.items() if value is not None}
        if left:
            raise RequestError(
                f"generation arguments {sorted(left)} are not implemented; accepted are until, "
                f"do_sample, {', '.join((*_MAX_TOKENS, *_SAMPLED))}"
            )
        if drawn is False:
            chosen["temperature"] = 0.0
        elif drawn and "temperature" not in chosen:
            chosen["temperature"] = 1.0
        return cls(until, int(limit), SamplingOptions(**chosen))


def as_lm(model: CausalLM, tokenizer: Tokenizer, **options: Any) -> Any:
    """A model for `lm_eval.simple_evaluate(model=...)`; arguments of `HarnessAdapter`.

    Raises:
        RequestError: lm-eval is not installed, and what `HarnessAdapter` refuses.
    """
    require_lm_eval()
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

    class QwenJax(HarnessAdapter, TemplateLM):
        """What is not the adapter's is lm-eval's own."""

        def __init__(self) -> None:
            TemplateLM.__init__(self)
            HarnessAdapter.__init__(self, model, tokenizer, **options)

    return QwenJax()


def require_lm_eval() -> None:
    """Raise `RequestError` unless lm-eval can be imported."""
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        raise RequestError("lm-eval is not installed; pip install 'qwen-jax[eval]'")
