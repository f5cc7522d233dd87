"""Where a run starts: afresh, or from a checkpoint that belongs to it."""

from pathlib import Path

from lex_pretrain.config import Config
from lex_pretrain.config_io import differing_keys, load_config
from lex_pretrain.data.order import ORDER_VERSION
from lex_pretrain.errors import RequestError
from lex_pretrain.run_folder import CONFIG_FILE, step_folder, step_folders
from lex_pretrain.train.checkpoint import Checkpoints
from lex_pretrain.train.state import TrainState

NEVER = "never"

# Keys that may change between stop and resume: they move neither the data order nor the meaning of what was saved.
HARMLESS_KEYS = (
    "run.output_dir",
    "data.path",
    "train.num_steps",
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "train.compile_layers",
    "train.max_bad_steps",
    "train.spike_",
    "train.max_rewinds",
    "train.step_timeout_seconds",
    "zero.",
    "train.validate_every_steps",
    "train.validation_num_sequences",
    "checkpoint.",
    "monitor.",
)


def check_same_run(config: Config, output_dir: Path, resume: str | None) -> None:
    """Raises RequestError, naming the keys, when the output folder holds a run of another config."""
    file = output_dir / CONFIG_FILE
    if not file.is_file():
        return
    if resume == NEVER:
        raise RequestError(f"{output_dir} already holds a run; --resume never needs an empty run.output_dir")
    old, new = (run.in_steps().model_dump(mode="json") for run in (load_config(file), config))
    faults = [fault for fault in differing_keys(old, new) if not fault.startswith(HARMLESS_KEYS)]
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise RequestError(
            f"{output_dir} holds another run; these keys differ:\n{listed}\n"
            "restore them to go on with that run, or choose another run.output_dir"
        )


def find_start(checkpoints: Checkpoints, resume: str | None, data_fingerprint: str) -> tuple[Path, TrainState] | None:
    """The verified checkpoint to start from, or None to start afresh. An explicit wish that cannot be met fails."""
    if resume == NEVER:
        return None
    if resume is None:
        start = checkpoints.newest_good()
        if start is None and (aside := checkpoints.set_aside()):
            raise RequestError(
                f"{checkpoints.folder} holds no checkpoint but those set aside for a start from elsewhere, which ended "
                f"before its first save; repeat that --resume PATH, or name one of them, such as --resume {aside[-1]}"
            )
    else:
        is_step = resume.isascii() and resume.isdecimal()
        folder = step_folder(checkpoints.folder, int(resume)) if is_step else Path(resume)
        if not folder.is_dir():
            there = ", ".join(path.name for path in step_folders(checkpoints.folder).values()) or "none"
            raise RequestError(f"--resume {resume}: {folder} does not exist; checkpoints there: {there}")
        if faults := checkpoints.verify(folder):
            raise RequestError(f"--resume {resume}: {folder} is broken: {'; '.join(faults)}")
        start = (folder, checkpoints.read_state(folder))
    if start is None:
        return None
    checkpoint, state = start
    if state.order_version != ORDER_VERSION:
        raise RequestError(
            f"{checkpoint}: its samples were dealt in order version {state.order_version}, and this program deals "
            f"version {ORDER_VERSION}; going on would repeat some windows and miss others. Go on with the lex-pretrain "
            "that began the run, or start anew in another run.output_dir; its weights can be evaluated and exported "
            "all the same"
        )
    if state.data_fingerprint != data_fingerprint:
        raise RequestError(
            f"{checkpoint} was trained on other data (fingerprint {state.data_fingerprint[:12]} there, "
            f"{data_fingerprint[:12]} here); point data at the dataset it was made from"
        )
    return start
