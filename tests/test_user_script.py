"""The user's script that type checkers look at holds the README's code, and its habits work."""

import ast
import re
from pathlib import Path

import pytest

from tests import user_script

ROOT = Path(__file__).parents[1]
README = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def test_the_script_holds_the_readme():
    script = ast.parse(Path(user_script.__file__).read_text(encoding="utf-8"))
    bodies = [
        ast.dump(ast.Module(part.body, []))
        for part in script.body
        if isinstance(part, ast.FunctionDef) and part.name.startswith("readme_")
    ]
    assert [ast.dump(ast.Module(ast.parse(code).body, [])) for code in README] == bodies


@pytest.mark.parametrize("habit", user_script.HABITS, ids=lambda habit: habit.__name__)
def test_habit(habit):
    habit()
