"""AdamW on float32 master weights; the network computes in its own dtype.

    backward ──► a parameter's gradient is complete ──► added to its float32 sum, and freed (`gradient_sums.py`: added as made)
    norms    ──► all there is to say about a step, before anything is changed
    update   ──► for each stretch: moments in ─► AdamW with the clipping inside ─► weights written ─► moments out

The network's parameters are overwritten in place, never replaced, so what shares their storage (the engine, captured graphs)
sees the new policy at once. In float32 the parameters are their own masters. Nothing in a step waits for the device: whether
the gradient is finite is decided there, and one that is not changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError, RunFolderError
from redline.kernels.available import kernels_serve
from redline.kernels.flat_state import Stretch, Update
from redline.models.layers.gradient_sums import GradientSum, keep_sum
from redline.trainer.optimizer import schedule
from redline.trainer.optimizer.finite import GradientNorms, gradient_norms
from redline.trainer.optimizer.flat_layout import FlatLayout, flat_zeros
from redline.trainer.optimizer.offload import STRETCH_ELEMENTS, DeviceMemory, HostMemory, StateMemory
from redline.trainer.optimizer.quantized_states import CODECS, Codec, Kept

if TYPE_CHECKING:
    from redline.kernels.adamw import AdamWKernel

CLIP_EPS = 1e-6
"""Added to the norm before dividing by it, as torch's clip_grad_norm_ does."""
SEEDS_PER_UPDATE = 1 << 40
"""More than any layout has elements, and the same for all: an embedding that lies at the beginning of the first and of the last
stage is rounded by the same draws on both."""


class MasterAdamW:
    """Owns master weights, float32 gradients and Adam's moments of the parameters that require a gradient."""

    def __init__(self, network: nn.Module | Mapping[str, nn.Parameter], dtype: torch.dtype, config: TrainerConfig) -> None:
        """Converts the parameters to `dtype`; those that are frozen too, though nothing else is done with them."""
        self._config = config
        everything = dict(network.named_parameters()) if isinstance(network, nn.Module) else dict(network)
        self._parameters = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
        self._layout = FlatLayout(self._parameters)
        self._device = next(iter(self._parameters.values())).device
        self._codec: Codec = CODECS[config.optimizer_states]()
        kept = dict(self._codec.kept) | ({} if dtype == torch.float32 else {"master": (torch.float32, 1)})
        self._memory = _memory(kept, self._layout.num_elements, self._device, config.offload_optimizer)
        for name, master in self.masters.items():
            master.data.copy_(self._parameters[name].detach())
        for parameter in everything.values():
            parameter.data = parameter.data.to(dtype).contiguous()
        by_kernel = kernels_serve(next(iter(self._parameters.values())))
        # Moments that are not updated where they lie take float32 copies of a stretch, unless a kernel has them in registers.
        whole = not config.offload_optimizer and (by_kernel or config.optimizer_states == "float32")
        self._stretches = self._layout.stretches(None if whole else STRETCH_ELEMENTS)
        self._kernel = self._make_kernel() if by_kernel else None
        self._taken = torch.zeros((), device=self._device)
        self._updates = 0
        self._gradients: Tensor | None = None
        self._gradient_views: dict[str, Tensor] = {}
        self._arrived: set[str] = set()
        self.sum_squares: Callable[[tuple[str, ...], Tensor], tuple[tuple[str, ...], Tensor]] | None = None
        """Makes names and squared norms of the gradients here those of all, where several processes divide them."""
        _take_gradients(self)

    def _make_kernel(self) -> AdamWKernel:
        from redline.kernels.adamw import AdamWKernel

        return AdamWKernel(self._stretches, self._parameters, self._config.weight_decay)

    @property
    def masters(self) -> dict[str, Tensor]:
        """The float32 weights by name, wherever they lie; shares storage."""
        self._memory.settle()
        flat = self._memory.tensors.get("master")
        return dict(self._parameters) if flat is None else self._layout.views(flat)

    @property
    def gradient_bytes(self) -> int:
        """Kept from the first step on, unless the state is offloaded."""
        gradients = self._gradients
        return 0 if gradients is None else gradients.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of moments and masters, on any device. Parameters that are their own masters do not count."""
        return sum(tensor.nbytes for tensor in self._memory.tensors.values())

    def learning_rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        return schedule.learning_rate(self._config, step)

    # ── gradients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, name: str) -> None:
        """Add a parameter's gradient to its float32 sum, and free it. Autograd is off, as in every backward pass."""
        parameter = self._parameters[name]
        if parameter.grad is None:
            return
        GradientSum(partial(self._place, name)).add(parameter.grad)
        parameter.grad = None

    def _place(self, name: str) -> tuple[Tensor, bool]:
        """Where a parameter's gradients are summed, and whether the one that comes now is the first."""
        is_first = name not in self._arrived
        self._arrived.add(name)
        return self._views()[name], is_first

    def _views(self) -> dict[str, Tensor]:
        """Each parameter's part of the flat gradient, by name."""
        if self._gradients is None:
            self._gradients = flat_zeros(self._layout, self._device)
            self._gradient_views = self._layout.views(self._gradients)
        return self._gradient_views

    @torch.no_grad()
    def accumulate(self) -> None:
        """Take what no backward pass has handed over by itself: gradients that somebody assigned."""
        for name in self._parameters:
            self.take(name)

    def discard(self) -> None:
        """Forget every gradient since the last step: a backward pass that breaks off has left some in the sum."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        """Their memory is kept: given back after every step, it would come back in another place, or not at all where small
        blocks have been put into the gap. Only who moves the state to the host for want of memory wants this as well."""
        self._arrived = set()
        if self._config.offload_optimizer:
            self._gradients, self._gradient_views = None, {}

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """The float32 sums by name, to be changed in place; zero where no gradient came."""
        self.accumulate()
        views = self._views()
        for name in views.keys() - self._arrived:
            views[name].zero_()
        self._arrived = set(self._parameters)
        return views

    # ── the step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, learning_rate: float, loss: Tensor | None = None) -> float:
        """`update`, and wait for the gradient norm before clipping."""
        norms = self.norms(loss)
        self.update(learning_rate, norms)
        return float(norms.total)

    @torch.no_grad()
    def norms(self, loss: Tensor | None = None) -> GradientNorms:
        """Norms of the gradients since the last step. The step must be skipped if one of them or `loss` is not finite."""
        gradients = self.gradients()

        def norms_P() -> Tensor:  # noqa: N802
            return torch.stack(torch._foreach_norm(list(gradients.values())))

        if self.sum_squares is None and self._device.type == "cuda":  # in one pass: what lies between the gradients is zero
            assert self._gradients is not None
            return gradient_norms(torch.linalg.vector_norm(self._gradients), tuple(gradients), norms_P, loss)
        names, squares_P = tuple(gradients), norms_P().square()
        if self.sum_squares is not None:
            names, squares_P = self.sum_squares(names, squares_P)
        return gradient_norms(squares_P.sum().sqrt(), names, squares_P.sqrt, loss)

    @torch.no_grad()
    def update(self, learning_rate: float, norms: GradientNorms) -> None:
        """Clip, update, write the network's weights, forget the gradients; of a step to be skipped, only the last of these."""
        gradients = self.gradients()
        clip = ((norms.total + CLIP_EPS) / self._config.max_grad_norm).clamp(min=1.0)
        self._taken += 1
        self._updates += 1
        rates = (learning_rate, self._config.betas, self._config.eps)
        update = Update(*rates, self._taken, clip, norms.skip, seed=self._updates)
        visited = self._memory.visit(self._stretches)
        if self._kernel is not None:
            assert self._gradients is not None
            self._kernel.step(visited, self._gradients, update)
        else:
            for stretch, here in visited:
                self._update(stretch, here, gradients, update)
        self._taken -= norms.skip
        self._forget_gradients()

    def _update(self, stretch: Stretch, here: Mapping[str, Tensor], gradients: Mapping[str, Tensor], update: Update) -> None:
        pieces = stretch.pieces
        weights = [piece.of_parameter(self._parameters[piece.name].detach()) for piece in pieces]
        masters = [piece.of_stretch(here["master"]) for piece in pieces] if "master" in here else weights
        moments = self._codec.decode(here)
        torch._fused_adamw_(
            masters,
            [piece.of_parameter(gradients[piece.name]) for piece in pieces],
            [piece.of_stretch(moments[0]) for piece in pieces],
            [piece.of_stretch(moments[1]) for piece in pieces],
            [],
            [update.taken] * len(pieces),
            lr=update.learning_rate,
            beta1=update.betas[0],
            beta2=update.betas[1],
            weight_decay=self._config.weight_decay if stretch.decayed else 0.0,
            eps=update.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=update.clip,
            found_inf=update.skip,
        )
        self._codec.encode(moments, here, update.skip, seed=update.seed * SEEDS_PER_UPDATE + stretch.start)
        if masters is not weights:
            torch._foreach_copy_(weights, masters)

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, Tensor]:
        """Everything that decides the next step, by name; shares storage."""
        state = {f"master/{name}": master.detach() for name, master in self.masters.items()}
        for key in self._codec.kept:
            state |= {f"{key}/{name}": view for name, view in self._layout.views(self._memory.tensors[key]).items()}
        return state | {"step": self._taken, "updates": torch.tensor(self._updates)}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], like: Callable[[str], Tensor | None] | None = None) -> None:
        """Take over a saved state, in place where the network shares the storage. `like` returns a tensor of the same shape and
        dtype as one that takes long to read; by default the state is read twice."""
        mine = self.state()
        self._check(like or state.get, mine)
        for key in sorted(mine, key=_of_parameter):
            mine[key].copy_(state[key])
        self._updates = int(state["updates"])
        for name, master in self.masters.items():
            self._parameters[name].copy_(master)
        self.discard()

    def _check(self, like: Callable[[str], Tensor | None], mine: Mapping[str, Tensor]) -> None:
        for key, tensor in mine.items():
            saved, (kind, _, name) = like(key), key.partition("/")
            if saved is not None and saved.shape == tensor.shape and saved.dtype == tensor.dtype:
                continue
            if kind == "master":
                raise RunFolderError(
                    f"the checkpoint is of another model: {name} differs", "resume with the model it began with"
                )
            raise RunFolderError(
                f"the checkpoint's optimizer states are not {self._config.optimizer_states}: {key} differs",
                "resume with the trainer.optimizer_states it began with",
            )


def _of_parameter(key: str) -> tuple[str, str]:
    """Sorts keys of a state by parameter: the codes and the scales of a moment follow each other."""
    kind, _, name = key.partition("/")
    return name, kind


def _memory(kept: Kept, num_elements: int, device: torch.device, offload: bool) -> StateMemory:
    if not offload:
        return DeviceMemory(kept, num_elements, device)
    if device.type == "cpu":
        raise ConfigError(
            "trainer.offload_optimizer: on the CPU the optimizer's state is in host memory already",
            "set trainer.offload_optimizer=false; trainer.optimizer_states=int8 makes it smaller",
        )
    return HostMemory(kept, num_elements, device)


def _take_gradients(optimizer: MasterAdamW) -> None:
    """Have every backward pass hand over each gradient as soon as it is complete, for as long as the optimizer lives: through
    autograd, or past it where the code that makes the gradient can add to a float32 sum."""
    owner, parameters = weakref.ref(optimizer), optimizer._parameters

    def take(name: str, _: Tensor) -> None:
        if alive := owner():
            alive.take(name)

    def place(name: str) -> tuple[Tensor, bool]:
        alive = owner()
        assert alive is not None
        return alive._place(name)

    ends = [p.register_post_accumulate_grad_hook(partial(take, name)).remove for name, p in parameters.items()]
    for name, parameter in parameters.items():
        if parameter.is_cuda and parameter.dtype in (torch.bfloat16, torch.float16):
            ends.append(keep_sum(parameter, partial(place, name)))
    weakref.finalize(optimizer, lambda: [end() for end in ends])
