"""What a command does before its work: refuse what needs no torch, join the other processes, open the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.cli.options import RunOptions, Values
from compressor.pipelines import recipe

if TYPE_CHECKING:
    from compressor.runtime.context import RunContext


def refuse_early(
    model: str | None, values: Values, recipe_file: Path | None = None, trust_remote_code: bool = False
) -> None:
    """Refuse what can be refused before torch is imported, which takes longer than this."""
    from compressor.evaluate import task_files
    from compressor.models import hub
    from compressor.runtime.names import split_name
    from compressor.text.sources import refuse_missing

    for name in (model, values.get("cross")):
        hub.refuse_unreachable(name)
    task_files.refuse_early(values.get("tasks"), values.get("task_path"), recipe_file, trust_remote_code)
    for word in values.get("text") or []:
        refuse_missing(split_name(word)[1])


def resolve_job(options: RunOptions, values: Values, *, writes: bool = True) -> recipe.Recipe:
    """The recipe of a job that compresses, refused here where it says too little or names an output that is taken."""
    settings = recipe.resolve(options.recipe_file, values)
    settings.require_model()
    settings.require_budget()
    settings.refuse_healing_conflicts()
    if writes:
        settings.removal()  # several sizes are refused here
        settings.refuse_output()
    return settings


@contextmanager
def started(options: RunOptions, *, dry_run: bool = False) -> Iterator[RunContext]:
    """Join the other processes of this run, if there are any, and open the cache, which is pruned at the end.

    The cache of a dry run is left as it is.
    """
    from compressor.runtime import distributed
    from compressor.runtime.cache import open_untouched
    from compressor.runtime.context import RunContext, open_context
    from compressor.runtime.progress import Progress

    distributed.join_processes()
    progress = Progress(visible=distributed.rank() == 0 and not options.quiet, verbose=options.verbose)
    if dry_run:
        untouched = open_untouched(options.cache, options.no_cache, progress)
        yield RunContext(cache=untouched, progress=progress, trust_remote_code=options.trust_remote_code)
        return
    with open_context(options.cache, options.no_cache, progress, options.trust_remote_code) as context:
        yield context
