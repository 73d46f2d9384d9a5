"""How a server is started; test_rc_vllm.py starts real ones."""

import socket
import threading
from pathlib import Path

import pytest

from open_instruct.device import Device, current_device
from open_instruct.engines.vllm_server import ServerFailed, ServerOptions, VllmServer

CPU, GPU = current_device(kind="cpu"), Device("cuda", "bfloat16", "sdpa")


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_command_has_what_the_device_needs(device: Device) -> None:
    words = ServerOptions("some/model", 8001, device, extra=("--disable-uvicorn-access-log",)).command[3:]
    mine = ["--model", "some/model", "--host", "127.0.0.1", "--port", "8001"]
    assert words[: len(mine)] == mine
    assert words[-len(device.server_words) - 1 :] == [*device.server_words, "--disable-uvicorn-access-log"]
    assert ("--enforce-eager" in words) == (device is CPU)


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_environment_is_the_users_with_that_of_the_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/somewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    environment = ServerOptions("some/model", 8001, device, gpu=2).environment
    assert environment["HF_HOME"] == "/somewhere"
    assert environment["CUDA_VISIBLE_DEVICES"] == ("7" if device is GPU else "5,6,7")
    assert environment.items() >= device.server_env(gpu=2).items()


def test_a_port_at_which_something_else_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    monkeypatch.setattr(ServerOptions, "command", ["sh", "-c", "sleep 0.5; echo address already in use; exit 1"])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=greet, args=(listening,), daemon=True).start()
        options = ServerOptions("some/model", listening.getsockname()[1], CPU)
        with (
            VllmServer(options, tmp_path / "log") as server,
            pytest.raises(ServerFailed, match="address already in use"),
        ):
            server.wait_until_ready(20.0)
