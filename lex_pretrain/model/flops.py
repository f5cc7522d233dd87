"""Floating-point operations of the decoder, by formula. A multiplication with its addition counts as two."""

from lex_pretrain.model.parameters import padded_vocab_size
from lex_pretrain.model_config import ModelSection


def forward_flops_per_token(config: ModelSection) -> float:
    """Matrix products of one forward pass over the training length, per token; causal scores count half."""
    if config.vocab_size is None:
        raise ValueError("model.vocab_size must be resolved from the data before FLOPs are counted")
    width, inner = config.hidden_size, config.resolved_feed_forward_size
    projected_heads = 2 * config.num_heads + 2 * config.resolved_num_key_value_heads
    attention_weights = width * projected_heads * config.head_size
    feed_forward_weights = (3 if config.activation == "swiglu" else 2) * width * inner
    mean_distance = (config.sequence_length + 1) / 2
    scores = 2 * 2 * width * mean_distance
    layer = 2 * (attention_weights + feed_forward_weights) + scores
    return config.num_layers * layer + 2 * width * padded_vocab_size(config.vocab_size)


def training_flops_per_token(config: ModelSection) -> float:
    """Forward and backward: the backward pass takes twice the forward. Recomputed activations are not counted."""
    return 3 * forward_flops_per_token(config)
