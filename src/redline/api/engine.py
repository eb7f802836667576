"""`redline.Engine`: sample from a model in this process, with the engine that training uses."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, overload

import numpy as np
from jinja2 import TemplateError

from redline.config import EngineRecipe, resolve_engine, validate_engine
from redline.errors import EngineError, ModelError
from redline.types import Completion, GenerateRequest, Message, SamplingParams

if TYPE_CHECKING:
    from redline.launch.engines import LoadedEngine

MAX_TOKENS = 256
"""New tokens of a reply where the caller names no limit, and the model has room for as many."""


class Sampling(TypedDict, total=False):
    """How to sample; the names are those of the OpenAI API and vLLM."""

    max_tokens: int
    """Most new tokens; by default 256, or as many as the model has room for."""
    temperature: float
    """0 always takes the likeliest token. Default 1."""
    top_k: int
    """Sample among the k likeliest tokens; 0, the default, among all."""
    top_p: float
    """Sample among the likeliest tokens whose probabilities sum to this. Default 1."""
    min_p: float
    """Sample among tokens at least this fraction as likely as the likeliest. Default 0."""
    seed: int
    """The same seed and prompts give the same replies. Default 0."""
    stop: str | Sequence[str]
    """End a reply where its text holds any of these."""


@dataclass(slots=True, frozen=True)
class Reply:
    """What the model said to one prompt."""

    text: str
    """Without special tokens, and up to the stop string that ended it."""
    tokens: tuple[int, ...]
    """The sampled tokens, the one that ended the reply included."""
    logprobs: tuple[float, ...]
    """Logprob of each token, under the distribution that it was sampled from."""
    finish_reason: str
    """`stop`: a stop token or a stop string; `length`: there was no room for more tokens."""


class Engine:
    """A model that is loaded, and answers. Close it, or use it as a context manager, to give its memory back. It is meant for
    one thread: a call blocks until all its replies are complete."""

    def __init__(self, loaded: LoadedEngine) -> None:
        """`Engine.load` makes one."""
        self._loaded: LoadedEngine | None = loaded

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str = "auto", dtype: str = "auto", **settings: Any) -> Self:
        """Load a model: a Hugging Face folder, a run folder, a .gguf file, a hub id, or a built-in such as `builtin:tiny`.
        `settings` are keys of a recipe's `engine` section. Raises `RedlineError` for a model or a setting that there is not."""
        if not isinstance(path, str | os.PathLike):
            raise ModelError(
                f"{path!r} is no model", "give a folder, a file or a name; Run.model is None until a run has finished"
            )
        model, run = {"path": os.fspath(path), "dtype": dtype}, {"device": device}
        recipe = validate_engine({"model": model, "run": run, "engine": settings}, "Engine.load")
        return cls(_load(resolve_engine(recipe).recipe))

    @overload
    def generate(self, prompts: str, **sampling: Unpack[Sampling]) -> Reply: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompts: Sequence[str], **sampling: Unpack[Sampling]) -> list[Reply]: ...
    def generate(self, prompts: str | Sequence[str], **sampling: Unpack[Sampling]) -> Reply | list[Reply]:
        """Continue texts. One prompt gives one reply, a list of prompts a list of replies in the same order; a prompt that is
        in the list several times gets as many different replies. All are computed together."""
        given: Sequence[Any] = [prompts] if isinstance(prompts, str) else prompts
        if wrong := [prompt for prompt in given if not isinstance(prompt, str)]:
            raise EngineError(f"a prompt is {type(wrong[0]).__name__}, not text", "give a string or a list of strings")
        tokenizer = self._opened.tokenizer
        replies = self._replies([tokenizer.encode(prompt) for prompt in given], sampling)
        return replies[0] if isinstance(prompts, str) else replies

    @overload
    def chat(self, messages: Sequence[Message], **sampling: Unpack[Sampling]) -> Reply: ...
    @overload
    def chat(self, messages: Sequence[Sequence[Message]], **sampling: Unpack[Sampling]) -> list[Reply]: ...
    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], **sampling: Unpack[Sampling]
    ) -> Reply | list[Reply]:
        """Give the assistant's next turn in a conversation, `[{"role": "user", "content": "…"}]`; for a list of conversations,
        a list of turns in the same order."""
        is_one = all(isinstance(message, Mapping) for message in messages)
        conversations: Any = [messages] if is_one else messages
        replies = self._replies([self._rendered(conversation) for conversation in conversations], sampling)
        return replies[0] if is_one else replies

    def close(self) -> None:
        """Give the model's memory back. Does nothing the second time."""
        if self._loaded is None:
            return
        self._loaded.close()
        self._loaded = None
        _free_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def _opened(self) -> LoadedEngine:
        if self._loaded is None:
            raise EngineError("the engine is closed", "load it again with Engine.load")
        return self._loaded

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        tokenizer = self._opened.tokenizer
        if not messages:
            raise EngineError("a conversation has no messages", 'give at least one: [{"role": "user", "content": "…"}]')
        if not tokenizer.chat_template:
            raise EngineError("the model has no chat template", "use generate, or a model that was tuned on conversations")
        if not all(isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
            raise EngineError("a message lacks its role or its content", 'a message is {"role": "user", "content": "…"}')
        try:
            turns = [dict(message) for message in messages]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise EngineError(f"the chat template refuses these messages: {error}", "look at their roles and order") from error
        return tokenizer.encode(text, add_special_tokens=False)

    def _replies(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Reply]:
        loaded = self._opened
        requests = [
            GenerateRequest(np.array(prompt, dtype=np.int32), _sampling_params(loaded, sampling, len(prompt), index))
            for index, prompt in enumerate(prompts)
        ]
        return [_reply(loaded, completion) for [completion] in loaded.engine.generate(requests)]


def _sampling_params(loaded: LoadedEngine, wanted: Sampling, prompt_tokens: int, index: int) -> SamplingParams:
    """Return the engine's parameters for the prompt with this index. Each prompt has a stream of random numbers of its own,
    so that equal prompts get different replies."""
    unknown = sorted(wanted.keys() - Sampling.__annotations__.keys())
    if unknown:
        known = ", ".join(Sampling.__annotations__)
        raise EngineError(f"there is no sampling option {', '.join(unknown)}", f"the options are {known}")
    values: dict[str, Any] = dict(wanted)
    stop, seed = values.pop("stop", ()), values.pop("seed", 0)
    if not 0 <= seed < 2**31:
        raise EngineError(f"seed = {seed} makes no sense", "seed is 0 or more, and below 2**31")
    room = loaded.max_positions - prompt_tokens
    values.setdefault("max_tokens", max(1, min(MAX_TOKENS, room)))
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return SamplingParams(seed=(seed << 32) + index, stop=stops, stop_token_ids=loaded.stop_token_ids, **values)


def _reply(loaded: LoadedEngine, completion: Completion) -> Reply:
    tokens = completion.token_ids.tolist()
    text = loaded.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if completion.stop is not None:
        text = text.partition(completion.stop)[0]
    return Reply(text, tuple(tokens), tuple(completion.logprobs.tolist()), str(completion.finish_reason))


def _load(recipe: EngineRecipe) -> LoadedEngine:
    from redline.launch.engines import load_engine
    from redline.launch.process import prepare_process

    prepare_process(recipe)
    return load_engine(recipe)


def _free_memory() -> None:
    """Let go of what nothing refers to any more: a model is full of references in circles, and torch keeps a device's
    memory."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
