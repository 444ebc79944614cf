"""The clients of a soak: requests of all kinds, and an operator who changes what is served under way."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_spec.files import atomic_write_json
from lora_spec.measure.mixups import References, Verdict
from lora_spec.measure.server import HOST, Client, Response
from lora_spec.measure.soak_world import BASE, DEPTH, MODEL, SPARE, World
from lora_spec.policy import Policy

_EXAMPLES = 20
# How much longer than others the requests are that their clients leave.
ABORT_FACTOR = 4

# Bodies that must be refused, and how; what they leave out comes from an ordinary request.
MALFORMED: tuple[tuple[dict[str, Any] | bytes, int], ...] = (
    ({"vllm_xargs": {"draft_lora": "nobody"}}, 400),
    ({"vllm_xargs": {"draft_lora": 7}}, 400),
    ({"vllm_xargs": {"lora_spec": "mine"}}, 400),
    ({"model": "nobody"}, 404),
    ({"max_tokens": -1}, 400),
    ({"temperature": -3}, 400),
    ({"prompt": [10**9]}, 400),
    ({"prompt": [1] * 5000}, 400),
    (b'{"model": ', 400),
)


@dataclass
class Findings:
    """What the clients saw; shared by all threads.

    Attributes:
        requests: by kind.
        verdicts: (adapter, verdict) of greedy outputs.
        latencies: seconds, of completions.
        drafted, accepted: sums over the responses.
        problems: what should not have happened, by sort; `examples` shows the first few.
    """

    requests: Counter[str] = field(default_factory=Counter)
    verdicts: list[tuple[str, Verdict]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def problem(self, sort: str, detail: object) -> None:
        """Note something that should not have happened."""
        with self.lock:
            self.problems[sort] += 1
            if len(self.examples) < _EXAMPLES:
                self.examples.append(f"{sort}: {str(detail)[:300]}")

    def count(self, kind: str) -> None:
        """Note a request."""
        with self.lock:
            self.requests[kind] += 1


class Load:
    """Requests to one server.

    Args:
        client: of the server.
        world: what it serves.
        policies: those that may be in force.
        policy_file: where the server reads its policy.
    """

    def __init__(self, client: Client, world: World, policies: list[Policy], policy_file: Path) -> None:
        self.client = client
        self.world = world
        self.policies = policies
        self.policy_file = policy_file
        self.findings = Findings()
        self.references = References({arm: [""] * len(world.prompts) for arm in world.arms})
        self.prompts = list(range(len(world.prompts)))

    # ------------------------------------------------------------------ one request

    def body(self, arm: str, prompt: int, **more: Any) -> dict[str, Any]:
        """A greedy completion of ``prompt`` by the target adapter ``arm``."""
        return {
            "model": MODEL if arm == BASE else arm,
            "prompt": list(self.world.prompts[prompt]),
            "max_tokens": self.world.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        } | more

    def complete(
        self, arm: str, prompt: int, drafter: str | None = None, gone: tuple[int, ...] = (), **more: Any
    ) -> str | None:
        """Ask, check what the response tells, and return its text; None where there is none.

        Args:
            arm: target adapter or BASE.
            prompt: index of the prompt.
            drafter: drafter adapter that the request names.
            gone: statuses that are right as well, for names that come and go.
        """
        body = self.body(arm, prompt, **more)
        if drafter is not None:
            body["vllm_xargs"] = {"draft_lora": drafter}
        begin = time.monotonic()
        response = self.client.post("/v1/completions", body)
        if response.status in gone:
            self.findings.count("name_gone")
            return None
        if response.status != 200:
            self.findings.problem("refused", f"{arm}, {drafter}: {response.status} {response.body}")
            return None
        told = response.body["metrics"]["speculative_decoding"]
        with self.findings.lock:
            self.findings.requests["completion"] += 1
            self.findings.latencies.append(time.monotonic() - begin)
            self.findings.drafted += told["num_draft_tokens"]
            self.findings.accepted += told["num_accepted_draft_tokens"]
        self._check_told(arm, drafter, told)
        return response.body["choices"][0]["text"]

    def _check_told(self, arm: str, drafter: str | None, told: dict[str, Any]) -> None:
        depth, adapter = told["draft_depth"], told["draft_adapter"]
        possible = []
        for policy in self.policies:
            entry = policy.base if arm == BASE else policy.adapters.get(arm, policy.default)
            mapped = getattr(entry, "drafter_adapter", None)
            named = mapped if drafter is None else None if drafter == "none" else drafter
            # A request that drafts nothing is given no adapter.
            possible.append((entry.depth, None if entry.depth == 0 else named))
        if (depth, adapter) not in possible:
            self.findings.problem("other_answer", f"{arm}, {drafter}: {(depth, adapter)} not in {possible}")
        most = DEPTH if depth is None else min(depth, DEPTH)
        histogram = told["acceptance_histogram"]
        deepest = max((j for j, count in enumerate(histogram) if count), default=0)
        if told["num_draft_tokens"] > most * told["num_spec_steps"] or deepest > most:
            self.findings.problem("too_deep", f"{arm}, depth {depth}: {told}")

    def judged(self, arm: str, prompt: int, text: str | None, reference: str | None = None) -> None:
        """Judge a greedy output; ``reference`` is whose answer it must be, where ``arm`` is a spare name."""
        if text is not None:
            whose = reference or arm
            verdict = self.references.judge(whose, prompt, text)
            with self.findings.lock:
                self.findings.verdicts.append((whose, verdict))

    def malformed(self, choice: random.Random) -> None:
        """A request that must be refused."""
        body, status = choice.choice(MALFORMED)
        sent = body if isinstance(body, bytes) else self.body(BASE, choice.choice(self.prompts)) | body
        response = self.client.post("/v1/completions", sent)
        self.findings.count("malformed")
        if response.status != status:
            self.findings.problem("malformed", f"{str(body)[:80]}: {response.status}, not {status}")

    def aborted(self, choice: random.Random) -> None:
        """A stream that the client leaves after some lines."""
        arm = choice.choice(self.world.arms)
        body = self.body(
            arm, choice.choice(self.prompts), stream=True, max_tokens=ABORT_FACTOR * self.world.max_tokens
        )
        connection = http.client.HTTPConnection(HOST, self.client.port, timeout=self.client.timeout_s)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            stream = connection.getresponse()
            for _ in range(choice.randint(1, 12)):
                stream.readline()
            stream.close()
        self.findings.count("aborted")

    # ------------------------------------------------------------------ many

    def work(self, seed: int, until: Callable[[], bool]) -> None:
        """One client: requests of all kinds, one after the other."""
        choice = random.Random(seed)
        drafters = [*self.world.drafters, "none", None, None, None]
        while not until():
            dice = choice.random()
            arm, prompt = choice.choice(self.world.arms), choice.choice(self.prompts)
            with self._surviving():
                if dice < 0.08:
                    self.malformed(choice)
                elif dice < 0.12:
                    self.aborted(choice)
                elif dice < 0.20:
                    self.complete(arm, prompt, choice.choice(drafters), temperature=0.8)
                elif dice < 0.24:
                    self.complete(SPARE, prompt, gone=(404,), max_tokens=8)
                elif dice < 0.28:
                    self.complete(arm, prompt, SPARE, gone=(400,))
                else:
                    self.judged(arm, prompt, self.complete(arm, prompt, choice.choice(drafters)))

    @contextlib.contextmanager
    def _surviving(self) -> Any:
        """A client goes on after a broken connection or answer; it is a problem all the same."""
        try:
            yield
        except (OSError, KeyError, TypeError, http.client.HTTPException) as error:
            self.findings.problem("broken", repr(error))
            time.sleep(0.5)  # a server that is gone must not be asked in a busy loop

    def operate(self, until: Callable[[], bool], pause_s: float) -> None:
        """The operator: policies change, a bad one comes by, spare adapters come and go.

        After each loading of the spare target adapter its name must give that adapter's text.
        """
        turn = 0
        while not until():
            turn += 1
            with self._surviving():
                self._change_policy(turn)
                self._change_drafter(turn)
                self._change_target(turn)
            time.sleep(pause_s)

    def _change_policy(self, turn: int) -> None:
        if turn % 3 == 0:
            self.policy_file.write_text('{"schema": "lora-spec-policy/1", "adapters": ')
            self.findings.count("policy_bad")
            time.sleep(0.7)
        atomic_write_json(self.policy_file, self.policies[turn % 2].model_dump(mode="json", by_alias=True))
        self.findings.count("policy_changed")

    def _change_drafter(self, turn: int) -> None:
        names = list(self.world.drafters)
        path, other = (self.world.drafters[names[(turn + i) % len(names)]] for i in (0, 1))

        def load(name: str, folder: Path | str, *, inplace: bool = False) -> Response:
            body = {"lora_name": name, "lora_path": str(folder), "load_inplace": inplace}
            return self.client.post("/v1/load_draft_lora_adapter", body)

        unload = {"lora_name": SPARE}
        self._expect("load_drafter", load(SPARE, path), 200)
        self._expect("load_drafter_taken", load(SPARE, other), 409)
        self.complete(BASE, self.prompts[0], SPARE)
        self._expect("load_drafter_in_place", load(SPARE, other, inplace=True), 200)
        self.complete(BASE, self.prompts[0], SPARE)
        self._expect("load_drafter_nowhere", load("x", "no-such-folder"), 404)
        self._expect("unload_drafter", self.client.post("/v1/unload_draft_lora_adapter", unload), 200)
        self._expect("unload_drafter_gone", self.client.post("/v1/unload_draft_lora_adapter", unload), 404)

    def _change_target(self, turn: int) -> None:
        names = list(self.world.targets)
        whose = names[turn % len(names)]
        body = {"lora_name": SPARE, "lora_path": str(self.world.targets[whose])}
        self._expect("load_target", self.client.post("/v1/load_lora_adapter", body), 200)
        for prompt in self.prompts[turn % 3 :: 7]:
            self.judged(SPARE, prompt, self.complete(SPARE, prompt), reference=whose)
        unloaded = self.client.post("/v1/unload_lora_adapter", {"lora_name": SPARE})
        self._expect("unload_target", unloaded, 200)

    def _expect(self, kind: str, response: Response, status: int) -> None:
        self.findings.count(kind)
        if response.status != status:
            self.findings.problem(kind, f"{response.status}, not {status}: {response.body}")
