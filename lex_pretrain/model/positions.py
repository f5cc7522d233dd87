"""Position schemes: how a decoder knows where its tokens are.

`Positions` is the one interface. A scheme acts at one of two places: it adds vectors to the embeddings, or it changes
queries and keys so that their products hold it.

Angles, scales and slopes are computed in float64 from plain numbers at every use and rounded once. None is a
buffer or a parameter, so casting the module (`.bfloat16()`, DeepSpeed's precision) cannot degrade them.

Shapes: B batch, T tokens, H heads, D head size, E hidden size.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from lex_pretrain.model_config import ModelSection

Role = Literal["query", "key"]
RopeScaling = Literal["linear", "ntk", "yarn"]


class Positions(nn.Module):
    """The scheme `none`, and the interface of all others: every hook does nothing."""

    needs_float32_scores = False

    def max_span_tokens(self, dtype: torch.dtype) -> int | None:
        """Queries that one attention call may place around a common centre; None where any number is exact."""
        return None

    def embed(self, start: int, num_tokens: int, like: Tensor) -> Tensor | None:
        """Vectors [T, E] to add to the embeddings of positions start .. start + T - 1, or None."""
        return None

    def coordinates(self, start: int, num_tokens: int, role: Role, device: torch.device) -> Tensor | None:
        """What `place` needs for positions start .. start + T - 1, counted from the attention's centre, or None."""
        return None

    def place(self, x_XTHD: Tensor, coordinates: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Queries or keys [X, T, H, ...] whose products, divided by sqrt(D), are the scores."""
        return x_XTHD.to(dtype)


class RotaryPositions(Positions):
    """Scheme `rope`: pairs of dimensions (x0, x1), (x2, x3), ... turned by position times angle.

    A subclass changes the angles (`angles`), the decay (`log_scales`) or the size of all scores (`magnitude`).
    """

    # Factor of queries and of keys alike.
    magnitude = 1.0
    # A key that scales below this adds nothing to a score; smaller, its products would be subnormal numbers, of which
    # a CPU takes many times as long.
    _MIN_LOG_SCALE = -60.0

    def __init__(self, head_size: int, theta: float) -> None:
        super().__init__()
        self.head_size = head_size
        self.theta = theta

    def angles(self, device: torch.device) -> Tensor:
        """Angle a token [D/2], float64: theta^(-2i/D)."""
        pair = torch.arange(self.head_size // 2, dtype=torch.float64, device=device)
        return torch.pow(self.theta, -2 * pair / self.head_size)

    def log_scales(self, device: torch.device) -> Tensor:
        """Natural logarithm [D/2], float64, of the query's scale a token; RoPE has none."""
        return torch.zeros(self.head_size // 2, dtype=torch.float64, device=device)

    def coordinates(self, start: int, num_tokens: int, role: Role, device: torch.device) -> Tensor:
        """Complex factors [T, 1, D/2]."""
        position = torch.arange(start, start + num_tokens, dtype=torch.float64, device=device)
        log_scale = self.log_scales(device) * (1.0 if role == "query" else -1.0)
        # A complex number holds both: its angle turns the pair, its modulus is the xPos scale.
        modulus = self.magnitude * torch.exp(torch.outer(position, log_scale).clamp(min=self._MIN_LOG_SCALE))
        factors = torch.polar(modulus, torch.outer(position, self.angles(device)))
        return factors.to(torch.complex64).unsqueeze(1)

    def place(self, x_XTHD: Tensor, coordinates: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Interleaved pairs times their factors in float32, rounded to `dtype` once."""
        assert coordinates is not None
        pairs = torch.view_as_complex(x_XTHD.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * coordinates).flatten(-2).to(dtype)


class ScaledRotaryPositions(RotaryPositions):
    """RoPE stretched to `factor` times its training length, for evaluation.

    `linear` slows all angles by the factor (position interpolation, arXiv 2306.15595). `ntk` raises theta so that the
    slowest angle slows by it and the fastest not at all. `yarn` (arXiv 2309.00071) slows angles that turn less than
    once in the training length, leaves those that turn over 32 times, blends between, and sharpens the scores.
    """

    _FEWEST_TURNS, _MOST_TURNS = 1.0, 32.0

    def __init__(self, head_size: int, theta: float, method: RopeScaling, factor: float, training_length: int) -> None:
        super().__init__(head_size, theta)
        self.method = method
        self.factor = factor
        self.training_length = training_length
        if method == "yarn":
            self.magnitude = 0.1 * math.log(factor) + 1.0

    def angles(self, device: torch.device) -> Tensor:
        plain = super().angles(device)
        if self.method == "linear":
            return plain / self.factor
        if self.method == "ntk":
            # theta * factor^(D / (D - 2)), written for each angle; a single pair has nothing to spread over.
            pair = torch.arange(self.head_size // 2, dtype=torch.float64, device=device)
            return plain * torch.pow(self.factor, -2 * pair / max(1, self.head_size - 2))
        num_turns = self.training_length * plain / (2 * math.pi)
        share_kept = ((num_turns - self._FEWEST_TURNS) / (self._MOST_TURNS - self._FEWEST_TURNS)).clamp(0, 1)
        return plain * (share_kept + (1 - share_kept) / self.factor)


class XPosPositions(RotaryPositions):
    """Scheme `xpos`: RoPE whose queries scale by zeta^(n / base) and keys by zeta^(-n / base).

    Section 3.1 and Algorithm 1 of "A Length-Extrapolatable Transformer" (arXiv 2212.10554), with the scale base of
    the authors' code. A score depends on the distance alone and decays with it, for keys not after the query.
    With `shared_decay` every pair decays by the mean of the logarithms: an ablation.
    """

    # exp(20) squared stays far from the limits of float32 and bfloat16, which share their exponent range. The largest
    # float16 is exp(11), so exp(4) leaves room for vectors of a thousand.
    _MAX_LOG_SCALE, _MAX_LOG_SCALE_FLOAT16 = 20.0, 4.0

    def __init__(
        self, head_size: int, theta: float, gamma: float, scale_base: float, shared_decay: bool = False
    ) -> None:
        super().__init__(head_size, theta)
        self.gamma = gamma
        self.scale_base = scale_base
        self.shared_decay = shared_decay
        self.steepest = -math.log(gamma / (1 + gamma)) / scale_base

    def max_span_tokens(self, dtype: torch.dtype) -> int:
        largest = self._MAX_LOG_SCALE_FLOAT16 if dtype == torch.float16 else self._MAX_LOG_SCALE
        return max(2, int(2 * largest / self.steepest))

    def log_scales(self, device: torch.device) -> Tensor:
        pair = torch.arange(self.head_size // 2, dtype=torch.float64, device=device)
        zeta = (pair / (self.head_size / 2) + self.gamma) / (1 + self.gamma)
        log_zeta = torch.log(zeta)
        if self.shared_decay:
            log_zeta = log_zeta.mean().expand_as(log_zeta)
        return log_zeta / self.scale_base


class AlibiPositions(Positions):
    """Scheme `alibi`: scores fall linearly with distance, each head with its own slope (arXiv 2108.12409).

    -m (i - j) is the product of (m, -m i) and (j, 1), so it comes from dimensions beside those of queries and keys, and
    no bias is stored. Products of a position m i have an error of 6e-8 m i; within the span that is 3e-5 at most, and
    for keys far before it the weight e^(-m (i - j)) vanishes faster than the error grows.
    """

    needs_float32_scores = True
    _SPAN_TOKENS = 1024

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size

    def max_span_tokens(self, dtype: torch.dtype) -> int:
        return self._SPAN_TOKENS

    def slopes(self, device: torch.device) -> Tensor:
        """Slopes [H], float64: a geometric sequence; heads beyond a power of two fill in every other one."""
        power = 2 ** math.floor(math.log2(self.num_heads))
        exponents = [8 * (head + 1) / power for head in range(power)]
        exponents += [4 * (2 * head + 1) / power for head in range(self.num_heads - power)]
        return torch.pow(2.0, -torch.tensor(exponents, dtype=torch.float64, device=device))

    def coordinates(self, start: int, num_tokens: int, role: Role, device: torch.device) -> Tensor:
        """Dimensions to add [T, H or 1, 4]; two are zero, because kernels want multiples of four."""
        position = torch.arange(start, start + num_tokens, dtype=torch.float64, device=device)[:, None]
        if role == "query":
            # Scores are divided by sqrt(D), and these must not be.
            slopes = (self.slopes(device) * math.sqrt(self.head_size)).expand(num_tokens, -1)
            pair = torch.stack((slopes, -slopes * position), dim=-1)
        else:
            pair = torch.stack((position, torch.ones_like(position)), dim=-1)
        return nn.functional.pad(pair.float(), (0, 2))

    def place(self, x_XTHD: Tensor, coordinates: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert coordinates is not None
        return torch.cat((x_XTHD.to(dtype), coordinates.to(dtype).expand(*x_XTHD.shape[:-1], -1)), dim=-1)


class SinusoidalPositions(Positions):
    """Scheme `sinusoidal`: the fixed waves of "Attention Is All You Need" (arXiv 1706.03762), interleaved."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def embed(self, start: int, num_tokens: int, like: Tensor) -> Tensor:
        position = torch.arange(start, start + num_tokens, dtype=torch.float64, device=like.device)
        pair = torch.arange((self.hidden_size + 1) // 2, dtype=torch.float64, device=like.device)
        angle = torch.outer(position, torch.pow(10000.0, -2 * pair / self.hidden_size))
        waves = torch.stack((torch.sin(angle), torch.cos(angle)), dim=-1).flatten(1)
        return waves[:, : self.hidden_size].to(like.dtype)


class LearnedPositions(Positions):
    """Scheme `learned`: one trained vector a position, as many as the training length."""

    def __init__(self, sequence_length: int, hidden_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(sequence_length, hidden_size)

    def embed(self, start: int, num_tokens: int, like: Tensor) -> Tensor:
        """Raises ValueError past the table: there is no vector for a position that training never saw."""
        if start + num_tokens > self.table.num_embeddings:
            raise ValueError(
                f"learned positions end at the training length {self.table.num_embeddings}, and position "
                f"{start + num_tokens - 1} was asked for: this scheme has no vectors past it and cannot extrapolate"
            )
        embedded: Tensor = self.table(torch.arange(start, start + num_tokens, device=like.device))
        return embedded


def make_positions(config: ModelSection) -> Positions:
    """The scheme that `model.position` names."""
    match config.position:
        case "xpos":
            return XPosPositions(
                config.head_size,
                config.rotary_theta,
                config.xpos_gamma,
                config.resolved_xpos_scale_base,
                config.xpos_shared_decay,
            )
        case "rope":
            if config.rope_scaling == "none":
                return RotaryPositions(config.head_size, config.rotary_theta)
            return ScaledRotaryPositions(
                config.head_size,
                config.rotary_theta,
                config.rope_scaling,
                config.rope_scaling_factor,
                config.sequence_length,
            )
        case "alibi":
            return AlibiPositions(config.num_heads, config.head_size)
        case "sinusoidal":
            return SinusoidalPositions(config.hidden_size)
        case "learned":
            return LearnedPositions(config.sequence_length, config.hidden_size)
        case "none":
            return Positions()
