"""What can be had: memory within every limit, the free disk; and the line for what could not be had."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Compress
from safetensors.torch import save_file

from compressor.runtime.errors import InputError, disk_reason, report_error
from compressor.runtime.resources import available_memory, cgroup_limits, format_bytes, free_disk, require_disk

ROOT = Path(__file__).parents[2]
GB = 2**30


def write(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_every_group_above_the_process_counts(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "self"
    own.write_text("0::/outer/inner\n")
    write(root / "outer", memory__max=4 * GB, memory__current=3 * GB, memory__stat=f"anon 5\ninactive_file {GB}")
    write(root / "outer" / "inner", memory__max="max", memory__current=GB)
    assert list(cgroup_limits(root, own)) == [2 * GB]
    write(root / "outer" / "inner", memory__max=GB + 5)
    assert list(cgroup_limits(root, own)) == [5, 2 * GB]
    own.write_text("0::/of/the/host\n")  # a container that sees its own group as the root
    write(root, memory__max=7, memory__current=3)
    assert list(cgroup_limits(root, own)) == [4]


def test_the_first_version_of_groups(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "self"
    own.write_text("3:cpu,cpuacct:/a\n2:memory:/a\n1:name=systemd:/\n")
    write(
        root / "memory" / "a",
        memory__limit_in_bytes=100,
        memory__usage_in_bytes=90,
        memory__stat="total_inactive_file 7",
    )
    assert list(cgroup_limits(root, own)) == [17]
    assert list(cgroup_limits(root, tmp_path / "missing")) == []


def test_memory_of_this_process() -> None:
    assert 0 < available_memory() <= 1.1 * psutil.virtual_memory().available + GB
    code = (
        "import resource; from compressor.runtime.resources import available_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); print(available_memory())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < GB


def test_disk_is_refused_before_the_work(tmp_path: Path) -> None:
    place = tmp_path / "not" / "yet"
    free = free_disk(place)
    assert require_disk("the result", 1, place, "").startswith("the result: about 1 kB on disk (")
    with pytest.raises(InputError, match=r"the result needs .* GB of disk, and .*yet has .* GB; go elsewhere"):
        require_disk("the result", 2 * free + GB, place, "go elsewhere")
    with pytest.raises(InputError, match=r"the result needs .* GB of disk"):
        require_disk("the result", 1, place, "", spare=2 * free + GB)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        *[(1, "1 kB"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1.0 MB"), (6_720_384, "6.7 MB")],
        *[(9_949_999, "9.9 MB"), (9_950_000, "10 MB"), (264_241_152, "264 MB"), (999_499_999, "999 MB")],
        *[(999_500_000, "1.0 GB"), (3 * 10**9 // 2, "1.5 GB"), (2**40, "1,099.5 GB")],
    ],
)
def test_a_megabyte_is_a_million_bytes(size: int, words: str) -> None:
    assert format_bytes(size) == words


def test_a_disk_that_is_too_small_is_told_by_the_command(
    compress: Compress, models: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.runtime.resources.free_disk", lambda _: 10**7)
    done = compress(models / "gpt2", *options, "--max-dppl", "5%", "--out", tmp_path / "small")
    assert done.code == 2
    assert len(done.errors) == 1
    assert f"needs 10 MB of disk, and {tmp_path / 'small'} has 10 MB; name another --out" in done.errors[0]
    assert list(tmp_path.iterdir()) == []


def allocation() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


def wrapped() -> BaseException:
    error = InputError("the model cannot be loaded: DefaultCPUAllocator …")
    error.__cause__ = allocation()
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        allocation(),
        wrapped(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_out_of_memory_is_one_line(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(error) == 2
    assert capsys.readouterr().err == "error: out of memory; try a smaller --batch-size, --seq-len or model\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_out_of_disk_is_one_line(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(OSError(number, "…")) == 2
    reason = os.strerror(number)
    assert capsys.readouterr().err == f"error: out of disk ({reason}); make room and give the same command again\n"


def test_the_reason_in_the_words_of_rust(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="os error") as caught:
        save_file({"a": torch.zeros(1)}, tmp_path / "missing" / "file")
    assert disk_reason(caught.value) == "No such file or directory"
    assert disk_reason(ValueError("nothing of the kind")) is None
