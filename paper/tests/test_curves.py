"""What a picture of logs shows."""
import json
import runpy
import sys

import pytest

from paper.experiments import curves

def write_log(folder, *lines):
    folder.mkdir()
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder)

def step(number, inv, **more):
    return {"step": number, "inv": inv, **more}

def test_a_continued_run_counts_each_step_once(tmp_path):
    """Killed after step 8, continued from 4; step 7 was logged the first time alone."""
    run = write_log(tmp_path / "run", {"seed": 0}, step(4, 1), step(7, 2), step(8, 2),
                    {"seed": 0}, step(5, 3), step(8, 4))
    assert curves.records(run) == {4: step(4, 1), 5: step(5, 3), 8: step(8, 4)}

def test_the_picture_has_both_losses_of_each_run(tmp_path, monkeypatch):
    shown = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda *saved: shown.append(saved))
    moco = write_log(tmp_path / "moco", {"seed": 0}, step(1, 5.0), step(2, 4.0))
    own = write_log(tmp_path / "ser", {"seed": 0}, step(3, 3.0, equiv=7.0))
    monkeypatch.setattr(sys, "argv", ["curves", moco, own, "--out", "new.png"])
    runpy.run_path(curves.__file__, run_name="__main__")
    [(picture, path)] = shown
    assert path == "new.png"
    assert [[(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
            for axes in picture.axes] == [[([1, 2], [5, 4]), ([3], [3])], [([], []), ([3], [7])]]
    assert [text.get_text() for text in picture.legends[0].get_texts()] == [moco, own]
