"""Blocks on foreign and on white inputs."""

from __future__ import annotations

import pytest
import torch
from planted import LinearFFN, WildFFN, planted_model, random_text
from zoo import REPRESENTATIVE, tiny_model

from compressor.measure.probes import cross, moments_of, refuse_different_widths, whitening_matrix
from compressor.measure.profile import measure
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_a_model_crossed_with_itself_is_itself(family: str) -> None:
    model, text = tiny_model(family), random_text()
    profile = measure(model, text)
    for found, p in zip(cross(model, text, model, text, RunContext()), profile.blocks, strict=True):
        assert found.own == pytest.approx(p.r2_lin, abs=1e-5)
        assert found.own_on_other == pytest.approx(found.own, abs=1e-9)
        assert found.other == pytest.approx(found.own, abs=1e-9)
        assert found.other_on_own == pytest.approx(found.own, abs=1e-9)
        assert found.other_on_white == pytest.approx(found.own_on_white, abs=1e-9)


def test_linearity_that_is_in_the_weights_goes_with_the_block() -> None:
    wild, mixed = (
        planted_model(*(WildFFN(seed=k) for k in (2, 3, 4))),
        planted_model(WildFFN(), LinearFFN(), WildFFN(seed=5)),
    )
    text = random_text()
    found = cross(wild, text, mixed, text, RunContext())
    assert found[1].own < 0.3
    assert found[1].own_on_other < 0.5
    assert found[1].other_on_own == pytest.approx(1, abs=1e-5)
    assert found[1].other_on_white == pytest.approx(1, abs=1e-5)


def test_white_inputs_have_unit_covariance_where_they_vary() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 5, generator=generator) @ torch.randn(5, 8, generator=generator) + 1  # rank 5 of 8
    moments = moments_of(x, x[:, :0])
    white = (x.double() - moments.mean_x) @ whitening_matrix(moments)
    values = torch.linalg.eigvalsh(white.T @ white / len(white))
    torch.testing.assert_close(values[3:], torch.ones(5, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    assert values[:3].abs().max() < 1e-6


def test_models_of_other_depth_meet_at_the_same_relative_depth() -> None:
    deep, shallow, text = tiny_model("gpt2"), tiny_model("gpt2"), random_text()
    shallow.transformer.h = shallow.transformer.h[:2]
    shallow.config.n_layer = 2
    assert [found.other_index for found in cross(deep, text, shallow, text, RunContext())] == [0, 0, 1]
    assert [found.other_index for found in cross(shallow, text, deep, text, RunContext())] == [0, 2]


def test_other_widths_are_refused_with_both() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=50, n_positions=32))
    with pytest.raises(InputError, match=r"--cross b has blocks of width 48, a of width 32"):
        refuse_different_widths(tiny_model("gpt2"), other, "a", "b")
