"""A resumable queue of subprocesses: one unit of work each, a few at a time, one log file per unit.

What is done is asked of the unit's output, never remembered, so a killed queue is simply run again. A unit is
guarded by a lock held by the queue and by its subprocess: two queues over the same units share the work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from lora_spec.errors import LoraSpecError
from lora_spec.paths import rel

# What receives the lines that tell of a long work.
Say = Callable[[str], None]

_POLL_S = 0.1
_GRACE_S = 10.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Runs in the child first: asks Linux to kill it when the queue dies (even by SIGKILL), then becomes the unit.
_GUARD = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (AttributeError, OSError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit("the queue ended before the unit began")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class QueueError(LoraSpecError):
    """Units failed; the others were run."""

    default_code = "queue"


@dataclass(frozen=True)
class Unit:
    """One unit of work.

    Attributes:
        name: unique in the queue; also names its log and lock files.
        argv: command line.
        is_done: whether the output is there and verified; asked before the unit is run and after it ended.
        env: environment variables added to the queue's own.
    """

    name: str
    argv: Sequence[str]
    is_done: Callable[[], bool]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class QueueReport:
    """Names of the units that were done before, and of those that got done now (by this queue or another)."""

    skipped: tuple[str, ...]
    completed: tuple[str, ...]


@dataclass
class _Running:
    unit: Unit
    process: subprocess.Popen[bytes]
    lock: int
    started: float


class _Terminated(BaseException):
    """SIGTERM arrived; carried through the queue so that it ends its children first."""


def run_queue(
    units: Sequence[Unit],
    *,
    workers: int = 2,
    threads_per_worker: int = 1,
    log_dir: Path | str,
    progress: bool = True,
) -> QueueReport:
    """Run every unit that is not done, at most ``workers`` at a time.

    A failing unit does not stop the others. When the queue is interrupted or killed, its children end too.

    Args:
        units: in the order to start them.
        workers: subprocesses at a time.
        threads_per_worker: numeric threads each subprocess may use.
        log_dir: receives ``<unit>.log`` (rewritten by each run of the unit) and ``<unit>.lock``.
        progress: show a bar on a terminal, else one line per unit, on stderr.

    Raises:
        QueueError: one or more units failed; names them and their logs.
        ValueError: two units share a name, or a name is no file name.
    """
    _check_names(units)
    directory = Path(log_dir)
    directory.mkdir(parents=True, exist_ok=True)
    skipped = [unit.name for unit in units if unit.is_done()]
    pending = [unit for unit in units if unit.name not in set(skipped)]
    completed: list[str] = []
    failed: dict[str, str] = {}
    running: list[_Running] = []
    with _terminate_as_exception(), _Progress(len(units), len(skipped), progress) as bar:
        try:
            while pending or running:
                _start_free(pending, running, workers, threads_per_worker, directory, completed, bar)
                time.sleep(_POLL_S)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    problem = _problem(job)
                    os.close(job.lock)
                    if problem:
                        failed[job.unit.name] = problem
                    else:
                        completed.append(job.unit.name)
                    bar.tick(job.unit.name, f"{problem or 'done'} ({time.monotonic() - job.started:.0f} s)")
        except BaseException:
            _end(running)
            raise
    if failed:
        raise _failure(failed, directory)
    return QueueReport(tuple(skipped), tuple(completed))


def _check_names(units: Sequence[Unit]) -> None:
    names = [unit.name for unit in units]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two units are named {twice[0]}")
    for name in names:
        if not name or name.startswith(".") or Path(name).name != name:
            raise ValueError(f"a unit cannot be named {name!r}")


def _start_free(
    pending: list[Unit],
    running: list[_Running],
    workers: int,
    threads: int,
    directory: Path,
    completed: list[str],
    bar: _Progress,
) -> None:
    """Start pending units until all workers are busy; those another queue holds stay pending."""
    for unit in list(pending):
        if len(running) >= workers:
            return
        lock = _try_lock(directory / f"{unit.name}.lock")
        if lock is None:
            continue
        pending.remove(unit)
        # Another queue may have done it while this one waited for the lock.
        if unit.is_done():
            os.close(lock)
            completed.append(unit.name)
            bar.tick(unit.name, "done by another queue")
            continue
        running.append(_start(unit, lock, threads, directory))


def _try_lock(path: Path) -> int | None:
    """An exclusive lock that ends with its holders, however they end; None while another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _start(unit: Unit, lock: int, threads: int, directory: Path) -> _Running:
    environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads)) | dict(unit.env)
    with open(directory / f"{unit.name}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _GUARD, str(os.getpid()), *map(str, unit.argv)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(lock,),
            start_new_session=True,
        )
    return _Running(unit, process, lock, time.monotonic())


def _problem(job: _Running) -> str | None:
    code = job.process.returncode
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code:
        return f"failed with exit code {code}"
    return None if job.unit.is_done() else "ended without its output"


def _end(running: Sequence[_Running]) -> None:
    """End the subprocesses and what they started: ask first, then kill."""
    for job in running:
        _signal_group(job.process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for job in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(max(0.0, deadline - time.monotonic()))
        _signal_group(job.process, signal.SIGKILL)
        job.process.wait()
        os.close(job.lock)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _terminate_as_exception() -> Iterator[None]:
    """Let SIGTERM unwind the queue, then end the process as SIGTERM does."""

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    try:
        before: Any = signal.signal(signal.SIGTERM, on_sigterm)
    except ValueError:  # not in the main thread: the caller's handling stands
        yield
        return
    try:
        yield
    except _Terminated:
        sys.exit(128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(failed: Mapping[str, str], directory: Path) -> QueueError:
    first, problem = next(iter(failed.items()))
    reason = _last_line(directory / f"{first}.log")
    others = f"; also failed: {', '.join(list(failed)[1:])}" if len(failed) > 1 else ""
    return QueueError(
        f"{len(failed)} units failed: {first} {problem}{f' ({reason})' if reason else ''}{others}"
        if len(failed) > 1
        else f"unit {first} {problem}{f' ({reason})' if reason else ''}",
        where=rel(directory / f"{first}.log") if len(failed) == 1 else f"logs in {rel(directory)}",
        fix="what was done is kept; mend the cause and run it again",
    )


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("lora-spec: error: ")[:300].rstrip(".") if lines else ""


class _Progress:
    """A bar on a terminal; elsewhere one line per unit, so that logs stay readable."""

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        self.enabled, self.total, self.count = enabled, total, done
        self.bar = tqdm(total=total, initial=done, unit="unit", disable=not (enabled and sys.stderr.isatty()))

    def __enter__(self) -> _Progress:
        if self.enabled and self.bar.disable and self.count:
            print(f"[{self.count}/{self.total}] done before", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def tick(self, name: str, text: str) -> None:
        self.count += 1
        self.bar.set_postfix_str(name, refresh=False)
        self.bar.update()
        if self.enabled and self.bar.disable:
            print(f"[{self.count}/{self.total}] {name}: {text}", file=sys.stderr, flush=True)
