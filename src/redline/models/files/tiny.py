"""Models made in code, with Llama's architecture and a byte-level tokenizer: one of 0.1 M parameters for smoke runs and tests,
and one of 13 M, where the network and not the Python around it takes the time, for benchmarks."""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def write_tiny_model(folder: Path, seed: int = 0, **shape: int) -> None:
    """A Hugging Face folder with random weights."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(shape_config(**shape)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def shape_config(**shape: int):  # type: ignore[no-untyped-def]
    """The config of a model made here; what `shape` leaves out is that of the smallest."""
    from transformers import LlamaConfig

    tokenizer = tiny_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        **(TINY | shape),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=tokenizer.eos_token_id,
    )


def tiny_tokenizer():  # type: ignore[no-untyped-def]  # transformers' tokenizers are not typed
    """One token per byte, and the three specials of the ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
