"""pytest undoes the filter of ser.py for torchvision's announcement that its decoders will go."""

def pytest_configure(config):
    """Called by pytest before it collects the tests."""
    config.addinivalue_line("filterwarnings", "ignore:The image decoding and encoding")
