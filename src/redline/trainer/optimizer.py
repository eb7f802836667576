"""AdamW on float32 master weights; the network computes in its own dtype.

The network's parameters are overwritten in place after each step, never replaced, so whoever shares their storage (the
engine, captured graphs) sees the new policy at once. In float32 the parameters are their own masters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from redline.config.schema import TrainerConfig
from redline.errors import RunFolderError


class MasterAdamW:
    """Owns master weights, float32 gradients and Adam's moments."""

    def __init__(self, network: nn.Module, dtype: torch.dtype, config: TrainerConfig) -> None:
        self._config = config
        self._parameters = dict(network.named_parameters())
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            self.masters[name] = parameter if dtype == torch.float32 else nn.Parameter(parameter.detach().float().clone())
            parameter.data = parameter.data.to(dtype)
        matrices = [master for master in self.masters.values() if master.dim() > 1]
        vectors = [master for master in self.masters.values() if master.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)

    def learning_rate(self, step: int) -> float:
        """Of step number `step`, counted from 0: linear warm-up, then constant or a linear fall to zero."""
        warmup, decay = self._config.warmup_steps, self._config.decay_steps
        rising = min(1.0, (step + 1) / max(1, warmup))
        falling = 1 - max(0, step - warmup) / decay if decay else 1.0
        return self._config.learning_rate * rising * falling

    def accumulate(self) -> None:
        """Add the network's gradients to the masters' in float32, and free them."""
        for name, master in self.masters.items():
            parameter = self._parameters[name]
            if parameter is master or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def step(self, learning_rate: float) -> float:
        """Clip, update, write the network's weights; the gradient norm before clipping. A bad norm changes nothing."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        norm = float(nn.utils.clip_grad_norm_(self.masters.values(), self._config.max_grad_norm))
        if norm == norm and norm != float("inf"):
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self._write_back()
        self._adamw.zero_grad()
        return norm

    @torch.no_grad()
    def _write_back(self) -> None:
        for name, master in self.masters.items():
            if self._parameters[name] is not master:
                self._parameters[name].copy_(master)

    def state(self) -> dict[str, Tensor]:
        """Everything that decides the next step, by name; shares storage."""
        state = {f"master/{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                state[f"{key}/{name}"] = value
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved state, in place where the network shares the storage."""
        for name, master in self.masters.items():
            saved = state.get(f"master/{name}")
            if saved is None or saved.shape != master.shape:
                raise RunFolderError(
                    f"the checkpoint is of another model: {name} differs", "resume with the model it began with"
                )
        for name, master in self.masters.items():
            master.copy_(state[f"master/{name}"])
            moments = {key: state[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in state}
            self._adamw.state[master] = {key: value.clone().to(master.device) for key, value in moments.items()}
        self._write_back()
