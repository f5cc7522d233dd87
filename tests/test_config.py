"""Configs: shipped files, merging, and errors that say where and what instead."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lex_pretrain.batches import Batches
from lex_pretrain.config import Config
from lex_pretrain.config_io import load_config, save_config
from lex_pretrain.errors import RequestError
from lex_pretrain.model.parameters import count_parameters
from lex_pretrain.train.deepspeed_config import make_deepspeed_config
from lex_pretrain.train.schedule import learning_rate
from lex_pretrain.train.trainer import resolve_vocab_size

CONFIGS = Path(__file__).parent.parent / "configs"
RUNS = sorted([*(CONFIGS / "runs").glob("*.yaml"), *(CONFIGS / "paper-mini").glob("[!b]*.yaml")])


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_shipped_run_parses_and_derives(file: Path) -> None:
    config = resolve_vocab_size(load_config(file), 32_000)
    assert count_parameters(config.model) > 0
    for world_size in (1, 2, 16):
        settings = make_deepspeed_config(config, world_size)
        micro, accumulated = settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
        assert micro * accumulated * world_size == config.train.global_batch_size


def test_every_shipped_fragment_is_used_by_a_run() -> None:
    used = {line for file in RUNS for line in file.read_text().splitlines() if line.startswith("base:")}
    for fragment in (*(CONFIGS / "model").glob("*.yaml"), *(CONFIGS / "train").glob("*.yaml")):
        assert any(f"{fragment.parent.name}/{fragment.name}" in line for line in used), fragment


def test_paper_config_has_the_papers_shape() -> None:
    config = load_config(CONFIGS / "runs" / "lex-350m.yaml")
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_heads) == (24, 1024, 16)
    assert config.model.sequence_length * config.train.global_batch_size == 2**19
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.epsilon) == (0.9, 0.98, 1e-6)


def test_every_field_is_described() -> None:
    def fields(section: type[BaseModel]) -> list[str]:
        missing = []
        for name, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                missing += fields(kind)
            elif not field.description:
                missing.append(f"{section.__name__}.{name}")
        return missing

    assert fields(Config) == []


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


GOOD = """
run: {output_dir: out}
data: {path: data}
model: {num_layers: 2, hidden_size: 32, num_heads: 2, sequence_length: 32}
train: {num_steps: 10, global_batch_size: 4}
schedule: {warmup_steps: 2}
"""


def test_bases_and_overrides_win_in_order(tmp_path: Path) -> None:
    write(tmp_path, "first.yaml", GOOD)
    write(tmp_path, "second.yaml", "model: {num_layers: 3, hidden_size: 64}")
    file = write(tmp_path, "run.yaml", "base: [first.yaml, second.yaml]\nmodel: {num_layers: 4}")
    config = load_config(file, ["model.num_heads=4", "deepspeed.zero_optimization.reduce_bucket_size=1000"])
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_heads) == (4, 64, 4)
    assert config.deepspeed == {"zero_optimization": {"reduce_bucket_size": 1000}}


def test_all_faults_are_reported_with_place_and_suggestion(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", GOOD.replace("num_heads", "heads") + "\ntrian: {}\noptimizer:\n  betta1: 0.5\n")
    with pytest.raises(RequestError) as caught:
        load_config(file, ["train.num_steps=none", "zero.hidden_size=4"])
    message = str(caught.value)
    assert "model.num_heads: missing" in message
    assert "model.heads: unknown key; did you mean model.num_heads?" in message
    assert "trian: unknown key; did you mean train?" in message
    assert f"optimizer.betta1: unknown key; did you mean optimizer.beta1?  [{file}, line 10]" in message
    assert "train.num_steps" in message
    assert "[the command line]" in message
    assert "zero.hidden_size: unknown key; did you mean model.hidden_size?" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model: {hidden_size: 33}", "not divisible by num_heads 2"),
        ("model: {hidden_size: 6}", "= 3 is odd"),
        ("model: {block_size: 64}", "block_size 64 is longer than sequence_length 32"),
        ("train: {micro_batch_size: 3}", "not divisible by train.micro_batch_size 3"),
        ("schedule: {warmup_steps: 11}", "warmup_steps 11 is longer than"),
        ("train: {num_tokens: 100}", "train: give either num_steps or num_tokens"),
        ("train: {num_steps: null}", "train: give either num_steps or num_tokens"),
        ("schedule: {warmup_tokens: 0}", "schedule: give either warmup_steps or warmup_tokens"),
        (
            "train: {num_steps: null, num_tokens: 1280}\nschedule: {warmup_steps: null, warmup_tokens: 1281}",
            "schedule.warmup_tokens 1281 (11 steps) is longer than train.num_tokens 1280 (10 steps)",
        ),
        ("train: {initial_batch_size: 2}", "needs both initial_batch_size and batch_ramp_steps"),
        ("train: {initial_batch_size: 3, batch_ramp_steps: 2}", "4 is not a multiple of initial_batch_size 3"),
        (
            "train: {initial_batch_size: 2, batch_ramp_steps: 11}",
            "batch_ramp_steps 11 is longer than train.num_steps 10",
        ),
        (
            "train: {initial_batch_size: 2, batch_ramp_steps: 2, micro_batch_size: 4}",
            "train.initial_batch_size 2 is not divisible by train.micro_batch_size 4",
        ),
        ("zero: {stage: 0}", "bf16 needs zero.stage 1 to 3"),
        ("zero: {stage: 2, offload_parameters: true}", "zero.offload_parameters needs zero.stage 3, not 2"),
        (
            "zero: {stage: 0, offload_optimizer: true}\ntrain: {precision: fp32}",
            "zero.offload_optimizer needs zero.stage 1",
        ),
        ("optimizer: {name: muon}\nzero: {stage: 2}", "optimizer.name muon needs zero.stage 1"),
        ("optimizer: {name: muon}\ntrain: {precision: fp32}", "optimizer.name muon needs zero.stage 1"),
        ("optimizer: {name: adam}", "optimizer.name"),
        ("data: {sources: [{path: x}]}", "either path"),
        ("base: run.yaml", "includes itself"),
        ("base: missing.yaml", "missing.yaml does not exist (a base of"),
        ("- a list", "must hold keys and values"),
        ("model: {num_layers: [}", "cannot be read"),
    ],
)
def test_wrong_values_are_refused_with_the_reason(tmp_path: Path, change: str, words: str) -> None:
    write(tmp_path, "good.yaml", GOOD)
    text = change if change.startswith(("-", "base")) else f"base: good.yaml\n{change}"
    with pytest.raises(RequestError, match=r"(?s).*") as caught:
        load_config(write(tmp_path, "run.yaml", text))
    assert words in str(caught.value)


def test_saved_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "run.yaml", GOOD))
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_deepspeed_section_is_merged_and_owned_keys_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", GOOD)
    merged = make_deepspeed_config(load_config(file, ["deepspeed.zero_optimization.reduce_bucket_size=7"]), 2)
    assert merged["zero_optimization"]["reduce_bucket_size"] == 7
    assert merged["zero_optimization"]["stage"] == 1
    config = load_config(file, ["deepspeed.bf16.enabled=true", "deepspeed.zero_optimization.stage=3"])
    with pytest.raises(RequestError) as caught:
        make_deepspeed_config(config, 2)
    assert "set train.precision" in str(caught.value)
    assert "set zero.stage" in str(caught.value)


def test_zero_plus_plus_goes_through_and_conflicts_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", GOOD)
    raw = "deepspeed.zero_optimization"
    keys = [f"{raw}.zero_hpz_partition_size=2", f"{raw}.zero_quantized_weights=true"]
    keys += [f"{raw}.zero_quantized_gradients=true"]
    keys_of_run = ["train.precision=fp16", "zero.stage=3", "zero.offload_parameters=true", *keys]
    offloaded = load_config(file, keys_of_run)
    assert make_deepspeed_config(offloaded, 4)["zero_optimization"] == {
        **{"stage": 3, "overlap_comm": True, "offload_param": {"device": "cpu", "pin_memory": True}},
        **{"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    }
    with pytest.raises(RequestError, match=r"zero_hpz_partition_size 2 does not divide 1 processes; sizes that fit: 1"):
        make_deepspeed_config(offloaded, 1)
    with pytest.raises(RequestError) as caught:
        make_deepspeed_config(load_config(file, ["zero.stage=2", *keys]), 4)
    assert all(f"{key.split('=')[0]} needs zero.stage 3, not 2" in str(caught.value) for key in keys)
    with pytest.raises(RequestError, match=r"DeepSpeed 0\.19 reads them as fp16, and these are fp32"):
        make_deepspeed_config(load_config(file, [*keys_of_run, "train.precision=bf16"]), 4)
    raw_offload = load_config(file, ["zero.stage=3", f"{raw}.offload_param.device=nvme"])
    with pytest.raises(RequestError, match=r"offload_param is derived from this config; set zero.offload_parameters"):
        make_deepspeed_config(raw_offload, 4)


def test_batch_arithmetic_that_does_not_fit_names_what_would(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "run.yaml", GOOD), ["train.global_batch_size=12", "train.micro_batch_size=4"])
    assert make_deepspeed_config(config, 3)["gradient_accumulation_steps"] == 1
    with pytest.raises(RequestError, match="micro batch sizes that fit: 1, 2, 3, 6"):
        make_deepspeed_config(config, 2)
    with pytest.raises(RequestError, match="process counts that fit: 1, 2, 3, 4, 6, 12"):
        make_deepspeed_config(config, 5)


def test_lengths_in_tokens_give_the_schedule_of_as_many_steps(tmp_path: Path) -> None:
    """128 tokens a step, rounded up."""
    file = write(tmp_path, "run.yaml", GOOD)
    in_tokens = ["train.num_steps=null", "train.num_tokens=1153", "schedule.warmup_steps=null"]
    config = load_config(file, [*in_tokens, "schedule.warmup_tokens=129"])
    assert (config.num_steps, config.warmup_steps) == (10, 2)
    assert config.in_steps() == load_config(file)
    rates = [[learning_rate(step, one) for step in range(10)] for one in (config, load_config(file))]
    assert rates[0] == rates[1]
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    assert load_config(file, [*in_tokens[:2], "train.global_batch_size=2"]).num_steps == 19
    assert load_config(file, ["train.num_steps=1000", "schedule.warmup_steps=null"]).warmup_steps == 750


def test_schedule_uses_the_warmup_from_the_first_update(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "run.yaml", GOOD), ["optimizer.learning_rate=1.0", "train.num_steps=10"])
    rates = [learning_rate(step, config) for step in range(10)]
    assert rates == pytest.approx([0.5, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])
    cosine = load_config(tmp_path / "run.yaml", ["schedule.decay=cosine", "schedule.final_fraction=0.1"])
    assert learning_rate(9, cosine) == pytest.approx(0.1 * cosine.optimizer.learning_rate)
    wsd = ["schedule.decay=wsd", "schedule.decay_fraction=0.4", "schedule.final_fraction=0.0"]
    config = load_config(tmp_path / "run.yaml", ["optimizer.learning_rate=1.0", "train.num_steps=10", *wsd])
    rates = [learning_rate(step, config) for step in range(10)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 3 / 4, 2 / 4, 1 / 4, 0.0])
    with pytest.raises(RequestError, match="decay over 9 steps"):
        load_config(tmp_path / "run.yaml", ["train.num_steps=10", *wsd, "schedule.decay_fraction=0.9"])


@given(first=st.integers(1, 5), rises=st.integers(1, 6), ramp_steps=st.integers(1, 40), step=st.integers(0, 60))
def test_a_growing_batch_grows_evenly_and_its_sums_are_those_of_its_steps(
    first: int, rises: int, ramp_steps: int, step: int
) -> None:
    batches = Batches(first, first * (rises + 1), ramp_steps)
    sizes = [batches.size(number) for number in range(80)]
    assert sizes[0] == first
    assert sizes == sorted(sizes)
    assert all(size % first == 0 for size in sizes)
    assert set(sizes[ramp_steps:]) == {batches.last}
    assert sizes[ramp_steps - 1] < batches.last
    assert batches.before(step) == sum(sizes[:step])
    needed = batches.num_steps(batches.before(step) + 1)
    assert batches.before(needed - 1) <= batches.before(step) < batches.before(needed)
    assert batches.num_steps(batches.before(step)) <= step


def test_a_batch_that_does_not_grow_is_the_same_at_every_step() -> None:
    batches = Batches(8, 8, 0)
    assert [batches.size(0), batches.before(0), batches.before(3), batches.num_steps(24)] == [8, 0, 24, 3]
    assert batches.num_steps(25) == 4
