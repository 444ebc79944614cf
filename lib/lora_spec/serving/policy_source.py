"""The policy a server follows just now: read again when its file changes, kept when the new file is bad.

Lives in the process that takes requests in. Nothing here needs torch or vllm.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_spec.checkpoint import content_hash
from lora_spec.errors import LoraSpecError, printable
from lora_spec.files import sha256_bytes
from lora_spec.policy import Policy, parse_policy, read_policy_bytes

# Below vLLM's own logger, whose level and form a server's operator sets.
logger = logging.getLogger(f"vllm.{__name__}")

# Seconds between two looks at a file.
POLL_S = 0.5

_MAX_FOLDERS = 4096

_Signature = tuple[Hashable, ...]


@dataclass(frozen=True)
class PolicyEntry:
    """What the policy says about one request.

    Attributes:
        depth: most drafts a step, None for the engine's own number.
        drafter_adapter: name of the drafter adapter, None where the policy names none.
    """

    depth: int | None = None
    drafter_adapter: str | None = None


class PolicySource:
    """A policy file that may change under way. Thread-safe.

    Args:
        path: the policy file.
        check: called with every policy before it counts; it raises a `LoraSpecError` to refuse one (such as
            a policy that names drafter adapters the server does not have).
        poll_s: seconds between two looks at the file, which happen on access.

    Raises:
        LoraSpecError: the first policy is not valid; later ones that are not are logged and left alone.
    """

    def __init__(
        self,
        path: Path | str,
        check: Callable[[Policy], None] | None = None,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self.path = Path(path)
        self._check = check
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._hashes = AdapterHashes(poll_s=poll_s)
        self._told: set[tuple[str, str | None]] = set()
        self._seen = _file_signature(self.path)
        self._policy, self._version = self._read()
        self._next_look = time.monotonic() + poll_s

    @property
    def version(self) -> str:
        """Hex sha256 of the file that is in force."""
        return self._version

    def current(self) -> Policy:
        """The policy in force, after a look at the file when one is due."""
        if time.monotonic() >= self._next_look and self._lock.acquire(blocking=False):
            # Whoever finds the lock taken goes on with the policy there is: somebody is reading.
            try:
                self._look()
            finally:
                self._lock.release()
        return self._policy

    def reload(self) -> bool:
        """Look at the file now, due or not.

        Returns:
            Whether another policy is in force than before.
        """
        with self._lock:
            before = self._version
            self._seen = None
            self._look()
            return self._version != before

    def look_again(self) -> None:
        """Read the file at the next look even if it has not changed: what was refused may be valid now."""
        self._seen = None

    def decide(self, lora_request: Any = None) -> PolicyEntry:
        """What holds for a request that arrives now.

        An entry holds for the files that were judged only. Where the served adapter's are others, or cannot
        be read, the default holds and the log says so, once for each policy.

        Args:
            lora_request: its target adapter (vLLM's `LoRARequest`: `lora_name` and `lora_path`), or None.
        """
        policy = self.current()
        if lora_request is None:
            return PolicyEntry(policy.base.depth)
        name = lora_request.lora_name
        entry = policy.adapters.get(name)
        if entry is not None:
            served = self._hashes.of(lora_request.lora_path)
            if served == entry.content_hash:
                return PolicyEntry(entry.depth, entry.drafter_adapter)
            self._tell_other_files(name, entry.content_hash, served)
        return PolicyEntry(policy.default.depth, policy.default.drafter_adapter)

    def _tell_other_files(self, name: str, judged: str, served: str | None) -> None:
        with self._lock:
            if (name, served) in self._told:
                return
            self._told.add((name, served))
        logger.error(
            "The policy's entry for adapter %s does not hold: it was made for content %s, and %s. "
            "The default holds instead. Write the policy again (lora-spec policy).",
            printable(name),
            judged[:12],
            f"{served[:12]} is served" if served else "the served files cannot be read",
        )

    def _look(self) -> None:
        self._next_look = time.monotonic() + self._poll_s
        signature = _file_signature(self.path)
        if signature == self._seen:
            return
        # Remembered before reading: a write during the reading is then seen by the next look.
        self._seen = signature
        try:
            policy, version = self._read()
        except LoraSpecError as error:
            logger.error("Policy not taken over, the older one stays in force: %s", printable(error))
            return
        if version != self._version:
            logger.info("Policy %s in force: %s", version[:12], self.path)
            self._told.clear()
        self._policy, self._version = policy, version

    def _read(self) -> tuple[Policy, str]:
        data = read_policy_bytes(self.path)
        policy = parse_policy(data, self.path)
        if self._check is not None:
            self._check(policy)
        return policy, sha256_bytes(data)


def _file_signature(path: Path) -> _Signature | None:
    """Changes when the file is replaced or written; of a file that is not there, one value."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return (getattr(error, "errno", None),)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


class AdapterHashes:
    """Content hashes of adapter folders, computed again only when a file of the folder changes. Thread-safe.

    Args:
        poll_s: seconds for which a folder is believed not to have changed.
    """

    def __init__(self, *, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._lock = threading.Lock()
        # path -> (when to look again, signature, hash or None); least recently used first
        self._known: OrderedDict[str, tuple[float, _Signature, str | None]] = OrderedDict()

    def of(self, path: Path | str) -> str | None:
        """Content hash of the adapter in this folder, None where there is no adapter that can be read."""
        key = os.fspath(path)
        with self._lock:
            due, signature, known = self._known.get(key, (0.0, (), None))
            if time.monotonic() < due:
                return known
            now = _folder_signature(key)
            if now != signature:
                signature, known = now, _hash_or_none(key)
            self._known[key] = (time.monotonic() + self._poll_s, signature, known)
            self._known.move_to_end(key)
            if len(self._known) > _MAX_FOLDERS:
                self._known.popitem(last=False)
            return known


def _folder_signature(path: str) -> _Signature:
    try:
        with os.scandir(path) as entries:
            found = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
    except (OSError, ValueError) as error:
        return (getattr(error, "errno", None),)
    return tuple((name, s.st_ino, s.st_mtime_ns, s.st_size) for name, s in found)


def _hash_or_none(path: str) -> str | None:
    try:
        return content_hash(path)
    except (LoraSpecError, OSError, ValueError):
        return None
