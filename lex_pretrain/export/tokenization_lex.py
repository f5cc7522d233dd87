"""The tokenizer as one of `transformers`. Runs in the exported folder; nothing of this program imports it.

Only what the library asks for is here. Texts become ids, and ids texts, in the project's own `tokenizer.py`, which is
copied beside this one.
"""

import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from lex_pretrain.tokenizer import Tokenizer


class LexTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """The SentencePiece model `vocab_file`; every text comes back from its ids unchanged.

    A text gets the end-of-document piece before it, as documents had in training, unless `add_special_tokens` is
    false. Decoding leaves that piece out. Text that reads like it is plain text.
    """

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, **kwargs: Any) -> None:
        self.vocab_file = vocab_file
        self._tokenizer = Tokenizer(Path(vocab_file))
        self._ids = {self._tokenizer.piece(index): index for index in range(self._tokenizer.vocab_size)}
        # The library does not save this setting with the others.
        super().__init__(special_tokens_pattern="bos", **kwargs)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._tokenizer.piece(index) for index in self._tokenizer.encode(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokenizer.piece(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._tokenizer.decode(self.convert_tokens_to_ids(tokens))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        target = Path(save_directory, prefix + self.vocab_files_names["vocab_file"])
        if not target.exists() or not target.samefile(self.vocab_file):
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)
