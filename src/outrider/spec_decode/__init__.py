"""Proposers (DSpark, prompt lookup, none), acceptance counters and the self-test at load."""
