"""Pictures of results, each a PNG made from `results.json` and `metrics.jsonl` alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter, NullLocator

from lex_pretrain.evaluate.results import Results

matplotlib.use("Agg")

# Okabe and Ito's colours, told apart by all common kinds of colour vision.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINES = {"causal": "--", "blockwise": "-"}
_MARKERS = {"causal": "o", "blockwise": "s"}


def _figure() -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), dpi=144, layout="constrained")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(file)
    pyplot.close(figure)
    return file


def _length_axis(axes: Any, lengths: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(lengths)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def plot_perplexity(all_results: Sequence[Results], file: Path) -> Path:
    """Perplexity against length: a line for every model and attention, with its intervals."""
    figure, axes = _figure()
    lengths = [record.length for results in all_results for record in results.perplexity]
    shift = 0
    for color, results in zip(_COLORS, all_results, strict=False):
        for attention, line in _LINES.items():
            records = [record for record in results.perplexity if record.attention == attention]
            if not records:
                continue
            y = [record.perplexity for record in records]
            spread = [
                [record.perplexity - record.ci95[0] for record in records],
                [record.ci95[1] - record.perplexity for record in records],
            ]
            # Lines stand a little beside each other, so that their intervals can be told apart.
            axes.errorbar(
                [record.length * 1.035**shift for record in records],
                y,
                yerr=spread,
                fmt=line,
                marker=_MARKERS[attention],
                color=color,
                label=f"{results.position}, {attention}",
                markersize=4,
                elinewidth=0.6,
                ecolor=(color, 0.45),
            )
            shift += 1
    _mark_training_length(axes, all_results)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _length_axis(axes, lengths, "length in tokens")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title("Perplexity against length, on documents that training never saw")
    axes.legend(frameon=False)
    return _save(figure, file)


def plot_training(curves: dict[str, Sequence[dict[str, Any]]], resumed_steps: Sequence[int], file: Path) -> Path:
    """Training loss by step, from the steps of `metrics.jsonl`; resumptions are marked."""
    figure, axes = _figure()
    for color, (name, steps) in zip(_COLORS, curves.items(), strict=False):
        axes.plot([step["step"] for step in steps], [step["loss"] for step in steps], color=color, label=name, lw=1.2)
    for number, step in enumerate(sorted(set(resumed_steps))):
        axes.axvline(step, color="#888888", ls=":", label="stopped and resumed" if number == 0 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats a token)")
    axes.set_title("Training")
    axes.legend(frameon=False)
    return _save(figure, file)


def plot_positions(all_results: Sequence[Results], file: Path) -> Path:
    """Loss by the place in the longest piece."""
    figure, axes = _figure()
    edges = [1]
    for color, results in zip(_COLORS, all_results, strict=False):
        for attention, line in _LINES.items():
            records = [record for record in results.by_position if record.attention == attention]
            if records:
                edges += [record.stop for record in records]
                x = [max(1.0, (record.start + record.stop) / 2) for record in records]
                y = [record.nll for record in records]
                axes.plot(x, y, line, marker=".", color=color, label=f"{results.position}, {attention}")
    _mark_training_length(axes, all_results)
    _length_axis(axes, edges, "place in the piece, in tokens")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("loss (nats a token)")
    axes.set_title("Loss by place")
    axes.legend(frameon=False)
    return _save(figure, file)


def plot_resolution(all_results: Sequence[Results], file: Path) -> Path:
    """Attention score by distance: expected of the scheme, and measured in each layer."""
    from matplotlib import pyplot

    figure, (theory, measured) = pyplot.subplots(1, 2, figsize=(11, 4.6), dpi=144, layout="constrained")
    for color, results in zip(_COLORS, all_results, strict=False):
        for record in results.resolution:
            if record.attention != "causal" or len(record.distances) < 2:
                continue
            axes = theory if record.kind == "theory" else measured
            scores = [score / record.scores[0] for score in record.scores] if axes is theory else record.scores
            first = record.layer in (None, 0)
            axes.plot(
                [max(distance, 0.7) for distance in record.distances],
                scores,
                color=color,
                lw=1.2,
                alpha=1.0 if record.layer is None else 0.4 + 0.15 * min(record.layer, 4),
                label=(results.position if axes is theory else f"{results.position}, each layer") if first else None,
            )
    titled = {
        theory: "Expected score, as a share of that at distance 0",
        measured: "Measured mean score before the softmax",
    }
    for axes, title in titled.items():
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("distance in tokens")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        _mark_training_length(axes, all_results)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    return _save(figure, file)


def plot_speed(all_results: Sequence[Results], file: Path) -> Path:
    """Tokens a second against length."""
    figure, axes = _figure()
    lengths = [record.length for results in all_results for record in results.perplexity]
    for color, results in zip(_COLORS, all_results, strict=False):
        for attention, line in _LINES.items():
            records = [record for record in results.perplexity if record.attention == attention]
            x, y = [record.length for record in records], [record.tokens_per_second for record in records]
            axes.plot(
                x, y, line, marker=_MARKERS[attention], color=color, label=f"{results.position}, {attention}", ms=4
            )
    _length_axis(axes, lengths, "length in tokens")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens a second")
    axes.set_title("Scoring speed")
    axes.legend(frameon=False)
    return _save(figure, file)


def _mark_training_length(axes: Any, all_results: Sequence[Results]) -> None:
    for length in sorted({results.training_length for results in all_results}):
        axes.axvline(length, color="#888888", lw=1)
        axes.annotate(
            f"trained at {length:,}",
            (length, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color="#555555",
        )
