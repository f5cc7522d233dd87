"""Exported folders: the very model in a Python without this program, and still a checkpoint to this program."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lex_pretrain.cli import main
from lex_pretrain.config import Config
from lex_pretrain.evaluate.evaluation import evaluate
from lex_pretrain.export import export
from lex_pretrain.export.sources import collect_sources
from lex_pretrain.generation import Generator, Sampling
from lex_pretrain.loading import load_decoder
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.progress import logger
from lex_pretrain.tokenizer import Tokenizer
from tests.conftest import list_files, save_checkpoint
from tests.test_evaluate import no_texts, request

VARIANTS: dict[str, dict[str, object]] = {
    "xpos": {"num_key_value_heads": 2, "activation": "swiglu", "sub_layer_norm": True},
    "rope": {"position": "rope", "norm": "rmsnorm", "bias": False, "tie_embeddings": False},
    "alibi": {"position": "alibi", "num_heads": 3, "hidden_size": 24, "block_size": 5},
    "learned": {"position": "learned", "scale_embeddings": False, "tie_embeddings": False},
}
TRAINED = 48
TEXTS = ["", " ", "  a\tb\n\n", "\u2581 of\u2581\u2581the", "</s> é 🤗", "length"]
PROMPTS = ["the length of a", "in"]
TOKENS = torch.arange(2, 82).reshape(2, 40)
NUM_NEW_TOKENS = 20


def make_checkpoint(folder: Path, dataset: Path, **model: object) -> Path:
    values = {
        "run": {"output_dir": "unused"},
        "data": {"path": str(dataset)},
        "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": TRAINED, **model},
        "train": {"num_steps": 1000, "global_batch_size": 8, "precision": "fp32"},
    }
    return save_checkpoint(folder, Config.model_validate(values), dataset)


@pytest.fixture(scope="module")
def folders(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each variant as a run in `runs/`, and exported into `exported/`."""
    folder = tmp_path_factory.mktemp("export")
    for name, model in VARIANTS.items():
        checkpoint = make_checkpoint(folder / "runs" / name / "checkpoints" / "step-00000007", dataset, **model)
        assert export.export_model(checkpoint, folder / "exported" / name) == checkpoint
    return folder


@pytest.fixture(scope="module")
def outside(folders: Path) -> dict[str, Any]:
    """What a Python without this program finds in each exported folder."""
    asked = {"tokens": TOKENS.tolist(), "texts": TEXTS, "prompts": PROMPTS, "max_new_tokens": NUM_NEW_TOKENS}
    (folders / "request.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name("exported.py")
    (folders / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, "-I", script, folders / "exported", folders / "request.json", folders / "found.pt"],
        cwd=folders / "elsewhere",
        env={**os.environ, "HF_HOME": str(folders / "huggingface"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(torch.load(folders / "found.pt"))


def decoder_of(folders: Path, variant: str) -> Decoder:
    return load_decoder(folders / "runs" / variant, torch.device("cpu"), lambda precision: torch.float32).decoder


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_decoders_bit_for_bit(variant: str, folders: Path, outside: dict[str, Any]) -> None:
    found, decoder = outside[variant], decoder_of(folders, variant)
    blockwise, causal = decoder(TOKENS, "blockwise"), decoder(TOKENS, "causal")
    assert torch.equal(found["logits"]["blockwise"], blockwise)
    assert torch.equal(found["logits"]["causal"], causal)
    assert not torch.allclose(blockwise, causal)
    torch.testing.assert_close(found["last_logits"], blockwise[:, -1:])
    assert torch.equal(found["saved_logits"], blockwise)
    loss = torch.nn.functional.cross_entropy(blockwise[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert found["loss"] == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_at_the_left_changes_nothing_and_other_masks_are_refused(
    variant: str, folders: Path, outside: dict[str, Any]
) -> None:
    found, decoder = outside[variant], decoder_of(folders, variant)
    tokenizer = Tokenizer(folders / "exported" / variant / "tokenizer.model")
    assert found["num_padding"][1] > 0
    for prompt, num_padding, logits in zip(PROMPTS, found["num_padding"], found["padded_logits"], strict=True):
        alone = decoder(torch.tensor([[tokenizer.eod_id, *tokenizer.encode(prompt)]]), "blockwise")
        torch.testing.assert_close(logits[None, num_padding:], alone)
    for message, words in zip(
        found["faults"],
        [
            "must cover 40 tokens a row, not (39,)",
            "padding_side='left'",
            "the cache began with (2, 0)",
            "'all' is unknown",
        ],
        strict=True,
    ):
        assert words in message


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_generation_is_that_of_this_program(
    variant: str,
    folders: Path,
    outside: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, exported = outside[variant], folders / "exported" / variant
    greedy = Sampling(temperature=0)
    for folder in (folders / "runs" / variant, exported):
        assert Generator(folder, "blockwise").complete(PROMPTS, NUM_NEW_TOKENS, greedy, []) == found["written"]
    assert found["without_cache"]
    config = decoder_of(folders, variant).config
    assert found["num_cached_tokens"] < 2 * config.resolved_block_size
    options = ["--prompt", PROMPTS[0], "--max-new-tokens", str(NUM_NEW_TOKENS), "--temperature", "0"]
    monkeypatch.setattr(sys, "argv", ["lex-pretrain", "generate", str(exported), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == PROMPTS[0] + found["written"][0] + "\n"


def test_texts_come_back_exactly_and_begin_a_document(folders: Path, outside: dict[str, Any]) -> None:
    found = outside["xpos"]
    tokenizer = Tokenizer(folders / "exported" / "xpos" / "tokenizer.model")
    assert found["decoded"] == TEXTS
    assert found["ids"] == [[tokenizer.eod_id, *tokenizer.encode(text)] for text in TEXTS]
    assert found["saved_ids"] == found["ids"]


def test_an_exported_folder_evaluates_as_its_checkpoint(folders: Path, dataset: Path, tmp_path: Path) -> None:
    differing = {"name", "checkpoint"}
    measured = {"tokens_per_second", "peak_memory_bytes"}
    figures = []
    for name in ("runs", "exported"):
        asked = request(folders / name / "xpos", dataset, tmp_path / name)
        assert evaluate(dataclasses.replace(asked, lengths=[16, 256]), no_texts) is not None
        written = json.loads((tmp_path / name / "results.json").read_text())
        assert written["step"] == 7
        for record in written["perplexity"]:
            assert all(record.pop(key) > 0 for key in measured)
        figures.append({key: value for key, value in written.items() if key not in differing})
    assert figures[0] == figures[1]
    assert len(figures[0]["perplexity"]) == 8
    assert figures[0]["retrieval"]


def test_the_weights_are_those_of_the_checkpoint_in_their_own_precision(dataset: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003", dataset)
    config = (checkpoint / "config.yaml").read_text()
    (checkpoint / "config.yaml").write_text(config.replace("precision: fp32", "precision: bf16"))
    list_files(checkpoint)
    export.export_model(tmp_path / "run", tmp_path / "deep" / "exported")
    exported = tmp_path / "deep" / "exported"
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"
    assert (exported / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert exported.stat().st_mode & 0o777 == 0o755


def test_the_folder_appears_whole_or_not_at_all(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "step-00000003", dataset)
    full, place = tmp_path / "full", tmp_path / "place"
    full.mkdir()
    (full / "mine").write_text("kept")
    place.mkdir()
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr(logger, "handlers", [])

    def run(source: Path, output: Path) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["lex-pretrain", "export", str(source), "--output", str(output)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    for output in (full, tmp_path / "file"):
        code, message = run(checkpoint, output)
        assert code == 2
        assert f"{output} is there already and not an empty folder" in message
    code, message = run(tmp_path / "full", place / "exported")
    assert code == 2
    assert "neither a checkpoint" in message

    def fails(*arguments: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(export, "write_json", fails)
        code, message = run(checkpoint, place / "exported")
    assert code == 1
    assert "No space left" in message
    assert list(place.iterdir()) == []
    assert run(checkpoint, place)[0] == 0
    assert (place / "modeling_lex.py").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "place", "step-00000003"]
    assert [path.read_text() for path in full.iterdir()] == ["kept"]


def test_two_modules_of_one_file_name_are_refused() -> None:
    assert set(collect_sources(["lex_pretrain.model.positions"])) == {"positions.py", "model_config.py"}
    with pytest.raises(ValueError, match=r"lex_pretrain\.model\.__init__ would both be __init__\.py"):
        collect_sources(["lex_pretrain.model.__init__", "lex_pretrain.__init__"])
