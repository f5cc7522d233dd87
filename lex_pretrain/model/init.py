"""Initial weights.

`xavier`  as the paper's code: Xavier-uniform projections, queries, keys and values with gain 1/sqrt(2), embeddings
          normal with deviation 1/sqrt(hidden size).
`gpt2`    normal with deviation 0.02, residual outputs smaller by sqrt(2 * layers).
"""

import math

from torch import nn

from lex_pretrain.config import ModelSection


def initialize(decoder: nn.Module, config: ModelSection) -> None:
    """Fill the decoder's weights in place from torch's default generator, always in the same order."""
    residual_outputs = ("attention.output", "feed_forward.output")
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Embedding):
            deviation = 0.02 if config.init == "gpt2" else config.hidden_size**-0.5
            nn.init.normal_(module.weight, std=deviation)
        elif isinstance(module, nn.Linear):
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if config.tie_embeddings and name == "output":
                continue
            if config.init == "gpt2":
                shrink = math.sqrt(2 * config.num_layers) if name.endswith(residual_outputs) else 1.0
                nn.init.normal_(module.weight, std=0.02 / shrink)
            elif name.endswith("attention.qkv"):
                _xavier_by_projection(module, config)
            elif name == "output":
                nn.init.normal_(module.weight, std=config.hidden_size**-0.5)
            else:
                nn.init.xavier_uniform_(module.weight)


def _xavier_by_projection(qkv: nn.Linear, config: ModelSection) -> None:
    """Queries, keys and values share one matrix for speed and are drawn as the three that they are."""
    key_value_size = config.resolved_num_key_value_heads * config.head_size
    sizes = (config.hidden_size, key_value_size, key_value_size)
    for weight in qkv.weight.data.split(sizes):
        nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
