"""The decoder inside DeepSpeed's engine computes what it computes alone."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.monitor.metrics import read_steps
from tests.conftest import Program, run_forked
from tests.partitioned import MODES

ROOT = Path(__file__).parent.parent


LEARNED: dict[str, object] = {
    **{"position": "learned", "sequence_length": 64, "block_size": 16, "window_size": 32},
    **{"tie_embeddings": False, "num_key_value_heads": 1, "activation": "swiglu", "sub_layer_norm": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LEARNED], ids=["xpos", "learned"])
def test_weights_partitioned_over_two_processes_give_the_logits_of_whole_ones(
    tiny_config: Callable[..., Config], tmp_path: Path, model: dict[str, object]
) -> None:
    """ZeRO-3 with no parameter small enough to stay whole, at lengths past block and window."""
    config = tiny_config(
        model={"vocab_size": 100, **model},
        zero={"stage": 3},
        deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    )
    save_config(config, tmp_path / "config.yaml")
    found = run_two_processes(tmp_path / "config.yaml", tmp_path / "found.pt")
    assert found["whole_here"] == []
    alone = Decoder(config.model)
    assert set(found["weights"]) == {name for name, _ in alone.named_parameters()}
    alone.load_state_dict(found["weights"], strict=False)
    tokens = torch.arange(80).reshape(2, 40)
    for mode in MODES:
        with torch.no_grad():
            logits = alone(tokens[:, :-1], mode)
        assert torch.equal(found[mode]["logits"], logits), mode
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        assert found[mode]["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert not torch.equal(found["causal"]["logits"], found["blockwise"]["logits"])


def run_two_processes(config: Path, output: Path) -> dict[str, Any]:
    """What `partitioned.py` saves."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.partitioned", str(config), str(output)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(torch.load(output))


@pytest.mark.slow
def test_compiled_layers_train_as_plain_ones(
    tiny_config: Callable[..., Config], program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the engine of ZeRO 1; the compiler's own folder tells that it has made kernels."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    losses = {}
    for compiled in (False, True):
        config = tiny_config(
            run={"output_dir": str(tmp_path / f"compiled-{compiled}")},
            model={"num_layers": 1},
            train={"compile_layers": compiled},
            zero={"stage": 1},
        )
        save_config(config, tmp_path / "config.yaml")
        done = program("train", "--config", tmp_path / "config.yaml", timeout_seconds=1200)
        assert done.returncode == 0, done.stderr
        assert bool(list(tmp_path.glob("kernels/**/*.so"))) == compiled
        losses[compiled] = [step["loss"] for step in read_steps(Path(config.run.output_dir) / "metrics.jsonl")]
    assert len(losses[False]) == 6
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert losses[True][-1] < losses[True][0]


@pytest.mark.slow
def test_offloaded_parameters_train_as_those_on_the_device(
    tiny_config: Callable[..., Config], program: Program, tmp_path: Path
) -> None:
    """ZeRO 3 on two processes, bit for bit, also after a resumption."""
    losses = {}
    for offload in (False, True):
        config = tiny_config(
            run={"output_dir": str(tmp_path / f"offload-{offload}")}, zero={"stage": 3, "offload_parameters": offload}
        )
        save_config(config, tmp_path / "config.yaml")
        command = ["launch", "--num-processes", "2", "--", "train", "--config", tmp_path / "config.yaml"]
        done = program(*command)
        assert done.returncode == 0, done.stderr
        losses[offload] = [step["loss"] for step in read_steps(Path(config.run.output_dir) / "metrics.jsonl")]
    assert losses[True] == losses[False]
    resumed = program(*command, "--resume", "3")
    assert resumed.returncode == 0, resumed.stderr
    assert [step["loss"] for step in read_steps(tmp_path / "offload-True" / "metrics.jsonl")] == losses[False]


@pytest.mark.slow
def test_offloaded_optimizer_state_resumes_bit_for_bit(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    """ZeRO 2 and 3 on two processes, after a kill."""
    runs: list[tuple[Path | int | str, ...]] = []
    for stage in (2, 3):
        for name in (f"whole-{stage}", f"killed-{stage}"):
            run = {"output_dir": str(tmp_path / name)}
            zero = {"stage": stage, "offload_optimizer": True}
            save_config(tiny_config(run=run, zero=zero, checkpoint={"every_steps": 2}), tmp_path / f"{name}.yaml")
            runs += [(tmp_path / f"{name}.yaml", 2, "killed")] if "killed" in name else []
            runs.append((tmp_path / f"{name}.yaml", 2))
    run_forked(*runs)
    for stage in (2, 3):
        whole, killed = (
            [(step["loss"], step["grad_norm"]) for step in read_steps(tmp_path / name / "metrics.jsonl")]
            for name in (f"whole-{stage}", f"killed-{stage}")
        )
        assert len(whole) == 6
        assert killed == whole, stage


@pytest.mark.slow
def test_offloaded_optimizer_state_comes_back_to_the_device_and_goes_out_again(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    """ZeRO 2 and 3, on as many processes as before and on others: the losses of a run that was never offloaded."""
    common = {"schedule": {"decay": "constant"}, "train": {"num_steps": 10}}
    save_config(tiny_config(run={"output_dir": str(tmp_path / "whole")}, **common), tmp_path / "whole.yaml")
    runs: list[tuple[Path | int | str, ...]] = [(tmp_path / "whole.yaml", 2)]
    for stage in (2, 3):
        parts = [(3, 2, False), (6, 2, True), (8, 1, False), (10, 2, True)]
        for num_steps, num_processes, offload in parts:
            changed: dict[str, dict[str, object]] = {
                "run": {"output_dir": str(tmp_path / f"stage-{stage}")},
                "train": {"num_steps": num_steps},
                "zero": {"stage": stage, "offload_optimizer": offload},
            }
            file = tmp_path / f"stage-{stage}-{num_steps}.yaml"
            save_config(tiny_config(**{**common, **changed}), file)
            runs.append((file, num_processes))
    run_forked(*runs)
    whole = [step["loss"] for step in read_steps(tmp_path / "whole" / "metrics.jsonl")]
    assert len(whole) == 10
    for stage in (2, 3):
        losses = [step["loss"] for step in read_steps(tmp_path / f"stage-{stage}" / "metrics.jsonl")]
        assert losses == pytest.approx(whole, abs=1e-5), stage


@pytest.mark.slow
def test_muon_turns_the_hidden_matrices_and_resumes_bit_for_bit(
    tiny_config: Callable[..., Config], program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # DeepSpeed compiles the update, which takes most of a minute and changes none of what is asserted here.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    rate = 0.2
    config = tiny_config(
        train={"num_steps": 4, "precision": "bf16"},
        optimizer={"name": "muon", "muon_learning_rate": rate, "weight_decay": 0.0},
        schedule={"warmup_steps": 0, "decay": "constant"},
        checkpoint={"every_steps": 1, "keep_last": 4},
        model={"tie_embeddings": False},
    )
    save_config(config, tmp_path / "config.yaml")
    command = ["launch", "--num-processes", "2", "--", "train", "--config", tmp_path / "config.yaml"]
    done = program(*command)
    assert done.returncode == 0, done.stderr
    before, after = (load_file(tmp_path / f"run/checkpoints/step-0000000{step}/model.safetensors") for step in (1, 2))
    for name in before:
        moved = after[name].float() - before[name].float()
        if name.startswith("layers.") and moved.ndim == 2:
            scale = rate * max(1.0, moved.shape[0] / moved.shape[1]) ** 0.5
            # The Newton-Schulz iteration brings singular values near 1, but for the least of a gradient.
            values = torch.linalg.svdvals(moved) / scale
            assert values.median() > 0.6, name
            assert values.max() < 1.5, name
        else:
            assert moved.abs().max() < 0.02, name  # AdamW at 0.003
    whole = read_steps(tmp_path / "run" / "metrics.jsonl")
    assert whole[-1]["loss"] < whole[0]["loss"]
    resumed = program(*command, "--resume", "2")
    assert resumed.returncode == 0, resumed.stderr
    again = read_steps(tmp_path / "run" / "metrics.jsonl")
    assert [step["loss"] for step in again] == [step["loss"] for step in whole]
    checkpoints = [tmp_path / "run/checkpoints" / part for part in ("step-00000004", "abandoned-1/step-00000004")]
    weights = [load_file(folder / "model.safetensors") for folder in checkpoints]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    alone = program("train", "--config", tmp_path / "config.yaml", "train.num_steps=5")
    assert alone.returncode == 2
    assert "does not convert muon's momentum" in alone.stderr
