"""Initial weights.

`xavier`  as the paper's code: Xavier-uniform projections, queries, keys and values with gain 1/sqrt(2), embeddings
          normal with deviation 1/sqrt(hidden size).
`gpt2`    normal with deviation 0.02, residual outputs smaller by sqrt(2 * layers).
"""

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from lex_pretrain.model_config import ModelSection

Gather = Callable[[list[nn.Parameter]], AbstractContextManager[object]]


def _whole(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    """The default `gather`: parameters are whole already."""
    return contextlib.nullcontext()


def initialize(decoder: nn.Module, config: ModelSection, gather: Gather = _whole) -> None:
    """Fill the decoder's weights in place from torch's default generator, always in the same order.

    `gather` makes the given parameters whole while they are written, where they are partitioned over processes.
    """
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Embedding | nn.Linear) and not (config.tie_embeddings and name == "output"):
            with gather(list(module.parameters())):
                _initialize_module(name, module, config)


def _initialize_module(name: str, module: nn.Embedding | nn.Linear, config: ModelSection) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if config.init == "gpt2":
        residual_output = name.endswith(("attention.output", "feed_forward.output"))
        nn.init.normal_(module.weight, std=0.02 / (math.sqrt(2 * config.num_layers) if residual_output else 1.0))
    elif isinstance(module, nn.Embedding) or name == "output":
        nn.init.normal_(module.weight, std=config.hidden_size**-0.5)
    elif name.endswith("attention.qkv"):
        _xavier_by_projection(module, config)
    else:
        nn.init.xavier_uniform_(module.weight)


def _xavier_by_projection(qkv: nn.Linear, config: ModelSection) -> None:
    """Queries, keys and values share one matrix for speed and are drawn as the three that they are."""
    key_value_size = config.resolved_num_key_value_heads * config.head_size
    sizes = (config.hidden_size, key_value_size, key_value_size)
    for weight in qkv.weight.data.split(sizes):
        nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
