"""Benchmarks: latency, throughput and acceptance, each against drafting off and prompt lookup in the same run."""
