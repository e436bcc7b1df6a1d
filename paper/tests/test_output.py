"""No evaluation replaces a checkpoint or another program's result; each says so before it works.

    python -m pytest -q paper/tests/test_output.py
"""
import json
from pathlib import Path

import pytest

import ser
from paper.evaluations import (coco, correspondence, finetune, robustness, transformations, tsne)
from paper.evaluations.output import check_out
from paper.tests.toys import toy_checkpoint

PROGRAMS = {     # program -> the flags without which it would refuse at once
    coco: ["--data", "coco"], correspondence: ["--data", "photographs"], finetune: [],
    robustness: ["--c", "c"], transformations: ["--data", "images"],
    tsne: ["--data", "images", "--random-init"]}
names = [module.__name__.rsplit(".")[-1] for module in PROGRAMS]

@pytest.fixture
def checkpoint(tmp_path):
    return toy_checkpoint(tmp_path, moco_hidden=16)

@pytest.mark.parametrize("module", PROGRAMS, ids=names)
@pytest.mark.parametrize("place", ["last.pt", "nowhere/result{}", "eval.json"])
def test_a_wrong_out_is_one_line_before_any_work(module, place, checkpoint, tmp_path, capsys):
    if module in (correspondence, tsne):
        pytest.importorskip("matplotlib")
    if module is tsne:
        pytest.importorskip("sklearn")
    ending = ".png" if module in (correspondence, tsne) else ".json"
    (tmp_path / "eval.json").write_text('{"linear": 1}')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    out = str(tmp_path / place.format(ending))
    if place == "eval.json" and ending == ".png":
        out = out.replace(".json", ".png")     # its numbers would go to eval.json
    assert module.main(["--checkpoint", str(checkpoint), *PROGRAMS[module], "--out", out]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "--out" in said and "Error" not in said
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before

@pytest.mark.parametrize("module", [correspondence, transformations, tsne])
def test_a_result_of_another_checkpoint_is_not_replaced(module, checkpoint, capsys):
    name = module.__name__.rsplit(".")[-1]
    path = Path(checkpoint).with_name(f"{name}.json")
    text = json.dumps({"program": module.Settings.program, "sha256": "other"})
    path.write_text(text)
    if module is not transformations:
        pytest.importorskip("matplotlib")
    if module is tsne:
        pytest.importorskip("sklearn")
    assert module.main(["--checkpoint", str(checkpoint), *PROGRAMS[module]]) == 2
    assert "another checkpoint: remove it" in capsys.readouterr().err and path.read_text() == text

def test_a_result_of_the_same_program_may_be_replaced(tmp_path):
    path = tmp_path / "a.json"
    check_out(path, ".json", "one")
    path.write_text(json.dumps({"program": "one"}))
    check_out(path, ".json", "one")
    path.write_text(json.dumps({"program": "one", "sha256": ["a", "b"]}))
    check_out(path, ".json", "one", ["a", "b"])
    settings = {"data": "x", "layers": [1, 2], "workers": 8}
    path.write_text(json.dumps({"program": "one", "sha256": "a", "settings": settings}))
    check_out(path, ".json", "one", "a", {"data": "x", "layers": (1, 2), "workers": 0})
    with pytest.raises(ser.UserError, match=r"another layers \(\[1, 2\], now \[1\]\): remove it"):
        check_out(path, ".json", "one", "a", {"data": "x", "layers": (1,), "workers": 8})
    for text in (json.dumps({"program": "two"}), "[1]", "", "{"):
        path.write_text(text)
        with pytest.raises(ser.UserError, match="is no result of one"):
            check_out(path, ".json", "one")
