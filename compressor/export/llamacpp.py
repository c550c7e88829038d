"""Run a GGUF file in stock llama.cpp (the wheel `xllamacpp`), in a process of its own because it may abort."""

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

STAMP = re.compile(r"^[\d.]+ E +")  # of a line that llama.cpp logs as an error
ABORT = re.compile(r"GGML_ASSERT|GGML_ABORT|fatal error")
FORCING_BIAS = 1e6  # a bias that makes a token the most likely one, whatever the model says
LOWEST = -1e38  # llama.cpp says log 0 as the lowest float
SHUTDOWN_SECONDS = 10.0  # seconds for an orderly end
ERRORS_ONLY = 1  # of llama.cpp's log


@dataclass(frozen=True)
class Settings:
    """How llama.cpp computes. The defaults are those to compare numbers with; by itself it keeps K and V as f16."""

    threads: int = 1
    context: int = 1024
    cache_type: str = "f32"  # of K and V
    flash_attention: bool = False
    batch: int = 2048
    micro_batch: int = 512


@dataclass(frozen=True)
class Speed:
    """Tokens per second by llama.cpp's own clock."""

    prefill: float
    decode: float


def available() -> bool:
    return find_spec("xllamacpp") is not None


class Runner:
    """A running llama.cpp with a GGUF file: `with Runner(file) as run: run.tokenize("Hello")`."""

    def __init__(self, file: str | Path, settings: Settings | None = None) -> None:
        self.file, self.settings = Path(file), settings or Settings()

    def __enter__(self) -> Runner:
        if not available():
            raise InputError("xllamacpp, which runs GGUF files, is not installed; pip install xllamacpp")
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.key = secrets.token_hex(16)
        request = {"file": str(self.file.resolve()), "key": self.key, **asdict(self.settings)}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "compressor.export.llamacpp"],
            stdin=subprocess.PIPE,  # its end is the child's end, however this process goes
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's to handle
            env=os.environ | {"PYTHONPATH": search_path(), "GGML_NO_BACKTRACE": "1"},
        )
        assert self.child.stdin
        assert self.child.stdout
        try:
            self.child.stdin.write(json.dumps(request) + "\n")
            self.child.stdin.flush()
            self.address = urlsplit(json.loads(self.child.stdout.readline())).netloc
        except (OSError, ValueError):
            self.fail()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.child.kill()  # it holds nothing that would have to be saved
        self.child.communicate()
        self.log.close()

    def fail(self) -> NoReturn:
        """The child is gone, or going: say why in its own words."""
        try:
            self.child.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
        self.log.seek(0)
        reason = find_reason(self.log.read())
        self.close()
        raise InputError(f"llama.cpp cannot run {self.file}: {reason}; check the file or export it again")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        connection = HTTPConnection(self.address)  # a new one each time, for the server closes those that wait
        try:
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, HTTPException, ValueError):
            self.fail()
        finally:
            connection.close()
        if response.status != 200:
            reason = shorten(str(answer.get("error", {}).get("message", answer)))
            raise InputError(f"llama.cpp refuses a request about {self.file}: {reason}; try another input")
        return answer

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return list(self.post("/tokenize", body)["tokens"])

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self.post("/detokenize", {"tokens": list(ids)})["content"])

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt that the file's own chat template makes of a conversation, ready for the answer."""
        return str(self.post("/apply-template", {"messages": list(messages)})["prompt"])

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The most likely continuation: `count` tokens, or fewer where the model ends its text."""
        self.require_room(len(ids) + count)
        return list(self.complete(ids, count, return_tokens=True)["tokens"])

    def log_probabilities(self, ids: Sequence[int]) -> list[float]:
        """The natural log-probability of every token but the first, given those before it.

        llama.cpp tells the probability of the token it takes, over the whole vocabulary and before any bias; a bias
        makes it take the one that is asked for. Each step computes one token, for the prefix is in the cache.
        """
        self.require_room(len(ids) + 1)
        return [self.log_probability(ids[:i], ids[i]) for i in range(1, len(ids))]

    def log_probability(self, prefix: Sequence[int], token: int) -> float:
        answer = self.complete(prefix, 1, n_probs=1, logit_bias=[[token, FORCING_BIAS]], cache_prompt=True)
        entries = answer.get("completion_probabilities")
        if not entries:  # the token is a part of a character, of which llama.cpp tells nothing: ask for them all
            whole = self.tokenize("a")[-1]
            wanted = {"n_probs": self.vocabulary(), "logit_bias": [[whole, FORCING_BIAS]], "cache_prompt": True}
            entries = self.complete(prefix, 1, **wanted)["completion_probabilities"][0]["top_logprobs"]
        (value,) = (entry["logprob"] for entry in entries if entry["id"] == token)
        return value if value > LOWEST else -math.inf

    def vocabulary(self) -> int:
        return int(self.post("/v1/models", {})["data"][0]["meta"]["n_vocab"])

    def speed(self, prompt_tokens: int, new_tokens: int) -> Speed:
        """The time of one prompt and one answer, nothing from a cache; which tokens they are makes no difference."""
        self.require_room(prompt_tokens + new_tokens)
        vocabulary = self.vocabulary()
        ids = [7 * i % vocabulary for i in range(1, prompt_tokens + 1)]
        timings = self.complete(ids, new_tokens, ignore_eos=True)["timings"]
        return Speed(timings["prompt_per_second"], timings["predicted_per_second"])

    def complete(self, ids: Sequence[int], count: int, **more: Any) -> Any:
        body = {"prompt": list(ids), "n_predict": count, "temperature": 0.0, "cache_prompt": False}
        return self.post("/completion", body | more)

    def require_room(self, tokens: int) -> None:
        if tokens > self.settings.context:
            raise InputError(f"{tokens} tokens do not fit into a context of {self.settings.context}; give more context")


def search_path() -> str:
    """Where the child finds this package, also when it is not installed."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parents[2]), *([inherited] if inherited else [])])


def find_reason(log: str) -> str:
    """The line that says most: a failed assertion, else the first error, for the later ones only repeat it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    aborts = [line for line in lines if ABORT.search(line)]
    errors = [STAMP.sub("", line) for line in lines if STAMP.match(line)]
    return shorten((aborts or errors or lines[-1:] or ["it ended without a word"])[0])


def serve() -> None:
    """The child: start llama.cpp's server, tell its address, and end when the input ends."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=exit_at_end_of_input, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # llama.cpp may print
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
    sys.stdin.read()
    os._exit(0)  # llama.cpp's threads are not waited for


if __name__ == "__main__":
    serve()
