"""SentencePiece models as exact tokenizers: every text comes back from its ids unchanged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.errors import RequestError
from lex_pretrain.files import sha256_of_json

# SentencePiece writes a space as this character, so a text that holds it would come back with a space instead.
SPACE_SYMBOL = "\u2581"


class Tokenizer:
    """A SentencePiece model with an end-of-document piece.

    Raises RequestError when the file is not a model, or has no end-of-document piece (`</s>`).
    """

    def __init__(self, model_file: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        if not model_file.is_file():
            raise RequestError(f"tokenizer {model_file} {'is a folder' if model_file.is_dir() else 'does not exist'}")
        try:
            # One thread: parallel work runs in processes, and more threads than cores would slow all of them down.
            self._processor: Any = SentencePieceProcessor(model_file=str(model_file), num_threads=1)
        except (RuntimeError, OSError) as error:
            raise RequestError(f"{model_file} is not a SentencePiece model: {error}") from error
        self.model_file = model_file
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0 or self.eod_id == self._processor.unk_id():
            raise RequestError(f"{model_file} has no end-of-document piece; train it with an eos id")
        escaped = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()]
        byte_fallback = all(self._processor.is_byte(piece) for piece in escaped)
        self._space_symbol_ids: list[int] | None = escaped if byte_fallback else None

    def settings(self) -> Any:
        """The model file's own message (`ModelProto`): pieces, and how it was trained, normalises and treats spaces."""
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        message = ModelProto()
        message.ParseFromString(self._processor.serialized_model_proto())
        return message

    @property
    def fingerprint(self) -> str:
        """SHA-256 over every piece with its id, score and kind, and every setting that decides how a text is cut."""
        model = self.settings()
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        parts = [
            [[piece.piece, piece.score, int(piece.type)] for piece in model.pieces],
            [int(trainer.model_type), trainer.byte_fallback, trainer.treat_whitespace_as_suffix, trainer.unk_surface],
            [trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id],
            [
                normalizer.precompiled_charsmap.hex(),
                normalizer.add_dummy_prefix,
                normalizer.remove_extra_whitespaces,
                normalizer.escape_whitespaces,
            ],
            model.denormalizer_spec.precompiled_charsmap.hex(),
        ]
        return sha256_of_json(parts)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the end-of-document piece. UnicodeEncodeError on a lone surrogate."""
        ids: list[int]
        if self._space_symbol_ids is None or SPACE_SYMBOL not in text:
            ids = self._processor.encode(text)
            return ids
        ids, *others = self._processor.encode(text.split(SPACE_SYMBOL))
        for part in others:
            ids += self._space_symbol_ids + part
        return ids

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Ids of each text as `encode` gives them, an int32 array a text; faster over many texts."""
        if self._space_symbol_ids is None or not any(SPACE_SYMBOL in text for text in texts):
            plain: list[NDArray[np.int32]] = self._processor.encode(list(texts), return_type="numpy")
            return plain
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end-of-document pieces are left out."""
        text: str = self._processor.decode(list(ids))
        return text

    def piece(self, index: int) -> str:
        text: str = self._processor.id_to_piece(index)
        return text
