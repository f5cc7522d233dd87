"""Checkpoints of another number of processes or another ZeRO stage, by DeepSpeed's universal checkpoint."""

import concurrent.futures
import importlib.metadata
import logging
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lex_pretrain.errors import JobError, SharedJobError
from lex_pretrain.ranks import Ranks, die_with_parent, gather_lists
from lex_pretrain.train.snapshot import start_thread

SECONDS_BETWEEN_MEETINGS = 10.0

_STATES = ("fp32", "exp_avg", "exp_avg_sq")
_PARTITIONED_MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_WHOLE_MODEL_FILE = "mp_rank_00_model_states.pt"

logger = logging.getLogger("lex_pretrain")


def convert_on_first_rank(source: Path, destination: Path, from_stage: int, to_stage: int, ranks: Ranks) -> None:
    """`convert_to_universal` on rank 0, while all ranks wait; collective. SharedJobError on all when it fails.

    They meet every few seconds, as a conversion may take longer than any collective may wait (COLLECTIVE_TIMEOUT).
    """
    conversion = None
    if ranks.rank == 0:
        conversion = start_thread(partial(convert_to_universal, source, destination, from_stage, to_stage))
    done = False
    while not done:
        if conversion is not None:
            concurrent.futures.wait([conversion], SECONDS_BETWEEN_MEETINGS)
        (done,) = gather_lists([conversion.done()] if conversion is not None else [], ranks)
    error = conversion.exception() if conversion is not None else None
    message = str(error) if isinstance(error, JobError) else f"{source} could not be converted: {error!r}"
    if messages := gather_lists([message] if error is not None else [], ranks):
        raise SharedJobError(messages[0]) from error


def convert_to_universal(source: Path, destination: Path, from_stage: int, to_stage: int) -> None:
    """Write DeepSpeed's files in `source` into `destination` in the form that any number of processes loads.

    `destination` is made anew. The stages are 1, 2 or 3; stage 0 has no such form. A process of its own: the converter
    starts workers, which must not inherit this one's process group. Raises JobError with the converter's last words
    when it fails.
    """
    logger.info("converting %s for this number of processes and ZeRO stage", source.parent.name)
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
        *("--input_folder", str(source), "--output_folder", str(destination)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=die_with_parent)
    if done.returncode != 0:
        last_words = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise JobError(f"DeepSpeed could not convert {source} to a universal checkpoint:\n{last_words}")
    if to_stage == 3 and from_stage != 3:
        _give_form_of_partitioned_weights(destination)
    elif from_stage == 3 and to_stage != 3:
        _give_form_of_whole_weights(destination)


def _give_form_of_partitioned_weights(universal: Path) -> None:
    """Turn a universal checkpoint of ZeRO 1 or 2 into one that ZeRO 3 loads.

    DeepSpeed 0.19 reads the same states of a parameter from either, but at stage 3 looks for the optimizer's step in
    one place for all parameters, and for what is not a parameter in a file of another name.
    """
    common = _load_common(universal)
    step = torch.load(next((universal / "zero").rglob("step.pt")), weights_only=False)
    common["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": common["param_groups"]}
    _save_common(common, universal)
    (universal / _WHOLE_MODEL_FILE).rename(universal / _PARTITIONED_MODEL_FILE)


def _give_form_of_whole_weights(universal: Path) -> None:
    """Turn a universal checkpoint of ZeRO 3 into one that ZeRO 1 and 2 load: the step beside every parameter."""
    common = _load_common(universal)
    step = common.pop("optimizer_state_dict")["state"][0]["step"]
    _save_common({**common, "ds_version": importlib.metadata.version("deepspeed")}, universal)
    for file in (universal / "zero").rglob("fp32.pt"):
        torch.save(step, file.with_name("step.pt"))
        for state in (file.with_name(f"{name}.pt") for name in _STATES):
            torch.save({"param": torch.load(state, weights_only=True)}, state)
    (universal / _PARTITIONED_MODEL_FILE).rename(universal / _WHOLE_MODEL_FILE)


def _load_common(universal: Path) -> dict[str, Any]:
    """What all parameters share. It holds DeepSpeed's loss scaler, which DeepSpeed unpickles here too when it loads."""
    common: dict[str, Any] = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    return common


def _save_common(common: dict[str, Any], universal: Path) -> None:
    torch.save(common, universal / "zero" / "optimizer_state.pt")
