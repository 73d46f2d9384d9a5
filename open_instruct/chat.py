"""Talk to a trained model, with the prompt, the sampling and the stop strings of its run.

    python -m open_instruct.chat out/mine                        # the newest model of a run; /help lists the commands
    python -m open_instruct.chat out/mine/step_000050 --message "What is 17 + 25?" --temperature 0
    echo "What is 17 + 25?" | python -m open_instruct.chat out/mine --json

The directory is a run's --output_dir, one of its step_* directories, any model directory, a LoRA adapter, or a name on the hub.
It needs neither Ray nor vLLM, and runs on CPU.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from open_instruct.chat_model import Answer, ChatModel, NoModel, RunFacts, Sampling, facts_of_run, model_directory
from open_instruct.system.command_output import exit_code_of

COMMANDS = """/prompt  the whole prompt of the next turn, as the model sees it, with its tokens
/tokens  show the tokens of each answer, or no longer
/tools   the tools that the chat template is told of
/system TEXT  another system prompt (without TEXT none), and a new conversation
/reset   a new conversation
/options how answers are sampled, and where that comes from
/exit    the end (Ctrl-D too)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Chat until the input ends. Returns the exit code: 0, or 2 if there is no model."""
    options = (parser := _parser()).parse_args(argv)
    message = _message(options)
    if message is None and (options.json or options.show_prompt):
        parser.error("--json and --show_prompt are for one message: give it with --message, or from stdin")
    if message is not None and not message.strip():
        parser.error("the message is empty: give it with --message, or from stdin")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        directory = model_directory(options.model)
        facts = facts_of_run(directory)
        for doubt in facts.doubts:
            print(f"chat: {doubt}", file=sys.stderr)
        model = ChatModel(directory, facts, device=options.device)
    except NoModel as error:
        print(f"chat: {error}", file=sys.stderr)
        return 2
    chat = Chat(model, _sampling(options, facts), _system_prompt(options, facts), shows_tokens=options.show_tokens)
    if message is None:
        chat.talk()
    else:
        chat.say_once(message, as_json=options.json, shows_prompt=options.show_prompt)
    return 0


def _message(options: argparse.Namespace) -> str | None:
    """The one message to answer; None for a chat."""
    if options.message is not None:
        return options.message
    if sys.stdin is None:  # it was closed before the start
        return ""
    return None if sys.stdin.isatty() else sys.stdin.read()


def _number(kind: type[int] | type[float], holds: Callable[[float], bool], limits: str) -> Callable[[str], float]:
    """Reads a number for argparse, which reports those that are outside the limits."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not holds(number):
            raise argparse.ArgumentTypeError(f"{text!r} is not {limits}")
        return number

    return read


_TEMPERATURE = _number(float, lambda number: 0 <= number < math.inf, "a number of 0 or more")
_SHARE = _number(float, lambda number: 0 < number <= 1, "a number above 0 and up to 1")
_COUNT = _number(int, lambda number: number >= 1, "a whole number of 1 or more")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "open_instruct.chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run's output_dir, a model directory, a LoRA adapter, or a name on the hub")
    parser.add_argument("--message", help="one message; the answer is printed and the program ends (also from stdin)")
    parser.add_argument(
        "--json", action="store_true", help="with one message: prompt, tokens, answer and sampling as JSON"
    )
    parser.add_argument(
        "--show_prompt", action="store_true", help="with one message: first the prompt as the model sees it"
    )
    parser.add_argument("--show_tokens", action="store_true", help="the tokens of each answer behind it")
    parser.add_argument("--system", help="the system prompt; '' for none. By default the run's")
    parser.add_argument(
        "--temperature", type=_TEMPERATURE, help="0 takes the likeliest token. By default the run's, else 1"
    )
    parser.add_argument("--top_p", type=_SHARE, help="by default the run's, else 1")
    parser.add_argument(
        "--max_tokens", type=_COUNT, help="longest answer. By default the run's response_length, else 256"
    )
    parser.add_argument("--stop", nargs="*", help="texts that end an answer. By default the run's")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer on the same machine")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser


def _sampling(options: argparse.Namespace, facts: RunFacts) -> Sampling:
    names = ("temperature", "top_p", "max_tokens", "seed")
    settings = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    stop = facts.sampling.stop if options.stop is None else tuple(options.stop)
    return replace(facts.sampling, stop=stop, **settings)


def _system_prompt(options: argparse.Namespace, facts: RunFacts) -> str | None:
    return facts.system_prompt if options.system is None else options.system or None


class Chat:
    """A conversation with a model."""

    def __init__(
        self, model: ChatModel, sampling: Sampling, system_prompt: str | None, *, shows_tokens: bool = False
    ) -> None:
        self._model, self._sampling, self._system_prompt = model, sampling, system_prompt
        self._shows_tokens = shows_tokens
        self._messages: list[dict[str, str]] = []
        self._begin()

    def _begin(self, system_prompt: str | None = None) -> None:
        self._system_prompt = self._system_prompt if system_prompt is None else system_prompt or None
        self._messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []

    def say_once(self, message: str, *, as_json: bool, shows_prompt: bool) -> None:
        """Print the answer to one message."""
        self._messages.append({"role": "user", "content": message.strip("\n")})
        if as_json:
            answer = self._model.answer(self._messages, self._sampling)
            print(json.dumps(self._as_json(answer), ensure_ascii=False))
            return
        if shows_prompt:
            self._show_prompt()
        answer = self._model.answer(self._messages, self._sampling, _tell)
        print()
        self._after(answer)

    def talk(self) -> None:
        """Read messages and commands from the terminal until they end."""
        print(f"{self._model.directory} on {self._model.device}. /help lists the commands.")
        self._tell_options()
        while True:
            try:
                line = input("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            answer = self._model.answer(self._messages, self._sampling, _tell)
        except KeyboardInterrupt:
            self._messages.pop()
            print("\n(left out: neither your message nor the answer is part of the conversation)")
            return
        print()
        self._messages.append({"role": "assistant", "content": answer.text})
        self._after(answer)

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        actions: dict[str, Callable[[], None]] = {
            "/prompt": self._show_prompt,
            "/tokens": self._switch_tokens,
            "/tools": lambda: print(
                json.dumps(self._model.facts.tools, indent=1) if self._model.facts.tools else "none"
            ),
            "/system": lambda: self._begin(text.strip()),
            "/reset": self._begin,
            "/options": self._tell_options,
        }
        actions.get(name, lambda: print(COMMANDS))()

    def _switch_tokens(self) -> None:
        self._shows_tokens = not self._shows_tokens
        print(f"tokens are {'shown' if self._shows_tokens else 'not shown'}")

    def _show_prompt(self) -> None:
        if not self._messages:
            print("nothing has been said yet")
            return
        prompt = self._model.prompt(self._messages)
        print(prompt)
        self._show_tokens(self._model.codec.encode_hidden(prompt))

    def _show_tokens(self, tokens: Sequence[int]) -> None:
        decode = self._model.codec.decode_all
        print(f"[{len(tokens)} tokens: {' '.join(f'{token}={decode([token])!r}' for token in tokens)}]")

    def _tell_options(self) -> None:
        sampling, source = self._sampling, self._model.facts.options_file
        where = f"defaults of {source}" if source else "no options.json of a run near it, so plain sampling"
        stop = f", stop {list(sampling.stop)}" if sampling.stop else ""
        numbers = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, up to {sampling.max_tokens} tokens"
        print(f"{numbers}{stop} ({where})")

    def _after(self, answer: Answer) -> None:
        if self._shows_tokens:
            self._show_tokens(answer.tokens)
        if answer.ended == "length":
            print(f"[cut off after {len(answer.tokens)} tokens; --max_tokens allows more]", file=sys.stderr)

    def _as_json(self, answer: Answer) -> dict[str, object]:
        sampling = self._sampling
        return {
            "model": self._model.directory,
            "messages": self._messages,
            "prompt": self._model.codec.decode_all(answer.prompt_tokens),
            "prompt_tokens": answer.prompt_tokens,
            "answer": answer.text,
            "tokens": answer.tokens,
            "ended": answer.ended,
            "sampling": {**vars(sampling), "stop": list(sampling.stop)},
            "options_file": None if self._model.facts.options_file is None else str(self._model.facts.options_file),
        }


def _tell(piece: str) -> None:
    print(piece, end="", flush=True)


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
