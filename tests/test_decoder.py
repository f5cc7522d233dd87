"""The decoder's settings: shapes, parameters, FLOPs, vocabulary padding, activation checkpointing."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model.flops import forward_flops_per_token
from lex_pretrain.model.parameters import count_parameters
from lex_pretrain.model_config import ModelSection
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


def test_z_loss_is_the_mean_square_of_the_log_normaliser_and_only_trains() -> None:
    decoder = Decoder(model_section())
    tokens = torch.randint(0, 40, (3, 9))
    module = NextTokenLoss(decoder, z_loss=0.25)
    logits = decoder(tokens[:, :-1]).flatten(0, 1).double()
    targets = tokens[:, 1:].flatten()
    plain = torch.nn.functional.cross_entropy(logits, targets)
    expected = plain + 0.25 * logits.logsumexp(dim=1).square().mean()
    found = module(tokens[:, :-1], tokens[:, 1:])
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    parameters = list(decoder.parameters())
    pairs = zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True)
    for gradient, expected_gradient in pairs:
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-4)
    assert module.eval()(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(plain.item(), rel=1e-6)


def test_separate_documents_are_scored_as_if_each_began_a_window() -> None:
    """An end of document (id 7) predicts the first token of the next one, as it does for a first document."""
    decoder = Decoder(model_section())
    first, second = [7, 3, 4, 5], [7, 9, 10]
    window = torch.tensor([[*first, *second, 7]])
    together = NextTokenLoss(decoder, separate_documents_at=7)(window[:, :-1], window[:, 1:])
    parts = [torch.tensor([[*part, 7]]) for part in (first, second)]
    alone = [NextTokenLoss(decoder)(part[:, :-1], part[:, 1:]).item() for part in parts]
    assert together.item() == pytest.approx((4 * alone[0] + 3 * alone[1]) / 7, rel=1e-5)


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


def test_activation_checkpointing_changes_nothing_but_what_is_kept() -> None:
    gradients, num_saved = [], []
    for every in (0, 1, 2):
        torch.manual_seed(0)
        module = NextTokenLoss(Decoder(model_section(num_layers=4, dropout=0.1), activation_checkpointing=every))
        saved: list[torch.Tensor] = []

        def keep(x: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(x)
            return x

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = module(torch.arange(8)[None], torch.arange(1, 9)[None])
        num_saved.append(len(saved))
        loss.backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for plain, *recomputed in zip(*gradients, strict=True):
        for gradient in recomputed:
            torch.testing.assert_close(plain, gradient, atol=0, rtol=0)
    assert num_saved[0] > num_saved[2] > num_saved[1]


@pytest.mark.slow
def test_compiled_layers_change_nothing() -> None:
    """Forward, backward, another attention mode and cached decoding, in a compiled and in a plain decoder."""
    tokens = torch.randint(0, 40, (2, 19), generator=torch.Generator().manual_seed(0))
    plain, compiled = (Decoder(model_section()) for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    compiled.compile_layers()
    for mode in ("causal", "blockwise"):
        found, expected = compiled(tokens, mode), plain(tokens, mode)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.square().mean().backward()
    expected.square().mean().backward()
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)
    cache = compiled.make_cache()
    with torch.no_grad():
        steps = [compiled(tokens[:, i : i + 1], "blockwise", cache) for i in range(19)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [-1, 40, 100])
def test_token_ids_out_of_range_are_named(wrong: int) -> None:
    """Ids 40 to 127 have rows in the padded table and would pass in silence; larger ones would end a GPU's process."""
    with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary of 40 pieces"):
        Decoder(model_section())(torch.tensor([[0, wrong]]))


def test_a_pass_over_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens to read: a document begins with"):
        Decoder(model_section())(torch.zeros(1, 0, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 25}, "hidden_size 25 is not divisible by num_heads 3"),
        ({"hidden_size": 27}, "= 9 is odd; xpos rotates pairs"),
        ({"num_key_value_heads": 2}, "not divisible by num_key_value_heads 2"),
        ({"block_size": 9}, "block_size 9 is longer than sequence_length 8"),
        ({"window_size": 9}, "window_size 9 is longer than sequence_length 8"),
        ({"num_sinks": 8}, "num_sinks 8 leaves no window of the 8 keys"),
        ({"rope_scaling": "yarn"}, "rope_scaling yarn needs position rope, not xpos"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_section(**changes)


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
