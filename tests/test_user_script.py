"""The habits of the user's script that type checkers look at work."""

import pytest

from tests import user_script


@pytest.mark.parametrize("habit", user_script.HABITS, ids=lambda habit: habit.__name__)
def test_habit(habit):
    habit()
