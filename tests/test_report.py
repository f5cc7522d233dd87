"""The report, the comparison and their sentences, from results made by hand."""

import math
from pathlib import Path

import pytest

from lex_pretrain.errors import RequestError
from lex_pretrain.evaluate.comparison import compare
from lex_pretrain.evaluate.findings import describe, describe_all
from lex_pretrain.evaluate.report import TrainingRecord, write_report
from lex_pretrain.evaluate.results import (
    PerplexityRecord,
    PositionRecord,
    Protocol,
    ResolutionRecord,
    Results,
    RetrievalRecord,
    ScoringMode,
)
from lex_pretrain.evaluate.tables import all_tables, summary_table
from tests.conftest import Program


def record(
    attention: ScoringMode, length: int, perplexity: float, protocol: Protocol = "pieces", spread: float = 0.1
) -> PerplexityRecord:
    nll = math.log(perplexity)
    return PerplexityRecord(
        attention=attention,
        length=length,
        protocol=protocol,
        num_tokens=3000,
        num_documents=3,
        nll=nll,
        perplexity=perplexity,
        ci95=(perplexity - 1, perplexity + 1),
        bits_per_byte=nll / 3,
        bits_per_character=nll / 3,
        tokens_per_second=1e5 / length if attention == "causal" else 5e4,
        peak_memory_bytes=length * 2**20,
        document_nll=(nll - spread, nll, nll + spread),
    )


def results(position: str, causal: list[float], blockwise: list[float], **changes: object) -> Results:
    """Lengths 64, 128 (the training length) and 256."""
    lengths = (64, 128, 256)
    perplexity = [record("causal", length, value) for length, value in zip(lengths, causal, strict=True)]
    perplexity += [record("blockwise", length, value) for length, value in zip(lengths, blockwise, strict=True)]
    perplexity += [
        record("causal", length, value, "fixed-target") for length, value in zip(lengths, causal, strict=True)
    ]
    values: dict[str, object] = {
        "name": f"{position}-run",
        "checkpoint": f"runs/{position}/checkpoints/step-00000009",
        "step": 9,
        "position": position,
        "num_parameters": 1234,
        "num_layers": 1,
        "training_length": 128,
        "block_size": 64,
        "dtype": "float32",
        "device": "CPU",
        "dataset": "data",
        "documents_sha256": "same",
        "protocol_text": "how it was done",
        "command": f"lex-pretrain evaluate {position}",
        "versions": {"torch": "2"},
        "perplexity": perplexity,
        "by_position": [
            PositionRecord(attention="causal", length=256, start=0, stop=128, num_tokens=9, nll=3.0),
            PositionRecord(attention="causal", length=256, start=128, stop=256, num_tokens=9, nll=2.0),
        ],
        "resolution": [
            ResolutionRecord(
                kind="measured",
                layer=0,
                length=length,
                attention="causal",
                resolution=value,
                distances=(0, 1, 2),
                scores=(1.0, 0.5, 0.2),
            )
            for length, value in ((128, 0.8), (256, 0.4))
        ],
        "retrieval": [
            RetrievalRecord(
                task="copy",
                attention="blockwise",
                length=256,
                depth=depth,
                num_trials=2,
                accuracy=depth,
                exact=0.0,
                nll=1.0,
            )
            for depth in (0.0, 0.5, 1.0)
        ],
        **changes,
    }
    return Results.model_validate(values)


XPOS = results("xpos", [22.0, 20.0, 30.0], [22.0, 20.0, 19.0])
ROPE = results("rope", [23.0, 21.0, 60.0], [23.0, 21.0, 22.0])


def test_sentences_say_what_the_numbers_say() -> None:
    text = "\n".join(describe(XPOS, "xpos"))
    assert "xpos with causal attention is best at 128 tokens (20.00); from 128 to 256 tokens (2 times" in text
    assert "it goes from 20.00 to 30.00 (+50.0% [+50.0%, +50.0%])" in text
    assert "xpos with blockwise attention is best at 256 tokens (19.00)" in text
    assert "its perplexity keeps falling, to 19.00 (-5.0% [-5.0%, -5.0%])" in text
    assert "blockwise attention lowers xpos's perplexity from 30.00 to 19.00 (-36.7% [-36.7%, -36.7%]), at" in text
    assert "go from 22.00 (64 tokens) over 20.00 (128) to 30.00 (256): what lies beyond the training length" in text
    assert "changes +50.0% [+50.0%, +50.0%]" in text
    assert "in 256 tokens, xpos with blockwise attention gets right: copy 100% when said last and 0% when said" in text
    assert "twice the training length is 0.50 times that at the training length" in text
    assert "(the paper's figures give 0.55)" in text


def test_models_are_compared_document_by_document() -> None:
    """The documents differ much, and the models by the same factor on each: so the interval has no width."""
    beside, *each = describe_all([ROPE, XPOS])
    assert [finding.heading for finding in each] == ["rope", "xpos"]
    causal, blockwise = beside.sentences
    assert causal.startswith("At 256 tokens with causal attention xpos is lowest (30.00); against it rope +100.0% [")
    assert "rope +100.0% [+100.0%, +100.0%]" in causal
    assert "with blockwise attention xpos is lowest (19.00)" in blockwise
    other_documents = results("rope", [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], documents_sha256="others")
    assert "not scored on the same tokens" in describe_all([other_documents, XPOS])[0].sentences[0]


def test_change_of_one_document_has_no_interval() -> None:
    alone = [one.model_copy(update={"num_documents": 1, "document_nll": (one.nll,)}) for one in XPOS.curve("causal")]
    text = "\n".join(describe(XPOS.model_copy(update={"perplexity": tuple(alone)}), "xpos"))
    assert "from 20.00 to 30.00 (+50.0%)" in text


def test_report_is_self_contained_and_escapes_what_it_is_given(tmp_path: Path) -> None:
    steps = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, 9)]
    file = write_report("<Title>", [XPOS, ROPE], tmp_path, [TrainingRecord("xpos", steps, [4])], ["a <note>"])
    html = file.read_text()
    for shown in ("&lt;Title&gt;", "a &lt;note&gt;", "lex-pretrain evaluate rope", "how it was done", "60.00", "1,234"):
        assert shown in html
    pictures = {path.name for path in tmp_path.glob("*.png")}
    names = ("perplexity", "training", "by_position", "resolution", "retrieval", "speed")
    assert pictures == {f"{name}.png" for name in names}
    assert html.count("data:image/png;base64,") == len(pictures)
    for outside in ("http://", "https://", "<script", "<link", 'src="/'):
        assert outside not in html


def test_report_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    bare = XPOS.model_copy(update={"by_position": (), "resolution": (), "retrieval": ()})
    html = write_report("bare", [bare], tmp_path).read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {"perplexity.png", "speed.png"}
    assert "Retrieval" not in html


def test_tables_name_models_by_what_tells_them_apart() -> None:
    seeds = [XPOS.model_copy(update={"name": f"seed-{seed}"}) for seed in (1, 2)]
    assert [row[0] for row in all_tables(seeds)[0].rows] == ["seed-1", "seed-1", "seed-2", "seed-2"]
    assert [row[0] for row in all_tables([XPOS, ROPE])[0].rows] == ["xpos", "xpos", "rope", "rope"]
    assert summary_table([XPOS, ROPE]).row_count == 4
    many = [XPOS.model_copy(update={"name": f"seed-{seed}"}) for seed in range(9)]
    assert len({row[0] for row in all_tables(many)[0].rows}) == 9


def test_comparison_writes_tables_and_report_from_results_alone(tmp_path: Path, program: Program) -> None:
    for one in (XPOS, ROPE):
        (tmp_path / one.position).mkdir()
        one.save(tmp_path / one.position)
    done = program("compare", tmp_path / "xpos", tmp_path / "rope", "--output", tmp_path / "both")
    assert done.returncode == 0, done.stderr
    assert "60.00" in done.stderr
    table = (tmp_path / "both" / "table.md").read_text()
    assert "| model | attention | 64 | 128 | 256 |\n| --- | --- | ---: | ---: | ---: |\n" in table
    assert "| rope | causal | 23.00 | 21.00 | 60.00 |" in table
    assert "lex-pretrain compare" in (tmp_path / "both" / "report.html").read_text()
    with pytest.raises(RequestError, match=r"results\.json does not exist"):
        compare([tmp_path / "nowhere"], tmp_path / "out", "command")
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "results.json").write_text('{"format_version": 2}')
    with pytest.raises(RequestError, match="not a result of this version"):
        compare([tmp_path / "nowhere"], tmp_path / "out", "command")


def test_training_curves_are_found_beside_the_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = ['{"step": 1, "loss": 3.0}', '{"event": "resumed", "step": 1}', '{"step": 2, "loss": 2.0}']
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "evaluation").mkdir()
    XPOS.model_copy(update={"checkpoint": str(run / "checkpoints" / "step-00000002")}).save(tmp_path / "evaluation")
    compare([tmp_path / "evaluation"], tmp_path / "out", "command")
    assert (tmp_path / "out" / "training.png").exists()


def test_runs_of_several_seeds_are_summed_up_with_their_spread() -> None:
    runs = [
        results("xpos", [20 + seed, 16, 14], [20, 16, 13], name=f"xpos-{seed}", checkpoint=f"runs/xpos-{seed}")
        for seed in range(3)
    ]
    other = results("rope", [21, 17, 40], [21, 17, 16])
    longer = results("xpos", [20, 16, 14], [20, 16, 13], name="xpos-longer", step=10)
    spread = [table for table in all_tables([*runs, other, longer]) if table.heading == "Spread over runs"]
    assert [table.rows for table in spread] == [
        [
            ["xpos (3 runs)", "causal", "21.00 ± 1.00", "16.00 ± 0.00", "14.00 ± 0.00"],
            ["xpos (3 runs)", "blockwise", "20.00 ± 0.00", "16.00 ± 0.00", "13.00 ± 0.00"],
        ]
    ]
    assert not [table for table in all_tables([runs[0], other]) if table.heading == "Spread over runs"]
