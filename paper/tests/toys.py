"""What the tests of paper/ share: toy checkpoints, folders of images, calls of scripts."""
import contextlib
import runpy
import shlex
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import eval_linear
import ser
from test_ser import HERE, pixels, write_checkpoint, write_image

CLASSES = [f"n{label:02}" for label in range(6)]
FLAGS = ("--image-size 16 --patch-size 4 --dim 16 --depth 3 --heads 2 --moco-hidden 16 --epochs 1 "
         "--batch-size 8 --warmup-epochs 0 --cls-layer 1 --equiv-layers 1").split()     # quick


def toy_checkpoint(folder, **settings):
    """An encoder with random weights, of which blocks 2 and 3 have a [CLS] to read: 32 features."""
    folder.mkdir(parents=True, exist_ok=True)
    return str(write_checkpoint(folder, **settings))


def split(*words):
    """The words of a command line, some of which may be given together, as a shell splits them."""
    return shlex.split(" ".join(map(str, words)))


def parsed(module, *words):
    """The settings of a script's command line."""
    return module.settings(split(*words))


def run_main(experiment, *words):
    """Run sweep.py or imagenette.py as by its command line."""
    experiment.main(parsed(experiment, *words))


def call(evaluation, *words):
    """Run an evaluation as by its command line, without workers."""
    evaluation.main(evaluation.settings, evaluation.evaluate, split(*words, "--workers 0"))


def saved_pictures(monkeypatch):
    """A list that gets the figure, path and metadata of each picture, in place of its file."""
    saved = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda *x, metadata: saved.append((*x, metadata)))
    return saved


@contextlib.contextmanager
def stopped_after_3(monkeypatch):
    """Within it, the training must end with an error when it would record its fourth step."""
    with monkeypatch.context() as stop, pytest.raises(ZeroDivisionError):
        stop.setattr(ser, "log_and_check", lambda log, bar, step, *_: 1 // (4 - step))
        yield


def run_scripts_here(monkeypatch):
    """The command lines of sweep.py and imagenette.py run in this process."""
    def run(command, check):
        assert check and command[0] == sys.executable     # one that failed is not evaluated
        script, *flags = [word for word in command[1:] if word not in ("-m", "-u")]
        monkeypatch.setattr(sys, "argv", [script, *flags])
        runpy.run_module(script.removesuffix(".py"), run_name="__main__", alter_sys=True)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(HERE)     # where the scripts are


def become_rank(monkeypatch, rank):
    """This process takes itself for one of two ranks; a sum over them is ten times its own."""
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (2, rank))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda own: own.mul_(10))


def having(rows, **keys):
    """The rows with these entries."""
    return [row for row in rows if keys.items() <= row.items()]


def values(path, **keys):
    """measure -> value, of the rows of a results file with these keys. All name their weights."""
    rows = eval_linear.read_results(path)["rows"]
    for row in rows:
        encoder = ser.load_encoder(row["settings"]["checkpoint"])
        assert row["weights"] == eval_linear.fingerprint(encoder) or row["encoder"] == "untrained"
    return {row["measure"]: row["value"] for row in having(rows, **keys)}


def table_of(text):
    """The title of a line -> the title of a column -> the cell, of a table in Markdown."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line[:2] == "| "]
    _, *columns = lines[0]
    return {title: dict(zip(columns, cells, strict=True)) for title, *cells in lines[1:]}


def readme_table(readme, header):
    """The table whose first line begins with `header`."""
    text = (HERE / readme).read_text()
    return table_of(text[text.index(header):].split("\n\n")[0])


def class_folders(root, per_class=2, size=20, seed=5, classes=CLASSES):
    """Images of 4 x 4 random colours, which tell an encoder the place; their classes take turns."""
    colours = pixels(len(classes) * per_class, 3, 4, 4, seed=seed)
    for number, image in enumerate(F.interpolate(colours, (size, size))):
        write_image(root / classes[number % len(classes)] / f"{number:03}.png", image)
    return str(root)


def train_and_val(root, n_train, n_val, size=20, seed=6):
    """root/train and root/val with so many images of each class."""
    class_folders(root / "train", n_train, size)
    class_folders(root / "val", n_val, size, seed)


def images_in(folder):
    """The images of class folders, at 16 pixels."""
    return eval_linear.ClassFolder(folder, eval_linear.eval_transform(16))
