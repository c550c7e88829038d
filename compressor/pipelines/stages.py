"""The steps of every command as the user reads them, with the work of each, so that the time left can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from compressor.models.blocks import find_branches
from compressor.models.writer import STEP
from compressor.patch.checkpoint import count_parameters
from compressor.pipelines.costs import Rates, add_up, count_quantities
from compressor.pipelines.dry_run import find_kept
from compressor.pipelines.job import Job
from compressor.pipelines.recipe import Recipe
from compressor.plan.moments_store import MomentsStore, count_features
from compressor.runtime import distributed
from compressor.runtime.names import LOAD, WRITE
from compressor.runtime.progress import PlannedStep

OPERATIONS = 5e10  # per second, of no machine in particular: the first steps of a run tell its own speed
REQUEST_TOKENS = 100  # of a document of a task, roughly


@dataclass(frozen=True)
class Stage:
    """A numbered step: its title, the bars that it shows, and how much of which rows of the table of costs it is."""

    title: str
    bars: tuple[str, ...]
    costs: Mapping[str, float] = field(default_factory=dict)


HALF_OF_BOTH = {"tasks": 0.5, "texts": 0.5}
OPEN = Stage("load the model and its text", (LOAD, STEP), {"load": 1, "text": 1})
ORIGINAL = Stage("measure the original", ("source", "source *"), {"source": 1, **HALF_OF_BOTH})
BLOCKS = Stage("measure every block", ("measure", "survey"), {"measure": 1})
ERRORS = Stage("find out what errors cost", ("gradients",), {"gradients": 1})
ALONE = Stage(
    "try blocks one at a time",
    ("agreement", "swap", "together", "probe", "cross"),
    {"agreement": 1, "probes": 1},
)
SEARCH = Stage("search for a plan", ("search", "compensate"), {"search": 1, "compensate": 1})
FIT = Stage("fit the plan", ("measure", "survey", "gradients", "agreement", "search", "compensate"))
HEAL = Stage("train towards the original", ("heal", "heal trial"), {"heal": 1})
VERIFY = Stage(
    "verify on text kept aside",
    ("verify", "compressed", "compressed *", "block *"),
    {"verify": 1, **HALF_OF_BOTH},
)
END = Stage("write the result", (WRITE,), {"write": 1})
COMMANDS = {
    "compress": (OPEN, ERRORS, BLOCKS, ORIGINAL, ALONE, SEARCH, HEAL, VERIFY, END),
    "plan": (OPEN, ERRORS, BLOCKS, replace(ORIGINAL, bars=("verify",)), ALONE, SEARCH, HEAL),
    "profile": (OPEN, BLOCKS, ERRORS, ALONE, END),
    "apply": (OPEN, ORIGINAL, FIT, HEAL, VERIFY, END),
    "heal": (OPEN, ORIGINAL, HEAL, VERIFY, END),
    "check": (replace(OPEN, title="load both models"), ORIGINAL, replace(VERIFY, title="measure the compressed model")),
}


def list_steps(command: str, recipe: Recipe) -> list[PlannedStep]:
    """The steps of a command before anything is known of the model."""
    stages = [stage for stage in COMMANDS[command] if stage is not HEAL or recipe.heals]
    return [PlannedStep(stage.title, stage.bars) for stage in stages]


def weigh_steps(command: str, job: Job, store: MomentsStore | None = None) -> list[PlannedStep]:
    """The same steps with their work: counted operations, as seconds on no machine in particular."""
    kept = find_kept(store, job.evaluator()) if store is not None else []
    documents = sum(task.documents for task in job.tasks)
    quantities = count_quantities(job, REQUEST_TOKENS * documents, opening=0.0, stored=0)
    costs = {
        cost.name: cost.seconds for cost in add_up(quantities, assumed_rates(job, store), kept, distributed.size())
    }
    stages = {stage.title: stage for stage in COMMANDS[command]}
    return [
        replace(step, work=sum(share * costs[name] for name, share in stages[step.title].costs.items()))
        for step in list_steps(command, job.recipe)
    ]


def assumed_rates(job: Job, store: MomentsStore | None) -> Rates:
    """Seconds of every kind of work if the machine did so many operations a second, whatever they are."""
    blocks = find_branches(job.model, job.choices.searched_branches)
    sizes = [count_features(block, store.units[block.index] if store else None) for block in blocks]
    token = 2 * count_parameters(job.model) / OPERATIONS
    gram = sum(2 * size**2 for size in sizes) / OPERATIONS
    inverse = sum(2 * size**3 for size in sizes) / OPERATIONS  # size³ operations, in float64 twice as slow
    pairs = [(seconds, seconds) for seconds in (token, 3 * token, gram, inverse, len(job.evaluator().prompts) * token)]
    return Rates(*pairs)
