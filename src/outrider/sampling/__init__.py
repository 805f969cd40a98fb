"""From logits to tokens: processing, drawing, proposing, accepting, stopping.

Every random number is a pure function of (seed, position, role, round), so what a request draws does not depend on
its batch mates, on the device or on how often a rank repeats the computation.
"""
