"""A trainer as small as one can be, around `Parallel`: what it computes on several processes must be what it computes on one.

Run by the tests themselves for the single process, and by the processes of `rank_processes.py` for the others."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from redline.config.sections.lora import LoraConfig
from redline.config.sections.trainer import TrainerConfig
from redline.kernels.segments import NO_PARENT, Segments
from redline.models.attention.packed import PackedAttention
from redline.models.decoder import Decoder
from redline.models.lora.trainable import add_adapter
from redline.models.spec import DecoderSpec
from redline.models.value_head import ValueNetwork
from redline.trainer.batches.micro_batches import MicroBatch
from redline.trainer.checkpoints.background import CheckpointWriter
from redline.trainer.checkpoints.folder import load_checkpoint
from redline.trainer.checkpoints.tensors import SavedTensors
from redline.trainer.loss.logprobs import selected_logprobs
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.parallel import ranks
from redline.trainer.parallel import weights as trainer_weights
from redline.trainer.parallel.orders import Order
from redline.trainer.parallel.place import Division
from redline.trainer.parallel.processes import Parallel, Together, connect
from redline.trainer.parallel.ranks import join
from redline.trainer.parallel.sequence_parallel import SequenceShare

SPEC = DecoderSpec(
    family="qwen3",
    vocab_size=61,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_positions=128,
    intermediate_size=28,
    norm_eps=1e-6,
    tied_embeddings=True,
    qkv_bias=True,
    o_bias=False,
    mlp_bias=False,
    qk_norm=True,
)
"""No dimension is a multiple of all the others, and some divide unevenly: 61 rows by 2, 6 by 4."""
TEMPERATURE = 0.9
TEXTS = ((7, (9, 4, 13)), (5, (8,)), (3, (6, 11)), (12, (2, 2, 5, 3)), (1, (17,)))
"""Groups: the length of the prompt, and of each attempt after it. Most micro-batches have an odd number of tokens."""
OPTIMIZER: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
"""With so large an eps, a gradient that differs by rounding makes an update that differs by rounding."""

Network = Decoder | ValueNetwork
CHECKPOINTS = itertools.count()
"""How many this process has written."""


@dataclass
class Case:
    """Everything that a run depends on."""

    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    network: Literal["policy", "adapter", "critic"] = "policy"
    tied: bool = True
    num_kv_heads: int = 2
    steps: int = 1
    micro_batches: int = 4
    """In all; data-parallel ranks take turns."""
    sequence_loss: bool = False
    """A loss that looks at whole sequences at once."""
    look: bool = False
    """Pass a micro-batch through the network, without gradients, before the weights change."""
    start: Path | None = None
    """The checkpoint to begin from."""
    first_step: int = 0
    """Decides the data."""


@dataclass
class Outcome:
    gradients: dict[str, Tensor]
    """Of the first step."""
    norms: list[float]
    weights: dict[str, Tensor]
    """Masters, at the end."""
    state: dict[str, Tensor]
    """As the checkpoint holds it, whole; rank 0 only."""
    totals: list[float]
    """Trained tokens and loss of the last step, over all processes."""
    folder: Path = Path()
    """The checkpoint."""


def train(case: Case) -> Outcome:
    """On as many processes as there are."""
    return train_with(meet(**case.config), case)


def train_in_small_buckets(case: Case) -> Outcome:
    """So that gradients travel in many pieces, some of them alone."""
    parallel = meet(**case.config)
    before, trainer_weights.BUCKET_BYTES = trainer_weights.BUCKET_BYTES, 1024
    try:
        return train_with(parallel, case)
    finally:
        trainer_weights.BUCKET_BYTES = before


def talk() -> tuple[list[float], list[float], Order]:
    """Sums over processes that have micro-batches of their own, the largest of all, and an order of rank 0."""
    parallel, orders = meet(), join().orders
    rank = parallel.place.rank
    order = Order("hello", {"to": ["all", 2, None]}, {"a": np.arange(3), "b": np.array([[True], [False]]), "c": np.zeros(0)})
    if parallel.is_main:
        orders.give(order)
    heard = order if parallel.is_main else orders.take()
    return parallel.sum_of(torch.tensor([1.0, rank])).tolist(), parallel.max_of(torch.tensor([-rank, rank])).tolist(), heard


def fail_together() -> bool:
    """What ranks do that have all got the same error. Returns, on a rank that follows, whether rank 0 had written everything
    when it went on."""
    meet()
    ranks.LAST_WORDS_S = 0.0
    own = join()
    if own.rank == 0:
        own.closes()
        own.store.wait(["test/waits"])
        own.store.set("test/written", "")
        own.closed()
        return True
    own.store.wait([ranks.CLOSES])  # however much later it comes on a busy machine
    own.store.set("test/waits", "")
    own.wait_for_rank_0()
    return bool(own.store.check(["test/written"]))


def patience_of_groups(patience_s: float, keys: dict[str, Any]) -> dict[str, float]:
    """How long torch waits in each group of processes."""
    parallel = connect(parted(keys)[0], torch.device("cpu"), patience_s)
    groups = {name.strip("_"): group for name, group in vars(parallel).items() if isinstance(group, dist.ProcessGroup)}
    if isinstance(parallel, Together) and parallel.is_divided:
        mesh = parallel._shards
        groups |= {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
    cpu = torch.device("cpu")
    return {name: group._get_backend(cpu).options._timeout.total_seconds() for name, group in groups.items()}


def meet(**keys: Any) -> Parallel:
    division, _ = parted(keys)
    return connect(division, torch.device("cpu"))


def parted(keys: dict[str, Any]) -> tuple[Division, dict[str, Any]]:
    """How processes divide the work, and the keys of the trainer's section."""
    names = {field.name for field in fields(Division)}
    return Division(**{k: v for k, v in keys.items() if k in names}), {k: v for k, v in keys.items() if k not in names}


def train_with(parallel: Parallel, case: Case) -> Outcome:
    network = small_network(case)
    weights = parallel.wrap(network, case.dtype)
    config = TrainerConfig(**{**OPTIMIZER, **parted(case.config)[1]})
    optimizer = MasterAdamW(weights.parameters, torch.float32 if weights.are_masters else case.dtype, config)
    optimizer.sum_squares = weights.sum_squares
    if case.start:
        optimizer.load_state(weights.own_state(opened(case.start)))
        weights.changed()
    outcome = Outcome({}, [], {}, {}, [])
    for step in range(case.first_step, case.first_step + case.steps):
        totals = torch.zeros(2)
        mine = micro_batches(case.micro_batches, step)[parallel.place.data_rank :: parallel.place.data_ranks]
        for index, micro_batch in enumerate(mine):
            with weights.micro_batch(last=index == len(mine) - 1):
                loss = loss_of(parallel.share(micro_batch), network, micro_batch, case)
                loss.backward()
            optimizer.accumulate()
            totals += torch.tensor([float(len(micro_batch.targets_M)), loss.detach()])
        weights.sum_gradients(optimizer.gradients())
        if not outcome.gradients:
            outcome.gradients = {name: whole.clone() for name, whole in weights.full(optimizer.gradients(), torch.float32)}
        if case.look:
            with torch.no_grad():
                idle = micro_batches(6, seed=0)[-1]
                loss_of(parallel.share(idle), network, idle, case)
        outcome.norms.append(optimizer.step(learning_rate=1e-2))
        weights.changed()
        outcome.totals = parallel.sum_of(totals).tolist()
    outcome.weights = {name: whole.clone() for name, whole in weights.full(optimizer.masters, torch.float32)}
    outcome.folder = save(parallel, optimizer)
    if parallel.is_main:
        outcome.state = {key: value.clone() for key, value in opened(outcome.folder).items()}
    return outcome


def save(parallel: Parallel, optimizer: MasterAdamW) -> Path:
    """Write a checkpoint, each process its part, to a folder that all name alike."""
    name = f"redline-{os.getppid() if parallel.place.world > 1 else os.getpid()}-{parallel.place.world}-{next(CHECKPOINTS)}"
    folder = Path(tempfile.gettempdir()) / name / "step-000001"
    if parallel.is_main or parallel.is_divided:
        writer = CheckpointWriter(parallel.checkpoint())
        writer.save(folder, 1, optimizer.state())
        writer.close()
    parallel.max_of(torch.zeros(1))  # it is whole once rank 0 has come here
    return folder


def opened(folder: Path) -> SavedTensors:
    tensors = load_checkpoint(folder).tensors
    assert isinstance(tensors, SavedTensors)
    return tensors


def loss_of(share: SequenceShare, network: Network, micro_batch: MicroBatch, case: Case) -> Tensor:
    attend = PackedAttention(micro_batch.segments)
    inputs = torch.from_numpy(micro_batch.tokens_T)[share.tokens], attend.positions_T[share.tokens], share.attend(attend)
    predicted_from = torch.from_numpy(share.predicted_from)
    if isinstance(network, ValueNetwork):
        values_M = share.gather(network(*inputs, predicted_from))
        return (values_M - torch.cos(torch.arange(len(values_M)))).square().sum() / 64
    hidden = network(*inputs).index_select(0, predicted_from)
    targets = torch.from_numpy(micro_batch.targets_M[share.trained])
    logprobs, entropy = selected_logprobs(hidden, network.output_weight, targets, TEMPERATURE)
    logprobs_M, entropy_M = share.gather(logprobs), share.gather(entropy)
    assert len(entropy_M) == len(micro_batch.targets_M)
    sequence_M = torch.from_numpy(micro_batch.local_sequence_M)
    if case.sequence_loss:
        sums = torch.zeros(int(sequence_M.max()) + 1).index_add(0, sequence_M, logprobs_M)
        return -(sums / 10).exp().sum()
    advantages_M = torch.where(sequence_M % 2 == 0, 1.0, -0.7)
    old_M = -3.5 - 0.3 * torch.cos(torch.arange(len(logprobs_M)))
    ratio_M = torch.exp(logprobs_M - old_M)
    return -torch.minimum(ratio_M * advantages_M, ratio_M.clamp(0.8, 1.3) * advantages_M).sum() / 64


# ── parts ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def small_network(case: Case) -> Network:
    spec = replace(SPEC, tied_embeddings=case.tied, num_kv_heads=case.num_kv_heads)
    decoder = Decoder(spec, 10_000.0 ** -(torch.arange(0, spec.head_dim, 2) / spec.head_dim))
    randomize(decoder)
    if case.network == "adapter":
        add_adapter(decoder, LoraConfig(rank=3), case.dtype, seed=0)
    network = ValueNetwork(decoder) if case.network == "critic" else decoder
    randomize(network)
    return network


@torch.no_grad()
def randomize(network: Network) -> None:
    """What is to be trained."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in network.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad:
            parameter.copy_(1 + 0.3 * drawn if name.endswith("norm") else 0.2 * drawn)


def micro_batches(count: int, seed: int) -> list[MicroBatch]:
    """The groups dealt out over `count`, each with its prompt as a segment of its own; the last may get none."""
    random = np.random.default_rng(seed)
    return [pack(TEXTS[index::count], random) for index in range(count)]


def pack(groups: Sequence[tuple[int, tuple[int, ...]]], random: np.random.Generator) -> MicroBatch:
    lengths, parents, from_M, sequence_M = [], [], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for prompt, attempts in groups:
        root, prompt_end = len(lengths), sum(lengths) + prompt - 1
        lengths.append(prompt)
        parents.append(NO_PARENT)
        for attempt in attempts:
            first = sum(lengths)
            from_M.append(np.array([prompt_end, *range(first, first + attempt - 1)]))
            sequence_M.append(np.full(attempt, len(sequence_M) - 1))
            lengths.append(attempt)
            parents.append(root)
    if not groups:
        lengths, parents = [1], [NO_PARENT]
    num_trained = sum(map(len, from_M))
    return MicroBatch(
        tokens=random.integers(0, SPEC.vocab_size, sum(lengths)),
        segments=Segments(np.cumsum([0, *lengths]), np.array(parents)),
        predicted_from_M=np.concatenate(from_M),
        targets=random.integers(0, SPEC.vocab_size, num_trained),
        old_logprobs=np.zeros(num_trained, np.float32),
        index_M=np.zeros(num_trained, np.int64),
        sequence_M=np.concatenate(sequence_M),
        local_sequence_M=np.concatenate(sequence_M),
    )
