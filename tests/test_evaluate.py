"""The evaluator against hand-made cases and a naive loop, and the report that it writes."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lex_pretrain.config import AttentionMode, Config
from lex_pretrain.config_io import save_config
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.errors import RequestError
from lex_pretrain.evaluate.documents import load_documents
from lex_pretrain.evaluate.evaluation import evaluate
from lex_pretrain.evaluate.findings import describe
from lex_pretrain.evaluate.perplexity import confidence_interval, score_document
from lex_pretrain.evaluate.report import TrainingRecord, write_report
from lex_pretrain.evaluate.resolution import expected_scores, measured_scores, resolution
from lex_pretrain.evaluate.results import Results
from lex_pretrain.hardware import evaluation_dtype
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model.loading import load_decoder
from lex_pretrain.train.checkpoint import gather_weights
from lex_pretrain.train.trainer import resolve_vocab_size
from tests.conftest import Program
from tests.test_attention import model_section


@pytest.fixture
def checkpoint(tiny_config: Callable[..., Config], dataset: Path, tmp_path: Path) -> Path:
    """A checkpoint of random weights, made without training."""
    from safetensors.torch import save_file

    folder = tmp_path / "run" / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    config = resolve_vocab_size(tiny_config(), 320)
    torch.manual_seed(0)
    save_file(gather_weights(Decoder(config.model), keep=True), folder / "model.safetensors")
    save_config(config, folder / "config.yaml")
    (folder / "tokenizer.model").write_bytes((dataset / "tokenizer.model").read_bytes())
    return folder


@pytest.mark.parametrize("length", [2, 3, 7, 8, 50])
@pytest.mark.parametrize("attention", ["causal", "blockwise"])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 19])
def test_pieces_are_those_of_a_naive_loop(length: int, attention: AttentionMode, num_tokens: int) -> None:
    """Each token alone, from all before it in its piece and the one token before the piece (EOD at the start)."""
    eod_id = 1
    torch.manual_seed(0)
    decoder = Decoder(model_section()).double().eval()
    document = np.random.default_rng(0).integers(2, 40, num_tokens)
    found = score_document(decoder, document, length, attention, eod_id)
    stream = [eod_id, *document.tolist()]
    for place in range(num_tokens):
        start = place // length * length
        with torch.inference_mode():
            logits = decoder(torch.tensor([stream[start : place + 1]]), attention)[0, -1]
        expected = -logits.log_softmax(dim=-1)[stream[place + 1]]
        assert found[place] == pytest.approx(float(expected), rel=1e-5)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary_at_every_length() -> None:
    decoder = Decoder(model_section()).eval()
    torch.nn.init.zeros_(decoder.embedding.weight)
    document = np.arange(2, 32)
    for length in (2, 8, 13, 64):
        losses = score_document(decoder, document, length, "blockwise", 1)
        assert math.exp(losses.mean()) == pytest.approx(40, rel=1e-6)


def test_intervals_are_nothing_wide_for_equal_documents_and_hold_the_mean() -> None:
    counts = np.full(10, 100)
    low, high = confidence_interval(np.full(10, 200.0), counts, seed=0)
    assert (low, high) == pytest.approx((math.exp(2), math.exp(2)))
    sums = np.linspace(150, 250, 10)
    low, high = confidence_interval(sums, counts, seed=0)
    assert low < math.exp(2) < high


def test_resolution_by_hand_and_without_overflow() -> None:
    """R of scores log 2, log 1 is 2 (2 - 1) / 2^2; adding a constant changes nothing, however large."""
    scores = np.log([2.0, 1.0])
    assert resolution(scores) == pytest.approx(0.5)
    assert resolution(scores + 5000) == pytest.approx(0.5)
    assert resolution(np.zeros(50)) == 0


@pytest.mark.parametrize("position", ["xpos", "rope", "alibi", "none"])
def test_measured_scores_are_means_over_all_pairs(position: str) -> None:
    from tests import references

    config = model_section(position=position, num_layers=1, num_key_value_heads=1)
    torch.manual_seed(0)
    decoder = Decoder(config).eval()
    tokens = torch.randint(0, 40, (11,))
    found = measured_scores(decoder, tokens)[0]
    layer = decoder.layers[0]
    with torch.inference_mode():
        hidden = decoder.embedding(tokens[None]) * decoder.embedding_scale
        q, k, _ = layer.attention.project(layer.attention_norm(hidden))
    for distance in range(11):
        scores = [
            references.score(
                position, q[0, m, h], k[0, m - distance, 0], distance, head=h, num_heads=3, gamma=0.4, base=4.0
            )
            for m in range(distance, 11)
            for h in range(3)
        ]
        assert found[distance] == pytest.approx(np.mean(scores), abs=1e-5)


def test_expected_scores_are_the_papers_sum() -> None:
    decoder = Decoder(model_section(hidden_size=16, num_heads=2))
    found = expected_scores(decoder.positions, 5)
    assert found is not None
    for n in range(5):
        terms = [math.cos(n * 10000 ** (-2 * i / 8)) * ((i / 4 + 0.4) / 1.4) ** (n / 4) for i in range(4)]
        assert found[n] == pytest.approx(sum(terms))
    assert expected_scores(Decoder(model_section(position="alibi")).positions, 5) is None


def test_results_hold_the_contract_and_do_not_depend_on_the_number_of_ranks(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    found = []
    for num_ranks in (1, 3):
        output = tmp_path / f"out-{num_ranks}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command += ["-m", "lex_pretrain", "evaluate", str(checkpoint.parent.parent), "--data", str(dataset)]
        command += ["--lengths", "16,64,200", "--attention", "blockwise,causal", "--output", str(output)]
        subprocess.run(
            command, check=True, capture_output=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        results = json.loads((output / "results.json").read_text())
        assert (results["format_version"], results["training_length"], results["step"]) == (1, 32, 7)
        found.append(
            [(r["attention"], r["length"], r["nll"], r["num_tokens"], r["ci95"]) for r in results["perplexity"]]
        )
        for name in ("perplexity.png", "resolution.png", "by_position.png", "speed.png", "report.html"):
            assert (output / name).stat().st_size > 1000
    assert found[0] == found[1]
    assert {(attention, length) for attention, length, *_ in found[0]} == {
        (attention, length) for attention in ("causal", "blockwise") for length in (16, 64, 200)
    }
    short = {attention: nll for attention, length, nll, *_ in found[0] if length == 16}
    assert short["causal"] == pytest.approx(short["blockwise"], rel=1e-6)


def test_report_is_self_contained_and_says_what_the_numbers_say(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    results = evaluate(
        checkpoint, [dataset], [16, 32, 64], ["causal", "blockwise"], tmp_path, "test", 4, "fp32", "the command"
    )
    assert results is not None
    assert Results.load(tmp_path) == results
    steps = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, 9)]
    file = write_report("<Title>", [results], tmp_path, [TrainingRecord("xpos", steps, [4])], ["a <note>"])
    html = file.read_text()
    assert "&lt;Title&gt;" in html
    assert "a &lt;note&gt;" in html
    assert "the command" in html
    assert html.count("data:image/png;base64,") == 5
    for outside in ("http://", "https://", "<script", "<link", 'src="/'):
        assert outside not in html
    lowest = min((r for r in results.perplexity if r.attention == "causal"), key=lambda record: record.perplexity)
    assert (
        f"xpos with causal attention is best at {lowest.length:,} tokens ({lowest.perplexity:.2f})"
        in describe(results)[0]
    )


def test_text_files_are_scored_like_shards_and_other_tokenizers_refused(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    model = load_decoder(checkpoint, torch.device("cpu"), evaluation_dtype)
    stored = TokenDataset.open(dataset, "test")
    tokenizer = stored.tokenizer()
    start, end = max(stored.document_bounds(), key=lambda bounds: bounds[1] - bounds[0])
    text = tokenizer.decode(stored.read(start, end - start).tolist())
    (tmp_path / "long.txt").write_text(text)
    (from_text,) = load_documents([tmp_path / "long.txt"], "test", tokenizer, 200, 1)
    np.testing.assert_array_equal(from_text.tokens, stored.read(start, 200))
    assert from_text.num_bytes == len(tokenizer.decode(from_text.tokens.tolist()).encode())
    with pytest.raises(RequestError, match=r"no document .* has 1,000,000 tokens, the longest has"):
        load_documents([dataset], "test", tokenizer, 1_000_000, 1)

    class Other:
        fingerprint = "another"

    with pytest.raises(RequestError, match="prepared with another tokenizer"):
        load_documents([dataset], "test", Other(), 10, 1)  # type: ignore[arg-type]
    assert model.step == 7


def test_bad_requests_end_with_2(checkpoint: Path, dataset: Path, program: Program, tmp_path: Path) -> None:
    run = checkpoint.parent.parent
    cases = [
        (["evaluate", run, "--data", dataset, "--lengths", "many"], "not a list of whole numbers"),
        (["evaluate", run, "--data", dataset, "--attention", "blokwise"], "--attention blokwise is unknown"),
        (["evaluate", run], "--data is missing"),
        (["evaluate", tmp_path, "--data", dataset], "neither a checkpoint"),
        (["evaluate", run, "--data", tmp_path / "no.txt", "--lengths", "8"], "no.txt does not exist"),
    ]
    for arguments, words in cases:
        done = program(*arguments)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr


def test_a_checkpoint_of_another_architecture_is_refused(checkpoint: Path) -> None:
    config = (checkpoint / "config.yaml").read_text()
    (checkpoint / "config.yaml").write_text(config.replace("hidden_size: 32", "hidden_size: 64"))
    with pytest.raises(RequestError, match="does not fit the architecture"):
        load_decoder(checkpoint, torch.device("cpu"), evaluation_dtype)
