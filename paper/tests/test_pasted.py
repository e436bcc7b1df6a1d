"""The training that shows README's loss."""
import inspect
import json
import statistics
from pathlib import Path

import pytest
import torch

timm = pytest.importorskip("timm")

import ser
from paper.experiments import pasted
from paper.tests.toys import class_folders


def train(root, out, monkeypatch, weight=0.1):
    """Two epochs of two steps; name -> weight."""
    small = dict(epochs=2, warmup_epochs=1, batch_size=6, base_lr=0.1)
    monkeypatch.setattr(pasted, "SCHEDULE", small)
    words = f"--data {root} --out {root}/{out} --workers 0 --weight {weight}"
    return pasted.train(pasted.settings(words.split())).state_dict()


def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(tmp_path, monkeypatch):
    """Killed when epoch 1 is saved. A training with another weight ends elsewhere."""
    class_folders(tmp_path / "train")
    whole = train(tmp_path, "whole", monkeypatch)
    zero = train(tmp_path, "zero", monkeypatch, weight=0)
    save = ser.save
    saved = []

    def save_and_stop(path, **state):
        save(path, **state)
        saved.append(state["step"])
        if len(saved) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(ser, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "killed", monkeypatch)
    killed = train(tmp_path, "killed", monkeypatch)
    assert saved == [1, 2]
    torch.testing.assert_close(killed, whole, rtol=0, atol=0)
    assert not torch.equal(whole["vit.pos_embed"], zero["vit.pos_embed"])


def test_the_loss_is_the_one_that_readme_prints():
    readme = Path(ser.__file__).with_name("README.md").read_text()
    assert inspect.getsource(pasted.equivariance_loss) in readme


def test_f1_is_two_blocks_of_a_timm_model_without_cls():
    model = pasted.Model()
    size = dict(patch_size=8, embed_dim=128, depth=2, num_heads=4, num_classes=0)
    plain = timm.models.VisionTransformer(64, class_token=False, global_pool="avg", **size)
    places = model.vit.pos_embed[:, 1:]
    plain.load_state_dict(model.vit.state_dict() | {"pos_embed": places}, strict=False)
    torch.nn.init.ones_(model.vit.cls_token)
    images = torch.rand(2, 3, 64, 64)
    expected = plain.forward_intermediates(images, indices=[1], intermediates_only=True)
    torch.testing.assert_close(model.f1(images), expected[0])
    assert model.f1(images[..., :40]).shape == (2, 128, 8, 5)


@pytest.mark.parametrize("readme, title, name, scale", [
    ("README.md", "linear probe, top-1 %", "linear top-1 %", 1),
    ("README.md", "20-NN, top-1 %", "20-NN top-1 %", 1),
    ("README.md", "retrieval of turns, %", "rot90 retrieval", 100),
    ("paper/README.md", "upright images, linear top-1 %", "linear top-1 %", 1),
    ("paper/README.md", "turned images, linear top-1 %", "turned, linear top-1 %", 1),
    ("paper/README.md", "A.2, turns predicted, %", "rotation %", 1),
    ("paper/README.md", "A.2, flips predicted, %", "flip %", 1)])
def test_tables_are_what_the_rows_say(readme, title, name, scale):
    """Means and standard deviations over three seeds of each weight."""
    root = Path(ser.__file__).parent
    rows = json.loads((root / "paper/experiments/pasted.json").read_text())
    text = (root / readme).read_text()
    header = next(line for line in text.splitlines() if "weight of the pasted loss" in line)
    weights = [float(cell) for cell in header.strip("| ").split("|")[1:]]
    assert len(rows) == 3 * len(weights)

    cells = [title]
    for weight in weights:
        values = [scale * row[name] for row in rows if row["weight"] == weight]
        cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")
    assert f"| {' | '.join(cells)} |" in text
