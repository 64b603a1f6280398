"""A model argument to a model; what can be refused is refused before the weights are read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import QwenConfig
from ..configuration.presets import PRESET_NAMES
from ..errors import RequestError
from .console import Notes, size
from .environment import default_platform

if TYPE_CHECKING:
    from ..checkpoint.plan import LoadPlan
    from ..decode import SamplingOptions
    from ..model import CausalLM
    from ..text import Tokenizer
    from .options import SamplingFlags


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A folder to generate from, before its weights are read.

    Attributes:
        name: the argument that led to it.
        path: the folder.
        config: its configuration, with the dtype and the implementation to run in.
        tokenizer: None where it has none.
    """

    name: str
    path: Path
    config: QwenConfig
    tokenizer: Tokenizer | None

    @classmethod
    def open(
        cls,
        name: str,
        dtype: str | None,
        notes: Notes,
        revision: str | None = None,
        implementation: str | None = None,
    ) -> ModelFolder:
        """Read configuration and tokenizer; a model of the Hub is fetched where it is not cached.

        Args:
            name: a folder, "demo", or the id of a model on the Hub.
            dtype: the dtype asked for; by default the folder's own, but float32 on a CPU.
            notes: told of fetching, and when the default is not the folder's own.
            revision: branch, tag or commit of the Hub model.
            implementation: how every operation is to run; None for the first that takes each call.

        Raises:
            CheckpointError: no such folder, a damaged one, or one that cannot be fetched.
            ConfigError: the configuration is malformed or not implemented.
            RequestError: the name is a preset's, which has no weights, or a revision of something
                that is not on the Hub.
        """
        from .. import hub
        from ..loading import find_runnable
        from ..text import Tokenizer

        if name.lower() in PRESET_NAMES and not Path(name).exists():
            raise RequestError(
                f"{name} names a shape, which has no weights; give a model folder, or demo"
            )
        if hub.is_hub_id(name):
            notes(f"{name}: fetching from the Hub what is not cached")
        path = find_runnable(name, revision, quiet=notes.quiet)
        config = QwenConfig.from_hf(path)
        config = dataclasses.replace(
            config,
            dtype=choose_dtype(config.dtype, dtype, notes),
            implementation=implementation,
        )
        return cls(name, path, config, Tokenizer.from_folder(path))

    def sampling(self, flags: SamplingFlags, notes: Notes) -> SamplingOptions:
        """The options that the model's authors recommend, with the flags in their place."""
        from ..decode import SamplingOptions

        options = flags.over(SamplingOptions.from_generation_config(self.path))
        idle = flags.idle(options)
        if idle:
            notes(
                f"note: temperature is 0 (greedy), so {', '.join(idle)} has no effect; "
                "set --temperature"
            )
        return options

    def refuse_early(self, tokens: int, kv_cache_dtype: str | None = None) -> None:
        """Raise what loading would raise, with room for a cache, before the weights are read.

        Args:
            tokens: prompt and output that the cache must hold.
            kv_cache_dtype: of the cache, as in `init_cache`.

        Raises:
            CheckpointError: the weights are missing, damaged, of a foreign quantised format, or
                another model's.
            MemoryLimitError: weights and cache cannot fit.
        """
        from ..accounting import cache_bytes, weight_bytes
        from ..checkpoint.plan import plan_load
        from ..checkpoint.safetensors_io import open_folder
        from ..memory import refuse_unless_fits

        plan = plan_load(open_folder(self.path), self.config)
        cache = cache_bytes(plan.config, 1, tokens, kv_cache_dtype)
        needed = weight_bytes(plan.config, plan.scheme) + cache
        stored = plan.scheme.described(self.config.dtype)
        what = f"{self.name} in {stored} with a cache of {tokens} tokens"
        refuse_unless_fits(needed, what)

    def load(self, notes: Notes) -> CausalLM:
        """Read the weights."""
        from ..accounting import weight_bytes
        from ..checkpoint.formats import read_scheme
        from ..loading import load

        begin = time.perf_counter()

        def announce(plan: LoadPlan) -> None:
            found = f"{len(plan.sources)} tensors, {size(plan.nbytes)}"
            remarks = "".join(f"; {note}" for note in plan.notes)
            stored = plan.scheme.described(self.config.dtype)
            notes(f"loading {self.name}: {found}, as {stored}{remarks}")

        scheme = read_scheme(self.path, ())
        total = weight_bytes(self.config, scheme)
        with notes.progress(f"loading {self.name}", total) as advance:
            model, _ = load(
                self.path,
                dtype=self.config.dtype,
                implementation=self.config.implementation,
                progress=lambda _, nbytes: advance(nbytes),
                on_plan=announce,
            )
        notes(f"loaded in {time.perf_counter() - begin:.1f} s")
        return model


def choose_dtype(own: str, asked: str | None, notes: Callable[[str], None]) -> str:
    """The dtype asked for, else the model's own; on a CPU float32: faster there, and more exact."""
    platform = default_platform()
    if asked is not None:
        return asked
    if platform == "cpu" and own != "float32":
        notes(f"float32 on this CPU, where {own} is slower and less exact; --dtype {own} keeps it")
        return "float32"
    return own
