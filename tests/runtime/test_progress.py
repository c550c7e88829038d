"""Steps with numbers and the time that is left, and a line a minute where nobody sees a bar."""

from __future__ import annotations

import time

import pytest

from compressor.runtime import progress as progresses
from compressor.runtime.progress import PlannedStep, Progress, duration

STEPS = [PlannedStep("first things", ("a",), 10), PlannedStep("tasks", ("b", "source *"), 20), PlannedStep("end", ())]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progresses.time, "monotonic", clock)
    return clock


@pytest.fixture
def progress(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Progress:
    progress = Progress()
    progress.follow(STEPS)
    return progress


def test_what_is_left_follows_the_pace_of_the_steps_so_far(progress: Progress, clock: Clock) -> None:
    progress.enter("a")
    assert progress.seconds_left() is None  # nothing is known of this machine yet
    clock.now += 5
    progress.enter("source lambada")  # 10 units took 5 s, so 20 take 10 s
    assert progress.seconds_left() == pytest.approx(10)
    clock.now += 4
    assert progress.seconds_left() == pytest.approx(6)
    clock.now += 60
    assert progress.seconds_left() == pytest.approx(0)  # it takes longer than expected, but is not done before it began


def test_the_first_step_tells_by_its_own_bar(progress: Progress, clock: Clock) -> None:
    with progress.bar("a", 4) as advance:
        clock.now += 2
        advance(1)  # a quarter in 2 s: 6 s more of this step, and 16 s of the next
        assert progress.seconds_left() == pytest.approx(6 + 16)


def test_a_step_without_a_bar_says_nothing_about_the_pace(progress: Progress, clock: Clock) -> None:
    """What was kept from an earlier run takes no time, and is never entered."""
    progress.enter("b")
    clock.now += 8
    progress.leave()
    assert progress.spent == {1: 8}
    assert progress.seconds_left() == 0


def test_the_exact_name_of_a_bar_wins(clock: Clock) -> None:
    progress = Progress()
    progress.follow([PlannedStep("tasks", ("source *",)), PlannedStep("original", ("source text",))])
    progress.enter("source text")
    assert progress.number == 1


def test_lines(progress: Progress, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress, "say", lines.append)
    progress.enter("a")
    clock.now += 5
    progress.enter("b")
    progress.note("only for those who ask")
    with progress.bar("b", 3) as advance:
        clock.now += 60
        advance(2)
        progress.beat()
    clock.now += 30
    progress.leave()
    assert lines == [
        "[1/3] first things: 5 s; about 10 s left",
        "[2/3] tasks: 2 of 3, 60 s so far; about 30 s left",
        "[2/3] tasks: 1.5 min",
    ]


def test_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread says that the work goes on; the heartbeat is made quick for this test."""
    monkeypatch.setattr(progresses, "HEARTBEAT", 0.0)
    progress = Progress(visible=True)
    progress.bars = False
    lines: list[str] = []
    monkeypatch.setattr(progress, "say", lines.append)
    progress.follow(STEPS)
    progress.enter("a")
    with progress.alive():
        end = time.monotonic() + 30
        while not lines and time.monotonic() < end:
            time.sleep(0.05)
    assert lines[0].startswith("[1/3] first things: ")
    assert lines[0].endswith(" so far")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (59, "59 s"), (120, "2.0 min"), (1200, "20 min"), (7200, "2.0 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
