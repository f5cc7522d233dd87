"""Pictures of results, each a PNG made from `results.json` and `metrics.jsonl` alone."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from lex_pretrain.evaluate.intervals import paired_change
from lex_pretrain.evaluate.results import Results, RetrievalRecord, ScoringMode, distinct_labels

matplotlib.use("Agg")

# Okabe and Ito's colours, told apart by all common kinds of colour vision.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# An attention is told by its line and marker alone, so that colour is left for the model.
_STYLES: dict[str, dict[str, Any]] = {
    "causal": {"ls": "--", "marker": "o"},
    "blockwise": {"ls": "-", "marker": "s"},
    "sliding": {"ls": "-.", "marker": "^"},
    "sinks": {"ls": ":", "marker": "v"},
    "strided": {"ls": (0, (6, 1, 1, 1)), "marker": "D"},
    "chunks": {"ls": (0, (1, 2)), "marker": "x"},
}
_WIDTH_INCHES = 7.0
_FONT = {"font.size": 11, "axes.titlesize": 12}


def _figure(num_rows: int = 1, height: float = 4.4) -> tuple[Any, list[Any]]:
    """One panel a row: side by side they would be unreadable on a phone."""
    from matplotlib import pyplot

    with pyplot.rc_context(_FONT):
        figure, axes = pyplot.subplots(
            num_rows, 1, figsize=(_WIDTH_INCHES, height * num_rows), dpi=160, layout="constrained", squeeze=False
        )
    panels = list(axes[:, 0])
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(file)
    pyplot.close(figure)
    return file


def _models(all_results: Sequence[Results]) -> Iterator[tuple[str, str, Results]]:
    """Colour, label and results of each model."""
    return zip(itertools.cycle(_COLORS), distinct_labels(all_results), all_results, strict=False)


def _lines(all_results: Sequence[Results]) -> Iterator[tuple[dict[str, Any], Results, ScoringMode]]:
    """How to draw each attention of each model. Colour tells models apart, or the attentions of a single one."""
    for color, label, results in _models(all_results):
        for mode_color, mode in zip(itertools.cycle(_COLORS), results.attentions, strict=False):
            shown = mode_color if len(all_results) == 1 else color
            yield {"color": shown, "label": f"{label}, {mode}", "ms": 4.5, **_STYLES[mode]}, results, mode


def _length_axis(axes: Any, lengths: Sequence[int], label: str) -> None:
    """A doubling a step; every other step is labelled where they are many."""
    steps = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps[:: 1 + len(steps) // 9])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def _mark_training_length(axes: Any, all_results: Sequence[Results]) -> None:
    for length in sorted({results.training_length for results in all_results}):
        axes.axvline(length, color="#888888", lw=1)
        axes.annotate(
            f"trained at {length:,}",
            (length, 0.99),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color="#555555",
        )


def plot_perplexity(all_results: Sequence[Results], file: Path) -> Path:
    """Perplexity against length: a line for every model and attention, with intervals of its change."""
    figure, (axes,) = _figure(height=5.0)
    lengths = [record.length for results in all_results for record in results.perplexity]
    trained = {results.training_length for results in all_results}
    for shift, (style, results, mode) in enumerate(_lines(all_results)):
        records = results.curve(mode)
        base = next((record for record in records if record.length in trained), records[0])
        changes = np.array([paired_change(base.document_nll, record.document_nll) for record in records])
        value, low, high = base.perplexity * (1 + changes.T)
        # Lines stand a little beside each other, so that their intervals can be told apart.
        axes.errorbar(
            [record.length * 1.03**shift for record in records],
            value,
            yerr=[value - low, high - value],
            elinewidth=0.9,
            capsize=2,
            ecolor=(style["color"], 0.6),
            **style,
        )
    _mark_training_length(axes, all_results)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    _length_axis(axes, lengths, "length in tokens")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title("Perplexity against length, on held-out documents")
    axes.legend(frameon=False, fontsize=10)
    return _save(figure, file)


def plot_training(curves: dict[str, Sequence[dict[str, Any]]], resumed_steps: Sequence[int], file: Path) -> Path:
    """Training loss by step, from the steps of `metrics.jsonl`; resumptions are marked."""
    figure, (axes,) = _figure()
    # Twins train nearly alike: dashes keep the line below in sight.
    looks = zip(itertools.cycle(_COLORS), itertools.cycle(("-", "--", "-.", ":")), curves.items(), strict=False)
    for color, line, (name, steps) in looks:
        losses = [step["loss"] for step in steps]
        axes.plot([step["step"] for step in steps], losses, line, color=color, label=name, lw=1.2)
    for number, step in enumerate(sorted(set(resumed_steps))):
        axes.axvline(step, color="#888888", ls=":", label="stopped and resumed" if number == 0 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats a token)")
    axes.set_title("Training")
    axes.legend(frameon=False)
    return _save(figure, file)


def plot_positions(all_results: Sequence[Results], file: Path) -> Path:
    """Loss by the place in the longest piece."""
    figure, (axes,) = _figure()
    edges = [1]
    for style, results, mode in _lines(all_results):
        records = [record for record in results.by_position if record.attention == mode]
        edges += [record.stop for record in records]
        places = [max(1.0, (record.start + record.stop) / 2) for record in records]
        axes.plot(places, [record.nll for record in records], **style)
    _mark_training_length(axes, all_results)
    _length_axis(axes, edges, "place in the longest piece, in tokens")
    axes.set_ylabel("loss (nats a token)")
    axes.set_title("Loss by place")
    axes.legend(frameon=False, fontsize=10)
    return _save(figure, file)


def plot_resolution(all_results: Sequence[Results], file: Path) -> Path:
    """Attention score by distance: expected of the scheme, and measured in each layer."""
    figure, (theory, measured) = _figure(num_rows=2, height=3.8)
    for color, label, results in _models(all_results):
        num_layers = results.num_layers
        for record in results.resolution:
            if record.attention != "causal" or len(record.distances) < 2:
                continue
            distances = [max(distance, 0.7) for distance in record.distances]
            if record.layer is None:
                shares = [score / record.scores[0] for score in record.scores]
                theory.plot(distances, shares, color=color, lw=1.2, label=label)
                continue
            measured.plot(
                distances,
                record.scores,
                color=color,
                lw=1.2,
                alpha=0.35 + 0.65 * record.layer / num_layers,
                label=f"{label}, each layer (later ones darker)" if record.layer == num_layers - 1 else None,
            )
    theory.set_title("Expected score of the scheme, as a share of that at distance 0")
    measured.set_title("Measured mean score before the softmax")
    for axes in (theory, measured):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_xlabel("distance in tokens")
        _mark_training_length(axes, all_results)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=10)
        else:
            axes.text(0.5, 0.5, "no scheme here has one", transform=axes.transAxes, ha="center", color="#555555")
    return _save(figure, file)


def plot_retrieval(all_results: Sequence[Results], file: Path) -> Path:
    """Heat maps of the share of right answer tokens: depth by length, one for each model, attention and task."""
    from matplotlib import pyplot

    groups: dict[str, list[RetrievalRecord]] = {}
    for _, label, results in _models(all_results):
        for record in results.retrieval:
            groups.setdefault(f"{label}, {record.attention}: {record.task}", []).append(record)
    num_rows = -(-len(groups) // 2)
    with pyplot.rc_context(_FONT):
        figure, grid = pyplot.subplots(
            num_rows, 2, figsize=(_WIDTH_INCHES, 2.1 * num_rows), dpi=160, layout="constrained", squeeze=False
        )
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, (title, records) in zip(grid.flat, groups.items(), strict=False):
        lengths = sorted({record.length for record in records})
        depths = sorted({record.depth for record in records})
        share = np.full((len(depths), len(lengths)), np.nan)
        for record in records:
            share[depths.index(record.depth), lengths.index(record.length)] = record.accuracy
        axes.imshow(share, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for row, column in np.ndindex(share.shape):
            value = share[row, column]
            color = "black" if value > 0.6 else "white"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color=color)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8, rotation=45)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=8)
        axes.set_title(title, fontsize=10)
    figure.supxlabel("length in tokens", fontsize=10)
    figure.supylabel("where it was said (0 % = first)", fontsize=10)
    return _save(figure, file)


def plot_speed(all_results: Sequence[Results], file: Path) -> Path:
    """Tokens a second and peak memory of one process against length."""
    figure, (speed, memory) = _figure(num_rows=2, height=3.6)
    lengths = [record.length for results in all_results for record in results.perplexity]
    for style, results, mode in _lines(all_results):
        records = results.curve(mode)
        x = [record.length for record in records]
        speed.plot(x, [record.tokens_per_second for record in records], **style)
        memory.plot(x, [record.peak_memory_bytes / 2**30 for record in records], **style)
    speed.set_ylabel("tokens a second")
    speed.set_title("Scoring speed of one process")
    memory.set_ylabel("GiB")
    memory.set_title("Peak memory of one process")
    for axes in (speed, memory):
        _length_axis(axes, lengths, "length in tokens")
        axes.set_ylim(bottom=0)
    speed.legend(frameon=False, fontsize=10)
    return _save(figure, file)
