"""The decoder's parameters, by formula: nothing is built, so that the largest model is counted at once.

Shapes: E hidden size, F inner width of the feed-forward, V rows of the padded vocabulary, L layers.
"""

import math
from typing import NamedTuple

from lex_pretrain.model_config import ModelSection

VOCABULARY_MULTIPLE = 128


class ParameterTensor(NamedTuple):
    """Parameter tensors of one shape, of which the model holds `num_tensors`; Muon can train hidden matrices."""

    shape: tuple[int, ...]
    num_tensors: int
    is_embedding: bool = False
    is_hidden_matrix: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of one of them."""
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices that are no embeddings."""
        return len(self.shape) > 1 and not self.is_embedding


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding table: matrix units like multiples of 128."""
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def parameter_tensors(config: ModelSection) -> list[ParameterTensor]:
    """Every parameter tensor of `Decoder`, equal ones together. ValueError while the vocabulary is open."""
    if config.vocab_size is None:
        raise ValueError("model.vocab_size must be resolved from the data before parameters are counted")
    width, inner, layers = config.hidden_size, config.resolved_feed_forward_size, config.num_layers
    projected = (config.num_heads + 2 * config.resolved_num_key_value_heads) * config.head_size
    num_rows = padded_vocab_size(config.vocab_size)
    tensors = [ParameterTensor((num_rows, width), 1, is_embedding=True)]
    if not config.tie_embeddings:
        tensors.append(ParameterTensor((num_rows, width), 1))
    if config.position == "learned":
        tensors.append(ParameterTensor((config.sequence_length, width), 1, is_embedding=True))
    # (inputs, outputs) of qkv, attention output, feed-forward input and output.
    gated_inner = 2 * inner if config.activation == "swiglu" else inner
    for inputs, outputs in ((width, projected), (width, width), (width, gated_inner), (inner, width)):
        tensors.append(ParameterTensor((outputs, inputs), layers, is_hidden_matrix=True))
        if config.bias:
            tensors.append(ParameterTensor((outputs,), layers))
    # A weight, and in a layernorm with biases a bias of the same size.
    vectors_per_norm = 2 if config.norm == "layernorm" and config.bias else 1
    tensors.append(ParameterTensor((width,), vectors_per_norm * (2 * layers + 1)))
    if config.sub_layer_norm:
        tensors += [ParameterTensor((size,), vectors_per_norm * layers) for size in (width, inner)]
    return tensors


def count_parameters(config: ModelSection) -> int:
    """Parameters of the decoder; a table that input and output share counts once."""
    return sum(tensor.num_elements * tensor.num_tensors for tensor in parameter_tensors(config))


def count_hidden_matrices(config: ModelSection) -> int:
    """Parameters in the matrices of the layers, which Muon can train."""
    hidden = (tensor for tensor in parameter_tensors(config) if tensor.is_hidden_matrix)
    return sum(tensor.num_elements * tensor.num_tensors for tensor in hidden)
