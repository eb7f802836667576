"""What a client may send, as pydantic reads it, and how it is told that it may not.

The names are OpenAI's, and vLLM's where OpenAI has none. An unknown field is ignored, since clients send extra ones, unless
it is one of ours with a slip of the pen. A field that asks for something we know and cannot do is refused: `NOT_SUPPORTED`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, field_validator, model_validator

from redline.types import SamplingParams

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Field → the values, beside null, that ask for nothing. Any other value of it is refused."""

LOOKED_AT, LONGEST_NAME, ALIKE = 8, 32, 0.85
"""How many unknown fields of a request are compared with ours, of how many characters at most, and the share of them from which
on a name is taken for ours: looking takes the time of other clients."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ApiError(Exception):
    """A request is refused; becomes an HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's servers answer: there, too, a wrong key and an unknown model are invalid requests, told by their code."""
        kind = "requests" if self.status == 429 else "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_means_absent(cls, values: Any) -> Any:
        return {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values


class StreamOptions(_Fields):
    include_usage: bool = False


class _Request(_Fields):
    """What both endpoints share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=0, lt=2**63)
    min_tokens: int = Field(0, ge=0, lt=2**63)
    n: int = Field(1, ge=1, strict=True)  # what `limits` has counted, and not a text or a float that stands for more
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**63)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[TokenId, float] = {}
    allowed_token_ids: tuple[TokenId, ...] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, stop: Any) -> Any:
        return (stop,) if isinstance(stop, str) else stop

    @property
    def new_tokens(self) -> int | None:
        """Most tokens to sample; None as many as the model has positions for."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives to show beside each token; None shows no logprobs at all."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        return False

    @property
    def shows_prompt(self) -> bool:
        """Whether every choice holds its prompt."""
        return False

    def sampling(self, max_tokens: int, end_token_ids: tuple[int, ...]) -> SamplingParams:
        """For the engine; `end_token_ids` are the model's own."""
        return SamplingParams(
            max_tokens=max_tokens,
            n=self.n,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            stop_token_ids=tuple(dict.fromkeys((*self.stop_token_ids, *(() if self.ignore_eos else end_token_ids)))),
            stop=self.stop,
            min_tokens=self.min_tokens,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            top_logprobs=self.num_top_logprobs or 0,
            prompt_logprobs=self.scores_prompt,
        )


class ChatMessage(_Fields):
    role: str
    content: str = ""

    @field_validator("content", mode="before")
    @classmethod
    def _parts_as_lines(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError("only text parts are supported")
        return "\n".join(part["text"] for part in content)

    @model_validator(mode="before")
    @classmethod
    def _says_something_and_calls_no_tools(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("tool_calls") or message.get("function_call"):
            raise ValueError("tool calls are not supported")
        if "content" not in message:  # the field has a default, since an assistant's may be null
            raise ValueError("the message has no content")
        return message


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**63)
    max_tokens: int | None = Field(None, ge=1, lt=2**63)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Whichever of the four shapes was sent, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if _are_ids(value):
        return [value]
    if isinstance(value, list) and value and (all(isinstance(p, str) for p in value) or all(_are_ids(p) for p in value)):
        return value
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of lists of token ids")


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        return False
    return all(type(id_) is int and 0 <= id_ < 2**31 for id_ in value)


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    max_tokens: int | None = Field(16, ge=0, lt=2**63)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @model_validator(mode="after")
    def _what_cannot_be_combined(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 asks for nothing; ask for a token, or for the prompt with echo: true")
        if self.stream and self.scores_prompt:
            raise ValueError("echo with logprobs cannot be streamed; leave out one of the three")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    @property
    def shows_prompt(self) -> bool:
        return self.echo or self.return_token_ids


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Request = TypeVar("Request", bound=_Request)


def read_request(kind: type[Request], values: Any) -> Request:
    """The JSON of a body as a request, or an `ApiError` that names the field."""
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name in NOT_SUPPORTED.keys() & values.keys():
        if values[name] is not None and values[name] not in NOT_SUPPORTED[name]:
            raise ApiError(
                400, f"{name} is not supported by this server; leave it out", param=name, code="unsupported_parameter"
            )
    _refuse_misspelt(kind, values)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0]) from error


def _refuse_misspelt(kind: type[_Request], values: Mapping[str, Any]) -> None:
    """Raise `ApiError` for an option that is spelt almost as one of ours: without it the answer would be another one."""
    options = [name for name, field in kind.model_fields.items() if not field.is_required() and name != "model"]
    unknown = (name for name in values if name not in kind.model_fields and name not in NOT_SUPPORTED)
    for name in islice((name for name in unknown if len(name) <= LONGEST_NAME), LOOKED_AT):
        if near := get_close_matches(name, options, n=1, cutoff=ALIKE):
            raise ApiError(400, f"unknown field {name!r}; did you mean {near[0]}?", param=name)


def _refusal(problem: Mapping[str, Any]) -> ApiError:
    """One entry of pydantic's `errors()`."""
    reason = problem["msg"].removeprefix("Value error, ")
    place = ".".join(str(part) for part in problem["loc"])
    code = "missing_required_parameter" if problem["type"] == "missing" else None
    return ApiError(400, f"{place}: {reason}" if place else reason, param=place or None, code=code)
