"""The queue: failures, resuming, being killed, and two queues over the same units."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_spec.queue import QueueError, Unit, run_queue

WRITE = "import sys, os; p = sys.argv[1]; open(p + '.part', 'a').write('x'); os.replace(p + '.part', p)"


def write_unit(folder: Path, name: str, code: str = WRITE) -> Unit:
    out = folder / f"{name}.out"
    return Unit(name, [sys.executable, "-c", code, str(out)], out.is_file)


def wait_until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_runs_all_and_then_nothing(tmp_path: Path) -> None:
    units = [write_unit(tmp_path, f"u{i}") for i in range(3)]
    first = run_queue(units, workers=2, log_dir=tmp_path / "logs")
    assert sorted(first.completed) == ["u0", "u1", "u2"] and first.skipped == ()
    second = run_queue(units, workers=2, log_dir=tmp_path / "logs")
    assert second.skipped == ("u0", "u1", "u2") and second.completed == ()


def test_failing_unit_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    bad = write_unit(tmp_path, "bad", "import sys; print('cause of it'); sys.exit(3)")
    units = [bad, write_unit(tmp_path, "good")]
    with pytest.raises(QueueError, match=r"unit bad failed with exit code 3 \(cause of it\)") as caught:
        run_queue(units, workers=1, log_dir=tmp_path / "logs")
    assert "bad.log" in str(caught.value)
    assert (tmp_path / "good.out").is_file()
    assert run_queue([units[1]], log_dir=tmp_path / "logs").skipped == ("good",)


def test_all_failures_are_named(tmp_path: Path) -> None:
    units = [write_unit(tmp_path, name, "raise SystemExit(1)") for name in ("a", "b")]
    with pytest.raises(QueueError, match=r"2 units failed: .*also failed"):
        run_queue(units, log_dir=tmp_path / "logs")


def test_success_without_output_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(QueueError, match="ended without its output"):
        run_queue([write_unit(tmp_path, "idle", "pass")], log_dir=tmp_path / "logs")


def test_killed_unit_is_named(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(QueueError, match="killed by SIGKILL"):
        run_queue([write_unit(tmp_path, "u", code)], log_dir=tmp_path / "logs")


def test_thread_limits_and_environment_reach_the_unit(tmp_path: Path) -> None:
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['OMP_NUM_THREADS'] + os.environ['EXTRA'])"
    unit = write_unit(tmp_path, "u", code)
    run_queue(
        [Unit(unit.name, unit.argv, unit.is_done, {"EXTRA": "!"})],
        threads_per_worker=3,
        log_dir=tmp_path / "logs",
    )
    assert (tmp_path / "u.out").read_text() == "3!"


def test_never_more_than_the_workers(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; d = os.path.dirname(sys.argv[1]); mark = sys.argv[1] + '.on';"
        "open(mark, 'w').close();"
        "n = sum(f.endswith('.on') for f in os.listdir(d)); time.sleep(.2); os.remove(mark);"
        "open(sys.argv[1], 'w').write(str(n))"
    )
    units = [write_unit(tmp_path, f"u{i}", code) for i in range(4)]
    run_queue(units, workers=2, log_dir=tmp_path / "logs")
    assert {(tmp_path / f"u{i}.out").read_text() for i in range(4)} <= {"1", "2"}


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden"])
def test_refuses_a_name_that_is_no_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="named"):
        run_queue([Unit(name, ["true"], lambda: True)], log_dir=tmp_path / "logs")


def test_refuses_two_units_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two units"):
        run_queue([write_unit(tmp_path, "u"), write_unit(tmp_path, "u")], log_dir=tmp_path / "logs")


def test_one_line_per_unit_where_there_is_no_terminal(tmp_path: Path, capsys) -> None:
    run_queue([write_unit(tmp_path, "u0"), write_unit(tmp_path, "u1")], log_dir=tmp_path / "logs")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("done" in line for line in lines)


QUEUE = """
import sys
from pathlib import Path
from lora_spec.queue import Unit, run_queue
folder, seconds = Path(sys.argv[1]), sys.argv[2]
code = '''
import os, sys, time
out = sys.argv[1]
open(out + ".pid", "w").write(str(os.getpid()))
open(out + ".part", "w").write("half")
time.sleep(float(sys.argv[2]))
os.replace(out + ".part", out)
'''
units = [
    Unit(n, [sys.executable, "-c", code, str(folder / n), seconds], (folder / n).is_file) for n in "abc"
]
run_queue(units, workers=2, log_dir=folder / "logs")
"""


def start_queue(folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", QUEUE, str(folder), str(seconds)],
        stderr=subprocess.DEVNULL,
        # A shell's background job inherits an ignored SIGINT, which Python would respect.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_queue_ends_its_units_and_resumes(tmp_path: Path, number: signal.Signals) -> None:
    queue = start_queue(tmp_path, 60)
    marks = [tmp_path / "a.pid", tmp_path / "b.pid"]
    wait_until(lambda: all(mark.is_file() and mark.read_text() for mark in marks))
    pids = [int(mark.read_text()) for mark in marks]
    queue.send_signal(number)
    assert queue.wait(20) != 0
    wait_until(lambda: not any(is_running(pid) for pid in pids))
    assert not any((tmp_path / name).exists() for name in "abc")
    assert not (tmp_path / "c.pid").exists()
    assert start_queue(tmp_path, 0).wait(30) == 0
    assert all((tmp_path / name).is_file() for name in "abc")


def test_two_queues_share_the_units(tmp_path: Path) -> None:
    """Each unit runs once, and both queues end when all are done."""
    code = (
        "import sys, time; o = sys.argv[1]; open(o + '.runs', 'a').write('x'); time.sleep(.5); open(o, 'w')"
    )
    script = (
        "import sys\nfrom pathlib import Path\nfrom lora_spec.queue import Unit, run_queue\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"argv = [sys.executable, '-c', {code!r}]\n"
        "units = [Unit(n, [*argv, str(folder / n)], (folder / n).is_file) for n in 'abc']\n"
        "run_queue(units, workers=1, log_dir=folder / 'logs')\n"
    )
    queues = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [queue.wait(30) for queue in queues] == [0, 0]
    assert [(tmp_path / f"{name}.runs").read_text() for name in "abc"] == ["x", "x", "x"]


def test_lock_of_a_dead_queue_does_not_hold(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "u.lock").write_text(str(os.getpid()))
    assert run_queue([write_unit(tmp_path, "u")], log_dir=tmp_path / "logs").completed == ("u",)
