"""A model that plays in `redline env play`: its prompts are made, and its replies read, as in a run."""

from __future__ import annotations

import asyncio

from redline.config import resolve_engine, validate_engine
from redline.environments.driver import Asked, Reply
from redline.errors import EngineError
from redline.launch.engines import LoadedEngine, load_engine
from redline.launch.process import prepare_process
from redline.rollouts.chat import Chat
from redline.rollouts.conversation import Conversation
from redline.types import GenerateRequest, SamplingParams

MAX_TOKENS = 256
"""Of a reply, where neither the environment nor the command line says how many."""


class ModelPlayer:
    """Each role has a conversation of its own, which keeps the tokens that were sampled."""

    def __init__(self, path: str, temperature: float, max_tokens: int | None, seed: int) -> None:
        """Load the model: a Hugging Face folder, a run folder, a .gguf file, a hub id or a built-in one."""
        values = {"model": {"path": path}, "run": {"seed": seed}, "engine": {"max_num_seqs": 16}}
        recipe = resolve_engine(validate_engine(values, "redline env play")).recipe
        prepare_process(recipe)
        self._loaded: LoadedEngine = load_engine(recipe)
        self._chat = Chat(self._loaded.tokenizer, None, "")
        self._temperature, self._max_tokens, self._seed = temperature, max_tokens or MAX_TOKENS, seed
        self._conversations: dict[str, Conversation] = {}
        self._asked = 0
        self._turn = asyncio.Lock()

    async def __call__(self, asked: Asked) -> Reply:
        async with self._turn:
            return await asyncio.to_thread(self._reply, asked)

    def close(self) -> None:
        """Give the model's memory back."""
        self._loaded.close()

    def _reply(self, asked: Asked) -> Reply:
        """Blocks until the model has replied."""
        conversation = self._conversations.setdefault(asked.role, Conversation(self._chat, self._loaded.stop_token_ids))
        prompt = conversation.ask(asked.messages, asked.tools).prompt_ids
        room = self._loaded.max_positions - len(prompt)
        if room < 1:
            raise EngineError(f"the prompt has {len(prompt)} tokens, and the model takes {self._loaded.max_positions}")
        sampling = SamplingParams(
            max_tokens=min(asked.max_tokens or self._max_tokens, self._max_tokens, room),
            temperature=self._temperature,
            stop=tuple(asked.stop),
            stop_token_ids=self._loaded.stop_token_ids,
            seed=(self._seed << 32) + self._asked,
        )
        self._asked += 1
        [[completion]] = self._loaded.engine.generate([GenerateRequest(prompt, sampling)])
        said = conversation.replied(completion.token_ids)
        return Reply(said.text, said.tool_calls, said.problem, len(completion.token_ids), completion.finish_reason)
