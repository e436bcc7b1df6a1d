import importlib
import json
import sys

import pytest

import ser
from paper.experiments import imagenette, sweep
from paper.tests.toys import FLAGS, having, parsed, run_main, run_scripts_here, train_and_val
from test_ser import parametrize, sentence


@parametrize("name", sweep.LISTS)
def test_a_list_has_different_runs_of_the_papers_size(name, capsys):
    run_main(sweep, f"--list {name} --data D --seeds 3 --print --launcher python")
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    trained = {}
    for training in lines[::2]:
        program = importlib.import_module(training.pop(1)) if training[0] == "-m" else ser
        settings = getattr(program, "settings", ser.parse)(training[1:])
        assert (settings.depth, settings.dim) == (12, 384)
        trained[str((program, vars(settings) | {"out": ""}))] = (settings.ratio, settings.group)
        kind, _, own = settings.out.split("/")[-1].removesuffix("-3").partition("-")
        if kind == "layer":     # [CLS] enters after it, or at 0
            assert (settings.cls_layer, settings.equiv_layers) == (int(own) % 12, [int(own)])
        if wanted := {"equimod": (1, 0.2), "augself": (0.5, 0.3)}.get(kind):
            assert program.__name__.endswith(kind) and settings.layer == int(own)
            assert (settings.weight, settings.temperature) == wanted
        assert kind != "CLS" or settings.cls_layer == int(own)
        assert kind != "lambda" or settings.weight == float(own)
        assert kind != "all" or settings.equiv_layers == [*range(1, 13)]
    assert len(trained) == len(lines) / 2 >= 4
    ratios, groups = zip(*trained.values())
    assert name != "r" or ratios == (0.005, 0.02, 0, 0.01)
    assert name != "group" or groups[:3] == (["hflip", "scale"], ["scale"], ["hflip"])


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")     # equimod, which is imported
def test_a_sweep_trains_evaluates_and_continues(tmp_path, monkeypatch, capsys):
    run_scripts_here(monkeypatch)
    of_equimod = sweep.Run("equi", f"--layer 1 {sweep.PLAIN}", 69.51, "-m paper.methods.equimod")
    monkeypatch.setattr(sweep, "SHARED", [sweep.Run("SER", "--ratio .25", 69)])
    monkeypatch.setitem(sweep.LISTS, "r", [of_equimod])
    train_and_val(tmp_path, 3, 1)
    line = f"--list r --data {tmp_path} --out {tmp_path} --workers 0 --seeds 4 5 --base-lr 0.1"
    argv = [line, f"--launcher '{sys.executable} -u'", *FLAGS]
    run_main(sweep, *argv)
    told = capsys.readouterr().out
    assert "| equi | untrained | SER |" in told and " (0.0 ± 0.0) |" in told     # SER minus SER
    assert " 69.51    0 in b2  -m paper.methods.equimod" in told and "69    2 in b2  ser.py" in told
    assert "| blocks read by heads | 3 | 2 | 2 |\n| linear top-1 %, block 3 | " in told
    written = [path.read_text() for path in sorted(tmp_path.glob("*/rows.json"))]
    evaluation = tmp_path / "SER-5/eval.json"
    results = json.loads(evaluation.read_text())
    theirs = results["rows"]
    wanted = sweep.means(theirs, "SER", 5, (1, 3))     # L_equiv's block, and the last
    for row, own in zip(json.loads(written[1]), wanted, strict=True):
        assert own.items() <= row.items()

    # Rows of other weights or images, and of an evaluation by hand, change nothing.
    row = theirs[-1]
    theirs[:0] = [row | {column: "others", "value": 0} for column in ("weights", "images")]
    theirs.append(row | {"settings": row["settings"] | {"val": "elsewhere"}, "value": 0})
    evaluation.write_text(json.dumps(results))
    run_main(sweep, *argv)
    assert "eval_linear.py" not in capsys.readouterr().out     # what is done is not repeated
    assert [path.read_text() for path in sorted(tmp_path.glob("*/rows.json"))] == written

    # Nor does an evaluation of the run before it had ended, which names its start as well.
    results["rows"] = having(theirs, encoder="untrained")
    evaluation.write_text(json.dumps(results))
    run_main(sweep, *argv)
    assert capsys.readouterr().out.count("eval_linear.py") == 1
    monkeypatch.setattr(sweep, "own_rows", lambda *_: [])     # as if the images changed
    assert "changed" in sentence(run_main, sweep, *argv)

    monkeypatch.setitem(sweep.LISTS, "r", [sweep.Run("new", "--ratio .25")])
    assert "base_lr 0.1 (now 0.2)" in sentence(run_main, sweep, *argv, "--base-lr 0.2")
    assert not (tmp_path / "new-4").exists()     # begun runs refuse before another is trained


@parametrize("script, flags, told", [
    (sweep, "--list lambda --weight 0.3", "--weight: the run lambda-0"),
    (sweep, "--list group --seed=1", "--seed"), (sweep, "--list layers --depth 6", "--cls-layer 6"),
    (sweep, "--list lambda --batch-size 256 --launcher x--nproc_per_node=8", "--ratio"),
    (sweep, "--list lambda --batch-size 256 --launcher 'x --nproc-per-node 8'", "--ratio"),
    (imagenette, "--see 2", "--see: the run MoCo-v3"),
    (imagenette, "--ratio 0", "--ratio 0: the run turned-control")])
def test_what_cannot_be_is_said_before_the_first_training(script, flags, told):
    assert told in sentence(parsed, script, "--data D", flags)


def test_rows_are_means_over_evaluations_after_wanted_blocks_and_untrained_ones_are_sers():
    place = {"encoder": "trained", "weights": "w", "images": "i", "set": "val"}
    linear = place | {"classes": 6, "block": 3, "measure": "linear top-1 %"}
    turns = place | {"classes": None, "block": 2, "measure": "rot90 retrieval", "value": 0.5}
    found = [linear | {"value": value} for value in (10, 60, 20)]
    found += [turns, turns | {"block": 5}, turns | {"encoder": "untrained", "value": 0.25}]
    first, trained, untrained = sweep.means(found, "SER", 4, (2, 4))
    wanted = linear | {"run": "SER", "seed": 4, "value": 30, "values": [10, 60, 20]}
    assert first | {"encoder": "trained"} == wanted
    assert having([trained], run="SER", block=2, values=[0.5])
    assert having([untrained], run="untrained", block=2, values=[0.25])
    assert [row["run"] for row in sweep.means(found, "control", 4, (2, 4))] == 2 * ["control"]


def test_the_table_has_means_and_differences_within_a_seed():
    """Differences -1, -1 have no spread. Of several groups of classes the first, of all, counts."""
    rows = []
    for run, seed, value in (("a", 0, 49), ("a", 1, 51), ("b", 1, 52), ("b", 0, 50), ("b", 2, 51)):
        row = dict(run=run, seed=seed, measure="20-NN top-1 %", block=6, value=value)
        rows += [row | ({"read by heads": 4} if run == "a" else {}), row | {"value": 0}]
    assert sweep.table(rows, "b").splitlines()[2:] == [
        "| seeds | 0 1 | 0 1 2 |", "| blocks read by heads | 4 | - |",
        "| 20-NN top-1 %, block 6 | 50.0 ± 1.4 (-1.0 ± 0.0) | 51.0 ± 1.0 (0.0 ± 0.0) |"]
