"""A real vLLM server in a process of its own, and a client for it. Nothing here imports vllm."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_spec.errors import EngineError, printable
from lora_spec.paths import rel

HOST = "127.0.0.1"

# A server on the CPU, without the network. `vllm serve` looks for a distribution called vllm, which the CPU
# build is not; the module runs.
MODULE = "vllm.entrypoints.openai.api_server"
ARGUMENTS = ("--generation-config", "vllm", "--enforce-eager", "--disable-uvicorn-access-log")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_POLL_S = 0.25


@dataclass(frozen=True)
class Response:
    """Answer to one HTTP request: `body` is parsed JSON, or text where it is none."""

    status: int
    body: Any

    @property
    def message(self) -> str:
        """What an error in vLLM's format says; "" for other answers."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("message", "")) if isinstance(error, dict) else ""


class Client:
    """Plain HTTP requests to one server, a connection each; may be shared by threads.

    Args:
        port: of the server on this machine.
        timeout_s: for one request.
    """

    def __init__(self, port: int, timeout_s: float = 300.0) -> None:
        self.port = port
        self.timeout_s = timeout_s

    def get(self, path: str) -> Response:
        """GET a path.

        Raises:
            OSError: no connection, or it broke.
        """
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any) -> Response:
        """POST a JSON body, or bytes as they are.

        Raises:
            OSError: no connection, or it broke.
        """
        return self._ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def _ask(self, method: str, path: str, data: bytes | None) -> Response:
        with contextlib.closing(
            http.client.HTTPConnection(HOST, self.port, timeout=self.timeout_s)
        ) as connection:
            try:
                connection.request(method, path, data, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                text = answer.read().decode(errors="replace")
            except http.client.HTTPException as error:
                raise OSError(f"broken answer: {error!r}") from error
        with contextlib.suppress(ValueError):
            return Response(answer.status, json.loads(text))
        return Response(answer.status, text)


class Server:
    """A server, up on entering and gone on leaving.

    Args:
        arguments: of the server's command line, after ARGUMENTS.
        log: file for what it prints.
        environment: further variables, over ENVIRONMENT.
        timeout_s: seconds it may take to answer.

    Attributes:
        client: a client of it.

    Raises:
        EngineError: (on entering) it ended or does not answer; the message is the end of its log.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._port = _free_port()
        where = ("--host", HOST, "--port", str(self._port))
        self.command = [sys.executable, "-m", MODULE, *ARGUMENTS, *where, *arguments]
        self._environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._log = log
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.client = Client(self._port)

    def __enter__(self) -> Server:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "wb") as output:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its engine's processes end with it
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        end = time.monotonic() + self._timeout_s
        while time.monotonic() < end:
            if not self.is_running():
                raise EngineError("the server ended while starting", where=rel(self._log), fix=self.tail())
            with contextlib.suppress(OSError):
                if self.client.get("/health").status == 200:
                    return
            time.sleep(_POLL_S)
        raise EngineError(
            f"the server does not answer after {self._timeout_s:.0f} s", where=rel(self._log), fix=self.tail()
        )

    def __exit__(self, *exception: object) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def is_running(self) -> bool:
        """Whether the front process lives."""
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """Processes of the server: the front and the engine's (Linux; elsewhere none)."""
        if self._process is None:
            return []
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                # After the name in parentheses: state, parent, process group.
                group = int((entry / "stat").read_text().rpartition(")")[2].split()[2])
                if group == self._process.pid:
                    found.append(int(entry.name))
        return found

    def resident_bytes(self) -> int:
        """Memory that the server's processes hold, shared pages counted in each."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError, ValueError, IndexError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total

    def tail(self, lines: int = 12) -> str:
        """The end of its log on one line."""
        text = self._log.read_text(errors="replace") if self._log.is_file() else ""
        return printable(" | ".join(text.splitlines()[-lines:]))[-2000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
