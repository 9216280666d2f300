"""The trainer and its parts: optimizer, schedule, EMA, distribution, checkpoints, callbacks."""
