"""Models of the Hugging Face Hub: from an id to the folder in the local cache with its files.

Where the cache lies, which account is used and whether the network may be used is the library's to
decide: `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `HF_ENDPOINT` mean what they always mean.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from .checkpoint.index import INDEX, read_index
from .checkpoint.native import RECORD, TOKENIZER_FILES
from .checkpoint.problems import listed, show
from .errors import CheckpointError

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    INDEX,
    *TOKENIZER_FILES,
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "quant_config.json",
    RECORD,
    "LICENSE",
)
_CONFIG, _SINGLE = "config.json", "model.safetensors"
# Other frameworks' copies of the same weights.
_FOREIGN = ("consolidated*", "adapter_model*")
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(f"{_NAME}/{_NAME}")


def is_hub_id(text: str) -> bool:
    """Says whether a model argument is read as a Hub id: `organisation/name`, and no path here."""
    if _ID.fullmatch(text) is None or "--" in text or ".." in text or text.endswith(".git"):
        return False
    return not os.path.lexists(text)


def fetch(
    model_id: str, revision: str | None = None, *, weights: bool = True, quiet: bool = False
) -> Path:
    """Brings the files of a model into the local cache, those that are not there yet.

    Only files that this project reads are asked for: configuration, tokenizer, index, and the
    safetensors files that the index lists (without an index `model.safetensors`, or the only
    safetensors file). Without a network, what the cache has is taken if it is complete.

    Args:
        model_id: `organisation/name`.
        revision: a branch, a tag or a commit; the main branch if None.
        weights: whether the weights are wanted too.
        quiet: show no progress bars, which the library shows on a terminal.

    Returns:
        The folder, named after the commit; its files are links into the cache.

    Raises:
        CheckpointError: no such model or revision, no access to it, no network and no complete
            copy in the cache, no room on the disk, or a model without safetensors weights.
    """
    named = model_id if revision is None else f"{model_id} at revision {show(revision)}"
    folder = _download(model_id, revision, SIDE_FILES, named, quiet)
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(
            f"{named} has no {_CONFIG}{_other_files(model_id, folder)}; give the id of a release "
            "in the Transformers layout, or a local folder"
        )
    if weights:
        fetch_weights(model_id, folder, quiet=quiet)
    return folder


def fetch_weights(model_id: str, folder: Path, *, quiet: bool = False) -> None:
    """Brings the weights of a model into the folder in the cache that has its small files.

    Args:
        model_id: `organisation/name`.
        folder: what `fetch` gave for it.
        quiet: show no progress bars.

    Raises:
        CheckpointError: as `fetch`.
    """
    names = _weight_files(model_id, folder)
    lacking = _lacking(folder, names)
    if lacking:
        # By commit, which names the folder: the branch may have moved on since.
        _download(model_id, folder.name, lacking, model_id, quiet)
        lacking = _lacking(folder, names)
    if lacking:  # some versions of the library pass over this where there is no network
        raise CheckpointError(
            f"{len(lacking)} of the weight files of {model_id} are not in the cache ({folder}), "
            f"such as {show(lacking[0])}, and the Hub cannot be reached; unset HF_HUB_OFFLINE or "
            "connect to the network and repeat the command, or give a local folder"
        )


def has_weights(folder: Path) -> bool:
    """Says whether all weights of a folder in the cache have been fetched."""
    if (folder / INDEX).is_file():
        return not _lacking(folder, _indexed(folder / INDEX))
    return any(folder.glob("*.safetensors"))


def _download(
    model_id: str, revision: str | None, names: Sequence[str], named: str, quiet: bool
) -> Path:
    from huggingface_hub import constants, snapshot_download

    options = {
        "revision": revision,
        "allow_patterns": [glob.escape(name) for name in names],
        # Said again because some versions ask the network for the files of a commit all the same.
        "local_files_only": constants.HF_HUB_OFFLINE,
    }
    try:
        with _bars_hidden() if quiet else contextlib.nullcontext():
            return Path(snapshot_download(model_id, **options))
    except Exception as error:  # whatever the network library of the day raises
        raise CheckpointError(_explain(error, model_id, named)) from error


def _lacking(folder: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not (folder / name).is_file()]


def _weight_files(model_id: str, folder: Path) -> list[str]:
    """Names of the files that hold the weights."""
    if (folder / INDEX).is_file():
        return _indexed(folder / INDEX)
    names = _listing(model_id, folder) or [file.name for file in folder.iterdir()]
    candidates = sorted(
        name
        for name in names
        if name.endswith(".safetensors")
        and "/" not in name
        and not any(fnmatch.fnmatch(name, pattern) for pattern in _FOREIGN)
    )
    if _SINGLE in candidates or len(candidates) == 1:
        return [_SINGLE] if _SINGLE in candidates else candidates
    found = "several safetensors files" if candidates else "no safetensors weights"
    raise CheckpointError(
        f"{model_id} has {found} and no {INDEX}{_other_files(model_id, folder)}; give the id of "
        "a release with safetensors weights, or a local folder"
    )


def _indexed(index: Path) -> list[str]:
    """The shards that an index lists, each once."""
    return sorted(set(read_index(index).values()))


def _listing(model_id: str, folder: Path) -> list[str]:
    """All files of the repository at a folder's commit; none where the Hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(model_id, revision=folder.name)
    except Exception:  # no network: the caller goes by what is there
        return []


def _other_files(model_id: str, folder: Path) -> str:
    names = sorted(name for name in _listing(model_id, folder) if not name.startswith("."))
    return f" (it has {listed(names)})" if names else ""


@contextlib.contextmanager
def _bars_hidden() -> Iterator[None]:
    from huggingface_hub import utils

    hidden = utils.are_progress_bars_disabled()
    # An environment variable that asks for bars wins over this.
    if hidden or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is not None:
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _explain(error: Exception, model_id: str, named: str) -> str:
    """What went wrong in words, and what to do next."""
    from huggingface_hub import constants, errors

    causes = list(_causes(error))
    cache, page = constants.HF_HUB_CACHE, f"{constants.ENDPOINT}/{model_id}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if any(_disk_full(cause) for cause in causes):
        return (
            f"the disk is full: {named} does not fit into the cache {cache}; make room, or set "
            "HF_HOME to a folder on a larger disk, and repeat the command: finished files are kept"
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{model_id} is gated: ask for access on {page}, run `hf auth login` (or set HF_TOKEN) "
            "and repeat the command, or give a local folder"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {model_id}, and the Hub shows no model of that name to this "
            "account; check the spelling, run `hf auth login` if the model is private, or give a "
            "local folder"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"there is no {named}; give a branch, a tag or a full commit that {page} shows"
    if status in (401, 403):
        return (
            f"the Hub refuses access to {named} ({_line(error)}); run `hf auth login`, check that "
            "HF_TOKEN is valid, or give a local folder"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return (
            f"the cache {cache} cannot be written ({_line(error)}); set HF_HOME to a folder that "
            "can, or give a local folder"
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return (
            f"HF_HUB_OFFLINE is set, and the cache {cache} does not hold all that is needed of "
            f"{named}; unset it, fetch the model first with `hf download {model_id}`, or give a "
            "local folder"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"the Hub at {constants.ENDPOINT} cannot be reached ({_line(causes[-1])}), and the "
            f"cache {cache} does not hold all that is needed of {named}; check the network, proxy "
            "settings and HF_ENDPOINT, or give a local folder"
        )
    return (
        f"{named} could not be fetched from the Hub ({type(error).__name__}: {_line(error)}); "
        "repeat the command (finished files are kept), or give a local folder"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it, the newest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__  # type: ignore[assignment]


def _disk_full(error: BaseException) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in full or "No space left on device" in str(error)


def _line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:200]
