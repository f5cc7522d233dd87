"""The whole pipeline on this machine: prepare, train two models with a kill and a resumption, evaluate, report.

Every stage runs the command that a user would run, and the report lists those commands.
"""

import contextlib
import hashlib
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lex_pretrain.config import Config, Precision
from lex_pretrain.config_io import save_config
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.evaluate.report import TrainingRecord, write_report
from lex_pretrain.evaluate.results import Results
from lex_pretrain.evaluate.tables import summary_table
from lex_pretrain.files import read_json, write_json
from lex_pretrain.hardware import choose_num_processes, choose_precision
from lex_pretrain.monitor.metrics import METRICS_FILE, read_records, read_steps
from lex_pretrain.progress import console, logger

POSITIONS = ("xpos", "rope")
TRAINING_LENGTH = 128
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
NUM_DOCUMENTS = 8
VOCAB_SIZE = 4096
GLOBAL_BATCH_SIZE = 16
CORPUS_BYTES = 48 * 2**20
CALIBRATION_STEPS = 12
# Steps past the checkpoint at which training is killed; the resumed run repeats them.
REPEATED_STEPS = 5
# On a GPU the order of sums may vary; a resumption that lost something differs by far more.
LARGEST_LOSS_DIFFERENCE = 0.02
JOB_FILE = "quickstart.json"


@dataclass(frozen=True)
class Resumption:
    """What a kill half way and the resumption from the last checkpoint showed."""

    killed_after_step: int
    checkpoint_step: int
    num_repeated_steps: int
    largest_difference: float

    @property
    def continued(self) -> bool:
        """Whether the steps that were run twice, before the kill and after the resumption, gave the same losses."""
        return self.num_repeated_steps > 0 and self.largest_difference <= LARGEST_LOSS_DIFFERENCE

    def sentence(self, name: str) -> str:
        verdict = "the resumed loss curve continued" if self.continued else "the resumed run went another way"
        equal = "bit for bit the same losses" if self.largest_difference == 0 else "losses that differ by at most "
        shown = "" if self.largest_difference == 0 else f"{self.largest_difference:.1e}"
        return (
            f"{name}: rank 0 was killed (SIGKILL) after step {self.killed_after_step} and the run resumed from the "
            f"checkpoint of step {self.checkpoint_step}; the {self.num_repeated_steps} steps that were run twice gave "
            f"{equal}{shown}: {verdict}."
        )


def run_quickstart(output: Path, minutes: float) -> Path:
    """Run every stage into `output` and return the report's path. Finished stages are kept when it is run again."""
    started = time.monotonic()
    precision, precision_reason = _precision(output)
    num_processes, processes_reason = choose_num_processes()
    logger.info("precision %s: %s", precision, precision_reason)
    logger.info("%d processes: %s", num_processes, processes_reason)
    output.mkdir(parents=True, exist_ok=True)
    _check_same_request(output, {"minutes": minutes, "precision": precision, "num_processes": num_processes})
    data = output / "data"
    commands = [_prepare(output, data)]
    num_steps = _choose_num_steps(output, data, precision, num_processes, minutes)
    training, notes = [], []
    for position in POSITIONS:
        config = _config(output / position, data, position, precision, num_steps)
        file = output / f"{position}.yaml"
        save_config(config, file)
        command = ["launch", "--num-processes", str(num_processes), "--", "train", "--config", str(file)]
        commands.append(_shown(command))
        resumption = _train_with_kill(command, Path(config.run.output_dir), num_steps)
        notes.append(resumption.sentence(position))
        if not resumption.continued:
            raise JobError(notes[-1])
        steps = read_steps(Path(config.run.output_dir) / METRICS_FILE)
        training.append(TrainingRecord(position, steps, [resumption.checkpoint_step]))
    for position in POSITIONS:
        command = _evaluate_command(output, data, position)
        commands.append(_shown(command))
        _run(command)
    all_results = [Results.load(output / f"{position}-evaluation") for position in POSITIONS]
    notes += [f"precision {precision}: {precision_reason}", f"{num_processes} processes: {processes_reason}"]
    report = write_report(
        "LeX (xPos) and RoPE past their training length", all_results, output, training, notes, commands
    )
    for note in notes[: len(POSITIONS)]:
        logger.info(note)
    console.print(summary_table(all_results))
    logger.info("done in %.1f minutes; report: %s", (time.monotonic() - started) / 60, report)
    return report


def _precision(output: Path) -> tuple[Precision, str]:
    """The precision of the quickstart in `output`, or for a new one what suits this machine, and why."""
    file = output / JOB_FILE
    if file.is_file():
        return read_json(file)["precision"], "as this quickstart began"
    return choose_precision()


def _check_same_request(output: Path, request: dict[str, Any]) -> None:
    """A folder serves one request: finished stages of another would be mixed in unseen."""
    file = output / JOB_FILE
    if file.is_file():
        if (old := read_json(file)) != request:
            raise RequestError(f"{output} holds a quickstart of other settings ({old}); choose another --output")
        return
    if others := sorted(path.name for path in output.iterdir()):
        raise RequestError(f"{output} holds something else ({', '.join(others[:3])}); choose another --output")
    write_json(file, request)


def _prepare(output: Path, data: Path) -> str:
    """Copy Python sources of this machine into one folder and prepare it; returns the command."""
    corpus = output / "corpus"
    if not corpus.is_dir():
        copy_sources(corpus)
    command = ["prepare", str(corpus), "--output", str(data), "--vocab-size", str(VOCAB_SIZE)]
    command += ["--validation-fraction", "0.02", "--test-fraction", "0.1", "--unit-bytes", str(4 * 2**20)]
    _run(command)
    return _shown(command)


def copy_sources(corpus: Path) -> None:
    """The standard library's and then the installed packages' `.py` files, as many as fit, long ones kept whole.

    Under names of their content's hash, so that each text is there once.
    """
    paths = sysconfig.get_paths()
    library, packages = Path(paths["stdlib"]), Path(paths["purelib"])
    temporary = corpus.with_name(".corpus.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    num_bytes = 0
    for file in (*_python_files(library, leave_out="site-packages"), *_python_files(packages, leave_out="")):
        text = file.read_bytes()
        if num_bytes + len(text) > CORPUS_BYTES:
            break
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        (temporary / f"{hashlib.sha256(text).hexdigest()[:32]}.py").write_bytes(text)
        num_bytes += len(text)
    temporary.rename(corpus)
    logger.info("collected %.1f MB of Python sources", num_bytes / 1e6)


def _python_files(root: Path, leave_out: str) -> list[Path]:
    files = sorted(file for file in root.rglob("*.py") if not leave_out or leave_out not in file.parts)
    return [file for file in files if file.is_file()]


def _config(output_dir: Path, data: Path, position: str, precision: str, num_steps: int) -> Config:
    """The twin models differ in `model.position` alone."""
    return Config.model_validate(
        {
            "run": {"output_dir": str(output_dir)},
            "data": {"path": str(data)},
            "model": {
                "position": position,
                "num_layers": 4,
                "hidden_size": 192,
                "num_heads": 6,
                "sequence_length": TRAINING_LENGTH,
            },
            "train": {"num_steps": num_steps, "global_batch_size": GLOBAL_BATCH_SIZE, "precision": precision},
            "optimizer": {"learning_rate": 4e-3, "weight_decay": 0.05},
            "schedule": {"warmup_steps": max(1, min(40, num_steps // 10))},
            "zero": {"stage": 1},
            # Steps of milliseconds would be over before a checkpoint in the background is on the disk.
            "checkpoint": {"every_steps": max(1, num_steps // 2), "in_background": False},
            "monitor": {"log_every_steps": 50, "wandb_mode": "disabled"},
        }
    )


def _choose_num_steps(output: Path, data: Path, precision: str, num_processes: int, minutes: float) -> int:
    """As many steps as fit the budget, by a short run of the real thing on this machine."""
    file = output / "calibration.json"
    if not file.is_file():
        folder = output / "calibration"
        shutil.rmtree(folder, ignore_errors=True)
        config = _config(folder, data, POSITIONS[0], precision, CALIBRATION_STEPS)
        save_config(config, output / "calibration.yaml")
        started = time.monotonic()
        arguments = ["launch", "--num-processes", str(num_processes), "--", "train", "--config"]
        _run([*arguments, str(output / "calibration.yaml")])
        step_seconds = [step["step_seconds"] for step in read_steps(folder / METRICS_FILE)]
        measured = {
            "step_seconds": statistics.median(step_seconds[CALIBRATION_STEPS // 3 :]),
            "start_seconds": max(0.0, time.monotonic() - started - sum(step_seconds)),
        }
        write_json(file, measured)
        shutil.rmtree(folder)
    measured = read_json(file)
    # Each model is started twice: at the beginning, and after the kill.
    seconds = minutes * 60 / len(POSITIONS) - 2 * measured["start_seconds"]
    num_steps = max(4 * REPEATED_STEPS, int(seconds / measured["step_seconds"]))
    tokens_per_step = GLOBAL_BATCH_SIZE * TRAINING_LENGTH
    largest = 4 * TokenDataset.open(data).num_tokens // tokens_per_step
    num_steps = min(num_steps, largest)
    logger.info(
        "%.2f s a step and %.0f s a start: %d steps for each model fit %.1f minutes",
        measured["step_seconds"],
        measured["start_seconds"],
        num_steps,
        minutes,
    )
    return num_steps


def _train_with_kill(command: list[str], run: Path, num_steps: int) -> Resumption:
    """Train to the end, killed half way, some steps after a checkpoint, and started again."""
    metrics = run / METRICS_FILE
    kill_at = num_steps // 2 + REPEATED_STEPS
    if _last_step(metrics) < kill_at:
        process = subprocess.Popen([sys.executable, "-m", "lex_pretrain", *command])
        try:
            while process.poll() is None and _last_step(metrics) < kill_at:
                time.sleep(0.05)
            _kill_rank_0(process)
            code = process.wait()
        finally:
            process.terminate()
            process.wait()
        if code != 128 + signal.SIGKILL:
            raise JobError(f"`{_shown(command)}` ended with {code} where its rank 0 was to be killed")
    if _last_step(metrics) < num_steps:
        _run(command)
    return _compare_repeated_steps(read_records(metrics))


def _kill_rank_0(launcher: "subprocess.Popen[bytes]") -> None:
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == "0":
                logger.info("killing rank 0 (process %d), to resume from its last checkpoint", process.pid)
                process.kill()


def _compare_repeated_steps(records: list[dict[str, Any]]) -> Resumption:
    """The losses of the same steps on both sides of the record of the resumption."""
    resumed = next((index for index, record in enumerate(records) if record.get("event") == "resumed"), None)
    if resumed is None:
        raise JobError("metrics.jsonl shows no resumption")
    before, after = (
        {r["step"]: r["loss"] for r in part if "event" not in r} for part in (records[:resumed], records[resumed:])
    )
    differences = [abs(before[step] - after[step]) for step in before.keys() & after.keys()]
    return Resumption(
        killed_after_step=max(before),
        checkpoint_step=records[resumed]["step"],
        num_repeated_steps=len(differences),
        largest_difference=max(differences, default=0.0),
    )


def _last_step(metrics: Path) -> int:
    steps = read_steps(metrics) if metrics.is_file() else []
    return int(steps[-1]["step"]) if steps else 0


def _evaluate_command(output: Path, data: Path, position: str) -> list[str]:
    return [
        *("evaluate", str(output / position), "--data", str(data)),
        *("--lengths", ",".join(map(str, LENGTHS)), "--attention", "causal,blockwise"),
        *(
            "--max-documents",
            str(NUM_DOCUMENTS),
            "--retrieval-trials",
            "0",
            "--output",
            str(output / f"{position}-evaluation"),
        ),
    ]


def _shown(command: list[str]) -> str:
    return shlex.join(["lex-pretrain", *command])


def _run(command: list[str]) -> None:
    logger.info("$ %s", _shown(command))
    code = subprocess.run([sys.executable, "-m", "lex_pretrain", *command], check=False).returncode
    if code != 0:
        raise JobError(f"`{_shown(command)}` ended with {code}; its own message stands above")
