"""What `train_adapt.py` calls: the plan, lanes, optimizer, checkpoints, processes, statistics, results."""
