"""Everything that decides the sizes of a run, with nothing left open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from redline.config import Config, resolve
from redline.engine.native.quantized import check_fp8_types, check_shape
from redline.errors import ConfigError, RedlineError
from redline.kernels.cpu import attention, training
from redline.lab.material.workloads import RANDOM
from redline.lab.plan.devices import Device
from redline.lab.plan.shapes import Model, classifier_parameters, describe_model
from redline.lab.plan.stages import KEY, check_stages, layers_of, parameters_of
from redline.models.attention.padded import writes_out
from redline.models.layer_code import Checkpointing, LayerCode, layer_code
from redline.models.parallel import shard_spec
from redline.models.spec import DecoderSpec, refuse_undivided
from redline.trainer.batches.cost import CostModel
from redline.trainer.parallel.place import Division, Sharding, refuse_offloads

PROMPT_TOKENS = 128
"""Tokens of a prompt unless told otherwise: tasks are not loaded, so their prompts cannot be counted."""

PROCESS_BYTES = 600 * 10**6
"""Bytes of an interpreter with torch and what else a run imports, unless it was measured."""


@dataclass(slots=True, frozen=True)
class Work:
    """What one step samples and trains on."""

    groups: int
    group_size: int
    prompt_tokens: int
    max_new_tokens: int
    mean_new_tokens: float

    @property
    def sequences(self) -> int:
        return self.groups * self.group_size

    @property
    def new_tokens(self) -> float:
        """Sampled by all attempts, on average."""
        return self.sequences * self.mean_new_tokens

    def share(self, parts: int) -> Work:
        """What one of several engines or trainers gets: whole groups, rounded up."""
        return replace(self, groups=-(-self.groups // parts))


@dataclass(slots=True, frozen=True)
class Setup:
    """A recipe on devices."""

    config: Config
    """Resolved for the device that is planned for, which may not be here."""
    model: Model
    device: Device
    gpus: int
    work: Work
    reward_parameters: int = 0
    """Parameters of a reward model; 0 where there is none."""
    process_bytes: int = PROCESS_BYTES
    """Bytes of an idle process on the host."""
    sharding: Sharding = "none"
    """What the trainers of several devices divide among them."""
    tensor_parallel_size: int = 1
    """Devices that divide one engine's model among them."""
    given: frozenset[str] = frozenset()
    """Which of the two were asked for, and are not ours to choose."""

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.model.dtype)
        return dtype

    @property
    def kind(self) -> str:
        return self.device.kind

    @property
    def checkpointing(self) -> Checkpointing:
        return self.config.trainer.gradient_checkpointing

    @property
    def trained(self) -> int:
        """Parameters that get gradients."""
        lora = self.config.trainer.lora
        return self.model.adapter(lora.rank, lora.targets) if lora.rank else self.model.parameters

    @property
    def adapter(self) -> int:
        """Parameters beside those of the model."""
        return self.trained if self.config.trainer.lora.rank else 0

    @property
    def stages(self) -> int:
        """Devices that divide the trainer's layers."""
        return self.config.trainer.pipeline_parallel_size

    @property
    def data_ranks(self) -> int:
        """Trainers that get micro-batches of their own: devices / stages."""
        return self.gpus // self.stages

    @property
    def engines(self) -> int:
        """Engines that share a step's attempts: devices / those that divide one."""
        return max(1, self.gpus // self.tensor_parallel_size)

    @property
    def own_parameters(self) -> int:
        """Parameters of the model that one device computes with: all, or those of the fullest stage. Shards divide them."""
        return parameters_of(self.model, self.stages)

    @property
    def own_adapter(self) -> int:
        """Parameters of the adapter that one device computes with: all, or those of the fullest stage."""
        return -(-self.adapter * layers_of(self.model, self.stages)[0] // self.model.shape.num_layers) if self.adapter else 0

    @property
    def own_trained(self) -> int:
        """What of both gets gradients."""
        return self.own_adapter or self.own_parameters

    @property
    def shards(self) -> int:
        """Processes that divide gradients and optimizer state among them."""
        return 1 if self.sharding == "none" else self.gpus

    @property
    def divides_weights(self) -> bool:
        """Whether no device of the trainer has all weights to itself."""
        return self.sharding != "none" or self.stages > 1

    @property
    def engine_shares_weights(self) -> bool:
        """Engine and trainer read one storage: neither divides the weights."""
        return self.tensor_parallel_size == 1 and not self.divides_weights

    @property
    def layer_code(self) -> LayerCode:
        whole = not self.config.trainer.lora.rank
        on_gpu = self.device.is_gpu
        facts = {"kernels": on_gpu, "whole": whole, "compiled": not on_gpu and training.is_there(self.dtype)}
        return layer_code(self.model.shape, self.dtype, self.checkpointing, **facts)

    @property
    def shares_prompts(self) -> bool:
        """Whether the trainer computes a group's prompt once."""
        cost = CostModel.of(self.model.shape, self.model.parameters)
        prompt, attempts = np.array([float(self.work.prompt_tokens)]), np.array([self.work.group_size])
        return bool(cost.sharing_pays(prompt, attempts)[0])

    @property
    def tokens_per_rank(self) -> int:
        """Through one trainer in a step, all its stages, if every attempt is as long as it may be."""
        return self._tokens(self.work.share(self.data_ranks).groups, self.work.max_new_tokens)

    @property
    def mean_tokens_per_rank(self) -> int:
        return self._tokens(self.work.share(self.data_ranks).groups, self.work.mean_new_tokens)

    def _tokens(self, groups: int, new_tokens: float) -> int:
        work = self.work
        prompts = 1 if self.shares_prompts else work.group_size
        return round(groups * (prompts * work.prompt_tokens + work.group_size * new_tokens))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.work.prompt_tokens + self.work.max_new_tokens

    @property
    def pads_attention(self) -> bool:
        """Whether it is torch's, in rectangles: on a CPU where there is no C for it."""
        if self.device.is_gpu:
            return False
        return bool(self.model.shape.windows) or not attention.is_there(self.dtype, self.model.shape.head_dim)

    @property
    def attention_room(self) -> int:
        """Bytes that attention works in where it is C."""
        if self.device.is_gpu or self.pads_attention:
            return 0
        lengths = (self.work.prompt_tokens, self.work.max_new_tokens) if self.shares_prompts else (self.longest, 0)
        return attention.room_bytes(self.dtype, *lengths, self.model.shape.head_dim, self.config.run.num_threads or 1)

    def scores_per_token(self, tokens: int) -> float:
        """Attention scores that a token of a micro-batch keeps in a layer: on the CPU, where they are written out."""
        if not self.pads_attention:
            return 0
        shape, work = self.model.shape, self.work
        own = work.max_new_tokens if self.shares_prompts else self.longest
        sequences = max(1, tokens // own)
        return shape.num_heads * self.longest if writes_out(shape.num_heads * sequences * own * self.longest) else 0

    def changed(self, **sections: dict[str, Any]) -> Setup:
        """The same with other values: `changed(trainer={"offload_optimizer": True})`."""
        config = self.config
        updates = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
        return replace(self, config=config.model_copy(update=updates))


def make_setup(
    config: Config,
    device: Device,
    gpus: int = 1,
    prompt_tokens: int = PROMPT_TOKENS,
    mean_new_tokens: float | None = None,
    process_bytes: int = PROCESS_BYTES,
) -> Setup:
    """For a device that need not be here. Raises `ConfigError` where the recipe cannot run on it."""
    if gpus < 1 or (gpus > 1 and not device.is_gpu):
        raise ConfigError(f"--gpus {gpus}: {device.name} is planned as one machine", "leave --gpus out")
    rollouts = config.rollouts
    if mean_new_tokens is not None and not 1 <= mean_new_tokens <= rollouts.max_new_tokens:
        raise ConfigError(
            f"--new-tokens {mean_new_tokens:g}: rollouts.max_new_tokens = {rollouts.max_new_tokens}", "give from 1 to that many"
        )
    _check_quantization(config, device)
    resolved = _resolved_for(config, device)
    work = Work(
        rollouts.groups_per_step,
        rollouts.group_size,
        prompt_tokens,
        rollouts.max_new_tokens,
        rollouts.max_new_tokens if mean_new_tokens is None else mean_new_tokens,
    )
    judge = classifier_parameters(rollouts.reward_model.path) if rollouts.reward_model.path else 0
    model = describe_model(config.model.path)
    if prompt_tokens >= model.shape.max_positions:
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens}: {config.model.path} has {model.shape.max_positions:,} positions",
            "give fewer, or a model with more",
        )
    if (kind := resolved.engine.quantization) != "none":
        check_shape(model.shape, kind)
        if kind == "fp8":
            check_fp8_types(getattr(torch, resolved.model.dtype), resolved.engine.block_size)
    return Setup(resolved, model, device, gpus, work, judge, process_bytes)


def divided(setup: Setup, sharding: Sharding | None, tensor_parallel_size: int | None) -> Setup:
    """The setup divided as asked for; None leaves it to the planner. Raises `ConfigError` where the devices cannot."""
    if setup.gpus == 1 and (sharding not in (None, "none") or tensor_parallel_size not in (None, 1)):
        raise ConfigError("one device divides nothing", "give the number of devices with --gpus")
    if tensor_parallel_size is not None and setup.gpus % tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel {tensor_parallel_size}: does not divide the {setup.gpus} devices", "give a divisor of --gpus"
        )
    if tensor_parallel_size not in (None, 1) and setup.config.engine.quantization != "none":
        raise ConfigError(
            f"--tensor-parallel {tensor_parallel_size}: engine.quantization needs the whole model in one process",
            "leave it out, or set engine.quantization=none",
        )
    check_stages(setup.model, setup.stages, setup.gpus)
    if setup.stages > 1 and sharding not in (None, "none"):
        raise ConfigError(
            f"--sharding {sharding}: with {KEY} = {setup.stages} stages divide the weights already",
            f"leave it out, or set {KEY}=1",
        )
    asked = {"sharding": sharding, "tensor_parallel_size": tensor_parallel_size}
    found = replace(
        setup,
        sharding=sharding or setup.sharding,
        tensor_parallel_size=tensor_parallel_size or setup.tensor_parallel_size,
        given=frozenset(name for name, value in asked.items() if value is not None),
    )
    if reason := refusal(found):
        raise reason
    return found


def refusal(setup: Setup) -> RedlineError | None:
    """Why a run would refuse what several devices divide here; None where it would begin."""
    shape, parts = setup.model.shape, setup.tensor_parallel_size
    try:
        refuse_offloads(setup.config.trainer, Division(sharding=setup.sharding, pipeline_parallel_size=setup.stages))
        if setup.sharding != "none":
            refuse_undivided(shape.family, "trainer.sharding")
        if parts > 1:
            refuse_undivided(shape.family, f"engine.tensor_parallel_size = {parts}")
            if isinstance(shape, DecoderSpec):
                shard_spec(shape, parts)
    except RedlineError as error:
        return error
    return None


def _check_quantization(config: Config, device: Device) -> None:
    kind, hint = config.engine.quantization, "set engine.quantization=none"
    if kind == "none":
        return
    if device.is_gpu != (kind == "fp8"):
        place = "GPUs" if kind == "fp8" else "CPUs"
        raise ConfigError(f"engine.quantization = {kind}: it is for {place}, and the plan for {device.name}", hint)
    if device.is_gpu and not device.has_fp8:
        raise ConfigError(
            f"engine.quantization = fp8: {device.name} has no such products; GPUs since Ada and Hopper have", hint
        )


def _resolved_for(config: Config, device: Device) -> Config:
    """As `resolve` has it on that device. A shape by name is no path, and is checked where it is read. What only a GPU does is
    left out meanwhile."""
    path, quantization = config.model.path, config.engine.quantization
    dtype = config.model.dtype if config.model.dtype != "auto" or not device.is_gpu else "bfloat16"
    here = config.model_copy(
        update={
            "run": config.run.model_copy(update={"device": "cpu"}),
            "engine": config.engine.model_copy(update={"quantization": "none"} if device.is_gpu else {}),
            "model": config.model.model_copy(
                update={"dtype": dtype} | ({"path": "builtin:tiny"} if path.startswith(RANDOM) else {})
            ),
        }
    )
    found = resolve(here).config
    if not device.is_gpu and found.trainer.offload_optimizer:
        raise ConfigError(
            "trainer.offload_optimizer: on the CPU the optimizer's state is in host memory already",
            "set trainer.offload_optimizer=false",
        )
    run = found.run.model_copy(update={"device": device.kind})
    model = found.model.model_copy(update={"path": path})
    engine = found.engine.model_copy(update={"quantization": quantization})
    return found.model_copy(update={"run": run, "model": model, "engine": engine})
