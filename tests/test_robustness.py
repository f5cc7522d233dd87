"""Training through what goes wrong: numbers that are not finite, spikes, full disks, hangs, kills."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from tests import skipping

MakeConfig = Callable[..., Config]
ROOT = Path(__file__).parent.parent


def on_two_processes(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", "--nproc-per-node", "2", "--module", module]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_an_infinite_gradient_of_one_rank_changes_nothing_on_any_rank(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """At ZeRO 0 to 3: weights, moments and step counters then equal those of a run that leaves the step out."""
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
