"""One process of a training job that is timed: `CONTENDER CONFIG FILE`; rank 0 writes the seconds of its steps.

`lex-pretrain` writes two lists, of the trainer's steps and of the bare loop's. They take turns in one job, so that what
else the machine does falls on both alike.
"""

import json
import math
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
from lex_pretrain.data.loader import open_sources
from lex_pretrain.hardware import keep_freed_memory
from lex_pretrain.train.deepspeed_config import make_deepspeed_config
from lex_pretrain.train.distributed import init_distributed
from lex_pretrain.train.finite import GradientWatch
from lex_pretrain.train.run import train
from lex_pretrain.train.trainer import Trainer

Seconds = dict[str, list[float]]


def run_lex_pretrain(config: Config) -> Seconds:
    """The command as users run it, metrics and all; before each of its steps, a bare one over the same engine."""
    step, note = Trainer.train_step, GradientWatch._note
    seconds: Seconds = {"trainer": [], "bare": []}
    watching = True
    since = math.nan

    def note_if_watching(self: GradientWatch, gradient: torch.Tensor) -> None:
        if watching:
            note(self, gradient)

    def now() -> float:
        """The time when all ranks have come this far."""
        torch.distributed.barrier()
        return time.perf_counter()

    def both(self: Trainer, *arguments: Any) -> Any:
        nonlocal watching, since
        # What is done between two steps, reporting above all, is part of the first.
        seconds["trainer"].append(now() - since)
        # The batch of a bare loop is in memory before it begins.
        batch = self.loader.micro_batch(self.samples(0, 0, self.ranks.rank), self.device)
        started = now()
        watching = False
        run_bare_step(self.engine, *batch)
        watching = True
        since = now()
        seconds["bare"].append(since - started)
        return step(self, *arguments)

    Trainer.train_step = both  # type: ignore[method-assign]
    GradientWatch._note = note_if_watching  # type: ignore[method-assign]
    keep_freed_memory()
    train(config)
    # Nothing ran before the first time, and after the last step the checkpoint is saved.
    return {"trainer": seconds["trainer"][1:], "bare": seconds["bare"][:-1]}


def run_bare_step(engine: Any, tokens_BT: torch.Tensor, next_tokens_BT: torch.Tensor) -> None:
    """What any loop over a DeepSpeed engine does."""
    engine.train()
    for _ in range(int(engine.gradient_accumulation_steps())):
        loss = engine(tokens_BT, next_tokens_BT)
        engine.backward(loss)
        engine.step()


def run_huggingface(config: Config) -> Seconds:
    """The Hugging Face Trainer under DeepSpeed on a GPT-NeoX of the same size, over windows in memory."""
    # Its process group, without the op that DeepSpeed would compile for 40 seconds.
    ranks = init_distributed()
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, TrainerCallback, TrainingArguments
    from transformers import Trainer as HuggingFaceTrainer

    starts: list[float] = []

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
        bf16=config.train.precision == "bf16",
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
    return {"huggingface": np.diff(starts).tolist()}


CONTENDERS: dict[str, Callable[[Config], Seconds]] = {"lex-pretrain": run_lex_pretrain, "huggingface": run_huggingface}

if __name__ == "__main__":
    contender, config_file, output = sys.argv[1:]
    seconds = CONTENDERS[contender](load_config(Path(config_file), []))
    if os.environ.get("RANK") == "0":
        Path(output).write_text(json.dumps(seconds))
