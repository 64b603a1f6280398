"""What `qwen-jax train` begins with: a configuration, weights, a tokenizer and texts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration.presets import PRESET_NAMES
from ..errors import RequestError
from .flags import about, flags_of
from .training import DescentFlags, ScopeFlags, shape_of

if TYPE_CHECKING:
    import numpy as np

    from ..config import QwenConfig
    from ..text import Tokenizer
    from ..train import Batch, Data, Split, Trainer, Training
    from ..train.lora import Lora


@dataclasses.dataclass(frozen=True)
class Source:
    """What training begins with.

    Attributes:
        config: of the computation.
        folder: whose weights go on; None for new ones.
        tokenizer_folder: None where there is none.
        tokenizer: None where there is none.
    """

    config: QwenConfig
    folder: Path | None
    tokenizer_folder: Path | None
    tokenizer: Tokenizer | None

    @classmethod
    def open(cls, model: str, weights: str, tokenizer: str | None, dtype: str | None) -> Source:
        """Read configuration and tokenizer; arguments are those of `train`.

        Raises:
            RequestError: no model, or a shape where weights are due.
            CheckpointError: there is no such folder.
        """
        from ..config import QwenConfig
        from ..loading import find_folder, find_runnable
        from ..text import Tokenizer

        if not model.strip():
            raise RequestError("the model is empty; give a model folder, or demo")
        if weights == "own" and model.lower() in PRESET_NAMES and not Path(model).exists():
            raise RequestError(
                f"{model} is a preset: a shape without weights. Accepted are a model folder, demo, "
                "and organisation/name for a model on the Hub; with --weights new, a preset too"
            )
        if weights == "own":
            folder = find_runnable(model)
            config, at = QwenConfig.from_hf(folder), folder
        else:
            config, folder, at = shape_of(model), None, None
            if Path(model).is_dir() or model == "demo":
                at = find_folder(model)
        at = find_folder(tokenizer) if tokenizer is not None else at
        config = dataclasses.replace(
            config, dtype=dtype or config.dtype, implementation="reference"
        )
        return cls(config, folder, at, None if at is None else Tokenizer.from_folder(at))

    def shapes(self) -> dict[str, Any]:
        """Shapes and dtypes of the parameters by tree path, in codes where the folder's are.

        Raises:
            CheckpointError: the folder's weights are missing, damaged, or another model's.
        """
        from ..checkpoint.plan import plan_load
        from ..checkpoint.safetensors_io import open_folder
        from ..model import parameter_shapes
        from ..quant.abstract import in_codes

        shapes = parameter_shapes(self.config)
        if self.folder is None:
            return dict(shapes)
        return in_codes(shapes, plan_load(open_folder(self.folder), self.config).scheme)

    def trainer(
        self, training: Training, scope: ScopeFlags, lora: Lora | None, mesh: Any
    ) -> tuple[Trainer, Split]:
        """The trainer, and the parameters on the device."""
        import jax

        from ..loading import load
        from ..model import CausalLM, initialise
        from ..train import Split, Trainer, parameters_of, split

        if self.folder is None:
            wide = dataclasses.replace(self.config, dtype="float32")
            start = initialise(wide, jax.random.key(training.seed))
            model = CausalLM(self.config)
        else:
            start, _ = load(self.folder, dtype=self.config.dtype, implementation="reference")
            model = start
        parameters = parameters_of(start)
        if lora is None:
            with about("--only"):
                parts = split(parameters, scope.only or ("*",))
            return Trainer(model, training, mesh=mesh), parts
        with about("--lora-rank, --lora-targets"):
            thin = lora.start(parameters, jax.random.key(training.seed))
        return Trainer(model, training, lora.merged, mesh), Split(thin, parameters)

    def write(
        self, changed: dict[str, Any], fixed: dict[str, Any], destination: Path, limit: int
    ) -> int:
        """Write the folder of changed parameters and those that stayed; its bytes."""
        import numpy as np

        from convert.run import run
        from convert.trained import plan_trained, write_new

        if self.folder is not None:
            arrays = {name: np.asarray(value) for name, value in changed.items()}
            plan = plan_trained(self.folder, arrays)
            return run(plan, destination, max_shard_bytes=limit).nbytes
        from ..model import parameter_shapes

        like = parameter_shapes(self.config)
        whole = {**fixed, **changed}
        arrays = {name: np.asarray(x.astype(like[name].dtype)) for name, x in whole.items()}
        return write_new(
            self.config,
            arrays,
            destination,
            tokenizer=self.tokenizer_folder,
            max_shard_bytes=limit,
        ).nbytes


def read_texts(
    source: Source, names: tuple[str, ...], held_out: str | None, descent: DescentFlags
) -> tuple[Data, list[Batch]]:
    """What is trained on, and what is looked at.

    Raises:
        RequestError: a text that is too short or cannot be read, or a number outside its range.
    """
    from ..evaluate import read_documents
    from ..train import Data, held_out_batches, joined

    config = source.config
    if descent.window > config.max_position_embeddings:
        raise RequestError(
            f"--window is {descent.window}, but the model's context is "
            f"{config.max_position_embeddings} tokens; give a smaller one"
        )
    end = config.eos_token_id[0] if config.eos_token_id else None

    def tokens(*paths: str) -> np.ndarray:
        found = [read_documents(path, source.tokenizer, config.vocab_size) for path in paths]
        return joined([document.tokens for part in found for document in part], end)

    with flags_of(rows="batch_size", window="window", seed="seed"):
        data = Data(tokens(*names), descent.batch_size, descent.window, descent.seed)
    if held_out is None:
        return data, []
    return data, held_out_batches(tokens(held_out), descent.batch_size, descent.window)
