"""Who can reach what a run listens on: this machine alone, with a token that nobody else can read."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.cluster import ray_security

pytestmark = pytest.mark.extended

START_AND_LIST_DOORS = """
import os, sys
import psutil, ray
from open_instruct.run.ray_session import ray_cluster
from open_instruct.cluster.ray_lock import Lock
from open_instruct.cluster.process_group import open_store

@ray.remote
class Actor:
    def open_store(self):
        self.store = open_store(1, 30.0)
        return self.store.port

    def address(self):
        return ray.util.get_node_ip_address()

with ray_cluster() as signals:
    signals.remove()
    actor, lock = Actor.remote(), Lock.remote()
    assert ray.get(lock.acquire.remote(timeout=30))
    ray.get(lock.release.remote())
    print("store", ray.get(actor.open_store.remote()))
    print("address", ray.get(actor.address.remote()))
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                print("door", one.laddr.ip, one.laddr.port, process.name())
"""


def test_a_single_node_listens_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    """Ray's own processes, an actor, the learners' store, and the keeper of a lock."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", START_AND_LIST_DOORS], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Token authentication is enabled" not in done.stderr  # the user can and need do nothing about it
    lines = [line.split() for line in done.stdout.splitlines()]
    doors = [line[1:] for line in lines if line[0] == "door"]
    assert len(doors) > 4
    assert {address.removeprefix("::ffff:") for address, *_ in doors} <= {"127.0.0.1", "::1"}, doors
    [store] = [port for word, port in (line[:2] for line in lines) if word == "store"]
    assert store in {port for _, port, _ in doors}
    token = tmp_path / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_a_cluster_that_is_gone_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would try for many minutes, in which signals are blocked."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert str(ray_security.cluster_to_join()).endswith(f":{port}")  # Ray takes another address of this machine
    with pytest.raises(ray_security.NoSuchCluster, match=rf"^no Ray cluster answers at \S+:{port} \("):
        ray_security.cluster_to_join()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "nonsense", "somewhere:port"])
def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ray_security.NoSuchCluster, match="RAY_ADDRESS=local"):
        ray_security.cluster_to_join()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert ray_security.cluster_to_join() is None


def test_a_token_that_others_could_read_is_closed_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("mine")
    token.chmod(0o644)
    with ray_security.this_machine_alone():
        pass
    assert token.read_text() == "mine"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_what_keeps_ray_on_this_machine_is_not_inherited_by_what_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    constants = ray_security.ray_constants
    for before in ("1", None):
        if before is None:
            monkeypatch.delenv(constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
        else:
            monkeypatch.setenv(constants.ENABLE_RAY_CLUSTERS_ENV_VAR, before)
        is_enabled = constants.ENABLE_RAY_CLUSTER
        with ray_security.this_machine_alone():
            assert os.environ[constants.ENABLE_RAY_CLUSTERS_ENV_VAR] == "0"
            assert not constants.ENABLE_RAY_CLUSTER
        assert os.environ.get(constants.ENABLE_RAY_CLUSTERS_ENV_VAR) == before
        assert is_enabled == constants.ENABLE_RAY_CLUSTER


ACTOR = """
import ray
from open_instruct.run.ray_session import ray_cluster

class Actor:
    def __init__(self):
        import open_instruct.data_types
    def where(self):
        import mine, transformers
        return transformers.__version__, mine.value

with ray_cluster() as signals:
    signals.remove()
    actor = ray.remote(Actor).options(num_cpus=0).remote()
    print(ray.get(actor.where.remote(), timeout=60))
"""


@pytest.fixture
def shadowing(tmp_path: Path) -> Path:
    """A directory with modules that are called like installed ones."""
    for name in ("hydra", "aiohttp", "transformers", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('shadowed')\n")
    (tmp_path / "mine.py").write_text("value = 5\n")
    return tmp_path


def in_directory(directory: Path, *words: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=directory, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_current_directory_shadows_nothing_in_actors(shadowing: Path) -> None:
    """And what is not installed is found there all the same."""
    import transformers

    (shadowing / "program").mkdir()
    (shadowing / "program" / "driver.py").write_text(ACTOR)
    assert in_directory(shadowing, "program/driver.py") == f"('{transformers.__version__}', 5)\n"


@pytest.mark.parametrize("door", ["rc_actor", "fully_async_main", "grpo_fast"])
def test_the_current_directory_shadows_nothing_at_a_door(shadowing: Path, door: str) -> None:
    assert "usage" in in_directory(shadowing, "-m", f"open_instruct.{door}", "--help")
    script = Path(__file__).parents[2] / "open_instruct" / f"{door}.py"
    if door != "rc_actor":
        assert "usage" in in_directory(shadowing, str(script), "--help")
