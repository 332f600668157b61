"""List the tasks, a line each."""

import ast
from pathlib import Path


def main() -> None:
    """Print every task's name and the first line of its docstring."""
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        print(f"python -m tasks.{path.stem:<22} {summary}")


if __name__ == "__main__":
    main()
