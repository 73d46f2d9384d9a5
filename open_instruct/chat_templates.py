"""Chat templates by name. They have open-instruct's names and make the same prompts as there.

Most consist of a text before the conversation, a form for each message, and the beginning of the model's turn. `chat_template`
returns the Jinja text that Transformers needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EOS = "' + eos_token + '"
"""Inside a Jinja string: the tokenizer's end token."""
R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first "
    "thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and "
    "answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process "
    "here </think> <answer> answer here </answer>.\n\n"
)
"""The prompt of DeepSeek-R1-Zero (arXiv:2501.12948, table 1)."""
R1_WITH_CODE = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant first "
    "thinks about the reasoning process in the mind and then provides the User with the answer. \n\n"
    "When given a question, the Assistant must conduct reasoning inside the <think> and </think> tags. During reasoning, the "
    "Assistant may write and execute python code using the <code> </code> tag, in order to solve the problem or verify the "
    "answer. Then the Assistant will get the stdout and stderr in the <output> and </output> tags. For example, the code "
    "could be\n<code>\nx, y = 1, 2\nresult = x + y\nprint(result)\n</code>\nor\n<code>\nimport sympy as sp\nfrom sympy import "
    "Symbol\nx = Symbol('x')\ny = Symbol('y')\nsolution = sp.solve(x**2 + y**2 - 1, (x, y))\nprint(solution)\n</code>\nThe "
    "Assistant will always `print` the result of the code execution in order to see it in the <output> tag. The Assistant may "
    "use the <code> </code> tag multiple times. When the Assistant is done reasoning, it should provide the answer inside the "
    "<answer> and </answer> tag.\n\n"
)
ORZ = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer will "
    "be extracted automatically by the \\boxed{} tag. This is the problem: "
)
NO_FUNCTIONS = " You do not currently have access to any functions. <functions></functions>"
HUB = "and your model weights are available at https://huggingface.co/allenai."
OLMO = "You are OLMo, a helpful function-calling AI assistant built by Ai2. Your date cutoff is November 2024, " + HUB
OLMO_3 = "You are Olmo, a helpful AI assistant built by Ai2. Your date cutoff is December 2024, " + HUB
HELPFUL = "You are a helpful AI assistant."
CODE_FENCE = "```\npython\nCODE\n```"


class UnknownTemplate(ValueError):
    """There is no template of this name, its file cannot be read, or it does not fit the tokenizer. The message says why."""


@dataclass(frozen=True)
class TokenizerSetup:
    """How every process of a run sets up its tokenizer, in addition to the tokenizer's name."""

    template: str | None = None
    """Jinja text of the chat template; None: the tokenizer's own."""
    add_bos: bool = False
    """Whether each prompt begins with the token for the beginning of a text."""
    trust_remote_code: bool = False

    def apply(self, tokenizer: Any) -> Any:
        """The tokenizer with the template of the run.

        Raises:
            UnknownTemplate: the tokenizer has no token for the beginning of a text, or several templates of its own.
        """
        if self.template is not None:
            tokenizer.chat_template = self.template
        if self.add_bos and isinstance(tokenizer.chat_template, dict):
            names = ", ".join(tokenizer.chat_template)
            raise UnknownTemplate(f"the tokenizer has several chat templates ({names}): name a file with one of them")
        if self.add_bos and tokenizer.chat_template and not begins_with_bos(tokenizer):
            if tokenizer.bos_token is None:
                raise UnknownTemplate("the tokenizer has no token for the beginning of a text")
            tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
        return tokenizer


AS_IT_IS = TokenizerSetup()
"""The tokenizer's own template."""


def begins_with_bos(tokenizer: Any) -> bool:
    """Whether the chat template itself begins a prompt with the token for the beginning of a text."""
    start = tokenizer.chat_template.lstrip()
    return start.replace(" ", "").startswith(("{{bos_token", "{{-bos_token")) or (
        tokenizer.bos_token is not None and start.startswith(tokenizer.bos_token)
    )


def chat_template(name: str) -> str:
    """The Jinja text of the project's template `name`, or of the file `name`."""
    if name in TEMPLATES:
        return TEMPLATES[name]()
    path = Path(name)
    if not path.is_file():
        raise UnknownTemplate(f"there is no such file, and no template of that name; there are: {', '.join(TEMPLATES)}")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownTemplate(f"the file cannot be read: {error}") from error
    if "messages" not in text:
        raise UnknownTemplate("the file holds no chat template: no {% for message in messages %} stands in it")
    return text


def _quoted(text: str) -> str:
    """The text as a Jinja string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _said(text: str) -> str:
    return "{{ " + _quoted(text) + " }}" if text else ""


def _plain(message: str, *, between: str, before: str = "", turn: str = "", ends: bool = False) -> Callable[[], str]:
    """Messages one after another, all in the same form: `message`, a Jinja expression."""
    end = "{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}" if ends else ""
    separator = "{% if not loop.first %}" + _said(between) + "{% endif %}"
    begin = "{% if loop.last and add_generation_prompt %}" + _said(turn) + "{% endif %}" if turn else ""
    loop = "{% for message in messages %}" + separator + "{{ " + message + " }}" + end + begin + "{% endfor %}"
    return lambda: _said(before) + loop


CONTENT = "message['content']"
NAMED = "message['role'].capitalize() + ': ' + " + CONTENT


def _marked(
    *, last_ends_alone: bool, before: str = "", turn: str = "", drops_thoughts: bool = False
) -> Callable[[], str]:
    """Tulu's form: `<|user|>` on its own line, an end token after each message of the assistant.

    `last_ends_alone`: system and user have no end token, and the last message no new line behind its own.
    """
    end = "" if last_ends_alone else " + eos_token"
    content = "message['content']"
    if drops_thoughts:
        content = "(message['content'].split('</think>')[-1])"
    assistant = "{{ '<|assistant|>\\n' + " + content + " + eos_token }}"
    assistant += "{% if not loop.last %}{{ '\\n' }}{% endif %}" if last_ends_alone else "{{ '\\n' }}"

    def said_by(role: str) -> str:
        return (
            "{% elif message['role'] == '"
            + role
            + "' %}{{ '<|"
            + role
            + "|>\\n' + message['content']"
            + end
            + " + '\\n' }}"
        )

    roles = (said_by("user") + said_by("system")).replace("{% elif", "{% if", 1)
    roles += "{% elif message['role'] == 'assistant' %}" + assistant + "{% endif %}"
    begin = "{% if loop.last and add_generation_prompt %}" + _said(f"<|assistant|>\n{turn}") + "{% endif %}"
    return lambda: _said(before) + "{% for message in messages %}" + roles + begin + "{% endfor %}"


def _olmo(system: str, *, turn: str = "", no_functions: bool = True, drops_thoughts: bool = False) -> Callable[[], str]:
    """OLMo's form (ChatML, with functions in the system message or in the user's). Without a system message `system` is said."""
    content = "message['content']"
    if drops_thoughts:
        content = (
            "(message['content'].split('</think>')[-1].lstrip('\\n') if not loop.last and '<think>' in message['content'] and "
            "'</think>' in message['content'] else message['content'])"
        )
    functions = (
        "{% if message.get('functions') is not none %}{{ ' <functions>' + message['functions'] + '</functions>' }}"
    )
    no = "{% else %}" + _said(NO_FUNCTIONS) if no_functions else ""
    own = " '\\n<functions>' + message['functions'] + '</functions>' "
    parts = (
        "{% if not messages | selectattr('role', 'equalto', 'system') | list %}",
        _said(f"<|im_start|>system\n{system}<|im_end|>\n") + "{% endif %}",
        "{% for message in messages %}{% if message['role'] == 'system' %}",
        "{{ '<|im_start|>system\\n' + message['content'] }}" + functions + no + "{% endif %}" + _said("<|im_end|>\n"),
        "{% elif message['role'] == 'user' %}{{ '<|im_start|>user\\n' + message['content'] }}",
        "{% if message.get('functions') is not none %}{{" + own + "}}{% endif %}" + _said("<|im_end|>\n"),
        "{% elif message['role'] == 'assistant' %}" + _said("<|im_start|>assistant\n"),
        "{% if message.get('content') is not none %}{{ " + content + " }}{% endif %}",
        "{% if message.get('function_calls') is not none %}",
        "{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}{% endif %}",
        "{% if loop.last %}{{ eos_token }}{% else %}" + _said("<|im_end|>\n") + "{% endif %}",
        "{% elif message['role'] == 'environment' %}",
        "{{ '<|im_start|>environment\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}",
        "{% if loop.last and add_generation_prompt %}"
        + _said(f"<|im_start|>assistant\n{turn}")
        + "{% endif %}{% endfor %}",
    )
    return lambda: "".join(parts)


def _qwen_boxed() -> str:
    request = "\n\nPlease reason step by step, and put your final answer within \\boxed{}<|im_end|>\n"
    return (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|im_start|>user\\n' + message['content'] + "
        + _quoted(request)
        + " }}{% elif message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}{% endfor %}"
    )


def _assistant_alone() -> str:
    return "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] }}{% endif %}{% endfor %}"


LINES = CONTENT + " + '\\n'"
NAMED_LINES = NAMED + " + '\\n'"
ORZ_LINES = "message['role'].capitalize() + ': ' + " + _quoted(ORZ) + " + message['content'] + '\\n'"
ANSWER_LINE = (
    "Solve the following problem step by step. The last line of your response should be the answer to the problem in form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
CODE_LAST = (
    "Solve the following code problem step by step. The last part of your response should be the solution to the problem in "
    f"form {CODE_FENCE} where CODE is the solution for the problem.\n\n"
)
THINKS = "Assistant: <think>"

TEMPLATES: dict[str, Callable[[], str]] = {
    "simple_concat_with_space": _plain(CONTENT, between=" ", ends=True),
    "simple_concat_with_new_line": _plain(CONTENT, between="\n", ends=True),
    "simple_chat": _plain(NAMED, between="\n\n", ends=True),
    "assistant_message_only": _assistant_alone,
    "zephyr": _marked(last_ends_alone=False),
    "olmo": _olmo(f"{OLMO}{NO_FUNCTIONS}"),
    "tulu": _marked(last_ends_alone=True),
    "tulu_thinker": _marked(last_ends_alone=True, turn="<think>"),
    "tulu_thinker_r1_style": _marked(last_ends_alone=True, before=R1, turn="<think>", drops_thoughts=True),
    "olmo_old": _olmo(f"{OLMO}{NO_FUNCTIONS}"),
    "olmo_thinker": _olmo(HELPFUL, turn="<think>"),
    "olmo_thinker_no_think_7b": _olmo(OLMO_3),
    "olmo_thinker_remove_intermediate_thinking": _olmo(HELPFUL, turn="<think>", drops_thoughts=True),
    "olmo_thinker_no_think_sft_tokenization": _olmo(HELPFUL),
    "olmo_thinker_rlzero": _plain(
        LINES, between="\n\n", before=ANSWER_LINE, turn='\nRemember to put your answer on its own line after "Answer:"'
    ),
    "olmo_thinker_code_rlzero": _plain(
        LINES, between="\n\n", before=CODE_LAST, turn=f"Remember to put your solution inside the {CODE_FENCE} tags"
    ),
    "r1_simple_chat": _plain(NAMED_LINES, between="\n\n", before=R1, turn="Assistant:"),
    "r1_simple_chat_postpend_think": _plain(NAMED_LINES, between="\n\n", before=R1, turn=THINKS),
    "r1_simple_chat_postpend_think_orz_style": _plain(ORZ_LINES, between="\n\n", before=R1, turn=THINKS),
    "r1_simple_chat_postpend_think_tool_vllm": _plain(ORZ_LINES, between="\n\n", before=R1_WITH_CODE, turn=THINKS),
    "qwen_instruct_user_boxed_math": _qwen_boxed,
}
"""Functions that return the Jinja text, by open-instruct's name of the template."""
