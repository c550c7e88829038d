"""Changes and counts in words: one minus sign, one token or several."""

from __future__ import annotations

import pytest

from compressor.runtime.figures import count, figure, signed, signed_interval


@pytest.mark.parametrize(
    ("value", "form", "words"),
    [(0.8087, ".3f", "+0.809"), (-0.1, ".3f", "−0.100"), (-0.2314, ".2%", "−23.14 %"), (2e-06, ".1e", "+2.0e−06")],
)
def test_a_change_has_its_sign(value: float, form: str, words: str) -> None:
    assert signed(value, form) == words


def test_an_interval_and_a_plain_figure_have_the_same_minus() -> None:
    assert signed_interval(-0.0109, 0.0648, ".4f") == "−0.0109 … +0.0648"
    assert figure(-0.5, ".2f") == "−0.50"


def test_one_is_not_several() -> None:
    assert [count(number, "token") for number in (0, 1, 2048)] == ["0 tokens", "1 token", "2,048 tokens"]
