"""Which requests run in the next step, and with how many tokens each. Integers only; no tensor is touched here."""
