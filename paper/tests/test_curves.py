"""What a picture of logs shows."""
import json
import runpy
import sys

import pytest

from paper.experiments import curves


def write_log(folder, key, *steps):
    """A log that begins with settings; steps: (number, loss) of each. Returns the folder."""
    folder.mkdir()
    lines = ['{"seed": 0}']
    for number, loss in steps:
        lines.append(json.dumps({"step": number, key: loss}))
    (folder / "log.jsonl").write_text("\n".join(lines))
    return str(folder)


def test_the_picture_has_both_losses_of_each_run(tmp_path, monkeypatch):
    """One was killed after step 8 and continued from 4; it logged step 7 the first time alone."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    shown = []
    monkeypatch.setattr(figure, "savefig", lambda *saved: shown.append(saved))
    moco = write_log(tmp_path / "moco", "inv", (4, 1), (7, 2), (8, 2), (5, 3), (8, 4))
    own = write_log(tmp_path / "ser", "equiv", (3, 7))
    monkeypatch.setattr(sys, "argv", ["curves", moco, own, "--out", "new.png"])
    runpy.run_path(curves.__file__, run_name="__main__")
    picture, path = shown[0]
    assert path == "new.png"
    for axes, wanted in zip(picture.axes, ([[[4, 1], [5, 3], [8, 4]], []], [[], [[3, 7]]])):
        places = [line.get_xydata().tolist() for line in axes.lines]
        assert places == wanted
    assert [text.get_text() for text in picture.legends[0].get_texts()] == [moco, own]
