"""The engine: the step loop, and the offline and asynchronous front ends over it."""
