"""Long documents to score: of a dataset's held-out split, or of texts tokenized now."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.data.manifest import MANIFEST_FILE
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.errors import RequestError
from lex_pretrain.tokenizer import Tokenizer

ReadTexts = Callable[[str], Iterator[str]]


@dataclass(frozen=True)
class ScoredDocument:
    """The first tokens of a document, without its EOD, and the size of the text that they stand for."""

    tokens: NDArray[np.int64]
    num_bytes: int
    num_characters: int


def load_documents(
    data: Sequence[str],
    split: str,
    tokenizer: Tokenizer,
    num_tokens: int,
    max_documents: int,
    read_texts: ReadTexts,
) -> list[ScoredDocument]:
    """The first `num_tokens` tokens of the first `max_documents` documents at least that long, in stored order.

    `data` are dataset folders, or whatever `read_texts` gives the texts of. Raises RequestError when a dataset was
    made with another tokenizer, or no document is long enough.
    """
    documents: list[ScoredDocument] = []
    longest = 0
    for tokens in _all_documents(data, split, tokenizer, read_texts):
        longest = max(longest, len(tokens))
        if len(tokens) >= num_tokens:
            kept = tokens[:num_tokens].astype(np.int64)
            text = tokenizer.decode(kept.tolist())
            documents.append(ScoredDocument(kept, len(text.encode()), len(text)))
            if len(documents) == max_documents:
                break
    if not documents:
        raise RequestError(
            f"no document of {', '.join(data)} has {num_tokens:,} tokens, the longest has {longest:,}; "
            "give longer documents or smaller --lengths"
        )
    return documents


def documents_sha256(documents: Sequence[ScoredDocument]) -> str:
    """Equal exactly where the same tokens are scored in the same order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(hashlib.sha256(document.tokens.astype("<i8").tobytes()).digest())
    return digest.hexdigest()


def _all_documents(
    data: Sequence[str], split: str, tokenizer: Tokenizer, read_texts: ReadTexts
) -> Iterator[NDArray[np.int64]]:
    for given in data:
        folder = Path(given)
        if (folder / MANIFEST_FILE).is_file():
            yield from _dataset_documents(folder, split, tokenizer)
        else:
            for text in read_texts(given):
                yield _encode(text, tokenizer, given)


def _dataset_documents(folder: Path, split: str, tokenizer: Tokenizer) -> Iterator[NDArray[np.int64]]:
    dataset = TokenDataset.open(folder, split)
    if dataset.manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        raise RequestError(
            f"{folder} was prepared with another tokenizer than the model was trained with; "
            "give the text files instead, or prepare them with --tokenizer of the run"
        )
    for start, end in dataset.document_bounds():
        yield dataset.read(start, end - 1 - start).astype(np.int64)


def _encode(text: str, tokenizer: Tokenizer, given: str) -> NDArray[np.int64]:
    try:
        return np.array(tokenizer.encode(text), dtype=np.int64)
    except UnicodeEncodeError as error:
        raise RequestError(f"{given} holds text that is not valid Unicode: {error}") from error
