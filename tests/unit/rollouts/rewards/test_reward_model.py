"""A reward model against transformers, one conversation at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_models import SHAPE, randomize
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    RobertaConfig,
)

from redline.errors import ModelError
from redline.models.files.tiny import tiny_tokenizer, write_tiny_model
from redline.rollouts.rewards.reward_model import RewardModel
from redline.types import Failure, Message

TOKENIZER = tiny_tokenizer()
SIZES: dict[str, Any] = SHAPE | {"vocab_size": len(TOKENIZER), "num_labels": 1}
NO_PADDING = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES | {"pad_token_id": TOKENIZER.pad_token_id}),
    "llama, no padding token": LlamaConfig(**SIZES | NO_PADDING),
    "qwen2, pads with the end of a turn": Qwen2Config(**SIZES | {"pad_token_id": TOKENIZER.eos_token_id}),
    "bert": BertConfig(**SIZES | {"pad_token_id": TOKENIZER.pad_token_id}),
    "roberta": RobertaConfig(**SIZES | {"pad_token_id": TOKENIZER.pad_token_id, "max_position_embeddings": 600}),
}
CONVERSATIONS: list[list[Message]] = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]
    for answer in ("4", "four, of course", "", "I would rather not say. " * 6, "5")
]


def write_reward_model(folder: Path, config: PretrainedConfig, template: bool = True) -> PreTrainedModel:
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    randomize(model, seed=0, std=0.2)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return model


def reward_model(folder: Path, max_tokens: int = 400) -> RewardModel:
    return RewardModel(folder, "cpu", torch.float32, max_tokens)


@torch.no_grad()
def score_alone(model: PreTrainedModel, tokens: Sequence[int]) -> float:
    return float(model(torch.tensor([tokens])).logits[0, 0])


def rendered(conversation: Sequence[Message]) -> list[int]:
    return TOKENIZER.encode(TOKENIZER.apply_chat_template(conversation, tokenize=False), add_special_tokens=False)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("max_tokens", [1, 150, 10**6])
def test_a_batch_has_the_scores_that_each_conversation_has_alone(family: str, max_tokens: int, tmp_path: Path) -> None:
    model = write_reward_model(tmp_path, CONFIGS[family])
    expected = [score_alone(model, rendered(conversation)) for conversation in CONVERSATIONS]
    assert min(abs(one - other) for one, other in itertools.combinations(expected, 2)) > 1e-5
    assert reward_model(tmp_path, max_tokens).scores(CONVERSATIONS) == pytest.approx(expected, abs=3e-6)


def test_padding_is_never_taken_for_text(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path, CONFIGS["llama, no padding token"])
    sequences = [[0, 1, 2, 3, 0, 0], [0], [5, 4, 0], [1, 0]]
    expected = [score_alone(model, tokens) for tokens in sequences]
    assert reward_model(tmp_path).scores_of_tokens(sequences) == pytest.approx(expected, abs=1e-4)


def test_without_a_template_the_messages_are_paragraphs(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path, CONFIGS["llama"], template=False)
    expected = score_alone(model, TOKENIZER.encode("2 + 2?\n\n4"))
    assert reward_model(tmp_path).scores(CONVERSATIONS[:1]) == pytest.approx([expected], abs=1e-4)


def test_a_conversation_longer_than_the_model_takes_is_a_failure_and_the_others_have_scores(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path, CONFIGS["llama"])
    sequences = [[7] * 20, [7] * 257, [7] * 256, []]
    found = reward_model(tmp_path).scores_of_tokens(sequences)
    assert found[0] == pytest.approx(score_alone(model, sequences[0]), abs=1e-4)
    assert found[1] == Failure("reward", "reward model: 257 tokens, but it takes 1 to 256")
    assert found[2] == pytest.approx(score_alone(model, sequences[2]), abs=1e-4)
    assert found[3] == Failure("reward", "reward model: 0 tokens, but it takes 1 to 256")


def test_a_score_that_is_not_finite_is_a_failure(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path, CONFIGS["llama"])
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    assert reward_model(tmp_path).scores(CONVERSATIONS[:1]) == [Failure("reward", "reward model: the score is nan")]


def test_nothing_to_score_is_nothing(tmp_path: Path) -> None:
    write_reward_model(tmp_path, CONFIGS["llama"])
    assert reward_model(tmp_path).scores([]) == []


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with pytest.raises(ModelError, match="not a reward model: it is made for LlamaForCausalLM"):
        reward_model(tmp_path)


def test_a_classifier_with_more_labels_is_refused(tmp_path: Path) -> None:
    write_reward_model(tmp_path, LlamaConfig(**SIZES | {"num_labels": 3, "pad_token_id": 0}))
    with pytest.raises(ModelError, match="it tells 3 labels apart"):
        reward_model(tmp_path)


def test_a_folder_whose_weights_lack_the_head_is_refused(tmp_path: Path) -> None:
    write_reward_model(tmp_path, CONFIGS["llama"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the weights lack score\.weight"):
        reward_model(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write_reward_model(tmp_path, CONFIGS["llama"])
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        reward_model(tmp_path)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    write_reward_model(tmp_path, CONFIGS["llama"])
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="transformers cannot load it"):
        reward_model(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"unreadable config\.json"):
        reward_model(tmp_path)
