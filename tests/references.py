"""Slow, obvious definitions in float64, written from the papers' formulas, that fast paths must agree with."""

import math

import torch
from torch import Tensor


def rotate_pairs(x_D: Tensor, position: float, theta: float = 10000.0) -> Tensor:
    """Pairs (x0, x1), (x2, x3), ... turned by position times theta^(-2i/D)."""
    out = torch.empty_like(x_D, dtype=torch.float64)
    for i in range(len(x_D) // 2):
        angle = position * theta ** (-2 * i / len(x_D))
        a, b = float(x_D[2 * i]), float(x_D[2 * i + 1])
        out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def score(
    scheme: str, q_D: Tensor, k_D: Tensor, distance: int, *, head: int, num_heads: int, gamma: float, base: float
) -> float:
    """Score before the softmax of a query and the key `distance` tokens before it."""
    D = len(q_D)
    if scheme in ("rope", "xpos"):
        turned = rotate_pairs(q_D, distance)
        products = (turned * k_D.double()).view(-1, 2).sum(dim=1)
        if scheme == "xpos":
            zeta = torch.tensor([(i / (D / 2) + gamma) / (1 + gamma) for i in range(D // 2)], dtype=torch.float64)
            products = products * zeta ** (distance / base)
        return float(products.sum()) / math.sqrt(D)
    plain = float(q_D.double() @ k_D.double()) / math.sqrt(D)
    return plain - alibi_slope(head, num_heads) * distance if scheme == "alibi" else plain


def alibi_slope(head: int, num_heads: int) -> float:
    """The recipe of the ALiBi paper's code, by recursion for numbers that are no power of two."""
    power = 2 ** math.floor(math.log2(num_heads))
    if head < power:
        return 2.0 ** (-8 * (head + 1) / power)
    return alibi_slope(2 * (head - power), 2 * power)


def visible(mode: str, query: int, key: int, block: int) -> bool:
    """Whether a query may see a key."""
    if key > query:
        return False
    return mode == "causal" or key // block >= query // block - 1


def attention(
    scheme: str, mode: str, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, block: int, gamma: float, base: float
) -> Tensor:
    """Attention [T, H, D] by a loop over every head, query and key."""
    T, H, D = q_THD.shape
    out = torch.zeros(T, H, D, dtype=torch.float64)
    for head in range(H):
        key_head = head * k_THD.shape[1] // H
        for query in range(T):
            keys = [key for key in range(T) if visible(mode, query, key, block)]
            scores = torch.tensor(
                [
                    score(
                        scheme,
                        q_THD[query, head],
                        k_THD[key, key_head],
                        query - key,
                        head=head,
                        num_heads=H,
                        gamma=gamma,
                        base=base,
                    )
                    for key in keys
                ],
                dtype=torch.float64,
            )
            out[query, head] = scores.softmax(dim=0) @ v_THD[keys, key_head].double()
    return out
