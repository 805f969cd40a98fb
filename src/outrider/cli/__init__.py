"""Commands: one module per verb over the offline and asynchronous engines."""
