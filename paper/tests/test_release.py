import os

import pytest
import torch

from paper.experiments import release
from test_ser import same

CLONE = os.environ.get("SER_RELEASE", "")


def table(capsys):
    release.main(release.settings(["--release", CLONE]))
    _, *lines = capsys.readouterr().out.replace(",", "").splitlines()
    return {(name, part): words for name, part, *words in map(str.split, lines)}


def test_lambda_reaches_our_gradients_and_both_lambdas_see_the_same_images(capsys, monkeypatch):
    given = []
    nearly = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.000001])
    monkeypatch.setattr(release, "theirs", lambda *images: given.append(images) or dict(
        encoder=nearly[len(given) - 1], projector=torch.empty(0)))
    parse = release.ser.parse
    small = ["--dim=16", "--heads=2", "--depth=4", "--moco-hidden=16"]
    monkeypatch.setattr(release.ser, "parse", lambda words: parse([*words, *small]))
    found = table(capsys)
    assert same(given[0][:2], given[1][:2])
    assert [weight for *_, weight in given] == [0, 10_000]
    assert found["release", "encoder"] == ["5", "5", "different"]
    assert found["release", "projector"] == "none none equal to the bit".split()
    zero, large, verdict = found["ours", "projector"]
    assert zero == "0" and float(large) == pytest.approx(9680, rel=0.05)     # of these transforms
    assert verdict == found["ours", "encoder"][2] == "different"


@pytest.mark.skipif(not CLONE, reason="SER_RELEASE names no clone of the authors' code")
def test_a_gather_with_gradient_would_bring_it_back(capsys, monkeypatch):
    found = table(capsys)
    zero, large, *verdict = found["release", "encoder"]
    assert zero == large and verdict[0] == "equal"
    assert float(zero) == pytest.approx(33.517, rel=0.01)     # as paper/README says
    assert found["release", "projector"][:2] == ["none", "none"]

    from builder import moco
    monkeypatch.setattr(moco, "concat_all_gather_different_shape", lambda x, _: (x, [len(x)]))
    before, after, verdict = table(capsys)["release", "projector"]
    assert before == "0" and float(after) > 1000 and verdict == "different"
