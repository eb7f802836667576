"""The shape of a model from the header of a .gguf file: its key-value pairs and the names of its tensors.

    "GGUF" │ version u32 │ tensors u64 │ pairs u64 │ pairs: key, type, value … │ tensors: name, dimensions, type, offset …

Strings and arrays begin with their length as u64. The long arrays (the vocabulary) are stepped over, not read into objects.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from redline.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type number → its `struct` letter."""
STRING, ARRAY = 8, 9


class _Count(int):
    """An array, of which only the length is kept."""


def read_header(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Keys with their values, and the names of the tensors."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC or _scalar(file, "I") not in VERSIONS:
                raise ModelError(f"{path}: not a GGUF file of version 2 or 3", "give a .gguf file as llama.cpp writes it now")
            num_tensors, num_pairs = _scalar(file, "Q"), _scalar(file, "Q")
            pairs = {_string(file): _value(file, _scalar(file, "I")) for _ in range(num_pairs)}
            names = [_tensor_name(file) for _ in range(num_tensors)]
    except (OSError, struct.error, UnicodeDecodeError, KeyError) as error:
        raise ModelError(f"{path}: unreadable header: {error}", "download or convert the file again") from error
    return pairs, names


def config_from_header(path: Path) -> PretrainedConfig:
    """As transformers would have it; families that are not ours are left to transformers itself."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    pairs, names = read_header(path)
    family = pairs.get("general.architecture")
    kinds: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    if family not in kinds:
        raise ModelError(f"{path}: architecture {family!r} is not one of {', '.join(kinds)}", "give its Hugging Face folder")

    def of(name: str, default: Any = None) -> Any:
        value = pairs.get(f"{family}.{name}", default)
        if value is None:
            raise ModelError(f"{path}: the header lacks {family}.{name}", "convert the file again")
        return value

    heads, hidden = int(of("attention.head_count")), int(of("embedding_length"))
    return kinds[family](
        vocab_size=int(pairs.get(f"{family}.vocab_size") or pairs["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=int(of("feed_forward_length")),
        num_hidden_layers=int(of("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(of("attention.head_count_kv", heads)),
        head_dim=int(of("attention.key_length", hidden // heads)),
        max_position_embeddings=int(of("context_length")),
        rms_norm_eps=float(of("attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="output.weight" not in names,
        attention_bias=family == "llama" and "blk.0.attn_q.bias" in names,
    )


def _scalar(file: BinaryIO, letter: str) -> Any:
    size = struct.calcsize(f"<{letter}")
    return struct.unpack(f"<{letter}", file.read(size))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_scalar(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind != ARRAY:
        return _scalar(file, SCALARS[kind])
    inner, length = _scalar(file, "I"), _scalar(file, "Q")
    if inner in SCALARS:
        file.seek(length * struct.calcsize(f"<{SCALARS[inner]}"), 1)
    else:
        for _ in range(length):
            _skip(file, inner)
    return _Count(length)


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == STRING:
        file.seek(_scalar(file, "Q"), 1)
    else:
        _value(file, kind)


def _tensor_name(file: BinaryIO) -> str:
    name = _string(file)
    dimensions = _scalar(file, "I")
    file.seek(8 * dimensions + 4 + 8, 1)  # sizes, type, offset
    return name
