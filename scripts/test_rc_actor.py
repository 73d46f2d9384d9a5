"""Starts vLLM servers, rolls out against them, and ends them: on success, on failure and on Ctrl-C.

    python scripts/test_rc_actor.py --config-name test_rc
    python scripts/test_rc_actor.py --config-name test_rc --num_servers 2 actor.num_reasoning_steps=5

`model_path` of the file says what is served, on ports from 8080 upwards, one server per GPU or, without one, on the CPU. Logs of
the servers lie in `output_dir/logs/`. Everything that is not listed below goes to `open_instruct.rc_actor`, with `me.llm_urls`.
"""

import argparse
import contextlib
import math
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from open_instruct import rc_actor
from open_instruct.config import yaml_files as yaml_door
from open_instruct.config.cli import UsageError, fail_with
from open_instruct.device import current_device
from open_instruct.engines.server_keys import VLLM_KEY_VARIABLE
from open_instruct.engines.vllm_server import ServerFailed, ServerOptions, VllmServer
from open_instruct.rc.options import RCOptions, read_options
from open_instruct.system.interruption import survive_terminal

FIRST_PORT = 8080
HIGHEST_PORT = 65535


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_servers", type=int, default=1)
    parser.add_argument("--first_port", type=int, default=FIRST_PORT)
    parser.add_argument("--start_timeout_s", type=float, default=300.0, help="for the servers to be ready")
    arguments, for_the_actor = parser.parse_known_args()
    if arguments.num_servers < 1:
        parser.error(f"--num_servers {arguments.num_servers}: expected 1 or more")
    if not 1024 <= arguments.first_port <= HIGHEST_PORT - arguments.num_servers:
        parser.error(f"--first_port {arguments.first_port}: expected 1024 to {HIGHEST_PORT - arguments.num_servers}")
    if not 0 < arguments.start_timeout_s < math.inf:
        parser.error(f"--start_timeout_s {arguments.start_timeout_s}: expected a number of seconds above 0")
    try:
        options = read_options(yaml_door.compose(rc_actor.YAML_PROGRAM, for_the_actor))
        rc_actor.load_problems(options)  # before a minute is spent on servers
    except UsageError as error:
        fail_with(error.mistakes, program="test_rc_actor.py")
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, where shells have Ctrl-C ignored, too
        signal.signal(number, _exit)
    survive_terminal()
    os.environ.setdefault(VLLM_KEY_VARIABLE, secrets.token_hex(16))  # servers and actor read it there
    try:
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(VllmServer(server, Path(options.run.output_dir) / "logs" / f"server-{number}.log"))
                for number, server in enumerate(server_options(options, arguments.num_servers, arguments.first_port))
            ]
            for server in servers:
                print(f"waiting for {server.url}, log in {server.log_path}", flush=True)
                server.wait_until_ready(arguments.start_timeout_s)
            urls = "+".join(server.url for server in servers)
            return rc_actor.main([*for_the_actor, f"me.llm_urls={urls}"])
    except ServerFailed as error:
        print(f"test_rc_actor.py: {error}", file=sys.stderr)
        return 1


def server_options(options: RCOptions, num_servers: int, first_port: int) -> list[ServerOptions]:
    """Of each server; ports that are taken are passed over."""
    device = current_device()
    ports: list[int] = []
    port = first_port
    while len(ports) < num_servers and port <= HIGHEST_PORT:
        if _is_free(port):
            ports.append(port)
        port += 1
    return [
        ServerOptions(options.run.model_path, port, device, max_num_seqs=options.actor.llm_max_rollouts, gpu=number)
        for number, port in enumerate(ports)
    ]


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # through the `with` blocks


if __name__ == "__main__":
    raise SystemExit(main())
