"""A server that runs programs against tests, for controllers on machines without a jail, or too busy.

    python -m open_instruct.verifiers.code_server --port 1234      and there: --code_api_url http://<this machine>:1234

Its protocol is that of open-instruct's `code_utils/api.py`. POST to `/test_program` (tests in Python) or `/test_program_stdio`
(tests `{input, output}`) takes `{"program": …, "tests": […], "max_execution_time": 1.0}`; the answer is
`{"results": [1, 0], "runtimes": [0.01, 1.0]}`. GET `/health` answers `{"status": "healthy"}`. Everybody who can reach the port
may run programs in the jail, and nothing else.
"""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.system.sandbox import missing
from open_instruct.verifiers.base import NotScored
from open_instruct.verifiers.code_blocks import LONGEST_PROGRAM
from open_instruct.verifiers.code_runs import CodeRuns
from open_instruct.verifiers.code_verifiers import CodeStdioVerifier, CodeVerifier

LONGEST_LIMIT_S = 600.0
LARGEST_REQUEST = 200 * 2**20
"""In bytes."""


class CodeServer:
    """Answers the requests to the server.

    Args:
        at_once: programs that run at the same time; by default as many as there are cores.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self._runs = CodeRuns(at_once)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_get("/health", self._health)
        for verifier in (CodeVerifier(), CodeStdioVerifier()):
            app.router.add_post(f"/{verifier.path}", self._tester(verifier))
        app.on_cleanup.append(self._close)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _close(self, app: web.Application) -> None:
        self._runs.close()

    def _tester(self, verifier: CodeVerifier) -> Any:
        async def test(request: web.Request) -> web.Response:
            try:
                program, tests, limit_s = _read(await request.text(), verifier)
            except (ValueError, RecursionError) as error:
                return web.json_response({"detail": str(error)[:1000]}, status=422)
            try:
                results = await verifier.run(self._runs, program, tests, limit_s)
            except NotScored as error:
                return web.json_response({"detail": str(error)}, status=503)
            return web.json_response(
                {"results": [int(passed) for passed, _ in results], "runtimes": [seconds for _, seconds in results]}
            )

        return test


def _read(text: str, verifier: CodeVerifier) -> tuple[str, list[Any], float]:
    """The program, its tests and the time limit in a request. Raises `ValueError`, whose message says what is wrong."""
    body = json.loads(text)
    if not isinstance(body, dict) or not isinstance(body.get("program"), str):
        raise ValueError("the request must be {program, tests, max_execution_time}")
    if len(body["program"]) > LONGEST_PROGRAM:
        raise ValueError(f"a program has at most {LONGEST_PROGRAM} characters")
    limit_s = body.get("max_execution_time", VerifierConfig.code_max_execution_time)
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s <= LONGEST_LIMIT_S:
        raise ValueError(
            f"max_execution_time must be a number of seconds up to {LONGEST_LIMIT_S:g}, got {limit_s!r:.40}"
        )
    return body["program"], verifier.tests_in(body.get("tests")), float(limit_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser("code_server", description="Runs programs against tests, each in a jail.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all of this machine's")
    parser.add_argument("--port", type=int, default=1234)
    parser.add_argument("--at_once", type=int, help="programs at the same time; by default one a core")
    args = parser.parse_args(arguments)
    if reasons := missing():
        parser.error(f"this machine has no jail for programs: {'; '.join(reasons)}. Run on a kernel that has them")
    try:
        web.run_app(CodeServer(args.at_once).app(), host=args.host, port=args.port)
    except OSError as error:
        parser.error(f"--host {args.host} --port {args.port}: {os.strerror(error.errno or 0)}. Give another address")


if __name__ == "__main__":
    main()
