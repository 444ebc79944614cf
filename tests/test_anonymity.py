"""Double-blind: nothing tracked tells who made it or on which machine; and the checkout stays small."""

from __future__ import annotations

import getpass
import re
import socket
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lora_spec.notebook import problems, read_notebook

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 60 * 2**20
BINARY = {".parquet", ".safetensors", ".png", ".pdf"}
# Written apart, so that this file does not contain what it looks for.
PATHS = re.compile(r"(?<![\w.~$}-])/(?:home|Users|root|work|tmp)" + r"/[A-Za-z0-9_.-]+")
EMAILS = re.compile(r"\b[\w.+-]+@[\w-]+\.[a-z]{2,}\b")
HOSTS = ("pypi", "pythonhosted", "npmjs", "debian", "anaconda", "pytorch")
REGISTRIES = re.compile(rf"\b(?:{'|'.join(HOSTS)})\.(?:org|com)\b")
GENERIC = {"root", "user", "runner", "ubuntu", "admin", "jovyan", "localhost", "docker", "build", "test"}


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    try:
        names = git("ls-files", "-z").split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def texts(tracked) -> dict[str, str]:
    """What can be read in each tracked file; of tables also the distinct strings in their columns."""
    found = {}
    for path in tracked:
        text = path.read_bytes().decode("utf-8", errors="replace")
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            text = "\n".join(
                str(value)
                for column in table.columns
                if str(column.type) in ("string", "large_string")
                for value in column.unique().to_pylist()
            ) + str(table.schema.metadata)
        found[path.relative_to(ROOT).as_posix()] = text
    return found


def hits(pattern: re.Pattern[str], texts: dict[str, str], *, skip: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{name}: {match[0]}"
        for name, text in texts.items()
        if not name.startswith(skip or ("\0",))
        for match in pattern.finditer(text)
    ]


def test_no_absolute_paths(texts):
    assert hits(PATHS, texts) == []


def test_no_addresses(texts):
    readable = {name: text for name, text in texts.items() if Path(name).suffix not in BINARY - {".parquet"}}
    assert hits(EMAILS, readable) == []


def test_no_host_and_no_user(texts):
    for word in {socket.gethostname(), getpass.getuser()} - GENERIC:
        if len(word) > 3:
            assert hits(re.compile(rf"\b{re.escape(word)}\b"), texts) == []


def test_no_registry_is_named_but_the_one_of_torch(texts):
    found = hits(REGISTRIES, texts, skip=("Makefile",))
    assert found == []
    assert len(REGISTRIES.findall(texts["Makefile"])) == 1


def test_stored_notebooks_name_nobody(tracked):
    for path in tracked:
        if path.suffix == ".ipynb":
            assert problems(read_notebook(path)) == [], path.name


def test_commits_name_nobody(tracked):
    messages = git("log", "--format=%B")
    assert not EMAILS.search(messages) and not PATHS.search(messages)
    for address in set(git("log", "--format=%ae%n%ce").split()):
        assert "noreply" in address or address.endswith((".example", ".invalid")), address


def test_the_checkout_is_small(tracked):
    assert sum(path.stat().st_size for path in tracked) < MAX_BYTES
