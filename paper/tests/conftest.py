"""What the tests of several scripts share."""
import functools
import multiprocessing.forkserver

import pytest
from torchvision.utils import save_image

import ser

def pytest_configure(config):
    """Ignore that torchvision's decoders will go, as ser.py does: pytest undoes its filter."""
    config.addinivalue_line("filterwarnings", "ignore:The image decoding and encoding")

@pytest.fixture(scope="session", autouse=True)
def server_of_ranks():
    """The server that test_ser.run_ranks forks ranks from takes seconds to import torch: it begins
    with the first test."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["test_ser"])
    multiprocessing.forkserver.ensure_running()

@pytest.fixture(scope="module")
def drawn_once():
    """The images that runs without --data train on, drawn once for a file of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ser, "draw_images", functools.cache(ser.draw_images))
        yield

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """24 training and 10 validation images of two classes."""
    root = tmp_path_factory.mktemp("data")
    for part, n, seed in (("train", 24, 1), ("val", 10, 2)):
        for i, image in enumerate(ser.draw_images(n, 20, seed)[0]):
            folder = root / part / "ab"[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            save_image(image.float() / 255, folder / f"{i}.png")
    return root
