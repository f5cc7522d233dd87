"""Memory of a training pass of the decoder, by formula.

The method is that of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4.1):
what each operation keeps for its backward pass, summed over a layer. The terms are this decoder's own, as autograd
keeps them. They differ from the paper's where the code does: scaled dot-product attention keeps no T x T scores but
its output and a logarithm a row, rotated queries and keys are kept beside the projection they came from, and the loss
keeps logits in the model's number format.

Kernels are those that PyTorch takes on a GPU: a dropout mask is a byte an element, none inside the attention, and
RMSNorm is fused (a CPU keeps two float32 copies more). Not counted: what a kernel allocates for itself, the allocator's
fragmentation, what `train.compile_layers` changes, and the masks of xPos with a scale base below a 32nd of the training
length.

Shapes: B sequences, T tokens of one, E hidden size, F inner width of the feed-forward, K width of all key heads.
"""

from dataclasses import dataclass

from lex_pretrain.config import Config
from lex_pretrain.model.parameters import padded_vocab_size
from lex_pretrain.model_config import ModelSection

BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
_FP32_BYTES = 4
_COMPLEX64_BYTES = 8
_INT64_BYTES = 8


@dataclass(frozen=True)
class ActivationBytes:
    """What one micro batch takes on one process."""

    saved: int
    peak: int


def activation_bytes(config: Config, num_sequences: int) -> ActivationBytes:
    """Bytes that a forward pass over B = `num_sequences` leaves for the backward pass, and the most that exist then.

    The peak is either at the loss, where the logits' gradient stands beside the logits, or in a feed-forward,
    once the logits are gone: its gradients stand beside what layers keep, and beside what this one has recomputed.
    ValueError while the vocabulary is open.
    """
    model = config.model
    if model.vocab_size is None:
        raise ValueError("model.vocab_size must be resolved from the data before activations are counted")
    element = BYTES_PER_ELEMENT[config.train.precision]
    num_tokens = num_sequences * model.sequence_length
    every = config.train.activation_checkpointing
    num_recomputed = -(-model.num_layers // every) if every else 0
    layer = num_tokens * _layer_bytes_per_token(config, element)
    layer_input = num_tokens * model.hidden_size * element
    num_kept = model.num_layers - num_recomputed
    # Token ids, targets and the loss's logarithm; the last norm's input, statistics and output.
    outside = num_tokens * (
        2 * _INT64_BYTES + _FP32_BYTES + _norm_statistics_bytes(model) + 2 * model.hidden_size * element
    )
    if model.dropout:
        outside += num_tokens * model.hidden_size
    logits = num_tokens * model.vocab_size * element
    logits_gradient = num_tokens * padded_vocab_size(model.vocab_size) * element
    kept = num_kept * layer + num_recomputed * layer_input + outside + _table_bytes(model)
    # The last layer that is recomputed finds those after it done with and gone.
    num_done = (model.num_layers - 1) % every if every else 0
    recomputed = max(0, layer - layer_input - num_done * layer) if every else 0
    inner_gradients = (2 if model.activation == "swiglu" else 1) * model.resolved_feed_forward_size
    in_layer = recomputed + num_tokens * (model.hidden_size + inner_gradients) * element
    return ActivationBytes(saved=kept + logits, peak=kept + max(logits + logits_gradient, in_layer))


def _layer_bytes_per_token(config: Config, element: int) -> int:
    """What a layer keeps of each token; `element` is the size in bytes of the model's number format."""
    model = config.model
    width, inner = model.hidden_size, model.resolved_feed_forward_size
    key_width = model.resolved_num_key_value_heads * model.head_size
    projected = width + 2 * key_width
    # Before attention and feed-forward: the residual stream, the norm's statistics and its output.
    kept = 2 * (2 * width * element + _norm_statistics_bytes(model))
    if model.position == "alibi":
        # The attention's output once more, in the model's format and without the added dimensions.
        kept += _alibi_bytes_per_token(model) + width * element
    else:
        kept += (projected + width) * element
    if model.position in ("xpos", "rope"):
        kept += (width + key_width) * element
    # The softmax's logarithm of each head.
    kept += model.num_heads * _FP32_BYTES
    # GELU keeps its input beside its output, ReLU its output alone, SwiGLU gate, input, SiLU and product.
    kept += {"gelu": 2, "relu": 1, "swiglu": 4}[model.activation] * inner * element
    if model.sub_layer_norm:
        kept += (width + inner) * element + 2 * _norm_statistics_bytes(model)
    if model.dropout:
        kept += 2 * width
    if config.train.separate_documents:
        # A mask of one's own for each layer, turned into a bias by the kernel.
        kept += model.sequence_length * (_FP32_BYTES if model.position == "alibi" else element)
    return kept


def _norm_statistics_bytes(model: ModelSection) -> int:
    """Of one token in one norm: mean and reciprocal deviation, or the latter alone, in float32."""
    return (2 if model.norm == "layernorm" else 1) * _FP32_BYTES


# Of `positions.py`: queries that ALiBi takes in one call, and the dimensions that it adds to each head.
_ALIBI_RUN_TOKENS = 1024
_ALIBI_DIMENSIONS = 4


def _alibi_bytes_per_token(model: ModelSection) -> int:
    """Queries, keys, values and output in float32, each with the added dimensions; keys and values are kept by every
    run of queries that sees them."""
    length = model.sequence_length
    num_keys = sum(min(first + _ALIBI_RUN_TOKENS, length) for first in range(0, length, _ALIBI_RUN_TOKENS))
    num_vectors = 2 * model.num_heads + 2 * model.resolved_num_key_value_heads * num_keys / length
    return int(num_vectors * (model.head_size + _ALIBI_DIMENSIONS) * _FP32_BYTES)


def _table_bytes(model: ModelSection) -> int:
    """Rotation factors of queries and keys, which all layers share."""
    if model.position not in ("xpos", "rope"):
        return 0
    return 2 * model.sequence_length * (model.head_size // 2) * _COMPLEX64_BYTES
