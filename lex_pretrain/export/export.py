"""`lex-pretrain export`: a checkpoint as a folder that `transformers` loads where this program is not installed.

The folder remains a checkpoint to this program: it holds the same `model.safetensors`, `config.yaml` and
`tokenizer.model`, so `evaluate` and `generate` read it by the very code that reads a checkpoint.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from lex_pretrain.export.sources import collect_sources
from lex_pretrain.files import atomic_folder, write_json, write_text
from lex_pretrain.hardware import TORCH_DTYPES
from lex_pretrain.loading import EXPORTED_CONFIG_FILE, LoadedModel, load_decoder
from lex_pretrain.run_folder import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, listed_file, write_listing
from lex_pretrain.tokenizer import Tokenizer

_MODULES = ("configuration_lex", "modeling_lex", "tokenization_lex")


def export_model(run_or_checkpoint: Path, output: Path) -> Path:
    """Make the folder `output`, whole or not at all; returns the checkpoint that it was made of.

    Raises RequestError when there is no checkpoint, when its files do not fit each other, and when `output` is there
    already and not an empty folder.
    """
    model = load_decoder(run_or_checkpoint, torch.device("cpu"), TORCH_DTYPES.__getitem__)
    tokenizer = Tokenizer(model.tokenizer_file)
    eod = {f"{role}_token": tokenizer.piece(tokenizer.eod_id) for role in ("bos", "eos", "pad")}
    with atomic_folder(output) as folder:
        for name in (WEIGHTS_FILE, CONFIG_FILE, TOKENIZER_FILE):
            shutil.copyfile(model.checkpoint_folder / name, folder / name)
        for name, text in collect_sources([f"{__package__}.{module}" for module in _MODULES]).items():
            write_text(folder / name, text)
        write_json(folder / EXPORTED_CONFIG_FILE, _model_config(model))
        write_json(folder / "generation_config.json", {f"{name}_id": tokenizer.eod_id for name in eod})
        write_json(folder / "tokenizer_config.json", _tokenizer_config(eod))
        written = sorted(file.name for file in folder.iterdir())
        write_listing(folder, [listed_file(folder, name) for name in written], model.step)
    return model.checkpoint_folder


def _model_config(model: LoadedModel) -> dict[str, Any]:
    return {
        "model_type": "lex",
        "architectures": ["LexForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_lex.LexConfig",
            "AutoModelForCausalLM": "modeling_lex.LexForCausalLM",
        },
        "dtype": str(TORCH_DTYPES[model.config.train.precision]).removeprefix("torch."),
        "attention_mode": "blockwise",
        "step": model.step,
        "model": model.config.model.model_dump(mode="json"),
    }


def _tokenizer_config(eod: dict[str, str]) -> dict[str, Any]:
    return {
        "tokenizer_class": "LexTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_lex.LexTokenizer", None]},
        **eod,
        "split_special_tokens": True,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
