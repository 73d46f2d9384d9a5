"""What a library would import if it were there, and does not."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from open_instruct.system.absent_modules import absent


def test_a_module_is_absent_in_the_block_and_there_after_it() -> None:
    sys.modules.pop("colorsys", None)
    with absent("colorsys"), pytest.raises(ImportError):
        import colorsys
    import colorsys

    with absent("colorsys"):
        import colorsys as there_before
    assert there_before is colorsys


def test_an_error_in_the_block_brings_the_module_back() -> None:
    sys.modules.pop("colorsys", None)
    with pytest.raises(ZeroDivisionError), absent("colorsys"):
        _ = 1 / 0
    import colorsys  # noqa: F401


@pytest.mark.parametrize(
    ("package", "file", "hidden"),
    [
        ("vllm", "env_override.py", "from torch._inductor import lowering"),
        ("deepspeed", "autotuning/autotuner.py", "import mlflow"),
    ],
)
def test_the_library_goes_on_without_the_module(package: str, file: str, hidden: str) -> None:
    """Versions that import it elsewhere, or do not expect that it may be absent, fail here."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / file).read_text()
    assert re.search(rf"try:\s+{re.escape(hidden)}[^\n]*\n.*?except (ImportError|Exception)", text, re.DOTALL)


def test_deepspeed_of_a_learner_brings_no_tracker() -> None:
    program = "import sys; from open_instruct.cluster.process_group import import_deepspeed\n"
    program += "import_deepspeed(); print('deepspeed' in sys.modules, 'mlflow' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.split()[-2:] == ["True", "False"]
