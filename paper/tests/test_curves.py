"""What paper.experiments.curves reads of a log, and what it shows of it.

    python -m pytest -q paper/tests/test_curves.py
"""
import json

import pytest

from paper.experiments import curves

def write_log(folder, *lines):
    """A run's folder with these lines: records, or text as it is."""
    folder.mkdir(exist_ok=True)
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "log.jsonl").write_text("\n".join(text))
    return folder

def step(number, **values):
    return {"step": number, **values}

def test_a_resumed_and_killed_log_counts_each_step_once_and_in_order(tmp_path):
    first = [{"start": 0}, step(4, inv=1), step(7, inv=2), step(8, inv=2)]
    resumed = [{"start": 4}, step(6, inv=3), step(8, inv=4)]
    damage = ["[1]", '{"step": "9"}', '{"step": 10, "in']
    run = write_log(tmp_path / "run", *first, *resumed, *damage)
    expected = {4: first[1], 6: resumed[1], 8: resumed[2]}     # 7 was done again
    assert curves.records(run) == expected
    assert list(curves.records(run / "log.jsonl")) == [4, 6, 8]

def test_a_shorter_run_that_was_begun_anew_keeps_nothing_of_the_longer_one(tmp_path):
    log = [{"start": 0}, step(1, inv=1), step(9, inv=1), {"start": 0}, step(1, inv=2)]
    assert curves.records(write_log(tmp_path / "run", *log)) == {1: log[-1]}

def test_the_picture_has_losses_with_their_chance_retrieval_and_rates(
        tmp_path, capsys, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(14, 6))
    moco = write_log(
        tmp_path / "moco",
        {"config": {}},
        step(1, inv=5, inv_chance=6.1, lr=0.1),
        step(2, inv=4, inv_chance=6.1, lr=0.2))
    later = dict(patch_top1=0.5, images_per_s=100)
    own = write_log(
        tmp_path / "ser",
        step(1, inv=5, inv_chance=6.1, equiv=7, equiv_chance=8),
        step(3, inv=4, inv_chance=6.1, equiv=6, equiv_chance=9, **later))
    monkeypatch.setattr(curves, "empty_figure", lambda *size: figure)
    out = tmp_path / "curves.png"
    assert curves.main([str(moco), str(own), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size < 100_000
    shown = {}
    for axes in figure.axes:
        lines = [(line.get_linestyle(), list(line.get_xdata()), list(line.get_ydata()))
                 for line in axes.lines if len(line.get_xdata()) > 0]
        if lines:
            shown[axes.get_title()] = lines
    assert shown == {
        "L_inv": [
            ("-", [1, 2], [5, 4]),
            (":", [1, 2], [6.1, 6.1]),
            ("-", [1, 3], [5, 4]),
            (":", [1, 3], [6.1, 6.1])],
        "L_equiv": [("-", [1, 3], [7, 6]), (":", [1, 3], [8, 9])],
        "patch retrieval, share": [("-", [3], [0.5])],
        "learning rate": [("-", [1, 2], [0.1, 0.2])],
        "images/s": [("-", [3], [100])]}
    assert [line.get_label() for line in figure.axes[0].lines[::2]] == [str(moco), str(own)]

@pytest.mark.parametrize("argv, words", [
    ([], "RUN"),
    (["{dir}/none"], "none/log.jsonl"),
    (["{dir}/none", "--colour", "1"], "--colour"),
    (["{dir}/half"], "no record"),
    (["{dir}/other"], "none of the values"),
    (["{dir}/good", "--out", "{dir}/no/such.png"], "such.png")])
def test_a_mistake_is_one_line_and_exit_code_2(argv, words, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "none").mkdir()
    write_log(tmp_path / "half", '{"step": 10, "in')
    write_log(tmp_path / "other", step(1, epoch=3))
    write_log(tmp_path / "good", step(1, inv=3))
    assert curves.main([word.format(dir=tmp_path) for word in argv]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1

def test_a_missing_matplotlib_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)     # its import fails
    assert curves.main([str(write_log(tmp_path / "run", step(1, inv=3)))]) == 2
    assert "pip install -r paper/requirements.txt" in capsys.readouterr().err
