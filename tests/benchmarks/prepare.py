"""How fast text becomes shards, against SentencePiece alone and against other tools, on the same documents.

The rivals get the same tokenizer, the same file and as many processes; each writes ids in its own format. HF tokenizers
(datatrove) cannot read a SentencePiece model, so its pieces and merges are laid out for it, and the ids compared.
"""

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import packing
from data_prep.encoding import word_pattern
from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from data_prep.train_tokenizer import train_tokenizer
from lex_pretrain.progress import logger
from lex_pretrain.quickstart import copy_sources
from lex_pretrain.tokenizer import SPACE_SYMBOL, Tokenizer
from tests.benchmarks.timing import median_seconds

VOCAB_SIZE = 8192
_SAMPLE_BYTES = 8_000_000
_ROUNDS = 3
_BATCH_CHARACTERS = 1_000_000
_COMPARED_DOCUMENTS = 500
_NORMAL, _USER_DEFINED = 1, 4


def run(corpus: Path | None = None) -> list[str]:
    """Lines of the result, on a `.jsonl` or on Python's own sources."""
    logger.setLevel("WARNING")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = corpus or _python_corpus(folder)
        texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
        num_bytes = sum(len(text.encode()) for text in texts)
        sample = _sample(texts)
        lines = [f"prepare: {len(texts):,} documents, {num_bytes / 1e6:,.0f} MB, {VOCAB_SIZE} pieces"]
        models = {"plain": _train_suffix_model(sample), "words": train_tokenizer(sample, VOCAB_SIZE)}
        for kind, model in models.items():
            model_file = folder / f"{kind}.model"
            model_file.write_bytes(model)
            lines += _compare(kind, Tokenizer(model_file), file, texts, folder)
        return lines


def _compare(kind: str, tokenizer: Tokenizer, file: Path, texts: list[str], folder: Path) -> list[str]:
    works: dict[str, Callable[[], object]] = {
        "SentencePiece.encode alone, one thread": lambda: _encode(tokenizer, texts),
        "prepare, 1 worker": lambda: _prepare(tokenizer, file, folder / "out", 1),
        "prepare, 2 workers": lambda: _prepare(tokenizer, file, folder / "out", 2),
    }
    if (word_pattern(tokenizer) is not None) != (kind == "words"):
        raise RuntimeError(f"the {kind} model is of another kind")
    remarks = []
    if kind == "words":
        rival, agreement = _rival_tokenizer(tokenizer, texts, folder)
        remarks = [f"  (datatrove's ids are equal on {agreement:.1%} of {_COMPARED_DOCUMENTS} documents or of all)"]
        for number in (1, 2):
            works[f"datasets map, {number} process{'es' * (number - 1)}"] = _Datasets(tokenizer, file, folder, number)
            works[f"datatrove, {number} process{'es' * (number - 1)}"] = _Datatrove(rival, file, folder, number)
    seconds = median_seconds(works, _ROUNDS)
    raw = seconds["SentencePiece.encode alone, one thread"]
    num_bytes = sum(len(text.encode()) for text in texts)
    described = "a model that allows the plain way alone" if kind == "plain" else "a model whose words can be joined"
    return [
        f" {described}",
        *(
            f"  {work:40} {taken:7.1f} s  {num_bytes / 1e6 / taken:6.1f} MB/s  {raw / taken:5.2f} x encode alone"
            for work, taken in seconds.items()
        ),
        *remarks,
    ]


def _python_corpus(folder: Path) -> Path:
    sources = folder / "sources"
    copy_sources(sources)
    file = folder / "corpus.jsonl"
    with file.open("w", encoding="utf-8") as opened:
        for source in sorted(sources.iterdir()):
            opened.write(json.dumps({"text": source.read_text(encoding="utf-8")}) + "\n")
    return file


def train_on_python(folder: Path) -> bytes:
    """A tokenizer trained on Python's own sources."""
    texts = [json.loads(line)["text"] for line in _python_corpus(folder).read_text(encoding="utf-8").splitlines()]
    return train_tokenizer(_sample(texts), VOCAB_SIZE)


def _train_suffix_model(sample: list[str]) -> bytes:
    """A model that writes a space after its word, which leaves only the plain way of encoding."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(line for text in sample for line in text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        treat_whitespace_as_suffix=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        minloglevel=2,
    )
    return model.getvalue()


def _sample(texts: list[str]) -> list[str]:
    order = np.random.default_rng(0).permutation(len(texts))
    sample: list[str] = []
    while len(sample) < len(texts) and sum(map(len, sample)) < _SAMPLE_BYTES:
        sample.append(texts[order[len(sample)]])
    return sample


def _encode(tokenizer: Tokenizer, texts: list[str]) -> None:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= _BATCH_CHARACTERS:
            tokenizer.encode_arrays(batch)
            batch = []
    tokenizer.encode_arrays(batch)


def _prepare(tokenizer: Tokenizer, file: Path, output: Path, num_workers: int) -> None:
    shutil.rmtree(output, ignore_errors=True)
    # Every run meets its words anew.
    packing._encoder.cache_clear()
    with contextlib.redirect_stderr(None):
        prepare([str(file)], output, PrepareOptions(tokenizer=tokenizer.model_file, unit_bytes=2**23), num_workers)


class _Datasets:
    """`datasets`: a map over batches with SentencePiece, saved to disk."""

    def __init__(self, tokenizer: Tokenizer, file: Path, folder: Path, num_processes: int) -> None:
        self.model_file, self.file, self.output = tokenizer.model_file, file, folder / "datasets"
        self.num_processes = num_processes
        self._tokenizer: Tokenizer | None = None

    def __call__(self) -> None:
        import datasets

        datasets.disable_progress_bars()
        shutil.rmtree(self.output, ignore_errors=True)
        loaded = datasets.load_dataset(
            "json", data_files=str(self.file), split="train", cache_dir=str(self.output / "cache")
        )
        mapped = loaded.map(
            self.encode,
            batched=True,
            remove_columns=["text"],
            num_proc=self.num_processes if self.num_processes > 1 else None,
            load_from_cache_file=False,
        )
        mapped.save_to_disk(str(self.output / "saved"))

    def encode(self, batch: dict[str, list[str]]) -> dict[str, Any]:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.model_file)
        return {"ids": self._tokenizer.encode_arrays(batch["text"])}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tokenizer": None}


class _Datatrove:
    """datatrove: its reader and tokenizer, documents left in order."""

    def __init__(self, tokenizer_file: Path, file: Path, folder: Path, num_processes: int) -> None:
        self.tokenizer_file, self.output = tokenizer_file, folder / "datatrove"
        self.num_processes = num_processes
        # It spreads whole files over processes, so the file comes in as many parts.
        self.inputs = folder / f"parts-{num_processes}"
        self.inputs.mkdir()
        with file.open("rb") as opened, contextlib.ExitStack() as stack:
            parts = [stack.enter_context((self.inputs / f"{n}.jsonl").open("wb")) for n in range(num_processes)]
            for number, line in enumerate(opened):
                parts[number % num_processes].write(line)

    def __call__(self) -> None:
        from datatrove.executor import LocalPipelineExecutor
        from datatrove.pipeline.readers import JsonlReader
        from datatrove.pipeline.tokens import DocumentTokenizer
        from loguru import logger as loguru_logger

        loguru_logger.remove()
        # One thread a process, as for the others.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        shutil.rmtree(self.output, ignore_errors=True)
        LocalPipelineExecutor(
            pipeline=[
                JsonlReader(str(self.inputs)),
                DocumentTokenizer(
                    str(self.output / "tokens"),
                    tokenizer_name_or_path=str(self.tokenizer_file),
                    eos_token="</s>",
                    shuffle_documents=False,
                ),
            ],
            tasks=self.num_processes,
            logging_dir=str(self.output / "logs"),
        ).run()


def _rival_tokenizer(tokenizer: Tokenizer, texts: list[str], folder: Path) -> tuple[Path, float]:
    """The model as a file of HF tokenizers, the same words cut out beforehand, and the share of equal documents."""
    from tokenizers import Regex
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import BPE
    from tokenizers.normalizers import Replace
    from tokenizers.pre_tokenizers import Split

    pieces = {piece.piece: number for number, piece in enumerate(tokenizer.settings().pieces)}
    fast = FastTokenizer(BPE(pieces, list(_merges(tokenizer, pieces)), byte_fallback=True, unk_token="<unk>"))
    fast.normalizer = Replace(" ", SPACE_SYMBOL)
    pattern = word_pattern(tokenizer) or ""
    fast.pre_tokenizer = Split(Regex(pattern.replace(" ", SPACE_SYMBOL)), "isolated")
    file = folder / "tokenizer.json"
    fast.save(str(file))
    compared = texts[:: max(1, len(texts) // _COMPARED_DOCUMENTS)][:_COMPARED_DOCUMENTS]
    equal = [fast.encode(text).ids == tokenizer.encode(text) for text in compared]
    return file, sum(equal) / len(equal)


def _merges(tokenizer: Tokenizer, pieces: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Every way to make each piece of two others, in the order in which SentencePiece prefers the pieces."""
    kinds = (_NORMAL, _USER_DEFINED)
    scored = [piece for piece in tokenizer.settings().pieces if piece.type in kinds and len(piece.piece) > 1]
    for piece in sorted(scored, key=lambda piece: -float(piece.score)):
        splits = [(piece.piece[:place], piece.piece[place:]) for place in range(1, len(piece.piece))]
        known = [split for split in splits if split[0] in pieces and split[1] in pieces]
        yield from sorted(known, key=lambda split: (pieces[split[0]], pieces[split[1]]))
