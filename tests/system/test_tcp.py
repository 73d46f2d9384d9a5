"""A server whose network is gone is noticed in seconds, not after the half hour that a turn may take."""

import subprocess
import sys
import time
from contextlib import ExitStack

from clusters import make_network

SERVER = """
import asyncio
from aiohttp import web

async def never(request):
    print("asked", flush=True)
    await asyncio.sleep(3600)

app = web.Application()
app.router.add_post("/v1/completions", never)
app.router.add_get("/v1/models", lambda request: web.json_response({"data": []}))
web.run_app(app, host="10.77.0.2", port=8000, print=lambda text: print("ready", flush=True))
"""
CLIENT = """
import asyncio, time
from open_instruct.engines import openai_client
from open_instruct.system import tcp
from open_instruct.engines.openai_client import OpenAIClient, Server, ServerPool, make_session
from open_instruct.workflows.rc.types import REASONING, EnginesDown, RetryOptions, TurnRequest

tcp.PROBE_S, tcp.NUM_PROBES, tcp.LOST_S = 1, 2, 3  # instead of 20 s

async def main():
    async with make_session() as session:
        client = OpenAIClient(session, {}, "m", lambda text: [], RetryOptions())
        server = Server("http://10.77.0.2:8000/v1", 1)
        client.pools = {REASONING: ServerPool([server], client.is_there, max_downtime_s=1.0)}
        start = time.monotonic()
        try:
            await client.generate(TurnRequest([1], 1, 1.0, 1.0, 1, REASONING))
        except EnginesDown as error:
            print(error)
        print("seconds", time.monotonic() - start)

asyncio.run(main())
"""


def test_a_turn_whose_network_is_cut_does_not_wait_for_its_answer() -> None:
    with ExitStack() as cleanup:
        enter, _ = make_network(2, cleanup)

        def start(node: int, program: str) -> "subprocess.Popen[str]":
            words = [*enter[node], sys.executable, "-c", program]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            cleanup.callback(process.kill)
            return process

        server = start(1, SERVER)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        client = start(0, CLIENT)
        assert server.stdout.readline() == "asked\n"
        subprocess.run([*enter[1], "ip", "link", "set", "eth0", "down"], check=True)
        cut = time.monotonic()
        output, _ = client.communicate(timeout=60)
        assert "no server has answered for" in output
        assert time.monotonic() - cut < 20
