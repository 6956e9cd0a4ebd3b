"""The runner of all experiments and its report, with programs that take no time."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table
from timing import eventually

from rdmarpc.experiments import paper
from rdmarpc.experiments.harness.findings import Findings, of_rich
from rdmarpc.experiments.harness.targets import GOALS, number_text, of_samples, of_times, spread, target_text, verdict, verdicts
from rdmarpc.experiments.paper_runs import catalogue, goals, here, programs, report
from rdmarpc.experiments.paper_runs.catalogue import EXPERIMENTS, Experiment, chosen

PROGRAM = """
import json, pathlib, sys, time
arguments = dict(each.split("=", 1) for each in sys.argv[1:])
folder = pathlib.Path(arguments["hydra.run.dir"])
with open(arguments["log"], "a") as log:
    log.write("begun\\n")
print("so far so good", flush=True)
time.sleep(float(arguments.get("sleep", 0)))
while "go" in arguments and not pathlib.Path(arguments["go"]).exists():
    time.sleep(0.02)
if "fail" in arguments:
    raise SystemExit("error: it has no heart")
samples = [{"case": "call", "size": 4, "what": "rdmarpc", "samples": [1.0, 2.0, 30.0]}]
target = {"name": "fast", "measured": 2.0, "relation": "≥", "asked": 3.0, "met": False, "goal": "identity"}
table = {"title": "A table", "columns": ["a", "b|c"], "rows": [["1", "2"]], "note": "A note."}
(folder / "own.json").write_text(json.dumps({"config": {}, "records": samples, "targets": [target], "tables": [table]}))
(folder / "own.png").write_bytes(b"picture")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs experiments of the program above, and returns what results.json holds."""
    (tmp_path / "own.py").write_text(PROGRAM)
    monkeypatch.setattr(here, "why_not", lambda experiment, *rest: "there is no GPU" if experiment.gpu else "")
    monkeypatch.setattr(
        programs, "python", lambda module, arguments: [sys.executable, "-S", str(tmp_path / "own.py"), *arguments]
    )

    def start(experiments: list[Experiment], surroundings: dict[str, Any] | None = None, **job: Any) -> dict[str, Any]:
        monkeypatch.setattr(paper, "chosen", lambda only: experiments)
        folder = tmp_path / "report"
        folder.mkdir(exist_ok=True)
        whole = {"only": None, "quick": False, "minutes": 60, "kept": str(tmp_path / "kept")} | job
        given = here.surroundings() | (surroundings or {})
        entries = list(paper.run_all(whole, given, Console(file=(tmp_path / "said").open("a"))))
        return report.write(folder, entries, given, whole["quick"], False)

    return start


def made(name: str, tmp_path: Path, *overrides: str, **fields: Any) -> Experiment:
    values: dict[str, Any] = {"minutes": 0.1, "quick_minutes": 0.1} | fields
    return Experiment(name, "rdma", "A title", "About it.", overrides=[f"log={tmp_path}/log", *overrides], **values)


def begun(tmp_path: Path) -> int:
    return (tmp_path / "log").read_text().count("begun")


def test_what_is_finished_is_not_run_again(run: Any, tmp_path: Path) -> None:
    experiment = made("own", tmp_path)
    assert [each["again"] for each in run([experiment])["experiments"]] == [False]
    assert [each["again"] for each in run([experiment])["experiments"]] == [True]
    assert begun(tmp_path) == 1
    run([made("own", tmp_path, "another=config")])
    run([experiment], {"commit": "another"})
    run([experiment], {"sources": "changed and not committed"})
    run([experiment], {"machine": here.surroundings()["machine"] | {"packages": {"grpcio": "99"}}})
    assert begun(tmp_path) == 5


def test_the_report_reads_from_top_to_bottom(run: Any, tmp_path: Path) -> None:
    experiments = [
        made("own", tmp_path),
        made("broken", tmp_path, "fail=1"),
        made("gpus", tmp_path, gpu=True),
        made("long", tmp_path, minutes=61),
        made("late", tmp_path, "sleep=60", minutes=0.002),
    ]
    whole = run(experiments)
    states = {each["name"]: (each["state"], each["reason"]) for each in whole["experiments"]}
    assert states["own"] == ("finished", "")
    assert states["broken"] == ("failed", "error: it has no heart")
    assert states["gpus"] == ("left out", "there is no GPU")
    assert states["long"][0] == "left out" and "no time: it takes about 3660 s" in states["long"][1]
    assert states["late"][0] == "failed" and "did not end within" in states["late"][1]
    [sample] = whole["experiments"][0]["samples"]
    assert (sample["n"], sample["median"], round(sample["p10"], 6), round(sample["p90"], 6)) == (3, 2.0, 1.2, 24.4)
    assert json.loads((tmp_path / "report/results.json").read_text()) == whole
    assert {"commit", "machine"} <= set(whole) and "torch" in whole["machine"]["packages"]

    text = (tmp_path / "report/report.md").read_text()
    parts = [
        "1 of 5 experiments; of 1 targets 0 met, 1 missed.",
        "own: missed: fast: 2, asked ≥ 3",
        "* broken: error: it has no heart",
        "* gpus: there is no GPU",
        "### own: A title",
        "![A title](own.png)",
    ]
    assert [text.find(part) for part in parts] == sorted(text.find(part) for part in parts) and all(p in text for p in parts)
    assert "| a | b\\|c |\n|---|---|\n| 1 | 2 |\n\nA note." in text[text.index("### own") :]
    assert (tmp_path / "report/own.png").read_bytes() == b"picture"
    assert not list((tmp_path / "kept").glob(".running-*")), "nothing stays of what failed"


def test_the_goals_are_the_first_section(run: Any, tmp_path: Path) -> None:
    """Each with its verdict, every target behind it and where that is found, and who says nothing about it."""
    whole = run([made("grid", tmp_path), made("a3c", tmp_path, gpu=True), made("dlrm", tmp_path)])
    verdicts_of = {each["goal"]: (each["verdict"], len(each["targets"]), each["absent"]) for each in whole["goals"]}
    assert list(verdicts_of) == list(GOALS)
    assert verdicts_of["identity"] == ("missed", 1, {})
    assert verdicts_of["operations"] == ("not measured", 0, {"grid": GOALS["operations"].silent})
    assert verdicts_of["end_to_end"][2]["a3c"] == "left out: there is no GPU"
    assert verdicts_of["end_to_end"][2]["dlrm"] == GOALS["end_to_end"].silent
    assert verdicts_of["end_to_end"][2]["gpt"] == "not chosen for this report"
    text = (tmp_path / "report/report.md").read_text()
    section = text[text.index("\n## ") : text.index("## The experiments")]
    assert section.startswith("\n## What was to be reached")
    assert "| [grid](#grid-a-title) | fast | 2 | - | ≥ 3 | missed |" in section and "### grid: A title" in text


@pytest.mark.parametrize(
    ("met", "says"),
    [
        ([], "not measured"),
        ([True, True], "met"),
        ([True, False, None], "missed"),
        ([True, None], "open"),
        ([None], "open"),
    ],
)
def test_a_goal_is_met_where_all_of_its_targets_are(met: list[bool | None], says: str) -> None:
    targets = [{"name": "", "measured": 1.0, "relation": "≥", "asked": 1.0, "met": each} for each in met]
    assert goals.whole(targets) == says
    unmeasured = {"name": "", "measured": None, "relation": "≥", "asked": 1.0, "met": None}
    assert goals.whole([*targets, unmeasured]) == {"met": "open"}.get(says, says), "nobody knows of what was not measured"


def test_every_goal_has_its_experiments() -> None:
    assert {name for goal in GOALS.values() for name in goal.experiments} <= {each.name for each in EXPERIMENTS}
    with pytest.raises(KeyError):
        Findings("", "ms").target("one", 1.0, "≥", 1.0, "nosuchgoal")


def test_a_table_of_the_terminal_in_the_common_form() -> None:
    table = Table("case", "rdmarpc\nall", "\na call", title="[b]Title[/b]")
    table.add_row("one", "[red]1 ✗ ≤2[/]", "2")
    table.add_row("", "3", "4")
    assert of_rich(table, " a note\n of lines ") == {
        "title": "Title",
        "columns": ["case", "rdmarpc all", "rdmarpc a call"],
        "rows": [["one", "1 ✗ ≤2", "2"], ["one", "3", "4"]],
        "note": "a note of lines",
    }


def test_what_the_deadline_ends_is_left_out_and_not_failed(run: Any, tmp_path: Path) -> None:
    [entry] = run([made("own", tmp_path, "sleep=60", minutes=0.004)], minutes=0.05)["experiments"]
    assert entry["state"] == "left out" and entry["reason"] == "no time: it had not ended when minutes=0.05 were over"


def started(tmp_path: Path, ignoring_interrupts: bool = False) -> subprocess.Popen[bytes]:
    """A report of two experiments, as a user starts it. The second one waits for the file ``go``."""
    (tmp_path / "own.py").write_text(PROGRAM)
    driver = f"""
import signal, sys
sys.path.insert(0, {str(here.ROOT)!r})
from experiments import paper
from experiments.paper_runs import here, programs
from experiments.paper_runs.catalogue import Experiment
log = "log={tmp_path}/log"
first = Experiment("first", "rdma", "", "", 9, 9, overrides=[log])
second = Experiment("second", "rdma", "", "", 9, 9, overrides=[log, "go={tmp_path}/go"])
paper.chosen = lambda only: [first, second]
here.why_not = lambda *given: ""
machine = {{"cpu": "", "cores": 2, "memory_gib": 1, "gpus": [], "packages": {{}}}}
here.surroundings = lambda: {{"commit": "c", "machine": machine}}
programs.python = lambda module, arguments: [sys.executable, "-S", "{tmp_path}/own.py", *arguments]
sys.argv = ["paper", "kept={tmp_path}/kept", "hydra.run.dir={tmp_path}/report"]
paper.main()
"""
    ignoring = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731  as nohup and some CI systems have it
    with (tmp_path / "said").open("a") as said:
        return subprocess.Popen(
            [sys.executable, "-c", driver],
            stdout=said,
            stderr=said,
            preexec_fn=ignoring if ignoring_interrupts else None,
            cwd=here.ROOT,
        )


def in_the_middle(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Waits until the second experiment has begun."""
    deadline = time.monotonic() + 200
    while not ((tmp_path / "log").exists() and begun(tmp_path) == 2):
        assert time.monotonic() < deadline and running.poll() is None, (tmp_path / "said").read_text()
        time.sleep(0.02)


def states(tmp_path: Path) -> list[tuple[str, str, str, bool]]:
    found = json.loads((tmp_path / "report/results.json").read_text())["experiments"]
    return [(each["name"], each["state"], each["reason"], each["again"]) for each in found]


def test_an_interruption_ends_the_program_and_the_next_run_goes_on(tmp_path: Path) -> None:
    """As a user sees it: Ctrl-C in the middle, a report of what there is, and no process left; then the same command again."""
    running = started(tmp_path, ignoring_interrupts=True)
    in_the_middle(running, tmp_path)
    running.send_signal(signal.SIGINT)
    assert running.wait(200) == 130, (tmp_path / "said").read_text()
    assert "the same command goes on from here" in (tmp_path / "said").read_text()
    assert "**Not complete" in (tmp_path / "report/report.md").read_text()
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "kept").iterdir()) == ["first"]
    eventually(lambda: _started_by(str(tmp_path)), [])
    assert states(tmp_path) == [
        ("first", "finished", "", False),
        ("second", "left out", "interrupted before it had finished", False),
    ]
    goes_on(tmp_path)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL in the middle: nothing can say goodbye. The experiment that ran ends, too, and the same command goes on."""
    running = started(tmp_path)
    in_the_middle(running, tmp_path)
    running.kill()
    assert running.wait(200) == -signal.SIGKILL
    eventually(lambda: _started_by(str(tmp_path)), [])
    assert states(tmp_path) == [("first", "finished", "", False)], "the report is written after each experiment"
    assert "**Not complete" in (tmp_path / "report/report.md").read_text()
    goes_on(tmp_path)


def goes_on(tmp_path: Path) -> None:
    """The same command once more: what had finished is not run again, and nothing is left of what had not."""
    (tmp_path / "go").touch()
    running = started(tmp_path)
    assert running.wait(200) == 0, (tmp_path / "said").read_text()
    assert states(tmp_path) == [("first", "finished", "", True), ("second", "finished", "", False)]
    assert begun(tmp_path) == 3
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "kept").iterdir()) == ["first", "second"]
    assert "**Not complete" not in (tmp_path / "report/report.md").read_text()


def _started_by(text: str) -> list[str]:
    """Processes with this in their arguments, besides this one: one that was killed may still be on its way out."""
    found = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if text in _text(path)]
    return [pid for pid in found if pid != str(os.getpid())]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_one_report_at_a_time_is_written_into_a_folder(tmp_path: Path) -> None:
    with paper.alone(tmp_path) as folder:
        assert folder == tmp_path
        with pytest.raises(SystemExit, match="another run writes its report"), paper.alone(tmp_path):
            pass
    with paper.alone(tmp_path):
        assert not list(tmp_path.iterdir())


def test_what_a_killed_launcher_left_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    for name in (f"{platform.node()}-{gone.pid}-abc", f"{platform.node()}-{os.getpid()}-abc", "elsewhere-1-abc"):
        (tmp_path / f".running-{name}").mkdir()
    programs.remove_abandoned(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f".running-{platform.node()}-{os.getpid()}-abc", ".running-elsewhere-1-abc"}


def test_names_choose_papers_and_experiments() -> None:
    assert chosen(None) == list(EXPERIMENTS)
    assert {each.paper for each in EXPERIMENTS} == set(catalogue.PAPERS)
    assert all(each.paper == "rdma" for each in chosen("rdma"))
    assert [each.name for each in chosen(["train", "grid"])] == ["grid", "train"]


@pytest.mark.parametrize(
    ("override", "says"),
    [("only=nips", "only=nips is none of mlsys"), ("minutes=0", "minutes=0"), ("kept=/dev/null/x", "kept=/dev/null/x")],
)
def test_bad_config_is_a_clear_error(override: str, says: str, tmp_path: Path) -> None:
    with initialize_config_dir(paper.CONF, version_base="1.3"), pytest.raises(SystemExit, match=re.escape(says)):
        paper.checked(compose("paper", [f"kept={tmp_path}", override]))


@pytest.mark.parametrize("experiment", [each for each in EXPERIMENTS if Path(paper.CONF, f"{each.name}.yaml").exists()])
def test_the_catalogue_knows_its_experiments(experiment: Experiment) -> None:
    """Their configs take what a full and a quick run override."""
    assert here.why_not(experiment, "rdmarpc.experiments", True) in ("", "there is no GPU") or experiment.packages
    with initialize_config_dir(paper.CONF, version_base="1.3"):
        for quick in (False, True):
            compose(experiment.name, experiment.arguments(quick))


def test_why_an_experiment_cannot_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = "rdmarpc.experiments"
    assert here.why_not(made("train", tmp_path), package, False) == ""
    assert "does not have it" in here.why_not(made("nothing", tmp_path), package, False)
    assert "nosuchpackage is missing" in here.why_not(made("train", tmp_path, packages=["nosuchpackage"]), package, False)
    assert "it needs 1e+09 GiB" in here.why_not(made("train", tmp_path, gib=1e9), package, False)
    monkeypatch.setattr(here, "gpus", list)
    assert here.why_not(made("train", tmp_path, gpu=True), package, True) == "there is no GPU"


def test_findings() -> None:
    found = Findings("title", "ms")
    for value in range(1, 12):
        found.add("call", 4, "rdmarpc", float(value))
    found.target("one", found.median("call", 4, "rdmarpc"), "≥", 6)
    found.target("two", None, "≤", 1)
    found.left_out("a", "b")
    found.left_out("a", "b")
    plain = found.as_dict({"rounds": 1})
    assert [each["met"] for each in plain["targets"]] == [True, None] and len(plain["left_out"]) == 1
    assert spread([float(v) for v in range(1, 12)]) == {"n": 11, "median": 6.0, "p10": 2.0, "p90": 10.0}


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        ([4.0, 5.0, 6.0], [1.0, 2.0, 2.1], "met"),
        ([4.0, 5.0, 9.0], [1.0, 2.0, 4.5], "open"),  # 2.5 by the medians, but 4.2 by 4 is less than 2
        ([1.0, 4.0, 5.0], [1.0, 3.5, 4.0], "open"),
        ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], "missed"),
        ([3.0, 3.0], [1.0, 1.0], "met"),
        ([3.0], [1.0, 1.0], "open"),
        ([], [1.0], "not measured"),
    ],
)
def test_a_target_is_met_or_missed_beyond_the_spread(theirs: list[float], ours: list[float], says: str) -> None:
    found = Findings("", "ms")
    for name, values in (("theirs", theirs), ("ours", ours)):
        for value in values:
            found.add("call", 4, name, value)
    found.target_times("faster", ("call", 4, "theirs"), ("call", 4, "ours"), "≥", 2)
    assert verdict(found.targets[0]) == says and target_text(found.targets[0]).startswith(f"{says}: faster")
    assert verdicts(found.targets * 2).endswith(f"2 {says}") or says == "met"


@pytest.mark.parametrize(
    ("values", "says"),
    [([1.0, 1.5, 2.0], "met"), ([1.0, 1.5, 9.0], "open"), ([3.0, 4.0], "missed"), ([1.0], "open"), ([], "not measured")],
)
def test_a_target_of_one_quantity_goes_by_its_spread(values: list[float], says: str) -> None:
    assert verdict(of_samples("µs", values, "≤", 2)) == says


def test_a_difference_of_times_may_be_nothing() -> None:
    found = of_times("above", [1.0, 2.0], [-1.0, 3.0], "≤", 0.1)
    assert (verdict(found), target_text(found)) == ("missed", "missed: above: 1.5 (0.423 to inf), asked ≤ 0.1")


@pytest.mark.parametrize(
    ("value", "says"), [(9421.3, "9,421"), (50000.0, "50,000"), (0.3651, "0.365"), (1.0, "1"), (36.52, "36.5")]
)
def test_numbers_are_plain(value: float, says: str) -> None:
    assert number_text(value) == says


def test_all_of_it_fits_into_its_time() -> None:
    """As the estimates have it: what has no time left is left out."""
    cpu = [each for each in EXPERIMENTS if not each.gpu]
    assert sum(each.takes(False) for each in cpu) <= 60 and sum(each.takes(True) for each in cpu) <= 5


def test_what_a_program_leaves_is_waited_for_and_its_processor_time_counts(tmp_path: Path) -> None:
    """A process that outlives its parent, as the server that forks workers does."""
    program = f"""
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1].partition("=")[2])
mine = pathlib.Path({str(tmp_path)!r}) / "left"
if not os.fork():
    while time.process_time() < 0.3:
        pass
    mine.with_name("new").write_text(str(os.getpid()))
    mine.with_name("new").rename(mine)
    time.sleep(600)
while not mine.exists():
    time.sleep(0.01)
"""
    record = programs.run([sys.executable, "-S", "-c", program], tmp_path / "kept/own", 100.0, lambda line: None)
    assert record["processor_s"] >= 0.3
    assert not Path("/proc", (tmp_path / "left").read_text()).exists()
