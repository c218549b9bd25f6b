# SPDX-License-Identifier: Apache-2.0
"""A report says only what the runs' records say, and where its numbers are from."""

import json
import math
from datetime import date

import pytest

from geojax.config import ConfigError
from geojax.track.report import compare, report
from geojax.track.summary import load_run


@pytest.fixture
def folders(make_run):
    return [
        make_run("diloco", balanced=False, payload_bytes=600_000_000, wan_seconds=220.0),
        make_run("geomesh", perplexities=(512.0, 90.0, 40.0, 22.0)),
    ]


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def _records(folder, kind):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def test_json_can_be_recomputed_from_the_metrics(folders, tmp_path):
    report(folders, None, tmp_path / "report.json", 30.0)
    written = json.loads((tmp_path / "report.json").read_text())
    assert date.fromisoformat(written["generated"])
    assert written["versions"] == {"jax": "0.12.0", "numpy": "2.1.0"}
    assert written["machine"] == "a made-up machine"
    assert (written["clock"], written["target_perplexity"]) == ("modelled", 30.0)
    for folder, result in zip(folders, written["results"], strict=True):
        slices, rounds, evals = (_records(folder, kind) for kind in ("slice", "round", "eval"))
        seconds = sum(r["round_seconds"] for r in rounds)
        *_, before, after = evals  # the target lies between the last two
        way = math.log(before["perplexity"] / 30) / math.log(
            before["perplexity"] / after["perplexity"]
        )
        expected = {
            "method": folder.name,
            "seed": 0,
            "clock": "modelled",
            "target_perplexity": 30.0,
            "hours": seconds / 3600,
            "tokens": sum(s["tokens"] for s in slices),
            "final_perplexity": evals[-1]["perplexity"],
            "bytes_per_round": sum(s["payload_bytes"] for s in slices) / len(slices),
            "wire_bytes_per_round": sum(s["wire_bytes"] for s in slices) / len(slices),
            "payload_ratio": sum(r["payload_ratio"] for r in rounds) / len(rounds),
            "hours_to_target": (before["seconds"] + way * (after["seconds"] - before["seconds"]))
            / 3600,
            "tokens_to_target": before["tokens"] + way * (after["tokens"] - before["tokens"]),
        }
        for part in ("straggler", "wan"):
            expected[f"{part}_idle"] = max(
                sum(s[f"{part}_seconds"] for s in slices if s["slice"] == name) / seconds
                for name in ("h100", "a100", "l40s", "rtx6000")
            )
        assert result == {
            key: value if isinstance(value, str) else pytest.approx(value)
            for key, value in expected.items()
        }


def test_the_table_names_clock_target_and_speed_up(folders, capsys):
    report(folders, None, None, None)
    text = capsys.readouterr().out
    assert "Target perplexity 23.46: 1.02 times the worst final perplexity." in text
    assert "Times: modelled clock" in text
    assert "real training of 1.2M" in " ".join(text.split())
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert "1.00x" in rows["diloco"]
    # The rounds' lengths, 322 and 162 s, times how far into the last third of the run each is.
    shares = [(math.log(40 / 23.46) / math.log(40 / final) + 2) / 3 for final in (23, 22)]
    assert f"{322 / 162 * shares[0] / shares[1]:.2f}x" in rows["geomesh"]


def test_80_columns_of_plain_text_are_enough(folders, capsys):
    report(folders, None, None, 22.5)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert all(c.isprintable() for line in lines for c in line)


def test_a_target_that_was_not_reached_says_so(folders, capsys):
    report(folders, None, None, 22.5)
    words = capsys.readouterr().out.split()
    assert words.count("not") == words.count("reached") == 1
    assert "Speed-up: over geomesh" in " ".join(words)


def test_a_run_without_an_end_says_so(folders, capsys):
    path = folders[0] / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    report(folders, None, None, None)
    assert "diloco has not ended: its figures are up to round 6." in capsys.readouterr().out


def test_pictures_are_written_beside_each_other(folders, tmp_path, capsys):
    report(folders, tmp_path / "new" / "out", None, None)
    names = sorted(path.name for path in (tmp_path / "new" / "out").iterdir())
    assert names == ["gantt.png", "idle.png", "perplexity.png"]
    assert f"wrote {tmp_path / 'new' / 'out' / 'idle.png'}" in capsys.readouterr().out


def test_times_of_different_clocks_are_not_compared(make_run, tmp_path, capsys):
    folders = [make_run("a"), make_run("b", clock="measured"), make_run("c", wan_seconds=220.0)]
    report(folders, None, None, None)
    text = capsys.readouterr().out
    modelled, measured = text.split("\nRuns: ")[1:]
    assert modelled.startswith("modelled")
    assert measured.startswith("measured")
    assert "2.00x" not in measured  # a run alone has nobody to be faster than
    assert "Speed-up: over c" in modelled
    with pytest.raises(ConfigError, match="2 groups"):
        report(folders, None, tmp_path / "report.json", None)


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"data": {"seq_len": 96}}, 2),
        ({"data": {"seq_len": 128, "seed": 7, "new_field": ""}, "eval": {"sequences": 2}}, 1),
        ({"data": {"seq_len": 128}, "eval": {"first": 256}}, 2),
    ],
)
def test_only_what_was_evaluated_on_the_same_text_is_compared(make_run, changes, groups):
    configs = [{"data": {"seq_len": 128, "seed": 0}}, changes]
    runs = []
    for name, config in zip("ab", configs, strict=True):
        folder = make_run(name)
        (folder / "config.json").write_text(json.dumps(config))
        runs.append(load_run(folder))
    assert len(compare(runs, None)) == groups


def test_false_accounts_are_not_reported(folders):
    path = folders[0] / "metrics.jsonl"
    path.write_text(path.read_text().replace('"wan_seconds": 220.0', '"wan_seconds": 20.0', 1))
    with pytest.raises(ConfigError, match="sum to"):
        report(folders, None, None, None)


def test_nothing_to_report_is_an_error():
    with pytest.raises(ConfigError, match="at least one run folder"):
        report([], None, None, None)
