"""The peers of benchmarks/peers.py against planted facts: what is dead, copied or linear goes at no cost."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peer_methods import group_obs, modegpt, olica
from peer_methods.common import Inapplicable, Method, Subject, ffn_linears, keep_neurons, share_out, weight_and_bias
from peer_methods.layers import by_layers, replaceme, shortgpt
from peer_methods.low_rank import svd
from peer_methods.moments import attention_of, measure_moments
from peer_methods.nbl import cca_bound, covariances, linear_map, nbl
from peer_methods.ours import Ours
from peer_methods.unit_attention import UnitAttention
from peer_methods.width import width
from planted import random_text
from planted_attention import attend_to_itself, unit_views
from torch import Tensor
from zoo import WIDTH, tiny_model

from compressor.patch.checkpoint import count_parameters

WINDOWS = random_text().calibration.windows
LLAMA_AND_GPT2 = pytest.mark.parametrize("family", ["llama", "gpt2"])
PEERS: dict[str, Method] = {
    "shortgpt": by_layers(shortgpt),
    "replaceme": by_layers(replaceme),
    "width": width,
    "svd": svd,
    "nbl": nbl,
    "olica": olica.olica,
    "modegpt": modegpt.modegpt,
    **group_obs.METHODS,
}


STEPPED = ("shortgpt", "replaceme", "nbl")  # whole layers or attentions go


def subject_of(family: str, **settings: Any) -> Subject:
    return Subject(tiny_model(family, **settings), WINDOWS)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=WINDOWS[:6], use_cache=False).logits  # type: ignore[no-any-return]


def difference(changed: Any, model: Any) -> float:
    """The largest change of a logit, in sizes of the logits."""
    before = logits(model)
    return ((logits(changed) - before).abs().max() / before.std()).item()


def total_of(model: Any) -> int:
    return count_parameters(model)


@LLAMA_AND_GPT2
@pytest.mark.parametrize("name", PEERS)
def test_at_least_what_is_asked_for_is_gone_for_good(name: str, family: str) -> None:
    subject = subject_of(family)
    before = {key: tensor.clone() for key, tensor in subject.model.state_dict().items()}
    for fraction in (0.02, 0.1):
        wanted = math.ceil(fraction * subject.parameters)
        if (name, fraction) == ("obs-heads", 0.02):  # less than half a unit: it would be neurons alone
            with pytest.raises(Inapplicable):
                PEERS[name](subject, wanted)
            continue
        changed = PEERS[name](subject, wanted)
        gone = subject.parameters - total_of(changed)
        assert wanted <= gone <= wanted + subject.parameters * (0.25 if name in STEPPED else 0.06)
        assert logits(changed).isfinite().all()
    for key, tensor in subject.model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


@pytest.mark.parametrize("name", PEERS)
def test_more_than_there_is_is_refused(name: str) -> None:
    subject = subject_of("llama")
    with pytest.raises(Inapplicable):
        PEERS[name](subject, subject.parameters)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "phi3"])
def test_units_compute_what_the_stock_attention_does(family: str) -> None:
    subject = subject_of(family)
    attention, units = attention_of(subject)
    changed = copy.deepcopy(subject.model)
    for layer, block in attention.items():
        changed.set_submodule(block.path, UnitAttention(units[layer]))
    assert difference(changed, subject.model) < 1e-4
    assert total_of(changed) == subject.parameters


@pytest.mark.parametrize("family", ["qwen3", "bloom", "gpt_neox"])
def test_attention_that_is_built_otherwise_is_refused(family: str) -> None:
    with pytest.raises(Inapplicable):
        attention_of(subject_of(family))


@LLAMA_AND_GPT2
def test_moments_are_those_of_the_rows(family: str) -> None:
    subject = subject_of(family)
    block, seen = subject.blocks[1], []
    down = ffn_linears(subject.model, block)[1]
    handle = subject.model.get_submodule(down).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        subject.model(input_ids=WINDOWS, use_cache=False)
    handle.remove()
    rows = seen[0].flatten(0, 1).double()
    found = measure_moments(subject)[1].part("ffn", "a", "a")
    torch.testing.assert_close(found, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-6)


def test_moments_in_files_are_those_in_memory(tmp_path: Any) -> None:
    subject = subject_of("llama")
    in_memory = measure_moments(subject)
    for _ in range(2):  # written, then read
        in_files = measure_moments(replace(subject, directory=tmp_path))
        for layer in range(len(in_memory)):
            for name in ("ffn", "attention", "queries", "keys"):
                assert torch.equal(getattr(in_files[layer], name), getattr(in_memory[layer], name))


def test_shares_add_up() -> None:
    assert share_out([1.4, 1.4, 1.4]) == [2, 1, 2]
    assert share_out([0.0, 0.2, 0.0]) == [0, 1, 0]
    assert sum(share_out([2.5] * 4)) == 10


# Group OBS


def rows_with_copies() -> Tensor:
    """Activations of eight neurons: 1 is twice 0, 5 is the sum of 3 and 4, 7 is dead."""
    rows = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)).double()
    rows[:, 1] = 2 * rows[:, 0]
    rows[:, 5] = rows[:, 3] + rows[:, 4]
    rows[:, 7] = 0.0
    return rows


def drawn_weight(columns: int = 8) -> Tensor:
    return torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("size", [1, 2])
def test_obs_is_the_refit_and_its_costs_are_what_is_lost(size: int) -> None:
    rows = (
        torch.randn(400, 8, generator=torch.Generator().manual_seed(0)).double() @ drawn_weight(8).T @ drawn_weight(8)
    )
    rows = rows + 0.3 * torch.randn(400, 8, generator=torch.Generator().manual_seed(2)).double()
    gram, weight = rows.T @ rows / len(rows), drawn_weight()
    groups = torch.arange(8).view(-1, size)
    elimination = group_obs.Elimination(gram, weight, groups, damping=0.0)
    for _ in range(len(groups) - 1):
        expected = {}
        for group in elimination.alive.nonzero()[:, 0].tolist():
            left = elimination.alive.clone()
            left[group] = False
            columns = groups[left].flatten()
            refitted = torch.linalg.lstsq(rows[:, columns], rows @ weight.T).solution
            expected[group] = (rows @ weight.T - rows[:, columns] @ refitted).square().sum().item() / len(rows)
        before = (rows @ (weight - elimination.weight).T).square().sum().item() / len(rows)
        costs = elimination.costs()
        for group, loss in expected.items():
            assert costs[group].item() == pytest.approx(loss - before, rel=1e-6, abs=1e-9)
        elimination.shrink(1)
        assert min(expected.values()) == pytest.approx(
            (rows @ (weight - elimination.weight).T).square().sum().item() / len(rows), rel=1e-6
        )


def test_obs_removes_dead_and_copied_columns_for_nothing() -> None:
    rows, weight = rows_with_copies(), drawn_weight()
    elimination = group_obs.Elimination(rows.T @ rows, weight, torch.arange(8)[:, None], damping=1e-9)
    elimination.shrink(3)
    kept = set(elimination.kept.tolist())
    assert 7 not in kept
    assert len(kept & {0, 1}) == 1
    assert len(kept & {3, 4, 5}) == 2
    assert (rows @ (weight - elimination.weight).T).abs().max() < 1e-5


@torch.no_grad()
def copy_neurons(subject: Subject, count: int) -> None:
    """Let the last neurons of every FFN compute what the first ones do."""
    for block in subject.blocks:
        ups, down = ffn_linears(subject.model, block)
        neurons = weight_and_bias(subject.model, down)[0].shape[1]
        for up in ups:
            weight, bias = weight_and_bias(subject.model, up)
            weight[neurons - count :] = weight[:count]
            if bias is not None:
                bias[neurons - count :] = bias[:count]


@LLAMA_AND_GPT2
def test_obs_removes_copied_neurons_for_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_obs, "Elimination", partial(group_obs.Elimination, damping=1e-6))
    subject = subject_of(family)
    copy_neurons(subject, 6)
    changed = group_obs.prune_in_order(subject, [6] * 3)
    assert difference(changed, subject.model) < 1e-3
    assert difference(group_obs.prune_in_order(subject, [12] * 3), subject.model) > 1e-2


@LLAMA_AND_GPT2
@pytest.mark.parametrize("planted", ["silent", "copied"])
def test_obs_removes_idle_heads_for_nothing(family: str, planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_obs, "Elimination", partial(group_obs.Elimination, damping=1e-6))
    subject = subject_of(family)
    views = unit_views(subject.model, 1)
    if planted == "silent":
        views.silence(0)
    else:
        views.copy(source=1, target=0)
    changed = group_obs.prune_in_order(subject, [0] * 3, [0, 1, 0])
    assert total_of(changed) < subject.parameters
    assert difference(changed, subject.model) < 2e-3
    assert difference(group_obs.prune_in_order(subject, [0] * 3, [1, 0, 0]), subject.model) > 1e-2


def test_obs_takes_the_idle_head_of_whichever_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("gpt2")
    unit_views(subject.model, 2).silence(1)
    taken: list[Any] = []
    monkeypatch.setattr(group_obs, "prune_in_order", lambda *args: taken.append(args[2]))
    _, units = attention_of(subject)
    size = units[0].parameters // len(units[0].keys)
    share = sum(u.parameters for u in units.values()) / (
        sum(u.parameters for u in units.values())
        + sum(sum(p.numel() for p in subject.model.get_submodule(b.path).parameters()) for b in subject.blocks)
    )
    group_obs.neurons_and_heads(subject, math.ceil(size / share))
    assert taken == [[0, 0, 1]]


# MoDeGPT


def test_nystroem_is_exact_where_the_rest_is_linear_in_what_is_kept() -> None:
    rows, weight = rows_with_copies(), drawn_weight()
    kept = torch.tensor([0, 2, 3, 4, 6])
    refitted = modegpt.refit(rows.T @ rows / len(rows), weight, kept)
    torch.testing.assert_close(rows[:, kept] @ refitted.T, rows @ weight.T, rtol=1e-4, atol=1e-4)


def test_leverage_is_low_where_a_neuron_follows_from_others() -> None:
    rows = rows_with_copies()
    scores = modegpt.leverage(rows.T @ rows / len(rows))
    assert scores[7] < 1e-9
    alone, copied = scores[[2, 6]], scores[[0, 1]]
    assert alone.min() > 0.99
    torch.testing.assert_close(copied.sum(), torch.tensor(1.0).double(), rtol=0, atol=0.01)  # they share one direction
    kept, refitted = modegpt.nystroem(rows.T @ rows / len(rows), drawn_weight(), 6)
    assert 7 not in kept
    assert 0 not in kept  # the smaller one of two copies
    torch.testing.assert_close(rows[:, kept] @ refitted.T, rows @ drawn_weight().T, rtol=1e-4, atol=1e-4)


@LLAMA_AND_GPT2
def test_modegpt_removes_copied_neurons_for_nothing(family: str) -> None:
    subject = subject_of(family)
    copy_neurons(subject, 1)
    changed = copy.deepcopy(subject.model)
    for block in subject.blocks:
        gram = measure_moments(subject)[block.layer].part("ffn", "a", "a")
        weight, _ = weight_and_bias(changed, ffn_linears(changed, block)[1])
        keep_neurons(changed, block, *modegpt.nystroem(gram, weight, weight.shape[1] - 1))
    assert total_of(changed) < subject.parameters
    assert difference(changed, subject.model) < 1e-3


def with_attention(subject: Subject, cut: Any) -> Any:
    """A copy whose attention in every layer is what `cut` makes of its units and moments."""
    attention, units = attention_of(subject)
    changed, moments = copy.deepcopy(subject.model), measure_moments(subject)
    for layer, block in attention.items():
        changed.set_submodule(block.path, UnitAttention(cut(units[layer], moments[layer])))
    return changed


@LLAMA_AND_GPT2
def test_dead_rotary_pairs_go_for_nothing(family: str) -> None:
    subject = subject_of(family)
    for layer in range(3):
        views = unit_views(subject.model, layer)
        units, size = len(views.keys), views.keys.shape[1]
        dead = torch.arange(units) % (size // 2)  # another pair in every unit: (i, i + half)
        for unit in range(units):
            own = [dead[unit], dead[unit] + size // 2]
            views.keys[unit, own] = 0.0
            if views.key_biases is not None:
                views.key_biases[unit, own] = 0.0
    step = 1 if family == "llama" else 2  # pairs, or dimensions
    changed = with_attention(subject, lambda units, layer: modegpt.drop_dims(units, layer, step))
    assert total_of(changed) < subject.parameters
    assert difference(changed, subject.model) < 1e-4
    assert difference(with_attention(subject, lambda u, m: modegpt.drop_dims(u, m, step + 1)), subject.model) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_values_of_low_rank_are_narrowed_for_nothing(family: str) -> None:
    subject = subject_of(family)
    for layer in range(3):
        views = unit_views(subject.model, layer)
        for unit in range(len(views.values)):
            left, right = (torch.randn(8, 5, generator=torch.Generator().manual_seed(unit)) for _ in range(2))
            mixing = left @ right.T / 5
            views.values[unit] = mixing @ views.values[unit]
            if views.value_biases is not None:
                views.value_biases[unit] = mixing @ views.value_biases[unit]
    changed = with_attention(subject, lambda units, layer: modegpt.narrow_values(units, layer, 5))
    assert total_of(changed) < subject.parameters
    assert difference(changed, subject.model) < 1e-3
    assert difference(with_attention(subject, lambda u, m: modegpt.narrow_values(u, m, 4)), subject.model) > 1e-3


def test_narrowed_values_are_the_best_of_their_rank_on_the_inputs() -> None:
    """Of attention with own values for every head, C^½ W_v W_o is cut to its leading singular values."""
    subject = subject_of("gpt2")
    layer, units = measure_moments(subject)[1], attention_of(subject)[1][1]
    units = replace(units, value_bias=None)
    narrow = modegpt.narrow_values(units, layer, 3)
    values, vectors = torch.linalg.eigh(layer.part("attention", "x", "x"))
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    for unit in range(len(units.keys)):
        maps = [root @ (u.outputs[unit, 0].double() @ u.values[unit].double()).T for u in (units, narrow)]
        expected = torch.linalg.svdvals(maps[0])[3:].square().sum().sqrt()
        torch.testing.assert_close((maps[0] - maps[1]).norm(), expected, rtol=1e-5, atol=1e-8)


def test_the_allocation_has_its_mean_and_takes_from_layers_of_little_influence() -> None:
    importance = torch.tensor([0.5, 0.1, 0.1, 0.9])
    shares = modegpt.allocate(importance, 0.1)
    assert shares.mean().item() == pytest.approx(0.1)
    assert shares[1] == shares[2] > shares[0] > shares[3]
    crowded = modegpt.allocate(importance, 0.6)
    assert crowded.mean().item() == pytest.approx(0.6)
    assert crowded.max() <= 1


# Olica


def test_a_residual_of_low_rank_is_recovered() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 6, generator=generator).double() @ drawn_weight(6)[:5].repeat(2, 1)[:6] + 1.0
    x = x + torch.randn(500, 6, generator=generator).double()
    through = torch.randn(6, 2, generator=generator).double() @ torch.randn(2, 4, generator=generator).double()
    activations = torch.cat([torch.randn(500, 3, generator=generator).double(), x @ through + 0.7], dim=1)
    z = torch.cat([x, torch.ones(500, 1).double(), activations], dim=1)
    moments = olica.LayerMoments(z.T @ z / 500, 0.0, 6)
    weight, dropped = drawn_weight(7), torch.arange(3, 7)
    residual = olica.fit_residual(moments, weight, dropped)
    assert residual.recoverable == pytest.approx(1, abs=1e-5)
    down, up = residual.of_rank(2)
    expected = activations[:, dropped] @ weight[:, dropped].T
    torch.testing.assert_close(x @ down.T @ up.T + residual.bias, expected, rtol=1e-2, atol=1e-2)
    unrelated = olica.fit_residual(moments, weight, torch.arange(3))
    assert unrelated.recoverable < 0.1


@LLAMA_AND_GPT2
def test_olica_removes_small_neurons_for_nothing(family: str) -> None:
    subject = subject_of(family)
    for block in subject.blocks:
        weight, _ = weight_and_bias(subject.model, ffn_linears(subject.model, block)[1])
        weight[:, -24:] = 0.0
    changed = olica.olica(subject, 1500)
    assert difference(changed, subject.model) < 1e-4


# NBL


def test_attention_that_is_linear_becomes_a_map_for_nothing() -> None:
    subject = subject_of("llama", attention_bias=True)
    attend_to_itself(subject.model, 1)
    attention, units = attention_of(subject)
    saved = attention[1].parameters - WIDTH * (WIDTH + 1)
    changed = nbl(subject, saved)
    assert type(changed.get_submodule(attention[1].path)).__name__ == "LinearAttention"
    assert subject.parameters - total_of(changed) == saved
    assert difference(changed, subject.model) < 1e-2
    bounds = [cca_bound(covariances(measure_moments(subject)[layer], units[layer])) for layer in range(3)]
    assert bounds[1] == min(bounds)


@LLAMA_AND_GPT2
def test_the_map_and_the_bound_are_those_of_the_rows(family: str) -> None:
    subject = subject_of(family)
    attention, units = attention_of(subject)
    seen: list[tuple[Tensor, Tensor]] = []
    streams: list[Tensor] = []
    model = subject.model

    def see(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"], output[0].clone()))

    layer = model.get_submodule(subject.blocks[1].layer_path)
    handles = [
        model.get_submodule(attention[1].path).register_forward_hook(see, with_kwargs=True),
        layer.register_forward_pre_hook(lambda _, args: streams.append(args[0].clone())),
    ]
    with torch.no_grad():
        model(input_ids=WINDOWS, use_cache=False)
    for handle in handles:
        handle.remove()
    x, y, h = (rows.flatten(0, 1).double() for rows in (*seen[0], streams[0]))
    found = covariances(measure_moments(subject)[1], units[1])
    linear = linear_map(found)
    ones = torch.ones(len(x), 1).double()
    # GPT-2's norm leaves a direction with nothing in it but rounding.
    expected = torch.linalg.lstsq(torch.cat([x, ones], 1), y, rcond=1e-5, driver="gelsd").solution
    predicted, best = x @ linear.weight.double().T + linear.bias.double(), torch.cat([x, ones], 1) @ expected
    torch.testing.assert_close(predicted, best, rtol=1e-3, atol=1e-3)
    bases = [torch.linalg.qr(rows - rows.mean(0)).Q for rows in (x, y + h)]
    correlations = torch.linalg.svdvals(bases[0].T @ bases[1])
    assert cca_bound(found) == pytest.approx((1 - correlations.square()).sum().item(), rel=1e-2)


# The others


def test_svd_of_matrices_that_have_a_low_rank_costs_nothing() -> None:
    subject = subject_of("llama")
    for layer in range(3):
        for path in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
            shrink_rank(subject.model.get_submodule(f"model.layers.{layer}.{path}"))
        for path in ("gate_proj", "up_proj", "down_proj"):
            shrink_rank(subject.model.get_submodule(f"model.layers.{layer}.mlp.{path}"))
    linears = sum(p.numel() for p in subject.model.model.layers.parameters() if p.ndim == 2)
    changed = svd(subject, linears // 2)
    assert difference(changed, subject.model) < 1e-3


@torch.no_grad()
def shrink_rank(linear: Any, rank: int = 4) -> None:
    left, values, right = torch.linalg.svd(linear.weight, full_matrices=False)
    linear.weight.copy_(left[:, :rank] * values[:rank] @ right[:rank])


def test_a_layer_that_does_nothing_is_dropped_for_nothing() -> None:
    subject = subject_of("llama")
    layer = subject.model.model.layers[1]
    with torch.no_grad():
        for parameter in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, layer.mlp.down_proj.bias):
            parameter.zero_()
    size = sum(p.numel() for p in layer.parameters())
    for drop in (shortgpt, replaceme):
        assert difference(by_layers(drop)(subject, size), subject.model) < 1e-3


@LLAMA_AND_GPT2
def test_ours_reaches_its_size_and_is_healed_on_what_it_may_see(family: str) -> None:
    subject = replace(subject_of(family), healing=WINDOWS[:8])
    wanted = subject.parameters // 20
    for method in (Ours(("ffn",)), Ours(("ffn", "attention")), Ours(("ffn", "attention"), heal_tokens=64)):
        changed = method(subject, wanted)
        assert subject.parameters - total_of(changed) >= wanted
        assert logits(changed).isfinite().all()
