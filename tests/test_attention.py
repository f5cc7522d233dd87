"""Every scheme and mode against its float64 definition, and the faults that public implementations have."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lex_pretrain.model.attend import CausalAttend
from lex_pretrain.model.attention import make_attention
from lex_pretrain.model.cache import LayerCache
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model.positions import AlibiPositions, RotaryPositions, XPosPositions, make_positions
from lex_pretrain.model_config import AttentionMode, ModelSection
from tests import references

CPU = torch.device("cpu")
SCHEMES = ("xpos", "rope", "alibi", "none")
MODES: tuple[AttentionMode, ...] = ("causal", "blockwise", "sliding", "sinks")


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


@settings(deadline=None, max_examples=50)
@given(
    scheme=st.sampled_from(SCHEMES),
    mode=st.sampled_from(MODES),
    num_tokens=st.integers(1, 22),
    num_heads=st.integers(1, 6),
    grouped=st.booleans(),
    size=st.integers(1, 8),
    num_sinks=st.integers(0, 7),
    scale_base=st.sampled_from([4.0, 0.1]),
    num_documents=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_attention_and_its_gradients_are_their_definition(
    scheme: str,
    mode: AttentionMode,
    num_tokens: int,
    num_heads: int,
    grouped: bool,
    size: int,
    num_sinks: int,
    scale_base: float,
    num_documents: int,
    seed: int,
) -> None:
    """Also where xPos decays so fast (base 0.1) that queries of one block are taken in several runs."""
    config = model_section(
        position=scheme,
        hidden_size=8 * num_heads,
        num_heads=num_heads,
        num_key_value_heads=1 if grouped else num_heads,
        block_size=size,
        window_size=size,
        num_sinks=min(num_sinks, size - 1),
        xpos_scale_base=scale_base,
    )
    torch.manual_seed(seed)
    documents = None if mode == "sinks" else sorted(torch.randint(num_documents, (num_tokens,)).tolist())
    check_attention_and_its_gradients(config, mode, num_tokens, documents)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("separate_documents", [False, True])
def test_gradients_of_every_path_with_grouped_heads(scheme: str, mode: AttentionMode, separate_documents: bool) -> None:
    """Every combination for certain: several blocks, the last one broken off, and documents across their edges."""
    if separate_documents and mode == "sinks":
        pytest.skip("sinks have no meaning for several documents")
    config = model_section(
        **{"position": scheme, "hidden_size": 32, "num_heads": 4, "num_key_value_heads": 2},
        **{"block_size": 6, "window_size": 6, "num_sinks": 2},
    )
    torch.manual_seed(0)
    documents = [0] * 5 + [1] * 9 + [2] * 6 if separate_documents else None
    check_attention_and_its_gradients(config, mode, 20, documents)


def check_attention_and_its_gradients(
    config: ModelSection, mode: AttentionMode, num_tokens: int, documents: list[int] | None
) -> None:
    """Against the definition in float64, of random vectors with heads of size 8 and with block = window."""
    q = torch.randn(num_tokens, config.num_heads, 8, requires_grad=True)
    k, v = (torch.randn(num_tokens, config.resolved_num_key_value_heads, 8, requires_grad=True) for _ in range(2))
    numbers = None if documents is None else torch.tensor([documents])
    attend = make_attention(mode, config, make_positions(config), 0, num_tokens, numbers)
    found = attend(q[None], k[None], v[None], None, 0.0)[0]
    expected = references.attention(
        config.position,
        mode,
        q,
        k,
        v,
        size=config.resolved_block_size,
        gamma=config.xpos_gamma,
        base=config.resolved_xpos_scale_base,
        num_sinks=config.num_sinks,
        documents=documents,
    )
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), (q, k, v))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("scheme", [*SCHEMES, "sinusoidal"])
@pytest.mark.parametrize("mode", MODES)
def test_cached_forward_equals_the_full_one_at_every_position(scheme: str, mode: AttentionMode) -> None:
    """A fault of public xPos code, in four forms: other offsets, scales, tables or masks with a cache than without."""
    config = model_section(position=scheme, num_key_value_heads=1)
    torch.manual_seed(0)
    decoder = Decoder(config).eval()
    block = config.resolved_block_size
    most_tokens = {"causal": 33, "blockwise": 2 * block - 1, "sliding": 7, "sinks": 7}[mode]
    tokens = torch.randint(0, 40, (2, 33))
    with torch.inference_mode():
        full = decoder(tokens, mode)
        for num_tokens in (1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 4 * block):
            torch.testing.assert_close(decoder(tokens[:, :num_tokens], mode), full[:, :num_tokens])
        for chunk in (1, 3, block, block + 1, 11):
            cache = decoder.make_cache()
            for start in range(0, 33, chunk):
                part = decoder(tokens[:, start : start + chunk], mode, cache)
                torch.testing.assert_close(part, full[:, start : start + chunk], atol=1e-5, rtol=1e-5)
                assert all(layer.num_tokens <= most_tokens for layer in cache.layers)


@pytest.mark.parametrize("scheme", [*SCHEMES, "sinusoidal"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_padded_at_the_left_equal_rows_alone(scheme: str, mode: AttentionMode) -> None:
    torch.manual_seed(0)
    decoder = Decoder(model_section(position=scheme)).eval()
    lengths = [1, 5, 13, 22]
    padding = [max(lengths) - length for length in lengths]
    rows = [torch.randint(0, 40, (length,)) for length in lengths]
    padded = torch.stack([torch.nn.functional.pad(row, (n, 0)) for row, n in zip(rows, padding, strict=True)])
    with torch.inference_mode():
        for chunk in (1, 3, 4, 22):
            cache = decoder.make_cache(padding)
            parts = [decoder(padded[:, i : i + chunk], mode, cache) for i in range(0, padded.shape[1], chunk)]
            found = torch.cat(parts, dim=1)
            for index, row in enumerate(rows):
                alone = decoder(row[None], mode)[0]
                torch.testing.assert_close(found[index, padding[index] :], alone, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [3, 5, 7, 8, 9, 15, 16, 17, 32])
def test_each_mode_sees_what_its_truth_table_says(mode: AttentionMode, num_tokens: int) -> None:
    """A table from what a change of each token changes, in a decoder of one layer with block 8 and window 16."""
    torch.manual_seed(0)
    decoder = Decoder(model_section(num_layers=1, sequence_length=16)).eval()
    size = 8 if mode == "blockwise" else 16
    tokens = torch.randint(0, 20, (1, num_tokens))
    with torch.inference_mode():
        before = decoder(tokens, mode)[0]
        for key in range(num_tokens):
            changed = tokens.clone()
            changed[0, key] += 20
            moved = (decoder(changed, mode)[0] - before).abs().amax(dim=-1) > 0
            expected = [references.visible(mode, query, key, size, num_sinks=4) for query in range(num_tokens)]
            assert moved.tolist() == expected


def test_documents_in_one_window_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    decoder = Decoder(model_section(num_layers=1)).eval()
    tokens = torch.randint(0, 40, (1, 19))
    documents = torch.tensor([[0] * 3 + [1] * 11 + [2] * 5])
    with torch.inference_mode():
        for mode in ("causal", "sliding"):
            found = decoder(tokens, mode, None, documents)
            alone = [decoder(part, mode) for part in tokens.split([3, 11, 5], dim=1)]
            torch.testing.assert_close(found, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="no meaning for several"):
        decoder(tokens, "sinks", None, documents)
    with pytest.raises(ValueError, match="a cache continues one document"):
        decoder(tokens, "causal", decoder.make_cache(), documents)


@pytest.mark.parametrize("offset", [0, 1_000, 1_000_000])
def test_rope_scores_do_not_depend_on_where_the_pair_stands(offset: int) -> None:
    """Rounding the angle of position 1,000,000 to float32, as many do, is off by 0.03 rad."""
    positions = make_positions(model_section(position="rope", hidden_size=64, num_heads=1))
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 1, 64)

    def scores(start: int) -> torch.Tensor:
        tables = [positions.coordinates(start, 4, role, CPU) for role in ("query", "key")]
        turned = [positions.place(x, table, torch.float32)[0, :, 0] for x, table in zip((q, k), tables, strict=True)]
        return turned[0] @ turned[1].T

    # 1e-6 of the lengths of the two vectors, which is what float32 leaves of any product of them.
    torch.testing.assert_close(scores(offset), scores(0), atol=1e-6 * float(q.norm() * k.norm()) / 4, rtol=0)


@pytest.mark.parametrize("mode", ["blockwise", "sliding", "sinks"])
def test_the_same_context_gives_the_same_output_a_million_tokens_on(mode: AttentionMode) -> None:
    """xPos scores depend on distances alone; a common centre for all positions would have overflowed long before."""
    config = model_section(num_layers=1)
    decoder = Decoder(config).eval()
    tokens = torch.randint(0, 40, (1, 41))
    cache = decoder.make_cache()
    with torch.inference_mode():
        decoder(tokens[:, :32], mode, cache)
        far = copy.deepcopy(cache)
        # A multiple of the block: as far on, the context in the cache is that of the same place in a block.
        far.num_tokens_seen += 1_000_000
        torch.testing.assert_close(
            decoder(tokens[:, 32:], mode, cache), decoder(tokens[:, 32:], mode, far), atol=0, rtol=0
        )


def test_tables_match_float64_at_a_million_and_casts_do_not_reach_them() -> None:
    positions = XPosPositions(head_size=64, theta=10000.0, gamma=0.4, scale_base=512.0)
    assert list(positions.parameters()) == []
    assert list(positions.buffers()) == []
    table = positions.bfloat16().coordinates(1_048_570, 6, "query", CPU)[:, 0]
    for row, position in enumerate(range(1_048_570, 1_048_576)):
        for i in (0, 7, 31):
            angle = position * 10000.0 ** (-2 * i / 64)
            # Below e^-60 a scale is as good as none and stays there, where products are no subnormal numbers yet.
            scale = max(((i / 32 + 0.4) / 1.4) ** (position / 512), math.exp(-60))
            expected = complex(scale * math.cos(angle), scale * math.sin(angle))
            assert abs(complex(table[row, i]) - expected) <= 1e-6 * scale


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
    span = positions.max_span_tokens(torch.float32)
    assert span is not None
    num_tokens = 2 * span + 5
    torch.manual_seed(0)
    q, k, v = (torch.randn(num_tokens, 1, 8) for _ in range(3))
    found = make_attention("causal", config, positions, 0, num_tokens)(q[None], k[None], v[None], None, 0.0)[0]
    expected = references.attention("xpos", "causal", q, k, v, size=4, gamma=0.4, base=0.5)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)


def test_full_causal_in_float16_neither_overflows_nor_strays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float16, which holds the scores on CUDA, ends at 65,504: the scale of xPos alone passes it 9 bases from a
    centre, and falls below its smallest number 14 bases from it. Large vectors and a small
    base make it happen within 400 tokens."""
    monkeypatch.setattr(CausalAttend, "_score_dtype", lambda _, x: x.dtype)
    num_tokens, config = 400, model_section(num_layers=1, hidden_size=8, num_heads=1, xpos_scale_base=4.0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(num_tokens, 1, 8).half() for _ in range(3))
    q, k = q * 30, k * 0.03
    found = make_attention("causal", config, make_positions(config), 0, num_tokens)(
        q[None], k[None], v[None], None, 0.0
    )
    expected = references.attention("xpos", "causal", q, k, v, size=4, gamma=0.4, base=4.0)
    torch.testing.assert_close(found[0].double(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("num_heads", [3, 12])
def test_alibi_is_exact_in_runs_of_queries_far_from_the_first_key(num_heads: int) -> None:
    """Its products of positions are rounded, so queries are taken in runs whose centre is near; 12 heads have the
    steepest slope, 2^-0.5, and no power of two among the last four."""
    config = model_section(position="alibi", hidden_size=8 * num_heads, num_heads=num_heads, num_key_value_heads=1)
    num_seen, num_tokens = 10_000, 1100
    torch.manual_seed(0)
    q = torch.randn(1, num_tokens, num_heads, 8)
    k, v = (torch.randn(1, num_seen + num_tokens, 1, 8) for _ in range(2))
    cache = LayerCache()
    cache.extend(k[:, :num_seen], v[:, :num_seen], num_kept=num_seen)
    attend = make_attention("causal", config, make_positions(config), num_seen, num_tokens)
    found = attend(q, k[:, num_seen:], v[:, num_seen:], cache, 0.0)[0]
    for query in (0, 511, 512, 1023, 1024, 1099):
        last = num_seen + query
        for head in range(num_heads):
            keys, distances = k[0, : last + 1, 0], list(range(last, -1, -1))
            scores = references.scores(
                "alibi", q[0, query, head], keys, distances, head=head, num_heads=num_heads, gamma=0.4, base=1.0
            )
            expected = scores.softmax(dim=0) @ v[0, : last + 1, 0].double()
            torch.testing.assert_close(found[query, head].double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 20])
def test_alibi_slopes_for_any_number_of_heads(num_heads: int) -> None:
    slopes = AlibiPositions(num_heads, 8).slopes(CPU).tolist()
    assert slopes == pytest.approx([references.alibi_slope(head, num_heads) for head in range(num_heads)])


@pytest.mark.parametrize("scheme", ["xpos", "rope", "alibi"])
def test_half_precision_module_keeps_positions_exact(scheme: str) -> None:
    """A fault of public code: positions in a bf16 buffer, of which only 641 of the first 2,048 are distinct, or an
    ALiBi bias made in half precision. The scores of a cast module are those of exact positions on its own vectors."""
    torch.manual_seed(0)
    config = model_section(position=scheme, num_layers=1, hidden_size=32, num_heads=1, sequence_length=2048)
    decoder = Decoder(config).bfloat16()
    num_tokens, last = 2048, 2047
    q, k, v = (torch.randn(num_tokens, 1, 32).bfloat16() for _ in range(3))
    attend = make_attention("causal", config, decoder.positions, 0, num_tokens)
    found = attend(q[None], k[None], v[None], None, 0.0)[0, last, 0]
    scores = references.scores(
        scheme,
        q[last, 0],
        k[:, 0],
        list(range(last, -1, -1)),
        head=0,
        num_heads=1,
        gamma=config.xpos_gamma,
        base=config.resolved_xpos_scale_base,
    )
    expected = scores.softmax(dim=0) @ v[:, 0].double()
    torch.testing.assert_close(found.double(), expected, atol=4e-3, rtol=8e-3)


def test_learned_positions_end_with_a_reason() -> None:
    decoder = Decoder(model_section(position="learned")).eval()
    decoder(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="cannot extrapolate"):
        decoder(torch.zeros(1, 9, dtype=torch.long))


def test_scaled_rope_angles_are_those_of_their_papers() -> None:
    """Each angle by its formula: all slowed, theta raised, or blended by turns in the training length."""

    def angles(method: str) -> list[float]:
        config = model_section(
            position="rope",
            hidden_size=64,
            num_heads=1,
            sequence_length=512,
            rope_scaling=method,
            rope_scaling_factor=8.0,
        )
        positions = make_positions(config)
        assert isinstance(positions, RotaryPositions)
        return positions.angles(CPU).tolist()

    plain = [10000.0 ** (-2 * i / 64) for i in range(32)]
    assert angles("none") == pytest.approx(plain)
    assert angles("linear") == pytest.approx([angle / 8 for angle in plain])
    raised_theta = 10000.0 * 8.0 ** (64 / 62)
    assert angles("ntk") == pytest.approx([raised_theta ** (-2 * i / 64) for i in range(32)])
    assert angles("ntk")[-1] == pytest.approx(plain[-1] / 8)
    for found, angle in zip(angles("yarn"), plain, strict=True):
        turns = 512 / (2 * math.pi / angle)
        kept = 0.0 if turns < 1 else 1.0 if turns > 32 else (turns - 1) / 31
        assert found == pytest.approx((1 - kept) * angle / 8 + kept * angle)


def test_yarn_sharpens_scores_by_the_factor_of_its_paper() -> None:
    config = model_section(position="rope", rope_scaling="yarn", rope_scaling_factor=8.0)
    factors = make_positions(config).coordinates(0, 3, "query", CPU)
    assert factors is not None
    # The paper divides scores by t with sqrt(1/t) = 0.1 ln(s) + 1; half of it falls to queries, half to keys.
    torch.testing.assert_close(factors.abs(), torch.full_like(factors.abs(), 0.1 * math.log(8.0) + 1))


@pytest.mark.parametrize("mode", MODES)
def test_yarn_sharpens_all_scores_alike(mode: AttentionMode) -> None:
    """Those of sinks too: as if queries were longer by the square of the factor."""
    config = model_section(position="rope", rope_scaling="yarn", rope_scaling_factor=8.0)
    sharp, plain = make_positions(config), make_positions(config)
    plain.magnitude = 1.0  # type: ignore[assignment]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 30, 3, 8) for _ in range(3))
    longer = q * (0.1 * math.log(8.0) + 1) ** 2
    found = make_attention(mode, config, sharp, 0, 30)(q, k, v, None, 0.0)
    expected = make_attention(mode, config, plain, 0, 30)(longer, k, v, None, 0.0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_shared_decay_is_one_number_and_the_mean_of_the_others() -> None:
    shared, separate = (
        XPosPositions(16, 10000.0, 0.4, 512.0, shared_decay=shared).log_scales(CPU) for shared in (True, False)
    )
    assert shared.unique().numel() == 1
    assert float(shared.sum()) == pytest.approx(float(separate.sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_causal_attention_stays_finite_at_131072_tokens(dtype: torch.dtype) -> None:
    """With the paper's scale base of 512, where one centre for all positions holds to about 72,000 in float32."""
    config = model_section(hidden_size=8, num_heads=1, sequence_length=1024)
    num_tokens, num_seen = 300, 131_072 - 300
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, num_tokens, 1, 8).to(dtype) for _ in range(3))
    seen_k, seen_v = (torch.randn(1, num_seen, 1, 8).to(dtype) for _ in range(2))
    cache = LayerCache()
    cache.extend(seen_k, seen_v, num_kept=num_seen)
    found = make_attention("causal", config, make_positions(config), num_seen, num_tokens)(q, k, v, cache, 0.0)
    keys, values = torch.cat((seen_k, k), dim=1)[0, :, 0], torch.cat((seen_v, v), dim=1)[0, :, 0]
    distances = list(range(131_071, -1, -1))
    scores = references.scores("xpos", q[0, -1, 0], keys, distances, head=0, num_heads=1, gamma=0.4, base=512.0)
    expected = scores.softmax(dim=0) @ values.double()
    assert found.isfinite().all()
    torch.testing.assert_close(found[0, -1, 0].double(), expected, atol=1e-4, rtol=8e-3)
