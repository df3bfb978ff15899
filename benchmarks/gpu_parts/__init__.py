"""Parts of `gpu.py`: `run` keeps the time, `rows` and `model` make what is computed, the others are its sections."""
