"""`report.html`: one file that opens from disk, with every picture inside."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from lex_pretrain.evaluate import findings, plots, tables
from lex_pretrain.evaluate.results import Results
from lex_pretrain.files import write_text

REPORT_FILE = "report.html"


@dataclass(frozen=True)
class TrainingRecord:
    """A training run to show beside the results: the steps of its `metrics.jsonl`, and where it was resumed."""

    name: str
    steps: Sequence[dict[str, Any]]
    resumed_steps: Sequence[int]


@dataclass(frozen=True)
class Picture:
    """A PNG beside the report, and its words."""

    file: Path
    caption: str

    @property
    def data_uri(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.file.read_bytes()).decode()


def write_report(
    title: str,
    all_results: Sequence[Results],
    output: Path,
    training: Sequence[TrainingRecord] = (),
    notes: Sequence[str] = (),
    commands: Sequence[str] = (),
) -> Path:
    """Write the PNGs and the report of one or several models into `output`; returns the report's path.

    `notes` are the caller's own sentences, such as what a resumption showed; `commands` made the results.
    """
    output.mkdir(parents=True, exist_ok=True)
    environment = Environment(
        loader=PackageLoader("lex_pretrain.evaluate"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    first_table, *other_tables = tables.all_tables(all_results)
    html = environment.get_template("report.html").render(
        title=title,
        findings=findings.describe_all(all_results),
        notes=notes,
        pictures=_pictures(all_results, training, output),
        first_table=first_table,
        other_tables=other_tables,
        models=all_results,
        commands=commands or [results.command for results in all_results],
        versions=all_results[0].versions,
        protocols=dict.fromkeys(results.protocol_text for results in all_results),
    )
    write_text(output / REPORT_FILE, html)
    return output / REPORT_FILE


def _pictures(all_results: Sequence[Results], training: Sequence[TrainingRecord], output: Path) -> list[Picture]:
    """Those that there is something to show in."""
    pictures = [
        Picture(
            plots.plot_perplexity(all_results, output / "perplexity.png"),
            "Perplexity at each length. Bars are 95 % bootstrap intervals of the change from the training length, each "
            "document paired with itself.",
        )
    ]
    if training:
        curves = {record.name: record.steps for record in training}
        resumed = [step for record in training for step in record.resumed_steps]
        file = plots.plot_training(curves, resumed, output / "training.png")
        pictures.append(Picture(file, "Training loss of every step."))
    if any(results.by_position for results in all_results):
        file = plots.plot_positions(all_results, output / "by_position.png")
        pictures.append(Picture(file, "Mean loss by place in the longest piece, in bins that double in width."))
    if any(results.resolution for results in all_results):
        file = plots.plot_resolution(all_results, output / "resolution.png")
        pictures.append(
            Picture(file, "Attention score by distance: what the scheme alone gives, and what each layer learnt.")
        )
    if any(results.retrieval for results in all_results):
        file = plots.plot_retrieval(all_results, output / "retrieval.png")
        pictures.append(Picture(file, "Percent of answer tokens found again, by depth and length."))
    file = plots.plot_speed(all_results, output / "speed.png")
    pictures.append(Picture(file, "What each length costs."))
    return pictures
