"""lm-eval tasks on local JSONL files, with lm-eval's own definitions: one YAML per task, for `compress --task-path`.

    python benchmarks/make_tasks.py DATA --out DIR

DATA holds lambada_openai_test.jsonl, piqa_validation.jsonl, arc_easy_test.jsonl, winogrande_xl_validation.jsonl and
blimp/*.jsonl; those that are not there are passed over. The prompts and metrics are lm-eval 0.4's, the data are local.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml


def mean(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


TASKS: dict[str, dict[str, Any]] = {
    "lambada_openai_test": {
        "task": "lambada_openai",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            *mean("acc"),
        ],
    },
    "piqa_validation": {
        "task": "piqa",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{goal}}\nAnswer:",
        "doc_to_target": "label",
        "doc_to_choice": "{{[sol1, sol2]}}",
        "metric_list": mean("acc", "acc_norm"),
    },
    "arc_easy_test": {
        "task": "arc_easy",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{choices.label.index(answerKey)}}",
        "doc_to_choice": "{{choices.text}}",
        "metric_list": mean("acc", "acc_norm"),
    },
}
BLIMP: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "",
    "doc_to_target": 0,
    "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
    "num_fewshot": 0,
    "metric_list": mean("acc"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="directory of JSONL files")
    parser.add_argument("--out", type=Path, required=True, help="directory to write YAML files to")
    arguments = parser.parse_args()
    found = [(file, TASKS[file.stem]) for file in sorted(arguments.data.glob("*.jsonl")) if file.stem in TASKS]
    blimp = sorted((arguments.data / "blimp").glob("*.jsonl"))
    found += [(file, {**BLIMP, "task": f"blimp_{file.stem}", "tag": "blimp"}) for file in blimp]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file, task in found:
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"validation": str(file.resolve())}},
            "validation_split": "validation",
            "metadata": {"version": 1.0},
        }
        (arguments.out / f"{task['task']}.yaml").write_text(yaml.safe_dump({**task, **data}, sort_keys=False))
        print(task["task"])


if __name__ == "__main__":
    main()
