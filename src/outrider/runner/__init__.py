"""Builds the batches of a step from its plan and runs the passes."""
