"""Training through what goes wrong: numbers that are not finite, spikes, full disks, hangs, kills."""

import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from lex_pretrain.config import Config, TrainSection
from lex_pretrain.config_io import save_config
from lex_pretrain.monitor.metrics import read_records, read_steps
from lex_pretrain.train.finite import GradientWatch, spread_fault
from lex_pretrain.train.health import next_sample, robust_z_score, trouble
from lex_pretrain.train.prove import compare
from lex_pretrain.train.watchdog import Place, describe
from tests import skipping
from tests.conftest import Program, run_forked

MakeConfig = Callable[..., Config]
ROOT = Path(__file__).parent.parent


def on_two_processes(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", "--nproc-per-node", "2", "--module", module]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_an_infinite_gradient_of_one_rank_changes_nothing_on_any_rank(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ZeRO 0 to 3, and with Muon: weights, moments and counters then equal those of a run without that step."""
    # DeepSpeed compiles Muon's update, which takes most of a minute and changes none of what is asserted here.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    save_config(tiny_config(train={"micro_batch_size": 2}), tmp_path / "run.yaml")
    done = on_two_processes("tests.skipping", str(tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(skipping.CASES)
    for case, runs in found.items():
        spoiled, left_out = runs["spoiled"], runs["left out"]
        assert spoiled["skipped"] == [[False, False, True, False, False]] * 2, case
        assert spoiled["faults"] == [[[skipping.BAD_RANK, skipping.BAD_MICRO_STEP, "gradient"]]] * 2, case
        assert left_out["skipped"] == [[False] * 4] * 2, case
        assert spoiled["digest"] == left_out["digest"], case
        # Nothing spoiled, then the weights that the optimizer updates, then a moment or two.
        assert spoiled["finite"][0] == spoiled["finite"][1], case
        assert spoiled["finite"][0][0], case
        assert len(spoiled["finite"][0]) > 2, case
        assert not any(spoiled["finite"][0][1:]), case


def spoiled(fault: str, config: Config, file: Path, num_processes: int = 2) -> "subprocess.CompletedProcess[str]":
    """`lex-pretrain train` with a fault of tests/spoiled_run.py."""
    save_config(config, file)
    if num_processes > 1:
        return on_two_processes("tests.spoiled_run", fault, "train", "--config", str(file))
    command = [sys.executable, "-m", "tests.spoiled_run", fault, "train", "--config", str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "metrics.jsonl") if record.get("event") == name]


def checkpointed(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


@pytest.mark.slow
def test_a_run_that_went_back_equals_one_that_never_saw_the_samples(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Steps of 8 samples: after the save of step 4, samples 35 to 46 spoil steps 5 and 6 on rank 1.

    The twin begins with these samples noted, as a restart after going back would.
    """
    cases = [(1, "bf16"), (2, "fp32"), (3, "fp32")]
    runs = []
    for stage, precision in cases:
        for name in ("run", "twin"):
            output = tmp_path / f"{name}-{stage}"
            config = tiny_config(
                run={"output_dir": str(output)},
                zero={"stage": stage},
                train={"num_steps": 8, "precision": precision, "max_bad_steps": 2},
                checkpoint={"every_steps": 4},
            )
            save_config(config, tmp_path / f"{name}-{stage}.yaml")
            runs.append((tmp_path / f"{name}-{stage}.yaml", 2, "1:35-46"))
        (output / "checkpoints").mkdir(parents=True)
        (output / "checkpoints" / "passed_over.json").write_text("[[32, 48]]")
    log = run_forked(*runs)
    assert log.count("non finite: step 5  rank 1  what gradient") == len(cases)
    for stage, _ in cases:
        run, twin = tmp_path / f"run-{stage}", tmp_path / f"twin-{stage}"
        bad = events(run, "non_finite")
        found = [(event["step"], event["rank"], event["what"]) for event in bad]
        assert found == [(5, 1, "gradient"), (6, 1, "gradient")]
        assert all(re.fullmatch(r".*/document-\d{3}.txt, record 1", name) for name in bad[0]["documents"])
        (rewound,) = events(run, "rewound")
        assert (rewound["step"], rewound["to_step"], rewound["passed_over"]) == (6, 4, [32, 48])
        for name, weight in checkpointed(twin, 8).items():
            assert torch.equal(weight, checkpointed(run, 8)[name]), (stage, name)
        steps = [
            [(step["step"], step["samples"], step["loss"]) for step in read_steps(folder / "metrics.jsonl")]
            for folder in (run, twin)
        ]
        assert steps[0] == steps[1]
        assert [sample for _, sample, _ in steps[0]] == [8, 16, 24, 32, 56, 64, 72, 80]
        assert not events(twin, "rewound")


@pytest.mark.slow
def test_a_spike_goes_back_and_a_restart_keeps_passing_over_it(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """A loss ten times as large at step 14 of 16, then a place from which the run goes back too often."""
    settings = {"spike_threshold": 20.0, "spike_window_steps": 8, "max_bad_steps": 2, "max_rewinds": 1}
    config = tiny_config(train={"num_steps": 16, **settings}, checkpoint={"every_steps": 10})
    run = tmp_path / "run"
    done = spoiled("0:spike:107", config, tmp_path / "run.yaml", num_processes=1)
    assert done.returncode == 0, done.stderr
    (rewound,) = events(run, "rewound")
    assert (rewound["step"], rewound["to_step"], rewound["passed_over"]) == (14, 10, [80, 112])
    assert "robust standard deviations above the 8 before" in rewound["reason"]
    assert [step["samples"] for step in read_steps(run / "metrics.jsonl")][9:12] == [80, 120, 128]
    state = json.loads((run / "checkpoints" / "step-00000016" / "state.json").read_text())
    assert (state["samples"], state["passed_over"]) == (160, [[80, 112]])
    shutil.rmtree(run / "checkpoints" / "step-00000016")
    again = spoiled("0:112-159", config, tmp_path / "run.yaml", num_processes=1)
    assert again.returncode == 1, again.stderr
    assert "2 steps in a row were not finite, and the run has gone back to step-00000010 1 times before" in again.stderr
    assert read_steps(run / "metrics.jsonl")[10]["samples"] == 120
    assert len(events(run, "rewound")) == 1


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_never_saved(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """A moment becomes NaN in step 4, whose loss and gradients are finite, and at whose end a save is due."""
    config = tiny_config(train={"num_steps": 6}, checkpoint={"every_steps": 2})
    done = spoiled("0:weights:30", config, tmp_path / "run.yaml", num_processes=1)
    assert done.returncode == 0, done.stderr
    (rewound,) = events(tmp_path / "run", "rewound")
    assert rewound["reason"] == "weights or optimizer state are not finite"
    assert (rewound["step"], rewound["to_step"], rewound["passed_over"]) == (4, 2, [16, 32])
    for step in (4, 6):
        assert all(weight.isfinite().all() for weight in checkpointed(tmp_path / "run", step).values())


def test_a_loss_that_is_not_finite_spoils_all_its_gradients_and_no_other_changes_any() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    module = torch.nn.Module()
    module.weight = weight
    watch = GradientWatch(module)
    for offset in (0.0, float("inf"), float("nan")):
        weight.grad = None
        loss = (3 * weight).sum() + offset
        loss.backward(retain_graph=True)
        assert torch.equal(weight.grad, torch.tensor([3.0, 3.0]))  # finite, whatever the loss
        assert watch.take().isfinite()
        weight.grad = None
        spread_fault(loss).backward()
        assert bool(weight.grad.isfinite().all()) == (offset == 0.0)
        assert bool(watch.take().isfinite()) == (offset == 0.0)
    for bad in (float("inf"), -float("inf"), float("nan")):
        (weight * torch.tensor([1.0, bad])).sum().backward()
        assert not watch.take().isfinite()
    assert watch.take().isfinite()


@pytest.mark.slow
def test_without_a_checkpoint_to_go_back_to_the_run_ends(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(train={"max_bad_steps": 2})
    done = spoiled("0:0-99", config, tmp_path / "run.yaml", num_processes=1)
    assert done.returncode == 1, done.stderr
    assert "step 2: 2 steps in a row were not finite, and there is no checkpoint to go back to" in done.stderr
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_spike_is_judged_by_median_and_deviation() -> None:
    noisy = [5.0 + 0.01 * (number % 5) for number in range(8)]
    settings = TrainSection(num_steps=1, global_batch_size=1, spike_threshold=6.0, spike_window_steps=8)
    assert trouble(5.06, noisy, 0, settings) is None
    assert "robust standard deviations" in str(trouble(5.2, noisy, 0, settings))
    assert trouble(1.0, noisy, 0, settings) is None  # a fall is none
    assert trouble(9.0, noisy[1:], 0, settings) is None  # too few to judge by
    assert robust_z_score(3.0, [0.0, 1.0, 2.0]) == pytest.approx((3 - 1) / 1.4826)
    assert next_sample(8, [(0, 4), (8, 12), (8, 16), (16, 20)]) == 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB; mounting one needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a full disk is NOT tested here: mounting a small one failed: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_during_a_save_costs_nothing_but_that_save(
    tiny_config: MakeConfig, program: Program, small_disk: Path, tmp_path: Path
) -> None:
    run = small_disk / "run"
    config = tiny_config(run={"output_dir": str(run)}, train={"num_steps": 8}, checkpoint={"every_steps": 4})
    failed = spoiled("0:full:57", config, tmp_path / "run.yaml")
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count("could not be written") == 1
    assert "the checkpoint step-00000008 could not be written" in failed.stderr
    assert "it goes on from step-00000004" in failed.stderr
    assert sorted(file.name for file in (run / "checkpoints").iterdir()) == ["latest", "step-00000004"]
    no_room = program("launch", "--num-processes", "2", "--", "train", "--config", tmp_path / "run.yaml")
    assert no_room.returncode == 1, no_room.stderr
    assert no_room.stderr.count("MB free, and the next checkpoint needs about") == 1
    (run / "filler").unlink()
    done = program("launch", "--num-processes", "2", "--", "train", "--config", tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr
    assert [event["step"] for event in events(run, "resumed")] == [4]
    assert [step["samples"] for step in read_steps(run / "metrics.jsonl")] == [8, 16, 24, 32, 40, 48, 56, 64]


@pytest.mark.slow
def test_resumption_is_proved_on_the_users_own_config(
    tiny_config: MakeConfig, program: Program, tmp_path: Path
) -> None:
    save_config(tiny_config(model={"dropout": 0.1}, zero={"stage": 2}), tmp_path / "run.yaml")
    command = ["launch", "--num-processes", "2", "--", "train", "--config", tmp_path / "run.yaml", "--prove-resume"]
    done = program(*command, "6")
    assert done.returncode == 0, done.stderr
    assert "proved: 6 steps straight, and 6 steps killed after step 3 and resumed from step 2" in done.stderr
    assert not list(tmp_path.glob("run*/"))
    wrong = program("train", "--config", tmp_path / "run.yaml", "--prove-resume", "7")
    assert wrong.returncode == 2
    assert "must be from 2 to train.num_steps 6" in wrong.stderr


def test_the_proof_tells_the_smallest_difference(tmp_path: Path) -> None:
    for name, loss, weight in (("straight", 1.5, 1.0), ("resumed", 1.5 + 2**-40, 1.0 + 2**-23)):
        (tmp_path / name / "checkpoints" / "step-00000002").mkdir(parents=True)
        records = [{"step": step, "loss": loss * step, "lr": 0.1, "grad_norm": 1.0} for step in (1, 2)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        weights = {"a": torch.ones(2), "b": torch.tensor([weight])}
        save_file(weights, tmp_path / name / "checkpoints" / "step-00000002" / "model.safetensors")
    faults = compare(tmp_path / "straight", tmp_path / "resumed", 2)
    assert faults == [
        "loss of step 1: 1.5 straight, 1.5000000000009095 resumed",
        "1 of 2 weights, by up to 1.19e-07, first b",
    ]
    assert compare(tmp_path / "straight", tmp_path / "straight", 2) == []


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_with_its_name_and_all_stacks(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Rank 1 never reads the samples of step 3; rank 0 waits for it, in the same step."""
    done = spoiled("1:hang:20", tiny_config(train={"step_timeout_seconds": 3}), tmp_path / "run.yaml")
    assert done.returncode == 1, done.stderr
    assert "no progress for 3 s: rank 1: reading the samples of step 3, micro step 0" in done.stderr
    assert done.stderr.count("no progress for") == 1
    for rank, doing in ((0, "computing step 3"), (1, "reading the samples of step 3")):
        assert f"stacks of rank {rank}, {doing}" in done.stderr
    assert "in noting" in done.stderr  # the function that hangs
    assert "in train_step" in done.stderr


def test_the_rank_that_is_behind_or_silent_is_named() -> None:
    places = {0: Place(7, "saving step 2"), 2: Place(6, "computing step 2"), 3: Place(7, "saving step 2")}
    assert describe(places, 4) == "rank 1 does not answer; ranks 0, 3: saving step 2; rank 2: computing step 2"
    places[1] = places[0]
    assert describe(places, 4) == "rank 2: computing step 2"
    assert describe(dict.fromkeys(range(2), places[0]), 2) == (
        "no rank is behind the others; ranks 0, 1: saving step 2"
    )


@pytest.mark.slow
def test_a_stopped_process_is_named_by_the_others(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """SIGSTOP, as a machine that freezes; the launcher then ends what is left of the job."""
    save_config(tiny_config(train={"num_steps": 5000, "step_timeout_seconds": 3}), tmp_path / "run.yaml")
    command = [sys.executable, "-m", "lex_pretrain", "launch", "--num-processes", "2", "--", "train", "--config"]
    process = subprocess.Popen([*command, str(tmp_path / "run.yaml")], stderr=subprocess.PIPE, text=True)
    file = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (file.is_file() and read_steps(file)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children(recursive=True)
    (stopped,) = [child for child in ranks if child.environ().get("RANK") == "1"]
    stopped.suspend()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    assert "no progress for 3 s: rank 1 does not answer" in stderr
    assert not stopped.is_running()


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_kills_at_random_moments_of_a_save_never_cost_more_than_the_steps_since_the_last(
    tiny_config: MakeConfig, tmp_path: Path, in_background: bool
) -> None:
    """15 times kill -9: each start goes on from the newest checkpoint, which no kill leaves broken.

    In the background one may still be written when the next is due, which then waits for it.
    """
    checkpoint = {"every_steps": 2, "keep_last": 1, "in_background": in_background}
    save_config(tiny_config(train={"num_steps": 100_000}, checkpoint=checkpoint), tmp_path / "run.yaml")
    command = [sys.executable, "-m", "tests.killed_saves", str(tmp_path / "run.yaml"), "15"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout.splitlines()[-1])
    assert len(kills) == 15
    assert all(kill["killed"] for kill in kills)
    assert all(kill["last_step"] - kill["newest"] <= (4 if in_background else 2) for kill in kills)
    for before, after in itertools.pairwise(kills):
        assert after["resumed"] == [before["newest"]]
    assert "broken" not in done.stderr
    # The kills did hit saves.
    assert sum(bool(kill["unfinished"]) for kill in kills) >= 3
