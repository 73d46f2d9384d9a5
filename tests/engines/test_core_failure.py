"""An engine whose core does not start says why."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.engines import vllm_plugin
from open_instruct.engines.core_failure import cause_in
from open_instruct.engines.vllm_plugin import plugins_are_found

OUTPUT = """
(MainProcess pid=5343) INFO 11-27 14:38:05 [core.py:120] Initializing a V1 LLM engine
(EngineCore pid=5614) ERROR 11-27 14:38:35 [core.py:1510] EngineCore failed to start.
(EngineCore pid=5614) ERROR 11-27 14:38:35 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=5614) ERROR 11-27 14:38:35 [core.py:1510]   File "/vllm/v1/engine/core.py", line 1482, in run_engine_core
(EngineCore pid=5614) ERROR 11-27 14:38:35 [core.py:1510]     raise ValueError(
(EngineCore pid=5614) ERROR 11-27 14:38:35 [core.py:1510] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.
(EngineCore pid=5614) ERROR 11-27 14:38:36 [core.py:1510] RuntimeError: it follows from that
"""
RAISES = """
import sys
from open_instruct.engines.core_failure import cause_is_told
print(sys.argv[1], flush=True)
with cause_is_told():
    raise RuntimeError(sys.argv[2])
"""
NOT_STARTED = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def test_the_first_error_is_the_cause() -> None:
    assert cause_in(OUTPUT) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert cause_in("INFO all is well\nValueError: somebody else's\n") == ""


@pytest.mark.parametrize(
    ("output", "error", "told"),
    [
        (
            OUTPUT,
            NOT_STARTED,
            r"the engine's core did not start: torch\.OutOfMemoryError: .* GiB\. \(all of its output: .*/out\)",
        ),
        ("nothing", NOT_STARTED, r"Engine core initialization failed\. .* It is in .*/out or .*/err\."),
        (OUTPUT, "another error", r"another error"),
    ],
)
def test_it_is_told_with_the_file_that_has_the_rest(tmp_path: Path, output: str, error: str, told: str) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        words = [sys.executable, "-c", RAISES, output, error]
        assert subprocess.run(words, stdout=out, stderr=err, check=False, timeout=60).returncode == 1
    last = (tmp_path / "err").read_text().strip().splitlines()[-1]
    assert re.fullmatch(f"RuntimeError: {told}", last)


FAILS = """
import sys
from open_instruct.device import current_device
from open_instruct.engines.engine_sleep import SleepOptions
from open_instruct.engines.vllm_engine import EngineOptions, make_engine
device = current_device()
extra = device.engine_kwargs(max_model_len=64, gpu_memory_utilization=0.5, enforce_eager=True)
env = device.engine_env(enforce_eager=True, ready_timeout_s=200)
make_engine(EngineOptions(model=sys.argv[1], dtype="float32", max_model_len=64, max_num_seqs=2, weight_transport="ray_object",
                          enforce_eager=True, sleep=SleepOptions(), extra=extra, env=env), 0)
"""


@pytest.mark.extended
def test_a_real_core_that_does_not_start(tmp_path: Path) -> None:
    """Its process does not know our weight transport."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_PLUGINS": "open_instruct_cpu_kernels",
        "HF_HUB_OFFLINE": "1",
    }
    model = Path(__file__).parents[2] / "assets" / "tiny_model"
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        words = [sys.executable, "-c", FAILS, str(model)]
        assert subprocess.run(words, stdout=out, stderr=err, env=environment, check=False, timeout=240).returncode == 1
    told = (tmp_path / "err").read_text()
    assert (
        "the engine's core did not start: ValueError: Invalid weight transfer backend: open_instruct_ray_object" in told
    )


def test_without_our_plugins_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_plugin.CHOSEN, raising=False)
    assert plugins_are_found(None) == []
    monkeypatch.setenv(vllm_plugin.CHOSEN, "lora_resolver")
    [mistake] = plugins_are_found(None)
    assert mistake.startswith("VLLM_PLUGINS=lora_resolver: vLLM would not load open_instruct_weight_transfer and ")
    monkeypatch.setattr(vllm_plugin, "entry_points", lambda group: ())
    [mistake] = plugins_are_found(None)
    assert mistake.startswith("open_instruct is not installed in this Python")
