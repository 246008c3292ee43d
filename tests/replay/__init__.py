"""A second, independent computation of a chaos job's training, from the facts in its trace. Numpy only; no gba_hvd."""
