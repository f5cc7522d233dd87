"""The decoder as a model of `transformers`. Runs in the exported folder; nothing of this program imports it.

Only what the library asks for is here. The mathematics is the project's own `decoder.py` and the files that it imports,
which are copied beside this one.

Shapes: B batch, T tokens, S tokens seen so far and T, E hidden size, V vocabulary.
"""

from typing import get_args

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lex_pretrain.export.configuration_lex import LexConfig
from lex_pretrain.model.cache import Cache
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import AttentionMode

# What the library calls a cache, since 5.24 and before.
_CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class GenerationCache(Cache):
    """The decoder's cache, with what `generate` asks of a cache.

    It drops what no later token sees, so it cannot be cut back to fewer tokens.
    """

    is_linear = (False,)
    is_compileable = False
    is_croppable = False

    def get_seq_length(self) -> int:
        return self.num_tokens_seen


class LexForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The decoder with logits over the vocabulary; `config.attention_mode` decides how it attends."""

    config_class = LexConfig
    base_model_prefix = "decoder"
    _tied_weights_keys = {"decoder.output.weight": "decoder.embedding.weight"}  # noqa: RUF012
    # A cache that cannot be cut back cannot take back the guesses of an assistant model.
    _is_stateful = True

    def __init__(self, config: LexConfig) -> None:
        if config.attention_mode not in get_args(AttentionMode):
            known = ", ".join(get_args(AttentionMode))
            raise ValueError(f"attention_mode {config.attention_mode!r} is unknown; known: {known}")
        super().__init__(config)
        self.decoder = Decoder(config.section, initialize_weights=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """The library's caches hold keys of every token, already turned; `forward` makes the decoder's own."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.output

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: GenerationCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool = True,
        past_key_values: GenerationCache | None = None,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Logits [B, T, V] of the tokens that follow `input_ids` [B, T], of the last `logits_to_keep` only if not 0.

        `attention_mask` [B, S] is 0 where a row is padded, at its left. With `use_cache` the output holds a cache that
        the next call continues, as `cache` or by its former name. `labels` [B, T] are `input_ids` themselves, -100
        where no loss is wanted. ValueError when the mask hides other tokens or does not fit the cache.
        """
        cache = cache or past_key_values
        if cache is None:
            padding = () if attention_mask is None else _padding(attention_mask, input_ids.shape[1])
            if use_cache or padding:
                cache = GenerationCache(self.decoder.config.num_layers, padding)
        elif attention_mask is not None:
            padding = _padding(attention_mask, cache.num_tokens_seen + input_ids.shape[1])
            if padding != cache.padding:
                raise ValueError(f"attention_mask pads rows by {padding}; the cache began with {cache.padding}")
        hidden_BTE = self.decoder.hidden_states(input_ids, self.config.attention_mode, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.logits(hidden_BTE[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.decoder.vocab_size)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE_NAME: cache if use_cache else None})
        return output if return_dict else output.to_tuple()


def _padding(attention_mask_BS: Tensor, num_tokens: int) -> tuple[int, ...]:
    """Tokens at the left of each row that are none, or nothing where there are none in any row."""
    if attention_mask_BS.shape[1:] != (num_tokens,):
        raise ValueError(
            f"attention_mask must cover {num_tokens} tokens a row, not {tuple(attention_mask_BS.shape[1:])}"
        )
    real_BS = attention_mask_BS.bool()
    num_padding_B = (~real_BS).sum(dim=1)
    place_S = torch.arange(num_tokens, device=real_BS.device)
    if not torch.equal(real_BS, place_S >= num_padding_B[:, None]):
        raise ValueError(
            "attention_mask may hide tokens at the left of a row only (padding_side='left'); "
            "no token sees those after it, so padding at the right needs no mask"
        )
    padding = tuple(num_padding_B.tolist())
    return padding if any(padding) else ()
