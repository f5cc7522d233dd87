"""What the tests of preparation share: options that take no time, and looks at what came out."""

import hashlib
import json
from pathlib import Path
from typing import Any

from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from lex_pretrain.data.manifest import Manifest
from lex_pretrain.data.shards import TokenDataset


def options(dataset: Path, **changes: object) -> PrepareOptions:
    """Options that reuse the shared tokenizer and keep everything in one split."""
    values = {"tokenizer": dataset / "tokenizer.model", "validation_fraction": 0.0, "test_fraction": 0.0, **changes}
    return PrepareOptions.model_validate(values)


def pack(inputs: list[Path], output: Path, settings: PrepareOptions, num_workers: int = 1) -> Manifest:
    manifest = prepare([str(path) for path in inputs], output, settings, num_workers)
    assert manifest is not None
    assert manifest.account.balances()
    return manifest


def texts_of(folder: Path, split: str = "train") -> list[str]:
    stream = TokenDataset.open(folder, split)
    tokenizer = stream.tokenizer()
    return [tokenizer.decode(stream.read(start, end - start).tolist()) for start, end in stream.document_bounds()]


def rejections_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]


def digests(folder: Path) -> dict[str, str]:
    """Checksums of everything that a preparation leaves to be read."""
    files = [*folder.rglob("shard-*.npy"), *(folder / name for name in ("tokenizer.model", "manifest.json"))]
    files.append(folder / "rejected.jsonl")
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
