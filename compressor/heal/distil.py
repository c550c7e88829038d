"""Distillation: train a compressed model's replacements until its predictions are nearer to those of its source.

Teacher and student are one model: in turns the source's own modules and the student's stand in it. The layers before
the first replaced one are the same for both, so they run once. Every few steps the selection text is looked at; the
best state there is what remains, and a run that was killed goes on from the last look.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressor.evaluate.budget import text_prefix
from compressor.evaluate.perplexity import limit_batch_size
from compressor.heal.divergence import Distance, Outputs, find_outputs
from compressor.heal.memory import plan_memory
from compressor.heal.precision import choose_precision
from compressor.heal.settings import HealSettings
from compressor.heal.student import (
    finish_student,
    frozen,
    load_parameters,
    make_student,
    trained_parameters,
)
from compressor.models.blocks import Block, find_blocks, hidden_states_of
from compressor.models.branches import layer_of
from compressor.models.calls import passing_through
from compressor.models.layer_check import check_layers
from compressor.models.offload import device_of
from compressor.patch.tree import HealedReplacements, Replacements, identify_patched, patched
from compressor.runtime import distributed
from compressor.runtime.cache import Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.figures import signed
from compressor.text import Split, Text, batches

PATIENCE = 3  # looks in a row without a gain, after which healing stops
DIVERGED, NOISE = 3.0, 0.01  # times the best divergence, and nats: beyond both together the training has come apart


@dataclass(frozen=True)
class Look:
    """One look at the selection text, after so many tokens: divergence, and the rise in perplexity of every text."""

    tokens: int
    kl: float  # nats per token, all texts weighing alike
    rise: float  # of the loss, in nats per token, all texts weighing alike
    dppl: dict[str, float]

    @property
    def distance(self) -> float:
        """What the best state is chosen by. Divergence tells more surely how near the source is, the rise of the loss
        is what a budget asks for; a fall of it is no merit."""
        return self.kl + max(self.rise, 0.0)


@dataclass(frozen=True)
class Healing:
    """What healing made of some replacements, and how it went."""

    fits: HealedReplacements
    looks: list[Look]
    settings: HealSettings
    trained: int  # parameters
    tokens: int  # trained on, until it stopped
    precision: str
    seconds: float
    stopped: str | None = None  # why it ended early, in words

    @property
    def before(self) -> Look:
        return self.looks[0]

    @property
    def after(self) -> Look:
        return min(self.looks, key=lambda look: look.distance)

    @property
    def gain(self) -> float:
        """What is left of the divergence on the selection text."""
        return self.after.kl / self.before.kl if self.before.kl > 0 else 1.0


@dataclass
class State:
    """Where a training stands."""

    step: int = 0
    looks: list[Look] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: str | None = None


def heal(
    model: Any,
    blocks: list[Block],
    fits: Replacements,
    text: Text,
    settings: HealSettings,
    context: RunContext,
    *,
    step: str = "heal",
) -> Healing:
    """Train copies of the replacements towards the source; the model is left as it was.

    The result is kept, and so is the state at every look: the same command goes on where it was stopped, and comes to
    the same weights.
    """
    return Distiller(model, blocks, fits, text, settings, context, step).run()


class Distiller:
    """One training. Several processes share each batch and add up their gradients."""

    def __init__(
        self,
        model: Any,
        blocks: list[Block],
        fits: Replacements,
        text: Text,
        settings: HealSettings,
        context: RunContext,
        step: str,
    ) -> None:
        self.model, self.blocks, self.text = model, blocks, text
        self.settings, self.context, self.name = settings, context, step
        self.fits = fits
        self.windows = healing_split(text).windows
        self.layers = [model.get_submodule(block.layer_path) for block in find_blocks(model)]
        self.first = min((layer_of(index) for index in fits), default=0)
        self.size = max(1, settings.batch_tokens // text.seq_len)
        self.steps = max(1, math.ceil(settings.tokens / (self.size * text.seq_len)))

    def prepare(self) -> None:
        """Copy what is trained, and find out how to compare; nothing is trained yet."""
        self.student = make_student(self.model, self.blocks, self.fits, self.settings.params)
        self.parameters = trained_parameters(self.student)
        self.precision = choose_precision(self.model, self.context)
        self.outputs: Outputs = find_outputs(self.model, self.windows, self.precision)
        self.tuple_length = check_layers(self.model, find_blocks(self.model))

    def run(self) -> Healing:
        self.prepare()
        cache, key = self.context.cache, self.key()
        finished = cache.find(key)
        if finished is not None:
            self.context.progress.note(f"{self.name}: done before")
            load_parameters(self.student, finished)
            return self.finish(unpack_summary(finished, list(self.text.counts)))
        changed = self.layers[self.first :]
        with frozen(self.model), plan_memory(self.model, changed, self.parameters, self.size, self.text):
            state = self.train()
        load_parameters(self.student, state.best)
        cache.keep(key, {**state.best, **pack_summary(state)})
        cache.drop(self.key("state"))
        return self.finish(state)

    def finish(self, state: State) -> Healing:
        return Healing(
            finish_student(self.model, self.blocks, self.student),
            state.looks,
            self.settings,
            sum(p.numel() for p in self.parameters.values()),
            min(state.step * self.size * self.text.seq_len, self.settings.tokens),
            str(self.precision or self.model.dtype).removeprefix("torch."),
            state.seconds,
            state.stopped,
        )

    def key(self, kind: str = "weights") -> dict[str, Any]:
        """All that the trained weights depend on."""
        how = {**self.settings.describe(), "seq_len": self.text.seq_len, "selection": self.text.selection.sha256}
        windows = healing_split(self.text).sha256
        machine = {"processes": distributed.size(), "threads": torch.get_num_threads(), "precision": self.precision}
        return cache_key(f"healed {kind}", identify_patched(self.model, self.fits), windows, **how, **machine)

    def train(self) -> State:
        """Train to the last step, or to the first sign that more would do harm."""
        settings, progress = self.settings, self.context.progress
        optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            fused=True,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        state = self.restore(optimizer)
        self.remember_teacher()
        due = {round(self.steps * (k + 1) / settings.looks) for k in range(settings.looks)}
        order = WindowOrder(len(self.windows), self.size, settings.seed)
        if not state.looks:
            self.look(state)
        elif state.step:
            progress.say(f"{self.name}: goes on after step {state.step} of {self.steps}")
        with progress.bar(self.name, self.steps, f"{settings.tokens:,} tokens") as advance:
            advance(state.step)
            while state.step < self.steps and state.stopped is None:
                began = time.perf_counter()
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate * self.rate_at(state.step)
                loss = self.take_step(optimizer, self.windows[order.at(state.step)])
                state.step += 1
                state.seconds += time.perf_counter() - began
                advance(1)
                if not math.isfinite(loss):
                    state.stopped = f"the loss was {loss} at step {state.step}"
                elif state.step in due:
                    self.look(state)
                    self.save(state, optimizer)
        if state.stopped:
            best = min(state.looks, key=lambda look: look.distance)
            progress.say(
                f"warning: healing ends early: {state.stopped}; the state after {best.tokens:,} tokens is kept"
            )
        return state

    def rate_at(self, step: int) -> float:
        """The share of the learning rate at a step: a short linear warm-up, then half a cosine down to zero."""
        warm = max(1, round(self.settings.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    def take_step(self, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
        """One step on a batch of windows; the mean divergence of the batch before it."""
        own = distributed.own_share(list(batch))
        loss = torch.zeros(1)
        optimizer.zero_grad(set_to_none=True)
        if own:
            loss += self.backpropagate(torch.stack(own).to(device_of(self.model)), len(own) / len(batch))
        parameters = list(self.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        distributed.sum_over_processes([loss, *(p.grad for p in parameters if p.grad is not None)])
        norm = nn.utils.clip_grad_norm_(parameters, self.settings.clip)
        if not bool(norm.isfinite()):
            return float(norm)
        optimizer.step()
        return loss.item()

    def backpropagate(self, batch: Tensor, share: float) -> float:
        """Add this share of the gradient of the mean divergence on a batch; the same share of the divergence."""
        with torch.no_grad(), self.autocast(), entering(self.layers, self.first) as states:
            teacher = self.outputs.compute(batch)
        with patched(self.model, self.blocks, self.student):
            with self.autocast():
                divergence = share * self.outputs.divergence(self.run_student(batch, states), teacher)
            divergence.backward()  # type: ignore[no-untyped-call]  # in here: layers may run again with the student
        return divergence.item()

    def run_student(self, batch: Tensor, states: list[Tensor]) -> Tensor:
        """The student's outputs; it begins at the first layer that differs, with the teacher's hidden states."""
        before = self.layers[: self.first]
        with passing_through(before, self.tuple_length, iter(states)) if before else nullcontext():
            return self.outputs.compute(batch)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(device_of(self.model).type, dtype=self.precision)

    def selection_batches(self) -> list[Tensor]:
        size = limit_batch_size(self.model, self.text.seq_len, self.context.batch_size)
        return distributed.own_share(batches(self.text.selection.windows, size))

    @torch.no_grad()
    def remember_teacher(self) -> None:
        """Keep what the teacher puts out on the selection text, where that is small: last hidden states, not logits."""
        self.remembered: list[tuple[Tensor, list[Tensor]]] = []
        if self.outputs.head is not None:
            for batch in self.selection_batches():
                with self.autocast(), entering(self.layers, self.first) as states:
                    self.remembered.append((self.outputs.compute(batch.to(device_of(self.model))), states))

    @torch.no_grad()
    def look(self, state: State) -> None:
        """Measure the student on the selection text; note it, and its weights where they are the best so far."""
        found = []
        for number, batch in enumerate(self.selection_batches()):
            batch = batch.to(device_of(self.model))
            with self.autocast():
                if self.remembered:
                    teacher, states = self.remembered[number]
                else:
                    with entering(self.layers, self.first) as states:
                        teacher = self.outputs.compute(batch)
                with patched(self.model, self.blocks, self.student):
                    student = self.run_student(batch, states)
                distance = self.outputs.compare(student, teacher, batch)
            found.append(torch.stack(list(distance), 1).reshape(len(batch), -1, len(distance)))
        look = summarise(torch.cat(distributed.gather(found)), self.text, state.step * self.size * self.text.seq_len)
        best = min((other.distance for other in state.looks), default=math.inf)
        least = min((other.kl for other in state.looks), default=math.inf)
        state.looks.append(look)
        if look.distance < best:
            state.best = {name: p.detach().clone() for name, p in self.parameters.items()}
        elif not math.isfinite(look.kl) or look.kl > DIVERGED * least + NOISE:
            state.stopped = f"the divergence on the selection text rose from {least:.4f} to {look.kl:.4f}"
        elif self.steps / 2 < state.step < self.steps and self.settled(state.looks):
            state.stopped = f"{PATIENCE} looks at the selection text without a gain"
        rises = ", ".join(f"{text_prefix(name)}ΔPPL {signed(rise)}" for name, rise in look.dppl.items())
        self.context.progress.say(f"  {self.name}: after {look.tokens:,} tokens KL {look.kl:.4f}, selection {rises}")

    def settled(self, looks: list[Look]) -> bool:
        """Whether the last looks brought nothing better than those before them."""
        recent, before = looks[-PATIENCE:], looks[:-PATIENCE]
        return bool(before) and min(look.distance for look in recent) >= min(look.distance for look in before)

    def save(self, state: State, optimizer: torch.optim.Optimizer) -> None:
        """Keep all that the next step depends on."""
        if self.context.cache.directory is None or state.step >= self.steps or state.stopped:
            return
        tensors = {f"now/{name}": p.detach() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            moments = optimizer.state[parameter]
            tensors |= {f"mean/{name}": moments["exp_avg"], f"square/{name}": moments["exp_avg_sq"]}
        if any(not torch.equal(value, self.parameters[name]) for name, value in state.best.items()):
            tensors |= {f"best/{name}": value for name, value in state.best.items()}
        self.context.cache.keep(self.key("state"), {**tensors, **pack_summary(state)})

    def restore(self, optimizer: torch.optim.Optimizer) -> State:
        """The state of an earlier run that was stopped, or a new one."""
        saved = self.context.cache.find(self.key("state"))
        if saved is None:
            return State()
        state = unpack_summary(saved, list(self.text.counts))
        load_parameters(self.student, {name: saved[f"now/{name}"] for name in self.parameters})
        state.best = {name: saved.get(f"best/{name}", saved[f"now/{name}"]).clone() for name in self.parameters}
        for name, parameter in self.parameters.items():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(state.step)),
                "exp_avg": saved[f"mean/{name}"].to(parameter.device),
                "exp_avg_sq": saved[f"square/{name}"].to(parameter.device),
            }
        return state


def healing_split(text: Text) -> Split:
    """The windows that are trained on."""
    return text.healing or text.calibration


class WindowOrder:
    """Which windows a step trains on: all of them in a new order before any comes again."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed

    def at(self, step: int) -> Tensor:
        places = range(step * self.size, (step + 1) * self.size)
        return torch.stack([self.epoch(place // self.count)[place % self.count] for place in places])

    def epoch(self, number: int) -> Tensor:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + number))


@contextmanager
def entering(layers: list[nn.Module], first: int) -> Iterator[list[Tensor]]:
    """While open, a list holds the hidden states that enter layer `first`; where that is 0, it stays empty."""
    states: list[Tensor] = []
    if first == 0:
        yield states
        return

    def note(_layer: nn.Module, _args: Any, output: Any) -> None:
        states[:] = [hidden_states_of(output).detach().clone()]  # the model may go on to change it in place

    handle = layers[first - 1].register_forward_hook(note)
    try:
        yield states
    finally:
        handle.remove()


def summarise(found: Tensor, text: Text, tokens: int) -> Look:
    """One look, from the divergence and both losses of every token [windows, tokens, 3]; texts weigh alike."""
    kl, rises, dppl = [], [], {}
    for name, part in text.parts("selection").items():
        means = Distance(*found[part].double().flatten(0, 1).mean(0))
        kl.append(means.kl.item())
        rises.append((means.student_nats - means.teacher_nats).item())
        dppl[name] = (means.student_nats.exp() - means.teacher_nats.exp()).item()
    return Look(tokens, sum(kl) / len(kl), sum(rises) / len(rises), dppl)


def pack_summary(state: State) -> Tensors:
    """What is not a weight, as tensors, for the cache."""
    looks = [[look.tokens, look.kl, look.rise, *look.dppl.values()] for look in state.looks]
    stopped = torch.tensor(list((state.stopped or "").encode()), dtype=torch.uint8)
    numbers = torch.tensor([state.step, state.seconds], dtype=torch.float64)
    return {"#looks": torch.tensor(looks, dtype=torch.float64), "#numbers": numbers, "#stopped": stopped}


def unpack_summary(tensors: Mapping[str, Tensor], names: list[str]) -> State:
    looks = [
        Look(int(tokens), kl, rise, dict(zip(names, dppl, strict=True)))
        for tokens, kl, rise, *dppl in tensors["#looks"].tolist()
    ]
    step, seconds = tensors["#numbers"].tolist()
    stopped = bytes(tensors["#stopped"].tolist()).decode() or None
    return State(int(step), looks, seconds=seconds, stopped=stopped)
