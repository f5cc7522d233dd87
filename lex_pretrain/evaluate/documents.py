"""Long documents to score: of a dataset's held-out split, or of text files tokenized now."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.data.manifest import MANIFEST_FILE
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.errors import RequestError
from lex_pretrain.tokenizer import Tokenizer


@dataclass(frozen=True)
class ScoredDocument:
    """The first tokens of a document, without its EOD, and the bytes of text that they stand for."""

    tokens: NDArray[np.int64]
    num_bytes: int


def load_documents(
    data: list[Path], split: str, tokenizer: Tokenizer, num_tokens: int, max_documents: int
) -> list[ScoredDocument]:
    """The first `num_tokens` tokens of up to `max_documents` documents at least that long, in stored order.

    Raises RequestError when a dataset was made with another tokenizer, or no document is long enough.
    """
    documents: list[ScoredDocument] = []
    longest = 0
    for path in data:
        is_dataset = (path / MANIFEST_FILE).is_file()
        for tokens in _dataset_documents(path, split, tokenizer) if is_dataset else _text_documents(path, tokenizer):
            longest = max(longest, len(tokens))
            if len(tokens) >= num_tokens and len(documents) < max_documents:
                kept = tokens[:num_tokens].astype(np.int64)
                documents.append(ScoredDocument(kept, len(tokenizer.decode(kept.tolist()).encode())))
    if not documents:
        raise RequestError(
            f"no document of {', '.join(map(str, data))} has {num_tokens:,} tokens, the longest has {longest:,}; "
            "give longer documents or smaller --lengths"
        )
    return documents


def _dataset_documents(folder: Path, split: str, tokenizer: Tokenizer) -> list[NDArray[np.int64]]:
    dataset = TokenDataset.open(folder, split)
    if dataset.manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        raise RequestError(
            f"{folder} was prepared with another tokenizer than the model was trained with; "
            "give the text files instead, or prepare them with --tokenizer of the run"
        )
    return [dataset.read(start, end - 1 - start).astype(np.int64) for start, end in dataset.document_bounds()]


def _text_documents(path: Path, tokenizer: Tokenizer) -> list[NDArray[np.int64]]:
    if not path.exists():
        raise RequestError(f"{path} does not exist; give text files, folders of them, or a prepared dataset")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    documents = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise RequestError(f"{file} is not UTF-8 text (byte {error.start})") from error
        except OSError as error:
            raise RequestError(f"{file} cannot be read: {error}") from error
        documents.append(np.array(tokenizer.encode(text), dtype=np.int64))
    return documents
