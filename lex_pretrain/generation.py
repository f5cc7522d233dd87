"""Text from a trained decoder: sampling, and printing that never splits a character."""

from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from lex_pretrain.config import AttentionMode
from lex_pretrain.hardware import device_of_rank, evaluation_dtype
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model.loading import load_decoder
from lex_pretrain.tokenizer import Tokenizer

# A character of which not all bytes have come decodes to this.
_UNFINISHED = "\ufffd"
# UTF-8 needs four bytes at the most, so a fourth one cannot leave a real character unfinished.
_MAX_UNFINISHED_TOKENS = 4


class Sampling(BaseModel):
    """How the next token is drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """A token id: the likeliest at temperature 0, else drawn among the top k that hold the top p of the mass."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        scaled, ids = (logits_V.float() / self.temperature).sort(descending=True)
        if self.top_k:
            scaled, ids = scaled[: self.top_k], ids[: self.top_k]
        probabilities = scaled.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill((before >= self.top_p) & (before > 0), 0)
        return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def generate_tokens(
    decoder: Decoder,
    prompt_ids: list[int],
    max_new_tokens: int,
    attention: AttentionMode,
    sampling: Sampling,
    eod_id: int,
) -> Iterator[int]:
    """Token ids that follow the prompt, one by one, until an end of document or `max_new_tokens`.

    The document begins with EOD, as in training, so an empty prompt starts a new document. Each step runs one token
    with the cache; blockwise attention keeps at most two blocks of it.
    """
    device = next(decoder.parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    cache = decoder.make_cache()
    fed = [eod_id, *prompt_ids]
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            hidden_BTE = decoder.hidden_states(torch.tensor([fed], device=device), attention, cache)
            logits_V = decoder.logits(hidden_BTE[:, -1])[0]
        token = sampling.draw(logits_V, generator)
        if token == eod_id:
            return
        yield token
        fed = [token]


def stream_text(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Text as it becomes certain: bytes of a character are held back until the character is whole."""
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if text.endswith(_UNFINISHED) and len(waiting) < _MAX_UNFINISHED_TOKENS:
            continue
        yield text
        waiting = []
    if waiting:
        yield tokenizer.decode(waiting)


def generate_text(
    run_or_checkpoint: Path, prompt: str, max_new_tokens: int, attention: AttentionMode, sampling: Sampling
) -> Iterator[str]:
    """Parts of the text that a checkpoint writes after `prompt`."""
    device = device_of_rank(0)
    model = load_decoder(run_or_checkpoint, device, evaluation_dtype)
    tokenizer = Tokenizer(model.tokenizer_file)
    ids = tokenizer.encode(prompt)
    tokens = generate_tokens(model.decoder, ids, max_new_tokens, attention, sampling, tokenizer.eod_id)
    return stream_text(tokens, tokenizer)
