"""The main job without its processes: settings, folder, log lines, progress, failures, report."""

import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from examples.mimo.data.digits import DigitsDataset
from examples.mimo.digits import __main__ as job
from examples.mimo.digits.launch import LaunchError
from examples.mimo.digits.log_lines import (
    Event,
    ExactMatch,
    History,
    Loaded,
    Saved,
    Step,
    Validation,
    parse_line,
)
from examples.mimo.digits.progress import Progress
from examples.mimo.digits.settings import DigitsError, RunFolder, Settings, train_command

pytestmark = pytest.mark.tier0

STEP = (
    " [2030-01-02 03:04:05.678901] iteration      210/    1000 | consumed samples:        20160 | "
    "elapsed time per iteration (ms): 125.0 | learning rate: 1.930000E-03 | global batch size:    "
    "96 | lm loss: 1.964000E-01 | loss scale: 1.0 | grad norm: 0.864 | number of skipped "
    "iterations:   0 | number of nan iterations:   0 |"
)
MATCH = " exact match at iteration 200 | all: 0.768889 | digit: 0.673333 | above four: 0.780000 |"
VALID = " validation loss at iteration 200 | lm loss value: 1.529000E-01 | lm loss PPL: 1.2E+00 | "
LOADED = "  successfully loaded checkpoint from runs/x [ t 1/1, p 1/1 ] at iteration 500"
SAVED = "  successfully saved checkpoint from iteration     500 to runs/x [ t 1/2 ]"


def test_log_lines() -> None:
    """Each kind of line that the job reads, between others, says what it should."""
    assert [parse_line(line) for line in (STEP, MATCH, VALID, LOADED, SAVED)] == [
        Step(iteration=210, loss=0.1964, learning_rate=1.93e-3, milliseconds=125.0),
        ExactMatch(iteration=200, shares={"all": 0.768889, "digit": 0.673333, "above four": 0.78}),
        Validation(iteration=200, loss=0.1529),
        Loaded(iteration=500),
        Saved(iteration=500),
    ]


@pytest.mark.parametrize(
    'line', ["", "  exit_interval ......... 400", STEP.replace("lm loss: 1.964000E-01 |", "")]
)
def test_other_lines_say_nothing(line: str) -> None:
    """Arguments and lines without a loss, as when every iteration was skipped, are passed over."""
    assert parse_line(line) is None


def test_the_answer_check_writes_what_the_parser_reads() -> None:
    """The line of the check goes through the parser and comes back."""
    from examples.mimo.training.hetero.exact_match import log_line

    shares = {"all": 0.95, "digit": 0.9, "above four": 1.0}
    assert parse_line(log_line(30, shares)) == ExactMatch(iteration=30, shares=shares)


def test_history_of_two_launches(tmp_path: Path) -> None:
    """What a later launch says about an iteration replaces what an earlier one said."""
    first, second = tmp_path / "1.log", tmp_path / "2.log"
    first.write_text(f"{STEP}\n{SAVED}\nnoise\n{MATCH}\n{VALID}")
    second.write_text(LOADED + "\n" + STEP.replace("1.964000E-01", "2.0E-01"))
    history = History.from_logs([first, second])
    assert history.steps[210].loss == 0.2
    assert (history.saved, history.resumed) == (500, [500])
    assert list(history.validations) == list(history.matches) == [200]


@pytest.mark.parametrize(
    ('wrong', 'sentence'),
    [
        ({"iterations": 5}, "--iterations 5 must be even"),
        ({"iterations": 0}, "--iterations 0 must be even"),
        ({"iterations": 8, "evaluations": 3}, "--evaluations 3 must divide --iterations 8"),
        ({"evaluations": 0}, "--evaluations 0 must divide"),
    ],
)
def test_wrong_settings(wrong: dict[str, int], sentence: str) -> None:
    """A number that cannot work is named with its flag."""
    with pytest.raises(DigitsError, match=sentence):
        Settings(**wrong)


def flags(settings: Settings, tmp_path: Path) -> dict[str, str]:
    """Flags of the training command by name; the last one counts."""
    command = train_command(settings, RunFolder(tmp_path))
    return {word: after for word, after in pairwise(command) if word.startswith("--")}


def test_command_stops_half_way_and_evaluates_at_the_end(tmp_path: Path) -> None:
    """One command serves both launches: it stops at the half, and the end is an evaluation."""
    found = flags(Settings(iterations=800, evaluations=5), tmp_path)
    assert found["--exit-interval"] == "400"
    assert found["--eval-interval"] == found["--save-interval"] == "160"
    assert found["--save"] == found["--load"] == str(tmp_path / "checkpoints")
    assert found["--lr-decay-style"] == "cosine"
    assert "--use-distributed-optimizer" in found


def test_evaluation_covers_the_held_out_samples_once(tmp_path: Path) -> None:
    """Evaluation batches are as many samples as are held out."""
    from examples.mimo.data.digits import QUESTIONS, load_images

    found = flags(Settings(), tmp_path)
    samples = int(found["--eval-iters"]) * int(found["--eval-global-batch-size"])
    assert samples == len(load_images()["held-out"].digits) * len(QUESTIONS)


def test_a_new_run_keeps_the_one_before(tmp_path: Path) -> None:
    """The last run is kept under another name, the one before that goes, settings come back."""
    folder = RunFolder(tmp_path / "digits")
    for iterations in (2, 4, 6):
        moved = folder.start(Settings(iterations=iterations, evaluations=1))
    assert moved == tmp_path / "digits.previous"
    assert RunFolder(moved).load().iterations == 4
    assert folder.load() == Settings(iterations=6, evaluations=1)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize('occupied', ["digits", "digits.previous"])
def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, occupied: str) -> None:
    """Somebody's files are never moved or removed."""
    folder = RunFolder(tmp_path / "digits")
    folder.start(Settings())
    other = tmp_path / occupied
    other.mkdir(exist_ok=True)
    (other / "settings.json").unlink(missing_ok=True)
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(DigitsError, match=r"is not a folder of an earlier run"):
        folder.start(Settings())
    assert (other / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (["--iterations", "7"], "--iterations 7 must be even"),
        (["--resume"], "--resume: there is no run in"),
        (["--resume", "--seed", "1"], "--seed does not go with --resume"),
        (["--module", "language:tp=3"], "rank 3 of 4 hosts no module"),
    ],
)
def test_usage_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """A usage error is one sentence, exit code 2, and starts nothing."""
    assert job.main(["--output", str(tmp_path / "run"), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert sentence in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_plain_progress_is_lines() -> None:
    """Without a terminal there is a line now and then, and one for each evaluation."""
    stream = io.StringIO()
    with Progress(100, 0, stream) as progress:
        for iteration in range(1, 41):
            progress.show(Step(iteration=iteration, loss=1.0, learning_rate=1e-3, milliseconds=100))
        progress.show(ExactMatch(iteration=40, shares={"all": 0.9, "digit": 0.8}))
        progress.show(Validation(iteration=40, loss=0.5))
        progress.show(Loaded(iteration=40))
    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if "it/s" in line]) == 8
    assert "  iteration 36/100: loss 1.0000, learning rate 1.00e-03, 10.0 it/s" in lines
    assert "  iteration 40/100: validation loss 0.5000, exact match 0.900 (digit 0.800)" in lines
    assert lines[-1] == "  resumed from the checkpoint of iteration 40"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def test_terminal_progress_is_a_bar() -> None:
    """On a terminal one bar moves, with loss and exact match; evaluations stay above it."""
    stream = Terminal()
    with Progress(100, 50, stream) as progress:
        progress.show(ExactMatch(iteration=60, shares={"all": 0.9, "digit": 0.8}))
        progress.show(Validation(iteration=60, loss=0.5))
        progress.show(Step(iteration=70, loss=0.25, learning_rate=1e-3, milliseconds=100))
        progress._bar.refresh()
    text = stream.getvalue()
    assert "exact match 0.900" in text
    assert "70/100" in text
    assert "loss=0.2500" in text
    assert "iteration 60/100: validation loss 0.5000" in text


def a_history() -> History:
    """History of a short run with a restart."""
    history = History()
    for iteration in range(1, 9):
        history.add(
            Step(iteration=iteration, loss=3 / iteration, learning_rate=1e-3, milliseconds=9)
        )
    for iteration in (4, 8):
        history.add(Validation(iteration=iteration, loss=2 / iteration))
        shares = {"all": iteration / 10, "digit": 0.5, "even": 0.9, "above four": 0.7}
        history.add(ExactMatch(iteration=iteration, shares=shares))
    history.add(Loaded(iteration=4))
    return history


def some_answers(dataset: DigitsDataset) -> list[str]:
    """Right answers, two spoilt."""
    answers = [dataset.truth(index) for index in range(len(dataset))]
    answers[31], answers[62] = "maybe", ""
    return answers


def test_report_files(tmp_path: Path) -> None:
    """Both pictures are real ones, and the results can be read by programs."""
    from PIL import Image

    from examples.mimo.digits import report

    dataset = report.held_out_dataset()
    report.draw_curves(tmp_path / "loss.png", a_history())
    report.draw_examples(tmp_path / "examples.png", dataset, some_answers(dataset))
    for name in ("loss.png", "examples.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 500
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 50
    report.write_results(tmp_path / "results.json", a_history(), {"iterations": 8})
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["exact_match"]["8"]["all"] == 0.8
    assert results["resumed_from"] == [4]


def test_wrong_answers_are_shown() -> None:
    """The table has one of each digit and then the images with a wrong answer."""
    from examples.mimo.digits import report

    dataset = report.held_out_dataset()
    cards = report.make_cards(dataset, some_answers(dataset))
    shown = report.choose_cards(cards, dataset.images.digits)
    assert [card.right for card in cards].count(False) == 2
    assert [card.right for card in shown].count(False) == 2
    assert len({card.lines[0][2] for card in shown[:10]}) == 10
    with pytest.raises(ValueError, match=r"10 answers to 900 questions"):
        report.make_cards(dataset, ["no"] * 10)


def test_answers_of_another_iteration_are_refused(tmp_path: Path) -> None:
    """A table is never drawn from answers of an earlier evaluation."""
    from examples.mimo.digits import report

    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"iteration": 4, "answers": ["no"]}))
    assert report.read_answers(path, 4) == ["no"]
    with pytest.raises(ValueError, match=r"iteration 4, not of 8"):
        report.read_answers(path, 8)


@pytest.mark.parametrize(
    ('require', 'code'), [([], 0), (["--require", "0.9"], 0), (["--require", "0.91"], 1)]
)
def test_require_decides_the_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    require: list[str],
    code: int,
) -> None:
    """A run that reaches less than is required fails, with both numbers."""

    def reach_the_end(settings: Settings, *others: object) -> None:
        """Stand in for the training processes."""
        others[-1].add(Saved(iteration=settings.iterations))

    monkeypatch.setattr(job, "_launch_once", reach_the_end)
    monkeypatch.setattr(job, "_report", lambda *_: 0.9)
    assert job.main(["--output", str(tmp_path / "run"), *require]) == code
    assert ("exact match 0.900 is below --require 0.91" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize(
    ('events', 'sentence'),
    [
        ([Loaded(iteration=2), Saved(iteration=3)], "left after iteration 3, not after 4"),
        ([Saved(iteration=4)], "did not resume from the checkpoint of iteration 2"),
        ([Loaded(iteration=0), Saved(iteration=4)], "did not resume from the checkpoint"),
    ],
)
def test_a_launch_that_does_not_do_its_half_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event], sentence: str
) -> None:
    """The job notices when processes leave too early, or start anew where they should resume."""

    def say_so(_command: list[str], _log: Path, show: Callable[[Event], None]) -> None:
        """Stand in for the training processes."""
        for event in events:
            show(event)

    monkeypatch.setattr(job, "launch", say_so)
    settings = Settings(iterations=4, evaluations=1)
    folder = RunFolder(tmp_path)
    with pytest.raises(LaunchError, match=sentence):
        job._launch_once(settings, folder, [], History(saved=2))


def test_resume_command_names_the_folder() -> None:
    """What the job prints after Ctrl-C is a command that works for this folder."""
    parser = job._parser()
    assert job._resume_command(parser.parse_args([])) == 'make train ARGS="--resume"'
    other = job._resume_command(parser.parse_args(["--output", "runs/x"]))
    assert other == 'make train ARGS="--resume --output runs/x"'


def test_paths_are_short_below_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are shown as the user would type them."""
    monkeypatch.chdir(tmp_path)
    assert job._short(tmp_path / "runs" / "a") == str(Path("runs") / "a")
    assert job._short(Path("/elsewhere")) == "/elsewhere"
