"""What paper/evaluations/transformations.py promises."""
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import eval_linear
import ser
from paper.evaluations import transformations
from paper.evaluations.transformations import TASKS, probe, version_features
from paper.tests.toys import call, class_folders, toy_checkpoint, values
from test_ser import close, seeded


def test_features_are_the_mean_patch_tokens_of_each_version(tmp_path):
    """Against rho: counter-clockwise turns, then the flip; [CLS] has no part."""
    encoder = ser.load_encoder(toy_checkpoint(tmp_path))
    images = torch.randint(256, (70, 3, 16, 16), generator=seeded(1), dtype=torch.uint8)
    found = version_features(encoder, TensorDataset(images, images), [1, 3], 0)
    assert found.shape == (70, 5, 2, 16)
    for version in range(5):
        g = ser.Geometry(torch.full((70,), version == 4), torch.full((70,), version % 4), (4, 4))
        with torch.no_grad():
            maps = encoder(ser.rho(g, ser.normalise(images / 255), 4), [1, 3]).maps
        wanted = torch.stack([maps[1].mean((2, 3)), maps[3].mean((2, 3))], dim=1)
        close(found[:, version], wanted, 1e-4)


def labelled(n, seed, strength):
    """Features (n, 5, 8), alike in all versions but for dimension v, which version v raises."""
    noise = torch.randn(n, 1, 8, generator=seeded(seed))
    return noise + strength * torch.eye(5, 8)


def test_what_carries_the_version_is_read_and_what_does_not_is_at_chance():
    """On test images, where swapped versions make all answers wrong; units do not matter."""
    for versions in TASKS.values():
        train = 1000 * labelled(50, 1, 20.0) + 5000
        test = 1000 * labelled(40, 2, 20.0) + 5000
        assert probe(train, test, versions, 0) == 100
        test[:, versions[-2:]] = test[:, versions[:-3:-1]]
        assert probe(train, test, versions, 0) == 100 - 200 / len(versions)
        blind = probe(labelled(50, 1, 0.0), labelled(40, 2, 0.0), versions, 0)
        assert blind == pytest.approx(100 / len(versions))


def test_a_pair_tells_what_one_image_does_not():
    """Version 4 is version 0 + .5, of any version 0: only the difference tells them apart."""
    train, test = [torch.randn(n, 5, 4, generator=seeded(n)) for n in (300, 100)]
    train[:, 4] = train[:, 0] + 0.5
    test[:, 4] = test[:, 0] + 0.5
    assert probe(train, test, [0, 4], 0) > 95


def test_a_probe_trains_for_ten_epochs_at_garridos_rate(monkeypatch):
    rates = []
    step = torch.optim.Adam.step

    def counted(self):
        rates.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(torch.optim.Adam, "step", counted)
    probe(labelled(100, 1, 1.0), labelled(2, 2, 1.0), [0, 4], 0)     # 200 pairs are one batch
    assert rates == [1e-3] * 10


def test_the_command_measures_each_layer_of_other_images_than_it_trains_on(tmp_path, monkeypatch):
    wanted = []
    for split, n in (("train", 16), ("val", 8)):
        class_folders(tmp_path / split, per_class=3, size=18, seed=n)
        data = eval_linear.class_folder(tmp_path / split, eval_linear.eval_transform(16))
        images = [data[place][0] for place in torch.linspace(0, 17, n).long()]
        wanted.append(TensorDataset(torch.stack(images), torch.zeros(n)))
    monkeypatch.setattr(transformations, "probe",
                        lambda train, test, *_: (train.sum() + 1000 * test.sum()).item())

    path = Path(toy_checkpoint(tmp_path))
    call(transformations, "--data", tmp_path, "--checkpoint", path, "--workers", "0",
         "--images", "16")
    rows = path.with_name("transformations.json")
    for layer in (1, 3):     # of the paper's, those that the encoder has
        train, test = [version_features(ser.load_encoder(path), images, [layer], 0).sum()
                       for images in wanted]
        found = values(rows, encoder="trained", block=layer)
        assert [*found.values()] == [pytest.approx((train + 1000 * test).item(), 1e-4)] * 2
    assert values(rows, encoder="untrained") != found
