"""How much longer 100,000 small files take than the same texts in one `.jsonl`, with two workers."""

import contextlib
import json
import shutil
import sysconfig
import tempfile
from pathlib import Path

from data_prep import packing
from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from data_prep.train_tokenizer import train_tokenizer
from lex_pretrain.progress import logger
from tests.benchmarks.timing import median_seconds

_NUM_FILES = 100_000
_FILE_CHARACTERS = 1_000
_FILES_A_FOLDER = 1_000
_VOCAB_SIZE = 8_192


def run() -> list[str]:
    """Lines of the result: medians of five, taken in turns."""
    logger.setLevel("WARNING")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = _texts()
        model = folder / "tokenizer.model"
        model.write_bytes(train_tokenizer(texts[::20], _VOCAB_SIZE))
        _write(texts, folder)
        seconds = median_seconds(
            {
                "files": lambda: _prepare(folder / "files", model, folder / "out"),
                "jsonl": lambda: _prepare(folder / "all.jsonl", model, folder / "out"),
            }
        )
        num_bytes = (folder / "all.jsonl").stat().st_size
        return [
            f"small files: {_NUM_FILES:,} of {_FILE_CHARACTERS:,} characters, {num_bytes / 1e6:,.0f} MB as .jsonl, "
            "two workers",
            f"  files {seconds['files']:.1f} s, .jsonl {seconds['jsonl']:.1f} s: "
            f"{seconds['files'] / seconds['jsonl']:.2f} times as long",
        ]


def _texts() -> list[str]:
    """Pieces of Python's own sources, each with a number of its own, so that none is dropped as a duplicate."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    stream = "".join(source.read_text(encoding="utf-8", errors="ignore") for source in sources)
    step = (len(stream) - _FILE_CHARACTERS) // _NUM_FILES
    return [f"{n}\n{stream[n * step : n * step + _FILE_CHARACTERS]}" for n in range(_NUM_FILES)]


def _write(texts: list[str], folder: Path) -> None:
    with (folder / "all.jsonl").open("w", encoding="utf-8") as lines:
        for number, text in enumerate(texts):
            lines.write(json.dumps({"text": text}) + "\n")
            place = folder / "files" / f"{number // _FILES_A_FOLDER:03d}"
            if number % _FILES_A_FOLDER == 0:
                place.mkdir(parents=True)
            (place / f"{number:06d}.txt").write_text(text, encoding="utf-8")


def _prepare(given: Path, model: Path, output: Path) -> None:
    shutil.rmtree(output, ignore_errors=True)
    packing._encoder.cache_clear()
    with contextlib.redirect_stderr(None):
        prepare([str(given)], output, PrepareOptions(tokenizer=model), 2)
