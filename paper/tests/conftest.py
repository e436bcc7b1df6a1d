"""Tests of paper/ run on the CPU and on one thread, as test_ser.py does when it is imported."""
import test_ser
