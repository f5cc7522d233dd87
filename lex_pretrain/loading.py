"""A trained decoder from a run, one of its checkpoints or an exported folder, ready to evaluate or to generate."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from lex_pretrain.config import Config, Precision
from lex_pretrain.errors import RequestError
from lex_pretrain.files import read_json
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.run_folder import (
    CONFIG_FILE,
    LISTING_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    faults_of,
    find_checkpoint,
    read_listing,
    step_folders,
    step_of_name,
)

# A folder of `lex-pretrain export` has this as well.
EXPORTED_CONFIG_FILE = "config.json"

logger = logging.getLogger("lex_pretrain")


@dataclass(frozen=True)
class LoadedModel:
    """A decoder in evaluation mode with what it was trained from."""

    decoder: Decoder
    config: Config
    tokenizer_file: Path
    step: int
    checkpoint_folder: Path


def load_decoder(
    run_or_checkpoint: Path, device: torch.device, dtype_of: Callable[[Precision], torch.dtype]
) -> LoadedModel:
    """A decoder in the number format that `dtype_of` chooses for the precision of its training.

    Raises RequestError, naming the file, when something is missing, is not what was saved, or belongs to another
    architecture; of a run the newest checkpoint is meant, and none takes its place.
    """
    folder = find_checkpoint(run_or_checkpoint)
    try:
        return _load_verified(folder, device, dtype_of)
    except (RequestError, OSError) as error:
        if folder.is_dir():
            raise
        # Training keeps the newest checkpoints only, and may have removed this one meanwhile.
        if folder != run_or_checkpoint:
            return _load_verified(find_checkpoint(run_or_checkpoint), device, dtype_of)
        raise RequestError(
            f"{folder} was removed while it was read; name a checkpoint that stays, or copy it first"
        ) from error


def _load_verified(folder: Path, device: torch.device, dtype_of: Callable[[Precision], torch.dtype]) -> LoadedModel:
    is_listed = (folder / LISTING_FILE).exists()
    if not is_listed and not (folder / EXPORTED_CONFIG_FILE).is_file():
        raise RequestError(f"{folder} has no {LISTING_FILE}: not a checkpoint of this program, or an incomplete copy")
    if not is_listed:
        logger.warning("%s has no %s, so nothing tells whether its files are whole", folder, LISTING_FILE)
    names = [CONFIG_FILE, TOKENIZER_FILE]
    names += [EXPORTED_CONFIG_FILE] if (folder / EXPORTED_CONFIG_FILE).is_file() else []
    _check(folder, faults_of(folder, names) if is_listed else [])
    with ThreadPoolExecutor(1) as beside:
        # Beside loading: both read the same bytes, which come from the disk once.
        weights_faults = beside.submit(faults_of, folder, [WEIGHTS_FILE]) if is_listed else None
        try:
            loaded = _load(folder, device, dtype_of)
        except RequestError:
            # What does not load because it is damaged is said to be damaged.
            _check(folder, weights_faults.result() if weights_faults else [])
            raise
        _check(folder, weights_faults.result() if weights_faults else [])
    return loaded


def _check(folder: Path, faults: list[str]) -> None:
    if not faults:
        return
    others = [str(path) for path in step_folders(folder.parent).values() if path != folder]
    way_out = f"; other checkpoints of the run: {', '.join(others)}" if others else "; restore it from a copy"
    raise RequestError(f"{folder} is damaged: {'; '.join(faults)}{way_out}")


def _load(folder: Path, device: torch.device, dtype_of: Callable[[Precision], torch.dtype]) -> LoadedModel:
    step = _step_of(folder)
    config = _load_config(folder / CONFIG_FILE)
    with torch.device("meta"):
        decoder = Decoder(config.model)
    try:
        weights = load_file(folder / WEIGHTS_FILE, device=str(device))
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
    if config.model.tie_embeddings and "embedding.weight" in weights:
        weights["output.weight"] = weights["embedding.weight"]
    try:
        decoder.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise RequestError(
            f"{folder / WEIGHTS_FILE} does not fit the architecture of {CONFIG_FILE}: {error}"
        ) from error
    return LoadedModel(
        decoder=decoder.to(dtype_of(config.train.precision)).eval().requires_grad_(False),
        config=config,
        tokenizer_file=folder / TOKENIZER_FILE,
        step=step,
        checkpoint_folder=folder,
    )


def _step_of(folder: Path) -> int:
    """The step that the checkpoint's own list of files says, whatever its folder is called by now."""
    exported = folder / EXPORTED_CONFIG_FILE
    if exported.is_file():
        step = read_json(exported).get("step")
        if not isinstance(step, int):
            raise RequestError(f"{exported} tells no step of the training; export the checkpoint again")
        return step
    step = read_listing(folder).step
    return step if step is not None else step_of_name(folder)


def _load_config(path: Path) -> Config:
    try:
        return Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RequestError(f"{path} is missing: not a checkpoint of this program, or an incomplete copy") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise RequestError(f"{path} is not a config of this version: {error}") from error
