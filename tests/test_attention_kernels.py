"""What attention hands to PyTorch's kernels: no mask where the flash kernel serves, else one no larger than a block."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lex_pretrain.model import attend as attend_module
from lex_pretrain.model.attend import CausalAttend
from lex_pretrain.model.attention import make_attention
from lex_pretrain.model.cache import LayerCache
from lex_pretrain.model.positions import make_positions
from lex_pretrain.model_config import AttentionMode
from tests.test_attention import MODES, SCHEMES, model_section

BLOCK, WINDOW, NUM_HEADS, HEAD_SIZE = 64, 128, 4, 64
# A block alone, just past its edge, several blocks, and a last block broken off.
LENGTHS = (BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 21)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def attend(scheme: str, mode: AttentionMode, q: Tensor, k: Tensor, v: Tensor, num_seen: int = 0) -> Tensor:
    """Attention in which the first `num_seen` tokens come from a cache, as in streaming."""
    config = model_section(
        **{"position": scheme, "hidden_size": NUM_HEADS * HEAD_SIZE, "num_heads": NUM_HEADS},
        **{"num_key_value_heads": k.shape[2], "sequence_length": WINDOW, "block_size": BLOCK},
    )
    positions, cache = make_positions(config), LayerCache()
    parts = [part for part in ((0, num_seen), (num_seen, q.shape[1])) if part[0] < part[1]]
    outputs = []
    for start, stop in parts:
        one = make_attention(mode, config, positions, start, stop - start)
        outputs.append(one(q[:, start:stop], k[:, start:stop], v[:, start:stop], cache, 0.0))
    return torch.cat(outputs, dim=1)


def vectors(num_tokens: int, num_key_value_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, num_key_value_heads, num_key_value_heads)
    q, k, v = (torch.randn(2, num_tokens, n, HEAD_SIZE, generator=generator) for n in heads)
    return q, k, v


@pytest.fixture
def masks_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """Makes attention on the CPU decide as on CUDA; holds the mask of every call of a kernel so far."""
    masks: list[Tensor | None] = []
    weighted_values, needs_mask = attend_module._weighted_values, CausalAttend._needs_mask

    def on_cuda(self: CausalAttend, num_queries: int, num_keys: int, device: torch.device) -> bool:
        return needs_mask(self, num_queries, num_keys, torch.device("cuda"))

    def note(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *arguments: float, **settings: float) -> Tensor:
        masks.append(mask)
        return weighted_values(q, k, v, mask, *arguments, **settings)

    monkeypatch.setattr(CausalAttend, "_needs_mask", on_cuda)
    monkeypatch.setattr(attend_module, "_weighted_values", note)
    return masks


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_masks_are_none_or_of_a_block_and_change_nothing(
    scheme: str,
    mode: AttentionMode,
    num_tokens: int,
    masks_on_cuda: list[Tensor | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Full causal and blockwise attention need none on CUDA, in streaming and decoding too; windows need theirs."""
    q, k, v = vectors(num_tokens, num_key_value_heads=2)
    num_seen = (0, num_tokens // 3, num_tokens - 1)
    found = [attend(scheme, mode, q, k, v, seen) for seen in num_seen]
    assert masks_on_cuda
    explicit = [mask for mask in masks_on_cuda if mask is not None]
    assert all(mask.numel() <= 2 * WINDOW**2 for mask in explicit)
    if mode in ("causal", "blockwise"):
        assert explicit == []
    monkeypatch.undo()
    for one in found:
        torch.testing.assert_close(one, attend(scheme, mode, q, k, v), atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("scheme", ["xpos", "rope", "none"])
@pytest.mark.parametrize("mode", ["causal", "blockwise"])
@pytest.mark.parametrize("num_key_value_heads", [NUM_HEADS, 1])
def test_flash_serves_causal_and_blockwise_attention_in_bf16(
    scheme: str, mode: AttentionMode, num_key_value_heads: int
) -> None:
    """With every other kernel forbidden, forward and backward, streaming and decoding; equal to float32 on the CPU."""
    for num_tokens in LENGTHS:
        check_on_cuda(scheme, mode, num_key_value_heads, num_tokens, [SDPBackend.FLASH_ATTENTION])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("scheme", "mode"), [("xpos", "sliding"), ("rope", "sinks"), *(("alibi", mode) for mode in MODES)]
)
@pytest.mark.parametrize("num_key_value_heads", [NUM_HEADS, 1])
def test_windows_and_alibi_never_keep_all_scores(scheme: str, mode: AttentionMode, num_key_value_heads: int) -> None:
    """With the kernel forbidden that writes the matrix of scores."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for num_tokens in LENGTHS:
        check_on_cuda(scheme, mode, num_key_value_heads, num_tokens, kernels)


def check_on_cuda(
    scheme: str, mode: AttentionMode, num_key_value_heads: int, num_tokens: int, kernels: list[SDPBackend]
) -> None:
    on_host = [x.bfloat16() for x in vectors(num_tokens, num_key_value_heads)]
    exact = [x.float().requires_grad_() for x in on_host]
    on_gpu = [x.cuda().requires_grad_() for x in on_host]
    expected = attend(scheme, mode, *exact)  # type: ignore[call-arg]
    weights = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), exact)
    with sdpa_kernel(kernels):
        found = attend(scheme, mode, *on_gpu)  # type: ignore[call-arg]
        gradients = torch.autograd.grad((found * weights.cuda()).sum(), on_gpu)
        with torch.no_grad():
            parts = [attend(scheme, mode, *on_gpu, num_seen=seen) for seen in (num_tokens // 3, num_tokens - 1)]  # type: ignore[misc]
    for one in (found, *parts):
        torch.testing.assert_close(one.float().cpu(), expected, atol=2e-2, rtol=2e-2)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.float().cpu(), expected_gradient, atol=5e-2, rtol=5e-2)
