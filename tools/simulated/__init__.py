"""Training on a virtual clock: how long workers take is drawn, what they compute and what becomes of it is real."""
