"""`config.json` of an exported folder. Runs in the exported folder; nothing of this program imports it."""

from typing import Any

from transformers import PreTrainedConfig

from lex_pretrain.model_config import AttentionMode, ModelSection


class LexConfig(PreTrainedConfig):  # type: ignore[misc]
    """The `model` section that the decoder was trained with, and how it attends from now on.

    The usual names of the library (`hidden_size`, ...) are read from the section, so that nothing is said twice.
    """

    model_type = "lex"

    # Of every exported folder; the library also makes configs without it, to compare with.
    model: dict[str, Any] | None = None
    attention_mode: AttentionMode = "blockwise"
    # Optimizer steps of the training.
    step: int = 0

    @property
    def section(self) -> ModelSection:
        """Raises ValidationError, naming the field, when the section is no architecture."""
        return ModelSection.model_validate(self.model)

    @property
    def vocab_size(self) -> int | None:
        return self.section.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.section.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.section.num_layers

    @property
    def num_attention_heads(self) -> int:
        return self.section.num_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.section.resolved_num_key_value_heads

    @property
    def tie_word_embeddings(self) -> bool:
        return self.section.tie_embeddings
