"""The whole method in one plain file: a language model learns one-digit sums and differences by GRPO.

Each step asks a few questions, samples a group of answers to each, rewards the correct ones, and makes every answer that
beat its group's mean more likely, every other one less. That is what the redline package does at scale. This file imports
none of it, and tests/e2e/test_one_file_example.py holds the package to it: from the same seed both sample the same tokens
and end with the same weights. Read it from top to bottom.

Left out, against the package: a prompt computed once for its whole group, packing without padding, bfloat16 with float32
masters, more than one process or device, other tasks and multi-turn environments, failures of user code, warm-up, the run
folder with its metrics, traces, checkpoints and resume, the saved model, and speed.

    make demo                          # once: leaves SmolLM2-135M in ~/.cache/redline/models
    .venv/bin/python examples/one_file_rl.py --model ~/.cache/redline/models/smollm2-135m-instruct
    .venv/bin/python examples/one_file_rl.py --model FOLDER --steps 5 --seed 1 --max-new-tokens 16

Letters in names of tensors: B rows sampled at once, L columns of tokens, G attempts per group, N new tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUPS_PER_STEP, GROUP_SIZE = 8, 8
CLIP_LOW, CLIP_HIGH, MAX_GRAD_NORM = 0.2, 0.2, 1.0
EVALUATION_SAMPLES = 4
EVALUATION_STREAM = 2**31  # far above any training task's number, so that evaluation never repeats its randomness

# ── the task ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ANSWERS = {f"What is {a} + {b}? Give only the final answer.": str(a + b) for a in range(10) for b in range(10)}
ANSWERS |= {f"What is {a} - {b}? Give only the final answer.": str(a - b) for a in range(10) for b in range(10)}


def is_held_out(question: str) -> bool:
    """A fifth of the questions, chosen by a hash of their text: the same ones in every process and for every seed."""
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big") < 0.2 * 2**64


TRAIN, HELD_OUT = [q for q in ANSWERS if not is_held_out(q)], [q for q in ANSWERS if is_held_out(q)]


def train_question(index: int, seed: int) -> str:
    """Training question number `index` of a run."""
    return TRAIN[splitmix64(seed, index) % len(TRAIN)]


def reward(question: str, text: str) -> float:
    """1 where the last number in the text is the answer."""
    return float(re.findall(r"-?\d+", text)[-1:] == [ANSWERS[question]])


# ── sampling ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Attempt:
    prompt: list[int]
    completion: list[int]  # the sampled tokens, the stop token included
    logprobs: list[float]  # of each sampled token, under the distribution it was drawn from
    reward: float = 0.0


def splitmix64(seed: int, index: int) -> int:
    """Number `index` of the stream `seed`: 64 random bits (Steele et al. 2014) that depend on nothing else."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def draw(logprobs_BV: Tensor, streams: list[int], position: int) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number `position` of the row's stream."""
    uniform = [(splitmix64(stream, position) >> 11) * 2.0**-53 for stream in streams]
    cdf_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    target_B1 = torch.tensor(uniform, dtype=torch.float64, device=cdf_BV.device)[:, None] * cdf_BV[:, -1:]
    return (cdf_BV <= target_B1).sum(dim=-1, keepdim=True).clamp(max=cdf_BV.shape[1] - 1)


@torch.no_grad()
def sample(model: Any, prompts: list[list[int]], streams: list[int], stop_ids: set[int], args: Namespace) -> list[Attempt]:
    """A completion of each prompt. Rows are decoded together, prompts padded on the left; a finished row idles."""
    width = max(map(len, prompts))
    tokens_BL = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask_BL = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    lengths = [args.max_new_tokens] * len(prompts)
    logprobs, cache, fresh = [], None, slice(0, width)  # the whole prompt goes in first, then one token at a time
    for position in range(args.max_new_tokens):
        positions_BL = (mask_BL.cumsum(dim=1) - 1).clamp(min=0)[:, fresh]
        output = model(tokens_BL[:, fresh], mask_BL, positions_BL, past_key_values=cache, logits_to_keep=1)
        logprobs_BV = torch.log_softmax(output.logits[:, -1].float() / args.temperature, dim=-1)
        newest_B1 = draw(logprobs_BV, streams, position)
        logprobs.append(logprobs_BV.gather(1, newest_B1))
        tokens_BL, mask_BL = torch.cat([tokens_BL, newest_B1], dim=1), torch.cat([mask_BL, torch.ones_like(newest_B1)], dim=1)
        cache, fresh = output.past_key_values, slice(width + position, None)
        for row, token in enumerate(newest_B1[:, 0].tolist()):
            if token in stop_ids:
                lengths[row] = min(lengths[row], position + 1)
        if position + 1 >= max(lengths):
            break
    drawn = zip(prompts, tokens_BL[:, width:].tolist(), torch.cat(logprobs, dim=1).tolist(), lengths, strict=True)
    return [Attempt(prompt, tokens[:length], numbers[:length]) for prompt, tokens, numbers, length in drawn]


def attempt(model: Any, tokenizer: Any, questions: list[str], n: int, first: int, args: Namespace) -> list[list[Attempt]]:
    """n rewarded attempts at each question. Attempt i at question k draws from the stream (seed of the run, first + k, i)."""
    chats = [[{"role": "user", "content": question}] for question in questions for _ in range(n)]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    streams = [splitmix64((args.seed << 32) + first + k, i) for k in range(len(questions)) for i in range(n)]
    listed = model.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    attempts = sample(model, prompts, streams, stop_ids, args)
    answers = tokenizer.batch_decode([a.completion for a in attempts], skip_special_tokens=True)
    for index, answer in enumerate(answers):
        attempts[index].reward = reward(questions[index // n], answer)
    return [attempts[start : start + n] for start in range(0, len(attempts), n)]


# ── learning ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def group_advantages(rewards: list[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6): the group is its own baseline."""
    return ((np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-6)).tolist()


def grpo_loss(logprobs_GN: Tensor, old_logprobs_GN: Tensor, advantages_G1: Tensor, weights_GN: Tensor) -> Tensor:
    """GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3) without the KL term:

        L = - 1/S Σ_s 1/|o_s| Σ_t min(r_st A_s, clip(r_st, 1 - clip_low, 1 + clip_high) A_s),
        r_st = π(o_st | q, o_s<t) / π_old(o_st | q, o_s<t)

    `weights_GN` holds 1 / (S |o_s|) for each sampled token and 0 for padding. π_old is what the sampler reported. Trained on
    at once, r is 1 and L is 0 up to rounding, since a group's advantages sum to 0; its gradient is not.
    """
    ratio_GN = torch.exp(logprobs_GN - old_logprobs_GN)
    clipped_GN = ratio_GN.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -(weights_GN * torch.minimum(ratio_GN * advantages_G1, clipped_GN * advantages_G1)).sum()


def group_loss(model: Any, group: list[Attempt], num_sequences: int, args: Namespace) -> Tensor:
    """One group's share of the loss. Padding is on the right, where no real token looks: attention is causal."""

    def padded(rows: list[list[Any]], dtype: torch.dtype) -> Tensor:
        return pad_sequence([torch.tensor(row, dtype=dtype, device=model.device) for row in rows], batch_first=True)

    prompt_length = len(group[0].prompt)
    tokens_GL = padded([a.prompt + a.completion for a in group], torch.int64)
    old_logprobs_GN = padded([a.logprobs for a in group], torch.float32)
    weights_GN = padded([[1 / (num_sequences * len(a.completion))] * len(a.completion) for a in group], torch.float32)
    advantages_G1 = padded([[advantage] for advantage in group_advantages([a.reward for a in group])], torch.float32)
    logits_GNV = model(tokens_GL).logits[:, prompt_length - 1 : -1].float() / args.temperature
    logprobs_GNV = torch.log_softmax(logits_GNV, dim=-1)
    logprobs_GN = logprobs_GNV.gather(2, tokens_GL[:, prompt_length:, None]).squeeze(2)
    return grpo_loss(logprobs_GN, old_logprobs_GN, advantages_G1, weights_GN)


def train_on(model: Any, optimizer: torch.optim.AdamW, groups: list[list[Attempt]], args: Namespace) -> tuple[float, float]:
    """One optimizer step; the loss, and the gradient's norm before clipping. Gradients add up over the groups."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # not None: AdamW's moments decay in a step without signal too
    total = 0.0
    for group in groups:
        if len({a.reward for a in group}) > 1:  # otherwise all advantages are 0, and so is the gradient
            loss = group_loss(model, group, sum(map(len, groups)), args)
            loss.backward()
            total += loss.item()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item()
    optimizer.step()
    return total, grad_norm


def train(model: Any, tokenizer: Any, args: Namespace) -> Iterator[tuple[list[list[Attempt]], float, float]]:
    """The loop: every token is trained on by the policy that sampled it. Gives groups, loss and gradient norm of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    for step in range(args.steps):
        first = step * GROUPS_PER_STEP
        questions = [train_question(first + i, args.seed) for i in range(GROUPS_PER_STEP)]
        groups = attempt(model, tokenizer, questions, GROUP_SIZE, first, args)
        yield groups, *train_on(model, optimizer, groups, args)


def mean_reward(groups: list[list[Attempt]]) -> float:
    return float(np.mean([a.reward for group in groups for a in group]))


def evaluate(model: Any, tokenizer: Any, args: Namespace) -> float:
    """Mean reward on questions never trained on, with the same randomness every time."""
    return mean_reward(attempt(model, tokenizer, HELD_OUT, EVALUATION_SAMPLES, EVALUATION_STREAM, args))


# ── the command line ───────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(), metavar="FOLDER", help="a chat model in Hugging Face format")
    for flag, default in {"steps": 40, "seed": 0, "max-new-tokens": 64, "learning-rate": 1e-5, "temperature": 1.0}.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default, help="default %(default)s")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        hint = "`make demo` leaves SmolLM2 in ~/.cache/redline/models/smollm2-135m-instruct"
        parser.error(f"--model must name a Hugging Face model folder\n\nhint: {hint}")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"held-out accuracy before: {evaluate(model, tokenizer, args):.1%}", flush=True)
    started = time.perf_counter()
    for step, (groups, loss, grad_norm) in enumerate(train(model, tokenizer, args), start=1):
        line = f"step {step}/{args.steps}  reward {mean_reward(groups):.3f}  loss {loss:+.1e}  grad norm {grad_norm:.3f}"
        print(f"{line}  {time.perf_counter() - started:.1f} s", flush=True)
        started = time.perf_counter()
    print(f"held-out accuracy after: {evaluate(model, tokenizer, args):.1%}")


if __name__ == "__main__":
    main()
