"""Slow, obvious definitions in float64, written from the papers' formulas, that fast paths must agree with."""

import math

import torch
from torch import Tensor


def rotate_pairs(x_D: Tensor, position_K: Tensor, theta: float = 10000.0) -> Tensor:
    """Pairs (x0, x1), (x2, x3), ... turned by position times theta^(-2i/D), for each position [K, D]."""
    D = len(x_D)
    pairs = []
    for i in range(D // 2):
        angle = position_K * theta ** (-2 * i / D)
        a, b = x_D[2 * i], x_D[2 * i + 1]
        pairs += [a * torch.cos(angle) - b * torch.sin(angle), a * torch.sin(angle) + b * torch.cos(angle)]
    return torch.stack(pairs, dim=1)


def scores(
    scheme: str,
    q_D: Tensor,
    k_KD: Tensor,
    distances: list[int],
    *,
    head: int,
    num_heads: int,
    gamma: float,
    base: float,
) -> Tensor:
    """Scores before the softmax [K] of a query and keys that stand at distances before it."""
    q_D, k_KD, distance_K = q_D.double(), k_KD.double(), torch.tensor(distances, dtype=torch.float64)
    D = len(q_D)
    if scheme in ("rope", "xpos"):
        products = (rotate_pairs(q_D, distance_K) * k_KD).unflatten(1, (-1, 2)).sum(dim=2)
        if scheme == "xpos":
            zeta = torch.tensor([(i / (D / 2) + gamma) / (1 + gamma) for i in range(D // 2)], dtype=torch.float64)
            products = products * zeta ** (distance_K[:, None] / base)
        return products.sum(dim=1) / math.sqrt(D)
    plain = k_KD @ q_D / math.sqrt(D)
    return plain - alibi_slope(head, num_heads) * distance_K if scheme == "alibi" else plain


def score(scheme: str, q_D: Tensor, k_D: Tensor, distance: int, **settings: float) -> float:
    """Score before the softmax of a query and the key `distance` tokens before it."""
    return float(scores(scheme, q_D, k_D[None], [distance], **settings))  # type: ignore[arg-type]


def alibi_slope(head: int, num_heads: int) -> float:
    """The recipe of the ALiBi paper's code, by recursion for numbers that are no power of two."""
    power = 2 ** math.floor(math.log2(num_heads))
    if head < power:
        return 2.0 ** (-8 * (head + 1) / power)
    return alibi_slope(2 * (head - power), 2 * power)


def visible(mode: str, query: int, key: int, size: int, num_sinks: int = 0) -> bool:
    """Whether a query may see a key; `size` is the block of `blockwise` and the window of the others."""
    if key > query:
        return False
    if mode == "causal":
        return True
    if mode == "blockwise":
        return key // size >= query // size - 1
    if mode == "sliding":
        return query - key < size
    return key < num_sinks or query - key < size - num_sinks


def distance_seen(mode: str, query: int, key: int, size: int, num_sinks: int) -> int:
    """Distance that counts for the score: with sinks, that of places in a cache of `size` tokens."""
    if mode == "sinks" and key < num_sinks and query >= size:
        return size - 1 - key
    return query - key


def attention(
    scheme: str,
    mode: str,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    *,
    size: int,
    gamma: float,
    base: float,
    num_sinks: int = 0,
    documents: list[int] | None = None,
) -> Tensor:
    """Attention [T, H, D] by a loop over every head, query and key."""
    T, H, _ = q_THD.shape
    rows = []
    for query in range(T):
        keys = [
            key
            for key in range(T)
            if visible(mode, query, key, size, num_sinks) and (documents is None or documents[key] == documents[query])
        ]
        distances = [distance_seen(mode, query, key, size, num_sinks) for key in keys]
        for head in range(H):
            key_head = head * k_THD.shape[1] // H
            found = scores(
                scheme,
                q_THD[query, head],
                k_THD[keys, key_head],
                distances,
                head=head,
                num_heads=H,
                gamma=gamma,
                base=base,
            )
            rows.append(found.softmax(dim=0) @ v_THD[keys, key_head].double())
    return torch.stack(rows).unflatten(0, (T, H))
