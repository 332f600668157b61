"""List the tasks, or run one of them: ``python -m tasks image_classification --preset demo``."""

import ast
import difflib
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent


def main() -> None:
    """Run the task that the first argument names. Without arguments, list all tasks with a short description."""
    paths = [*sorted(ROOT.glob("[a-z]*.py")), *sorted((ROOT / "studies").glob("[a-z]*.py"))]
    texts = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path.read_text("utf-8") for path in paths}
    modules = {name: text for name, text in texts.items() if '__name__ == "__main__"' in text}  # only commands
    if len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help"):
        name = "tasks." + sys.argv[1].removeprefix("tasks.")
        if name not in modules:
            near = difflib.get_close_matches(name, modules, 1)
            hint = f"did you mean {near[0]}?" if near else "python -m tasks lists them."
            sys.exit(f"there is no task {sys.argv[1]!r}; {hint}")
        del sys.argv[1]
        importlib.import_module(name).main()
        return
    for module, text in modules.items():
        summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        print(f"python -m {module:<36} {summary}")


if __name__ == "__main__":
    main()
