"""The training objective around a decoder, as one module for DeepSpeed to own."""

import torch
from torch import Tensor, nn

from lex_pretrain.config import AttentionMode
from lex_pretrain.model.decoder import Decoder

# Rows of logits that the loss holds in float32 at a time; as many as stay in a core's second-level cache.
_BLOCK_ELEMENTS = 131_072


class NextTokenLoss(nn.Module):
    """Mean negative log likelihood, in nats a token, of the next tokens under a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens_BT: Tensor, next_tokens_BT: Tensor, attention: AttentionMode = "causal") -> Tensor:
        """A float32 scalar. Logits keep the model's dtype: DeepSpeed's loss makes no float32 copy of them."""
        from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy

        logits_BTV: Tensor = self.decoder(tokens_BT, attention)
        loss: Tensor = chunked_cross_entropy(
            logits_BTV.flatten(0, 1),
            next_tokens_BT.flatten(),
            block_rows=max(1, _BLOCK_ELEMENTS // logits_BTV.shape[-1]),
        )
        return loss


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms, biases and embeddings do not. A tied output layer is an embedding."""
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    decayed: list[torch.nn.Parameter] = []
    undecayed: list[torch.nn.Parameter] = []
    for parameter in module.parameters():
        # Under ZeRO-3 a partitioned parameter's own shape is empty; DeepSpeed keeps the whole one beside it.
        num_dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
        matrix = num_dimensions >= 2 and id(parameter) not in embeddings
        (decayed if matrix else undecayed).append(parameter)
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
