"""Paged KV bookkeeping: which block holds which tokens, for whom. Integers only; no tensor is touched here."""
