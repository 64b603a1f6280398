"""How good a model is: perplexity, divergence from another, activations in few bits, lm-eval."""

from .divergence import Divergence, divergence
from .perplexity import Perplexity, perplexity
from .scores import Scores, score
from .texts import Document, read_documents
from .windows import Windows

__all__ = [
    "Divergence",
    "Document",
    "Perplexity",
    "Scores",
    "Windows",
    "divergence",
    "perplexity",
    "read_documents",
    "score",
]
