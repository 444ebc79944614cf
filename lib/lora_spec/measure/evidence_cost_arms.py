"""Both arms of one adapter, estimated in every way that `evidence_cost` names, each part timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lora_spec.acceptance import PRIMARY_DECODING, alpha_hat, attempt_weights
from lora_spec.measure.controls import refuse_base
from lora_spec.measure.design import MeasureUnit
from lora_spec.measure.engine import Completion, Request
from lora_spec.measure.evidence_cost import TIMINGS, VALUES, EvidenceCostParams
from lora_spec.measure.inputs import AdapterInput, Inputs
from lora_spec.measure.position_scores import PositionScores, lockstep, score_outputs
from lora_spec.measure.rows import request_rows
from lora_spec.measure.scorer import load_model, next_token_logits, overlap
from lora_spec.measure.session import run_session
from lora_spec.measure.units import ArmRunner, refuse_unapplied
from lora_spec.serving import derive_target_seed

if TYPE_CHECKING:
    import torch

_COMMON = "common-noise"
"""Names the noise that both arms of one prompt share where they are sampled without a drafter."""


class Clock:
    """CPU seconds of the parts of one adapter's measurement."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, part: str, arm: str, cpu_s: float, prompts: int = 0) -> None:
        """Add to a part; ``arm`` is "" where both arms share it."""
        row = self._rows.setdefault((part, arm), {"part": part, "arm": arm, "cpu_s": 0.0, "prompts": 0})
        row["cpu_s"] += cpu_s
        row["prompts"] += prompts

    @contextlib.contextmanager
    def timed(self, part: str, arm: str, prompts: int = 0) -> Iterator[None]:
        """Time a block of this process."""
        begun = time.process_time()
        yield
        self.add(part, arm, time.process_time() - begun, prompts)

    def table(self) -> pd.DataFrame:
        """Columns part, arm, cpu_s, prompts."""
        return pd.DataFrame(list(self._rows.values())).astype({"cpu_s": "float64", "prompts": "int32"})


class Measurement:
    """One adapter's measurement.

    Args:
        params, inputs: of the measurement. unit: the adapter on its own domain.
    """

    def __init__(self, params: EvidenceCostParams, inputs: Inputs, unit: MeasureUnit) -> None:
        self.params, self.inputs, self.unit = params, inputs, unit
        self.design, self.runner = inputs.design, ArmRunner(inputs)
        self.domain = unit.prompt_sets[0]
        self.indices = list(self.design.indices(self.domain))
        prompts = inputs.prompts(self.domain)
        self.windows = [list(prompts.eval[i]) for i in self.indices]
        self.prompts = [window[: prompts.prompt] for window in self.windows]
        self.temperature = self.design.decodings[PRIMARY_DECODING].temperature
        self.adapter = inputs.adapter(str(unit.adapter))
        self.arms: dict[str, AdapterInput | None] = {"base": None, "adapted": self.adapter}
        self.clock = Clock()
        self.values: list[pd.DataFrame] = []
        self.fixes: dict[str, str] = {}

    def run(self) -> tuple[dict[str, Any], dict[str, pd.DataFrame], dict[str, str]]:
        """Results, tables, and what the engines report of their mendings.

        Raises:
            EngineError: the adapter is not applied, or counting contradicts the overlap on the same tokens.
        """
        counted = {arm: self._serve("counted", arm, speculative=True) for arm in self.arms}
        plain = {arm: self._serve("plain", arm, speculative=False) for arm in self.arms}
        alphas = {arm: self._count(arm, done) for arm, done in counted.items()}
        changed = self._score(counted, plain)
        refuse_unapplied(self.unit.name, self.adapter.frobenius, changed)
        values = pd.concat(self.values, ignore_index=True)
        controls = self._controls(alphas, values)
        results = {
            "prompts": len(self.prompts),
            "frobenius": self.adapter.frobenius,
            "windows_changed": changed,
            "controls": controls,
        }
        return results, {VALUES: values, TIMINGS: self.clock.table()}, self.fixes

    # ------------------------------------------------------------------ engines

    def _serve(self, part: str, arm: str, *, speculative: bool) -> list[Completion]:
        """Serve every prompt once in an engine of its own, after an untimed warm-up."""
        adapter = self.arms[arm]
        if speculative:
            requests = self.runner.requests(self.domain, PRIMARY_DECODING, adapter, self.indices)
        else:
            requests = [
                Request(prompt=prompt, target_seed=seed, adapted=adapter is not None)
                for prompt, seed in zip(self.prompts, self._common_seeds(), strict=True)
            ]
        spec = self.runner.engine_spec(adapter, speculative=speculative)
        calls = [self.runner.call(r, PRIMARY_DECODING) for r in (requests[: self.params.warmup], requests)]
        done = run_session(spec, calls)
        self.fixes = done.fixes
        self.clock.add(f"{part} start", arm, done.start_cpu_s)
        self.clock.add(part, arm, done.cpu_s[1], len(requests))
        return done.completions[1]

    def _common_seeds(self) -> list[int]:
        return [derive_target_seed(self.design.seed, "", f"{self.domain}/{i}", _COMMON) for i in self.indices]

    def _count(self, arm: str, completions: Sequence[Completion]) -> float:
        rows = request_rows(
            completions,
            arm=arm,
            adapter=str(self.unit.adapter),
            prompt_set=self.domain,
            prompt_indices=self.indices,
            decoding=PRIMARY_DECODING,
            k=self.design.num_speculative_tokens,
        )
        accepted, rejected = (
            rows[name].to_numpy(dtype=np.float64) for name in ("accepted_emitted", "rejections")
        )
        self._keep("counted", arm, accepted, accepted + rejected)
        return alpha_hat(accepted.sum(), rejected.sum())

    # ------------------------------------------------------------------ scores

    def _score(self, counted: dict[str, list[Completion]], plain: dict[str, list[Completion]]) -> list[bool]:
        """Everything that needs the models themselves; returns by window whether the adapter changes it."""
        import torch

        torch.set_num_threads(self.design.engine.threads)
        with self.clock.timed("load", ""):
            targets = {
                arm: load_model(self.inputs.target_path, adapter=None if adapter is None else adapter.path)
                for arm, adapter in self.arms.items()
            }
            drafter = load_model(self.inputs.drafter_path)
        self._warm_up(targets, drafter)
        changed = self._text(targets, drafter)
        for arm, target in targets.items():
            for name, done in (("sampled", plain[arm]), ("rescored", counted[arm])):
                with self.clock.timed(name, arm, len(done)):
                    scores = score_outputs(
                        self.prompts,
                        [c.tokens for c in done],
                        self.temperature,
                        target=target,
                        drafter=drafter,
                        batch=self.params.score_batch,
                    )
                self._keep_scores(name, arm, scores)
                if name == "sampled":
                    self._keep_uniform(arm, scores)
            with self.clock.timed("lockstep", arm, len(self.prompts)):
                scores = self._lockstep(self.prompts, self._common_seeds(), target, drafter)
            self._keep_scores("lockstep", arm, scores)
        return changed

    def _lockstep(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], target: Any, drafter: Any
    ) -> list[PositionScores]:
        return lockstep(
            prompts,
            seeds,
            self.temperature,
            target=target,
            drafter=drafter,
            max_tokens=self.design.max_tokens,
            stop_token=target.config.eos_token_id,
            batch=self.params.lockstep_batch,
        )

    def _warm_up(self, targets: dict[str, Any], drafter: Any) -> None:
        """The first pass of a model is slower: it packs weights and allocates."""
        few = self.params.warmup
        for target in targets.values():
            self._lockstep(self.prompts[:few], self._common_seeds()[:few], target, drafter)

    def _text(self, targets: dict[str, Any], drafter: Any) -> list[bool]:
        """Mean overlap on the reference continuation, both arms on the same tokens."""
        import torch

        first, size = len(self.prompts[0]), self.params.score_batch
        sums: dict[str, list[np.ndarray]] = {arm: [] for arm in targets}
        for start in range(0, len(self.windows), size):
            tokens = torch.tensor(self.windows[start : start + size], dtype=torch.long)
            with self.clock.timed("text", "", len(tokens)):
                log_q = self._log_softmax(drafter, tokens, first)
            for arm, target in targets.items():
                with self.clock.timed("text", arm, len(tokens)):
                    both = overlap(self._log_softmax(target, tokens, first), log_q)
                sums[arm].append(both.double().sum(1).numpy())
        totals = {arm: np.concatenate(parts) for arm, parts in sums.items()}
        positions = np.full(len(self.windows), float(len(self.windows[0]) - first))
        for arm, total in totals.items():
            self._keep("text", arm, total, positions)
        return [bool(x) for x in totals["base"] != totals["adapted"]]

    def _log_softmax(self, model: Any, tokens: torch.Tensor, first: int) -> torch.Tensor:
        import torch

        return torch.log_softmax(next_token_logits(model, tokens, first) / self.temperature, -1)

    # ------------------------------------------------------------------ what is kept

    def _keep(self, name: str, arm: str, numerator: np.ndarray, denominator: np.ndarray) -> None:
        self.values.append(
            pd.DataFrame(
                {
                    "estimator": name,
                    "arm": arm,
                    "prompt_index": np.asarray(self.indices, dtype=np.int32),
                    "numerator": np.asarray(numerator, dtype=np.float64),
                    "denominator": np.asarray(denominator, dtype=np.float64),
                }
            )
        )

    def _keep_scores(self, name: str, arm: str, scores: Sequence[PositionScores]) -> None:
        """Sums over positions, each weighed by how often its draft is judged."""
        weights = [attempt_weights(s.accept, self.design.num_speculative_tokens) for s in scores]
        numerator = [float(w @ s.overlap) for w, s in zip(weights, scores, strict=True)]
        self._keep(name, arm, np.array(numerator), np.array([w.sum() for w in weights]))

    def _keep_uniform(self, arm: str, scores: Sequence[PositionScores]) -> None:
        sums, counts = ([f(s.overlap) for s in scores] for f in (np.sum, np.size))
        self._keep("sampled_uniform", arm, np.array(sums), np.array(counts, dtype=np.float64))

    def _controls(self, alphas: dict[str, float], values: pd.DataFrame) -> dict[str, dict[str, float]]:
        """Counted α̂ of each arm against the overlap on the same tokens, as the screen's base arms have it."""
        limits, controls = self.design.controls, {}
        for arm, alpha in alphas.items():
            own = values[(values["estimator"] == "rescored") & (values["arm"] == arm)]
            controls[arm] = {
                "alpha": alpha,
                "floor": limits.base_alpha_floor if arm == "base" else 0.0,
                "overlap_same_tokens": float(own["numerator"].sum() / own["denominator"].sum()),
                "tolerance": float(limits.overlap_tolerance or 0.0),
            }
        refuse_base(self.unit.name, controls)
        return controls
