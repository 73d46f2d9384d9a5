"""Finds out by trial what a chat template does to a conversation. The result is logged once at the start of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from open_instruct.chat_codec import END_THINK, THINK

USER = {"role": "user", "content": "How much is 2 + 2?"}
ANSWER = {"role": "assistant", "content": f"{THINK}\nTwo and two.\n{END_THINK}\n\n4"}
NEXT = {"role": "user", "content": "And 3 + 3?"}
THOUGHT = "Two and two."
TOOL = {
    "type": "function",
    "function": {
        "name": "toolmark",
        "description": "Is there.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
LONGEST_QUOTATION = 120


@dataclass(frozen=True)
class TemplateAudit:
    """What a chat template does. A value is None if the template refuses the conversation that would show it."""

    opens_think: bool | None
    """The model's turn begins inside `<think>`."""
    has_system: bool | None
    """A system prompt is added if the conversation has none."""
    doubles_bos: bool
    """A prompt begins with two BOS tokens, if the tokenizer adds its own."""
    drops_thoughts: bool | None
    """Thoughts of earlier turns are left out."""
    keeps_prefix: bool | None
    """Earlier turns stay unchanged when turns are added, so that a conversation is one growing text."""
    shows_tools: bool | None = False
    """Tools are described in the prompt."""
    system_text: str = field(default="", compare=False)
    """The system prompt that is added."""

    @property
    def text(self) -> str:
        """The audit in one line."""
        facts = [
            ("the model's turn begins inside <think>", self.opens_think),
            ("a system prompt is added", self.has_system),
            ("thoughts of earlier turns are left out", self.drops_thoughts),
            ("earlier turns stay as they were", self.keeps_prefix),
            ("tools are described", self.shows_tools),
        ]
        words = {True: "yes", False: "no", None: "not known"}
        return "chat template: " + "; ".join(f"{fact}: {words[value]}" for fact, value in facts)

    def warnings(
        self, *, wants_form: bool, prompt: str, was_chosen: bool = True, tools: Sequence[str] = ()
    ) -> Iterator[str]:
        """Warnings about what the template does to the run's prompts, and options that do not fit it.

        Args:
            wants_form: whether rewards look for `…</think> <answer>…</answer>`.
            prompt: the text of one of the run's prompts.
            was_chosen: whether the user named the template, and so knows what it adds. If not, it is the tokenizer's own.
            tools: names of the tools that the template should describe in this prompt.
        """
        if not was_chosen and self.system_text and self.system_text in prompt:
            yield (
                "the model's own chat template adds a system prompt wherever a row has none "
                f"({self.system_text[:LONGEST_QUOTATION]!r}), so the model is trained under it and not without it. "
                "A system message in the rows or --system_prompt_override_file takes its place; --chat_template_name chooses "
                "another template"
            )
        if tools and not self.shows_tools and not any(name in prompt for name in tools):
            yield (
                "the chat template does not describe tools, and the first prompt with tools names none of them "
                f"({', '.join(tools)}), so the model is never told that it may call them. "
                "Choose a template that describes tools with --chat_template_name, or describe them in the rows' system "
                "message or --system_prompt_override_file. --pass_tools_to_chat_template False says that it needs none"
            )
        if self.doubles_bos:
            yield "the chat template begins each prompt with two tokens for the beginning of a text: leave out --add_bos"
        if wants_form and not (THINK in prompt and "<answer>" in prompt):
            yield (
                "--apply_r1_style_format_reward looks for </think> <answer>…</answer>, and the prompts name no <think> and "
                "<answer>: use --chat_template_name r1_simple_chat_postpend_think, or a system prompt that asks for them"
            )


def audit_template(tokenizer: Any) -> TemplateAudit:
    """Try the tokenizer's template on short conversations."""
    first = _rendered(tokenizer, [USER], begins_turn=True)
    with_answer = _rendered(tokenizer, [USER, ANSWER], begins_turn=False)
    both = _rendered(tokenizer, [USER, ANSWER, NEXT], begins_turn=True)
    with_tool = _rendered(tokenizer, [USER], begins_turn=True, tools=[TOOL])
    bos = tokenizer.bos_token
    return TemplateAudit(
        opens_think=None if first is None else first.rstrip().endswith(THINK),
        has_system=None if first is None else _has_system(tokenizer, first),
        doubles_bos=first is not None and bool(bos) and first.startswith(bos + bos),
        drops_thoughts=None if both is None else THOUGHT not in both,
        keeps_prefix=None
        if both is None or with_answer is None
        else _is_prefix(with_answer, both, tokenizer.eos_token),
        shows_tools=None if with_tool is None else "toolmark" in with_tool,
        system_text="" if first is None else _system_text(tokenizer, first),
    )


def _rendered(tokenizer: Any, messages: list[dict[str, str]], *, begins_turn: bool, **more: Any) -> str | None:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins_turn, **more))
    except Exception:  # a template is a program and may raise anything
        return None


def _has_system(tokenizer: Any, first: str) -> bool:
    """Whether the template puts its own text before the first message, which a system message replaces."""
    own = first.partition(USER["content"])[0]
    system = _rendered(tokenizer, [{"role": "system", "content": "S"}, USER], begins_turn=True)
    return system is not None and not system.partition(USER["content"])[0].startswith(own) and len(own) > len("S") + 20


def _system_text(tokenizer: Any, first: str) -> str:
    """The text that stands where a system message would stand; empty if the template adds none."""
    if not _has_system(tokenizer, first):
        return ""
    system = _rendered(tokenizer, [{"role": "system", "content": "SYSTEMMARK"}, USER], begins_turn=True)
    before, mark, behind = (system or "").partition(USER["content"])[0].partition("SYSTEMMARK")
    own = first.partition(USER["content"])[0]
    if not mark or not own.startswith(before) or not own.endswith(behind):
        return ""
    return own[len(before) : len(own) - len(behind)].strip()


def _is_prefix(before: str, after: str, eos: str | None) -> bool:
    """Whether `after` continues `before`, apart from an end that some templates write only after the last turn."""
    ends = [before, before.rstrip("\n")]
    if eos and ends[-1].endswith(eos):
        ends.append(ends[-1].removesuffix(eos))
    return any(after.startswith(end) for end in ends)
