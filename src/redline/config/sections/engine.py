"""Section `engine`: the sampler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from redline.addresses import holds_login, is_server_address
from redline.config.section import FreeMapping, Section

EngineKind = Literal["native", "vllm", "sglang", "openai", "transformers"]
SpeculationMode = Literal["off", "auto", "always"]
Quantization = Literal["none", "int16", "int8", "fp8"]
WeightServerName = Literal["sglang", "vllm"]


class EngineConfig(Section):
    kind: EngineKind = "native"
    """What samples: redline's own engine, vLLM, SGLang, a server with OpenAI's API, or transformers."""
    url: str | None = None
    """Address of the server of `kind: openai`; it ends in /v1."""
    served_model: str | None = None
    """The model's name on that server; by default the first that the server lists."""
    api_key_env: str | None = None
    """Environment variable that holds the server's API key."""
    weights_token_env: str | None = None
    """Environment variable with the token that the server takes new weights with: that of `redline serve --weights-token-env`.
    Training needs it, or `weights_folder`; without either the server keeps its weights."""
    weights_folder: str | None = None
    """Folder that the trainer writes new weights to, and a server of SGLang or vLLM reads them from under the same path."""
    weights_server: WeightServerName | None = None
    """Whose server loads from `weights_folder`."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that the server may take for one completion."""
    options: FreeMapping = Field(default_factory=dict)
    """Further arguments of `vllm.LLM` or `sglang.Engine`, by their names."""
    max_num_seqs: PositiveInt = 256
    """Sequences decoded at once. Where a run does not say, redline's own engine has a row for each attempt of a step: 256 at
    least, and no more than 1,024 or one group."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens put through the network in one step: one for each decoding sequence, the rest for prompts."""
    max_model_len: PositiveInt | None = None
    """Longest sequence, prompt included; by default what the model's positions were made for."""
    enable_prefix_caching: bool = True
    """Reuse the keys and values of prompts that begin alike."""
    block_size: PositiveInt | None = None
    """Tokens per block of the KV cache; by default 16 on the CPU and 64 on a GPU."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Size of the KV cache; by default 4 GiB on the CPU, and what `gpu_memory_utilization` leaves on a GPU."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU's memory that may be in use once the KV cache is made."""
    speculation: SpeculationMode = "off"
    """Guess tokens from what is known (siblings, earlier attempts, the text itself) and verify several in one step; the samples
    are the same. `auto` does so where it was measured to pay, `always` wherever there is a guess."""
    quantization: Quantization = "none"
    """Sample in fewer bits, by a copy of the weights that is made anew for every version. On a CPU in whole numbers: `int16` is
    half as fast again as float32 and rounds less than bfloat16; `int8` is faster still, and off by several hundredths of a
    logprob (`trainer/mismatch_kl`). On a GPU `fp8`: steps of large models take two thirds of the time, and are off by more."""
    record_routing: bool = False
    """Keep with every token of a mixture of experts which experts it went to, a byte for each layer and choice: the trainer
    reports where its routers differ (`trainer/routing_mismatch`), and may follow (`trainer.replay_routing`)."""

    @model_validator(mode="after")
    def _a_server_has_an_address(self) -> EngineConfig:
        if self.kind == "openai" and self.url is None:
            raise ValueError("kind openai needs the address of a server; set url to http://HOST:PORT/v1")
        if self.url is not None and holds_login(self.url):
            raise ValueError("url holds a name or a password, which every record would show; set api_key_env in place of them")
        if self.url is not None and not is_server_address(self.url):
            raise ValueError(f"url = {self.url!r} is no address of a server; set it to http://HOST:PORT/v1")
        if (self.weights_folder is None) != (self.weights_server is None):
            raise ValueError("weights_folder and weights_server belong together: set both, or neither")
        return self


class RunEngineConfig(EngineConfig):
    """The engines of a run, each of which may be divided among processes."""

    tensor_parallel_size: PositiveInt = 1
    """Processes that divide the model of one engine among them. In a run that takes engines outside the trainer's process
    (`placement.engines`), each then with so many GPUs, or with its part of the cores."""

    @model_validator(mode="after")
    def _processes_do_not_guess(self) -> RunEngineConfig:
        if self.speculation != "off" and self.tensor_parallel_size > 1:
            raise ValueError("speculation is decided by a clock, and clocks of several processes differ; set one of them back")
        return self

    @model_validator(mode="after")
    def _quantized_weights_are_whole(self) -> RunEngineConfig:
        if self.quantization != "none" and self.tensor_parallel_size > 1:
            raise ValueError("quantization needs the whole model in one process; set quantization or tensor_parallel_size back")
        return self


class ServedEngineConfig(RunEngineConfig):
    """The engine of `redline serve`, which may keep adapters by name."""

    max_loras: int = Field(default=0, ge=0)
    """LoRA adapters resident at once; 0 switches LoRA off."""
    max_lora_rank: PositiveInt = 16
    """Largest rank of an adapter. Every adapter takes the room, and the time, of this rank."""

    @model_validator(mode="after")
    def _adapters_are_not_divided(self) -> ServedEngineConfig:
        if self.max_loras and self.tensor_parallel_size > 1:
            raise ValueError("LoRA adapters need the whole model in one process; set max_loras or tensor_parallel_size back")
        if self.max_loras and self.quantization != "none":
            raise ValueError("adapters by name stand beside weights that are not quantized; set max_loras or quantization back")
        return self
