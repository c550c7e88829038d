"""Make the built-in lm-eval task `demo_last_word`: which of four words ends a passage of the built-in text?

    python benchmarks/make_demo_task.py [OUT]

Passages are whole sentences of one paragraph from the last 30 % of every file; no two share a sentence. In half of them
the last word has occurred before. The distractors are content words of the same file, about as long and as frequent.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

DEMO = Path(__file__).resolve().parent.parent / "compressor" / "demo"
TAIL, DOCUMENTS = 0.3, 240  # the part of every file; lm-eval scores some 30 documents a second on two cores
SHORTEST, LONGEST, SENTENCES = 60, 160, 12  # tokens of a passage, and its sentences at most
ASIDE = re.compile(r"[\[(](?:applause|laugh)[^\])]*[\])]", re.IGNORECASE)
SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["”]))(?<!\bMrs\.)(?<!\b(?:[DM]r|St)\.)(?<![A-Z]\.)\s+""")
PLAIN = re.compile(r"""["“]?[A-Z](?:[\w ,.;:!?'’"“”—-](?<![.,;:!?—][—-])(?<![ —][.,;:!?]))*[.!?]["”]?""")
LAST_WORD = re.compile(r"""(.*\w[,;:]?) ([A-Za-z]{4,})[.!?]["”]?""")
COMMON = """about above after again against also always another because been before being between both come could does
done down each either else even ever every from give gone hath have here herself himself however into itself just like
made make many might mine more most much must myself neither never none nothing once only other ourselves over said
same shall should since some something still such than that thee their them themselves then there therefore these they
thine this those thou though through thus towards under until unto upon very well were what when where whether which
while whom whose will with within without would your yours yourself"""  # not content words
YAML = """task: demo_last_word
dataset_path: json
dataset_kwargs: {data_files: {validation: last_word.jsonl}}
validation_split: validation
output_type: multiple_choice
num_fewshot: 0
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""  # every choice begins with its space
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""


def passages(text: str, words: dict[str, int], tokenizer: Tokenizer) -> list[tuple[bool, str, str]]:
    """Disjoint passages, those that repeat a word and then the shortest first: is the last word new, the rest, it."""
    candidates: list[tuple[bool, int, set[tuple[int, int]], str, str]] = []
    for number, paragraph in enumerate(re.split(r"\n\s*\n", ASIDE.sub("", text))):
        lines = (line for line in paragraph.splitlines() if not line.isupper())
        sentences = SENTENCE_END.split(" ".join(" ".join(lines).split()))
        for start in range(len(sentences)):
            for stop in range(start + 1, min(start + SENTENCES, len(sentences)) + 1):
                passage = " ".join(sentences[start:stop])
                match = LAST_WORD.fullmatch(passage)
                plain = all(map(PLAIN.fullmatch, sentences[start:stop])) and not re.match("[^“]*”", passage)
                if match and plain and match[2] in words and SHORTEST <= len(tokenizer.encode(passage)) <= LONGEST:
                    new = match[2] not in re.findall(r"\w+", match[1])
                    place = {(number, sentence) for sentence in range(start, stop)}
                    candidates.append((new, len(passage), place, match[1], match[2]))
    chosen, taken = [], set[tuple[int, int]]()
    for new, _, place, context, word in sorted(candidates, key=lambda candidate: candidate[:2]):
        if place.isdisjoint(taken):
            taken |= place
            chosen.append((new, context, word))
    return chosen


def make(rng: random.Random) -> list[dict[str, Any]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    pools: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])  # the last word has occurred before; it is new
    for file in sorted((DEMO / "text").glob("*.txt")):
        text = file.read_text(encoding="utf-8")
        counts = Counter(re.findall(r"(?<![\w'’-])[A-Za-z][a-z]{3,}(?![\w'’-])", text))
        content = {w: n for w, n in counts.items() if w.lower() not in COMMON.split()}
        words = {w: n for w, n in content.items() if w.islower() or w.lower() not in counts}  # lower case, or a name
        tail = SENTENCE_END.split(text[int(len(text) * (1 - TAIL)) :], maxsplit=1)[1]
        for new, context, word in passages(tail, words, tokenizer):
            far = {w: abs(len(w) - len(word)) + abs(math.log2(n / counts[word])) for w, n in words.items()}
            others = [w for w in far if w[:4] != word[:4] and w.islower() == word.islower() and w not in context]
            near = sorted(others, key=lambda w: (far[w], w))[:16]
            choices = rng.sample([f" {w}" for w in (word, *rng.sample(near, 3))], 4)
            pools[new].append({"context": context, "choices": choices, "label": choices.index(f" {word}")})
    documents = rng.sample(pools[0], min(len(pools[0]), DOCUMENTS // 2))
    documents += rng.sample(pools[1], DOCUMENTS - len(documents))
    return rng.sample(documents, DOCUMENTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write last_word.jsonl and last_word.yaml.")
    parser.add_argument("out", nargs="?", type=Path, default=DEMO / "tasks")
    (out := parser.parse_args().out).mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(document, ensure_ascii=False) + "\n" for document in make(random.Random(0)))
    (out / "last_word.jsonl").write_text("".join(lines), encoding="utf-8")
    (out / "last_word.yaml").write_text(YAML, encoding="utf-8")
