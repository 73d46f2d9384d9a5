"""A failed run tells a Slack channel, and whatever goes wrong with that stops nothing."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from open_instruct.report import slack


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A server in the place of Slack's, and no address of it in the environment yet."""
    messages: list[str] = []

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    for name in slack.ADDRESSES:
        monkeypatch.delenv(name, raising=False)
    server = HTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield SimpleNamespace(address=f"http://127.0.0.1:{server.server_port}/hook", said=messages)
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ["SLACK_WEBHOOK", "SLACK_WEBHOOK_URL"])
def test_the_address_is_read_by_our_name_and_by_that_of_open_instruct(
    channel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert slack.slack_address() == ""
    slack.tell_slack("into the void")
    monkeypatch.setenv(name, channel.address)
    slack.tell_slack("engine 1 died" + "!" * 5000)
    assert channel.said == [("engine 1 died" + "!" * 5000)[: slack.MOST_CHARACTERS]]


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/secret", "http://127.0.0.1:1/secret # the team's", "secret"])
def test_a_channel_that_is_away_stops_nothing(
    channel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    monkeypatch.setenv("SLACK_WEBHOOK", address)
    slack.tell_slack("engine 1 died")
    assert "Slack could not be told" in caplog.text
    assert "secret" not in caplog.text
