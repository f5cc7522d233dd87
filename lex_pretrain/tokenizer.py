"""SentencePiece models as exact tokenizers: every text comes back from its ids unchanged."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lex_pretrain.errors import RequestError

# SentencePiece writes a space as this character, so a text that holds it would come back with a space instead.
_SPACE_SYMBOL = "\u2581"


class Tokenizer:
    """A SentencePiece model with an end-of-document piece.

    Raises RequestError when the file is not a model, or has no end-of-document piece (`</s>`).
    """

    def __init__(self, model_file: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        if not model_file.is_file():
            raise RequestError(f"tokenizer {model_file} does not exist")
        try:
            self._processor: Any = SentencePieceProcessor(model_file=str(model_file))
        except (RuntimeError, OSError) as error:
            raise RequestError(f"{model_file} is not a SentencePiece model: {error}") from error
        self.model_file = model_file
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0 or self.eod_id == self._processor.unk_id():
            raise RequestError(f"{model_file} has no end-of-document piece; train it with an eos id")
        escaped = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_SYMBOL.encode()]
        byte_fallback = all(self._processor.is_byte(piece) for piece in escaped)
        self._space_symbol_ids: list[int] | None = escaped if byte_fallback else None

    @property
    def fingerprint(self) -> str:
        """SHA-256 over every piece with its score and kind, and over how this model treats white space."""
        processor = self._processor
        pieces = [
            [
                processor.id_to_piece(index),
                processor.get_score(index),
                processor.is_control(index),
                processor.is_byte(index),
                processor.is_unknown(index),
            ]
            for index in range(self.vocab_size)
        ]
        # How probes are cut shows the normaliser's settings, which the processor does not tell.
        probes = processor.encode([" a", "  a  b ", "\ta\nb", "ﬁ①Ａ", "\u2581"])
        text = json.dumps([pieces, probes, self.eod_id], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the end-of-document piece. UnicodeEncodeError on a lone surrogate."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        symbol_ids = self._space_symbol_ids
        if symbol_ids is None or not any(_SPACE_SYMBOL in text for text in texts):
            plain: list[list[int]] = self._processor.encode(list(texts))
            return plain
        encoded = []
        for text in texts:
            first, *others = self._processor.encode(text.split(_SPACE_SYMBOL))
            for part in others:
                first += symbol_ids + part
            encoded.append(first)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end-of-document pieces are left out."""
        text: str = self._processor.decode(list(ids))
        return text

    def piece(self, index: int) -> str:
        text: str = self._processor.id_to_piece(index)
        return text
