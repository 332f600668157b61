"""The code lines of each room, and how many they have grown by: ``python -m tests.code_lines``, part of make lint.

A line with code counts; blank lines, comments and docstrings do not. The comparison is with the last tag or, if the
branch has none, with the point at which it left the main branch.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from pathlib import Path

ROOMS = ("hbnode", "tasks", "tests", "benchmarks")
IGNORED = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in IGNORED
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def git(*args: str) -> bytes:
    return subprocess.run(["git", *args], capture_output=True, check=True).stdout


def of_commit(commit: str) -> dict[str, int]:
    """The code lines of each room in a commit."""
    counts = dict.fromkeys(ROOMS, 0)
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        for member in archive:
            room = member.name.partition("/")[0]
            if room in ROOMS and member.name.endswith(".py"):
                counts[room] += code_lines(archive.extractfile(member).read().decode())
    return counts


def start() -> str | None:
    """The last tag, or the commit at which the branch left the main branch; None outside of a repository."""
    for args in (["describe", "--tags", "--abbrev=0"], *(["merge-base", "HEAD", x] for x in ("origin/HEAD", "main"))):
        try:
            return git(*args).decode().strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    return None


def main() -> None:
    root = Path(__file__).parent.parent
    now = {room: sum(code_lines(path.read_text()) for path in (root / room).rglob("*.py")) for room in ROOMS}
    commit = start()
    before = now if commit is None else of_commit(commit)
    changes = ", ".join(f"{room} {n:,} ({n - before[room]:+,})" for room, n in now.items())
    sys.stdout.write(f"code lines: {changes}\n")


if __name__ == "__main__":
    main()
