"""Task scores against known answers, the traps of lm-eval, paired intervals, and plans that a task refuses."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import lm_eval.utils
import pytest
import torch
from conftest import Compress
from huggingface_hub import constants
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._index import TaskIndex
from localtasks import ACC, DOCUMENT, write_task
from scipy.stats import multinomial
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from zoo import TEXT, VOCAB, WIDTH, tiny_model, tiny_tokenizer

from compressor.evaluate import tasks as module
from compressor.evaluate.intervals import paired_end
from compressor.evaluate.tasks import (
    Task,
    compare_scores,
    confidence_at,
    find_lost_documents,
    load_tasks,
    longest_sequence,
    score,
    split_documents,
)
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError

WORDS = TEXT.split()
ACC_NORM = {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}
PERPLEXITY = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
LIKELIHOOD: dict[str, Any] = {
    "output_type": "loglikelihood",
    "doc_to_choice": None,
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [PERPLEXITY, ACC],
}
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"  # from a template to all of Python


@pytest.fixture(scope="module", autouse=True)
def own_data_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """datasets keeps a copy of every file it reads; not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


def questions(count: int, seed: int = 0, words: int = 6) -> list[dict[str, Any]]:
    """Documents with three choices of different length."""
    rng = random.Random(seed)
    return [
        {
            "question": " ".join(rng.choices(WORDS, k=words)),
            "choices": [" ".join(rng.sample(WORDS, k)) for k in (1, 2, 3)],
            "label": rng.randrange(3),
        }
        for _ in range(count)
    ]


def open_one(folder: Path, name: str = "mine", limit: int | None = None, trust: bool = False) -> Task:
    (task,) = load_tasks([name], [str(folder)], limit, trust)
    return task


@torch.no_grad()
def log_probability(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The model's own: the sum over the continuation's tokens, and whether each of them is its first choice."""
    start = len(tokenizer(context)["input_ids"])
    ids = tokenizer(context + continuation)["input_ids"]
    target = torch.tensor(ids[start:])
    ids = ids[-(model.config.max_position_embeddings + 1) :]  # the last token is predicted, never an input
    words = model(torch.tensor([ids[:-1]])).logits[0, -len(target) :].log_softmax(-1)
    return words.gather(1, target[:, None]).sum().item(), bool((words.argmax(-1) == target).all())


def choose(model: Any, tokenizer: Any, document: dict[str, Any]) -> int:
    found = [log_probability(model, tokenizer, document["question"], f" {choice}")[0] for choice in document["choices"]]
    return max(range(len(found)), key=found.__getitem__)


def spoken(model: Any, tokenizer: Any, contexts: list[str]) -> list[dict[str, Any]]:
    """Documents whose answer is the model's next token, every other one with another token in its place."""
    documents = []
    for context in contexts:
        ids = tokenizer(context, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            order = model(ids).logits[0, -1].argsort(descending=True).tolist()
        sound = [i for i in order if tokenizer(context + tokenizer.decode([i]))["input_ids"] == [*ids[0].tolist(), i]]
        documents.append({"question": context, "answer": tokenizer.decode([sound[len(documents) % 2]])})
    return documents


# Known answers


def test_multiple_choice_is_the_argmax_of_the_log_probabilities(tmp_path: Path) -> None:
    model, tokenizer, documents = tiny_model("llama"), tiny_tokenizer(), questions(24)
    write_task(tmp_path, "mine", documents, metric_list=[ACC, ACC_NORM])
    found = score(model, tokenizer, open_one(tmp_path))
    expected = [float(choose(model, tokenizer, document) == document["label"]) for document in documents]
    assert found["acc"].tolist() == expected
    assert 0 < sum(expected) < len(expected)
    assert found["acc"].dtype == torch.float64
    for document, value in zip(documents, found["acc_norm"].tolist(), strict=True):
        found_by_length = [
            log_probability(model, tokenizer, document["question"], f" {c}")[0] / len(c) for c in document["choices"]
        ]
        assert value == float(found_by_length.index(max(found_by_length)) == document["label"])


def test_likelihoods_are_the_models_own(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer()
    documents = spoken(model, tokenizer, [document["question"] for document in questions(12)])
    write_task(tmp_path, "mine", documents, **LIKELIHOOD)
    task = open_one(tmp_path)
    found = score(model, tokenizer, task)
    expected = [log_probability(model, tokenizer, d["question"], d["answer"]) for d in documents]
    assert found["perplexity"].tolist() == pytest.approx([total for total, _ in expected], abs=1e-4)
    assert found["acc"].tolist() == [float(greedy) for _, greedy in expected] == [1.0, 0.0] * 6
    assert task.metric == "acc"  # the perplexity, which stands first, is no mean over documents
    assert task.metrics == ("perplexity", "acc")


def test_generated_text(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer()
    documents = [{"question": document["question"]} for document in questions(6)]
    for number, document in enumerate(documents):
        ids = tokenizer(document["question"], return_tensors="pt")["input_ids"]
        written = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        document["answer"] = tokenizer.decode(written) if number % 3 else "something else"
    settings = {
        "output_type": "generate_until",
        "doc_to_choice": None,
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<end>"], "max_gen_toks": 5, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    write_task(tmp_path, "mine", documents, **settings)
    assert score(model, tokenizer, open_one(tmp_path))["exact_match"].tolist() == [0.0, 1.0, 1.0] * 2


def test_the_batch_makes_no_difference(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    documents = [{**d, "answer": f" {d['choices'][2]}"} for d in questions(9)]
    write_task(tmp_path, "mine", documents, **LIKELIHOOD)
    task = open_one(tmp_path)
    one, many = (score(model, tokenizer, task, RunContext(batch_size=size))["perplexity"] for size in (1, 7))
    assert torch.allclose(one, many, atol=1e-4)


def test_the_first_documents(tmp_path: Path) -> None:
    write_task(tmp_path, "mine", questions(20))
    whole, part = open_one(tmp_path), open_one(tmp_path, limit=7)
    assert (whole.documents, part.documents, open_one(tmp_path, limit=99).documents) == (20, 7, 20)
    assert whole.sha256 != part.sha256
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer()
    assert score(model, tokenizer, part)["acc"].tolist() == score(model, tokenizer, whole)["acc"][:7].tolist()


def test_some_documents(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer()
    documents = [{**d, "answer": f" {d['choices'][1]}"} for d in questions(12)]
    write_task(tmp_path, "mine", documents, **LIKELIHOOD)
    task = open_one(tmp_path, limit=10)
    whole = score(model, tokenizer, task)
    assert len(set(whole["perplexity"].tolist())) == 10
    for only in ([0], [9], [1, 4, 5, 8], list(range(10))):
        some = score(model, tokenizer, task, only=only)
        assert torch.allclose(some["perplexity"], whole["perplexity"][only], atol=1e-4)
        assert some["acc"].tolist() == whole["acc"][only].tolist()


def test_the_hash_knows_the_documents_and_the_configuration(tmp_path: Path) -> None:
    hashes = []
    for number, (documents, settings) in enumerate(
        [(questions(4), {}), (questions(4), {}), (questions(4, seed=1), {}), (questions(4), {"num_fewshot": 1})]
    ):
        write_task(tmp_path / str(number), "mine", documents, **settings)
        hashes.append(open_one(tmp_path / str(number)).sha256)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_members_of_a_group_are_changed_as_it_says(tmp_path: Path) -> None:
    write_task(tmp_path, "mine", questions(4), num_fewshot=0)
    (tmp_path / "group.yaml").write_text("group: all\ntask: [{task: mine, num_fewshot: 2}]\n", encoding="utf-8")
    (task,) = load_tasks(["all"], [str(tmp_path)], None, False)
    assert (task.name, task.aliases) == ("mine", ("all", "all"))
    assert task.lm_eval_task.get_config("num_fewshot") == 2
    assert open_one(tmp_path).lm_eval_task.get_config("num_fewshot") == 0


def test_trusted_code_runs(tmp_path: Path) -> None:
    file = write_task(tmp_path, "mine", questions(6))
    with file.open("a", encoding="utf-8") as handle:
        handle.write("process_docs: !function utils.half\n")
    code = "def half(documents):\n    return documents.select(range(len(documents) // 2))\n"
    (tmp_path / "utils.py").write_text(code, encoding="utf-8")
    with pytest.raises(InputError, match="runs Python code"):
        open_one(tmp_path)
    assert open_one(tmp_path, trust=True).documents == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"validation_split": "test"}, "cannot be loaded: 'test'"),
        ({"output_type": "guess"}, "cannot be loaded: Got invalid output_type 'guess'"),
        ({"doc_to_text": "{{ nothing }}"}, "cannot be loaded: 'nothing' is undefined"),
        ({"metric_list": [{"metric": "mcc"}]}, "has no metric that is a mean over documents"),
        ({"colour": "blue"}, "cannot be loaded: .*colour"),
    ],
)
def test_a_task_that_lm_eval_cannot_load(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    write_task(tmp_path, "mine", questions(2), **settings)
    with pytest.raises(InputError, match=rf"^task mine .*{says}") as refused:
        open_one(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_task_without_documents(tmp_path: Path) -> None:
    file = write_task(tmp_path, "mine", questions(2))
    with file.open("a", encoding="utf-8") as handle:
        handle.write("process_docs: !function utils.none\n")
    (tmp_path / "utils.py").write_text("def none(documents):\n    return documents.select([])\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"^task mine .*(no documents|cannot be loaded)"):
        open_one(tmp_path, trust=True)


# The traps of lm-eval


def test_an_untied_head_is_kept(tmp_path: Path) -> None:
    """lm-eval's model class ties the weights anew: a head of its own would be lost, and so would what it scores."""
    model, tokenizer, documents = tiny_model("llama"), tiny_tokenizer(), questions(24)
    assert model.config.tie_word_embeddings
    head = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(3)))
    tied = [choose(model, tokenizer, document) for document in documents]
    model.lm_head.weight = head
    untied = [choose(model, tokenizer, document) for document in documents]
    assert tied != untied
    write_task(tmp_path, "mine", [{**d, "label": label} for d, label in zip(documents, untied, strict=True)])
    found = score(model, tokenizer, open_one(tmp_path))
    assert found["acc"].tolist() == [1.0] * len(documents)
    assert model.lm_head.weight is head
    spoiled = copy.deepcopy(model)
    HFLM(pretrained=spoiled, tokenizer=copy.deepcopy(tokenizer), backend="causal")
    assert not torch.equal(spoiled.lm_head.weight, head)  # what this test is about


def test_the_model_and_the_tokenizer_are_left_as_they_were(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer()
    write_task(tmp_path, "mine", questions(3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    tie, side = type(model).tie_weights, tokenizer.padding_side
    assert tokenizer.pad_token is None
    score(model, tokenizer, open_one(tmp_path))
    assert tokenizer.pad_token is None
    assert tokenizer.padding_side == side
    assert "tie_weights" not in vars(model)
    assert model.tie_weights.__func__ is tie
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    model.tie_weights = "its own"
    score(model, tokenizer, open_one(tmp_path))
    assert vars(model)["tie_weights"] == "its own"


def test_lm_evals_own_tasks_are_not_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed: list[Any] = []
    build = TaskIndex.build

    def record(paths: Any, **options: Any) -> Any:
        indexed.append(list(paths))
        return build(indexed[-1], **options)

    monkeypatch.setattr(TaskIndex, "build", staticmethod(record))
    write_task(tmp_path, "mine", questions(3))
    score(tiny_model("gpt2"), tiny_tokenizer(), open_one(tmp_path))
    assert indexed == [[]]


@pytest.mark.parametrize(("family", "expected"), [("gpt2", 64), ("mpt", 64), ("bloom", 2048)])
def test_the_longest_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, expected: int) -> None:
    given: list[int] = []
    begin = HFLM.__init__

    def record(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        given.append(self.max_length)

    monkeypatch.setattr(HFLM, "__init__", record)
    write_task(tmp_path, "mine", questions(2))
    score(tiny_model(family), tiny_tokenizer(), open_one(tmp_path))
    assert given == [expected]


def test_the_longest_sequence_of_a_long_context() -> None:
    assert longest_sequence(tiny_model("llama", max_position_embeddings=131_072)) == 2048
    assert longest_sequence(tiny_model("llama", max_position_embeddings=1000)) == 1000


def test_a_document_beyond_the_context_loses_its_beginning(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer()
    documents = [{**d, "answer": f" {d['choices'][2]}"} for d in questions(4, words=60)]
    assert min(len(tokenizer(d["question"])["input_ids"]) for d in documents) > 2 * 64
    write_task(tmp_path, "mine", documents, **LIKELIHOOD)
    found = score(model, tokenizer, open_one(tmp_path))["perplexity"]
    expected = [log_probability(model, tokenizer, d["question"], d["answer"])[0] for d in documents]
    assert found.tolist() == pytest.approx(expected, abs=1e-4)
    changed = [{**d, "question": "Whenever " + d["question"]} for d in documents]
    write_task(tmp_path / "changed", "mine", changed, **LIKELIHOOD)
    assert score(model, tokenizer, open_one(tmp_path / "changed"))["perplexity"].tolist() == found.tolist()


def test_local_data_never_open_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets is imported long before, so no environment variable helps any more."""
    opened: list[Any] = []

    def refuse(*address: Any, **_: Any) -> Any:
        opened.append(address)
        raise OSError("no network in this test")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    write_task(tmp_path, "mine", questions(3))
    score(tiny_model("gpt2"), tiny_tokenizer(), open_one(tmp_path))
    assert opened == []
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)  # as they were


def test_examples_do_not_depend_on_what_was_drawn_before(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("gpt2", n_positions=256), tiny_tokenizer()
    for name, seed in (("one", 0), ("two", 1)):
        documents = [{**d, "answer": f" {d['choices'][1]}"} for d in questions(8, seed, words=3)]
        write_task(tmp_path, name, documents, **LIKELIHOOD, num_fewshot=2, fewshot_split="validation")
    first = {task.name: task for task in load_tasks(["one", "two"], [str(tmp_path)], None, False)}
    again = {task.name: task for task in load_tasks(["two", "one"], [str(tmp_path)], None, False)}
    expected = {name: score(model, tokenizer, task)["perplexity"].tolist() for name, task in first.items()}
    for task in (first["two"], first["one"], first["one"], again["two"], again["one"]):
        assert score(model, tokenizer, task)["perplexity"].tolist() == expected[task.name]
    plain = [log_probability(model, tokenizer, d["question"], f" {d['choices'][1]}")[0] for d in questions(8, words=3)]
    assert expected["one"] != pytest.approx(plain, abs=1e-3)  # there were examples


def test_a_template_stays_in_its_sandbox(tmp_path: Path) -> None:
    environment = lm_eval.utils.env
    assert "class" in environment.from_string(ESCAPE).render()  # what lm-eval itself would do
    write_task(tmp_path, "mine", questions(3), doc_to_text=ESCAPE)
    with pytest.raises(InputError, match=r"^task mine .* cannot be loaded: access to attribute '__class__'"):
        open_one(tmp_path)
    assert lm_eval.utils.env is environment
    later = "{% if loop_in == 2 %}" + ESCAPE + "{% else %}{{ question }}{% endif %}"
    documents = [{**document, "loop_in": number} for number, document in enumerate(questions(3))]
    write_task(tmp_path / "later", "mine", documents, doc_to_text=later)
    task = open_one(tmp_path / "later")
    with pytest.raises(InputError, match=r"^task mine cannot be run: SecurityError: access to attribute '__class__'"):
        score(tiny_model("gpt2"), tiny_tokenizer(), task)
    assert lm_eval.utils.env is environment


def test_lm_evals_own_filters_work_in_the_sandbox(tmp_path: Path) -> None:
    text = "{{ question | regex_replace('[a-z]', 'x') }}\n"
    write_task(tmp_path, "mine", [DOCUMENT], doc_to_text=text)
    with module.replaced_attribute(lm_eval.utils, "env", module.sandbox_templates(lm_eval.utils.env)):
        assert lm_eval.utils.apply_template(text, DOCUMENT) == "Sxxx xxxxx\n"
    score(tiny_model("gpt2"), tiny_tokenizer(), open_one(tmp_path))


# Pairs


def made_up(better: int = 1, metric: str = "acc") -> Task:
    """A task that was never opened, for scores that were never measured."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def perplexity(values: list[float]) -> float:
        return math.exp(-mean(values))

    body = SimpleNamespace(aggregation=lambda: {"acc": mean, "perplexity": perplexity})
    return Task("mine", "mine", metric, ("acc", "perplexity"), better, 0, "", "", body)


def values(*numbers: float) -> dict[str, Tensor]:
    return {"acc": torch.tensor(numbers, dtype=torch.float64)}


def test_equal_scores_are_no_drop() -> None:
    found = compare_scores(made_up(), values(1, 0, 1, 1), values(1, 0, 1, 1))
    assert (found.source, found.compressed, found.drop) == (0.75, 0.75, 0.0)
    assert (found.documents, found.changed) == (4, 0)


def test_no_changed_document_is_no_proof_of_no_drop() -> None:
    """If each of 50 documents were lost with probability 0.07, none of them would be lost in 2.7 % of cases."""
    ones = {"acc": torch.ones(50, dtype=torch.float64)}
    found = compare_scores(made_up(), ones, ones)
    assert 1 - 0.025 ** (1 / 50) < found.upper < 0.1
    assert found.drop_ci95 == pytest.approx((-found.upper, found.upper))
    assert compare_scores(made_up(), ones, ones, confidence=0).upper == 0
    many = {"acc": torch.ones(1000, dtype=torch.float64)}
    assert compare_scores(made_up(), many, many).upper < 0.006


@pytest.mark.parametrize("documents", [25, 50, 120])
@pytest.mark.parametrize("won", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("drop", [0.02, 0.05, 0.2])
def test_the_upper_end_misses_the_true_drop_in_one_of_forty_cases(documents: int, won: float, drop: float) -> None:
    """Counted out: the probability of every outcome whose upper end is below the truth."""
    missed = 0.0
    for lost_count in range(documents + 1):
        for won_count in range(documents - lost_count + 1):
            chance = multinomial.pmf(
                [lost_count, won_count, documents - lost_count - won_count],
                documents,
                [drop + won, won, 1 - drop - 2 * won],
            )
            if chance > 1e-7:
                missed += chance * (paired_end(lost_count, won_count, 0.975, documents) < drop)
    assert missed <= 0.025


def test_scores_that_are_no_answers() -> None:
    """Of a few changed documents every change counts at its worst; of many, the spread decides."""
    before = {"acc": torch.full((200,), 0.5, dtype=torch.float64)}
    few = {"acc": before["acc"].clone()}
    few["acc"][:3] = 0.4
    found = compare_scores(made_up(), before, few)
    assert found.drop == pytest.approx(0.0015)
    assert found.upper > 0.03
    generator = torch.Generator().manual_seed(0)
    many = {"acc": before["acc"] - 0.1 * torch.rand(200, generator=generator, dtype=torch.float64)}
    found = compare_scores(made_up(), before, many)
    assert found.drop < found.upper < found.drop + 0.01


def test_halves_do_not_depend_on_the_number_of_documents() -> None:
    choosing, deciding = split_documents(1000)
    assert sorted(choosing + deciding) == list(range(1000))
    assert len(choosing) == len(deciding) == 500
    for count in (1, 7, 50, 999):
        few = split_documents(count)
        assert [document for document in choosing if document < count] == few[0]
        assert [document for document in deciding if document < count] == few[1]
    assert 0.4 < sum(document % 2 for document in deciding) / 500 < 0.6  # neither half is the even documents


def test_looks_share_the_error() -> None:
    assert sum(1 - confidence_at(look, 0.95) for look in range(1, 40)) == pytest.approx(0.05)
    assert 0.95 < confidence_at(1, 0.95) < confidence_at(2, 0.95) < 1
    assert confidence_at(1, 0.0) == 0.0


def test_a_known_drop() -> None:
    before, after = [1.0] * 60 + [0.0] * 40, [1.0] * 50 + [0.0] * 47 + [1.0] * 3
    found = compare_scores(made_up(), values(*before), values(*after))
    assert found.source == pytest.approx(0.60)
    assert found.compressed == pytest.approx(0.53)
    assert found.drop == pytest.approx(0.07)
    assert (found.documents, found.changed) == (100, 13)
    # One document falls by 1, −1 or 0: the mean of 100 has this standard deviation, and is nearly normal.
    error = math.sqrt((0.13 - 0.07**2) / 100)
    assert found.drop_ci95 == pytest.approx((0.07 - 1.96 * error, 0.07 + 1.96 * error), abs=0.02)
    assert found.drop_ci95[1] - found.drop_ci95[0] > 2 * 1.96 * error
    assert found.upper == found.drop_ci95[1]
    assert compare_scores(made_up(), values(*before), values(*after), confidence=0).upper == found.drop
    strict = compare_scores(made_up(), values(*before), values(*after), confidence=0.99)
    assert strict.upper > found.upper
    assert strict.drop_ci95 == found.drop_ci95


def test_less_may_be_better() -> None:
    before, after = values(1, 2, 3), values(2, 2, 3)
    assert compare_scores(made_up(), before, after).drop == pytest.approx(-1 / 3)
    assert compare_scores(made_up(better=-1), before, after).drop == pytest.approx(1 / 3)
    assert compare_scores(made_up(better=-1), before, after).upper > 1 / 3
    assert find_lost_documents(made_up(), before, after, range(3), 9) == []
    assert find_lost_documents(made_up(better=-1), before, after, range(3), 9) == [0]


def test_the_interval_covers_the_true_drop() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(200):
        draws = torch.rand(80, generator=generator, dtype=torch.float64)
        before = (draws < 0.7).double()
        after = ((draws < 0.55) | (draws > 0.95)).double()  # 15 % are lost, 5 % are won: a drop of 0.1
        low, high = compare_scores(made_up(), {"acc": before}, {"acc": after}, seed=seed).drop_ci95
        covered += low <= 0.1 <= high
    assert 0.90 <= covered / 200 <= 0.985


def test_pairs_say_more_than_two_separate_scores() -> None:
    generator = torch.Generator().manual_seed(1)
    before = (torch.rand(400, generator=generator) < 0.6).double()
    after = before.clone()
    after[before.nonzero()[:8]] = 0.0
    found = compare_scores(made_up(), {"acc": before}, {"acc": after})
    width = found.drop_ci95[1] - found.drop_ci95[0]
    apart = 2 * 1.96 * math.sqrt((before.var() + after.var()).item() / 400)
    assert width < apart / 4
    assert found.drop_ci95[0] > 0


def test_other_metrics_are_reported() -> None:
    before = {**values(1, 0), "perplexity": torch.tensor([-1.0, -3.0], dtype=torch.float64)}
    after = {**values(1, 1), "perplexity": torch.tensor([-2.0, -4.0], dtype=torch.float64)}
    found = compare_scores(made_up(), before, after)
    assert found.drop == -0.5
    assert found.metrics["acc"] == (0.5, 1.0)
    assert found.metrics["perplexity"] == pytest.approx((math.exp(2), math.exp(3)))


def test_lost_documents_are_the_worst_in_their_order() -> None:
    before = values(1.0, 0.9, 0.5, 1.0, 0.2, 1.0)
    after = values(0.9, 0.1, 0.6, 0.0, 0.2, 0.5)
    assert find_lost_documents(made_up(), before, after, range(6), 9) == [0, 1, 3, 5]
    assert find_lost_documents(made_up(), before, after, range(6), 2) == [1, 3]
    assert find_lost_documents(made_up(), before, after, range(6), 1) == [3]
    assert find_lost_documents(made_up(), before, after, [0, 2, 4, 5], 9) == [0, 5]


def test_the_metric_that_was_asked_for(tmp_path: Path) -> None:
    write_task(tmp_path, "mine", questions(8), metric_list=[ACC, ACC_NORM])
    assert open_one(tmp_path).metric == "acc"
    task = open_one(tmp_path, "mine:acc_norm")
    assert (task.name, task.metric, task.metrics) == ("mine", "acc_norm", ("acc", "acc_norm"))
    assert task.aliases == ("mine:acc_norm", "mine")
    before = score(tiny_model("gpt2"), tiny_tokenizer(), task)
    after = {**before, "acc_norm": torch.zeros(8, dtype=torch.float64)}
    found = compare_scores(task, before, after)
    assert found.source == found.drop == before["acc_norm"].mean().item()
    assert set(found.metrics) == {"acc", "acc_norm"}
    assert found.metrics["acc"][0] == found.metrics["acc"][1]
    with pytest.raises(InputError, match=r"task mine has no metric 'f1' \(those that can be compared: acc, acc_norm\)"):
        open_one(tmp_path, "mine:f1")


@pytest.mark.parametrize(("given", "better"), [(True, 1), (False, -1), (None, 1)])
def test_the_direction_is_the_tasks_own(tmp_path: Path, given: bool | None, better: int) -> None:
    """None is what lm-eval itself puts where a metric that it does not know says nothing."""
    write_task(tmp_path, "mine", questions(2), metric_list=[{**ACC, "higher_is_better": given}])
    assert open_one(tmp_path).better == better


# lm-eval itself

# Its command, without the minute in which it reads its own 14,000 tasks (`include_defaults`).
LM_EVAL = (
    "import runpy, lm_eval.tasks\n"
    "lm_eval.tasks.TaskManager.__init__.__defaults__ = (None, None, False, None)\n"
    "runpy.run_module('lm_eval', run_name='__main__')\n"
)


def test_lm_eval_says_the_same_of_a_compressed_checkpoint(compressed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    write_task(folder, "mine", questions(30, words=4), metric_list=[ACC, ACC_NORM])
    write_task(folder, "shots", questions(30, words=2), metric_list=[ACC, ACC_NORM], num_fewshot=2)
    command = [sys.executable, "-c", LM_EVAL, "run", "--model", "hf", "--tasks", "mine,shots", "--device", "cpu"]
    arguments = ["--model_args", f"pretrained={compressed},trust_remote_code=True", "--batch_size", "1"]
    places = ["--include_path", str(folder), "--output_path", str(tmp_path / "out")]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command += [*arguments, *places]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    said = json.loads(file.read_text(encoding="utf-8"))["results"]
    model = AutoModelForCausalLM.from_pretrained(compressed, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(compressed)
    for name in ("mine", "shots"):
        task = open_one(folder, name)
        found = score(model, tokenizer, task)
        for metric in ("acc", "acc_norm"):
            assert 0 < said[name][f"{metric},none"] < 1
            assert task.total(metric, found[metric]) == pytest.approx(said[name][f"{metric},none"], abs=1e-6)


# Plans that a task refuses

DIGITS = ("012", "345", "678")  # no text of the tests has digits; the embedding marks each kind in a feature of its own
MARK, GATE, PUSH, SHIFT = 2.0, 20.0, 2.0, 20.0


@torch.no_grad()
def gated_model(*blocks: int) -> Any:
    """A GPT-2 with FFNs that are linear in a text without digits; these blocks say `a` after a digit of their kind.

    A gelu far to the right of zero is the identity, and far to the left is nothing until a mark opens it.
    """
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer()
    body, generator = model.transformer, torch.Generator().manual_seed(5)
    marks = slice(0, len(DIGITS))
    for embedding in (body.wpe.weight, body.wte.weight):
        embedding[:, marks] = 0
    for kind, digits in enumerate(DIGITS):
        body.wte.weight[tokenizer.convert_tokens_to_ids(list(digits)), kind] = MARK
    for index, layer in enumerate(body.h):
        layer.attn.c_proj.weight[:, marks] = 0
        layer.attn.c_proj.bias[marks] = 0
        layer.ln_2.weight.fill_(1)
        layer.ln_2.bias.zero_()
        up, down = layer.mlp.c_fc, layer.mlp.c_proj
        up.weight.copy_(torch.randn(up.weight.shape, generator=generator) / 6)
        down.weight.copy_(torch.randn(down.weight.shape, generator=generator) / 20)
        up.weight[marks] = 0
        up.weight[:, -1] = 0
        up.weight[index, -1] = GATE
        up.bias.fill_(SHIFT)
        up.bias[-1] = -MARK * GATE
        down.weight[:, marks] = 0
        down.weight[-1] = body.wte.weight[tokenizer("a")["input_ids"][0]] * (PUSH if index in blocks else 0)
        down.bias.copy_(-SHIFT * down.weight[:-1].sum(0))
    return model


@pytest.fixture
def gated(tmp_path: Path) -> Any:
    """Save such a model, with a task that only its gates know."""

    def save(*blocks: int) -> list[str]:
        gated_model(*blocks).save_pretrained(tmp_path / "model")
        tiny_tokenizer().save_pretrained(tmp_path / "model")
        rng = random.Random(0)
        digits = [rng.choice(DIGITS[block]) for block in blocks for _ in range(40)]
        documents = [{"question": " ".join([*rng.choices(WORDS, k=4), digit]), "answer": "a"} for digit in digits]
        write_task(tmp_path / "tasks", "digits", documents, **LIKELIHOOD)
        return [str(tmp_path / "model"), "--tasks", "digits", "--task-path", str(tmp_path / "tasks"), "--generate", "0"]

    return save


def kept_blocks(record: dict[str, Any]) -> list[int]:
    return [block["index"] for block in record["blocks"] if block["replacement"]["kind"] == "keep"]


@pytest.mark.parametrize("blocks", [(1,), (2,), (0, 2)])
def test_the_block_that_breaks_a_task_goes_back(
    compress: Compress,
    options: list[str],
    gated: Any,
    tmp_path: Path,
    blocks: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The model is random: 62 windows give its perplexity an interval of some percent, which the budget must hold.
    arguments = [*gated(*blocks), *options, "--max-dppl", "10%", "--objective", "size", "--json"]
    careless = compress(*arguments, "--out", tmp_path / "careless")
    assert careless.code == 0, careless.err
    record = json.loads(careless.out)
    assert kept_blocks(record) == []
    assert record["perplexity"]["delta"] < 0.02 * record["perplexity"]["baseline"]  # the text sees little harm in it
    assert (record["tasks"]["digits"]["source"], record["tasks"]["digits"]["compressed"]) == (1.0, 0.0)
    looks = record["verification_looks"]

    assert record["tasks"]["digits"]["documents"] == 40 * len(blocks)

    careful = compress(*arguments, "--max-task-drop", "0.3", "--out", tmp_path / "careful")
    assert careful.code == 0, careful.err
    record = json.loads(careful.out)
    assert kept_blocks(record) == list(blocks)
    assert (record["tasks"]["digits"]["source"], record["tasks"]["digits"]["compressed"]) == (1.0, 1.0)
    assert record["verification_looks"] == looks + len(blocks)
    task = record["tasks"]["digits"]
    assert (task["documents"], task["chosen_on"], task["looks"]) == (20 * len(blocks), 20 * len(blocks), 2)
    checked = compress("check", tmp_path / "careful", "--json")
    assert json.loads(checked.out)["tasks"]["digits"]["documents"] == 20 * len(blocks), "seen documents do not decide"
    assert json.loads((tmp_path / "careful" / "compression.json").read_text(encoding="utf-8"))["tasks"]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a task was scored again")

    monkeypatch.setattr("compressor.evaluate.evaluator.score", refuse)
    again = compress(*arguments, "--max-task-drop", "0.3", "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert kept_blocks(json.loads(again.out)) == list(blocks)


def test_nothing_is_written_when_every_block_breaks_a_task(
    compress: Compress, options: list[str], gated: Any, tmp_path: Path
) -> None:
    # Without guard windows: random words ask the gates for their answer, and a mild replacement may keep it.
    alone = ["--branches", "ffn", "--guard", "0"]
    arguments = [*gated(0, 1, 2), *options, *alone, "--max-dppl", "1%", "--out", tmp_path / "out"]
    done = compress(*arguments, "--max-task-drop", "digits=0.3")
    assert done.code == 1, done.err
    assert done.out == ""
    (error,) = done.errors
    assert error.startswith("error: the budget of task digits is missed: closest was block ")
    assert "with a drop of +0.3333" in error
    assert error.endswith("allowed 0.3, 60 documents); nothing written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tasks"]
    assert compress(*arguments, "--max-task-drop", "1").code == 0  # the same, with nothing to lose


@pytest.mark.parametrize("hf_evaluate", [False, True])
def test_a_metric_that_is_a_script_is_not_run(tmp_path: Path, hf_evaluate: bool) -> None:
    """lm-eval would hand it to `evaluate`, which runs a script of that name."""
    script = tmp_path / "evil.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n", encoding="utf-8")
    extra = {"metric": str(script), "aggregation": "mean", "higher_is_better": True, "hf_evaluate": hf_evaluate}
    means = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    write_task(tmp_path / "tasks", "mine", metric_list=[means, extra])
    with pytest.raises(InputError, match="not one of lm-eval's own"):
        load_tasks(["mine"], [str(tmp_path / "tasks")], None, False)
    assert not (tmp_path / "ran").exists()
