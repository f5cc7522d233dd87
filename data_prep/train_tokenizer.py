"""Training a SentencePiece model that loses nothing: byte fallback, no normalisation, white space kept."""

import io
import re
from collections.abc import Iterable, Iterator

from lex_pretrain.errors import RequestError

# SentencePiece skips sentences beyond a limit in bytes, so longer lines are cut; a character takes up to four bytes.
_MAX_SENTENCE_CHARACTERS = 16_384
_MAX_SENTENCE_BYTES = 4 * _MAX_SENTENCE_CHARACTERS
DEFAULT_CHARACTER_COVERAGE = 0.9999
# Byte pieces, the unknown piece and the end of document.
_NUM_RESERVED_PIECES = 258


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, character_coverage: float = DEFAULT_CHARACTER_COVERAGE
) -> bytes:
    """A byte-pair model of `vocab_size` pieces as the bytes of its file, from sample documents.

    Raises RequestError, naming a size that works, when the sample is too small or has too many characters for it.
    """
    from sentencepiece import SentencePieceTrainer

    if vocab_size <= _NUM_RESERVED_PIECES:
        raise RequestError(
            f"--vocab-size {vocab_size} is too small: bytes and markers alone take {_NUM_RESERVED_PIECES}"
        )
    sentences = [sentence for text in texts for sentence in _sentences(text)]
    if not sentences:
        raise RequestError("the sample for the tokenizer holds no text: every document is empty or was rejected")
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=character_coverage,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        largest = re.search(r"<= (\d+)", str(error))
        if largest:
            raise RequestError(
                f"--vocab-size {vocab_size} is too large for {sum(map(len, sentences)):,} characters of sample text: "
                f"the largest that works is {largest[1]}"
            ) from None
        characters = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        if characters:
            raise RequestError(
                f"--vocab-size {vocab_size} is too small: bytes, markers and the characters of the sample take "
                f"{characters[1]}. Raise it, or lower --character-coverage {character_coverage}, so that more of the "
                "rare characters are written in bytes"
            ) from None
        raise RequestError(f"SentencePiece could not train on the sample: {error}") from error
    return model.getvalue()


def _sentences(text: str) -> Iterator[str]:
    """The lines of a text; SentencePiece learns from each on its own, so pieces never cross a line's end."""
    for line in text.splitlines():
        for start in range(0, len(line), _MAX_SENTENCE_CHARACTERS):
            yield line[start : start + _MAX_SENTENCE_CHARACTERS]
