"""Small real inputs that many tests share: a corpus, a dataset prepared from it, and the program as a subprocess."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.progress import logger
from lex_pretrain.run_folder import LISTING_FILE, listed_file, step_of_name, write_listing

WORDS = """
length block window scale token query key value layer head decoder attention position rotate decay train shard resume
measure model text learn long short causal of the a to and in is that for it as with on by
""".split()  # noqa: SIM905

Program = Callable[..., "subprocess.CompletedProcess[str]"]


def make_text(seed: int, num_words: int) -> str:
    """Readable text with lines, indentation and some repetition for a model to learn."""
    generator = random.Random(seed)
    topic = generator.sample(WORDS, 8)
    lines = []
    while num_words > 0:
        words = [generator.choice(topic) for _ in range(min(num_words, generator.randint(3, 12)))]
        lines.append("    " * generator.randint(0, 2) + " ".join(words))
        num_words -= len(words)
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each() -> Iterator[None]:
    """Tests run beside each other; more threads than cores would only slow all of them down."""
    before = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before


@pytest.fixture(autouse=True)
def _no_ranks_left() -> Iterator[None]:
    """A job that runs in the test's own process leaves its ranks in the environment; no later job may find them."""
    yield
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """The command line sets up the log of its process; a test that ran it here must not do so for the next one."""
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 120 text files, every tenth of them long."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(120):
        text = make_text(number, 1500 if number % 10 == 0 else 150)
        (folder / f"document-{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus prepared with a tokenizer of 320 pieces and splits of a fifth each."""
    folder = tmp_path_factory.mktemp("dataset") / "prepared"
    options = PrepareOptions(vocab_size=320, validation_fraction=0.2, test_fraction=0.2, unit_bytes=50_000)
    prepare([str(corpus)], folder, options, num_workers=1)
    return folder


@pytest.fixture
def tiny_config(dataset: Path, tmp_path: Path) -> Callable[..., Config]:
    """Makes the config of a run of seconds; keywords override sections, such as `model={"position": "rope"}`."""

    def make(**sections: dict[str, object]) -> Config:
        values: dict[str, dict[str, object]] = {
            "run": {"output_dir": str(tmp_path / "run")},
            "data": {"path": str(dataset)},
            "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "sequence_length": 32},
            "train": {"num_steps": 6, "global_batch_size": 8, "precision": "fp32"},
            "optimizer": {"learning_rate": 3e-3},
            "schedule": {"warmup_steps": 2},
            "checkpoint": {"every_steps": 3},
            "monitor": {"log_every_steps": 1, "wandb_mode": "disabled"},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        return Config.model_validate(values)

    return make


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Runs `lex-pretrain ARGS...` in a folder of its own; the result holds its exit code, stdout and stderr."""

    def run(*arguments: str | Path, timeout_seconds: float = 240) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "lex_pretrain", *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )

    return run


def run_forked(*runs: tuple[Path | int | str, ...]) -> str:
    """The log of trainings one after the other, as tests/forked_runs.py does them."""
    arguments = [",".join(map(str, run)) for run in runs]
    done = subprocess.run(
        [sys.executable, "-m", "tests.forked_runs", *arguments],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def save_checkpoint(folder: Path, config: Config, dataset: Path) -> Path:
    """A checkpoint of random weights, made without training; what training adds for itself is not in it."""
    from safetensors.torch import save_file

    from lex_pretrain.model.decoder import Decoder
    from lex_pretrain.train.snapshot import gather_weights
    from lex_pretrain.train.trainer import resolve_vocab_size

    folder.mkdir(parents=True)
    config = resolve_vocab_size(config, 320)
    torch.manual_seed(0)
    save_file(gather_weights(Decoder(config.model), keep=True), folder / "model.safetensors")
    save_config(config, folder / "config.yaml")
    (folder / "tokenizer.model").write_bytes((dataset / "tokenizer.model").read_bytes())
    return list_files(folder)


def list_files(folder: Path) -> Path:
    """Write the list of the files that the folder of a checkpoint holds now; a test that changes one does so again."""
    names = sorted(file.name for file in folder.iterdir() if file.name != LISTING_FILE)
    write_listing(folder, [listed_file(folder, name) for name in names], step_of_name(folder))
    return folder


@pytest.fixture
def checkpoint(tiny_config: Callable[..., Config], dataset: Path, tmp_path: Path) -> Path:
    """The only checkpoint of a run."""
    return save_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000007", tiny_config(), dataset)
