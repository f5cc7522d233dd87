"""The command line: the one place that knows all rooms. Each command imports what it needs when it runs."""

import codecs
import locale
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args

import typer
from pydantic import BaseModel, ValidationError
from typer.main import get_command

from lex_pretrain import __version__
from lex_pretrain.config import Config
from lex_pretrain.ending import leave, run_command
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.progress import configure_logging, console, logger

if TYPE_CHECKING:
    from launch.training import Training

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
TrainedModel = Annotated[
    Path,
    typer.Argument(metavar="RUN_OR_CHECKPOINT", help="folder of a run, of one checkpoint, or of an export"),
]

Model = TypeVar("Model", bound=BaseModel)


def _validated(kind: type[Model], **values: Any) -> Model:
    """The options of a command; a value out of range is a wrong request that names its flag."""
    try:
        return kind(**values)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            flag = f"--{str(fault['loc'][0]).replace('_', '-')}: " if fault["loc"] else ""
            faults.append(flag + fault["msg"].removeprefix("Value error, "))
        raise RequestError("\n".join(faults)) from None


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
    minutes: Annotated[float, typer.Option(min=0.1, help="time budget of the training, both models together")] = 4.0,
) -> None:
    """Prepare, train, evaluate and report on this machine, from Python sources already on it."""
    from lex_pretrain.quickstart import run_quickstart

    run_quickstart(output, minutes)


@app.command()
def prepare(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="files, folders, globs, or hf://NAME[:CONFIG][@SPLIT]")
    ],
    output: Annotated[Path, typer.Option(help="dataset folder to make")],
    vocab_size: Annotated[int, typer.Option(help="pieces of the tokenizer to train")] = 32_000,
    tokenizer: Annotated[Path | None, typer.Option(help="SentencePiece .model to use instead of training one")] = None,
    text_key: Annotated[
        str, typer.Option(help="key of the text in .jsonl, .json, .parquet, .csv, .tsv; meta.text reaches inside")
    ] = "text",
    validation_fraction: Annotated[float, typer.Option(help="share of documents held out for validation")] = 0.005,
    test_fraction: Annotated[float, typer.Option(help="share of documents held out for testing")] = 0.005,
    max_rejected: Annotated[
        str, typer.Option(help="stop when more of the records are faulty, such as 1% or 0.01")
    ] = "1%",
    skip_bad_files: Annotated[
        bool, typer.Option("--skip-bad-files", help="leave out what cannot be read of a file, and go on")
    ] = False,
    on_unknown: Annotated[
        str, typer.Option(metavar="error|skip", help="what to do about files whose names say no format that is read")
    ] = "error",
    separator: Annotated[
        str | None, typer.Option(help="line that separates the documents of a text file; a file is one if not given")
    ] = None,
    min_document_bytes: Annotated[int, typer.Option(min=0, help="reject shorter documents")] = 0,
    max_document_bytes: Annotated[int, typer.Option(min=1, help="reject longer documents")] = 256 * 2**20,
    reject_pattern: Annotated[
        str | None, typer.Option(help="reject documents in which this regular expression is found")
    ] = None,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="keep documents of exactly the same text")
    ] = False,
    near_duplicate_similarity: Annotated[
        float | None, typer.Option(help="reject a document as similar as this to an earlier one, such as 0.8")
    ] = None,
    decontaminate: Annotated[
        list[str] | None,
        typer.Option(help="evaluation files; reject documents that share long runs of words with them"),
    ] = None,
    decontaminate_words: Annotated[
        int, typer.Option(min=1, help="words in a row that count as shared; a Chinese letter is half a word")
    ] = 13,
    character_coverage: Annotated[
        float, typer.Option(help="share of the sample's characters that become pieces; rarer ones are written in bytes")
    ] = 0.9999,
    allow_lossy_tokenizer: Annotated[
        bool, typer.Option("--allow-lossy-tokenizer", help="go on with a tokenizer that does not give texts back")
    ] = False,
    tokenizer_sample_bytes: Annotated[int, typer.Option(help="text that the tokenizer is trained on")] = 64 * 2**20,
    seed: Annotated[int, typer.Option(help="seed of the tokenizer's sample")] = 1,
    unit_bytes: Annotated[int, typer.Option(help="input bytes that become one shard of each split")] = 64 * 2**20,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; all cores if not given")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print the manifest's account as JSON on stdout")] = False,
) -> None:
    """Turn text into token shards. Under `mpiexec -n K` the work spreads over all K processes."""
    from data_prep.options import PrepareOptions
    from data_prep.prepare import prepare
    from data_prep.sources import OnUnknown

    try:
        share = float(max_rejected.removesuffix("%")) / (100 if max_rejected.endswith("%") else 1)
    except ValueError:
        raise RequestError(f"--max-rejected {max_rejected} is neither a percentage nor a share") from None
    options = _validated(
        PrepareOptions,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        text_key=text_key,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        max_rejected=share,
        skip_bad_files=skip_bad_files,
        separator=separator,
        min_document_bytes=min_document_bytes,
        max_document_bytes=max_document_bytes,
        reject_pattern=reject_pattern,
        keep_duplicates=keep_duplicates,
        near_duplicate_similarity=near_duplicate_similarity,
        decontaminate=tuple(decontaminate or ()),
        decontaminate_words=decontaminate_words,
        character_coverage=character_coverage,
        allow_lossy_tokenizer=allow_lossy_tokenizer,
        tokenizer_sample_bytes=tokenizer_sample_bytes,
        seed=seed,
        unit_bytes=unit_bytes,
    )
    if on_unknown not in get_args(OnUnknown):
        raise RequestError(f"--on-unknown {on_unknown} is neither error nor skip")
    manifest = prepare(inputs, output, options, workers, cast(OnUnknown, on_unknown))
    if json_output and manifest is not None:
        typer.echo(manifest.account.model_dump_json())


@app.command()
def verify_data(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="dataset folder made by `lex-pretrain prepare`")],
    full: Annotated[
        bool, typer.Option("--full", help="also decode documents and compare them with their sources")
    ] = False,
) -> None:
    """Prove a dataset: checksums, counts, the account, id ranges, document ends."""
    from data_prep.verify import verify

    faults = verify(folder, full)
    if faults:
        raise JobError("\n".join(faults))
    logger.info("%s is as its manifest says", folder)


@app.command()
def export_data(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="dataset folder made by `lex-pretrain prepare`")],
    output: Annotated[Path, typer.Option(help="folder that gets a .bin and an .idx of each split")],
) -> None:
    """Write a dataset as Megatron's indexed datasets; `prepare FILE.idx --tokenizer FILE.model` reads such."""
    from data_prep.megatron import write_indexed_datasets

    for file in write_indexed_datasets(folder, output):
        logger.info("%s", file)


@app.command()
def plan(
    config: Annotated[Path, typer.Option(help="YAML config of the run")],
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option(min=1, help="processes, each with a GPU of its own")] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.1, metavar="GIB", help="memory of one GPU; says which ZeRO stages fit")
    ] = None,
    mfu: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="share of the peak that the model's own operations reach")
    ] = 0.4,
    peak_tflops: Annotated[
        float, typer.Option(min=0.001, help="peak of one GPU in TFLOP/s; 989 is an H100's in bf16, 312 an A100's")
    ] = 989.0,
    devices_per_host: Annotated[int, typer.Option(min=1, help="GPUs of one host")] = 8,
    device_link: Annotated[
        float, typer.Option(min=0.001, metavar="GB/S", help="GB/s that a GPU sends within its host; NVLink of an H100")
    ] = 450.0,
    network: Annotated[
        float, typer.Option(min=0.001, metavar="GBIT/S", help="Gb/s that a host sends; 3200 is 8 cards of 400")
    ] = 3200.0,
    json_output: Annotated[bool, typer.Option("--json", help="print the plan as JSON on stdout")] = False,
) -> None:
    """Memory by ZeRO stage, FLOPs, traffic, disk and days of a run, before it costs anything."""
    from lex_pretrain.config_io import load_config
    from lex_pretrain.train.plan import make_plan
    from lex_pretrain.train.plan_table import plan_table
    from lex_pretrain.train.traffic import Links

    links = Links(devices_per_host, device_link * 1e9, network * 1e9 / 8)
    made = make_plan(load_config(config, overrides or []), world_size, mfu, peak_tflops, gpu_memory, links)
    if json_output:
        typer.echo(made.model_dump_json())
    else:
        console.print(plan_table(made))


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML config of the run")],
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(metavar="STEP|PATH|never", help="start there instead of where the run stands")
    ] = None,
    prove_resume: Annotated[
        int | None,
        typer.Option(
            metavar="K", help="train nothing; prove that K steps killed half way and resumed equal K straight"
        ),
    ] = None,
) -> None:
    """Train; goes on by itself if the output folder holds a run of the same config."""
    from lex_pretrain.config_io import load_config

    loaded = load_config(config, overrides or [])
    if prove_resume is not None:
        if resume is not None:
            raise RequestError("--prove-resume starts its own trainings, so it goes without --resume")
        from lex_pretrain.train.prove import prove_resume as prove

        prove(loaded, prove_resume)
        return
    from lex_pretrain.hardware import keep_freed_memory
    from lex_pretrain.train.run import train

    keep_freed_memory()
    train(loaded, resume)


@app.command()
def evaluate(
    run: TrainedModel,
    more_data: Annotated[list[str] | None, typer.Argument(metavar="", hidden=True)] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR_OR_FILES...", help="dataset folder, or what `prepare` reads: files, globs, hf://NAME"
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="lengths in tokens, separated by commas")] = "256,1024,4096",
    attention: Annotated[
        str,
        typer.Option(help="causal, blockwise, strided, chunks; strided and chunks are windows of full attention"),
    ] = "causal,blockwise",
    output: Annotated[Path, typer.Option(help="folder for results.json, report.html and pictures")] = Path(
        "evaluation"
    ),
    split: Annotated[str, typer.Option(help="split of a dataset folder to score")] = "test",
    text_key: Annotated[str, typer.Option(help="key of the text in .jsonl, .parquet, .csv")] = "text",
    max_documents: Annotated[int, typer.Option(min=1, help="documents to score at the most")] = 64,
    rope_scaling: Annotated[
        str | None, typer.Option(help="linear, ntk or yarn: stretch RoPE to the longest length, for comparison")
    ] = None,
    retrieval_trials: Annotated[int, typer.Option(min=0, help="trials of each retrieval task and depth")] = 4,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; that of the training if not given")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print results.json on stdout")] = False,
) -> None:
    """Perplexity against length on whole documents, retrieval and attention resolution, with a report."""
    from lex_pretrain.config import Precision
    from lex_pretrain.evaluate.evaluation import EvaluationRequest, evaluate
    from lex_pretrain.evaluate.report import write_report
    from lex_pretrain.evaluate.results import WindowMode
    from lex_pretrain.evaluate.tables import summary_table
    from lex_pretrain.model.positions import RopeScaling
    from lex_pretrain.model_config import AttentionMode

    if not data:
        raise RequestError("--data is missing: a dataset folder, or text files that the model was not trained on")
    try:
        parsed_lengths = [int(length) for length in lengths.split(",")]
    except ValueError:
        raise RequestError(f"--lengths {lengths} is not a list of whole numbers such as 256,1024") from None
    modes = [mode.strip() for mode in attention.split(",")]
    known = (*get_args(AttentionMode), *get_args(WindowMode))
    if wrong := [mode for mode in modes if mode not in known]:
        raise RequestError(f"--attention {', '.join(wrong)} is unknown; known: {', '.join(known)}")
    if precision not in (None, *get_args(Precision)):
        raise RequestError(f"--precision {precision} is unknown; known: {', '.join(get_args(Precision))}")
    if rope_scaling not in (None, *get_args(RopeScaling)):
        raise RequestError(f"--rope-scaling {rope_scaling} is unknown; known: {', '.join(get_args(RopeScaling))}")
    request = EvaluationRequest(
        run_or_checkpoint=run,
        data=[*data, *(more_data or [])],
        lengths=parsed_lengths,
        attentions=cast(Any, modes),
        output=output,
        command=shlex.join(["lex-pretrain", *sys.argv[1:]]),
        split=split,
        max_documents=max_documents,
        retrieval_trials=retrieval_trials,
        precision=cast(Any, precision),
        rope_scaling=cast(Any, rope_scaling),
    )
    results = evaluate(request, lambda given: _read_texts(given, text_key))
    if results is None:
        return
    report = write_report(f"{results.name}: perplexity by length", [results], output)
    if json_output:
        typer.echo(results.model_dump_json())
    else:
        console.print(summary_table([results]))
        logger.info("report: %s", report)


def _read_texts(given: str, text_key: str) -> Iterator[str]:
    """The texts of files, globs or `hf://` datasets; a record that cannot be read is a wrong request."""
    from data_prep.options import PrepareOptions
    from data_prep.readers import SegmentReader
    from data_prep.records import Rejection
    from data_prep.sources import list_sources
    from data_prep.units import Segment

    options = PrepareOptions(text_key=text_key)
    for source in list_sources([given]).paths:
        for item in SegmentReader(Segment(source, start=0, end=None, num_bytes=0), options):
            if isinstance(item, Rejection):
                raise RequestError(f"{source}, record {item.record}: {item.reason} {item.detail}".rstrip())
            yield item.text


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders that `evaluate` wrote")],
    output: Annotated[Path, typer.Option(help="folder for table.md, report.html and pictures")],
) -> None:
    """The table and curves of several evaluations side by side, from their results.json alone."""
    from lex_pretrain.evaluate.comparison import compare
    from lex_pretrain.evaluate.tables import summary_table

    all_results, report = compare(folders, output, command=shlex.join(["lex-pretrain", *sys.argv[1:]]))
    console.print(summary_table(all_results))
    logger.info("report: %s", report)


@app.command()
def generate(
    run: TrainedModel,
    prompt: Annotated[list[str], typer.Option(help="text to go on from; give it again for a batch")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate at the most")] = 200,
    attention: Annotated[
        str, typer.Option(help="attention mode: blockwise, sliding, sinks (bounded cache) or causal")
    ] = "blockwise",
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token; 1 samples as trained")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="sample among the k likeliest tokens; 0 means all")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="sample among the likeliest tokens of this mass")
    ] = 0.95,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="drop tokens below this share of the likeliest one's probability")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="above 1 makes tokens seen before less likely")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be given again")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the sampling")] = 1,
) -> None:
    """Go on from a prompt, printed as it comes; the cache never holds more than two blocks with blockwise attention."""
    from lex_pretrain.generation import Generator, Sampling
    from lex_pretrain.model_config import AttentionMode

    if attention not in get_args(AttentionMode):
        raise RequestError(f"--attention {attention} is unknown; known: {', '.join(get_args(AttentionMode))}")
    sampling = _validated(
        Sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    stop_strings = stop or []
    if "" in stop_strings:
        raise RequestError("--stop is empty; give the text to end before")
    _check_utf8("--prompt", prompt)
    _check_utf8("--stop", stop_strings)
    generator = Generator(run, cast(Any, attention))
    if len(prompt) > 1:
        for start, text in zip(prompt, generator.complete(prompt, max_new_tokens, sampling, stop_strings), strict=True):
            typer.echo(f"{start}{text}\n")
        return
    parts = generator.stream(prompt[0], max_new_tokens, sampling, stop_strings)
    typer.echo(prompt[0], nl=False)
    for part in parts:
        typer.echo(part, nl=False)
        sys.stdout.flush()
    typer.echo()


def _check_utf8(flag: str, texts: list[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{flag} {text!a} is not UTF-8 at character {error.start}") from None


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="folder of a run, or of one checkpoint")],
    output: Annotated[Path, typer.Option(help="folder to make; it must be new or empty")],
) -> None:
    """Make a Hugging Face folder that `transformers` loads where this program is not installed."""
    from lex_pretrain.export.export import export_model

    checkpoint = export_model(run, output)
    logger.info("%s is exported to %s", checkpoint, output)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    launcher: Annotated[
        str, typer.Option(help="local (torchrun on this host), deepspeed, torchrun, mpich, openmpi or slurm")
    ] = "local",
    hostfile: Annotated[Path | None, typer.Option(help="hosts and their processes; see hostfile.example")] = None,
    include: Annotated[str | None, typer.Option(metavar="HOST,...", help="use only these hosts")] = None,
    exclude: Annotated[str | None, typer.Option(metavar="HOST,...", help="leave these hosts out")] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="processes on this host; one for each GPU, or two on a CPU")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="how often a job that fails is started again")] = 0,
    min_hosts: Annotated[
        int | None, typer.Option(min=1, help="go on with no fewer hosts when some are lost; all if not given")
    ] = None,
    host_timeout: Annotated[float, typer.Option(min=5, help="seconds after which a silent host is lost")] = 60.0,
    forward: Annotated[list[str] | None, typer.Option(metavar="NAME", help="variable that all hosts get too")] = None,
    show: Annotated[str, typer.Option(help="whose output is shown when there are many hosts: first or all")] = "first",
    log_folder: Annotated[Path, typer.Option(help="folder on each host for its ranks' logs")] = Path("launch-logs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the commands and start nothing")] = False,
) -> None:
    """Start `-- SUBCOMMAND ARGS...` on every process, through an existing launcher."""
    from launch.commands import Launcher
    from launch.rank import Show
    from launch.run import LaunchOptions, launch
    from launch.supervise import Patience

    for flag, value, known in (("--launcher", launcher, get_args(Launcher)), ("--show", show, get_args(Show))):
        if value not in known:
            raise RequestError(f"{flag} {value} is unknown; known: {', '.join(known)}")
    subcommand = context.args
    if not subcommand or subcommand[0].startswith("-"):
        raise RequestError("give the command to start after `--`, such as: launch -- train --config FILE")
    training = _training_of(subcommand)
    if num_processes is None and hostfile is None and launcher != "slurm":
        from lex_pretrain.hardware import choose_num_processes

        num_processes, reason = choose_num_processes()
        logger.info("%d processes: %s", num_processes, reason)
    options = LaunchOptions(
        launcher=cast(Any, launcher),
        hostfile=hostfile,
        include=include,
        exclude=exclude,
        num_processes=num_processes,
        forward=tuple(forward or ()),
        show=cast(Any, show),
        log_folder=log_folder,
        host_timeout_seconds=host_timeout,
        patience=Patience(max_restarts, min_hosts),
        dry_run=dry_run,
    )
    raise typer.Exit(launch(options, subcommand, training))


@app.command()
def doctor(
    hostfile: Annotated[Path | None, typer.Option(help="hosts to examine; this machine alone if not given")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML config of the training that they are to do")] = None,
    overrides: Overrides = None,
) -> None:
    """Say what this machine or these hosts can do, and each thing in the way; exit 1 when there is one."""
    from launch.doctor import examine_hosts, examine_this_machine
    from launch.hostfile import read_hostfile
    from lex_pretrain.config_io import load_config

    training = _to_launch(load_config(config, overrides or [])) if config is not None else None
    if hostfile is None:
        examine_this_machine(training)
    else:
        examine_hosts(read_hostfile(hostfile), training)


def _training_of(subcommand: list[str]) -> "Training | None":
    """The `train` to launch, None for other commands. What is wrong with either shows before the start."""
    from lex_pretrain.config_io import load_config

    commands = get_command(app).commands  # type: ignore[attr-defined]
    name, *arguments = subcommand
    if name not in commands or name == "launch":
        raise RequestError(f"launch cannot start {name!r}; known: {', '.join(set(commands) - {'launch'})}")
    values = commands[name].make_context(name, list(arguments)).params
    return _to_launch(load_config(values["config"], values["overrides"] or [])) if name == "train" else None


def _to_launch(config: Config) -> "Training":
    """A training for `launch`, which knows no formulas of its own.

    While nothing tells the vocabulary, the embeddings are left out: preflight will miss the dataset anyway.
    """
    from launch.training import ProcessMemory, Training
    from lex_pretrain.train.plan import USABLE_SHARE, make_plan, with_vocabulary
    from lex_pretrain.train.room import checkpoint_bytes

    try:
        known = with_vocabulary(config)
    except RequestError:
        known = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 1})})

    def memory(world_size: int) -> ProcessMemory:
        placements = make_plan(known, world_size, mfu=1, peak_tflops=1, gpu_memory_gib=None).placements
        placed = next(placement for placement in placements if placement.is_configured)
        states = placed.weights_bytes + placed.gradients_bytes + placed.optimizer_bytes
        gpu_peak = int(placed.peak_bytes / USABLE_SHARE)
        return ProcessMemory(
            states=states,
            gpu_peak=gpu_peak,
            cpu_peak=placed.cpu_peak_bytes,
            offloaded=placed.host_bytes,
            copied=placed.copied_bytes,
            first_copied=placed.first_copied_bytes,
        )

    # Those that are kept and the one being written.
    on_disk = checkpoint_bytes(known, config.zero.stage) * (config.checkpoint.keep_last + 1)
    return Training(config, on_disk, memory)


def _use_utf8() -> None:
    """Start this process anew with UTF-8 where the locale says otherwise, as in a minimal container.

    Libraries, torch among them, open their own files in the encoding that Python started with.
    """
    if codecs.lookup(locale.getpreferredencoding(do_setlocale=False)).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)


def main() -> None:
    """Run the command; errors become one message on stderr and the exit code that docs/cli.md promises."""
    _use_utf8()
    leave(run_command(app, debug="--debug" in sys.argv))
