"""The training objective around a decoder, as one module for DeepSpeed to own."""

from typing import Any

import torch
from torch import Tensor, nn

from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import AttentionMode

# Rows of logits that the loss holds in float32 at a time; as many as stay in a core's second-level cache.
_BLOCK_ELEMENTS = 131_072


class NextTokenLoss(nn.Module):
    """Mean negative log likelihood, in nats a token, of the next tokens under a decoder.

    While training, `z_loss` times the mean square of log(sum(exp(logits))) is added: it keeps logits from drifting
    where softmax cannot tell (PaLM, arXiv 2204.02311). With `separate_documents_at`, the id that ends a document, no
    token sees another document of its window.
    """

    def __init__(self, decoder: Decoder, z_loss: float = 0.0, separate_documents_at: int | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.z_loss = z_loss
        self.separate_documents_at = separate_documents_at

    def forward(self, tokens_BT: Tensor, next_tokens_BT: Tensor, attention: AttentionMode = "causal") -> Tensor:
        """A float32 scalar. Logits keep the model's dtype: DeepSpeed's loss makes no float32 copy of them."""
        from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy

        documents_BT = None
        if self.separate_documents_at is not None:
            # The id that ends a document predicts the first token of the next, so it belongs to that one.
            documents_BT = (tokens_BT == self.separate_documents_at).cumsum(dim=1)
        logits_NV = self.decoder(tokens_BT, attention, None, documents_BT).flatten(0, 1)
        targets_N = next_tokens_BT.flatten()
        losses_N: Tensor = chunked_cross_entropy(
            logits_NV,
            targets_N,
            reduction="none",
            block_rows=max(1, _BLOCK_ELEMENTS // logits_NV.shape[-1]),
        )
        loss = losses_N.mean()
        if self.z_loss and self.training:
            log_sums_N = losses_N + logits_NV.gather(1, targets_N[:, None]).squeeze(1).float()
            loss = loss + self.z_loss * log_sums_N.square().mean()
        return loss


def hidden_matrices(decoder: Decoder) -> set[nn.Parameter]:
    """The matrices of the layers: neither embeddings nor the output layer."""
    return {parameter for parameter in decoder.layers.parameters() if parameter.ndim == 2}


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and embeddings do not. A tied output layer is an embedding."""
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    decayed: list[torch.nn.Parameter] = []
    undecayed: list[torch.nn.Parameter] = []
    for parameter in module.parameters():
        # Under ZeRO-3 a partitioned parameter's own shape is empty; DeepSpeed keeps the whole one beside it.
        num_dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
        matrix = num_dimensions >= 2 and id(parameter) not in embeddings
        (decayed if matrix else undecayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
