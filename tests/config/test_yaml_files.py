"""YAML files that programs read: composed with overrides, and mistakes told by name and line."""

from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.cli import UsageError
from open_instruct.config.yaml_files import CONFIG_DIRECTORY, NO_SECTION, YamlProgram, compose, in_terms_of_the_file

YAML_PROGRAM = YamlProgram(
    "run.py", "Runs.", "settings", "section.key=value", lambda: ["size", "seed", "model"], "Read the file."
)


def read(directory: Path, *argv: str) -> dict[str, Any]:
    return compose(YAML_PROGRAM, ["--config-path", str(directory), *argv])


def mistakes(directory: Path, *argv: str) -> list[str]:
    with pytest.raises(UsageError) as error:
        read(directory, *argv)
    return error.value.mistakes


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "settings.yaml").write_text("data: {size: 4, seed: -1e-5}\nmodel: tiny\n")
    return tmp_path


def test_overrides_win_over_the_file(directory: Path) -> None:
    assert read(directory) == {"data": {"size": 4, "seed": -1e-5}, "model": "tiny"}
    assert read(directory, "data.size=8", "model=large")["data"] == {"size": 8, "seed": -1e-5}


def test_overrides_may_stand_behind_a_flag(directory: Path) -> None:
    (directory / "other.yaml").write_text("data: {size: 1, seed: 2}\nmodel: tiny\n")
    argv = ["data.size=8", "--config-name", "other", "model=large", "-cn", "other", "data.seed=-1"]
    assert read(directory, *argv) == {"data": {"size": 8, "seed": -1}, "model": "large"}
    assert mistakes(directory, "data.size=8", "--sise", "3", "model=large")[0].startswith("--sise: no such option.")


def test_an_unknown_key_is_told_with_the_nearest_one(directory: Path) -> None:
    (told,) = mistakes(directory, "data.sise=8")
    assert told.startswith("data.sise")
    assert "Did you mean size?" in told
    assert mistakes(directory, "data.qqq=8") == ["data.qqq=8: no such option. Read the file."]


def test_a_file_that_is_no_yaml_is_told_with_its_line(directory: Path) -> None:
    (directory / "settings.yaml").write_text("data: 1\nmodel: [\n")
    (told,) = mistakes(directory)
    assert "settings.yaml: line 3 is not valid YAML" in told


def test_a_reference_without_an_end_is_told(directory: Path) -> None:
    assert "'${tiny'" in mistakes(directory, 'model="${tiny"')[0]
    (directory / "settings.yaml").write_text('model: "${tiny"\n')
    (told,) = mistakes(directory)
    assert "settings.yaml: " in told
    assert "'${tiny'" in told


def test_a_missing_file_and_an_unknown_option_are_told(directory: Path) -> None:
    assert "no such file" in mistakes(directory, "--config-name", "other")[0]
    assert mistakes(directory, "--size=8")[0].startswith("--size=8: no such option.")


def test_the_file_of_fully_async_training_can_be_composed() -> None:
    program = YamlProgram("fully_async_main.py", None, "fully_async", "section.key=value", list, "")
    assert compose(program, ["async_training.staleness_threshold=2"])["async_training"]["staleness_threshold"] == 2
    assert (CONFIG_DIRECTORY / "fully_async.yaml").is_file()


def test_an_option_without_a_section_is_called_by_its_name() -> None:
    where = {"size": "data.size"}
    told = in_terms_of_the_file(
        "--seed None --size 3: too few. --help", lambda name: where.get(name, NO_SECTION + name)
    )
    assert told == (
        "seed None data.size 3: too few. --help seed stands in no section of the file. Any section may have it, as in "
        "trainer.seed=VALUE."
    )
    assert in_terms_of_the_file("--size 3: too few.", where.__getitem__) == "data.size 3: too few."
