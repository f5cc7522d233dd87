"""The command line: the one place that knows all rooms. Each command imports what it needs when it runs."""

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from lex_pretrain import __version__
from lex_pretrain.errors import LexError, RequestError, StoppedError
from lex_pretrain.progress import configure_logging, logger

app = typer.Typer(
    help="Distributed pretraining of the LeX (length-extrapolatable) Transformer.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="dotted overrides of the config, such as model.hidden_size=512"),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks and debug messages")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    configure_logging(debug)


@app.command()
def quickstart(
    output: Annotated[Path, typer.Option(help="folder for shards, runs and the report")] = Path("quickstart"),
    minutes: Annotated[float, typer.Option(min=0.1, help="time budget of the training, both models together")] = 4.5,
) -> None:
    """Prepare, train, evaluate and report on this machine, from Python sources already on it."""
    from lex_pretrain.quickstart import run_quickstart

    run_quickstart(output, minutes)


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML config of the run")],
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(metavar="STEP|PATH|never", help="start there instead of where the run stands")
    ] = None,
) -> None:
    """Train; goes on by itself if the output folder holds a run of the same config."""
    from lex_pretrain.config_io import load_config
    from lex_pretrain.train.trainer import train

    train(load_config(config, overrides or []), resume)


def main() -> None:
    """Run the command; errors become one message on stderr and the exit code that docs/cli.md promises."""
    debug = "--debug" in sys.argv
    try:
        app()
    except LexError as error:
        # Every rank meets a wrong request or a stop alike; one message is enough.
        if os.environ.get("RANK", "0") == "0" or not isinstance(error, RequestError | StoppedError):
            _say(error, debug)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _say(error, debug)
        sys.exit(1)


def _say(error: Exception, debug: bool) -> None:
    if not logger.handlers:
        configure_logging(debug)
    if debug:
        traceback.print_exception(error)
    expected = isinstance(error, LexError)
    message = str(error) if expected else f"{type(error).__name__}: {error} (run with --debug for the traceback)"
    rank = os.environ.get("RANK")
    where = f" on rank {rank}" if rank not in (None, "0") else ""
    label = "" if isinstance(error, StoppedError) else f"error{where}: "
    logger.log(logging.INFO if isinstance(error, StoppedError) else logging.ERROR, "%s%s", label, message)
