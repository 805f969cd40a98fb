"""Counts, the step plan and the forward batches: what a pass runs on, agreed by all ranks before any of them runs."""
