"""A job: a model, its text and its tasks, opened or refused in one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.evaluate.budget import Removal, parse_task_drops
from compressor.evaluate.evaluator import Evaluator
from compressor.evaluate.generation import opening_prompts, read_prompts
from compressor.evaluate.intervals import LEAST_UNITS
from compressor.evaluate.task_files import BUILT_IN_TASK
from compressor.evaluate.tasks import Task, find_prefix_token, load_tasks
from compressor.heal.pace import tokens_in
from compressor.heal.settings import HealSettings
from compressor.measure.gradients import Damage
from compressor.measure.probes import refuse_different_widths
from compressor.measure.profile import ROWS_PER_FEATURE, Profile, tokens_to_fit
from compressor.measure.study import Study, StudyOptions, study
from compressor.models.blocks import find_blocks, find_branches
from compressor.models.branches import BranchIndex
from compressor.models.layer_check import check_layers
from compressor.models.load import load_model, quiet
from compressor.models.neurons import find_neurons
from compressor.models.offload import disk_weights_of
from compressor.models.source import context_length, source_of, stored_dtype
from compressor.models.writer import Writer
from compressor.patch.checkpoint import count_parameters, refuse_foreign_code
from compressor.pipelines.recipe import Recipe
from compressor.plan.choices import ANYTHING, Choices
from compressor.plan.healing import Healer
from compressor.plan.removal import SizeTarget, refuse_too_large
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.names import (
    BUILT_IN_MODELS,
    CALIBRATION_TOKENS,
    HUB_TEXTS,
    LOAD,
    MIX,
    RECORD,
    SELF,
)
from compressor.runtime.outputs import reserved
from compressor.runtime.progress import Progress
from compressor.runtime.resources import require_disk
from compressor.text import (
    SPLITS,
    MissingDataSet,
    ShortText,
    Text,
    absolute,
    find_data_set,
    group_by_name,
    load_text,
    name_again,
)

DEFAULT_SEQ_LEN = 512
# Fitted rows for every input and neuron: the fewest, and as many as are worth their time, up to so many tokens. With
# 37 instead of 9 rows each, plans for SmolLM2-135M cost a quarter less at the same size.
ROWS_PER_NEURON, AMPLE_ROWS, AMPLE_TOKENS = 4, 16, 65_536
REPORT_BYTES = 10 * 10**6


@dataclass(frozen=True)
class Job:
    """A model, its tokenizer and its text; `recipe` has every default filled in."""

    model: Any
    tokenizer: Any
    text: Text
    tasks: list[Task]
    recipe: Recipe
    context: RunContext
    began: float
    other: tuple[Any, Text] | None = None  # the model of --cross, and the same text in its tokens
    choices: Choices = ANYTHING

    def evaluator(self) -> Evaluator:
        return make_evaluator(self.recipe, self.model, self.tokenizer, self.text, self.tasks, self.context)

    def healer(self) -> Healer | None:
        """What heals plans, where the recipe asks for that."""
        recipe = self.recipe
        if recipe.heal is None:
            return None
        width = find_blocks(self.model)[0].width
        settings = HealSettings.for_width(recipe.heal, width, params=recipe.heal_params, seed=recipe.seed)
        return Healer(settings, self.text, self.context)

    def timings(self) -> dict[str, float]:
        return timings(self.context.progress, self.began)


def size_target(recipe: Recipe, parameters: int) -> SizeTarget | None:
    """How much must go from a source of so many parameters, if the recipe says."""
    removal = recipe.removal()
    return None if removal is None else SizeTarget(removal, parameters)


def timings(progress: Progress, began: float) -> dict[str, float]:
    """Seconds of every step, and of the run so far."""
    steps = {step: round(seconds, 2) for step, seconds in progress.seconds.items()}
    return {**steps, "total": round(time.perf_counter() - began, 2)}


def context_for(recipe: Recipe, context: RunContext) -> RunContext:
    """The context with what a recipe says of how to compute."""
    return replace(context, batch_size=recipe.batch_size, seed=recipe.seed, confidence=recipe.confidence)


def open_job(
    recipe: Recipe,
    context: RunContext,
    *,
    with_tasks: bool = True,
    with_choices: bool = False,
    sample_only: bool = False,
) -> Job:
    """Load tasks, model and text, or say in one line what is wrong with any of them.

    `with_choices`: a search follows, so what the recipe says may change is looked for in the model. `sample_only`: of
    text that the model itself writes, only a sample is written, which stands for all of it.
    """
    began = time.perf_counter()
    context = context_for(recipe, context)
    model_name = recipe.require_model()
    if recipe.probe and "ffn" not in recipe.branches_or("all"):
        raise InputError("--probe is about FFNs, and --branches attention leaves them out; add ffn to --branches")
    recipe.refuse_healing_conflicts()
    tasks, recipe = name_tasks(recipe, context.trust_remote_code) if with_tasks else ([], recipe)
    context.progress.enter(LOAD)
    context.progress.note(f"load {model_name}")
    model, tokenizer = load_model(
        model_name,
        trust_remote_code=context.trust_remote_code,
        revision=recipe.revision,
        **placing(recipe, context),
    )
    name_in_cache(model, context)
    blocks = find_blocks(model)
    choices = recipe.choices(len(blocks)) if with_choices else ANYTHING
    check_layers(model, blocks)  # an unsupported family is refused before any text is read
    allowed = [block for block in find_branches(model) if choices.allows_block(block.index)]
    if not allowed:
        raise InputError(f"model type {model.config.model_type!r} has no attention that can be replaced")
    for size in recipe.remove or []:
        refuse_too_large(SizeTarget(Removal.parse(size), count_parameters(model)), allowed, choices.kinds)
    refuse_foreign_code(model)
    for task in tasks:
        find_prefix_token(model, tokenizer, task)  # a task that this tokenizer cannot do is refused here
    other = load_other(recipe, model, context) if recipe.cross else None
    recipe = settle_healing(recipe, model, context)
    asked = recipe.calib_tokens
    writer = Writer(model, tokenizer, context, sample_only)
    guard, heal = recipe.guard if with_choices or recipe.heal else 0.0, recipe.heal or 0
    text, recipe = open_text(recipe, model, tokenizer, context, guard=guard, heal_tokens=heal, writer=writer)
    advise_batches(text, context)
    advise_windows(text, context)
    other_recipe = recipe.model_copy(update={"calib_tokens": asked})
    crossed = (other[0], open_text(other_recipe, *other, context, writer=writer)[0]) if other else None
    return Job(model, tokenizer, text, tasks, recipe, context, began, crossed, choices)


def settle_healing(recipe: Recipe, model: Any, context: RunContext) -> Recipe:
    """The recipe with the tokens of its healing: minutes are turned into tokens by the pace of this machine."""
    if recipe.heal_minutes is None:
        return recipe
    seq_len = choose_seq_len(recipe, model)
    tokens = tokens_in(model, recipe.heal_minutes, seq_len, context)
    context.progress.say(f"heal: {recipe.heal_minutes:g} minutes are about {tokens:,} tokens on this machine")
    return recipe.model_copy(update={"heal": tokens, "heal_minutes": None})


def name_in_cache(model: Any, context: RunContext) -> None:
    """Let entries of the cache that are about this model say its name."""
    source = source_of(model)
    context.cache.model_names[source.weights_sha256] = source.model


def advise_batches(text: Text, context: RunContext) -> None:
    """Whole batches are shared out: say so where a process would have none."""
    fewest = -(-min(len(getattr(text, name).windows) for name in SPLITS) // context.batch_size)
    processes = distributed.size()
    if fewest < processes:
        context.progress.say(
            f"{processes} processes, but a text of {fewest} batches: a smaller --batch-size shares the work better"
        )


def advise_windows(text: Text, context: RunContext) -> None:
    """Say which text has too few verification windows for an interval that holds its level."""
    fewest = LEAST_UNITS * text.seq_len
    for name, (_, windows) in text.counts.items():
        if windows < LEAST_UNITS and context.confidence > 0:
            context.progress.say(
                f"warning: verification {name} has {windows} windows; an interval holds its level from {LEAST_UNITS} "
                f"on; try --verify-tokens {fewest}"
            )


def placing(recipe: Recipe, context: RunContext) -> dict[str, Any]:
    """Where and in what precision a model computes, and where its weights are meanwhile."""
    scratch = context.cache.directory
    return {"device": recipe.device, "dtype": recipe.dtype, "low_memory": recipe.low_memory, "scratch": scratch}


def load_other(recipe: Recipe, model: Any, context: RunContext) -> tuple[Any, Any]:
    """The model of --cross and its tokenizer, if its blocks take rows of the same width."""
    assert recipe.cross is not None
    context.progress.note(f"load {recipe.cross}")
    trust = context.trust_remote_code
    other, tokenizer = load_model(recipe.cross, trust_remote_code=trust, **placing(recipe, context))
    name_in_cache(other, context)
    refuse_different_widths(model, other, str(recipe.model), recipe.cross)
    check_layers(other, find_blocks(other))
    return other, tokenizer


def read_escapes(separator: str | None) -> str | None:
    r"""A separator as typed, with \n and \t for the end of a line and a tab."""
    return separator and separator.replace("\\n", "\n").replace("\\t", "\t")


def choose_text(recipe: Recipe, model: Any, context: RunContext) -> list[str]:
    """The words of --text. Where it is not given: the built-in text for a built-in model, WikiText for others and,
    where that cannot be had, what the model writes itself; or the built-in mix, where the model's weights are on disk.
    """
    if recipe.text or recipe.model in BUILT_IN_MODELS:
        return recipe.text or ["demo"]
    usual = next(iter(HUB_TEXTS))
    # The first process decides for all: another one may or may not reach the Hub.
    reason = distributed.broadcast_value(why_missing(usual) if distributed.rank() == 0 else None)
    if reason is None:
        return [usual]
    name, instead = SELF, "the model writes its own text"
    if disk_weights_of(model) is not None:
        name, instead = MIX, "the built-in mix is the text"
    context.progress.say(
        f"no --text is given and {reason}: {instead} (--text {name}); a text of your own is better: --text PATH"
    )
    return [name]


def why_missing(name: str) -> str | None:
    """Why a data set cannot be loaded; None where it can."""
    try:
        with quiet():
            find_data_set(name)
    except MissingDataSet as error:
        return str(error).partition(";")[0]
    return None


def choose_seq_len(recipe: Recipe, model: Any) -> int:
    """The window length that the recipe asks for, if the model can take it, or the usual one."""
    context = context_length(model)
    seq_len = recipe.seq_len or min(DEFAULT_SEQ_LEN, context or DEFAULT_SEQ_LEN)
    if context is not None and seq_len > context:
        raise InputError(f"--seq-len {seq_len} is beyond the model's context of {context}; try --seq-len {context}")
    return seq_len


def open_text(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    run: RunContext,
    *,
    guard: float = 0.0,
    heal_tokens: int = 0,
    writer: Writer | None = None,
) -> tuple[Text, Recipe]:
    """The text in windows that the model can take, and the recipe with what was chosen for it.

    `guard` windows are only of use to a search for replacements, and to healing. `writer` writes `--text self`; without
    one this model does.
    """
    seq_len = choose_seq_len(recipe, model)
    names = [name_again(word) for word in choose_text(recipe, model, run)]
    size = None if recipe.calib_tokens else choose_calibration(model, seq_len)

    def read(tokens: int) -> Text:
        return load_text(
            names,
            tokenizer,
            seq_len=seq_len,
            calib_tokens=tokens,
            select_tokens=recipe.select_tokens,
            verify_tokens=recipe.verify_tokens,
            guard=guard,
            heal_tokens=heal_tokens,
            document_separator=read_escapes(recipe.document_separator),
            seed=recipe.seed,
            writer=writer or Writer(model, tokenizer, run),
        )

    with quiet():
        texts = len(group_by_name(names))
        text = read_enough(read, size.tokens, texts * seq_len) if size else read(recipe.calib_tokens or 0)
    if size:
        run.progress.note(size.describe(text))
    largest = max(int(getattr(text, name).windows.max()) for name in SPLITS)
    rows = model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise InputError(f"the tokenizer gives token {largest}, but the model has only {rows} embeddings")
    text = replace(text, guard=text.guard.clamp(max=rows - 1))  # a vocabulary may go beyond what text ever uses
    prompts = absolute(recipe.prompts) if recipe.prompts else None
    cross = absolute(recipe.cross) if recipe.cross else None
    resolved = {"model": source_of(model).model, "text": names, "seq_len": seq_len, "prompts": prompts, "cross": cross}
    tokens = recipe.calib_tokens or text.calibration.tokens
    return text, recipe.model_copy(update={**resolved, "calib_tokens": tokens})


@dataclass(frozen=True)
class CalibrationSize:
    """The calibration tokens that suit a model, and the features of its largest block that they were chosen by."""

    tokens: int
    features: int

    def describe(self, text: Text) -> str:
        chosen, rows = text.calibration.tokens, text.fitting.numel()
        line = (
            f"calibration: {chosen:,} tokens, {rows / self.features:.1f} fitted rows for each of {self.features:,} "
            "features (inputs and neurons of a block)"
        )
        short = f"; the text has no more for it, {self.tokens:,} would be better"
        return line + (short if chosen + text.seq_len * len(text.counts) <= self.tokens else "")


def choose_calibration(model: Any, seq_len: int) -> CalibrationSize:
    """Enough rows to carry the fits of the largest block, on its inputs alone and with its neurons beside them."""
    block = max(find_blocks(model), key=lambda block: block.parameters)
    neurons = find_neurons(model, block)
    features = block.width + (neurons.count if neurons else block.width)
    least = tokens_to_fit(max(ROWS_PER_NEURON * features, ROWS_PER_FEATURE * block.width), seq_len)
    ample = min(tokens_to_fit(AMPLE_ROWS * features, seq_len), AMPLE_TOKENS // seq_len * seq_len)
    return CalibrationSize(max(CALIBRATION_TOKENS, least, ample), features)


def read_enough(read: Callable[[int], Text], tokens: int, step: int) -> Text:
    """The text with so many calibration tokens or, where it is shorter, with as many as it has.

    A text that is too short for the least is refused.
    """
    try:
        return read(tokens)
    except ShortText as error:
        if tokens <= CALIBRATION_TOKENS:
            raise
        fewer = max(CALIBRATION_TOKENS, min(error.calibration, tokens - step))
    return read_enough(read, fewer, step)


def name_tasks(recipe: Recipe, trust_remote_code: bool) -> tuple[list[Task], Recipe]:
    """The tasks to score, and the recipe with their names; a built-in model comes with one."""
    names = recipe.tasks if recipe.tasks is not None else [BUILT_IN_TASK] if recipe.model in BUILT_IN_MODELS else []
    paths = [absolute(path) for path in recipe.task_path or []]
    if recipe.max_task_drop and not names:
        raise InputError("--max-task-drop is given, but no --tasks; name them, such as --tasks lambada_openai,piqa")
    tasks = load_tasks(names, paths, recipe.task_limit, trust_remote_code) if names else []
    # A wrong name is refused here.
    parse_task_drops(recipe.max_task_drop or [], {task.name: task.aliases for task in tasks})
    return tasks, recipe.model_copy(update={"tasks": names, "task_path": paths or None})


def make_evaluator(
    recipe: Recipe, model: Any, tokenizer: Any, text: Text, tasks: list[Task], context: RunContext
) -> Evaluator:
    """What source and compressed model are measured on, as the recipe says."""
    longest, tokens = context_length(model), recipe.generate
    prompts = []
    if tokens:
        given = recipe.prompts
        prompts = read_prompts(given, tokenizer, tokens, longest) if given else opening_prompts(text, tokens, longest)
    return Evaluator(
        text,
        tokenizer,
        recipe.budgets(text.counts),
        tasks=tasks,
        limits=parse_task_drops(recipe.max_task_drop or [], {task.name: task.aliases for task in tasks}),
        max_kl=recipe.max_kl,
        prompts=prompts,
        tokens=tokens,
        context=context,
    )


def study_blocks(
    job: Job,
    profile: Profile,
    damages: Mapping[BranchIndex, Damage],
    limits: Mapping[str, float] | None = None,
    *,
    swap: bool | None = None,
) -> Study:
    """Trials, probes and a second model, as the recipe wants them, and the verdict on every block.

    `swap` is whether blocks are swapped where the recipe does not say; None: in small models.
    """
    recipe = job.recipe
    wanted = StudyOptions(
        swap if recipe.swap is None else recipe.swap,
        recipe.swap_tokens,
        recipe.probe or (),
        recipe.probe_steps,
        job.other,
    )
    return study(job.model, profile, damages, job.text, wanted, job.context, limits)


def reserved_out(recipe: Recipe, context: RunContext) -> AbstractContextManager[Path]:
    """The output directory, refused before any work or ours alone while the context is open."""
    out = recipe.refuse_output()
    return reserved(out, recipe.overwrite, recipe.model, RECORD, context.progress.say)


def require_room(job: Job, out: Path) -> None:
    """The result is at most as large as its source; the figures and the page are small."""
    weights = count_parameters(job.model) * stored_dtype(job.model).itemsize
    job.context.progress.note(require_disk("the result", weights + REPORT_BYTES, out, "name another --out"))
