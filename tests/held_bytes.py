"""One rank of a job that trains real engines and writes what each of them holds, sends and saves.

Started by `test_plan_engine.py` under torchrun: `python -m tests.held_bytes CASES.json FOLDER`, where the cases are
configs of one optimizer step or more. Rank 0 writes `FOLDER/held.json`.
"""

import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from lex_pretrain.config import Config
from lex_pretrain.ending import leave
from lex_pretrain.ranks import Ranks, leave_process_group
from lex_pretrain.train.checkpoint import Checkpoints, TrainState
from lex_pretrain.train.distributed import init_distributed
from lex_pretrain.train.trainer import make_engine

Storage = torch.UntypedStorage
# Scalars, token ids and the like are no part of what is counted.
_LEAST_BYTES = 1_000


def live_storages() -> dict[int, Storage]:
    """Distinct storages of all tensors that this process can reach, by address."""
    found = {}
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() >= _LEAST_BYTES:
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
    return found


def held_bytes(left_out: set[int]) -> int:
    """Bytes of the live storages at other addresses. The least of several looks: gloo's thread lets go of a message
    some time after it was sent."""
    gc.collect()
    looks = []
    for _ in range(5):
        looks.append(sum(found.nbytes() for address, found in live_storages().items() if address not in left_out))
        time.sleep(0.05)
    return min(looks)


def bucket_addresses(engine: Any) -> set[int]:
    """Storages of the buckets that gradients travel in, where the engine has some."""
    buckets = getattr(engine.optimizer, "ipg_buckets", {}).values()
    buffers = [x for bucket in buckets for x in (bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer])]
    return {buffer.untyped_storage()._cdata for buffer in buffers if buffer is not None}


def count_messages(sent: "Counter[str]") -> None:
    """Have DeepSpeed's collectives add their bytes to `sent`, as ring algorithms send them on one of N ranks."""
    import deepspeed.comm

    backend = deepspeed.comm.comm.cdb
    for name, times in (("all_reduce", 2), ("all_gather_into_tensor", 1), ("reduce_scatter_tensor", 1)):
        real = getattr(backend, name)

        def counted(*args: Any, _real: Any = real, _name: str = name, _times: int = times, **kwargs: Any) -> Any:
            tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
            size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            world_size = torch.distributed.get_world_size()
            sent[_name] += _times * size * (world_size - 1) // world_size
            return _real(*args, **kwargs)

        setattr(backend, name, counted)


def watch_gathered(engine: Any, most: list[int]) -> list[Any]:
    """Note in `most` the most elements of partitioned parameters that are whole while a layer runs."""
    parameters = list(engine.module.parameters())

    def look(*_: object) -> None:
        whole = sum(p.numel() for p in parameters if hasattr(p, "ds_id") and not p.ds_persist)
        most[0] = max(most[0], whole)

    return [layer.register_forward_hook(look) for layer in engine.module.decoder.layers]


def measure(config: Config, ranks: Ranks, folder: Path, sent: "Counter[str]") -> dict[str, int]:
    """Train two steps: what lives after a backward pass, what the second step sends, what its checkpoint takes."""
    gc.collect()
    before = live_storages()
    decoder, engine = make_engine(config, ranks, load_universal=False, eod_id=0)
    tokens = torch.zeros(1, config.model.sequence_length, dtype=torch.long)
    held, gathered = 0, [0]
    hooks = watch_gathered(engine, gathered)
    for step in range(2):
        sent.clear()
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(tokens, tokens))
            # The optimizer's state is there from the end of the first step on.
            if step == 1:
                held = max(held, held_bytes(before.keys() | bucket_addresses(engine)))
            engine.step()
    sent_bytes = sent.total()
    (folder / "tokenizer.model").touch()
    checkpoints = Checkpoints(config, ranks, folder / "tokenizer.model")
    checkpoints.begin_save(engine, decoder, TrainState(2, 2, 2, ranks.world_size, config.zero.stage, "none"))
    saved = checkpoints.finish_save()
    assert saved is not None
    on_disk = sum(file.stat().st_size for file in saved.folder.rglob("*") if file.is_file())
    for hook in hooks:
        hook.remove()
    engine.destroy()
    return {"held": held, "gathered": gathered[0], "sent": sent_bytes, "on_disk": on_disk}


def main(cases_file: str, folder: str) -> None:
    ranks = init_distributed()
    sent: Counter[str] = Counter()
    count_messages(sent)
    # What imports left behind is no part of an engine, and looking through it takes most of the time.
    gc.freeze()
    cases = json.loads(Path(cases_file).read_text())
    found = [measure(Config.model_validate(case), ranks, Path(folder), sent) for case in cases]
    if ranks.rank == 0:
        (Path(folder) / "held.json").write_text(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
