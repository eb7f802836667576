"""What `redline env list` says there is."""

from __future__ import annotations

from redline.environments.registry import ENVIRONMENTS, Shipped
from redline.lab.environments.listing import listing


def test_the_list_has_every_environment_and_every_kind_of_task_with_a_line_each() -> None:
    found = listing()
    assert [entry.name for entry in found.environments] == sorted(ENVIRONMENTS)
    assert {"file", "reasoning_gym", "import"} <= {entry.name for entry in found.task_kinds}
    assert all(entry.what for entry in (*found.environments, *found.task_kinds))


def test_the_list_says_which_packages_of_an_extra_are_missing() -> None:
    shipped = {
        "b": Shipped("b:B", "needs a package that nobody has", "trackio"),
        "a": Shipped("a:A", "needs nothing"),
        "c": Shipped("c:C", "needs what the tests have", "serve"),
    }
    a, b, c = listing(shipped).environments
    assert (a.missing, b.missing, c.missing) == ((), ("trackio",), ())
    assert (a.needs, b.needs, c.needs) == ("", "trackio (not installed)", "serve (installed)")
