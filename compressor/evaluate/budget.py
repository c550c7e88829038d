"""The budget: the largest rise in perplexity, divergence from the source and fall in task scores that the user accepts,
and how surely; and how many parameters must go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from compressor.runtime.errors import InputError
from compressor.runtime.names import NO_LIMIT, UNNAMED, split_name

USUAL_NATS = 0.02  # nats per token by which costs are weighed on a text without a limit


@dataclass(frozen=True)
class Budget:
    """A rise in perplexity, absolute or as a percentage of the baseline; `confidence` 0 takes the point estimate.

    An infinite rise is no limit: perplexity is then only reported.
    """

    amount: float
    percent: bool = False
    confidence: float = 0.95

    @property
    def limited(self) -> bool:
        return math.isfinite(self.amount)

    @classmethod
    def parse(cls, text: str | float, confidence: float = 0.95) -> Budget:
        word = str(text).strip()
        percent = word.endswith("%")
        try:
            amount = float(word.removesuffix("%"))
        except ValueError:
            raise InputError(f"--max-dppl must be a number or a percentage, got {word!r}; try 1.0 or 2%") from None
        if not math.isfinite(amount) or amount <= 0:
            raise InputError(f"--max-dppl must be positive and finite, got {word}; try --max-dppl 1.0")
        if not 0 <= confidence < 1:
            raise InputError(f"--confidence must be at least 0 and below 1, got {confidence}; try --confidence 0.95")
        return cls(amount, percent, confidence)

    def allowed_rise(self, baseline: float) -> float:
        """The rise in perplexity that this budget allows on a text of that baseline."""
        return baseline * self.amount / 100 if self.percent else self.amount

    def __str__(self) -> str:
        if not self.limited:
            return NO_LIMIT
        digits = repr(self.amount).removesuffix(".0")  # all of them: the record is read back
        return f"{digits}%" if self.percent else digits


@dataclass(frozen=True)
class Removal:
    """How many parameters must go at least: a number of them, or a percentage of all parameters of the model."""

    amount: float
    percent: bool = False

    @classmethod
    def parse(cls, text: str | float) -> Removal:
        word = str(text).strip()
        percent = word.endswith("%")
        try:
            amount = float(word.removesuffix("%"))
        except ValueError:
            raise InputError(
                f"--remove must be a percentage or a number of parameters, got {word!r}; try --remove 10%"
            ) from None
        if not math.isfinite(amount) or amount <= 0 or (percent and amount >= 100):
            raise InputError(
                f"--remove must be above 0 and below 100 % of the parameters, got {word}; try --remove 10%"
            )
        if not percent and not amount.is_integer():
            raise InputError(f"--remove {word} is no whole number of parameters; a share is written --remove 10%")
        return cls(amount, percent)

    def parameters(self, model: int) -> int:
        """The fewest parameters that may go from a model of this many."""
        return math.ceil(Fraction(str(self.amount)) * model / 100) if self.percent else int(self.amount)

    def __str__(self) -> str:
        return f"{repr(self.amount).removesuffix('.0')}%" if self.percent else str(int(self.amount))


@dataclass(frozen=True)
class Limits:
    """What the budget of every text allows, given the source's perplexity on that text.

    A text without a limit allows any rise; its nats are a usual cost, by which blocks are judged and texts compared.
    `kl` is the largest divergence from the source, in nats per token, the same for all texts.
    """

    budgets: dict[str, Budget]
    allowed: dict[str, float]  # text → rise in perplexity
    nats: dict[str, float]  # the same in nats per token, which hold for other windows of the same text too
    kl: float | None = None

    @property
    def largest_kl(self) -> float:
        """The divergence that is allowed; infinite where it is not limited."""
        return math.inf if self.kl is None else self.kl

    @property
    def least(self) -> dict[str, float]:
        """Nats per token that predictions are held against on each text: what perplexity may lose there or, if that is
        less or has no limit, the divergence that is allowed. Predicted damage estimates both."""
        if self.kl is None:
            return self.nats
        return {n: min(self.kl, nats) if self.budgets[n].limited else self.kl for n, nats in self.nats.items()}

    @property
    def limited(self) -> bool:
        """Whether perplexity has a limit; either all texts have one or none."""
        return all(budget.limited for budget in self.budgets.values())

    @property
    def smallest(self) -> float:
        """Nats per token of the text that allows least."""
        return min(self.least.values())

    @property
    def confidence(self) -> float:
        return next(iter(self.budgets.values())).confidence

    def __str__(self) -> str:
        return format_budgets(self.budgets, self.kl)


def compute_limits(budgets: Mapping[str, Budget], baselines: Mapping[str, float], kl: float | None = None) -> Limits:
    """The limits on texts on which the source has these perplexities."""
    allowed = {name: budgets[name].allowed_rise(baseline) for name, baseline in baselines.items()}
    nats = {
        name: math.log1p(allowed[name] / baseline) if budgets[name].limited else USUAL_NATS
        for name, baseline in baselines.items()
    }
    return Limits(dict(budgets), allowed, nats, kl)


def format_budgets(budgets: Mapping[str, Budget], kl: float | None = None) -> str:
    """All budgets in one line, as the user gave them."""
    rises = [f"{text_prefix(name)}{budget}" for name, budget in budgets.items() if budget.limited or kl is None]
    return ", ".join([*rises, *([] if kl is None else [f"KL {kl:g}"])])


def text_prefix(name: str) -> str:
    """The name of a text and a space, to stand before its figure; nothing where there is only one unnamed text."""
    return "" if name == UNNAMED else f"{name} "


def parse_divergence(text: str | float) -> float:
    """The largest KL divergence from the source, in nats per token."""
    word = str(text).strip()
    try:
        kl = float(word)
    except ValueError:
        raise InputError(f"--max-kl must be a number of nats per token, got {word!r}; try --max-kl 0.02") from None
    if not math.isfinite(kl) or kl <= 0:
        raise InputError(f"--max-kl must be positive and finite, got {word}; try --max-kl 0.02")
    return kl


def parse_task_drop(text: str | float) -> float:
    """The largest fall of a task's score: a fraction of 1, such as 0.01 for one point of a hundred."""
    word = str(text).strip()
    try:
        drop = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        raise InputError(f"--max-task-drop must be a number, got {word!r}; try --max-task-drop 0.01") from None
    if not math.isfinite(drop) or not 0 <= drop <= 1:
        raise InputError(f"--max-task-drop must be between 0 and 1, got {word}; try --max-task-drop 0.01")
    return drop


def values_by_name(option: str, words: Iterable[str], names: Iterable[str], what: str) -> dict[str | None, str]:
    """`name=value` words by name, a value without a name under None. A name that is not in `names` is refused."""
    known = list(dict.fromkeys(names))
    given: dict[str | None, str] = {}
    for word in words:
        name, value = split_name(word)
        if name is not None and name not in known:
            hint = f"; name one with --text {name}=FILE" if what == "text" else ""
            raise InputError(
                f"{option} {word}: there is no {what} {name!r} (known: {', '.join(known) or 'none'}){hint}"
            )
        if name in given:
            raise InputError(f"{option} is given twice{f' for {what} {name}' if name else ''}; give it once")
        given[name] = value
    return given


def parse_budgets(words: Iterable[str] | None, texts: Iterable[str], confidence: float) -> dict[str, Budget]:
    """The budget of every text. A text without one is refused: nothing would bound what it loses. Without any words
    (None) no text has a limit."""
    texts = list(texts)
    if words is None:
        return {name: Budget(math.inf, confidence=confidence) for name in texts}
    given = values_by_name("--max-dppl", words, texts, "text")
    for name in texts:
        if not given.get(name, given.get(None)):
            raise InputError(f"text {name!r} has no budget; add --max-dppl {name}=1.0, or --max-dppl 1.0 for all")
    return {name: Budget.parse(given.get(name, given.get(None, "")), confidence) for name in texts}


def parse_task_drops(words: Iterable[str], aliases: Mapping[str, Iterable[str]]) -> dict[str, float | None]:
    """The largest drop of every task (None: only reported). `aliases`: what else the user may call a task."""
    known = {task: [task, *names] for task, names in aliases.items()}
    given = values_by_name("--max-task-drop", words, [name for names in known.values() for name in names], "task")
    drops = {
        task: next((given[name] for name in [*names, None] if name in given), None) for task, names in known.items()
    }
    return {task: None if drop is None else parse_task_drop(drop) for task, drop in drops.items()}
