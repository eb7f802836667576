"""`redline.Engine`: sample from a model in this process, with the engine that training uses."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, overload

import numpy as np
from jinja2 import TemplateError

from redline.config import EngineRecipe, refuse_engine_keys_without_effect, resolve_engine, validate_engine
from redline.errors import EngineError, ModelError
from redline.types import Completion, GenerateRequest, Message, SamplingParams

if TYPE_CHECKING:
    from redline.launch.engines import LoadedEngine

MAX_TOKENS = 256
"""New tokens of a reply where the caller names no limit, and the model has room for as many."""

A_MESSAGE = '{"role": "user", "content": "…"}'


class Sampling(TypedDict, total=False):
    """How to sample; the names are those of the OpenAI API and vLLM. None is the default of each."""

    max_tokens: int | None
    """Most new tokens; by default 256, or as many as the model has room for."""
    temperature: float | None
    """0 always takes the likeliest token. Default 1."""
    top_k: int | None
    """Sample among the k likeliest tokens; 0, the default, among all."""
    top_p: float | None
    """Sample among the likeliest tokens whose probabilities sum to this. Default 1."""
    min_p: float | None
    """Sample among tokens at least this fraction as likely as the likeliest. Default 0."""
    seed: int | None
    """The same seed and prompts give the same replies. Default 0."""
    stop: str | Iterable[str] | None
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
    """A model that is loaded, and answers. Close it, or use it as a context manager, to give its memory back. A call
    blocks until all its replies are complete; calls from several threads take turns."""

    def __init__(self, loaded: LoadedEngine) -> None:
        """`Engine.load` makes one."""
        self._loaded: LoadedEngine | None = loaded
        self._turn = threading.RLock()  # a signal handler may close the engine in the thread that generates

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
        refuse_engine_keys_without_effect(recipe)
        return cls(_load(resolve_engine(recipe).recipe))

    @overload
    def generate(self, prompts: str, **sampling: Unpack[Sampling]) -> Reply: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompts: Iterable[str], **sampling: Unpack[Sampling]) -> list[Reply]: ...
    def generate(self, prompts: str | Iterable[str], **sampling: Unpack[Sampling]) -> Reply | list[Reply]:
        """Continue texts. One prompt gives one reply, a list of prompts a list of replies in the same order; a prompt that is
        in the list several times gets as many different replies. All are computed together."""
        given, wanted = _texts(prompts, "a prompt"), _checked(sampling)
        with self._turn:
            tokenizer = self._opened.tokenizer
            replies = self._replies([tokenizer.encode(prompt) for prompt in given], wanted)
        return replies[0] if isinstance(prompts, str) else replies

    @overload
    def chat(self, messages: Iterable[Message], **sampling: Unpack[Sampling]) -> Reply: ...
    @overload
    def chat(self, messages: Iterable[Iterable[Message]], **sampling: Unpack[Sampling]) -> list[Reply]: ...
    def chat(
        self, messages: Iterable[Message] | Iterable[Iterable[Message]], **sampling: Unpack[Sampling]
    ) -> Reply | list[Reply]:
        """Give the assistant's next turn in a conversation, `[{"role": "user", "content": "…"}]`; for a list of conversations,
        a list of turns in the same order."""
        given, wanted = _conversation(messages), _checked(sampling)
        is_one = all(isinstance(message, Mapping) for message in given)
        conversations = [given] if is_one else [_conversation(conversation) for conversation in given]
        with self._turn:
            replies = self._replies([self._rendered(conversation) for conversation in conversations], wanted)
        return replies[0] if is_one else replies

    def close(self) -> None:
        """Give the model's memory back. Does nothing the second time."""
        with self._turn:
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

    def _rendered(self, messages: Sequence[Any]) -> list[int]:
        tokenizer = self._opened.tokenizer
        if not messages:
            raise EngineError("a conversation has no messages", f"give at least one: [{A_MESSAGE}]")
        if not tokenizer.chat_template:
            raise EngineError("the model has no chat template", "use generate, or a model that was tuned on conversations")
        if wrong := [message for message in messages if not isinstance(message, Mapping)]:
            raise EngineError(f"a message is {type(wrong[0]).__name__}, not a mapping", f"a message is {A_MESSAGE}")
        if not all(isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
            raise EngineError("a message lacks its role or its content", f"a message is {A_MESSAGE}")
        try:
            turns = [dict(message) for message in messages]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise EngineError(f"the chat template refuses these messages: {error}", "look at their roles and order") from error
        _refuse_half_characters(text, "a conversation")
        return tokenizer.encode(text, add_special_tokens=False)

    def _replies(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[Reply]:
        loaded = self._opened
        requests = [
            GenerateRequest(np.array(prompt, dtype=np.int32), _sampling_params(loaded, sampling, len(prompt), index))
            for index, prompt in enumerate(prompts)
        ]
        return [_reply(loaded, completion) for [completion] in loaded.engine.generate(requests)]


# ── what was asked ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _texts(given: Any, what: str) -> list[str]:
    """Return the string, or the strings, that a caller gave, whatever holds them. Raises `EngineError` for anything else."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        raise EngineError(f"{what} is {type(given).__name__}, not text", "give a string or a list of strings")
    texts = list(given)
    for text in texts:
        if not isinstance(text, str):
            raise EngineError(f"{what} is {type(text).__name__}, not text", "give a string or a list of strings")
        _refuse_half_characters(text, what)
    return texts


def _refuse_half_characters(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise EngineError(
            f"{what} holds {half!a}, which is half of a character", "decode its bytes with errors='replace'"
        ) from error


def _conversation(given: Any) -> list[Any]:
    if not isinstance(given, Iterable) or isinstance(given, Mapping | str | bytes):
        raise EngineError(f"a conversation is {type(given).__name__}, not a list of messages", f"give [{A_MESSAGE}]")
    return list(given)


def _checked(wanted: Sampling) -> dict[str, Any]:
    """Return the options that are not None, each of its type. The engine itself refuses numbers out of bounds."""
    unknown = sorted(wanted.keys() - Sampling.__annotations__.keys())
    if unknown:
        known = ", ".join(Sampling.__annotations__)
        raise EngineError(f"there is no sampling option {', '.join(unknown)}", f"the options are {known}")
    options = {name: value for name, value in wanted.items() if value is not None}
    values = {name: _number(name, value) for name, value in options.items() if name != "stop"}
    if not 0 <= values.get("seed", 0) < 2**31:
        raise EngineError(f"seed = {values['seed']} makes no sense", "seed is 0 or more, and below 2**31")
    return {**values, "stop": tuple(_texts(options.get("stop", ()), "a stop string"))}


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) or (isinstance(value, float) and name in ("temperature", "top_p", "min_p")):
        return value
    whole = "a whole number" if name in ("max_tokens", "top_k", "seed") else "a number"
    raise EngineError(f"{name} = {value!r} is not {whole}", f"give {whole}, or leave it out")


def _sampling_params(loaded: LoadedEngine, wanted: Mapping[str, Any], prompt_tokens: int, index: int) -> SamplingParams:
    """Return the engine's parameters for the prompt with this index. Each prompt has a stream of random numbers of its own,
    so that equal prompts get different replies."""
    room = loaded.max_positions - prompt_tokens
    values = {"max_tokens": max(1, min(MAX_TOKENS, room)), **wanted}
    seed = (values.pop("seed", 0) << 32) + index
    return SamplingParams(seed=seed, stop_token_ids=loaded.stop_token_ids, **values)


# ── what comes back ────────────────────────────────────────────────────────────────────────────────────────────────────


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
    return load_engine(recipe, tell=_warn)


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _free_memory() -> None:
    """Let go of what nothing refers to any more: a model is full of references in circles, and torch keeps a device's
    memory."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
