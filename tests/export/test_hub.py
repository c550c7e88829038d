"""`compress push`: whole checkpoints only, what compress writes only, in one commit; nothing without a token."""

from __future__ import annotations

import base64
import json
import os
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import huggingface_hub
import pytest
import yaml
import zoo
from conftest import Compress, Refused, tree
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, ModelCard
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from records_cards import TASK, measured

import compressor
from compressor.export import hub as hub_module
from compressor.export.upload import local_paths, record_paths, shorten_paths
from compressor.report.card import card
from compressor.report.card_metadata import list_problems
from compressor.report.record import read_record
from compressor.runtime.errors import InputError

OPEN_CLIENT = hub_module.open_client
SHORT = {"verification": {"source": "demo"}}
TOKEN = "hf_thisIsASecretThatNobodyMayRead"


def answer(kind: type[HfHubHTTPError], status: int, words: str = "no") -> HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(words, response=response)


class Hub:
    """A client that does nothing but remember: repository → branch → files."""

    def __init__(self, repos: dict[str, dict[str, list[str]]] | None = None, private: bool = False) -> None:
        self.repos = repos or {}
        self.private = private
        self.calls: list[str] = []
        self.sent: dict[str, bytes] = {}
        self.removed: list[str] = []
        self.commit: dict[str, Any] = {}
        self.failure: Exception | None = None

    def model_info(self, repo: str) -> Any:
        self.calls.append("model_info")
        if repo not in self.repos:
            raise answer(RepositoryNotFoundError, 404)
        return SimpleNamespace(private=self.private)

    def create_repo(self, repo: str, *, private: bool | None, exist_ok: bool) -> None:
        self.calls.append(f"create_repo {private}")
        self.repos[repo] = {"main": [".gitattributes"]}

    def list_repo_files(self, repo: str, revision: str | None = None) -> list[str]:
        if (revision or "main") not in self.repos[repo]:
            raise answer(RevisionNotFoundError, 404)
        return self.repos[repo][revision or "main"]

    def create_branch(self, repo: str, *, branch: str, exist_ok: bool) -> None:
        self.calls.append(f"create_branch {branch}")
        self.repos[repo][branch] = list(self.repos[repo]["main"])

    def create_commit(self, repo: str, operations: list[Any], **options: Any) -> Any:
        self.calls.append("create_commit")
        if self.failure:
            raise self.failure
        assert (options["revision"] or "main") in self.repos[repo]
        self.commit = options
        for operation in operations:
            if isinstance(operation, CommitOperationAdd):
                content = operation.path_or_fileobj
                assert isinstance(content, (bytes, Path, str))
                self.sent[operation.path_in_repo] = (
                    content if isinstance(content, bytes) else Path(content).read_bytes()
                )
            else:
                assert isinstance(operation, CommitOperationDelete)
                self.removed.append(operation.path_in_repo)
        pr = f"https://hub.example/{repo}/discussions/1" if options["create_pr"] else None
        return SimpleNamespace(oid="c0ffee", pr_url=pr, repo_url=f"https://hub.example/{repo}")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nobody is logged in, and nothing leaves this machine."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path_factory.mktemp("home") / "token"))
    monkeypatch.setattr(hub_module, "open_client", lambda: pytest.fail("the Hub was asked"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Somebody is logged in."""
    hub = Hub()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(hub_module, "open_client", lambda: hub)
    return hub


@pytest.fixture
def checkpoint(compressed: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(compressed, tmp_path / "small"))


def test_without_a_token_nothing_is_sent_and_that_is_an_error(refused: Refused, compressed: Path) -> None:
    before = tree(compressed)
    for arguments in ([], ["--json"], ["--private"]):
        line = refused("push", compressed, "me/small", *arguments)
        assert "nothing was sent, for there is no token; log in with `hf auth login`" in line
        assert "--dry-run" in line
    assert tree(compressed) == before


def test_a_dry_run_needs_no_token(compress: Compress, compressed: Path) -> None:
    before = tree(compressed)
    done = compress("push", compressed, "me/small", "--dry-run")
    assert done.code == 0, done.err
    assert "nothing was sent: --dry-run" in done.out
    written = {str(path.relative_to(compressed)) for path in compressed.rglob("*") if path.is_file()}
    assert all(name in done.out for name in written)
    assert "would be sent to me/small, branch main" in done.out
    assert "left out" not in done.out, "everything that compress writes is sent"
    assert "the card's metadata is sound" in done.out
    assert tree(compressed) == before


def test_a_dry_run_asks_nobody(compress: Compress, compressed: Path, hub: Hub) -> None:
    done = compress("push", compressed, "me/small", "--dry-run", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert (report["sent"], report["reason"], report["left_out"]) == (False, "--dry-run", {})
    assert report["bytes"] == sum(file["bytes"] for file in report["files"])
    assert report["card"]["library_name"] == "transformers"
    assert hub.calls == []


def test_a_new_repository(compress: Compress, compressed: Path, hub: Hub) -> None:
    done = compress("push", compressed, "me/small", "--private")
    assert done.code == 0, done.err
    assert hub.calls == ["model_info", "create_repo True", "create_commit"]
    assert "https://hub.example/me/small (commit c0ffee)" in done.out
    assert set(hub.sent) == {str(path.relative_to(compressed)) for path in compressed.rglob("*") if path.is_file()}
    assert hub.sent["model.safetensors"] == (compressed / "model.safetensors").read_bytes()
    assert (hub.removed, hub.commit["revision"], hub.commit["create_pr"]) == ([], None, False)
    assert TOKEN not in done.out + done.err


def test_what_is_sent_is_the_checkpoint(compressed: Path, hub: Hub, tmp_path: Path) -> None:
    """It loads, its card is sound and names its repository, and no directory of this machine stands in it."""
    hub_module.push(compressed, "me/small")
    for name, content in hub.sent.items():
        (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "got" / name).write_bytes(content)
        if not name.endswith((".safetensors", ".png")):
            assert str(compressed.parent.parent).encode() not in content, name
    compressor.load(str(tmp_path / "got"), allow_compressed=True)
    text = hub.sent["README.md"].decode()
    assert list_problems(text) == []
    assert 'from_pretrained("me/small", trust_remote_code=True)' in text
    record = json.loads((compressed / "compression.json").read_text(encoding="utf-8"))
    public = json.loads(hub.sent["compression.json"])
    assert public["source"]["model"] == Path(record["source"]["model"]).name
    assert public["text"]["verification"]["source"] == "corpus.txt"
    assert public["perplexity"] == record["perplexity"]
    recipe = hub.sent["recipe.yaml"].decode()
    assert recipe.startswith("# Reproduces this checkpoint:\n# compress --recipe")
    assert yaml.safe_load(recipe)["model"] == "gpt2"
    assert read_record(tmp_path / "got").blocks == read_record(compressed).blocks


def test_paths_wherever_they_stand() -> None:
    cross = {"source": {"model": "../other", "weights_sha256": ""}, "mean": {}, "rank_correlation": {}}
    record = measured(
        source={"model": "/home/me/model", "revision": None, "weights_sha256": ""},
        text={"verification": {"source": "../x/y.txt, hub:o/s"}},
        cross=cross,
        recipe={"model": "./model", "text": ["a=../x/y.txt", "hub:o/s", "demo"], "prompts": "/home/me/p.txt"},
        tasks={"t": {**TASK, "data": "/home/me/t/1.jsonl, /home/me/t/2.jsonl"}},
    )
    paths = local_paths(record_paths(record))
    assert paths == {
        "/home/me/model": "model",
        "../other": "other",
        "./model": "model",
        "../x/y.txt": "y.txt",
        "/home/me/p.txt": "p.txt",
        "/home/me/t/1.jsonl": "1.jsonl",
        "/home/me/t/2.jsonl": "2.jsonl",
    }
    values = {
        "recipe": {"model": "./model", "text": ["a=../x/y.txt", "hub:o/s", "demo"], "prompts": "/home/me/p.txt"},
        "tasks": {"t": {"data": "/home/me/t/1.jsonl, /home/me/t/2.jsonl"}},
        "warnings": ["text /home/me/p.txt is short", "./model"],
        "figures": [1, None, 2.5],
    }
    assert shorten_paths(values, paths) == {
        "recipe": {"model": "model", "text": ["a=y.txt", "hub:o/s", "demo"], "prompts": "p.txt"},
        "tasks": {"t": {"data": "1.jsonl, 2.jsonl"}},
        "warnings": ["text p.txt is short", "model"],
        "figures": [1, None, 2.5],
    }


def test_a_repository_is_no_local_path() -> None:
    record = measured(source={"model": "owner/name", "weights_sha256": ""}, recipe={"model": "owner/name"}, text=SHORT)
    assert local_paths(record_paths(record)) == {}


def test_only_what_compress_writes(compress: Compress, checkpoint: Path, hub: Hub) -> None:
    for name in (".env", "pytorch_model.bin", "notes.txt", "extra.safetensors", "figures/x.py"):
        (checkpoint / name).write_text("SECRET", encoding="utf-8")
    (checkpoint / ".git").mkdir()
    (checkpoint / "figures" / "in.png").symlink_to("/etc/hostname")
    (checkpoint / "LICENSE").write_text("mine", encoding="utf-8")
    done = compress("push", checkpoint, "me/small")
    assert done.code == 0, done.err
    left = {".env", ".git", "pytorch_model.bin", "notes.txt", "extra.safetensors", "figures/x.py", "figures/in.png"}
    assert {line.split()[2] for line in done.out.splitlines() if line.startswith("left out:")} == left
    assert not left & set(hub.sent)
    assert hub.sent["LICENSE"] == b"mine"
    assert b"SECRET" not in b"".join(hub.sent.values())


def test_a_later_result_takes_the_place_of_an_earlier(compress: Compress, compressed: Path, hub: Hub) -> None:
    """In the same commit; what somebody added there stays."""
    shards = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    hub.repos = {"me/small": {"main": [".gitattributes", "compression.json", "NOTES.md", "LICENSE", *shards]}}
    done = compress("push", compressed, "me/small", "--message", "better")
    assert done.code == 0, done.err
    assert hub.removed == shards
    assert hub.commit["commit_message"] == "better"
    assert f"removed there: {', '.join(shards)}" in done.out


def test_another_s_files_are_left_alone(refused: Refused, compress: Compress, compressed: Path, hub: Hub) -> None:
    hub.repos = {"me/small": {"main": [".gitattributes", "model.safetensors"]}}
    assert "add --overwrite" in refused("push", compressed, "me/small")
    assert hub.calls == ["model_info"]
    assert compress("push", compressed, "me/small", "--overwrite").code == 0
    assert "create_commit" in hub.calls


def test_public_stays_refused_for_what_is_private(refused: Refused, compressed: Path, hub: Hub) -> None:
    hub.repos = {"me/small": {"main": [".gitattributes"]}}
    assert "exists and is public" in refused("push", compressed, "me/small", "--private")
    assert hub.calls == ["model_info"]


def test_branches_and_pull_requests(compress: Compress, compressed: Path, hub: Hub) -> None:
    hub.repos = {"me/small": {"main": [".gitattributes"], "old": ["compression.json", "vocab.json"]}}
    assert compress("push", compressed, "me/small", "--branch", "new").code == 0
    assert (hub.calls[1:], hub.commit["revision"]) == (["create_branch new", "create_commit"], "new")
    assert compress("push", compressed, "me/small", "--branch", "old").code == 0
    assert (hub.calls[3:], hub.removed) == (["model_info", "create_commit"], ["vocab.json"])
    done = compress("push", compressed, "me/small", "--create-pr")
    assert "https://hub.example/me/small/discussions/1" in done.out
    assert compress("push", compressed, "me/fresh", "--branch", "b").code == 0
    assert hub.calls[-3:] == ["create_repo None", "create_branch b", "create_commit"]


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (answer(HfHubHTTPError, 401), "does not know the token"),
        (answer(HfHubHTTPError, 403), "may not write to me/small"),
        (answer(RepositoryNotFoundError, 404), "check the owner's name"),
        (answer(HfHubHTTPError, 500, "server error"), "could not be written: server error"),
        (answer(HfHubHTTPError, 400, f"bad header Bearer {TOKEN}"), "bad header Bearer ***"),
        (ConnectionError("network is unreachable"), "network is unreachable"),
        (ValueError("odd"), "could not be written: odd"),
    ],
)
def test_what_the_hub_answers(refused: Refused, compressed: Path, hub: Hub, failure: Exception, words: str) -> None:
    hub.failure = failure
    message = refused("push", compressed, "me/small")
    assert words in message
    assert TOKEN not in message


def test_no_token_in_a_traceback(compressed: Path, hub: Hub) -> None:
    inner = ValueError(f"Bearer {TOKEN}")
    hub.failure = answer(HfHubHTTPError, 500)
    hub.failure.__cause__ = inner
    with pytest.raises(InputError) as caught:
        hub_module.push(compressed, "me/small")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_offline(refused: Refused, compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(compressed.parent)
    assert "HF_HUB_OFFLINE is set" in refused("push", compressed, "me/small")


@pytest.mark.parametrize("repo", ["small", "a/b/c", "", "me/", "me/sm all", "../small", "me/small.git", "https://x/y"])
def test_names_of_repositories(refused: Refused, compressed: Path, hub: Hub, repo: str) -> None:
    assert "give OWNER/NAME" in refused("push", compressed, repo)
    assert hub.calls == []


@pytest.mark.parametrize("branch", ["", " ", "-x", "/x"])
def test_names_of_branches(refused: Refused, compressed: Path, hub: Hub, branch: str) -> None:
    assert "is no name of a branch" in refused("push", compressed, "me/small", f"--branch={branch}")
    assert hub.calls == []


def spoil_config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["replacements"].popitem()
    (directory / "config.json").write_text(json.dumps(config))


def spoil_record(directory: Path) -> None:
    record = json.loads((directory / "compression.json").read_text())
    record["parameters"]["after"] -= 1
    (directory / "compression.json").write_text(json.dumps(record))


def link_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "weights")
    (directory / "model.safetensors").symlink_to(directory.parent / "weights")


def cut_weights(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 5000)


SPOILED = {
    "no config": (lambda d: (d / "config.json").unlink(), "lacks config.json"),
    "no code": (lambda d: (d / "modeling_compressor.py").unlink(), "lacks modeling_compressor.py"),
    "no record": (lambda d: (d / "compression.json").unlink(), "was not written by compress"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no safetensors weights"),
    "no tokenizer": (lambda d: [f.unlink() for f in d.glob("tokenizer*")], "tokenizer"),
    "other config": (spoil_config, "lacks 4 tensors"),
    "other record": (spoil_record, "do not belong together"),
    "half of the weights": (cut_weights, "damaged"),
    "a link": (link_weights, "is a symbolic link"),
    "bad recipe": (lambda d: (d / "recipe.yaml").write_text("a: ["), "recipe.yaml"),
    "bad card": (lambda d: (d / "README.md").write_text("---\nlicense: My Own\n---\n"), "license"),
    "no metadata": (lambda d: (d / "README.md").write_text("# hello\n"), "no metadata"),
    "binary card": (lambda d: (d / "README.md").write_bytes(b"\xff\xfe"), "cannot be read"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_not_whole(refused: Refused, checkpoint: Path, hub: Hub, case: str) -> None:
    spoil, words = SPOILED[case]
    spoil(checkpoint)
    assert words in refused("push", checkpoint, "me/small")
    assert words in refused("push", checkpoint, "me/small", "--dry-run")
    assert hub.calls == []


def test_what_is_no_checkpoint(refused: Refused, models: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert "does not exist" in refused("push", tmp_path / "nowhere", "me/small")
    assert "was not written by compress" in refused("push", models / "gpt2", "me/small")
    partial = checkpoint.rename(checkpoint.with_name(".small.partial-abcd1234"))
    assert "half done" in refused("push", partial, "me/small")


def test_a_card_that_somebody_wrote_in_is_sent_as_it_is(checkpoint: Path, hub: Hub) -> None:
    file = checkpoint / "README.md"
    edited = (
        file.read_text(encoding="utf-8").replace("---\n", "---\nlicense: mit\ndate: 2020-02-02\n", 1)
        + "\nMy own words.\n"
    )
    file.write_text(edited, encoding="utf-8")
    record = hub_module.push(checkpoint, "me/small")
    assert hub.sent["README.md"].decode() == edited
    assert (record.card["license"], record.card["date"]) == ("mit", "2020-02-02")
    assert "README.md is sent as it is" in record.notes


def test_a_card_that_is_missing_is_made_anew(checkpoint: Path, hub: Hub) -> None:
    (checkpoint / "README.md").unlink()
    record = read_record(checkpoint)
    hub_module.push(checkpoint, "me/small")
    assert hub.sent["README.md"].decode() == card(record, picture=True, repo="me/small")
    assert ModelCard(hub.sent["README.md"].decode()).data.get("model_name") == "gpt2-compressed"


def test_shards_and_no_measurements(compress: Compress, tmp_path: Path, hub: Hub) -> None:
    """What `compressor.save` writes, and a model in several files."""
    model = zoo.compressed("llama")
    compressor.save(model, zoo.tiny_tokenizer(), tmp_path / "saved")
    done = compress("push", tmp_path / "saved", "me/small")
    assert done.code == 0, done.err
    assert "warning: the card names no license" in done.out
    shutil.rmtree(tmp_path / "saved")
    compressor.save(model, zoo.tiny_tokenizer(), tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").unlink()
    written = zoo.write(model, tmp_path / "sharded", max_shard_size="20KB")
    for file in (*written.glob("*.safetensors"), written / "model.safetensors.index.json"):
        shutil.copy(file, tmp_path / "saved")
    hub.sent.clear()
    assert compress("push", tmp_path / "saved", "me/small").code == 0
    names = {file.name for file in written.iterdir() if "safetensors" in file.name}
    assert len(names) > 2
    assert names <= set(hub.sent)


class Service(BaseHTTPRequestHandler):
    """As much of the Hub as a push talks to; the commit is kept as it came."""

    commits: ClassVar[list[list[dict[str, Any]]]] = []
    headings: ClassVar[list[str | None]] = []
    exists = False

    def reply(self, status: int, body: Any = None, **headers: str) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.reply(200)

    def do_GET(self) -> None:
        if not Service.exists:
            self.reply(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        else:
            siblings = [{"rfilename": ".gitattributes"}]
            self.reply(200, {"id": "me/small", "private": False, "sha": "0" * 40, "siblings": siblings, "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        Service.headings.append(self.headers["Authorization"])
        address = f"http://{self.headers['Host']}/me/small"
        if self.path == "/api/repos/create":
            Service.exists = True
            self.reply(200, {"url": address, "name": "me/small", "id": "1"})
        elif self.path.startswith("/api/models/me/small/preupload/"):
            files = json.loads(body)["files"]
            self.reply(
                200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        elif self.path.startswith("/api/models/me/small/commit/"):
            Service.commits.append([json.loads(line) for line in body.splitlines()])
            self.reply(200, {"success": True, "commitOid": "c0ffee", "commitUrl": f"{address}/commit/c0ffee"})
        else:
            self.reply(200, {"errors": [], "warnings": []})

    def log_message(self, *_: Any) -> None:
        pass


def test_the_real_client(compress: Compress, compressed: Path, monkeypatch: pytest.MonkeyPatch, no_token: None) -> None:
    """Everything that huggingface_hub does between here and the wire."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(hub_module, "open_client", OPEN_CLIENT)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        first = compress("push", compressed, "me/small", "--message", "hello")
        again = compress("push", compressed, "me/small", "--private")
    finally:
        server.shutdown()
        server.server_close()
    assert first.code == 0, first.err
    assert "(commit c0ffee)" in first.out
    assert len(Service.commits) == 1, "it changes in one step"
    head, *entries = Service.commits[0]
    assert (head["key"], head["value"]["summary"]) == ("header", "hello")
    sent = {entry["value"]["path"]: base64.b64decode(entry["value"]["content"]) for entry in entries}
    assert set(sent) == {str(path.relative_to(compressed)) for path in compressed.rglob("*") if path.is_file()}
    assert sent["model.safetensors"] == (compressed / "model.safetensors").read_bytes()
    assert set(Service.headings) == {f"Bearer {TOKEN}"}, "the token goes to the Hub"
    assert TOKEN not in first.out + first.err
    assert again.code == 2
    assert "exists and is public" in again.errors[0]


@pytest.fixture(scope="module")
def exports(compress: Compress, deployed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of a compressed Llama in every form; no test may change them."""
    folder = tmp_path_factory.mktemp("exports") / "all"
    shutil.copytree(deployed, folder)
    for form in ("hf-dense", "vllm"):
        done = compress("export", folder / "small", "--to", form, "--out", folder / form, "--force")
        assert done.code == 0, done.err
    return folder


def test_a_gguf_file_is_sent_with_a_card_and_its_record(
    compress: Compress, exports: Path, hub: Hub, tmp_path: Path
) -> None:
    done = compress("push", exports / "q8_0.gguf", "me/small-gguf")
    assert done.code == 0, done.err
    assert set(hub.sent) == {"q8_0.gguf", "README.md", "export.json"}
    assert hub.sent["q8_0.gguf"] == (exports / "q8_0.gguf").read_bytes()
    text = hub.sent["README.md"].decode()
    assert list_problems(text) == []
    assert "llama-cli --hf-repo me/small-gguf --hf-file q8_0.gguf" in text
    assert "the checkpoint's perplexity, as recorded" in text
    assert ModelCard(text).data.library_name == "gguf"
    record = json.loads(hub.sent["export.json"])
    printed = json.loads((exports / "q8_0.gguf.json").read_text())
    assert record == {key: value for key, value in printed.items() if key not in ("out", "bytes", "seconds")}
    for content in (hub.sent["README.md"], hub.sent["export.json"]):
        assert str(exports.parent.parent).encode() not in content
    for name, content in hub.sent.items():
        (tmp_path / name).write_bytes(content)
    assert compress("info", tmp_path / "q8_0.gguf").code == 0


@pytest.mark.parametrize("form", ["hf-dense", "vllm", "graph"])
def test_an_exported_directory_is_sent_whole(compress: Compress, exports: Path, hub: Hub, form: str) -> None:
    before = tree(exports / form)
    done = compress("push", exports / form, "me/small", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["left_out"] == {}
    assert set(hub.sent) == {name for name, content in before.items() if content is not None}
    assert all(hub.sent[name] == content for name, content in before.items() if content and name != "README.md")
    text = hub.sent["README.md"].decode()
    named = {"hf-dense": 'from_pretrained("me/small")', "vllm": "vllm serve me/small --trust", "graph": '"DIRECTORY/'}
    assert named[form] in text
    assert ("DIRECTORY" in text) == (form == "graph")
    assert list_problems(text) == []
    assert tree(exports / form) == before


def test_a_dry_run_of_an_export_asks_nobody(compress: Compress, exports: Path, hub: Hub) -> None:
    for name, files in (("q8_0.gguf", {"q8_0.gguf", "README.md", "export.json"}), ("graph", {"model.onnx"})):
        done = compress("push", exports / name, "me/small", "--dry-run")
        assert done.code == 0, done.err
        assert "nothing was sent: --dry-run" in done.out
        assert all(file in done.out for file in files)
    assert hub.calls == []


def test_precisions_of_one_model_share_a_repository(compress: Compress, exports: Path, hub: Hub) -> None:
    hub.repos = {"me/gguf": {"main": [".gitattributes", "README.md", "export.json", "f32.gguf", "config.json"]}}
    assert compress("push", exports / "q8_0.gguf", "me/gguf").code == 0
    assert hub.removed == []


def test_an_exported_directory_takes_the_place_of_an_earlier(compress: Compress, exports: Path, hub: Hub) -> None:
    hub.repos = {"me/dense": {"main": ["export.json", "model-00001-of-00002.safetensors", "model.onnx", "NOTES.md"]}}
    assert compress("push", exports / "hf-dense", "me/dense").code == 0
    assert hub.removed == ["model-00001-of-00002.safetensors", "model.onnx"]


def test_a_checkpoint_is_not_replaced_by_its_export(
    refused: Refused, compress: Compress, exports: Path, hub: Hub
) -> None:
    hub.repos = {"me/small": {"main": ["compression.json", "model.safetensors"]}}
    for name in ("q8_0.gguf", "hf-dense"):
        assert "no export.json, so it holds something else" in refused("push", exports / name, "me/small")
    hub.repos = {"me/small": {"main": ["export.json", "small.gguf"]}}
    assert "no compression.json, so it holds something else" in refused("push", exports / "small", "me/small")
    assert "create_commit" not in hub.calls


def test_only_what_an_export_has(compress: Compress, exports: Path, hub: Hub, tmp_path: Path) -> None:
    dense = Path(shutil.copytree(exports / "hf-dense", tmp_path / "dense"))
    (dense / ".env").write_text("SECRET")
    (dense / "model.onnx").write_text("SECRET")
    (dense / "LICENSE").write_text("mine")
    (dense / "README.md").unlink()
    done = compress("push", dense, "me/small", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert set(report["left_out"]) == {".env", "model.onnx"}
    assert report["notes"] == ["README.md was made anew: there was none"]
    assert b"SECRET" not in b"".join(hub.sent.values())
    assert hub.sent["LICENSE"] == b"mine"
    assert list_problems(hub.sent["README.md"].decode()) == []


def test_what_is_no_export_is_refused(refused: Refused, exports: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not a GGUF file" in refused("push", tmp_path / "notes.txt", "me/x")
    assert "does not exist" in refused("push", tmp_path / "nothing.gguf", "me/x")
    content = (exports / "q8_0.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(content[: len(content) // 2])
    assert "is damaged" in refused("push", tmp_path / "half.gguf", "me/x")
    (tmp_path / "model.bin").write_bytes(content)
    assert "does not end in .gguf" in refused("push", tmp_path / "model.bin", "me/x")
    (tmp_path / "link.gguf").symlink_to(exports / "q8_0.gguf")
    assert "is a symbolic link" in refused("push", tmp_path / "link.gguf", "me/x")
    broken = Path(shutil.copytree(exports / "hf-dense", tmp_path / "broken"))
    (broken / "model.safetensors").unlink()
    assert "model.safetensors" in refused("push", broken, "me/x")
    zoo.save_tiny("gpt2", tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", broken)
    assert "they do not belong together" in refused("push", broken, "me/x")
    graph = Path(shutil.copytree(exports / "graph", tmp_path / "graph"))
    (graph / "model.onnx").write_bytes(b"\0" * (2**20 - 7) + b"model.onnx.data")
    assert "lacks model.onnx.data" in refused("push", graph, "me/x")
    (graph / "model.onnx").unlink()
    assert "lacks model.onnx" in refused("push", graph, "me/x")
    assert hub.calls == []
