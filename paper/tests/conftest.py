from test_ser import no_bar_is_left     # whose import also hides GPUs and sets one thread
