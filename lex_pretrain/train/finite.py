"""Numbers that are not finite: noticed on the rank where they arise, kept out of the weights on all ranks.

With ZeRO, DeepSpeed 0.19 leaves a step out on all ranks when the summed gradient is not finite, in bf16 and float32 too
(tests/test_robustness.py proves it for stages 1 to 3); without ZeRO in float32 `CheckedAdamW` does. Both happen after
the ranks' gradients are summed, so which rank brought the fault in is noticed before.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

GRADIENT = "gradient"
LOSS = "loss"


class GradientWatch:
    """Notices that a gradient of this rank is not finite, before it is summed over ranks, in one pass over each."""

    def __init__(self, module: nn.Module) -> None:
        self._largest: Tensor | None = None
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        low, high = gradient.detach().aminmax()
        width = high.float() - low.float()
        # A maximum passes NaN on, and the width of an infinite range is infinite or NaN.
        self._largest = width if self._largest is None else torch.maximum(self._largest, width)

    def take(self) -> Tensor:
        """A scalar that is finite if all gradients since the last call were."""
        largest = self._largest
        self._largest = None
        return torch.zeros(()) if largest is None else largest


def spread_fault(loss: Tensor) -> Tensor:
    """The same loss, whose gradients are NaN where it is not finite itself: some of its gradients could be finite."""
    finite = loss.detach().isfinite()
    return loss * torch.where(finite, 1.0, math.nan)


class CheckedAdamW(torch.optim.AdamW):
    """AdamW for training without ZeRO: clips, and leaves weights and state alone when a gradient is not finite.

    `overflow` and `_global_grad_norm` are where DeepSpeed's engine looks for what its own optimizers find.
    """

    def __init__(self, groups: Any, max_norm: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.max_norm = max_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, self.max_norm or math.inf)
        self._global_grad_norm = norm.item()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if not self.overflow:
            super().step(closure)


def state_is_finite(engine: Any) -> bool:
    """Whether all weights and the optimizer's state, of all ranks, are finite."""
    finite = all(bool(tensor.isfinite().all()) for tensor in _state_tensors(engine))
    shared = torch.tensor(float(not finite), device=engine.device)
    torch.distributed.all_reduce(shared)
    return shared.item() == 0


def _state_tensors(engine: Any) -> Iterator[Tensor]:
    """This rank's part of the float32 weights and of the optimizer's moments."""
    optimizer = engine.basic_optimizer
    # At stage 3, DeepSpeed's weights are in the groups during its step alone; at stage 0, no state is before the first.
    in_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in dict.fromkeys([*in_groups, *optimizer.state]):
        yield parameter.detach()
        yield from (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor))
