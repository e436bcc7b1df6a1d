"""What a picture of logs shows."""
import json
import runpy
import sys

import pytest

from paper.experiments import curves


def write_log(folder, *steps, key="inv"):
    """A log of (step, loss), and at its start settings."""
    folder.mkdir()
    lines = [json.dumps({"step": step, key: loss}) for step, loss in steps]
    (folder / "log.jsonl").write_text("\n".join(['{"seed": 0}', *lines]))
    return str(folder)


def test_the_picture_has_both_losses_of_each_run(tmp_path, monkeypatch):
    """One was killed after step 8 and continued from 4; it logged step 7 the first time alone."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    shown = []
    monkeypatch.setattr(figure, "savefig", lambda *saved: shown.append(saved))
    moco = write_log(tmp_path / "moco", (4, 1), (7, 2), (8, 2), (5, 3), (8, 4))
    own = write_log(tmp_path / "ser", (3, 7), key="equiv")
    monkeypatch.setattr(sys, "argv", ["curves", moco, own, "--out", "new.png"])
    runpy.run_path(curves.__file__, run_name="__main__")
    [(picture, path)] = shown
    assert path == "new.png"
    wanted = ([[[4, 1], [5, 3], [8, 4]], []], [[], [[3, 7]]])
    for axes, lines in zip(picture.axes, wanted, strict=True):
        assert [line.get_xydata().tolist() for line in axes.lines] == lines
    assert [text.get_text() for text in picture.legends[0].get_texts()] == [moco, own]
