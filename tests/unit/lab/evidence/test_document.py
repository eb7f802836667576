from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.lab.bench.settings import make_settings
from redline.lab.bench.table import quantity, render
from redline.lab.evidence.document import Bound, Document, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.measure.pairs import interleave
from redline.lab.measure.warmup import WarmUp

RESULT_FIELDS = {"name", "value", "unit", "samples", "bound", "fraction_of_bound", "peer"}


def document(*overrides: str, **fields: Any) -> Document:
    comparison = compare([20.0] * 6, [10.0] * 6)
    values: dict[str, Any] = {
        "name": "throughput",
        "value": 1200.0,
        "unit": "tok/s",
        "samples": [{"redline": 1200.0}],
        "bound": Bound(4800.0, "weights are read"),
        "peer": PeerFigure("transformers", 600.0, 2.0, comparison),
    }
    settings = make_settings("generate", ["model=builtin:tiny", "device=cpu", *overrides])
    return Document.of("generate", "cpu", Measured(settings, [Result(**values | fields)], {"transformers": "5.17"}))


def test_the_document_has_the_words_every_bench_uses() -> None:
    written = document().as_json()
    assert written.keys() == {"case", "identity", "results"}
    [result] = written["results"]
    assert result.keys() == RESULT_FIELDS
    assert result["bound"] == {"value": 4800.0, "why": "weights are read"}
    assert result["peer"] == {
        "name": "transformers",
        "value": 600.0,
        "ratio": 2.0,
        "interval_95": pytest.approx([2, 2]),
        "p_value": 2 / 2**6,
        "pairs": 6,
    }


def test_it_says_what_was_measured_where_and_beside_whom() -> None:
    identity = document("prompts=3").identity
    assert identity["config"]["prompts"] == 3
    assert identity["device"] == "cpu"
    assert identity["peers"] == {"transformers": "5.17"}
    assert {"source", "cpu", "gpus", "packages", "python"} <= identity.keys()
    assert {"clocks", "warm_up"} <= identity.keys()
    assert "vllm_python" not in identity["config"]


def test_paths_of_whoever_ran_it_stay_with_them() -> None:
    folder = Path(__file__).parent
    settings = make_settings("e2e", ["model=builtin:tiny", "against=trl", f"trl_python={__file__}"])
    assert "trl_python" not in Document.of("e2e", "cpu", Measured(settings, [])).identity["config"]
    settings = make_settings("rollout", [f"recipe={folder / 'some.yaml'}"])
    assert Document.of("rollout", "cpu", Measured(settings, [])).identity["config"]["recipe"] == "some.yaml"


def test_every_run_of_the_warm_up_is_kept() -> None:
    settings = make_settings("generate", ["model=builtin:tiny", "device=cpu"])
    measured = Measured(settings, [], warm_ups={"redline": WarmUp([3.0, 1.0, 1.0])})
    identity = Document.of("generate", "cpu", measured).identity
    assert identity["warm_up"] == {"redline": {"seconds": [3.0, 1.0, 1.0], "settled": False}}


def test_the_fraction_of_the_bound_is_at_most_one_whichever_way_is_better() -> None:
    assert document().results[0].fraction_of_bound == 0.25
    assert document(value=0.4, bound=Bound(0.1, ""), larger_is_better=False).results[0].fraction_of_bound == 0.25
    assert document(value=0.0).results[0].fraction_of_bound == 0


def test_a_result_without_a_peer_says_so() -> None:
    assert document(peer=None).as_json()["results"][0]["peer"] is None


def test_workloads_are_saved_apart(tmp_path: Path) -> None:
    plain, named = document().save(tmp_path / "cpu"), document("workload=C1").save(tmp_path / "cpu")
    assert [plain.name, named.name] == ["generate.json", "generate-c1.json"]
    assert json.loads(plain.read_text())["case"] == "generate"


# ── for people ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def shown(document: Document) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(render(document))
    return console.file.getvalue()


def test_the_table_has_the_value_the_bound_and_the_peer() -> None:
    for part in ("generate on cpu", "1,200 tok/s", "4,800 tok/s", "25.0%", "transformers", "600 tok/s", "2.00× (2.00–2.00)"):
        assert part in shown(document())


def test_the_table_says_when_there_were_too_few_pairs() -> None:
    few = PeerFigure("transformers", 600.0, 2.0, compare([2.0], [1.0]))
    assert "2.00× (too few pairs)" in shown(document(peer=few))


def test_an_interval_of_the_value_itself_stands_beside_it() -> None:
    assert "1,200 tok/s (1.00–2.00)" in shown(document(peer=None, details={"interval_95": [1.0, 2.0]}))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1234.5, "tok/s", "1,234 tok/s"),
        (12.34, "tok/s", "12.3 tok/s"),
        (0.01234, "s", "12.3 ms"),
        (12.34, "s", "12.3 s"),
        (1.5e9, "bytes", "1.5 GB"),
        (2e3, "bytes", "2 kB"),
    ],
)
def test_quantities_are_short(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


# ── rounds ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_side_runs_once_in_every_round_and_no_side_always_first() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str):
        return lambda number: calls.append((name, number)) or f"{name}{number}"

    told: list[int] = []
    rows = interleave({"a": side("a"), "b": side("b")}, 20, seed=0, seen=lambda number, row: told.append(number))
    assert rows == [{"a": f"a{i}", "b": f"b{i}"} for i in range(20)]
    assert told == list(range(20))
    firsts = [calls[2 * i][0] for i in range(20)]
    assert {calls[2 * i][1] for i in range(20)} == set(range(20))
    assert 4 < firsts.count("a") < 16


def test_the_order_follows_from_the_seed() -> None:
    def order(seed: int) -> list[str]:
        calls: list[str] = []
        interleave({name: lambda _, name=name: calls.append(name) for name in "abc"}, 5, seed, lambda *_: None)
        return calls

    assert order(1) == order(1) != order(2)
