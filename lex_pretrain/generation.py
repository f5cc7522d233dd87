"""Text from a trained decoder: sampling, and printing that never splits a character."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from lex_pretrain.errors import RequestError
from lex_pretrain.hardware import device_of_rank, evaluation_dtype
from lex_pretrain.loading import load_decoder
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import AttentionMode
from lex_pretrain.tokenizer import Tokenizer

# A character of which not all bytes have come decodes to this.
_UNFINISHED = "\ufffd"
# UTF-8 needs four bytes at the most, so a fourth one cannot leave a real character unfinished.
_MAX_UNFINISHED_TOKENS = 4
# Tokens of a prompt that are read at a time.
_CHUNK_TOKENS = 8192


class Sampling(BaseModel):
    """How the next token is drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=0.8, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    seed: int = Field(default=1, ge=0)

    def draw(self, logits_V: Tensor, generator: torch.Generator, seen_ids: Sequence[int] = ()) -> int:
        """A token id: the likeliest at temperature 0, else drawn among those that top k, top p and min p leave.

        Scores of `seen_ids` come closer to unlikely by the repetition penalty (CTRL, arXiv 1909.05858).
        """
        logits_V = logits_V.float()
        if self.repetition_penalty != 1 and seen_ids:
            ids = torch.tensor(sorted(set(seen_ids)), device=logits_V.device)
            scores, penalty = logits_V[ids], self.repetition_penalty
            logits_V = logits_V.index_copy(0, ids, torch.where(scores > 0, scores / penalty, scores * penalty))
        if self.temperature == 0:
            return int(logits_V.argmax())
        scaled, ids = (logits_V / self.temperature).sort(descending=True)
        if self.top_k:
            scaled, ids = scaled[: self.top_k], ids[: self.top_k]
        probabilities = scaled.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = (before >= self.top_p) | (probabilities < self.min_p * probabilities[0])
        # The likeliest token always stays, whatever rounding says.
        dropped[0] = False
        return int(ids[torch.multinomial(probabilities.masked_fill(dropped, 0), 1, generator=generator)])


def generate_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    attention: AttentionMode,
    sampling: Sampling,
    eod_id: int,
) -> Iterator[list[int | None]]:
    """The next token of each prompt, step by step, until each has ended or `max_new_tokens`; None for ended ones.

    A document begins with EOD, as in training, so an empty prompt starts a new one, and ends with it. Each step runs
    one token a row with the cache, which blockwise attention keeps below two blocks. Row i draws with seed + i, from
    scores that do not depend on the other rows.
    """
    device = next(decoder.parameters()).device
    generators = [torch.Generator(device).manual_seed(sampling.seed + row) for row in range(len(prompts))]
    seen = [[eod_id, *prompt] for prompt in prompts]
    longest = max(map(len, seen))
    padding = [longest - len(ids) for ids in seen]
    cache = decoder.make_cache(padding if any(padding) else ())
    fed = [[eod_id] * missing + ids for missing, ids in zip(padding, seen, strict=True)]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            for chunk in torch.tensor(fed, device=device).split(_CHUNK_TOKENS, dim=1):
                hidden_BTE = decoder.hidden_states(chunk, attention, cache)
            logits_BV = decoder.logits(hidden_BTE[:, -1])
        tokens: list[int | None] = [None] * len(prompts)
        for row in sorted(running):
            token = sampling.draw(logits_BV[row], generators[row], seen[row])
            if token == eod_id:
                running.remove(row)
                continue
            tokens[row] = token
            seen[row].append(token)
        if not running:
            return
        yield tokens
        # An ended row is fed on with EOD; nothing of it is read any more.
        fed = [[eod_id if token is None else token] for token in tokens]


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


def stop_before(parts: Iterable[str], stop_strings: Sequence[str]) -> Iterator[str]:
    """The text up to the first of `stop_strings`; what may become one is held back until it is clear."""
    held = ""
    for part in parts:
        held += part
        found = [place for place in (held.find(stop) for stop in stop_strings) if place >= 0]
        if found:
            yield held[: min(found)]
            return
        begun = max((_overlap(held, stop) for stop in stop_strings), default=0)
        if begun < len(held):
            yield held[: len(held) - begun]
            held = held[len(held) - begun :]
    yield held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class Generator:
    """A checkpoint that writes on from prompts. Raises RequestError where it cannot."""

    def __init__(self, run_or_checkpoint: Path, attention: AttentionMode) -> None:
        self.model = load_decoder(run_or_checkpoint, device_of_rank(0), evaluation_dtype)
        self.tokenizer = Tokenizer(self.model.tokenizer_file)
        self.attention = attention

    def stream(
        self, prompt: str, max_new_tokens: int, sampling: Sampling, stop_strings: Sequence[str]
    ) -> Iterator[str]:
        """Parts of the text that follows `prompt`, as they become certain."""
        steps = self._steps([prompt], max_new_tokens, sampling)
        tokens = (token for (token,) in steps if token is not None)
        return stop_before(stream_text(tokens, self.tokenizer), stop_strings)

    def complete(
        self, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling, stop_strings: Sequence[str]
    ) -> list[str]:
        """The text that follows each prompt, made together."""
        rows: list[list[int]] = [[] for _ in prompts]
        for tokens in self._steps(prompts, max_new_tokens, sampling):
            for row, token in zip(rows, tokens, strict=True):
                if token is not None:
                    row.append(token)
        return ["".join(stop_before([self.tokenizer.decode(row)], stop_strings)) for row in rows]

    def _steps(self, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling) -> Iterator[list[int | None]]:
        encoded = [self.tokenizer.encode(prompt) for prompt in prompts]
        section = self.model.config.model
        num_tokens = 1 + max(map(len, encoded)) + max_new_tokens
        if section.position == "learned" and num_tokens - 1 > section.sequence_length:
            raise RequestError(
                f"prompt and --max-new-tokens make {num_tokens} tokens; learned positions end at the training length "
                f"{section.sequence_length} and have no vectors past it"
            )
        eod_id = self.tokenizer.eod_id
        return generate_tokens(self.model.decoder, encoded, max_new_tokens, self.attention, sampling, eod_id)
