"""Click-through-rate models and what `train_ctr.py` needs around them: settings, data, the plan."""
