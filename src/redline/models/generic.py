"""Any causal language model of transformers, behind the outside of `Decoder`: slower, but of almost every family.

transformers runs its own layers on packed tokens, and their attention goes to the caller's `attend`. That is right only where
attention is all that tokens see of each other, and where `attend` is all there is to attention. So a network is watched and
compared with transformers' own forward when it is wrapped, and refused where the two differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.errors import ModelError, boundary
from redline.kernels.segments import Segments
from redline.models.attention.asked_limits import limits_of
from redline.models.attention.limits import NO_LIMITS, Limits, capped_attention
from redline.models.attention.packed import PackedAttention
from redline.models.attention.routed import ROUTED, WATCHED, Route, Watch, set_attention, through
from redline.models.layer_code import LayerCode
from redline.models.mixture import mixture_of
from redline.models.spec import NO_LIMIT, ModelShape, fixed_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from redline.models.decoder import Attend

CHECKED_LENGTHS = (9, 6)
"""Tokens of the sequences that are compared."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Difference between logits that rounding may make, in units of their standard deviation. Networks are compared in float32
(`in_float32`); the others are for those that do not fit the device twice more."""


class GenericDecoder(nn.Module):
    """Packed token ids → hidden states → logits, by a network of transformers. Its parameters are the network's own."""

    spec: ModelShape
    plain_head: bool
    """True where the logits are `hidden @ output_weight.T` and nothing else."""
    logit_cap: float | None
    """Where the logits are `cap · tanh(hidden @ output_weight.T / cap)` and nothing else, the cap; None for any other head."""
    limits: tuple[Limits, ...]
    """Limits of each layer's attention."""
    _head: Callable[..., Any]
    """The network without its layers. No submodule: it shares the network's modules, and each parameter has one name."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network.eval()
        with boundary() as caught, torch.no_grad(), in_float32(network):
            self._body_name = _body_name(network)
            self._check()
        if caught.error is not None:
            set_attention(network, "eager")
            if isinstance(caught.error, torch.OutOfMemoryError):
                raise caught.error
            reason = caught.error.message if isinstance(caught.error, ModelError) else repr(caught.error)
            raise ModelError(
                f"model family {network.config.model_type!r} does not run on redline's attention: {reason}",
                "TransformersEngine samples from it with transformers' own cache; it cannot be trained",
            ) from caught.error

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E], as the head takes them."""
        route = Route(attend, self.spec.head_dim, self.limits)
        return self._run_body(tokens_T, positions_T, route).last_hidden_state[0]

    def logits(self, hidden_ME: Tensor) -> Tensor:
        """[M, V]: what the network makes of them, with its scale, bias or cap."""
        return self._head(inputs_embeds=hidden_ME[None], use_cache=False).logits[0]

    def training_code(self, dtype: torch.dtype) -> LayerCode:
        """What runs its layers in a training step: transformers, whatever the device."""
        return "eager"

    @property
    def output_weight(self) -> Tensor:
        """[V, E]: the language-model head, or the embedding where they are tied."""
        return self.network.get_output_embeddings().weight

    def train(self, mode: bool = True) -> GenericDecoder:
        """Dropout stays off: the trainer must compute what the engine sampled from."""
        return self

    def _run_body(self, tokens_T: Tensor, positions_T: Tensor, layers: Route | Watch) -> Any:
        with through(layers):
            body = self.network.get_submodule(self._body_name)
            return body(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)

    def _check(self) -> None:
        """Find out what can be known only once the network has run, or why it cannot be used."""
        network, sequences = self.network, _some_sequences(self.network)
        set_attention(network, "eager")
        theirs_TV = torch.cat([network(tokens[None], use_cache=False).logits[0] for tokens in sequences])

        set_attention(network, WATCHED)
        watch, positions = Watch(), torch.arange(len(sequences[0]), device=network.device)
        output = self._run_body(sequences[0], positions, watch)
        config = network.config.get_text_config(decoder=True)
        found = [limits_of(asked, fixed_positions(config), network.device) for asked in watch.layers]
        self.limits, longest = tuple(limits for limits, _ in found), min((reach for _, reach in found), default=NO_LIMIT)
        shape = _shape(network, watch, output.last_hidden_state.shape[-1], theirs_TV.shape[-1], longest)
        windows = tuple(limits.window for limits in self.limits if limits.window is not None and limits.window < longest)
        self.spec = replace(shape, mixture=mixture_of(network), windows=windows)
        object.__setattr__(self, "_head", _replaced(network, self._body_name.split("."), _Given(type(output))))

        set_attention(network, ROUTED)
        attend = _Remembered(PackedAttention(Segments.independent(CHECKED_LENGTHS), network.device))
        tokens_T, positions_T = torch.cat(sequences), attend.packed.positions_T
        hidden_TE = self(tokens_T, positions_T, attend)
        self._compare(self.logits(hidden_TE), theirs_TV, "packed sequences")
        last = torch.tensor(CHECKED_LENGTHS).cumsum(0) - 1
        hidden_BE = self(tokens_T[last], positions_T[last], attend.last_tokens)
        self._compare(self.logits(hidden_BE), theirs_TV[last], "tokens that come one at a time")
        self.plain_head = _is_plain(self, hidden_TE)
        self.logit_cap = _cap(self, hidden_TE, getattr(config, "final_logit_softcapping", None))

    def _compare(self, ours_TV: Tensor, theirs_TV: Tensor, what: str) -> None:
        error = logits_error(ours_TV, theirs_TV, self.network.dtype)
        if not error <= TOLERANCE[self.network.dtype]:
            raise ModelError(f"the logits of {what} differ from transformers' by {error:.2g} of their standard deviation")


def _body_name(network: PreTrainedModel) -> str:
    """The name of the module with everything but the head: most networks say which, a few only by what it is called."""
    for body in (network.get_decoder(), network.base_model, getattr(network, "model", network)):
        if body is not network and hasattr(body, "config"):
            return next(name for name, module in network.named_modules() if module is body)
    raise ModelError("its layers and its head cannot be told apart")


class _Given(nn.Module):
    """Stands where a network's layers were, and returns as hidden states what it gets as embeddings."""

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self._output_type = output_type

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        return self._output_type(last_hidden_state=inputs_embeds)


def _replaced(module: nn.Module, path: Sequence[str], leaf: nn.Module) -> nn.Module:
    """Copies of the modules along the path, with `leaf` at its end; everything else is shared."""
    if not path:
        return leaf
    twin = copy.copy(module)
    twin._modules = {**module._modules, path[0]: _replaced(module.get_submodule(path[0]), path[1:], leaf)}
    return twin


# ── what it needs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _some_sequences(network: PreTrainedModel) -> tuple[Tensor, ...]:
    """Ids from the lower end of the vocabulary: images and the like have theirs at the upper."""
    highest = min(1000, len(network.get_input_embeddings().weight))
    drawn = torch.randint(5, highest, (sum(CHECKED_LENGTHS),), generator=torch.Generator().manual_seed(0))
    return drawn.to(network.device).split(CHECKED_LENGTHS)


def _shape(network: PreTrainedModel, watch: Watch, hidden_size: int, vocab_size: int, longest: int) -> ModelShape:
    """`longest` is how far the layers' attention is what ours is."""
    config = network.config.get_text_config(decoder=True)
    if len(watch.shapes) != config.num_hidden_layers:
        raise ModelError(f"its {config.num_hidden_layers} layers ask for attention {len(watch.shapes)} times")
    if watch.extras:
        raise ModelError(f"its attention also takes {', '.join(sorted(watch.extras))}")
    if len({(heads, kv_heads) for heads, kv_heads, _ in watch.shapes}) > 1:
        raise ModelError("its layers have different numbers of heads")
    if longest == NO_LIMIT:
        raise ModelError("its config.json does not say how long a sequence may be")
    return ModelShape(
        family=network.config.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=len(watch.shapes),
        num_heads=watch.shapes[0][0],
        num_kv_heads=watch.shapes[0][1],
        head_dim=max(head_dim for _, _, head_dim in watch.shapes),
        max_positions=longest,
    )


# ── is it the same function? ───────────────────────────────────────────────────────────────────────────────────────────


class _Remembered:
    """Packed attention that keeps every layer's keys and values, so that last tokens can come again on their own."""

    def __init__(self, packed: PackedAttention) -> None:
        self.packed = packed
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        self._seen[layer] = k_TKD, v_TKD
        return self.packed(layer, q_THD, k_TKD, v_TKD, limits)

    def last_tokens(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        """Attention of each sequence's last token to itself and to the remembered ones before it."""
        rows, start = [], 0
        for b, length in enumerate(CHECKED_LENGTHS):
            k_KND, v_KND = (
                torch.cat((seen[start : start + length - 1], own[b : b + 1])).transpose(0, 1)
                for seen, own in zip(self._seen[layer], (k_BKD, v_BKD), strict=True)
            )
            rows.append(_attend_from_last(q_BHD[b], k_KND, v_KND, limits))
            start += length
        return torch.stack(rows)


def _attend_from_last(q_HD: Tensor, k_KND: Tensor, v_KND: Tensor, limits: Limits) -> Tensor:
    """[H, D]: the attention of one token to all keys, itself the last, within the limits."""
    first = 0 if limits.window is None else max(0, k_KND.shape[1] - limits.window)
    k_HND, v_HND = (x[:, first:].repeat_interleave(len(q_HD) // len(x), dim=0) for x in (k_KND, v_KND))
    if limits.softcap is not None:
        return capped_attention(q_HD[:, None], k_HND, v_HND, torch.zeros((), device=q_HD.device), limits.softcap).squeeze(1)
    return F.scaled_dot_product_attention(q_HD[:, None], k_HND, v_HND).squeeze(1)


@contextmanager
def in_float32(network: nn.Module) -> Iterator[None]:
    """Inside, the network computes in float32 if the device has room for that; afterwards its weights are where they were."""
    held = (*network.parameters(), *network.buffers())
    narrow = [tensor for tensor in held if tensor.dtype in (torch.bfloat16, torch.float16)]
    before = [tensor.data for tensor in narrow]
    try:
        with suppress(torch.OutOfMemoryError):
            wide = [tensor.data.float() for tensor in narrow]
            for tensor, data in zip(narrow, wide, strict=True):
                tensor.data = data
        yield
    finally:
        for tensor, data in zip(narrow, before, strict=True):
            tensor.data = data


def logits_error(ours_TV: Tensor, theirs_TV: Tensor, dtype: torch.dtype) -> float:
    """Root mean square difference over the standard deviation of the worst token. A network that computes in less than float32
    may send a token or two to another expert, so there it is the median token's."""
    error_T = (ours_TV.double() - theirs_TV.double()).square().mean(dim=-1).sqrt()
    error_T = error_T / theirs_TV.double().std(dim=-1).clamp(min=1e-12)
    return float(error_T.amax() if dtype == torch.float32 else error_T.median())


def _is_plain(decoder: GenericDecoder, hidden_TE: Tensor) -> bool:
    """Whether the head is a product and nothing else."""
    return _head_is(decoder, hidden_TE, lambda plain_TV: plain_TV)


def _cap(decoder: GenericDecoder, hidden_TE: Tensor, said: float | None) -> float | None:
    """The cap that the config names, if it is all that the head has beside its product."""
    if said is not None and _head_is(decoder, hidden_TE, lambda plain_TV: said * torch.tanh(plain_TV / said)):
        return said
    return None


def _head_is(decoder: GenericDecoder, hidden_TE: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
    """Whether the logits are this function of the plain ones. A bias shows at zero, a cap far from it, a scale in between."""
    if bool(decoder.logits(torch.zeros_like(hidden_TE)).any()):
        return False
    for size in (1, 1000):
        theirs_TV = decoder.logits(size * hidden_TE).double()
        expected_TV = function(F.linear(size * hidden_TE, decoder.output_weight).double())
        if not (theirs_TV - expected_TV).norm() <= 0.02 * expected_TV.norm():
            return False
    return True
