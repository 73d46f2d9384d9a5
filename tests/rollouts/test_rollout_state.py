"""What is written of the rollout side comes back, whole or not at all."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from group_fakes import make_result
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data_types import TokenStatistics
from open_instruct.rollouts import rollout_state
from open_instruct.rollouts.rollout_state import FinishedGroup, read_state, write_state
from open_instruct.scored_groups import Misses, ScorePart

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=3)


def make_group(number: int, lengths: list[int], *, scored: bool) -> FinishedGroup:
    rng = np.random.default_rng(number)
    result = make_result(
        responses=[rng.integers(0, 99, n).astype(np.int32) for n in lengths],
        logprobs=[rng.normal(size=n).astype(np.float32) for n in lengths],
        finish_reasons=["stop"] * len(lengths),
        version_spans=[[(3, n)] if n else [] for n in lengths],
        index=number,
        prompt_id=f"train-{number}",
        issue_version=3,
        engine_id=1,
        token_statistics=TokenStatistics(7, sum(lengths), 0.25, 1e9, num_preempted=1),
    )
    if number % 3 == 2:
        samples = [
            replace(
                sample,
                prompt_ids=rng.integers(0, 99, 4).astype(np.int32),
                loss_mask=rng.random(len(sample.response_ids)) < 0.5 if i % 2 else None,
                group=i,
                kind="reasoning",
                number=i + 1,
                weight=0.5,
                is_judged=False,
                reward=0.25,
                parent=i - 1,
            )
            for i, sample in enumerate(result.samples)
        ]
        result = replace(result, samples=samples, notes=[{"number": 1, "summary": "so far 12 {x}", "version": 3}])
    if not scored:
        return FinishedGroup(result)
    scores, of_math, of_length = rng.random((3, len(lengths))).astype(np.float32)
    parts = (ScorePart("math", 10.0, of_math), ScorePart("max_length", 0.5, of_length)) if number % 2 else ()
    misses = (Misses("math", 1, number % 2), Misses("max_length", 0, 0)) if number % 2 else ()
    counts = {"num_failures": number % 2, "num_not_scored": 1, "misses": misses}
    return FinishedGroup(result, scores, score_s=0.1, cost=0.3, parts=parts, **counts)


def assert_same(one: FinishedGroup, other: FinishedGroup) -> None:
    for name, value in vars(one.result).items():
        if name != "samples":
            assert getattr(other.result, name) == value, name
    for mine, theirs in zip(one.result.samples, other.result.samples, strict=True):
        for name, value in vars(mine).items():
            if isinstance(value, np.ndarray):
                assert getattr(theirs, name).dtype == value.dtype
                np.testing.assert_array_equal(getattr(theirs, name), value)
            else:
                assert getattr(theirs, name) == value, name
    assert (one.scores is None) == (other.scores is None)
    if one.scores is not None and other.scores is not None:
        np.testing.assert_array_equal(one.scores, other.scores)
    for name in ("num_failures", "num_not_scored", "score_s", "cost", "misses"):
        assert getattr(one, name) == getattr(other, name), name
    for part, same in zip(one.parts, other.parts, strict=True):
        assert (part.name, part.weight) == (same.name, same.weight)
        np.testing.assert_array_equal(part.scores, same.scores)


@given(st.lists(st.tuples(LENGTHS, st.booleans()), max_size=4))
def test_groups_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, shapes: list) -> None:
    path = tmp_path_factory.mktemp("state") / "state.npz"
    groups = [make_group(number, lengths, scored=scored) for number, (lengths, scored) in enumerate(shapes)]
    write_state(path, {"next_issue_number": 12}, groups)
    state, read = read_state(path)
    assert state == {"next_issue_number": 12}
    for one, other in zip(groups, read, strict=True):
        assert_same(one, other)


def test_a_state_of_before_groups_had_parts_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = rollout_state._header
    new = {"score_s", "cost", "parts", "misses"}
    old_header = lambda group: {name: value for name, value in header(group).items() if name not in new}  # noqa: E731
    monkeypatch.setattr(rollout_state, "_header", old_header)
    write_state(tmp_path / "new.npz", {"step": 1}, [make_group(0, [3], scored=True), make_group(1, [2], scored=True)])
    with np.load(tmp_path / "new.npz") as arrays:
        np.savez(tmp_path / "old.npz", **{name: arrays[name] for name in arrays if name != "part_scores"})
    _, [_, read] = read_state(tmp_path / "old.npz")
    assert (read.score_s, read.cost, read.parts, read.misses, read.num_failures) == (0.0, 0.0, (), (), 1)
    np.testing.assert_array_equal(read.scores, make_group(1, [2], scored=True).scores)


def test_a_write_that_is_cut_short_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.npz"
    write_state(path, {"step": 1}, [make_group(0, [3], scored=True)])

    def killed(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("open_instruct.rollouts.rollout_state.os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_state(path, {"step": 2}, [])
    state, groups = read_state(path)
    assert (state, len(groups)) == ({"step": 1}, 1)


def test_whoever_reads_the_old_state_meanwhile_has_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    write_state(path, {"step": 1}, [])
    content = path.read_bytes()
    with path.open("rb") as reader:
        write_state(path, {"step": 2}, [make_group(0, [5], scored=True)])
        assert reader.read() == content


def test_what_is_no_state_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such rollout state"):
        read_state(tmp_path / "missing.npz")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(ValueError, match="is no rollout state"):
        read_state(tmp_path / "torn.npz")


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.npz"
    monkeypatch.setattr("open_instruct.rollouts.rollout_state.FORMAT_VERSION", 99)
    write_state(path, {}, [])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format 99"):
        read_state(path)
