"""Chat templates of ten families, the special tokens that they write, and chats that each of them takes.

Templates are read from the installed trl (trl/chat_templates, which has those of the models' folders). Those that trl
lacks are here as the tokenizer_config.json of HuggingFaceH4/zephyr-7b-beta and mistralai/Mistral-7B-Instruct-v0.2 has
them, and ChatML as llama_cpp.llama_chat_format has it.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import AddedToken

from examples.data import encode, serve, workers
from examples.data.tokenizer import Text
from tests.helpers.tokenizers import byte_level, write

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ZEPHYR = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IM = ("<|im_start|>", "<|im_end|>")


class Family(NamedTuple):
    """A template's name in trl, or its text; special tokens; the named ones; and what the chats may have."""

    template: str
    specials: tuple[str, ...]
    bos: str | None
    eos: str
    has_system: bool = True
    has_tools: bool = False

    def source(self) -> str:
        """Return the template's text."""
        return installed(self.template) if self.template.isidentifier() else self.template

    def folder(self, path: Path, **options) -> Path:
        """Write a tokenizer with this template, special tokens and a template's own words."""
        found = byte_level(LLAMA_3)
        found.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in self.specials])
        found.add_tokens(["</think>", "<tool_call>"])
        named = {"eos_token": self.eos} | ({"bos_token": self.bos} if self.bos else {})
        options = {"tokenizer_class": "PreTrainedTokenizerFast"} | named | options
        return write(path, found, **({"chat_template": self.source()} | options))


LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
DEEP = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
PHI = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>")
FAMILIES = {
    "Llama-3": Family("llama3", LLAMA, LLAMA[0], LLAMA[3]),
    "Llama-3.2": Family("llama3_2", LLAMA, LLAMA[0], LLAMA[3], has_tools=True),
    "Qwen2.5": Family("qwen2_5", IM, None, IM[1], has_tools=True),
    "Qwen3": Family("qwen3", IM, None, IM[1], has_tools=True),
    "Mistral": Family(MISTRAL, ("<s>", "</s>"), "<s>", "</s>", has_system=False),
    "Gemma": Family("gemma", GEMMA, "<bos>", "<eos>", has_system=False),
    "Gemma 3": Family("gemma3", GEMMA, "<bos>", "<eos>"),
    "Phi-3": Family("phi3", PHI, None, PHI[4]),
    "Zephyr": Family(ZEPHYR, ("<s>", "</s>"), "<s>", "</s>"),
    "ChatML": Family(CHATML, IM, None, IM[1]),
    "gpt-oss": Family("gptoss", HARMONY, None, "<|return|>", has_tools=True),
    "DeepSeek-V3": Family("deepseekv3", DEEP, DEEP[0], DEEP[1]),
}

USER, ASSISTANT = (
    {"role": "user", "content": " über\nhi "},
    {"role": "assistant", "content": " Yes: 1234567 & ñandú! \n"},
)
MORE = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "no, it isn't"}]
SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"x": 1}}}
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "Find <x> & y", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "find", "content": "one"},
    {"role": "assistant", "content": "one it is"},
]


def installed(name: str) -> str:
    """Return a template of trl, which is not imported."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("pip install trl, which has the templates of model cards")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def chats(family: Family) -> list[tuple[list[dict], dict]]:
    """Return chats that a family's template takes, and values of its variables."""
    found = [([USER, ASSISTANT], {}), ([USER, ASSISTANT, *MORE], {})]
    found += [([SYSTEM, USER, ASSISTANT, *MORE], {})] if family.has_system else []
    return found + ([(TOOLS, {"tools": [TOOL]})] if family.has_tools else [])


def chat_in_process(text: Text):
    """Return the function ``workers.Worker(text).chat`` without its process, which takes time to start."""
    setup = {**workers.Worker(text).setup}
    tools = encode.tools(text.tokenizer(), setup, encode.templates(setup))

    def chat(messages, prompt, **values):
        return workers.Said(**serve.answer_chat({"turns": messages, "prompt": prompt, "values": values}, tools))

    return chat
