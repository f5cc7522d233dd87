"""A trained decoder from a run, one of its checkpoints or an exported folder, ready to evaluate or to generate."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file

from lex_pretrain.config import Config, Precision
from lex_pretrain.errors import RequestError
from lex_pretrain.files import read_json
from lex_pretrain.model.decoder import Decoder

CHECKPOINTS_FOLDER = "checkpoints"
CONFIG_FILE = "config.yaml"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.model"
# A folder of `lex-pretrain export` has this as well; a checkpoint has its step in its name.
EXPORTED_CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class LoadedModel:
    """A decoder in evaluation mode with what it was trained from."""

    decoder: Decoder
    config: Config
    tokenizer_file: Path
    step: int
    checkpoint_folder: Path


def find_checkpoint(run_or_checkpoint: Path) -> Path:
    """The checkpoint folder meant: itself, or the newest complete one of a run. RequestError when there is none."""
    if (run_or_checkpoint / WEIGHTS_FILE).is_file():
        return run_or_checkpoint
    checkpoints = sorted((run_or_checkpoint / CHECKPOINTS_FOLDER).glob("step-*/" + WEIGHTS_FILE))
    if not checkpoints:
        raise RequestError(
            f"{run_or_checkpoint} is neither a checkpoint (no {WEIGHTS_FILE} in it) nor a run with one "
            f"(no {CHECKPOINTS_FOLDER}/step-*/{WEIGHTS_FILE} in it)"
        )
    return checkpoints[-1].parent


def load_decoder(
    run_or_checkpoint: Path, device: torch.device, dtype_of: Callable[[Precision], torch.dtype]
) -> LoadedModel:
    """A decoder in the number format that `dtype_of` chooses for the precision of its training.

    Raises RequestError, naming the file, when something is missing, belongs to another architecture or tells no step.
    """
    folder = find_checkpoint(run_or_checkpoint)
    step = _step_of(folder)
    config = _load_config(folder / CONFIG_FILE)
    with torch.device("meta"):
        decoder = Decoder(config.model)
    weights = load_file(folder / WEIGHTS_FILE, device=str(device))
    if config.model.tie_embeddings:
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
    exported = folder / EXPORTED_CONFIG_FILE
    if exported.is_file():
        return int(read_json(exported)["step"])
    if not folder.name.startswith("step-"):
        return 0
    number = folder.name.removeprefix("step-")
    if not (number.isascii() and number.isdecimal()):
        raise RequestError(
            f"{folder}: a checkpoint's folder is named after its step, such as step-00000100, and {number!r} is none. "
            "Give it the name it had, or one that does not begin with step-"
        )
    return int(number)


def _load_config(path: Path) -> Config:
    try:
        return Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RequestError(f"{path} is missing: not a checkpoint of this program, or an incomplete copy") from None
    except (yaml.YAMLError, ValidationError) as error:
        raise RequestError(f"{path} is not a config of this version: {error}") from error
