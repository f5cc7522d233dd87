"""The settings of a model, and what all sections of settings have in common.

Apart from the other settings, because an exported model needs these and no others.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositionScheme = Literal["xpos", "rope", "alibi", "sinusoidal", "learned", "none"]
AttentionMode = Literal["causal", "blockwise", "sliding", "sinks"]

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are refused and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


class ModelSection(Section):
    """Architecture of the decoder. Defaults follow the paper's code where it states a value."""

    position: PositionScheme = Field(default="xpos", description="position scheme")
    num_layers: PositiveInt = Field(description="number of decoder layers")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_heads: PositiveInt = Field(description="attention heads a layer")
    num_key_value_heads: PositiveInt | None = Field(
        default=None, description="key and value heads (grouped-query attention); null = num_heads"
    )
    feed_forward_size: PositiveInt | None = Field(
        default=None, description="inner width of the feed-forward layers; null = 4 * hidden_size"
    )
    sequence_length: PositiveInt = Field(description="training length in tokens")
    vocab_size: PositiveInt | None = Field(default=None, description="vocabulary; null = the tokenizer of the data")
    block_size: PositiveInt | None = Field(
        default=None, description="block of blockwise attention in tokens; null = sequence_length / 2"
    )
    window_size: PositiveInt | None = Field(
        default=None, description="keys a query sees in sliding and sinks attention; null = sequence_length"
    )
    num_sinks: int = Field(
        default=4, ge=0, description="first tokens of a document that sinks attention always sees, part of its window"
    )
    xpos_gamma: float = Field(default=0.4, gt=0, description="γ of xPos: larger decays less")
    xpos_scale_base: float | None = Field(
        default=None, gt=0, description="tokens over which xPos decays once; null = sequence_length / 2"
    )
    xpos_shared_decay: bool = Field(
        default=False, description="ablation: all dimensions decay alike, by the mean of xPos's log decays"
    )
    rotary_theta: float = Field(default=10000.0, gt=1, description="base of the rotation angles (xpos, rope)")
    rope_scaling: Literal["none", "linear", "ntk", "yarn"] = Field(
        default="none", description="how rope is stretched past the training length, at evaluation"
    )
    rope_scaling_factor: float = Field(default=1.0, ge=1, description="times the training length that rope is fit to")
    norm: Literal["layernorm", "rmsnorm"] = Field(default="layernorm", description="normalisation layer")
    sub_layer_norm: bool = Field(
        default=False, description="sub-LN (Magneto): a second norm before each output projection"
    )
    activation: Literal["gelu", "relu", "swiglu"] = Field(default="gelu", description="feed-forward activation")
    bias: bool = Field(default=True, description="biases in linear layers and norms")
    tie_embeddings: bool = Field(default=True, description="share the input embedding with the output layer")
    scale_embeddings: bool = Field(default=True, description="multiply embeddings by sqrt(hidden_size)")
    dropout: Fraction = Field(default=0.0, description="dropout on embeddings, attention and residual branches")
    init: Literal["xavier", "gpt2"] = Field(
        default="xavier", description="initialisation: the paper's code (xavier) or GPT-2's"
    )

    @model_validator(mode="after")
    def _shapes_fit(self) -> "ModelSection":
        faults = []
        if self.hidden_size % self.num_heads:
            faults.append(f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}")
        elif self.position in ("xpos", "rope") and self.head_size % 2:
            faults.append(
                f"hidden_size / num_heads = {self.head_size} is odd; {self.position} rotates pairs of dimensions"
            )
        if self.num_heads % self.resolved_num_key_value_heads:
            faults.append(
                f"num_heads {self.num_heads} is not divisible by num_key_value_heads {self.num_key_value_heads}"
            )
        if self.block_size is not None and self.block_size > self.sequence_length:
            faults.append(
                f"block_size {self.block_size} is longer than sequence_length {self.sequence_length}: "
                "blockwise attention would reach distances that training never saw"
            )
        if self.resolved_window_size > self.sequence_length:
            faults.append(
                f"window_size {self.window_size} is longer than sequence_length {self.sequence_length}: "
                "sliding and sinks attention would reach distances that training never saw"
            )
        if self.num_sinks >= self.resolved_window_size:
            faults.append(f"num_sinks {self.num_sinks} leaves no window of the {self.resolved_window_size} keys in all")
        if self.rope_scaling != "none" and self.position != "rope":
            faults.append(f"rope_scaling {self.rope_scaling} needs position rope, not {self.position}")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def resolved_num_key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads

    @property
    def resolved_feed_forward_size(self) -> int:
        return self.feed_forward_size or 4 * self.hidden_size

    @property
    def resolved_block_size(self) -> int:
        return self.block_size or max(1, self.sequence_length // 2)

    @property
    def resolved_window_size(self) -> int:
        return self.window_size or self.sequence_length

    @property
    def resolved_xpos_scale_base(self) -> float:
        return self.xpos_scale_base or self.sequence_length / 2
