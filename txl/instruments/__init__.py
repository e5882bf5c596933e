"""What `evaluate.py measure=` can ask of a checkpoint, a file for each question."""
