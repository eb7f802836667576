"""A model of a given shape as a folder: weights drawn by lot, and a tokenizer with a word for each entry of the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from safetensors.torch import save_file

from redline.lab.material.networks import random_decoder
from redline.lab.material.workloads import RANDOM, SHAPES
from redline.models.files.hf import hf_tensors, load_tokenizer
from redline.models.files.tiny import tiny_tokenizer

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}w0"
PAD, EOS = "<pad>", "<eos>"


@contextmanager
def as_path(
    model: str, device: torch.device, dtype: torch.dtype, seed: int, tokenizer: Path | Literal["words", "tiny"] = "words"
) -> Iterator[str]:
    """What a recipe can be given as `model.path`: a folder for `random:NAME`, thrown away afterwards; all else as it is. Its
    tokenizer has a word for each entry of the vocabulary, or a token for each byte (`tiny`), or is that of a folder."""
    if not model.startswith(RANDOM):
        yield model
        return
    with TemporaryDirectory(prefix="redline-bench-") as folder:
        write_random_model(Path(folder), model.removeprefix(RANDOM), device, dtype, seed)
        if tokenizer != "words":
            _replace_tokenizer(Path(folder), tokenizer)
        yield folder


def write_random_model(folder: Path, shape: str, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Write a model of the Llama family, without biases: other families bring tokenizers of their own."""
    from transformers import LlamaConfig

    vocab_size = SHAPES[shape]["vocab_size"]
    config = LlamaConfig(
        **SHAPES[shape],
        architectures=["LlamaForCausalLM"],
        bos_token_id=None,
        pad_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
    )
    config.save_pretrained(folder)
    decoder = random_decoder(config, device, dtype, seed)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in hf_tensors(decoder)}, folder / "model.safetensors")
    word_tokenizer(vocab_size).save_pretrained(folder)


def _replace_tokenizer(folder: Path, tokenizer: Path | str) -> None:
    """Give a folder a tokenizer of text, and the id of its end of turn."""
    found = tiny_tokenizer() if tokenizer == "tiny" else load_tokenizer(Path(tokenizer))
    found.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": found.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))


def word_tokenizer(vocab_size: int):  # type: ignore[no-untyped-def]  # transformers' tokenizers are not typed
    """`w7` is token 7; the last two are special."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*(f"w{number}" for number in range(vocab_size - 2)), PAD, EOS]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, unk_token="w0", chat_template=CHAT_TEMPLATE
    )
