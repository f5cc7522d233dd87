"""Scores, softmax and sum: the one place where queries meet keys. Which keys they meet is decided in `attention.py`.

Shapes: X any leading dimensions, T queries, S keys, K sinks, H heads, G key-value heads, D head size.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from lex_pretrain.model.positions import Positions

# Elements of the largest mask that exists at a time.
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


class CausalAttend:
    """Attention of queries over the keys up to them; the last query stands at the last key.

    With `window_tokens` a query sees itself and the window_tokens - 1 keys before it, else all. Queries are taken in
    runs, so that xPos scales stay in the range of floating point, ALiBi stays exact, and no mask is large.
    """

    def __init__(self, positions: Positions, window_tokens: int | None = None) -> None:
        self.positions = positions
        self.window_tokens = window_tokens
        # All layers of a forward pass share tables; few are kept, because those of a long run are large.
        self._tables = functools.lru_cache(maxsize=4)(self._make_tables)
        self._mask = functools.lru_cache(maxsize=4)(self._make_mask)

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
        always_masked = documents is not None or sinks is not None
        run = self._run_tokens(num_queries, num_keys, always_masked, q)
        outputs = []
        for first in range(0, num_queries, run):
            stop = min(first + run, num_queries)
            upper = num_keys - num_queries + stop
            lower = 0 if self.window_tokens is None else max(0, upper - (stop - first) - self.window_tokens + 1)
            q_run, k_run, v_run = q[..., first:stop, :, :], k[..., lower:upper, :, :], v[..., lower:upper, :, :]
            size = (stop - first, upper - lower, q.device)
            mask = self._mask(*size) if always_masked or self._needs_mask(*size) else None
            if documents is not None and mask is not None:
                of_queries, of_keys = documents.of_queries[..., first:stop], documents.of_keys[..., lower:upper]
                mask = mask & _same_document(of_queries, of_keys)
            query_at, keys_at = self._tables(*size)
            query = self.positions.place(q_run, query_at, dtype)
            key = self.positions.place(k_run, keys_at, dtype)
            if sinks is not None and mask is not None:
                query, key, v_run, mask = self._with_sinks(q_run, query, key, v_run, mask, sinks)
            outputs.append(_weighted_values(query, key, v_run, mask, dropout, scale=q.shape[-1] ** -0.5))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-3)).to(v_XSGD.dtype)

    def _score_dtype(self, x: Tensor) -> torch.dtype:
        """Precision of the scores: that of `x`, but float32 where the scheme needs it, and on the CPU, where the bf16
        kernel takes 2.5 times as long at training lengths."""
        return torch.float32 if x.device.type == "cpu" or self.positions.needs_float32_scores else x.dtype

    def _needs_mask(self, num_queries: int, num_keys: int, device: torch.device) -> bool:
        """Whether kernels need to be told in a mask what a query sees: on CUDA not when it is all keys before."""
        if self.window_tokens is not None and num_keys > self.window_tokens:
            return True
        return num_queries not in (1, num_keys) and device.type != "cuda"

    def _run_tokens(self, num_queries: int, num_keys: int, always_masked: bool, like: Tensor) -> int:
        run = min(num_queries, self.positions.max_span_tokens(like.dtype) or num_queries)
        window = num_keys if self.window_tokens is None else self.window_tokens
        keys_of_run = min(num_keys, run + window)
        # Of several runs none but the first has as many queries as keys.
        if not always_masked and not self._needs_mask(run, keys_of_run, like.device):
            return run
        return max(1, min(run, _MAX_MASK_ELEMENTS // keys_of_run))

    def _make_tables(
        self, num_queries: int, num_keys: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """The centre of the positions lies amid the queries: keys far before it scale towards zero, which is what
        the true decay does, and no scale overflows."""
        centre = num_keys - (num_queries + 1) // 2
        query_at = self.positions.coordinates(num_keys - num_queries - centre, num_queries, "query", device)
        return query_at, self.positions.coordinates(-centre, num_keys, "key", device)

    def _make_mask(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Which keys each query sees [T, S]."""
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
        return seen if self.window_tokens is None else seen.triu(num_keys - num_queries - self.window_tokens + 1)

    def _with_sinks(
        self, q_XTHD: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Sinks
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and mask with the sinks before the window's keys.

        A query stands at one distance from the sinks and at another from its window, so it is placed twice. Both
        stand side by side in vectors of twice the size, and window keys and sinks are zero in the half that is not
        theirs, so that one product scores both exactly.
        """
        num_sinks, device = sinks.keys.shape[-3], query.device
        sinks_at = self.positions.coordinates(-sinks.distance, num_sinks, "key", device)
        sink_keys = self.positions.place(sinks.keys.to(query.dtype), sinks_at, query.dtype)
        if sinks_at is not None:
            at_itself = self.positions.place(q_XTHD, self.positions.coordinates(0, 1, "query", device), query.dtype)
            query = torch.cat((query, at_itself), dim=-1)
            placed_size = key.shape[-1]
            key, sink_keys = F.pad(key, (0, placed_size)), F.pad(sink_keys, (placed_size, 0))
        of_sinks = mask.new_ones(num_sinks).expand(*mask.shape[:-1], num_sinks)
        return (
            query,
            torch.cat((sink_keys, key), dim=-3),
            torch.cat((sinks.values.to(value.dtype), value), dim=-3),
            torch.cat((of_sinks, mask), dim=-1),
        )


def _same_document(of_queries_XT: Tensor, of_keys_XS: Tensor) -> Tensor:
    """Whether a query and a key belong to one document [X, 1, T, S], for all heads."""
    return (of_queries_XT[..., :, None] == of_keys_XS[..., None, :]).flatten(0, -3).unsqueeze(1)


def _weighted_values(
    q_XTHD: Tensor, k_XSGD: Tensor, v_XSGD: Tensor, mask: Tensor | None, dropout: float, scale: float
) -> Tensor:
    """Scaled dot-product attention [X, T, H, D of the values]; without a mask a query sees all keys up to it, the last
    query standing at the last key.

    Kernels take one leading dimension, so X is folded into it, and want values as wide as keys: otherwise they keep
    all scores. On CUDA only flash, which takes neither a mask nor float32, knows of grouped heads.
    """
    head_size = v_XSGD.shape[-1]
    if k_XSGD.shape[-1] > head_size:
        v_XSGD = F.pad(v_XSGD, (0, k_XSGD.shape[-1] - head_size))
    q, k, v = (x.reshape(-1, *x.shape[-3:]).transpose(1, 2) for x in (q_XTHD, k_XSGD, v_XSGD))
    num_queries, num_keys, num_repeats = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if num_repeats > 1 and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        k, v = (x.repeat_interleave(num_repeats, dim=1) for x in (k, v))
    if mask is None and num_queries not in (1, num_keys):
        mask = causal_lower_right(num_queries, num_keys)
    out_XHTD = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and num_queries > 1,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return out_XHTD.transpose(1, 2).reshape(*q_XTHD.shape[:-1], -1)[..., :head_size]
