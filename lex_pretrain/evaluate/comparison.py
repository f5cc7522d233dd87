"""Several evaluations side by side: `table.md` and one report."""

from collections.abc import Sequence
from pathlib import Path

from lex_pretrain.evaluate import findings, tables
from lex_pretrain.evaluate.report import TrainingRecord, write_report
from lex_pretrain.evaluate.results import Results, distinct_labels
from lex_pretrain.files import write_text
from lex_pretrain.monitor.metrics import METRICS_FILE, read_records, read_steps
from lex_pretrain.run_folder import CHECKPOINTS_FOLDER

TABLE_FILE = "table.md"


def compare(folders: Sequence[Path], output: Path, command: str) -> tuple[list[Results], Path]:
    """Write `table.md` and the report of the results in `folders`; returns the results and the report's path.

    Raises RequestError when a folder holds no results.
    """
    all_results = [Results.load(folder) for folder in folders]
    output.mkdir(parents=True, exist_ok=True)
    parts = ["# Comparison\n"]
    for heading, sentences in findings.describe_all(all_results):
        parts.append(f"## {heading}\n\n" + "".join(f"- {sentence}\n" for sentence in sentences))
    parts += [table.markdown() for table in tables.all_tables(all_results)]
    write_text(output / TABLE_FILE, "\n".join(parts))
    commands = [*dict.fromkeys(results.command for results in all_results), command]
    labels = distinct_labels(all_results)
    training = [
        record
        for label, results in zip(labels, all_results, strict=True)
        if (record := _training(label, Path(results.checkpoint))) is not None
    ]
    report = write_report(f"Comparison of {', '.join(labels)}", all_results, output, training, commands=commands)
    return all_results, report


def _training(label: str, checkpoint: Path) -> TrainingRecord | None:
    """The training of a checkpoint, where it still lies in its run's folder."""
    metrics = checkpoint.parent.parent / METRICS_FILE
    if checkpoint.parent.name != CHECKPOINTS_FOLDER or not metrics.is_file():
        return None
    resumed = [record["step"] for record in read_records(metrics) if record.get("event") == "resumed"]
    return TrainingRecord(label, read_steps(metrics), resumed)
