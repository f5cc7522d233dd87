"""The decoder's settings: shapes, parameters, FLOPs, vocabulary padding, activation checkpointing."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lex_pretrain.config import ModelSection
from lex_pretrain.model.decoder import Decoder, count_parameters
from lex_pretrain.model.flops import forward_flops_per_token
from lex_pretrain.train.loss import NextTokenLoss, parameter_groups
from tests.test_attention import model_section

VARIANTS: list[dict[str, object]] = [
    {},
    {"norm": "rmsnorm", "activation": "swiglu", "bias": False},
    {"sub_layer_norm": True, "activation": "relu", "tie_embeddings": False},
    {"init": "gpt2", "scale_embeddings": False, "num_key_value_heads": 1},
    {"position": "learned", "feed_forward_size": 40},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_setting_trains_and_counts(changes: dict[str, object]) -> None:
    config = model_section(**changes)
    torch.manual_seed(0)
    decoder = Decoder(config)
    assert count_parameters(config) == sum(parameter.numel() for parameter in decoder.parameters())
    module = NextTokenLoss(decoder)
    optimizer = torch.optim.AdamW(parameter_groups(module, 0.1), lr=1e-2)
    tokens = torch.arange(9)[None]
    losses = []
    for _ in range(30):
        loss = module(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    decoder = Decoder(model_section())
    tokens = torch.randint(0, 40, (3, 9))
    logits = decoder(tokens[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten())
    found = NextTokenLoss(decoder)(tokens[:, :-1], tokens[:, 1:])
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_only_matrices_decay() -> None:
    module = NextTokenLoss(Decoder(model_section(position="learned")))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    decayed, undecayed = parameter_groups(module, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert undecayed["weight_decay"] == 0.0
    decayed_names = {names[id(parameter)] for parameter in decayed["params"]}  # type: ignore[attr-defined]
    assert all(name.endswith("weight") and "norm" not in name and "embedding" not in name for name in decayed_names)
    assert len(decayed_names) == 2 * 4


def test_padded_vocabulary_rows_are_never_predicted() -> None:
    decoder = Decoder(model_section(vocab_size=130))
    assert decoder.embedding.num_embeddings == 256
    assert decoder(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, 130)


def test_activation_checkpointing_changes_nothing() -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = NextTokenLoss(Decoder(model_section(), activation_checkpointing=recompute))
        module(torch.arange(8)[None], torch.arange(1, 9)[None]).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=0, rtol=0)


@pytest.mark.parametrize("changes", VARIANTS[:4], ids=str)
def test_flops_by_formula_are_those_that_torch_counts(changes: dict[str, object]) -> None:
    config: ModelSection = model_section(**changes)
    decoder = Decoder(config)
    length = config.sequence_length
    # torch counts attention only where it is made of plain matrix products.
    with FlopCounterMode(display=False) as counter, torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        decoder(torch.zeros(1, length, dtype=torch.long))
    counted = counter.get_total_flops()
    # It counts scores as if nothing were masked; the formula counts the causal half.
    unmasked = config.num_layers * 2 * 2 * config.hidden_size * (length - (length + 1) / 2)
    assert (forward_flops_per_token(config) + unmasked) * length == pytest.approx(counted)
