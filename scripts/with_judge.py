"""Runs a command beside a judge of its own: a vLLM server that is ready before the command begins and ends with it.

    python scripts/with_judge.py --model Qwen/Qwen3-4B -- \\
        python open_instruct/grpo_fast.py … --llm_judge_model Qwen/Qwen3-4B

The command finds the judge's address in OPENAI_BASE_URL and its key in OPENAI_API_KEY. On a machine with GPUs the judge takes
the one that `--gpu` names; the command needs others (CUDA_VISIBLE_DEVICES). SIGTERM and Ctrl-C go to the command, a closed
terminal ends neither, and the exit code is the command's; 1 if the judge does not start.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from open_instruct.cluster.process_group import free_address
from open_instruct.device import current_device
from open_instruct.engines.vllm_server import ServerFailed, ServerOptions, VllmServer
from open_instruct.system.interruption import survive_terminal
from open_instruct.verifiers.judge import ADDRESS, KEY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name on the hub, or a directory")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--max_model_len", type=int, help="tokens of a question with its answer; default: the model's")
    parser.add_argument("--max_num_seqs", type=int, default=256, help="judgements at the same time")
    parser.add_argument("--log", type=Path, default=Path("out/judge.log"), help="default: %(default)s")
    parser.add_argument("--start_timeout_s", type=float, default=600.0)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command")
    args = parser.parse_args()
    command = args.command[args.command[:1] == ["--"] :]
    if not command:
        parser.error("no command stands behind --")
    length = ("--max-model-len", str(args.max_model_len)) if args.max_model_len else ()
    _, port = free_address()
    options = ServerOptions(
        args.model, port, current_device(), max_num_seqs=args.max_num_seqs, gpu=args.gpu, extra=length
    )
    args.log.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _exit)
    survive_terminal()
    try:
        with VllmServer(options, args.log) as server:
            print(f"waiting for the judge at {server.url}, log in {args.log}", flush=True)
            server.wait_until_ready(args.start_timeout_s)
            return run(command, os.environ | {ADDRESS: server.url, KEY: options.api_key})
    except ServerFailed as error:
        print(f"with_judge.py: {error}", file=sys.stderr)
        return 1


def run(command: list[str], environment: dict[str, str]) -> int:
    """The exit code of the command, which decides what a signal means."""
    process = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command as well
    code = process.wait()
    return 128 - code if code < 0 else code


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # through the `with` block


if __name__ == "__main__":
    raise SystemExit(main())
