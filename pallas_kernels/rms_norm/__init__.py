"""`rms_norm` and its two fused forms: see api.py for what they take, reference.py for them."""

from .api import add_rms_norm, gated_rms_norm, rms_norm

__all__ = ["add_rms_norm", "gated_rms_norm", "rms_norm"]
