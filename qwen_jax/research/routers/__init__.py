"""Routers beside the released one, and how to put them, or one of your own, into a model."""

from .capacity import CapacityRouter
from .expert_choice import ExpertChoiceRouter
from .hashed import HashRouter
from .install import ROUTERS, check_router, check_routing, replace_routers, with_router
from .mass import MassRouter
from .random import RandomRouter
from .sigmoid import SigmoidRouter, balanced
from .two_stage import TwoStageRouter

__all__ = [
    "ROUTERS",
    "CapacityRouter",
    "ExpertChoiceRouter",
    "HashRouter",
    "MassRouter",
    "RandomRouter",
    "SigmoidRouter",
    "TwoStageRouter",
    "balanced",
    "check_router",
    "check_routing",
    "replace_routers",
    "with_router",
]
