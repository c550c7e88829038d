"""Words about healing: what was trained, on what, how long, and what that won."""

from __future__ import annotations

from collections.abc import Mapping

from compressor.report.search_parts import Healing, HealingLook
from compressor.runtime.figures import count, signed
from compressor.runtime.names import UNNAMED

TRAINED = {
    "replaced": "of the replacements",
    "norms": "of the replacements and the norms beside them",
    "all": "of the replacements and of the layers from the first of them on",
}
NO_TRAINING = "Nothing was trained."


def say_rises(rises: Mapping[str, float]) -> str:
    return ", ".join(f"{'' if name == UNNAMED else f'{name} '}{signed(rise)}" for name, rise in rises.items())


def say_healing(healing: Healing) -> str:
    """One sentence for people: on how much text, what was trained, and what it won on the selection text."""
    before, after = healing.looks[0], healing.kept
    again = f" ({healing.text_tokens:,} different ones)" if healing.text_tokens < healing.tokens else ""
    end = f"; it ended early: {healing.stopped}" if healing.stopped else ""
    return (
        f"healed on {count(healing.tokens, 'token')}{again}: {healing.trained_parameters:,} weights "
        f"{TRAINED.get(healing.params, '')} were trained towards the source's predictions in {healing.seconds:.0f} s; "
        f"on the selection text KL {before.kl:.4f} → {after.kl:.4f}, ΔPPL {say_rises(before.dppl)} → "
        f"{say_rises(after.dppl)}{end}"
    )


def healing_lines(healing: Healing | None) -> list[str]:
    return [] if healing is None else [say_healing(healing)]


def capitalised(healing: Healing | None) -> str:
    """The same as a sentence of its own; without healing, that nothing was trained."""
    if healing is None:
        return NO_TRAINING
    words = say_healing(healing)
    return f"{words[0].upper()}{words[1:]}."


def list_looks(healing: Healing) -> list[tuple[HealingLook, bool]]:
    """Every look at the selection text, and whether it is the state that was kept."""
    return [(look, look == healing.kept) for look in healing.looks]
