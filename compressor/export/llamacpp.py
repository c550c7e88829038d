"""Run a GGUF file in stock llama.cpp (the wheel `xllamacpp`), in a child process, because llama.cpp may abort."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn
from urllib.parse import urlsplit

from compressor.runtime.errors import InputError, shorten

ERROR_PREFIX = re.compile(r"^[\d.]+ E +")  # llama.cpp begins a logged error with it
ABORT = re.compile(r"GGML_ASSERT|GGML_ABORT|fatal error")
FORCING_BIAS = 1e6  # added to a logit, it makes that token the most likely one
LOG_ZERO = -1e38  # llama.cpp gives a number below this for log 0
SHUTDOWN_SECONDS = 10.0  # how long a failing child may take to end before it is killed
ERRORS_ONLY = 1  # a level of llama.cpp's log


@dataclass(frozen=True)
class Settings:
    """How llama.cpp computes. The defaults are for comparing numbers: llama.cpp's own default keeps K and V as f16."""

    threads: int = 1
    context: int = 1024
    cache_type: str = "f32"  # the dtype of keys and values
    flash_attention: bool = False
    batch: int = 2048
    micro_batch: int = 512


@dataclass(frozen=True)
class Score:
    """What a model says of one token: its natural log-probability, and which token would have been the most likely."""

    log_probability: float
    most_likely: int


@dataclass(frozen=True)
class Speed:
    """Tokens per second by llama.cpp's own clock."""

    prefill: float
    decode: float


def is_installed() -> bool:
    """Whether the package xllamacpp can be imported."""
    return find_spec("xllamacpp") is not None


class Runner:
    """A running llama.cpp with a GGUF file: `with Runner(file) as run: run.tokenize("Hello")`."""

    def __init__(self, file: str | Path, settings: Settings | None = None) -> None:
        self.file, self.settings = Path(file), settings or Settings()

    def __enter__(self) -> Runner:
        if not is_installed():
            raise InputError("xllamacpp, which runs GGUF files, is not installed; pip install xllamacpp")
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.key = secrets.token_hex(16)
        request = {"file": str(self.file.resolve()), "key": self.key, **asdict(self.settings)}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "compressor.export.llamacpp"],
            stdin=subprocess.PIPE,  # the child ends when this is closed, however this process ends
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # only this process handles Ctrl-C
            env=os.environ | {"PYTHONPATH": search_path(), "GGML_NO_BACKTRACE": "1"},
        )
        assert self.child.stdin
        assert self.child.stdout
        try:
            self.child.stdin.write(json.dumps(request) + "\n")
            self.child.stdin.flush()
            self.address = urlsplit(json.loads(self.child.stdout.readline())).netloc
        except (OSError, ValueError):
            self.raise_failure()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the child, which has nothing to save."""
        self.child.kill()
        self.child.communicate()
        self.log.close()

    def raise_failure(self) -> NoReturn:
        """Raise an InputError with the reason from the log of a child that has failed."""
        try:
            self.child.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
        self.log.seek(0)
        reason = find_reason(self.log.read())
        self.close()
        raise InputError(f"llama.cpp cannot run {self.file}: {reason}; check the file or export it again")

    def request(self, path: str, body: dict[str, Any]) -> Any:
        """The server's answer; an empty body makes it a GET request."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        connection = HTTPConnection(self.address)  # a new one each time, because the server closes idle ones
        try:
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, HTTPException, ValueError):
            self.raise_failure()
        finally:
            connection.close()
        if response.status != 200:
            reason = shorten(str(answer.get("error", {}).get("message", answer)))
            raise InputError(f"llama.cpp refuses a request about {self.file}: {reason}; try another input")
        return answer

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return list(self.request("/tokenize", body)["tokens"])

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self.request("/detokenize", {"tokens": list(ids)})["content"])

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt that the file's chat template makes of a conversation, up to where the answer begins."""
        return str(self.request("/apply-template", {"messages": list(messages)})["prompt"])

    def continue_greedily(self, ids: Sequence[int], count: int) -> list[int]:
        """The most likely continuation: `count` tokens, or fewer where the model ends its text."""
        self.require_context(len(ids) + count)
        return list(self.complete(ids, count, return_tokens=True)["tokens"])

    def log_probabilities(self, ids: Sequence[int]) -> list[float]:
        """The natural log-probability of every token but the first, given those before it."""
        return [score.log_probability for score in self.score(ids)]

    def score(self, ids: Sequence[int]) -> list[Score]:
        """What llama.cpp says of every token but the first, given those before it.

        llama.cpp reports the probability of the token that it chooses, computed before any bias. A large bias on the
        wanted token makes it choose that one. Each step computes one token only, because the prefix is cached: it
        takes as long as writing so many tokens.
        """
        self.require_context(len(ids) + 1)
        return [self.score_token(ids[:i], ids[i]) for i in range(1, len(ids))]

    def score_token(self, prefix: Sequence[int], token: int) -> Score:
        """What llama.cpp says of a token after this prefix."""
        answer = self.complete(prefix, 1, n_probs=1, logit_bias=[[token, FORCING_BIAS]], cache_prompt=True)
        chosen = answer.get("completion_probabilities")
        entries = [*chosen[0]["top_logprobs"], chosen[0]] if chosen else []
        if not chosen:  # nothing is reported for a token that is part of a character: ask for all tokens
            whole = self.tokenize("a")[-1]
            options = {"n_probs": self.vocabulary_size(), "logit_bias": [[whole, FORCING_BIAS]], "cache_prompt": True}
            entries = self.complete(prefix, 1, **options)["completion_probabilities"][0]["top_logprobs"]
        value = next(entry["logprob"] for entry in entries if entry["id"] == token)
        return Score(value if value > LOG_ZERO else -math.inf, entries[0]["id"])

    def vocabulary_size(self) -> int:
        return int(self.request("/v1/models", {})["data"][0]["meta"]["n_vocab"])

    def measure_speed(self, prompt_tokens: int, new_tokens: int) -> Speed:
        """The speed of one prompt and one answer, without a cache. Which tokens they are makes no difference."""
        self.require_context(prompt_tokens + new_tokens)
        size = self.vocabulary_size()
        ids = [7 * i % size for i in range(1, prompt_tokens + 1)]
        timings = self.complete(ids, new_tokens, ignore_eos=True)["timings"]
        return Speed(timings["prompt_per_second"], timings["predicted_per_second"])

    def complete(self, ids: Sequence[int], count: int, **options: Any) -> Any:
        """The server's answer to a request for `count` more tokens."""
        body = {"prompt": list(ids), "n_predict": count, "temperature": 0.0, "cache_prompt": False}
        return self.request("/completion", body | options)

    def require_context(self, tokens: int) -> None:
        if tokens > self.settings.context:
            raise InputError(f"{tokens} tokens do not fit into a context of {self.settings.context}; give more context")


def search_path() -> str:
    """The PYTHONPATH with which the child finds this package, also when it is not installed."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parents[2]), *([inherited] if inherited else [])])


def find_reason(log: str) -> str:
    """The most telling line of a log: a failed assertion, else the first error, because later ones only repeat it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    aborts = [line for line in lines if ABORT.search(line)]
    errors = [ERROR_PREFIX.sub("", line) for line in lines if ERROR_PREFIX.match(line)]
    return shorten((aborts or errors or lines[-1:] or ["it ended without a word"])[0])


def serve() -> None:
    """Run in the child: start llama.cpp's server, print its address, and end when the input ends."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=exit_at_end_of_input, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what llama.cpp prints goes to stderr, not into the answer
    xllamacpp: Any = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = request["file"]
    params.api_keys, params.hostnames, params.port = [request["key"]], ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel = request["context"], 1
    params.n_batch, params.n_ubatch = request["batch"], request["micro_batch"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{request['cache_type'].upper()}")
    params.cache_type_k = params.cache_type_v = kind
    flash = xllamacpp.llama_flash_attn_type
    on, off = flash.LLAMA_FLASH_ATTN_TYPE_ENABLED, flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.flash_attn_type = on if request["flash_attention"] else off
    params.n_gpu_layers, params.fit_params, params.ui = 0, False, False
    params.cache_ram_mib, params.verbosity = 0, ERRORS_ONLY
    server = xllamacpp.Server(params)
    print(json.dumps(server.listening_address), file=answers, flush=True)
    threading.Event().wait()


def exit_at_end_of_input() -> None:
    """End the process when stdin is closed."""
    sys.stdin.read()
    os._exit(0)  # at once, without waiting for llama.cpp's threads


if __name__ == "__main__":
    serve()
