"""`attention_inputs`: see api.py for what it takes, reference.py for the definition."""

from .api import attention_inputs
from .reference import AttentionInputs

__all__ = ["AttentionInputs", "attention_inputs"]
