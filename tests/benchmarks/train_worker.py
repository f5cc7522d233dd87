"""One process of a training job that is timed: `CONTENDER CONFIG FILE`; rank 0 writes when each step started."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lex_pretrain.config import Config
from lex_pretrain.config_io import load_config
from lex_pretrain.data.loader import Loader, open_sources
from lex_pretrain.train.deepspeed_config import make_deepspeed_config
from lex_pretrain.train.distributed import init_distributed
from lex_pretrain.train.engine import make_engine
from lex_pretrain.train.run import train
from lex_pretrain.train.trainer import Trainer, resolve_vocab_size

starts: list[float] = []


def run_trainer(config: Config) -> None:
    """The command as users run it, metrics and all."""
    step = Trainer.train_step

    def timed(self: Trainer, *arguments: Any) -> Any:
        starts.append(time.perf_counter())
        return step(self, *arguments)

    Trainer.train_step = timed  # type: ignore[method-assign]
    train(config)


def run_bare(config: Config) -> None:
    """The same engine over one batch again and again."""
    ranks = init_distributed()
    datasets = open_sources(config.data, split="train")
    config = resolve_vocab_size(config, datasets[0].manifest.tokenizer.vocab_size)
    _, engine = make_engine(config, ranks, load_universal=False, eod_id=0)
    loader = Loader(datasets, [1.0], config.model.sequence_length, config.run.seed)
    micro = int(engine.train_micro_batch_size_per_gpu())
    tokens, next_tokens = loader.micro_batch(np.arange(micro) + ranks.rank * micro, torch.device("cpu"))
    engine.train()
    for _ in range(config.train.num_steps):
        starts.append(time.perf_counter())
        for _ in range(int(engine.gradient_accumulation_steps())):
            loss = engine(tokens, next_tokens)
            engine.backward(loss)
            engine.step()


def run_huggingface(config: Config) -> None:
    """The Hugging Face Trainer under DeepSpeed on a GPT-NeoX of the same size, over windows in memory."""
    # Its process group, without the op that DeepSpeed would compile for 40 seconds.
    ranks = init_distributed()
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, TrainerCallback, TrainingArguments
    from transformers import Trainer as HuggingFaceTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            starts.append(time.perf_counter())

    dataset = open_sources(config.data, split="train")[0]
    length, section, batch = config.model.sequence_length, config.model, config.train.global_batch_size
    windows = dataset.read_windows(np.arange(config.train.num_steps * batch) * length, length)
    settings = make_deepspeed_config(config, ranks.world_size)
    ours = ("bf16", "zero_optimization", "data_types", "zero_allow_untested_optimizer", "gradient_clipping")
    arguments = TrainingArguments(
        output_dir=str(Path(config.run.output_dir)),
        max_steps=config.train.num_steps,
        per_device_train_batch_size=settings["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=settings["gradient_accumulation_steps"],
        learning_rate=config.optimizer.learning_rate,
        max_grad_norm=config.train.gradient_clipping,
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=True,
        ddp_backend="gloo",
        deepspeed={
            **{key: settings[key] for key in ours if key in settings},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
        },
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=dataset.manifest.tokenizer.vocab_size,
            hidden_size=section.hidden_size,
            num_hidden_layers=section.num_layers,
            num_attention_heads=section.num_heads,
            intermediate_size=section.resolved_feed_forward_size,
            max_position_embeddings=length,
            tie_word_embeddings=section.tie_embeddings,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )
    rows = [{"input_ids": torch.from_numpy(window), "labels": torch.from_numpy(window)} for window in windows]
    HuggingFaceTrainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()


CONTENDERS: dict[str, Callable[[Config], None]] = {
    "trainer": run_trainer,
    "bare": run_bare,
    "huggingface": run_huggingface,
}

if __name__ == "__main__":
    contender, config_file, output = sys.argv[1:]
    CONTENDERS[contender](load_config(Path(config_file), []))
    starts.append(time.perf_counter())
    if os.environ.get("RANK") == "0":
        Path(output).write_text(json.dumps(starts))
