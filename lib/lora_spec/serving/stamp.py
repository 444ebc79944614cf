"""What was decided about a request when it arrived, carried with it through the engine.

The process that takes requests in (`LLM`, or the API server) resolves names once, and writes the answer into
the request's own `SamplingParams.extra_args`. The scheduler and the worker only read it: there is no table of
names to keep equal in three processes, and a request keeps its answer when an adapter is unloaded or a policy
is replaced under way.

Nothing here needs torch or vllm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# Key of `extra_args`. Requests that carry it on arrival are refused: nobody else may write it.
EXTRA_ARG = "lora_spec"


@dataclass(frozen=True)
class DraftAdapter:
    """A drafter adapter whose files were checked.

    Attributes:
        name: as the operator calls it.
        path: folder.
        content_hash: identity, hex sha256 (see `lora_spec.checkpoint.content_hash`).
        loading: how often this content was made known before. Its files may have been lost meanwhile, and
            requests served by the base drafter: their cached K/V are not for those that come after.
    """

    name: str
    path: str
    content_hash: str
    loading: int = 0

    @property
    def int_id(self) -> int:
        """A positive number of 60 bits that follows from the content: other content never gets it."""
        return int(self.content_hash[:15], 16) or 1


@dataclass(frozen=True)
class Stamp:
    """The answer for one request.

    Attributes:
        draft_adapter: the drafter's adapter, None for the base drafter.
        depth: most drafts a step, None for the engine's own number.
    """

    draft_adapter: DraftAdapter | None = None
    depth: int | None = None

    def to_extra_args(self, extra_args: dict[str, Any] | None) -> dict[str, Any]:
        """A copy of `extra_args` with this stamp in it: plain dicts, strings and numbers."""
        return {**(extra_args or {}), EXTRA_ARG: asdict(self)}


BASE = Stamp()


def read_stamp(sampling_params: Any) -> Stamp | None:
    """The stamp of a request with these `SamplingParams`, None where it came by no front door.

    What is no stamp counts as none: a process may hold engines without a front door, whose requests say what
    they like.
    """
    extra_args = getattr(sampling_params, "extra_args", None)
    raw = (extra_args or {}).get(EXTRA_ARG)
    try:
        adapter, depth = raw["draft_adapter"], raw["depth"]
        return Stamp(DraftAdapter(**adapter) if adapter else None, depth)
    except (KeyError, TypeError):
        return None
