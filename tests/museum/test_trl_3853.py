"""A prompt begins with two tokens for the beginning of a text."""

from collections.abc import Callable
from typing import Any

import pytest
from exhibit import Exhibit

from open_instruct.chat_codec import ChatCodec
from open_instruct.chat_templates import TokenizerSetup

EXHIBIT = Exhibit(
    reports=("huggingface/trl #3853", "vllm-project/vllm #27517"),
    subject="tokens and turns",
    happened="The trainer sent the engine a text to which the chat template had already given its first token; the "
    "engine's tokenizer put a second one in front. With Llama, rewards fell, and only when vLLM sampled.",
    here="A rendered prompt becomes token ids once, without further special tokens (`chat_codec.py`), and the engine "
    "gets these ids, which the learner trains on too.",
)
MESSAGES = [{"role": "user", "content": "hello world"}]
TURNS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
BEGIN = 0


def tokenizer_with(template: str) -> Any:
    """A tokenizer that puts `<s>` before each text that it is given, as Llama's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<s>": BEGIN, "hello": 1, "world": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def check(prompt_of: Callable[[Any], list[int]]) -> None:
    for template in ("{{ bos_token }}" + TURNS, TURNS):
        assert prompt_of(tokenizer_with(template)) == [BEGIN, 1, 2], template


def theirs(tokenizer: Any) -> list[int]:
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    return tokenizer(text)["input_ids"]


def ours(tokenizer: Any) -> list[int]:
    codec = ChatCodec(TokenizerSetup(add_bos=True).apply(tokenizer))
    return codec.encode(codec.render(MESSAGES, begins_turn=False))


def test_second_tokenization_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_prompt_begins_once_here() -> None:
    check(ours)
