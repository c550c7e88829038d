"""The training-free methods that `peers.py` compares, each after its paper's formulas, and ours."""
