"""Chat templates by name make the prompts that open-instruct's make."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import TINY_MODEL

from open_instruct.chat_templates import TEMPLATES, TokenizerSetup, UnknownTemplate, chat_template
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.data.template_audit import TemplateAudit, audit_template

SYSTEM = {"role": "system", "content": "Be 'kind'."}
USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "<think>hm</think>\n\n4"}
R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first "
    "thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and answer "
    "are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.\n\n"
)
OLMO_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
NO_FUNCTIONS = " You do not currently have access to any functions. <functions></functions><|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return read_tokenizer(str(TINY_MODEL), None)


def rendered(tokenizer: Any, name: str, *messages: dict[str, str], begins_turn: bool = True) -> str:
    return tokenizer.apply_chat_template(
        list(messages), chat_template=chat_template(name), tokenize=False, add_generation_prompt=begins_turn
    )


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("simple_concat_with_space", "2+2?"),
        ("simple_chat", "User: 2+2?"),
        ("zephyr", "<|user|>\n2+2?<|end|>\n<|assistant|>\n"),
        ("tulu", "<|user|>\n2+2?\n<|assistant|>\n"),
        ("tulu_thinker", "<|user|>\n2+2?\n<|assistant|>\n<think>"),
        ("tulu_thinker_r1_style", f"{R1}<|user|>\n2+2?\n<|assistant|>\n<think>"),
        ("olmo_thinker", f"{OLMO_SYSTEM}<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>"),
        ("r1_simple_chat", f"{R1}User: 2+2?\nAssistant:"),
        ("r1_simple_chat_postpend_think", f"{R1}User: 2+2?\nAssistant: <think>"),
        (
            "olmo_thinker_rlzero",
            "Solve the following problem step by step. The last line of your response should be the answer to the problem in "
            "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n2+2?\n\nRemember to put your "
            'answer on its own line after "Answer:"',
        ),
        (
            "qwen_instruct_user_boxed_math",
            "<|im_start|>user\n2+2?\n\nPlease reason step by step, and put your final answer within \\boxed{}<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ],
)
def test_prompts(tokenizer: Any, name: str, prompt: str) -> None:
    assert rendered(tokenizer, name, USER) == prompt


def test_turns(tokenizer: Any) -> None:
    assert rendered(tokenizer, "tulu", SYSTEM, USER, ANSWER, begins_turn=False) == (
        "<|system|>\nBe 'kind'.\n<|user|>\n2+2?\n<|assistant|>\n<think>hm</think>\n\n4<|end|>"
    )
    dropped = rendered(tokenizer, "olmo_thinker_remove_intermediate_thinking", SYSTEM, USER, ANSWER, USER)
    assert f"<|im_start|>system\nBe 'kind'.{NO_FUNCTIONS}" in dropped
    assert "<|im_start|>assistant\n4<|im_end|>\n" in dropped
    kept = rendered(tokenizer, "olmo_thinker", SYSTEM, USER, ANSWER, USER)
    assert "<think>hm</think>\n\n4<|im_end|>\n" in kept


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_works(tokenizer: Any, name: str) -> None:
    asked = rendered(tokenizer, name, SYSTEM, USER, ANSWER, USER)
    assert asked.count("2+2?") == (2 if name != "assistant_message_only" else 0)


def test_a_file_may_hold_the_template(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}!")
    setup = TokenizerSetup(chat_template(str(path)))
    tokenizer = read_tokenizer(str(TINY_MODEL), None, setup)
    assert tokenizer.apply_chat_template([USER], tokenize=False) == "2+2?!"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "there is no such file"), ("hello", "no chat template"), (b"\xff", "cannot be read")],
)
def test_what_is_no_template_is_refused(tmp_path: Path, content: str | bytes | None, problem: str) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UnknownTemplate, match=problem):
        chat_template(str(path))


def test_bos_before_several_templates_is_refused() -> None:
    """As in Hermes and Command R, which have one for prompts with tools."""
    tokenizer = SimpleNamespace(
        chat_template={"default": "{{ messages }}", "tool_use": "{{ messages }}"}, bos_token="<s>"
    )
    with pytest.raises(UnknownTemplate, match=r"several chat templates \(default, tool_use\)"):
        TokenizerSetup(add_bos=True).apply(tokenizer)


def test_bos_comes_once(tokenizer: Any) -> None:
    own = read_tokenizer(str(TINY_MODEL), None)
    own.bos_token = "<|pad|>"
    once = TokenizerSetup(chat_template("tulu"), add_bos=True).apply(own)
    assert once.apply_chat_template([USER], tokenize=False).startswith("<|pad|><|user|>")
    template = once.chat_template
    assert TokenizerSetup(add_bos=True).apply(once).chat_template == template
    own.bos_token = None
    with pytest.raises(UnknownTemplate, match="no token for the beginning"):
        TokenizerSetup(chat_template("tulu"), add_bos=True).apply(own)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tulu", TemplateAudit(False, False, False, False, True)),
        ("tulu_thinker", TemplateAudit(True, False, False, False, True)),
        ("tulu_thinker_r1_style", TemplateAudit(True, True, False, True, True)),
        ("olmo_thinker", TemplateAudit(True, True, False, False, True)),
        ("olmo_thinker_remove_intermediate_thinking", TemplateAudit(True, True, False, True, False)),
    ],
)
def test_what_a_template_does_is_found_out(name: str, expected: TemplateAudit) -> None:
    tokenizer = read_tokenizer(str(TINY_MODEL), None, TokenizerSetup(chat_template(name)))
    assert audit_template(tokenizer) == expected


def test_a_reward_for_a_form_that_no_prompt_asks_for_is_told() -> None:
    audit = TemplateAudit(False, False, False, False, True)
    (warning,) = audit.warnings(wants_form=True, prompt="2+2?")
    assert "--apply_r1_style_format_reward looks for </think> <answer>" in warning
    assert list(audit.warnings(wants_form=True, prompt=R1)) == []
    assert list(audit.warnings(wants_form=False, prompt="2+2?")) == []


def test_a_template_that_refuses_is_no_reason_to_stop() -> None:
    setup = TokenizerSetup("{{ raise_exception('no') if messages }}")
    audit = audit_template(read_tokenizer(str(TINY_MODEL), None, setup))
    assert audit.keeps_prefix is None
    assert "not known" in audit.text


QWEN = (  # as Qwen2.5: a system prompt of its own, and tools
    "{% if messages[0]['role'] == 'system' %}<|user|>{{ messages[0]['content'] }}<|end|>"
    "{% else %}<|user|>You are Qwen, made by Alibaba Cloud. You are a helpful assistant.<|end|>{% endif %}"
    "{% if tools %}Tools: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m['role'] != 'system' %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_system_prompt_of_the_template_is_told_with_its_text() -> None:
    tokenizer = read_tokenizer(str(TINY_MODEL), None, TokenizerSetup(QWEN))
    audit = audit_template(tokenizer)
    assert audit.system_text == "You are Qwen, made by Alibaba Cloud. You are a helpful assistant."
    prompt = tokenizer.apply_chat_template([USER], tokenize=False)
    [warning] = audit.warnings(wants_form=False, prompt=prompt, was_chosen=False)
    assert "adds a system prompt wherever a row has none ('You are Qwen, made by Alibaba Cloud." in warning
    assert "--system_prompt_override_file takes its place" in warning
    own = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, USER], tokenize=False)
    assert list(audit.warnings(wants_form=False, prompt=own, was_chosen=False)) == []
    assert list(audit.warnings(wants_form=False, prompt=prompt, was_chosen=True)) == []


def test_a_template_that_ignores_tools_is_told_unless_the_prompt_names_one() -> None:
    shows = audit_template(read_tokenizer(str(TINY_MODEL), None, TokenizerSetup(QWEN)))
    ignores = audit_template(read_tokenizer(str(TINY_MODEL), None, TokenizerSetup(chat_template("tulu"))))
    assert (shows.shows_tools, ignores.shows_tools) == (True, False)
    [warning] = ignores.warnings(wants_form=False, prompt="France?", tools=["lookup", "sum"])
    assert "names none of them (lookup, sum), so the model is never told that it may call them" in warning
    assert list(ignores.warnings(wants_form=False, prompt="Call lookup. France?", tools=["lookup", "sum"])) == []
    assert list(ignores.warnings(wants_form=False, prompt="France?")) == []
    assert list(shows.warnings(wants_form=False, prompt="France?", tools=["lookup"])) == []
