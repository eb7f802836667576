"""Weights as they lie in a Hugging Face folder: theirs by name, and ours as rows of theirs.

Our fused parameters are the row-wise concatenation of theirs; `layout_of` is the one place that knows which. Files are mapped
into memory, so that a run of rows is read without the rest of its tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from redline.errors import ModelError, in_words
from redline.models.spec import DecoderSpec, ExpertsSpec

MISMATCH = "the weights do not belong to this config.json"
INDEX = "model.safetensors.index.json"
"""Says which file has which weight, where there are several."""
DTYPES = ("F64", "F32", "F16", "BF16")
"""Types of stored numbers that are weights by themselves: others need scales that lie beside them."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:input_layernorm|post_attention_layernorm)\.")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the integer type that its bits are."""


@dataclass(slots=True, frozen=True)
class Source:
    """One of our parameters as rows of theirs."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    stacked: str | None = None
    """The one parameter of transformers' network that holds all of them, a matrix for each expert; None where each is one. Some
    checkpoints have it in place of the names."""

    @property
    def num_rows(self) -> int:
        """Rows of ours: the sum of `rows`."""
        return sum(self.rows)

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Their names with the rows of each that are our rows `start` to `stop`, in order."""
        first = 0
        for name, count in zip(self.names, self.rows, strict=True):
            begin, end = max(start - first, 0), min(stop - first, count)
            if begin < end:
                yield name, begin, end
            first += count


def layout_of(spec: DecoderSpec) -> dict[str, Source]:
    """Our parameter name → their names and row counts."""
    whole = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    if not spec.tied_embeddings:
        whole["lm_head"] = "lm_head.weight"
    rows = {"embed": spec.vocab_size, "norm": spec.hidden_size, "lm_head": spec.vocab_size}
    layout = {ours: Source((theirs,), (rows[ours],)) for ours, theirs in whole.items()}
    for index in range(spec.num_layers):
        layout |= {f"layers.{index}.{ours}": source for ours, source in _layer_layout(spec, index).items()}
    return layout


def _layer_layout(spec: DecoderSpec, index: int) -> dict[str, Source]:
    prefix, experts = f"model.layers.{index}", spec.experts_of(index)

    def norm(name: str, size: int) -> Source:
        return Source((f"{prefix}.{name}.weight",), (size,))

    layout = {
        "attn_norm": norm("input_layernorm", spec.hidden_size),
        "mlp_norm": norm("post_attention_layernorm", spec.hidden_size),
    }
    if spec.qk_norm:
        layout["q_norm"] = norm("self_attn.q_norm", spec.head_dim)
        layout["k_norm"] = norm("self_attn.k_norm", spec.head_dim)
    linears = {
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), spec.qkv_sizes, spec.qkv_bias),
        "o": (("self_attn.o_proj",), (spec.hidden_size,), spec.o_bias),
    }
    if experts is None:
        linears |= {
            "gate_up": (("mlp.gate_proj", "mlp.up_proj"), (spec.intermediate_size,) * 2, spec.mlp_bias),
            "down": (("mlp.down_proj",), (spec.hidden_size,), spec.mlp_bias),
        }
    else:
        layout |= {f"experts.{name}": source for name, source in _experts_layout(spec, experts, f"{prefix}.mlp").items()}
    for ours, (theirs, rows, has_bias) in linears.items():
        for kind in ("weight", "bias") if has_bias else ("weight",):
            layout[f"{ours}.{kind}"] = Source(tuple(f"{prefix}.{name}.{kind}" for name in theirs), rows)
    return layout


def _experts_layout(spec: DecoderSpec, experts: ExpertsSpec, prefix: str) -> dict[str, Source]:
    each = [f"{prefix}.experts.{expert}" for expert in range(experts.count)]
    gates_and_ups = tuple(f"{expert}.{name}.weight" for expert in each for name in ("gate_proj", "up_proj"))
    return {
        "router": Source((f"{prefix}.gate.weight",), (experts.count,)),
        "gate_up": Source(
            gates_and_ups, (experts.intermediate_size,) * len(gates_and_ups), stacked=f"{prefix}.experts.gate_up_proj"
        ),
        "down": Source(
            tuple(f"{expert}.down_proj.weight" for expert in each),
            (spec.hidden_size,) * experts.count,
            stacked=f"{prefix}.experts.down_proj",
        ),
    }


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, as transformers chooses them: `model.safetensors`, else those that its index
    names, else every safetensors file. What lies beside them, such as a copy of earlier weights, is no part of the model."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _indexed(index)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{folder}: no *.safetensors file", "give a folder with safetensors weights")
    return found


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: unreadable: {in_words(error)}", "download or convert the model again") from error


class StoredTensors:
    """The folder's safetensors files as one mapping, by their names, read on demand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: dict[str, safe_open] = {}
        where: dict[str, str] = {}
        for path in weight_files(folder):
            try:
                shard = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: damaged: {error}", "download or convert the model again") from error
            for name in shard.keys():  # noqa: SIM118  it is no mapping
                if name in where:
                    raise ModelError(
                        f"{folder}: {name} is in {where[name]} and in {path.name}",
                        "leave the files of one model in the folder, or call the one that is meant model.safetensors",
                    )
                where[name] = path.name
                self._shards[name] = shard

    def refuse_more_layers(self, count: int) -> None:
        """Raise ModelError where the files have layers beyond the first `count`: a model without them would be another."""
        numbers = {int(found[1]) for name in self._shards if (found := _LAYER.match(name))}
        if numbers and max(numbers) >= count:
            what = f"the weights have {max(numbers) + 1} layers, config.json says {count}"
            raise ModelError(f"{self._folder}: {what}", MISMATCH)

    def check(self, source: Source, columns: torch.Size | None = None) -> None:
        """Whether a parameter of ours is there, with as many rows as config.json says, and rows of this shape where one is
        given, without reading it."""
        if self._is_stacked(source):
            assert source.stacked is not None
            self._rows_of_each(source.stacked, source)
            return
        for name, rows in zip(source.names, source.rows, strict=True):
            shape = self._shape(name)
            if columns is not None and shape != [rows, *columns]:
                raise ModelError(f"{self._folder}: {name} is {shape}, config.json says {[rows, *columns]}", MISMATCH)
            if shape[0] != rows:
                raise ModelError(f"{self._folder}: {name} is {shape}, config.json says {rows} rows", MISMATCH)

    def rows(self, source: Source, start: int, stop: int, columns: torch.Size) -> Iterator[Tensor]:
        """Rows `start` to `stop` of a parameter of ours, whose rows have this shape, in pieces as they lie in the files."""
        self.check(source, columns if stop - start == source.num_rows else None)
        if self._is_stacked(source):
            assert source.stacked is not None
            yield self._of_stack(source.stacked, source, start, stop, columns)
            return
        for name, begin, end in source.overlaps(start, stop):
            rows: Tensor = self._shard(name).get_slice(name)[begin:end]
            if rows.shape != (end - begin, *columns):
                self._refuse_rows(name, rows, [end - begin, *columns])
            yield rows

    def _is_stacked(self, source: Source) -> bool:
        """Whether the files hold all experts in one tensor, as transformers' network does."""
        return source.stacked in self._shards and source.names[0] not in self._shards

    def _of_stack(self, name: str, source: Source, start: int, stop: int, columns: torch.Size) -> Tensor:
        each = self._rows_of_each(name, source)
        first = start // each
        rows: Tensor = self._shard(name).get_slice(name)[first : -(-stop // each)].flatten(0, 1)
        if rows.shape[1:] != columns:
            self._refuse_rows(name, rows, [each, *columns])
        return rows[start - first * each : stop - first * each]

    def _rows_of_each(self, name: str, source: Source) -> int:
        """Rows of one expert in a tensor of all."""
        shape = self._shape(name)
        if len(shape) != 3 or shape[0] * shape[1] != source.num_rows or len(source.names) % shape[0]:
            raise ModelError(f"{self._folder}: {name} is {shape}, config.json says {source.num_rows} rows", MISMATCH)
        return shape[1]

    def _refuse_rows(self, name: str, rows: Tensor, expected: list[int]) -> None:
        raise ModelError(f"{self._folder}: {name} has rows {list(rows.shape)}, config.json says {expected}", MISMATCH)

    def _shape(self, name: str) -> list[int]:
        found = self._shard(name).get_slice(name)
        if found.get_dtype() not in DTYPES:
            raise ModelError(
                f"{self._folder}: {name} is stored as {found.get_dtype()}: the weights are quantized",
                "give the folder of the unquantized model; training needs its precision",
            )
        return found.get_shape()

    def _shard(self, name: str) -> safe_open:
        if name not in self._shards:
            raise ModelError(f"{self._folder}: the weights lack {name}", MISMATCH)
        return self._shards[name]


class StoredWeights:
    """The weights of a folder by our names, for a process that holds a part of each: only its rows are read, in the dtype of
    the file."""

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        self._tensors, self._layout = StoredTensors(folder), layout_of(spec)
        self._places = {name: place for place, name in enumerate(self._layout, start=1)}

    def fill(self, name: str, start: int, into: Tensor) -> None:
        """Copy as many rows of a parameter as `into` has, from `start` on."""
        filled = 0
        for rows in self._rows(name, start, start + len(into), into.shape[1:]):
            into[filled : filled + len(rows)].copy_(rows)
            filled += len(rows)

    def digest(self, name: str, start: int, stop: int, columns: torch.Size) -> int:
        """A number that differs, as good as always, where the bits of these rows do; those of several runs of rows add up."""
        found = sum(
            int(rows.contiguous().view(BITS[rows.itemsize]).sum(dtype=torch.int64))
            for rows in self._rows(name, start, stop, columns)
        )
        return self._places[name] * found

    def _rows(self, name: str, start: int, stop: int, columns: torch.Size) -> Iterator[Tensor]:
        return self._tensors.rows(self._layout[name], start, stop, columns)
