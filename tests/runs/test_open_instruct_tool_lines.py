"""Launch lines of open-instruct's scripts with tools and environments, as they are but for sizes, to their end.

The model is a tiny one that has learned by heart to begin its turns with a certain call, so that tools are really called. What
stands on the network there (search, pages, programs, weather) is a server on this machine.
"""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import TINY_MODEL
from environment_stage import free_port, wait_for_port
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from whole_runs import Process, assert_ledger_balances, rows

from open_instruct.chat_templates import chat_template
from open_instruct.config.translate import options_in

ROOT = Path(__file__).parents[2]
LINES = dict(line.split("\t") for line in (ROOT / "tests/config/open_instruct_lines.txt").read_text().splitlines())
SMALLER = {
    "response_length": "160",
    "per_turn_max_tokens": "40",
    "max_prompt_token_length": "1700",
    "pack_length": "2048",
    "total_episodes": "32",
    "num_unique_prompts_rollout": "4",
    "num_samples_per_prompt_rollout": "4",
    "num_learners_per_node": "1",
    "vllm_num_engines": "1",
}
LEFT_OUT = "output_dir", "with_tracking", "chat_template_name"
WEATHER = '''
    from mcp.server import MCPServer
    import sys

    server = MCPServer("weather")


    @server.tool()
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"Sunny in {city}"


    server.run("streamable-http", port=int(sys.argv[1]))
'''


class Script(NamedTuple):
    says: str
    """How the model begins a turn."""
    called: str
    """The tool, or the environment, in the run's metrics."""
    answers: str
    """What the tool says, to be found in the run's transcripts."""
    row: dict[str, Any]


def hermes(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


GAME = {"ground_truth": "-", "dataset": "passthrough"}
SUM = {"ground_truth": "7", "dataset": "gsm8k"}
SCRIPTS = {
    "train/debug/envs/counter_1gpu.sh": Script(
        hermes("increment"),
        "counter",
        "Counter is now 1.",
        {**GAME, "env_config": {"env_name": "counter", "target": 3}},
    ),
    "train/debug/envs/guess_number_1gpu.sh": Script(
        hermes("guess", number=50),
        "guess_number",
        "50 is too high. Try lower.",
        {**GAME, "env_config": {"env_name": "guess_number", "number": 7}},
    ),
    "train/debug/envs/wordle_8gpu.sh": Script(
        "<guess>crane</guess>", "wordle", "C R A N E", {**GAME, "env_config": {"env_name": "wordle", "word": "stone"}}
    ),
    "train/debug/tools/mcp_weather_debug.sh": Script(
        hermes("get_weather", city="Rome"), "generic_mcp", "Sunny in Rome", SUM
    ),
    "train/debug/tools/qwen3_vllm_hermes_parser_debug.sh": Script(
        hermes("search", query="seven"), "search", "Source: http://seven", SUM
    ),
    "train/debug/tools/legacy_parser_debug.sh": Script("<code>print(7)</code>", "code", "ran print(7)", SUM),
}


class Services(BaseHTTPRequestHandler):
    """What Serper, Jina and the server of programs answer."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = {"organic": [{"title": "Seven", "snippet": "A number.", "link": "http://seven"}]}
        self._say({"output": f"ran {asked['code']}", "error": None} if "code" in asked else found)

    def do_GET(self) -> None:
        self._say({"code": 200, "data": {"title": "Seven", "content": "A number."}})

    def _say(self, what: object) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def services() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Services) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def weather(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path, port = tmp_path_factory.mktemp("mcp") / "weather.py", free_port()
    path.write_text("\n".join(line.removeprefix("    ") for line in WEATHER.splitlines()))
    process = subprocess.Popen([sys.executable, str(path), str(port)], stdout=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_with_tools_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, services: str, weather: str, name: str
) -> None:
    for key in ("SERPER_API_KEY", "JINA_API_KEY"):
        monkeypatch.setenv(key, "x")
    script = SCRIPTS[name]
    chats = [[{"role": "user", "content": f"{n} and {7 - n}?"}] for n in range(-40, 40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**script.row, "messages": chat}) for chat in chats))
    words, options = [], dict(options_in(shlex.split(LINES[name])))
    [template] = options.get("chat_template_name", [None])
    write_model(tmp_path / "model", chats, template, script.says)
    for option, values in options.items():
        if option.startswith("dataset_mixer") and not option.endswith("splits"):
            values = [str(tmp_path / "rows.jsonl"), values[1]]
        elif option == "model_name_or_path":
            values = [str(tmp_path / "model")]
        elif option == "tool_configs":
            values = [
                here(config, tool, services, weather) for config, tool in zip(values, options["tools"], strict=True)
            ]
        if option not in LEFT_OUT:
            words += [f"--{option}", *([SMALLER[option]] if option in SMALLER else values)]
    if template:
        words += ["--chat_template_name", template]
    words += ["--output_dir", str(tmp_path / "out"), "--filter_zero_std_samples", "False"]
    words += ["--hold_out_eval_prompts", "False"]  # some evaluate on the rows that they train on
    code, output = Process([sys.executable, str(ROOT / "open_instruct/grpo_fast.py"), *words]).wait(500.0)
    assert code == 0, output[-3000:]
    assert_ledger_balances(tmp_path / "out")
    metrics = [row for row in rows(tmp_path / "out" / "metrics.jsonl") if row["training_step"] > 0]
    assert metrics[-1][f"tools/{script.called}/avg_calls_per_rollout"] > 0.9
    assert script.answers in (tmp_path / "out" / "transcripts" / "step_000001.txt").read_text()


def here(config: str, tool: str, services: str, weather: str) -> str:
    """The settings of a tool whose service is on this machine."""
    address = {
        "python": {"api_endpoint": f"{services}/execute"},
        "serper_search": {"base_url": f"{services}/search"},
        "jina_browse": {"base_url": services},
        "generic_mcp": {"server_url": weather},
    }
    return json.dumps({**json.loads(config), **address[tool]})


def write_model(path: Path, chats: list[list[dict[str, str]]], template: str | None, says: str) -> None:
    """The tiny model, after it has learned by heart to begin its first turn like this, whatever the chat."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY_MODEL)
    model.config.max_position_embeddings = 2048  # R1's prompt is long in tokens of the tiny model
    tokenizer.save_pretrained(path)
    if template:
        tokenizer.chat_template = chat_template(template)
    said = tokenizer(says, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    num_turns, num_prompts, num_steps = (2, 4, 400) if len(prompts[0]) < 100 else (1, 1, 600)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(num_steps):
        optimizer.zero_grad()
        for prompt in [prompts[(num_prompts * step + number) % len(prompts)] for number in range(num_prompts)]:
            turns, labels = (prompt + said) * num_turns, ([-100] * len(prompt) + said) * num_turns
            model(input_ids=torch.tensor([turns]), labels=torch.tensor([labels])).loss.backward()
        optimizer.step()
    model.save_pretrained(path)
