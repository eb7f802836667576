"""Records the logs beside it: TRL's GRPOTrainer takes a few steps with a tiny model that is made here, and logs them in every
way that it knows. Needs torch, trl, tensorboard and wandb; it sends nothing anywhere:

    python record.py OUT
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import wandb
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

STEPS = 16
QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_HOST": "tiny",
    "WANDB_X_DISABLE_META": "true",
}
"""Keeps what the machine is called, and where things lie on it, out of the logs."""
WORDS = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(29))]


def policy() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A network of two small layers and a vocabulary of 32 words."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config), tokenizer


def even_words(completions: list[str], **_: object) -> list[float]:
    """The share of words with an even number."""
    said = [[int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(words) / max(1, len(words)) for words in said]


def record(out: Path, folder: Path) -> None:
    set_seed(0)
    model, tokenizer = policy()
    tasks = Dataset.from_list([{"prompt": " ".join(random.choices(WORDS[3:], k=4))} for _ in range(64)])
    settings = GRPOConfig(
        output_dir="out",
        report_to=["tensorboard", "wandb"],
        run_name="tiny",
        max_steps=STEPS,
        logging_steps=1,
        save_steps=STEPS,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model, even_words, args=settings, train_dataset=tasks, eval_dataset=tasks.select(range(8)), processing_class=tokenizer
    )
    trainer.train()
    wandb.finish()
    keep(folder, out)


def keep(folder: Path, out: Path) -> None:
    """Copy the logs, under names that do not name the machine."""
    for name, pattern in (("trainer_state.json", "out/checkpoint-*/trainer_state.json"), ("run-tiny.wandb", "wandb/*/*.wandb")):
        shutil.copy(next(folder.glob(pattern)), out / name)
    events = next(path for path in folder.rglob("*tfevents*"))
    shutil.copy(events, out / "events.out.tfevents.tiny")


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        os.environ.update(QUIET)
        record(target, Path(scratch))
