"""Serves the page of runs as the command does, for a browser in the same test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from chromium import Tab

from open_instruct.watch import server, views
from open_instruct.watch.runs import Runs
from open_instruct.watch.server import Guard, create_app, signature_of, uvicorn_server

TOKEN = "token"
WAIT_S = 60.0


@contextmanager
def served(tab: Tab, *directories: Path) -> Iterator[str]:
    """The page of these runs. Gives its address. At the end the tab leaves it: a page asks again for a server that is gone."""
    listener = server._listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    runs, guard = Runs(directories), Guard(TOKEN, f"watch_{port}", frozenset({"localhost"}))
    process = uvicorn_server(
        create_app(partial(views.answer, runs), partial(signature_of, runs), guard, changes_s=0.05)
    )
    thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        tab.leave()
        process.should_exit = True
        thread.join(WAIT_S)
        listener.close()


def enter(tab: Tab, address: str) -> None:
    tab.open(f"{address}?token={TOKEN}")
