"""Scores, softmax and sum: the one place where queries meet keys. Which keys they meet is decided in `attention.py`.

Shapes: X any leading dimensions, T queries, S keys, K sinks, H heads, G key-value heads, D head size.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lex_pretrain.model.positions import Positions, rotate

# Elements of the largest mask or bias that exists at a time.
_MAX_MASK_ELEMENTS = 2**24


class Documents(NamedTuple):
    """Number of the document that each query [X, T] and each key [X, S] belongs to."""

    of_queries: Tensor
    of_keys: Tensor


class Sinks(NamedTuple):
    """Keys and values [X, K, G, D] that every query sees; the first of them stands `distance` before the query."""

    keys: Tensor
    values: Tensor
    distance: int


class Tables(NamedTuple):
    """What a run of queries over its keys needs to know about order and scheme."""

    query_factors: Tensor | None
    key_factors: Tensor | None
    mask: Tensor | None
    is_causal: bool


class CausalAttend:
    """Attention of queries over the keys up to them; the last query stands at the last key.

    With `window_tokens` a query sees itself and the window_tokens - 1 keys before it, else all. Queries are taken in
    runs, so that xPos scales stay in the range of floating point and no mask is large.
    """

    def __init__(self, positions: Positions, window_tokens: int | None = None) -> None:
        self.positions = positions
        self.window_tokens = window_tokens
        # All layers of a forward pass share tables; few are kept, because those of a long run are large.
        self._tables = functools.lru_cache(maxsize=4)(self._make_tables)

    def __call__(
        self,
        q_XTHD: Tensor,
        k_XSGD: Tensor,
        v_XSGD: Tensor,
        dropout: float,
        documents: Documents | None = None,
        sinks: Sinks | None = None,
    ) -> Tensor:
        """Weighted values [X, T, H, D] in the dtype of `v_XSGD`."""
        num_queries, num_keys = q_XTHD.shape[-3], k_XSGD.shape[-3]
        dtype = self._score_dtype(q_XTHD)
        q, k, v = (x.to(dtype) for x in (q_XTHD, k_XSGD, v_XSGD))
        run = self._run_tokens(num_queries, num_keys)
        outputs = []
        for first in range(0, num_queries, run):
            stop = min(first + run, num_queries)
            upper = num_keys - num_queries + stop
            lower = 0 if self.window_tokens is None else max(0, upper - (stop - first) - self.window_tokens + 1)
            tables = self._tables(stop - first, upper - lower, q.device, dtype)
            mask, is_causal = tables.mask, tables.is_causal
            if documents is not None:
                of_queries, of_keys = documents.of_queries[..., first:stop], documents.of_keys[..., lower:upper]
                mask, is_causal = self._within_documents(tables, of_queries, of_keys), False
            q_run = q[..., first:stop, :, :]
            query = rotate(q_run, tables.query_factors, dtype)
            key = rotate(k[..., lower:upper, :, :], tables.key_factors, dtype)
            value = v[..., lower:upper, :, :]
            if sinks is None:
                outputs.append(_weighted_values(query, key, value, mask, is_causal, dropout))
            else:
                outputs.append(self._with_sinks(q_run, query, key, value, mask, sinks, dropout))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-3)).to(v_XSGD.dtype)

    def _score_dtype(self, x: Tensor) -> torch.dtype:
        """Precision of the scores: that of `x`, but float32 where bf16 costs more than it saves.

        On the CPU its kernel takes 2.5 times as long at training lengths. A bias must have the dtype of the scores,
        and in bf16 one of -1,000 is off by up to 2.
        """
        return torch.float32 if x.device.type == "cpu" or self.positions.num_bias_heads else x.dtype

    def _run_tokens(self, num_queries: int, num_keys: int) -> int:
        run = min(num_queries, self.positions.max_span_tokens or num_queries)
        window = num_keys if self.window_tokens is None else self.window_tokens
        if run == num_keys <= window and not self.positions.num_bias_heads:
            return run
        elements_per_query = min(num_keys, run + window) * max(1, self.positions.num_bias_heads)
        return max(1, min(run, _MAX_MASK_ELEMENTS // elements_per_query))

    def _make_tables(self, num_queries: int, num_keys: int, device: torch.device, dtype: torch.dtype) -> Tables:
        """The centre of the positions lies amid the queries: keys far before it scale towards zero, which is what
        the true decay does, and no scale overflows."""
        centre = num_keys - (num_queries + 1) // 2
        query_factors = self.positions.rotation(num_keys - num_queries - centre, num_queries, "query", device)
        key_factors = self.positions.rotation(-centre, num_keys, "key", device)
        bias = self.positions.bias(num_queries, num_keys, device)
        windowed = self.window_tokens is not None and num_keys > self.window_tokens
        if bias is None and not windowed and num_queries in (1, num_keys):
            return Tables(query_factors, key_factors, None, is_causal=num_queries > 1)
        allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
        if self.window_tokens is not None:
            allowed = allowed.triu(num_keys - num_queries - self.window_tokens + 1)
        mask = allowed if bias is None else bias.masked_fill(~allowed, float("-inf")).to(dtype)
        return Tables(query_factors, key_factors, mask, is_causal=False)

    def _within_documents(self, tables: Tables, of_queries_XT: Tensor, of_keys_XS: Tensor) -> Tensor:
        """The mask [X, 1 or H, T, S] of a run in which queries see their own document alone."""
        same = (of_queries_XT[..., :, None] == of_keys_XS[..., None, :]).flatten(0, -3).unsqueeze(1)
        if tables.is_causal:
            return same.tril()
        if tables.mask is None:
            return same
        return same & tables.mask if tables.mask.dtype == torch.bool else tables.mask.where(same, float("-inf"))

    def _with_sinks(
        self,
        q_XTHD: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Sinks,
        dropout: float,
    ) -> Tensor:
        """Attention in which each query stands at one distance from the sinks and at another from its window.

        A rotating scheme needs queries turned by both. They stand side by side in vectors of twice the size, and
        window keys and sinks are zero in the half that is not theirs, so that one product scores both exactly.
        """
        num_sinks, head_size, device = sinks.keys.shape[-3], q_XTHD.shape[-1], query.device
        sink_factors = self.positions.rotation(-sinks.distance, num_sinks, "key", device)
        sink_keys = rotate(sinks.keys.to(query.dtype), sink_factors, query.dtype)
        sink_values = sinks.values.to(query.dtype)
        if sink_factors is not None:
            # Counted from the query itself, its own rotation is none.
            query = torch.cat((query, q_XTHD), dim=-1)
            key, sink_keys = F.pad(key, (0, head_size)), F.pad(sink_keys, (head_size, 0))
            # Kernels want values as wide as keys; otherwise all scores are kept.
            value, sink_values = (F.pad(x, (0, head_size)) for x in (value, sink_values))
        num_queries, num_keys = query.shape[-3], key.shape[-3]
        if mask is None:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        bias = self.positions.bias(1, sinks.distance + 1, device)
        if bias is None:
            of_sinks = mask.new_ones(num_queries, num_sinks)
        else:
            of_sinks = bias[..., :num_sinks].to(mask.dtype).expand(-1, num_queries, -1)
        out = _weighted_values(
            query,
            torch.cat((sink_keys, key), dim=-3),
            torch.cat((sink_values, value), dim=-3),
            torch.cat((of_sinks, mask), dim=-1),
            False,
            dropout,
            scale=head_size**-0.5,
        )
        return out[..., :head_size]


def _weighted_values(
    q_XTHD: Tensor,
    k_XSGD: Tensor,
    v_XSGD: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention [X, T, H, D]; kernels take one leading dimension, so X is folded into it."""
    q, k, v = (x.reshape(-1, *x.shape[-3:]).transpose(1, 2) for x in (q_XTHD, k_XSGD, v_XSGD))
    out_XHTD = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q_XTHD.shape[-2] != k_XSGD.shape[-2],
    )
    return out_XHTD.transpose(1, 2).reshape(*q_XTHD.shape[:-1], v_XSGD.shape[-1])
