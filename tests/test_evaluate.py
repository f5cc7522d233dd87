"""The evaluator against hand-made cases and a naive loop."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lex_pretrain.cli import main
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.evaluate.documents import load_documents
from lex_pretrain.evaluate.evaluation import EvaluationRequest, evaluate
from lex_pretrain.evaluate.intervals import paired_change, perplexity_interval
from lex_pretrain.evaluate.memory import peak_memory_bytes, reset_peak_memory
from lex_pretrain.evaluate.perplexity import score_fixed_targets, score_pieces
from lex_pretrain.evaluate.resolution import expected_scores, measured_scores, resolution
from lex_pretrain.evaluate.results import Results, ScoringMode
from lex_pretrain.files import write_json
from lex_pretrain.folder_lock import folder_lock
from lex_pretrain.hardware import evaluation_dtype
from lex_pretrain.loading import load_decoder
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model.positions import make_positions
from lex_pretrain.progress import logger
from lex_pretrain.run_folder import read_listing
from lex_pretrain.tokenizer import Tokenizer
from tests.conftest import Program, list_files
from tests.test_attention import model_section

TRAINED = 8
EOD = 1
MODES: tuple[ScoringMode, ...] = ("causal", "blockwise", "sliding", "sinks", "strided", "chunks")


def no_texts(given: str) -> Iterator[str]:
    raise AssertionError(f"{given} is a dataset")


def request(checkpoint: Path, dataset: Path, output: Path) -> EvaluationRequest:
    """Two lengths with full and blockwise attention."""
    return EvaluationRequest(
        run_or_checkpoint=checkpoint,
        data=[str(dataset)],
        lengths=[16, 64],
        attentions=["causal", "blockwise"],
        output=output,
        command="the command",
        max_documents=5,
        retrieval_trials=1,
        precision="fp32",
    )


def first_input(mode: ScoringMode, start: int, place: int) -> int:
    """Where the inputs begin that a target may be seen from: those of its piece, or of its window of 8 tokens."""
    late = place - start - TRAINED + 1
    if mode not in ("strided", "chunks") or late <= 0:
        return start
    stride = 2 if mode == "strided" else TRAINED
    return start + -(-late // stride) * stride


def naive_loss(decoder: Decoder, stream: list[int], first: int, place: int, mode: ScoringMode) -> float:
    """Loss of the target after stream[place], alone, from the inputs stream[first] on."""
    attention = "causal" if mode in ("strided", "chunks") else mode
    with torch.inference_mode():
        logits = decoder(torch.tensor([stream[first : place + 1]]), attention)[0, -1]
    return -float(logits.log_softmax(dim=-1)[stream[place + 1]])


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Two layers trained at length 8, in float64; the strided window moves on by 2."""
    monkeypatch.setattr("lex_pretrain.evaluate.perplexity.STRIDES_PER_WINDOW", 4)
    torch.manual_seed(0)
    return Decoder(model_section(num_sinks=2)).double().eval()


@pytest.mark.parametrize("length", [2, 3, 7, 8, 13, 50])
@pytest.mark.parametrize("mode", MODES)
def test_pieces_are_those_of_a_naive_loop(decoder: Decoder, length: int, mode: ScoringMode) -> None:
    """Each token alone, from all before it in its piece and the one token before the piece (EOD at the start)."""
    for num_tokens in (1, 8, 21):
        document = np.random.default_rng(0).integers(2, 40, num_tokens)
        stream = [EOD, *document.tolist()]
        found = score_pieces(decoder, document, length, mode, EOD)
        expected = []
        for place in range(num_tokens):
            first = first_input(mode, place // length * length, place)
            expected.append(naive_loss(decoder, stream, first, place, mode))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("length", [2, 3, 8, 11, 40])
@pytest.mark.parametrize("mode", MODES)
def test_fixed_targets_are_those_of_a_naive_loop(decoder: Decoder, length: int, mode: ScoringMode) -> None:
    """The last quarter, read in windows that end at the document's end and half a length apart."""
    document = np.random.default_rng(0).integers(2, 40, 40)
    stream = [EOD, *document.tolist()]
    stride = min(10, max(1, length // 2))
    expected = []
    for place in range(30, 40):
        end = 40 - (39 - place) // stride * stride
        first = first_input(mode, end - length, place)
        assert place - first >= min(length, TRAINED if mode == "strided" else length) // 2 or mode == "chunks"
        expected.append(naive_loss(decoder, stream, first, place, mode))
    found = score_fixed_targets(decoder, document, length, mode, EOD)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_both_protocols_agree_where_a_piece_is_the_whole_document(decoder: Decoder, mode: ScoringMode) -> None:
    document = np.random.default_rng(1).integers(2, 40, 27)
    whole = score_pieces(decoder, document, 27, mode, EOD)
    np.testing.assert_allclose(score_fixed_targets(decoder, document, 27, mode, EOD), whole[-6:], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_batches_and_streamed_parts_change_nothing(
    decoder: Decoder, mode: ScoringMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = np.random.default_rng(2).integers(2, 40, 100)
    before = [score_pieces(decoder, document, length, mode, EOD) for length in (8, 100)]
    for name, value in (("BATCH_TOKENS", 7), ("LOGIT_POSITIONS", {"cpu": 3})):
        monkeypatch.setattr(f"lex_pretrain.evaluate.perplexity.{name}", value)
        after = [score_pieces(decoder, document, length, mode, EOD) for length in (8, 100)]
        for old, new in zip(before, after, strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-6)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary_at_every_length() -> None:
    decoder = Decoder(model_section()).eval()
    torch.nn.init.zeros_(decoder.embedding.weight)
    document = np.arange(2, 32)
    for length in (2, 8, 13, 64):
        losses = score_pieces(decoder, document, length, "blockwise", EOD)
        assert math.exp(losses.mean()) == pytest.approx(40, rel=1e-6)


def test_intervals_are_nothing_wide_for_equal_documents_and_hold_the_mean() -> None:
    counts = np.full(10, 100)
    assert perplexity_interval(np.full(10, 200.0), counts) == pytest.approx((math.exp(2), math.exp(2)))
    low, high = perplexity_interval(np.linspace(150, 250, 10), counts)
    assert low < math.exp(2) < high


def test_interval_of_many_documents_is_that_of_the_normal_law() -> None:
    losses = np.random.default_rng(5).normal(2.0, 0.3, 400)
    low, high = perplexity_interval(losses * 50, np.full(400, 50))
    error = 1.96 * losses.std() / 20
    assert (math.log(low), math.log(high)) == pytest.approx((losses.mean() - error, losses.mean() + error), abs=0.004)


def test_paired_change_sees_what_the_spread_of_documents_hides() -> None:
    before = np.random.default_rng(5).normal(3.0, 1.0, 50)
    change, low, high = paired_change(before, before - 0.01)
    assert (change, low, high) == pytest.approx((math.exp(-0.01) - 1,) * 3)
    change, low, high = paired_change(before, before + np.tile([0.1, -0.1], 25))
    assert change == pytest.approx(0, abs=1e-12)
    assert low < change < high


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


def test_measured_scores_of_stretched_rope_hold_its_size() -> None:
    """At distance 0 no angle matters, so YaRN's scores are the plain ones times its magnitude, once for q and for k."""
    torch.manual_seed(0)
    decoder = Decoder(model_section(position="rope", num_layers=1)).eval()
    tokens = torch.randint(0, 40, (11,))
    plain = measured_scores(decoder, tokens)[0]
    decoder.positions = make_positions(model_section(position="rope", rope_scaling="yarn", rope_scaling_factor=4.0))
    assert measured_scores(decoder, tokens)[0][0] == pytest.approx(plain[0] * (0.1 * math.log(4) + 1) ** 2)


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
        command += ["--lengths", "16,64,200", "--attention", "blockwise,causal,strided", "--output", str(output)]
        command += ["--retrieval-trials", "1"]
        subprocess.run(
            command, check=True, capture_output=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        results = json.loads((output / "results.json").read_text())
        assert (results["format_version"], results["training_length"], results["step"]) == (1, 32, 7)
        for record in results["perplexity"]:
            assert record.pop("tokens_per_second") > 0
            assert record.pop("peak_memory_bytes") > 2**20
        found.append([results[name] for name in ("perplexity", "by_position", "retrieval")])
        for name in ("perplexity.png", "resolution.png", "by_position.png", "speed.png", "report.html"):
            assert (output / name).stat().st_size > 1000
        assert not list(output.glob("unfinished-*"))
    assert found[0] == found[1]
    perplexity = {(r["protocol"], r["attention"], r["length"]): r["nll"] for r in found[0][0]}
    protocols, modes, lengths = ("pieces", "fixed-target"), ("blockwise", "causal", "strided"), (16, 64, 200)
    assert set(perplexity) == set(itertools.product(protocols, modes, lengths))
    short = {attention: nll for (protocol, attention, length), nll in perplexity.items() if length == 16}
    assert short["causal"] == pytest.approx(short["blockwise"], rel=1e-6)
    assert short["causal"] == pytest.approx(short["strided"], rel=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_second_evaluation_in_a_folder_is_refused_and_touches_nothing(
    checkpoint: Path, dataset: Path, program: Program, tmp_path: Path, num_ranks: int
) -> None:
    launch = () if num_ranks == 1 else ("launch", "--num-processes", str(num_ranks), "--")
    output = tmp_path / "out"
    output.mkdir()
    with folder_lock(output, "evaluation"):
        refused = program(*launch, "evaluate", checkpoint, "--data", dataset, "--lengths", "16,32", "--output", output)
    assert refused.returncode == 1, refused.stderr
    assert refused.stderr.count(f"{output} is in use by another evaluation that is still running") == 1
    assert [file.name for file in output.iterdir()] == [".lock"]


def test_a_killed_evaluation_goes_on_where_it_was(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lex_pretrain.evaluate import scoring

    calls = []

    def counted(decoder: Decoder, document: np.ndarray, *task: object) -> np.ndarray:
        if len(calls) == 7:
            raise KeyboardInterrupt
        calls.append(task)
        return score_pieces(decoder, document, *task)  # type: ignore[arg-type]

    def run(output: Path) -> Results:
        results = evaluate(request(checkpoint, dataset, output), no_texts)
        assert results is not None
        return results

    uninterrupted = run(tmp_path / "whole")
    monkeypatch.setattr(scoring, "score_pieces", counted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed")
    (unfinished,) = (tmp_path / "killed").glob("unfinished-*")
    # A kill may leave half a line, and another rank may have had other documents.
    lines = (unfinished / "rank-00000.jsonl").read_text().splitlines(keepends=True)
    (unfinished / "rank-00000.jsonl").write_text("".join(lines[:5]) + lines[6][:20])
    (unfinished / "rank-00003.jsonl").write_text(lines[5])
    calls.clear()
    monkeypatch.setattr(scoring, "score_pieces", lambda *task: calls.append(task) or score_pieces(*task))
    resumed = run(tmp_path / "killed")
    num_documents = uninterrupted.perplexity[0].num_documents
    assert len(calls) == 2 * 2 * num_documents - 6
    assert [(r.nll, r.ci95) for r in resumed.perplexity] == [(r.nll, r.ci95) for r in uninterrupted.perplexity]
    assert not unfinished.exists()


def test_a_loss_that_is_not_finite_ends_the_job_with_the_place(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lex_pretrain.evaluate import scoring

    monkeypatch.setattr(scoring, "score_pieces", lambda *_: np.array([1.0, 2.0, np.nan]))
    with pytest.raises(JobError, match=r"causal attention at 16 tokens gave a loss .* \(document 0, token 2\)"):
        evaluate(request(checkpoint, dataset, tmp_path / "out"), no_texts)


def test_rope_is_stretched_to_the_longest_length(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = dataclasses.replace(request(checkpoint, dataset, tmp_path / "out"), rope_scaling="linear")
    with pytest.raises(RequestError, match="needs a model with position rope, and this one has xpos"):
        evaluate(wanted, no_texts)
    config = (checkpoint / "config.yaml").read_text()
    (checkpoint / "config.yaml").write_text(config.replace("position: xpos", "position: rope"))
    list_files(checkpoint)
    results = evaluate(wanted, no_texts)
    assert results is not None
    assert results.position == "rope+linear"
    decoder = load_decoder(checkpoint, torch.device("cpu"), evaluation_dtype).decoder
    section = decoder.config.model_copy(update={"rope_scaling": "linear", "rope_scaling_factor": 64 / 32})
    decoder.positions = make_positions(section)
    tokenizer = Tokenizer(checkpoint / "tokenizer.model")
    documents = load_documents([str(dataset)], "test", tokenizer, 64, 5, no_texts)
    for length in (16, 64):
        losses = [score_pieces(decoder, document.tokens, length, "causal", tokenizer.eod_id) for document in documents]
        found = results.find("causal", length)
        assert found is not None
        assert found.nll == pytest.approx(np.mean(losses), rel=1e-6)


def test_peak_memory_is_that_of_the_stretch() -> None:
    cpu = torch.device("cpu")
    size = 256 * 2**20
    torch.ones(size // 4)
    reset_peak_memory(cpu)
    before = peak_memory_bytes(cpu)
    held = torch.ones(size // 4)
    assert size * 0.9 < peak_memory_bytes(cpu) - before < size * 1.5
    del held
    reset_peak_memory(cpu)
    assert peak_memory_bytes(cpu) - before < size / 2


def test_texts_are_scored_like_shards_and_other_tokenizers_refused(
    checkpoint: Path, dataset: Path, program: Program, tmp_path: Path
) -> None:
    stored = TokenDataset.open(dataset, "test")
    tokenizer = stored.tokenizer()
    start, end = max(stored.document_bounds(), key=lambda bounds: bounds[1] - bounds[0])
    text = tokenizer.decode(stored.read(start, end - start).tolist())
    (tmp_path / "long.jsonl").write_text(json.dumps({"story": text}) + "\n" + json.dumps({"story": "short"}) + "\n")
    (from_text,) = load_documents(["some"], "test", tokenizer, 200, 1, lambda given: iter([given, text]))
    np.testing.assert_array_equal(from_text.tokens, stored.read(start, 200))
    shown = tokenizer.decode(from_text.tokens.tolist())
    assert (from_text.num_bytes, from_text.num_characters) == (len(shown.encode()), len(shown))
    with pytest.raises(RequestError, match=r"no document .* has 1,000,000 tokens, the longest has [\d,]+;"):
        load_documents([str(dataset)], "test", tokenizer, 1_000_000, 1, no_texts)

    class Other:
        fingerprint = "another"

    with pytest.raises(RequestError, match="prepared with another tokenizer"):
        load_documents([str(dataset)], "test", Other(), 10, 1, no_texts)  # type: ignore[arg-type]
    done = program(
        *("evaluate", checkpoint, "--data", tmp_path / "long.jsonl", "--text-key", "story", "--lengths", "32,64"),
        *("--retrieval-trials", "0", "--json"),
    )
    assert done.returncode == 0, done.stderr
    results = Results.model_validate_json(done.stdout)
    losses = score_pieces(
        load_decoder(checkpoint, torch.device("cpu"), evaluation_dtype).decoder,
        from_text.tokens[:64],
        32,
        "causal",
        tokenizer.eod_id,
    )
    found = results.find("causal", 32)
    assert found is not None
    assert found.nll == pytest.approx(losses.mean(), rel=1e-6)
    assert found.bits_per_byte is not None


def test_bad_requests_end_with_2(
    checkpoint: Path,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = checkpoint.parent.parent
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    cases = [
        (["--data", dataset, "--lengths", "many"], "not a list of whole numbers"),
        (["--data", dataset, "--lengths", "1"], "lengths of at least 2 tokens"),
        (["--data", dataset, "--attention", "blokwise"], "--attention blokwise is unknown; known: causal, blockwise"),
        (["--data", dataset, "--precision", "int8"], "--precision int8 is unknown"),
        (["--data", dataset, "--rope-scaling", "more"], "--rope-scaling more is unknown; known: linear, ntk, yarn"),
        (["--data", dataset, "--split", "nowhere", "--lengths", "8"], "has no nowhere split"),
        ([], "--data is missing"),
        (["--data", tmp_path / "no.txt", "--lengths", "8"], "no.txt does not exist"),
        (["--data", tmp_path / "bad.txt", "--lengths", "8"], "bad.txt, record 1: not UTF-8"),
    ]
    monkeypatch.setattr(logger, "handlers", [])
    for arguments, words in cases:
        options = [*map(str, arguments), "--output", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["lex-pretrain", "evaluate", str(run), *options])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err
    with pytest.raises(RequestError, match="neither a checkpoint"):
        load_decoder(tmp_path, torch.device("cpu"), evaluation_dtype)


def test_a_checkpoint_of_another_architecture_is_refused(checkpoint: Path) -> None:
    config = (checkpoint / "config.yaml").read_text()
    (checkpoint / "config.yaml").write_text(config.replace("hidden_size: 32", "hidden_size: 64"))
    list_files(checkpoint)
    with pytest.raises(RequestError, match="does not fit the architecture"):
        load_decoder(checkpoint, torch.device("cpu"), evaluation_dtype)


def test_a_checkpoint_of_other_parameters_is_refused_by_their_names(checkpoint: Path) -> None:
    config = (checkpoint / "config.yaml").read_text()
    (checkpoint / "config.yaml").write_text(config.replace("position: xpos", "position: learned"))
    list_files(checkpoint)
    with pytest.raises(RequestError, match=r"(?s)model\.safetensors does not fit .*positions\.table\.weight"):
        load_decoder(checkpoint, torch.device("cpu"), evaluation_dtype)


@pytest.mark.parametrize("name", ["step-foo", "step-", "step-²"])
def test_a_checkpoint_that_tells_no_step_is_refused(checkpoint: Path, name: str) -> None:
    # As it was listed before the list said its step.
    write_json(checkpoint / "files.json", [entry.model_dump() for entry in read_listing(checkpoint).files])
    renamed = checkpoint.rename(checkpoint.parent / name)
    with pytest.raises(RequestError, match=r"named after its step, such as step-00000100, .* Give it the name it had"):
        load_decoder(renamed, torch.device("cpu"), evaluation_dtype)
    elsewhere = renamed.rename(checkpoint.parent / "mine")
    assert load_decoder(elsewhere, torch.device("cpu"), evaluation_dtype).step == 0


def test_a_checkpoint_keeps_its_step_under_another_name(checkpoint: Path) -> None:
    renamed = checkpoint.rename(checkpoint.parent / "the best")
    assert load_decoder(renamed, torch.device("cpu"), evaluation_dtype).step == 7
    other = renamed.rename(checkpoint.parent / "step-00000009")
    with pytest.raises(RequestError, match="holds the checkpoint of step 7, and its name is that of step 9"):
        load_decoder(other, torch.device("cpu"), evaluation_dtype)
