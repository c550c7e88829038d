"""Nothing is lost: SIGKILLs at random moments of the whole job, each followed by the same command to its end.

    python benchmarks/crash.py [--kills 30] [--seed 0] [--threads 2] [--keep DIR] [-- OPTIONS OF COMPRESS]

Runs `compress demo --max-dppl 1.0` once without a disturbance, then as often as asked with a cache and an output of its
own, kills it at a moment drawn evenly from that run's time, looks at what is there (goal: the output absent, or
complete and loadable), and gives the same command again (goal: it finishes, with the same bytes of model.safetensors).
For every kill the share of the finished work that was repeated is

    (seconds before the kill + seconds of the second run − seconds of an undisturbed run) ÷ seconds before the kill,

each without its start (until the model is loaded), in seconds of the processor, for the clock also counts what else
the machine does. Last comes a disk
that is full: a tmpfs when root runs this, else a limit on the size of files. What stands behind `--` goes to compress,
such as `-- --calib-tokens 4096`; `--objective size` takes the clock out of the search, which may otherwise come to
another plan when the machine is busy.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
COMMAND = ["demo", "--max-dppl", "1.0"]
LOADED = "the result: about"  # what compress says when the model is loaded and the work begins


@dataclass
class Run:
    """One run of the command: how it ended, how long it took after its start, and what it said."""

    code: int = 0
    started: float = 0.0  # seconds of the processor until the work began, and after that
    worked: float = 0.0
    lasted: float = 0.0  # seconds of the clock after that
    lines: list[str] = field(default_factory=list)

    @property
    def stage(self) -> str:
        return next((line.split(":")[0].strip() for line in reversed(self.lines) if ":" in line), "start")


class Bench:
    def __init__(self, threads: int, options: list[str]) -> None:
        self.options = options
        threads_of = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), **threads_of}

    def run(self, place: Path, kill: float | None = None, prepare: Callable[[], None] | None = None) -> Run:
        """The command in this place; `kill` seconds after the work began it is killed."""
        arguments = [*COMMAND, *self.options, "--out", str(place / "out"), "--cache", str(place / "cache")]
        process = subprocess.Popen(
            [sys.executable, "-m", "compressor", *arguments],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,
        )
        found = Run()
        timer = None
        began = 0.0
        assert process.stderr is not None
        for line in process.stderr:
            found.lines.append(line.rstrip())
            if line.startswith(LOADED):
                began = time.perf_counter()
                found.started = sum(psutil.Process(process.pid).cpu_times()[:2])
                if kill is not None:
                    timer = threading.Timer(kill, process.kill)
                    timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        found.code = process.returncode = os.waitstatus_to_exitcode(status)
        if timer is not None:
            timer.cancel()
        found.worked = usage.ru_utime + usage.ru_stime - found.started
        found.lasted = time.perf_counter() - began
        return found


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def look(place: Path) -> str:
    """What a user finds in the place of the output: absent, complete, or BROKEN."""
    out = place / "out"
    if not out.exists():
        return "absent"
    code = (
        "import sys, torch, compressor; from compressor.models.load import load_model\n"
        "model, _ = load_model(sys.argv[1], allow_compressed=True)\n"
        "assert torch.isfinite(model(torch.arange(9)[None]).logits).all()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, str(out)], env=environment, capture_output=True, check=False)
    return "BROKEN" if done.returncode else "complete"


def leftovers(place: Path) -> list[str]:
    """Temporary files that should be gone."""
    found = [path.name for path in place.iterdir() if path.name not in ("out", "cache")]
    return found + [path.name for path in (place / "cache").glob(".*")]


def fill_disk(bench: Bench, place: Path, kept: Path) -> bool:
    """The last step on a disk that is too small: one error line, and nothing half-written."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=17m", "tmpfs", str(place)], capture_output=True, check=False
    )
    on_tmpfs = mounted.returncode == 0
    try:
        (place / "cache").symlink_to(kept)
        if on_tmpfs:
            # Room for the estimate when the run starts, and taken by someone else as soon as the work begins.
            filler = threading.Thread(target=take_room, args=(place,))
            filler.start()
            done = bench.run(place)
            filler.join()
            (place / "filler").unlink()
        else:
            done = bench.run(
                place, prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            )
        errors = [line for line in done.lines if line.startswith("error:")]
        left = [path.name for path in place.iterdir() if path.name != "cache"]
        print(f"disk full ({'tmpfs' if on_tmpfs else 'RLIMIT_FSIZE'}): exit {done.code}, {errors}, left behind: {left}")
        return done.code == 2 and len(errors) == 1 and not left
    finally:
        if on_tmpfs:
            subprocess.run(["umount", "-l", str(place)], check=True)


def take_room(place: Path) -> None:
    """Wait until the run has the lock and has looked at the disk, then fill it."""
    while not (place / ".out.lock").exists():
        time.sleep(0.01)
    until = time.monotonic() + 600
    while not list(place.glob(".out.partial-*")) and time.monotonic() < until:
        time.sleep(0.001)
    try:
        with (place / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    except OSError:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--keep", type=Path, help="directory for all that is written  [a temporary one]")
    parser.add_argument("options", nargs="*", help="for compress, behind --")
    args = parser.parse_args()
    root = args.keep or Path(tempfile.mkdtemp(prefix="compressor-crash-"))
    bench = Bench(args.threads, args.options)
    rng = random.Random(args.seed)

    whole = bench.run(root / "whole")
    if whole.code:
        sys.exit("\n".join(whole.lines))
    expected = digest(root / "whole" / "out")
    print(f"undisturbed: {whole.started:.1f} s to start, {whole.worked:.1f} s of work, {expected[:12]}", flush=True)
    print(f"{'kill at':>8} {'stage':32} {'output':>9} {'again':>6} {'seconds':>8} {'same':>5} {'repeated':>9}")
    sound = finished = same = clean = 0
    worked = repeated = 0.0
    for number in range(args.kills):
        place = root / f"kill{number}"
        killed = bench.run(place, kill=rng.uniform(0, whole.lasted))
        found = look(place)
        again = bench.run(place) if found == "absent" else Run()
        done = again.code == 0 and look(place) == "complete"
        equal = done and digest(place / "out") == expected
        ended = killed.code == 0  # before the kill: nothing was interrupted, and nothing repeated
        more = 0.0 if ended else killed.worked + again.worked - whole.worked
        stage = "(ended before the kill)" if ended else killed.stage[:32]
        sound, finished, same = sound + (found != "BROKEN"), finished + done, same + equal
        clean += not leftovers(place)
        worked, repeated = worked + (0 if ended else killed.worked), repeated + more
        print(
            f"{killed.worked:7.1f}s {stage:32} {found:>9} {again.code:6} {again.worked:8.1f} "
            f"{'yes' if equal else 'NO':>5} {more / killed.worked:9.1%}",
            flush=True,
        )
        if args.keep is None:
            shutil.rmtree(place)
    kills = args.kills
    print(f"absent or complete {sound}/{kills}, finished by the same command {finished}/{kills}, ", end="")
    print(f"byte-identical {same}/{kills}, nothing left behind {clean}/{kills}")
    if worked:
        print(f"repeated work: {repeated:.0f} s of {worked:.0f} s that had been done ({repeated / worked:.1%})")
    full = fill_disk(bench, root / "full", root / "whole" / "cache")
    if args.keep is None:
        shutil.rmtree(root)
    sys.exit(0 if sound == finished == same == clean == kills and full else 1)


if __name__ == "__main__":
    main()
