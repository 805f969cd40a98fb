"""Ranks: who there is (topology, pure), which groups this process is in (state), how rows are gathered."""
