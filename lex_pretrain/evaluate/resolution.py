"""Attention resolution (section 3.2 of arXiv 2212.10554): how well attention tells a distance from the next.

R(s) = sum_n e^s[n] (e^s[n] - e^s[n+1]) / (sum_n e^s[n])^2 over scores s[n] by distance n. As defined it cannot
exceed 1; the paper prints values up to 1.08, so only ratios and orderings compare.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lex_pretrain.evaluate.results import ResolutionRecord
from lex_pretrain.model.decoder import Decoder, SelfAttention
from lex_pretrain.model.positions import AlibiPositions, RotaryPositions

# Distances that the resolution is measured over, as multiples of the training length.
FACTORS = (1, 2, 8)
# Documents whose scores are averaged, and points of a curve that are kept.
NUM_DOCUMENTS = 4
NUM_CURVE_POINTS = 200
_ATTENTIONS: tuple[Literal["causal", "blockwise"], ...] = ("causal", "blockwise")


def measure_resolution(decoder: Decoder, documents: Sequence[NDArray[np.int64]]) -> list[ResolutionRecord]:
    """Expected and measured scores by distance and their R, for each layer, on the first of `documents`.

    Blockwise attention never looks beyond the training length, so its R is that of those distances alone.
    """
    trained = decoder.config.sequence_length
    num_distances = min(max(FACTORS) * trained, len(documents[0]))
    if decoder.config.position == "learned":
        num_distances = min(num_distances, trained)
    device = next(decoder.parameters()).device
    measured = [
        measured_scores(decoder, torch.from_numpy(document[:num_distances]).to(device))
        for document in documents[:NUM_DOCUMENTS]
    ]
    curves: list[tuple[int | None, NDArray[np.float64]]] = list(enumerate(np.mean(measured, axis=0)))
    expected = expected_scores(decoder.positions, num_distances)
    if expected is not None:
        curves.append((None, expected))
    factors = [factor for factor in FACTORS if factor * trained <= num_distances]
    return [
        _record(layer, scores, factor * trained, trained, attention, with_curve=factor == factors[-1])
        for layer, scores in curves
        for factor in factors
        for attention in _ATTENTIONS
    ]


def resolution(scores: NDArray[np.float64]) -> float:
    """R of scores by distance, computed so that no exponential overflows."""
    weights = np.exp(scores - scores.max())
    differences = weights[:-1] * (weights[:-1] - weights[1:])
    return float(differences.sum() / weights[:-1].sum() ** 2)


def expected_scores(positions: torch.nn.Module, num_distances: int) -> NDArray[np.float64] | None:
    """Expected score by distance: g[n] = sum_i cos(n theta_i) zeta_i^n of a rotating scheme, None for others."""
    if not isinstance(positions, RotaryPositions):
        return None
    distance = np.arange(num_distances)[:, None]
    cpu = torch.device("cpu")
    angles, log_scales = positions.angles(cpu).numpy(), positions.log_scales(cpu).numpy()
    scores: NDArray[np.float64] = (np.cos(distance * angles) * np.exp(distance * log_scales)).sum(axis=1)
    return scores


def measured_scores(decoder: Decoder, tokens_T: Tensor) -> NDArray[np.float64]:
    """Mean score before the softmax [layers, T] by distance, over all pairs of tokens and all heads, in one pass.

    No matrix of all pairs is built: the pairs at a distance are a cross-correlation of queries with keys, which a
    Fourier transform gives for all distances at once; rotation and scale depend on the distance alone and follow.
    """
    found: list[Tensor] = []

    def note(module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        assert isinstance(module, SelfAttention)
        hidden = arguments[0]
        assert isinstance(hidden, Tensor)
        q, k, _ = module.project(hidden)
        found.append(_mean_by_distance(q[0].double(), k[0].double(), decoder))

    hooks = [
        module.register_forward_pre_hook(note) for module in decoder.modules() if isinstance(module, SelfAttention)
    ]
    try:
        with torch.inference_mode():
            decoder.hidden_states(tokens_T[None], "causal")
    finally:
        for hook in hooks:
            hook.remove()
    stacked: NDArray[np.float64] = torch.stack(found).cpu().numpy()
    return stacked


def _mean_by_distance(q_THD: Tensor, k_THD: Tensor, decoder: Decoder) -> Tensor:
    """Mean over pairs and heads of the score at each distance [T], from vectors without positions."""
    T, H, D = q_THD.shape
    k_THD = k_THD.repeat_interleave(H // k_THD.shape[1], dim=1)
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q_THD, k_THD))
    size = 2 * T
    # sum over m of q[m + n] conj(k[m]), for every n at once.
    spectrum = torch.fft.fft(q, n=size, dim=0) * torch.fft.fft(k, n=size, dim=0).conj()
    correlation = torch.fft.ifft(spectrum, dim=0)[:T]
    positions = decoder.positions
    distance = torch.arange(T, dtype=torch.float64, device=q.device)
    if isinstance(positions, RotaryPositions):
        factors = torch.polar(
            torch.exp(torch.outer(distance, positions.log_scales(q.device))),
            torch.outer(distance, positions.angles(q.device)),
        )
        correlation = correlation * factors[:, None, :]
        correlation = correlation * positions.magnitude**2
    scores: Tensor = correlation.real.sum(dim=(1, 2)) / (H * D**0.5 * (T - distance))
    if isinstance(positions, AlibiPositions):
        scores = scores - positions.slopes(q.device).mean() * distance
    return scores


def _record(
    layer: int | None,
    scores: NDArray[np.float64],
    length: int,
    trained: int,
    attention: Literal["causal", "blockwise"],
    with_curve: bool,
) -> ResolutionRecord:
    stop = length if attention == "causal" else min(length, trained)
    shown = (np.unique(np.geomspace(1, stop, NUM_CURVE_POINTS).astype(int)) - 1).tolist() if with_curve else []
    return ResolutionRecord(
        kind="theory" if layer is None else "measured",
        layer=layer,
        length=length,
        attention=attention,
        resolution=resolution(scores[:stop]),
        distances=tuple(shown),
        scores=tuple(float(scores[distance]) for distance in shown),
    )
