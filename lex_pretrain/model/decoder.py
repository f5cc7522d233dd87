"""The LeX decoder: embedding, pre-norm layers of attention and feed-forward, output over the vocabulary.

Shapes: B batch, T tokens, H heads, D head size, E hidden size, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lex_pretrain.model.attention import Attention, RaggedAttention, make_attention
from lex_pretrain.model.cache import Cache, LayerCache
from lex_pretrain.model.init import initialize
from lex_pretrain.model.parameters import padded_vocab_size
from lex_pretrain.model.positions import make_positions
from lex_pretrain.model_config import AttentionMode, ModelSection


def make_norm(config: ModelSection, size: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(size, eps=1e-5)
    return nn.LayerNorm(size, eps=1e-5, bias=config.bias)


class SelfAttention(nn.Module):
    """Projections around an attention mode; key and value heads may be fewer than query heads."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.num_heads = config.num_heads
        self.num_key_value_heads = config.resolved_num_key_value_heads
        self.dropout = config.dropout
        num_projected_heads = self.num_heads + 2 * self.num_key_value_heads
        self.qkv = nn.Linear(config.hidden_size, num_projected_heads * self.head_size, bias=config.bias)
        self.inner_norm = make_norm(config, config.hidden_size) if config.sub_layer_norm else nn.Identity()
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def project(self, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, key-value heads, D], all without positions."""
        heads = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
        q, k, v = self.qkv(x_BTE).unflatten(-1, (-1, self.head_size)).split(heads, dim=2)
        return q, k, v

    def forward(self, x_BTE: Tensor, attention: Attention, cache: LayerCache | None) -> Tensor:
        q_BTHD, k_BTHD, v_BTHD = self.project(x_BTE)
        mixed = _mix(attention, q_BTHD, k_BTHD, v_BTHD, cache, self.dropout if self.training else 0.0)
        out: Tensor = self.output(self.inner_norm(mixed.flatten(2)))
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mix(
    attention: Attention, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, cache: LayerCache | None, dropout: float
) -> Tensor:
    """The attention, outside of compiled graphs: its kernels are fused already, its rotation is of complex numbers,
    which the compiler does not fuse, and every length would be compiled anew."""
    return attention(q_BTHD, k_BTHD, v_BTHD, cache, dropout)


class FeedForward(nn.Module):
    """Two linear layers around an activation; `swiglu` gates the inner width with a third."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        inner = config.resolved_feed_forward_size
        self.activation = config.activation
        self.input = nn.Linear(
            config.hidden_size, 2 * inner if self.activation == "swiglu" else inner, bias=config.bias
        )
        self.inner_norm = make_norm(config, inner) if config.sub_layer_norm else nn.Identity()
        self.output = nn.Linear(inner, config.hidden_size, bias=config.bias)

    def forward(self, x_BTE: Tensor) -> Tensor:
        inner = self.input(x_BTE)
        if self.activation == "swiglu":
            gate, inner = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * inner
        else:
            inner = F.gelu(inner) if self.activation == "gelu" else F.relu(inner)
        out: Tensor = self.output(self.inner_norm(inner))
        return out


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.hidden_size)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = make_norm(config, config.hidden_size)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTE: Tensor, attention: Attention, cache: LayerCache | None) -> Tensor:
        x_BTE = x_BTE + self.dropout(self.attention(self.attention_norm(x_BTE), attention, cache))
        out: Tensor = x_BTE + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTE)))
        return out


class Decoder(nn.Module):
    """A decoder-only language model.

    `vocab_size` is the tokenizer's; the tables are padded to a multiple of 128, and padded ids never get a logit.
    With `activation_checkpointing` k, every k-th layer's activations are recomputed in the backward pass.
    A caller that partitions parameters as they are made leaves `initialize_weights` false and calls `initialize`.
    """

    def __init__(
        self, config: ModelSection, activation_checkpointing: int = 0, initialize_weights: bool = True
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size must be resolved from the data before a decoder is made")
        self.config = config
        self.vocab_size = config.vocab_size
        self.activation_checkpointing = activation_checkpointing
        num_rows = padded_vocab_size(self.vocab_size)
        self.embedding = nn.Embedding(num_rows, config.hidden_size)
        self.embedding_scale = math.sqrt(config.hidden_size) if config.scale_embeddings else 1.0
        self.positions = make_positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, num_rows, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight
        if initialize_weights:
            initialize(self, config)

    def compile_layers(self) -> None:
        """Fuse what lies around the attention of each layer with torch.compile, at the first pass."""
        for layer in self.layers:
            layer.compile()

    def make_cache(self, padding: Sequence[int] = ()) -> Cache:
        """An empty context for decoding or streaming.

        `padding` is given where rows differ in length: how many tokens at the left of each row are none.
        """
        return Cache(self.config.num_layers, padding)

    def hidden_states(
        self,
        tokens_BT: Tensor,
        attention: AttentionMode = "causal",
        cache: Cache | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Normalised last hidden states [B, T, E].

        With a `cache`, the tokens continue those it has seen and the cache takes them in; the attention mode stays
        the same for a cache's whole life. With `documents_BT`, which numbers the document of each token, no token
        sees another document. ValueError when token ids, cache and documents do not fit.
        """
        self._check_tokens(tokens_BT)
        if cache is not None and documents_BT is not None:
            raise ValueError("a cache continues one document; document numbers are for passes without one")
        num_tokens = tokens_BT.shape[1]
        start = 0 if cache is None else cache.take(attention, *tokens_BT.shape)
        x_BTE = self.embedding(tokens_BT) * self.embedding_scale
        if cache is not None and cache.padding:
            rows = [(max(0, start - n), min(max(0, n - start), num_tokens)) for n in cache.padding]
            position = self._ragged_positions(rows, x_BTE)
            make = partial(make_attention, attention, self.config, self.positions)
            mode: Attention = RaggedAttention([(n, make(begin, num_tokens - n)) for begin, n in rows])
        else:
            position = self.positions.embed(start, num_tokens, x_BTE)
            mode = make_attention(attention, self.config, self.positions, start, num_tokens, documents_BT)
        x_BTE = self.dropout(x_BTE if position is None else x_BTE + position)
        for index, layer in enumerate(self.layers):
            if self._recomputes(index):
                x_BTE = checkpoint(layer, x_BTE, mode, None, use_reentrant=False)
            else:
                x_BTE = layer(x_BTE, mode, None if cache is None else cache.layers[index])
        out: Tensor = self.norm(x_BTE)
        return out

    def stream_hidden_states(self, tokens_BT: Tensor, attention: AttentionMode, chunk_tokens: int) -> Iterator[Tensor]:
        """The hidden states of one pass over `tokens_BT`, `chunk_tokens` positions [B, chunk, E] at a time.

        Memory does not depend on the number of tokens, except in mode causal, whose context is all of them.
        """
        cache = self.make_cache()
        for chunk in tokens_BT.split(chunk_tokens, dim=1):
            yield self.hidden_states(chunk, attention, cache)

    def _check_tokens(self, tokens_BT: Tensor) -> None:
        """Ids on the host only: asking a GPU would wait for it, and ids come from the host."""
        if tokens_BT.numel() == 0:
            raise ValueError("no tokens to read: a document begins with the id that ends the one before it")
        if tokens_BT.device.type != "cpu" or torch.compiler.is_compiling():
            return
        low, high = int(tokens_BT.min()), int(tokens_BT.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} is not in the vocabulary of {self.vocab_size} pieces")

    def _ragged_positions(self, rows: Sequence[tuple[int, int]], like: Tensor) -> Tensor | None:
        """Vectors [B, T, E] for rows that begin at a position after a number of tokens that are none."""
        num_tokens = like.shape[1]
        vectors = [self.positions.embed(begin, num_tokens - padding, like) for begin, padding in rows]
        if vectors[0] is None:
            return None
        return torch.stack([F.pad(x, (0, 0, num_tokens - len(x), 0)) for x in vectors if x is not None])

    def _recomputes(self, layer_index: int) -> bool:
        every = self.activation_checkpointing
        return self.training and every > 0 and layer_index % every == 0

    def logits(self, hidden_BTE: Tensor) -> Tensor:
        """Scores [B, T, V] of every next token, from `hidden_states`."""
        scores: Tensor = self.output(hidden_BTE)
        return scores[..., : self.vocab_size]

    def forward(
        self,
        tokens_BT: Tensor,
        attention: AttentionMode = "causal",
        cache: Cache | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of the token that follows each of `tokens_BT`; arguments as of `hidden_states`."""
        return self.logits(self.hidden_states(tokens_BT, attention, cache, documents_BT))
