"""Text in and out of a model: tokenizer, detokenizer, stop strings, chat template. No JAX here."""

from .chat import ChatTemplate
from .detokenizer import Detokenizer
from .messages import normalize_messages
from .stop import StopMatcher, stop_token_ids
from .tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopMatcher",
    "Tokenizer",
    "normalize_messages",
    "stop_token_ids",
]
