"""What a tokenizer loses: its own settings say whether it can, and then every document shows whether it does."""

from lex_pretrain.errors import RequestError
from lex_pretrain.tokenizer import SPACE_SYMBOL, Tokenizer

_SHOWN_CHARACTERS = 20


class LossCheck:
    """Compares documents with what their ids stand for, where the tokenizer's settings allow for a difference."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ways = ways_to_lose(tokenizer)
        self._adds_a_space = bool(tokenizer.settings().normalizer_spec.add_dummy_prefix)

    def loss(self, text: str) -> str | None:
        """Where and how a text comes back otherwise, None where it comes back as it was."""
        # Written as bytes, this character parts the text in two, each of which would get a space of its own.
        if not self.ways and not (self._adds_a_space and SPACE_SYMBOL in text):
            return None
        decoded = self._tokenizer.decode(self._tokenizer.encode(text))
        if decoded == text:
            return None
        place = next(i for i, pair in enumerate(zip(text + "\0", decoded + "\1", strict=False)) if len(set(pair)) > 1)
        parts = text[place : place + _SHOWN_CHARACTERS], decoded[place : place + _SHOWN_CHARACTERS]
        return f"{parts[0]!r} comes back as {parts[1]!r}"


class LossyTokenizerError(RequestError):
    """A document would not come back from its ids."""

    def __init__(self, what: str, ways: list[str]) -> None:
        why = f"; {', '.join(ways)}" if ways else ""
        super().__init__(
            f"the tokenizer loses text: {what}{why}. Give another --tokenizer, or accept the loss by "
            "--allow-lossy-tokenizer"
        )


def ways_to_lose(tokenizer: Tokenizer) -> list[str]:
    """What of a model's settings can change a text; none where every text comes back from its ids unchanged.

    A space before the first word is taken off again by decoding.
    """
    model = tokenizer.settings()
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    ways = {
        f"it normalises by the rule {normalizer.name or 'in the model'}": bool(normalizer.precompiled_charsmap),
        "it removes spaces that follow others": normalizer.remove_extra_whitespaces,
        "it has no pieces for single bytes, so unknown characters are lost": not trainer.byte_fallback,
        "it does not keep spaces apart from the character U+2581": not normalizer.escape_whitespaces,
        "it changes what it decodes": bool(model.denormalizer_spec.precompiled_charsmap),
    }
    return [way for way, holds in ways.items() if holds]
