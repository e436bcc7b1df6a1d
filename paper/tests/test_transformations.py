from itertools import product

import torch
from pytest import approx

import eval_linear
import ser
from paper.evaluations import transformations
from paper.evaluations.transformations import TASKS, probe, version_features
from paper.tests.toys import call, images_in, parsed, toy_checkpoint, train_and_val, values
from test_ser import close, noise, parametrize, pixels, toy


def test_features_are_the_mean_patch_tokens_of_each_version(tmp_path):
    encoder = ser.load_encoder(toy_checkpoint(tmp_path))
    images = pixels(70, 3, 16, 16)
    data = [(image, "label") for image in images]
    found = version_features(encoder, data, [1, 3], 0)
    for v in range(5):     # 0 to 3 turns, then a flip
        g = ser.Geometry(torch.full((70,), v == 4), torch.full((70,), v % 4), (4, 4))
        maps = encoder(ser.rho(g, ser.normalise(images / 255), 4), [1, 3]).maps
        for place, layer in enumerate([1, 3]):
            close(found[:, v, place], maps[layer].mean((2, 3)).detach(), 1e-4)


def labelled(n, seed, strength):
    return noise(n, 1, 8, seed=seed) + strength * torch.eye(5, 8)


@parametrize("task", TASKS)
def test_what_carries_the_version_is_read_and_what_does_not_is_at_chance(task):
    """Images differ more than their versions: only the difference of a pair tells, in any unit."""
    versions = TASKS[task]
    unit = torch.logspace(-2, 4, 8)
    unit[7] = 0     # which cannot be standardised
    train = unit * (labelled(300, 1, 1.0) + 5)
    test = unit * (labelled(100, 2, 1.0) + 5)
    if task == "flip":     # turns are of other images
        train[:, 1:4] = train[:, 1:4].flip(0)
        test[:, 1:4] = test[:, 1:4].flip(0)
    assert probe(train, torch.cat([test, 1e4 * test[:1]]), versions, 0) > 96

    test[:, versions] = test[:, versions[::-1]]
    assert probe(train, test, versions, 0) <= 50

    assert probe(labelled(50, 1, 0), labelled(40, 2, 0), versions, 0) == approx(100 / len(versions))


def test_a_probe_trains_for_ten_epochs_at_garridos_rate(monkeypatch):
    rates, states = [], set()

    def step(adam):
        rates.append(adam.param_groups[0]["lr"])
        states.add(tuple(torch.get_rng_state().tolist()))     # each epoch draws anew

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    probe(labelled(100, 1, 1.0), labelled(2, 2, 1.0), [0, 4], 7)     # 200 pairs are one batch
    assert rates == [1e-3] * len(states) and len(states) == 10 and torch.initial_seed() == 7
    assert parsed(transformations, "--data D --checkpoint C").images == 20000


@parametrize("flags, paper, layers", [
    ("", [1, 3], [1, 3]), ("--layers 2 9", [1, 3], [2]), ("", [1, 2], [1, 2])])
def test_each_layer_is_measured_on_images(flags, paper, layers, tmp_path, monkeypatch, capsys):
    train_and_val(tmp_path, 3, 3, size=18)
    sets = {split: images_in(tmp_path / split) for split in ("train", "val")}
    spread = [eval_linear.spread(sets["train"], 16), eval_linear.spread(sets["val"], 8)]

    def sums(train, test, versions, seed):
        return seed + (train[:, versions].sum() + 1000 * test[:, versions].sum()).item()

    monkeypatch.setattr(transformations, "probe", sums)
    monkeypatch.setattr(transformations, "PAPER_LAYERS", paper)
    path = toy_checkpoint(tmp_path)
    call(transformations, f"--data {tmp_path} --checkpoint {path} --images 16 --seed 70000", flags)
    told = capsys.readouterr().out
    assert "chance 25\n" in told and ("78.68" in told) == (layers == [1, 3])     # flips, by SER
    results = tmp_path / "transformations.json"
    encoders = {"trained": ser.load_encoder(path), "untrained": ser.seed_and_make_encoder(toy())}
    for (name, encoder), layer in product(encoders.items(), layers):
        features = [version_features(encoder, images, [layer], 0) for images in spread]
        place = {"encoder": name, "weights": eval_linear.fingerprint(encoder), "block": layer,
                 "images": eval_linear.describe_sets(sets)}
        wanted = {"rotation %": sums(*features, [0, 1, 2, 3], 70000),
                  "flip %": sums(*features, [0, 4], 70000)}
        found = values(results, **place)
        assert found == approx(wanted, 1e-4) and f"{found['flip %']:8.2f}" in told
        assert list(values(results, **place, classes=2)) == ["flip %"]
