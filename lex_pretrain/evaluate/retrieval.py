"""Can a model find again what it read far back? Two tasks, each with something said once amid a document's text.

`pass-key`: a sentence tells a number of five digits, and the end of the context asks for it.
`copy`: a row of random pieces of the tokenizer stands in the text, and its beginning at the end asks for the rest.

Attention with a bounded reach must fail beyond it, however low its perplexity: these tasks show where.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from lex_pretrain.evaluate.documents import ScoredDocument
from lex_pretrain.evaluate.perplexity import hidden_parts
from lex_pretrain.evaluate.results import RetrievalRecord, RetrievalTask
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import AttentionMode
from lex_pretrain.progress import progress
from lex_pretrain.ranks import Ranks, gather_lists
from lex_pretrain.tokenizer import Tokenizer

# Where in the context the thing is said, as shares of the text around it.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
COPY_TOKENS = 16
COPY_SHOWN_TOKENS = 4


class Needle(NamedTuple):
    """Tokens of what is said, of the question at the end, and of the answer."""

    statement: NDArray[np.int64]
    question: NDArray[np.int64]
    answer: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return len(self.statement) + len(self.question) + len(self.answer)


class Answer(NamedTuple):
    """How many of the answer's tokens were the likeliest, how many there are, and their loss."""

    num_right: int
    num_tokens: int
    nll_sum: float


def make_needle(task: RetrievalTask, trial: int, tokenizer: Tokenizer) -> Needle:
    """The needle of a trial, the same for every length, depth, attention and model with this tokenizer."""
    generator = np.random.default_rng(trial)
    if task == "pass-key":
        key = int(generator.integers(10_000, 100_000))
        texts = (f"\nThe pass key is {key}. Remember it.\n", "\nWhat is the pass key? The pass key is", f" {key}")
        return Needle(*(np.array(tokenizer.encode(text), dtype=np.int64) for text in texts))
    words = [index for index in range(tokenizer.vocab_size) if tokenizer.piece(index).lstrip("\u2581").isalpha()]
    row = generator.choice(np.array(words), size=COPY_TOKENS)
    return Needle(row, row[:COPY_SHOWN_TOKENS], row[COPY_SHOWN_TOKENS:])


def make_context(
    needle: Needle, document: NDArray[np.int64], length: int, depth: float, eod_id: int
) -> NDArray[np.int64]:
    """`length` inputs and the last answer token: EOD, text with the statement at `depth`, question, answer.

    Raises ValueError when the needle does not fit.
    """
    num_text = length - needle.num_tokens
    if num_text < 0:
        raise ValueError(f"a needle of {needle.num_tokens} tokens does not fit a length of {length}")
    before = round(depth * num_text)
    return np.concatenate(
        ([eod_id], document[:before], needle.statement, document[before:num_text], needle.question, needle.answer)
    )


def ask(decoder: Decoder, context: NDArray[np.int64], num_answer: int, attention: AttentionMode) -> Answer:
    """Read a context but for its last token, and compare what the model expects of the answer with the answer."""
    device = next(decoder.parameters()).device
    tokens_T = torch.from_numpy(context).to(device)
    with torch.inference_mode():
        # The answer may lie across the parts of a streamed context.
        tail = torch.empty(0, device=device)
        for _, hidden_BTE in hidden_parts(decoder, tokens_T[None, :-1], attention):
            tail = torch.cat((tail.to(hidden_BTE.dtype), hidden_BTE[0, -num_answer:]))[-num_answer:]
        logits_SV = decoder.logits(tail).float()
    answer = tokens_T[-num_answer:]
    return Answer(
        num_right=int((logits_SV.argmax(dim=-1) == answer).sum()),
        num_tokens=num_answer,
        nll_sum=float(torch.nn.functional.cross_entropy(logits_SV, answer, reduction="sum")),
    )


def measure_retrieval(
    decoder: Decoder,
    documents: Sequence[ScoredDocument],
    lengths: Sequence[int],
    attentions: Sequence[AttentionMode],
    num_trials: int,
    tokenizer: Tokenizer,
    ranks: Ranks,
) -> list[RetrievalRecord]:
    """Both tasks at every depth of every length that holds them, spread over the ranks."""
    tasks: tuple[RetrievalTask, ...] = get_args(RetrievalTask)
    needles = {(task, trial): make_needle(task, trial, tokenizer) for task in tasks for trial in range(num_trials)}
    largest = max((needle.num_tokens for needle in needles.values()), default=0)
    cells = list(itertools.product(tasks, attentions, (length for length in lengths if length >= largest), DEPTHS))
    trials = list(itertools.product(cells, range(num_trials)))[ranks.rank :: ranks.world_size]
    answers = []
    total = sum(length for (_, _, length, _), _ in trials)
    with progress("retrieval", max(total, 1), "tokens", enabled=ranks.rank == 0) as reporter:
        for cell, trial in trials:
            task, attention, length, depth = cell
            needle, document = needles[task, trial], documents[trial % len(documents)]
            context = make_context(needle, document.tokens, length, depth, tokenizer.eod_id)
            answers.append((cell, trial, ask(decoder, context, len(needle.answer), attention)))
            reporter.advance(length, f"{task}, {attention} at {length:,}")
    by_cell: dict[tuple[RetrievalTask, AttentionMode, int, float], list[Answer]] = {cell: [] for cell in cells}
    for cell, _, answer in sorted(gather_lists(answers, ranks), key=lambda item: int(item[1])):
        by_cell[cell].append(answer)
    return [_record(*cell, found) for cell, found in by_cell.items() if found]


def _record(
    task: RetrievalTask, attention: AttentionMode, length: int, depth: float, answers: list[Answer]
) -> RetrievalRecord:
    num_tokens = sum(answer.num_tokens for answer in answers)
    return RetrievalRecord(
        task=task,
        attention=attention,
        length=length,
        depth=depth,
        num_trials=len(answers),
        accuracy=sum(answer.num_right for answer in answers) / num_tokens,
        exact=sum(answer.num_right == answer.num_tokens for answer in answers) / len(answers),
        nll=sum(answer.nll_sum for answer in answers) / num_tokens,
    )
