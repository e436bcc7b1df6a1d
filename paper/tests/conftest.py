"""Tests of paper/ run on the CPU and on one thread, as test_ser.py does when it is imported."""
from test_ser import no_bar_is_left
