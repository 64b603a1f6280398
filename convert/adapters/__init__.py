"""LoRA adapters of PEFT, merged into a model on its way from one folder to another."""

from .adapter import Adapter, load_adapter

__all__ = ["Adapter", "load_adapter"]
