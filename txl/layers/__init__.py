"""The parts of the model, a file for each question; every option of a choice stands in its own file beside the others."""
