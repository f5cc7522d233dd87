"""Every scheme and mode against its float64 definition, and the faults that public implementations have."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lex_pretrain.config import AttentionMode, ModelSection
from lex_pretrain.model.attention import make_attention
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model.positions import AlibiPositions, XPosPositions, make_positions, rotate
from tests import references

CPU = torch.device("cpu")
SCHEMES = ("xpos", "rope", "alibi", "none")
MODES: tuple[AttentionMode, ...] = ("causal", "blockwise")


def model_section(**changes: object) -> ModelSection:
    values: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 3,
        "sequence_length": 8,
        "vocab_size": 40,
        **changes,
    }
    return ModelSection.model_validate(values)


@settings(deadline=None, max_examples=40)
@given(
    scheme=st.sampled_from(SCHEMES),
    mode=st.sampled_from(MODES),
    num_tokens=st.integers(1, 26),
    num_heads=st.integers(1, 6),
    grouped=st.booleans(),
    block=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_attention_is_its_definition(
    scheme: str, mode: AttentionMode, num_tokens: int, num_heads: int, grouped: bool, block: int, seed: int
) -> None:
    config = model_section(
        position=scheme,
        hidden_size=8 * num_heads,
        num_heads=num_heads,
        num_key_value_heads=1 if grouped else num_heads,
        block_size=block,
    )
    torch.manual_seed(seed)
    q = torch.randn(num_tokens, num_heads, 8)
    k, v = (torch.randn(num_tokens, config.resolved_num_key_value_heads, 8) for _ in range(2))
    attend = make_attention(mode, config, make_positions(config), 0, num_tokens)
    found = attend(q[None], k[None], v[None], None, 0.0)[0]
    base = config.resolved_xpos_scale_base
    expected = references.attention(scheme, mode, q, k, v, block=block, gamma=config.xpos_gamma, base=base)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scheme", [*SCHEMES, "sinusoidal"])
@pytest.mark.parametrize("mode", MODES)
def test_cached_forward_equals_the_full_one_at_every_position(scheme: str, mode: AttentionMode) -> None:
    config = model_section(position=scheme, num_key_value_heads=1)
    torch.manual_seed(0)
    decoder = Decoder(config).eval()
    block = config.resolved_block_size
    for num_tokens in (1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 4 * block, 33):
        tokens = torch.randint(0, 40, (2, num_tokens))
        with torch.inference_mode():
            full = decoder(tokens, mode)
            for chunk in (1, 3, block, block + 1, 11):
                cache = decoder.make_cache()
                parts = [decoder(tokens[:, i : i + chunk], mode, cache) for i in range(0, num_tokens, chunk)]
                torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-5)
                if mode == "blockwise":
                    assert max(layer.num_tokens for layer in cache.layers) <= 2 * block


def test_a_cache_keeps_to_its_attention_mode() -> None:
    decoder = Decoder(model_section()).eval()
    cache = decoder.make_cache()
    decoder(torch.zeros(1, 3, dtype=torch.long), "blockwise", cache)
    with pytest.raises(ValueError, match="filled with blockwise"):
        decoder(torch.zeros(1, 1, dtype=torch.long), "causal", cache)


def test_blockwise_with_one_block_over_all_is_causal() -> None:
    decoder = Decoder(model_section(sequence_length=16, block_size=16)).eval()
    tokens = torch.randint(0, 40, (1, 16))
    torch.testing.assert_close(decoder(tokens, "blockwise"), decoder(tokens, "causal"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [3, 5, 7, 9, 15, 17, 32])
def test_blockwise_sees_the_own_block_and_the_whole_one_before(num_tokens: int) -> None:
    """A truth table from what a change of each token changes, in a decoder of one layer with block 8."""
    decoder = Decoder(model_section(num_layers=1, sequence_length=16)).eval()
    tokens = torch.randint(0, 20, (1, num_tokens))
    with torch.inference_mode():
        before = decoder(tokens, "blockwise")[0]
        for key in range(num_tokens):
            changed = tokens.clone()
            changed[0, key] += 20
            moved = (decoder(changed, "blockwise")[0] - before).abs().amax(dim=-1) > 0
            expected = [references.visible("blockwise", query, key, 8) for query in range(num_tokens)]
            assert moved.tolist() == expected


@pytest.mark.parametrize("scheme", ["xpos", "rope"])
@pytest.mark.parametrize("offset", [1_000, 1_000_000])
def test_scores_do_not_depend_on_where_the_pair_stands(scheme: str, offset: int) -> None:
    """Positions are counted from a centre near the pair, so scores at a million equal those at the start."""
    config = model_section(position=scheme, hidden_size=64, num_heads=1)
    positions = make_positions(config)
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 1, 64)

    def scores(centre: int) -> torch.Tensor:
        factors = [positions.rotation(offset - centre, 4, role, CPU) for role in ("query", "key")]
        turned = [rotate(x, factor, torch.float32)[0, :, 0] for x, factor in zip((q, k), factors, strict=True)]
        return turned[0] @ turned[1].T

    torch.testing.assert_close(scores(offset), scores(offset - 3), atol=1e-4, rtol=1e-5)


def test_tables_match_float64_at_a_million_and_casts_do_not_reach_them() -> None:
    positions = XPosPositions(head_size=64, theta=10000.0, gamma=0.4, scale_base=512.0)
    assert list(positions.parameters()) == []
    assert list(positions.buffers()) == []
    table = positions.bfloat16().rotation(1_048_570, 6, "query", CPU)[:, 0]
    for row, position in enumerate(range(1_048_570, 1_048_576)):
        for i in (0, 7, 31):
            angle = position * 10000.0 ** (-2 * i / 64)
            scale = ((i / 32 + 0.4) / 1.4) ** (position / 512)
            expected = complex(scale * math.cos(angle), scale * math.sin(angle))
            assert abs(complex(table[row, i]) - expected) <= 1e-6 * scale + 1e-38


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_no_overflow_far_past_the_training_length_with_a_small_scale_base(
    dtype: torch.dtype, mode: AttentionMode
) -> None:
    """A fault of public xPos code: with one common centre, base 4 overflows float32 near 280 tokens from it."""
    config = model_section(num_layers=1, xpos_scale_base=4.0)
    decoder = Decoder(config).eval().to(dtype)
    with torch.inference_mode():
        logits = decoder(torch.randint(0, 40, (1, 3000)), mode)
    assert logits.isfinite().all()


def test_runs_of_queries_join_exactly() -> None:
    """Past its span xPos attends in runs, each with its own centre; the result is that of the definition."""
    config = model_section(num_layers=1, hidden_size=8, num_heads=1, xpos_scale_base=0.5)
    positions = make_positions(config)
    assert positions.max_span_tokens is not None
    num_tokens = 2 * positions.max_span_tokens + 5
    torch.manual_seed(0)
    q, k, v = (torch.randn(num_tokens, 1, 8) for _ in range(3))
    found = make_attention("causal", config, positions, 0, num_tokens)(q[None], k[None], v[None], None, 0.0)[0]
    expected = references.attention("xpos", "causal", q, k, v, block=4, gamma=0.4, base=0.5)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 20])
def test_alibi_slopes_for_any_number_of_heads(num_heads: int) -> None:
    slopes = AlibiPositions(num_heads).slopes(CPU).tolist()
    assert slopes == pytest.approx([references.alibi_slope(head, num_heads) for head in range(num_heads)])


def test_half_precision_module_keeps_angles() -> None:
    """A fault of public code: positions in a bf16 buffer, of which only 641 of the first 2,048 are distinct."""
    torch.manual_seed(0)
    decoder = Decoder(model_section(num_layers=1, hidden_size=32, num_heads=1, sequence_length=2048)).eval()
    tokens = torch.randint(0, 40, (1, 2048))
    with torch.inference_mode():
        exact = decoder(tokens).softmax(dim=-1)
        rounded = decoder.bfloat16()(tokens).float().softmax(dim=-1)
    assert (exact - rounded).abs().max() < 0.02


def test_learned_positions_end_with_a_reason() -> None:
    decoder = Decoder(model_section(position="learned")).eval()
    decoder(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="cannot extrapolate"):
        decoder(torch.zeros(1, 9, dtype=torch.long))


def test_gradients_of_blockwise_and_causal_are_finite_and_equal_where_the_modes_are() -> None:
    gradients = []
    for mode in MODES:
        torch.manual_seed(0)
        decoder = Decoder(model_section(sequence_length=16, block_size=16))
        decoder(torch.arange(16)[None], mode).square().mean().backward()
        gradients.append([parameter.grad for parameter in decoder.parameters()])
    for causal, blockwise in zip(*gradients, strict=True):
        assert causal is not None
        torch.testing.assert_close(causal, blockwise, atol=1e-6, rtol=1e-4)
